#!/usr/bin/env bash
# Pack a Python environment for workers whose machines have none, with the versions that the active environment has:
#
#     bash recipes/pack.sh environment.tar.gz [--without-python] [PACKAGE ...]
#
# Without names of packages, it packs what workers and drivers need with the backend of KERAS_BACKEND (default: tensorflow).
# sparkkeras is always in it, for drivers in the cluster. The archive has the Python itself in it, so that machines of the same
# architecture with the same or a later glibc need none. That takes a Python that can be moved, as those of uv, conda and
# pyenv can; not that of the operating system. With --without-python the archive is a virtual environment: the same Python
# then has to be at the same path of all machines.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

[ $# != 0 ] || fail "the name of the archive is missing: bash $0 environment.tar.gz"
archive=$1
shift
case $archive in
*.tar.gz | *.tgz) ;;
*) fail "$archive: Spark knows an archive by its name, which has to end in .tar.gz or .tgz" ;;
esac
with_python=yes
if [ "${1:-}" = --without-python ]; then
    with_python=''
    shift
fi
if [ $# = 0 ]; then
    set -- keras "${KERAS_BACKEND:-tensorflow}" flask hyperopt optuna numpy pandas pyarrow cryptography google-crc32c
fi

python=${PYTHON:-python3}
base=$("$python" -c 'import sys; print(sys.base_prefix)')
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
requirements=$("$python" - "$@" <<'END'
import sys
from importlib.metadata import PackageNotFoundError, version

for name in sys.argv[1:]:
    try:
        print(f"{name}=={version(name)}")
    except PackageNotFoundError:
        sys.exit(f"error: {name} is not installed in {sys.executable}. Install there what your driver needs first.")
END
)

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
environment=$folder/environment
if [ -n "$with_python" ]; then
    case $base in
    /usr | /usr/local) fail "the Python in $base cannot be moved. Make the environment with one of uv (uv venv" \
        "--managed-python), conda or pyenv, or pass --without-python, if all machines have this Python." ;;
    esac
    mkdir "$environment"
    (cd "$base" && tar -cf - --exclude='lib/python*/site-packages/*' --exclude='lib/python*/test' --exclude='*.a' \
        --exclude=__pycache__ --exclude=EXTERNALLY-MANAGED bin/python* lib) | tar -C "$environment" -xf -
else
    "$python" -m venv --without-pip "$environment"
fi

install() {
    if command -v uv >/dev/null; then
        uv pip install --quiet --python "$environment/bin/python$version" "$@"
    else
        "$python" -m pip --quiet --python "$environment/bin/python$version" install "$@"
    fi
}
# shellcheck disable=SC2086 # one requirement a word
install $requirements
install --no-deps "$root"

find "$environment" -name __pycache__ -prune -exec rm -rf {} +
tar -C "$environment" -cf - . | gzip -1 >"$archive"
printf '%s: Python %s with sparkkeras\n%s\n' "$archive" "$version" "$requirements" >&2
