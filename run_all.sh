#!/usr/bin/env bash
# Sets up the environment where there is none, then executes the notebooks; ./run_all.sh --help lists the options.
set -euo pipefail
root=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
for word in "$@"; do
  case $word in -h | --help) exec python3 "$root/scripts/run_notebooks.py" --help ;; esac
done
python=$("$root/scripts/setup_environment.sh")
exec "$python" -E -s "$root/scripts/run_notebooks.py" "$@"  # -E -s: the environment's modules and no others
