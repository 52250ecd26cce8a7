#!/usr/bin/env bash
# The main job on a small model. Arguments are passed on, for example: scripts/demo.sh --train.steps 10
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
exec .venv/bin/python recipes/cotrain_rl.py "$@"
