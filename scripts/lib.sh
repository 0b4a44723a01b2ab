# What the scripts beside this file share. To be sourced by bash; call `prepare EXTRA`, or
# `prepare_python EXTRA` for what needs no Java.
#
# It leaves behind:
#   ROOT                                   the repository
#   PYTHON                                 the python of the environment that the package is installed in
#   JAVA_HOME                              a Java that Spark 4 runs on
#   PYSPARK_PYTHON, PYSPARK_DRIVER_PYTHON  $PYTHON, so that workers run it whichever python3 comes first on PATH
#
# An active virtual environment is used as it is. Without one, .venv is made from the PYTHON that was given
# (PYTHON=/usr/bin/python3.12 bash scripts/test), or from the first fitting one on PATH.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

prepare_python() {
    find_environment
    install_package "$1"
}

prepare() {
    prepare_python "$1"
    find_java || install_java
    export JAVA_HOME
    export PYSPARK_PYTHON=$PYTHON PYSPARK_DRIVER_PYTHON=$PYTHON
    unset SPARK_HOME                                   # another Spark's: the one in the environment is meant
    export SPARK_LOCAL_IP=${SPARK_LOCAL_IP:-127.0.0.1} # whatever this machine's name resolves to
}

say() {
    printf '%s\n' "$*" >&2
}

fail() {
    say "error: $*"
    exit 1
}

# --- Python ---------------------------------------------------------------------------------------------------------

# Set PYTHON to the python of the active virtual environment, or of .venv, which is made if need be.
find_environment() {
    local active
    active=$(active_environment)
    if [ -n "$active" ]; then
        PYTHON=$active
        python_fits "$PYTHON" || fail "the active virtual environment runs $("$PYTHON" --version 2>&1) ($PYTHON)," \
            "and Python 3.11 or later is needed. Leave it (deactivate), or activate one with a later Python."
        return
    fi
    local base=${PYTHON:-}
    PYTHON=$ROOT/.venv/bin/python
    if ! python_fits "$PYTHON" || ! in_environment "$PYTHON"; then
        make_environment "${base:-$(find_python)}"
    fi
}

# The python of the virtual environment that we are in: one that is activated, or whose python3 is first on PATH.
active_environment() {
    local candidate
    for candidate in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "$(command -v python3)" "$(command -v python)"; do
        if [ -n "$candidate" ] && in_environment "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
}

in_environment() {
    "$1" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' 2>/dev/null
}

# python_fits PYTHON [LAST]: whether it is 3.11 or later, and no later than 3.LAST.
python_fits() {
    "$1" -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, ${2:-99}))" 2>/dev/null
}

# The best python to make an environment of: one that TensorFlow has wheels for and that can make it, else what there is.
find_python() {
    local name names='python3 python python3.13 python3.12 python3.11'
    for name in $names; do
        if python_fits "$name" 13 && "$name" -c 'import venv, ensurepip' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    for name in $names python3.14 python3.15; do
        if python_fits "$name"; then
            command -v "$name"
            return
        fi
    done
}

