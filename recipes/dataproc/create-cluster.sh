#!/usr/bin/env bash
# Make a cluster with two workers: bash recipes/dataproc/create-cluster.sh NAME REGION
set -euo pipefail

exec gcloud dataproc clusters create "${1:?usage: create-cluster.sh NAME REGION}" --region="${2:?usage: create-cluster.sh NAME REGION}" --image-version="${IMAGE:-3.0-debian13}" \
    --num-workers=2 --worker-machine-type=n2-standard-4 --num-worker-local-ssds=1 \
    --properties=spark:spark.dynamicAllocation.enabled=false
