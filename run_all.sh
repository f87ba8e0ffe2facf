#!/usr/bin/env bash
# Sets up the environment where there is none, then executes the notebooks; ./run_all.sh --help lists the options.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
case " $* " in *" --help "* | *" -h "*) exec python3 "$root/scripts/run_notebooks.py" --help ;; esac
python=$("$root/scripts/setup_environment.sh")
exec "$python" "$root/scripts/run_notebooks.py" "$@"
