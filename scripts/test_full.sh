#!/usr/bin/env bash
# Every test, the slow ones and the whole topology matrix included.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
exec .venv/bin/python -m pytest -m "slow or not slow" "$@"
