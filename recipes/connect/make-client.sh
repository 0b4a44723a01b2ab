#!/usr/bin/env bash
# Make a small environment for a client of Spark Connect, with what sparkkeras needs there and nothing else:
#
#     bash recipes/connect/make-client.sh FOLDER 'pyspark[connect]==4.3.0' keras==3.15.1 jax==0.10.2
#
# Give the versions of the server's workers. PYTHON names the Python, which has the same minor version as that of the workers.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${1:?usage: make-client.sh FOLDER PACKAGE==VERSION...}
shift

"${PYTHON:-python3}" -m venv "$folder"
install() {
    if command -v uv >/dev/null; then
        uv pip install --quiet --python "$folder/bin/python3" "$@"
    else
        "$folder/bin/python3" -m pip --quiet install "$@"
    fi
}
install "$@" 'pandas<3' cryptography fsspec
install --no-deps "$root"
