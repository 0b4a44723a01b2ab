#!/usr/bin/env bash
# Runs on each node of the cluster before Spark starts. The wheel comes without its dependencies: one of them is PySpark, which would
# replace that of Databricks.
set -euo pipefail
volume=/Volumes/CATALOG/SCHEMA/VOLUME # of the wheel

/databricks/python/bin/pip install 'keras>=3.15.1,<4' jax cryptography flask google-crc32c h5py hyperopt 'optuna>=5'
/databricks/python/bin/pip install --no-deps "$volume"/sparkkeras-*.whl
