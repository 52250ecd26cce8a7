#!/usr/bin/env bash
# Every test, the slow ones and the whole topology matrix included.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
export OMP_NUM_THREADS=1  # small tensors gain nothing from more, and the pool of ranks has processes enough
exec .venv/bin/python -m pytest -m "slow or not slow" "$@"
