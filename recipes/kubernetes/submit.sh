#!/usr/bin/env bash
# Train on Kubernetes with the driver in a pod of its own (cluster mode):
#
#     kubectl apply --filename recipes/kubernetes/rbac.yaml --filename recipes/kubernetes/network-policy.yaml
#     bash recipes/kubernetes/submit.sh k8s://https://api.example.org:6443 [arguments of train.py]
#
# The image of recipes/docker has the program, Spark and Python in it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
master=${1:?usage: submit.sh k8s://https://api.example.org:6443 [arguments of train.py]}
shift

exec spark-submit --master "$master" --deploy-mode cluster --name sparkkeras \
    --properties-file "${PROPERTIES:-$here/spark-defaults.conf}" local:///opt/app/train.py "$@"
