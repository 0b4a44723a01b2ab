#!/usr/bin/env bash
# Make benchmarks/.elephas: Elephas 7.3.0 in an environment of its own, since it cannot share one with sparkkeras
# (it wants pyspark 4.0 at most, TensorFlow below 2.20 and NumPy 1).
#
#   benchmarks/elephas_env.sh [PYTHON]      PYTHON is 3.11 (default: python3.11); Java 17 is needed to run it
#
# Run it again at any time: the environment is made anew.
set -euo pipefail

python=${1:-python3.11}
environment=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/.elephas

"$python" -m venv --clear "$environment"
"$environment/bin/python" -m pip install --quiet \
    elephas==7.3.0 \
    h5py==3.11.0 \
    keras==3.15.1 \
    numpy==1.26.4 \
    pyspark==4.0.0 \
    scikit-learn==1.5.2 \
    scipy==1.13.1 \
    tensorflow==2.19.1
TF_CPP_MIN_LOG_LEVEL=3 "$environment/bin/python" -c 'import elephas.spark_model' 2>/dev/null
echo "made $environment; try: $environment/bin/python $(dirname "${BASH_SOURCE[0]}")/elephas_bench.py --rows 1000"
