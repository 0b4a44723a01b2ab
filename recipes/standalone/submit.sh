#!/usr/bin/env bash
# Train on a standalone cluster, from this machine (client mode), with a packed Python on the workers:
#
#     bash recipes/standalone/submit.sh spark://host:7077 environment.tar.gz [arguments of train.py]
#
# This machine has sparkkeras installed (PYTHON names its Python), and the workers can connect to it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
usage="usage: submit.sh spark://host:7077 environment.tar.gz [arguments of train.py]"
master=${1:?$usage} archive=${2:?$usage}
shift 2

export PYSPARK_DRIVER_PYTHON=${PYTHON:-python3}
export PYSPARK_PYTHON=./environment/bin/python3 # where the executors unpack the archive
exec spark-submit --master "$master" --deploy-mode client --archives "$archive#environment" \
    --properties-file "${PROPERTIES:-$here/spark-defaults.conf}" "$here/../train.py" "$@"
