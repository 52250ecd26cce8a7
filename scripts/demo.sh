#!/usr/bin/env bash
# The main job on a small model. Arguments are passed on, for example: scripts/demo.sh --train.steps 10
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
# The matrices are small: one thread is nearly as fast as two, and on a busy machine far faster.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python recipes/cotrain_rl.py --output_dir "runs/demo-$(date +%Y%m%d-%H%M%S)" "$@"