# make_environment PYTHON: make .venv of it.
make_environment() {
    local base=$1
    [ -n "$base" ] || fail "there is no Python 3.11 or later on PATH. Install one (https://www.python.org/downloads/)," \
        "or name it: PYTHON=/path/to/python3.12 bash $0"
    python_fits "$base" || fail "PYTHON=$base does not run, or is $("$base" --version 2>&1 | tail -n 1):" \
        "Python 3.11 or later is needed."
    if ! "$base" -c 'import venv, ensurepip' 2>/dev/null; then
        local package
        package=$("$base" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        if have apt-get; then
            install_system_package apt-get "$package" || true
        fi
        "$base" -c 'import venv, ensurepip' 2>/dev/null || fail "$base cannot make a virtual environment: its modules" \
            "venv and ensurepip are missing. On Debian and Ubuntu: sudo apt-get install $package. Or make and activate" \
            "an environment in another way (uv venv, virtualenv, conda), and run this again."
    fi
    say "Making .venv with $("$base" --version 2>&1) ($base)"
    "$base" -m venv --clear "$ROOT/.venv" || fail "$base -m venv could not make $ROOT/.venv; see above."
}

# install_package EXTRA: install the package with this extra, unless that was done and nothing changed since.
install_package() {
    local prefix stamp extra
    prefix=$("$PYTHON" -c 'import sys; print(sys.prefix)')
    stamp=$( (
        printf '%s\n' "$ROOT"
        cat "$ROOT/pyproject.toml"
        grep '^__version__' "$ROOT/sparkkeras/__init__.py"
    ) | cksum)
    for extra in "$1" dev; do # dev has the others in it
        if [ "$(cat "$prefix/.sparkkeras-$extra" 2>/dev/null)" = "$stamp" ] && is_installed sparkkeras; then
            return
        fi
    done
    say "Installing sparkkeras[$1] into $prefix (the first time takes some minutes)"
    pip_install --editable "${ROOT}[$1]" || fail "pip could not install sparkkeras[$1]; see above. If it found no fitting" \
        "tensorflow: there may be none for $("$PYTHON" --version 2>&1) on $(uname -sm) yet. Python 3.12 is a safe" \
        "choice (PYTHON=/path/to/python3.12 bash $0, outside any virtual environment)."
    printf '%s\n' "$stamp" >"$prefix/.sparkkeras-$1"
}

# Install PyTorch, which `dev` does not have because its builds with CUDA are gigabytes. A PyTorch that is there is used as it
# is. For a build without CUDA: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu bash $0
install_torch() {
    if ! is_installed torch; then
        say "Installing PyTorch"
        pip_install "torch==2.13.*" || fail "pip could not install PyTorch, which the core tests run on as well; see above."
    fi
}

is_installed() {
    "$PYTHON" -c "import importlib.metadata; importlib.metadata.distribution('$1')" 2>/dev/null
}

pip_install() {
    if "$PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m ensurepip >/dev/null 2>&1; then
        set -- "$PYTHON" -m pip --disable-pip-version-check install "$@"
    elif have uv; then
        set -- uv pip install --python "$PYTHON" "$@"
    else
        say "$PYTHON has no pip: install it there."
        return 1
    fi
    if [ -t 2 ]; then # a person watches: show how far it is
        "$@" >&2
    else
        "$@" --quiet >&2
    fi
}

# --- Java -----------------------------------------------------------------------------------------------------------

# Set JAVA_HOME to a Java of 17 or later: the one it has, if that is good; else java on PATH, then the usual places.
find_java() {
    local home
    if java_fits "${JAVA_HOME:-}"; then
        return 0
    fi
    while IFS= read -r home; do
        if java_fits "$home"; then
            [ -z "${JAVA_HOME:-}" ] || say "JAVA_HOME=$JAVA_HOME is no Java that Spark 4 runs on (17 or later): using $home"
            JAVA_HOME=$home
            return 0
        fi
    done <<<"$(java_homes)"
    return 1
}

# Where a Java may be, likely ones first. 17 and 21, which Spark 4 is tested with, come before others.
java_homes() {
    local version home
    if have java; then # its settings tell the home behind links and shims
        java -XshowSettings:properties -version 2>&1 | sed -n 's/^ *java\.home = //p'
    fi
    for version in 17 21 ''; do
        if [ -x /usr/libexec/java_home ]; then
            /usr/libexec/java_home -v "${version:-17+}" 2>/dev/null
        fi
        for home in {/usr/lib/jvm,/usr/lib64/jvm,/usr/java,/opt/java,/opt}/*"$version"* \
            /Library/Java/JavaVirtualMachines/*"$version"*/Contents/Home \
            {/opt/homebrew,/usr/local,/home/linuxbrew/.linuxbrew}/opt/openjdk*"$version"*/libexec{/openjdk.jdk/Contents/Home,} \
            "${HOME:-}"/{.jdk,.jre,.jdks,.sdkman/candidates/java}/*"$version"*{,/Contents/Home}; do
            [ ! -x "$home/bin/java" ] || printf '%s\n' "$home"
        done
    done
}

# java_fits HOME: whether its Java is 17 or later and has the module that Spark asks for, which cut-down ones lack.
java_fits() {
    local major
    [ -n "$1" ] && [ -x "$1/bin/java" ] || return 1
    major=$("$1/bin/java" -version 2>&1 | sed -n 's/.* version "\([0-9][0-9]*\).*/\1/p' | head -n 1)
    [ "${major:-0}" -ge 17 ] && "$1/bin/java" --add-modules jdk.incubator.vector -version >/dev/null 2>&1
}

# Install a Java with the system's package manager, where this user may.
install_java() {
    local manager package
    manager=$(package_manager)
    for package in $(java_packages "$manager"); do
        if install_system_package "$manager" "$package" && find_java; then
            return
        fi
    done
    fail "Spark needs Java 17 or later. There is none in JAVA_HOME, on PATH or in the usual places, and none could be" \
        "installed (that takes root, or sudo without a password). Do one of these, then run this again:$(java_advice "$manager")
  in your own folder:  $PYTHON -m pip install install-jdk && $PYTHON -c 'import jdk; print(jdk.install(\"17\"))'
  with conda:          conda install -c conda-forge openjdk=17
  by hand:             unpack one from https://adoptium.net/temurin/releases/?version=17, export JAVA_HOME=/its/folder"
}

# The packages that may hold a Java, the best first.
java_packages() {
    case $1 in
    apt-get) echo openjdk-17-jre-headless openjdk-21-jre-headless default-jre-headless ;;
    dnf | yum) echo java-17-openjdk-headless java-21-openjdk-headless java-17-amazon-corretto-headless ;;
    zypper) echo java-17-openjdk-headless java-21-openjdk-headless ;;
    apk) echo openjdk17-jre-headless openjdk21-jre-headless ;;
    pacman) echo jre17-openjdk-headless jre21-openjdk-headless ;;
    brew) echo openjdk@17 openjdk@21 ;;
    esac
}

