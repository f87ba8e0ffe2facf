#!/usr/bin/env bash
# Ruff over everything, notebooks included, then pytest, two files at a time and the slowest first, with the
# arguments given: ./run_tests.sh -k launches
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
unset PYTHONPATH PYTHONHOME PYTHONOPTIMIZE
export PYTHONNOUSERSITE=1
python=$(scripts/setup_environment.sh)
"$python" -m ruff check .
"$python" -m ruff format --check .
exec "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
