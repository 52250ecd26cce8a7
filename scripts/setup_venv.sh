# Sourced by the other scripts: makes .venv and installs cospec into it when it is out of date.
# Installs nothing, and needs no network, while pyproject.toml and constraints-cpu.txt are unchanged.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

ensure_venv() {
    local stamp=.venv/cospec-installed wanted
    wanted=$(cat pyproject.toml constraints-cpu.txt | cksum)
    if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
        return
    fi
    if [[ ! -x .venv/bin/python ]]; then
        "${PYTHON:-python3}" -m venv .venv
    fi
    echo "installing into .venv (once; about 2 minutes, 3 GB)"
    install_torch
    .venv/bin/pip install -qq -c constraints-cpu.txt -e '.[rl,dev]'
    echo "$wanted" >"$stamp"
}

# torch first and alone, so that a machine without a GPU does not pull gigabytes of CUDA libraries.
install_torch() {
    local version
    version=$(sed -n 's/^torch==//p' constraints-cpu.txt)
    if .venv/bin/python -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$version')" 2>/dev/null; then
        return
    fi
    # The CPU build has a version of its own; not every package index carries it.
    if [[ $(uname -s) == Linux ]] && ! nvidia-smi -L >/dev/null 2>&1; then
        .venv/bin/pip install -qq "torch==$version+cpu" 2>/dev/null && return
    fi
    .venv/bin/pip install -qq "torch==$version"
}

ensure_venv
