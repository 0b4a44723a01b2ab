#!/usr/bin/env bash
# Train on a cluster that runs, with the driver in the cluster:
#
#     bash recipes/dataproc/submit.sh NAME REGION BUCKET environment.tar.gz [arguments of train.py]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
usage="usage: submit.sh NAME REGION BUCKET environment.tar.gz [arguments of train.py]"
cluster=${1:?$usage} region=${2:?$usage} bucket=${3:?$usage} archive=${4:?$usage}
shift 4

gcloud storage cp "$archive" "gs://$bucket/environment.tar.gz"
settings=$(grep -v -e '^#' -e '^$' "$here/job.properties" | sed "s|BUCKET|$bucket|" | paste -s -d , -)
exec gcloud dataproc jobs submit pyspark "$here/../train.py" --cluster="$cluster" --region="$region" \
    --properties="$settings" -- "$@"
