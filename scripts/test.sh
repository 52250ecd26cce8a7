#!/usr/bin/env bash
# The test suite without the slow cases. Arguments go to pytest: scripts/test.sh tests/unit -k layout
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
export OMP_NUM_THREADS=1  # small tensors gain nothing from more, and the pool of ranks has processes enough
exec .venv/bin/python -m pytest "$@"
