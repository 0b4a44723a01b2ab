#!/usr/bin/env bash
# Run a Spark Connect server on a machine of the cluster, in the foreground:
#
#     bash recipes/connect/start-server.sh spark://host:7077 [environment.tar.gz]
#
# The master can also be yarn or k8s://. With an archive of pack.sh, all clients use its Python. Without one, the workers have a
# Python with Keras (PYSPARK_PYTHON), or each client sends its own: train.py --archive.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
master=${1:?usage: start-server.sh spark://host:7077 [environment.tar.gz]} archive=${2:-}

export SPARK_HOME=${SPARK_HOME:-$(python3 -c 'import pyspark; print(pyspark.__path__[0])')} # of the pip package
archives=()
if [ -n "$archive" ]; then
    archives=(--archives "$archive#environment")
    # A worker of Python runs in the folder of its client's session, one below the folder in which the archive is unpacked.
    export PYSPARK_PYTHON=../environment/bin/python3
fi
exec bash "$SPARK_HOME/sbin/start-connect-server.sh" --wait --master "$master" \
    --properties-file "${PROPERTIES:-$here/spark-defaults.conf}" ${archives[@]+"${archives[@]}"}