# What a person who may do so would type, on a line of its own.
java_advice() {
    local command
    command=$(install_command "$1" "$(java_packages "$1" | cut -d ' ' -f 1)")
    case $1 in
    '') ;;
    brew) printf '\n  with Homebrew:       %s' "$command" ;;
    *) printf '\n  as root:             %s' "$command" ;;
    esac
}

# --- The system -----------------------------------------------------------------------------------------------------

have() {
    command -v "$1" >/dev/null 2>&1
}

package_manager() {
    local manager
    for manager in apt-get dnf yum zypper apk pacman brew; do
        if have "$manager"; then
            echo "$manager"
            return
        fi
    done
}

install_command() {
    case $1 in
    apt-get) echo "apt-get install -y --no-install-recommends $2" ;;
    dnf | yum) echo "$1 install -y $2" ;;
    zypper) echo "zypper --non-interactive install $2" ;;
    apk) echo "apk add $2" ;;
    pacman) echo "pacman -Sy --noconfirm $2" ;;
    brew) echo "brew install $2" ;;
    esac
}

# install_system_package MANAGER PACKAGE: as root, by sudo if it asks for no password, or fail.
install_system_package() {
    local output as_root='env DEBIAN_FRONTEND=noninteractive'
    if [ "$1" != brew ] && [ "$(id -u)" != 0 ]; then
        have sudo && sudo -n true 2>/dev/null || return 1
        as_root="sudo -n $as_root"
    fi
    say "Installing $2 with $1"
    if [ "$1" = apt-get ] && [ -z "${LISTS_ARE_NEW:-}" ]; then
        $as_root apt-get update -qq >&2 || true # old lists may do
        LISTS_ARE_NEW=yes
    fi
    # shellcheck disable=SC2046 # words are meant to be split
    if ! output=$($as_root $(install_command "$1" "$2") 2>&1); then
        say "$output"
        return 1
    fi
}
