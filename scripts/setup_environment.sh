#!/usr/bin/env bash
# Prints the python of the workbench's environment on stdout, everything else on stderr. What is missing is made first:
# a conda environment where conda, mamba or micromamba is on the PATH, else .venv. Both get their packages from the one
# pip list in environment.yml. A stamp (hash of that file and python version) tells a finished environment, so a second
# run installs nothing. An active environment that satisfies the pins is used as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '%s\n' "$*" >&2; }
pins() { sed -n '/- pip:/,$ s/^ \{6\}- //p' environment.yml; }
conda_name=$(sed -n 's/^name: *//p' environment.yml)
is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

satisfies_pins() {  # packaging comes with jupyterlab: an environment without it is not the one
  pins | "$1" -c '
import sys
from importlib.metadata import version
from packaging.requirements import Requirement
for line in filter(None, (line.partition(" #")[0].strip() for line in sys.stdin)):
    pin = Requirement(line)
    if pin.marker is None or pin.marker.evaluate():
        assert pin.specifier.contains(version(pin.name), prereleases=True), pin
' >/dev/null 2>&1
}

install_once() {  # $1: the environment's python, $2: its folder
  local stamp
  stamp=$("$1" -c 'import hashlib, pathlib, sys
print(hashlib.sha256(pathlib.Path("environment.yml").read_bytes()).hexdigest(), sys.version.split()[0])')
  [[ -f $2/.workbench-stamp && $(<"$2/.workbench-stamp") == "$stamp" ]] && return
  say "Installing the packages that environment.yml pins into $2 (once, some minutes)"
  "$1" -m pip install --disable-pip-version-check -r <(pins) >&2 || {
    say "error: pip could not install what environment.yml pins; its message is above"
    exit 1
  }
  printf '%s\n' "$stamp" >"$2/.workbench-stamp"
}

use() {  # $1: the environment's folder
  install_once "$1/bin/python" "$1"
  printf '%s\n' "$1/bin/python"
  exit 0
}

active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
if [[ -n $active && $active != "$PWD/.venv" ]] && is_new_enough "$active/bin/python" \
  && satisfies_pins "$active/bin/python"; then
  printf '%s\n' "$active/bin/python"
  exit 0
fi

if is_new_enough .venv/bin/python; then use "$PWD/.venv"; fi

for conda in mamba micromamba conda; do
  command -v "$conda" >/dev/null || continue
  prefix_of() { "$conda" run -n "$conda_name" python -c 'import sys; print(sys.prefix)' 2>/dev/null; }
  if ! prefix=$(prefix_of); then
    say "Creating the environment $conda_name with $conda"
    "$conda" create -y -n "$conda_name" -c conda-forge python=3.11 pip >&2 && prefix=$(prefix_of) || {
      say "$conda could not create it; making .venv instead"
      break
    }
  fi
  use "$prefix"
done

for python in python3.11 python3 python3.12 python3.13 python3.14 python; do
  is_new_enough "$python" || continue
  say "Creating .venv with $("$python" --version)"
  "$python" -m venv --clear .venv >&2 || {
    say "error: $python cannot make a virtual environment (on Debian and Ubuntu: apt-get install python3-venv)"
    exit 1
  }
  use "$PWD/.venv"
done
say "error: Python 3.11 or newer was not found on the PATH, nor conda, mamba or micromamba. Install one of them."
exit 1
