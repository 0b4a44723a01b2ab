#!/usr/bin/env bash
# Train on YARN with the driver in the cluster (cluster mode), and a packed Python for driver and executors:
#
#     bash recipes/yarn/submit.sh environment.tar.gz [arguments of train.py]
#
# HADOOP_CONF_DIR names the cluster. An archive on HDFS (hdfs:///user/me/environment.tar.gz) is not uploaded each time.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
archive=${1:?usage: submit.sh environment.tar.gz [arguments of train.py]}
shift

unset PYSPARK_DRIVER_PYTHON PYSPARK_PYTHON # of this machine
exec spark-submit --master yarn --deploy-mode cluster --archives "$archive#environment" \
    --properties-file "${PROPERTIES:-$here/spark-defaults.conf}" "$here/../train.py" "$@"
