#!/usr/bin/env bash
# Upload the program and the environment, start a cluster on EC2, and train in a step of it:
#
#     bash recipes/emr/submit.sh BUCKET environment.tar.gz SUBNET
#
# The cluster ends with its step.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
usage="usage: submit.sh BUCKET environment.tar.gz SUBNET"
bucket=${1:?$usage} archive=${2:?$usage} subnet=${3:?$usage}

aws s3 cp "$archive" "s3://$bucket/environment.tar.gz"
aws s3 cp "$here/../train.py" "s3://$bucket/train.py"
steps=$(sed "s|BUCKET|$bucket|" "$here/steps.json")
aws emr create-cluster --name sparkkeras --release-label "${RELEASE:-emr-spark-8.1.0}" --applications Name=Spark \
    --instance-type m5d.xlarge --instance-count 3 --use-default-roles --ec2-attributes "SubnetId=$subnet" \
    --log-uri "s3://$bucket/logs/" --configurations "file://$here/configurations.json" --steps "$steps" --auto-terminate
