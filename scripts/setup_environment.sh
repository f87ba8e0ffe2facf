#!/usr/bin/env bash
# Prints the python of this checkout's environment on stdout, everything else on stderr. The environment is .venv, made by
# conda, mamba or micromamba where one is on the PATH, else by python -m venv, with the packages that environment.yml pins
# and lib itself. It is used only if it is whole: its stamp is written last, and names folder, Python and pins; any other
# is made anew. An active environment that satisfies the pins is used as it is.
set -euo pipefail
unset PYTHONPATH PYTHONHOME PYTHONOPTIMIZE
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

say() { printf '%s\n' "$*" >&2; }
pins() { sed -n '/- pip:/,$ s/^ \{6\}- \([^#]*[^# ]\).*/\1/p' environment.yml; }
is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
stamp() { printf '%s\n' "$PWD" "$(.venv/bin/python -c 'import sys; print(sys.version_info[:2])')" "$(pins)"; }
is_whole() { [[ -f .venv/workbench-stamp ]] && [[ $(<.venv/workbench-stamp) == "$(stamp 2>/dev/null)" ]]; }

satisfies_pins() {  # packaging comes with jupyterlab: an environment without it is not the one
  pins | "$1" -c '
import sys
from importlib.metadata import version
from packaging.requirements import Requirement
for pin in map(Requirement, filter(None, map(str.strip, sys.stdin))):
    if pin.marker is None or pin.marker.evaluate():
        if not pin.specifier.contains(version(pin.name), prereleases=True):
            sys.exit(1)
' >/dev/null 2>&1
}

make_with_conda() {
  local conda
  for conda in mamba micromamba conda; do
    command -v "$conda" >/dev/null || continue
    say "Creating .venv with $conda"
    "$conda" create -y -p "$PWD/.venv" -c conda-forge python=3.11 pip >&2 && return
    say "$conda could not create it; trying python -m venv"
    rm -rf .venv
  done
  return 1
}

make_with_venv() {
  local python lacking=
  for python in python3.11 python3 python3.12 python3.13 python3.14 python; do
    is_new_enough "$python" || continue
    say "Creating .venv with $("$python" --version)"
    "$python" -m venv .venv >&2 && return
    lacking=$python
    rm -rf .venv
  done
  if [[ $lacking ]]; then
    say "error: $lacking cannot make a virtual environment (on Debian and Ubuntu: apt-get install python3-venv)"
  else
    say "error: Python 3.11 or newer was not found on the PATH, nor conda, mamba or micromamba. Install one of them."
  fi
  return 1
}

install() {
  say "Installing the packages that environment.yml pins into .venv (once, some minutes)"
  .venv/bin/python -m pip install -r <(pins) >&2 || {
    say "error: pip could not install what environment.yml pins; its message is above"
    return 1
  }
  # What pip install -e . would do, without a build, and right in every locale: the folder above .venv is on the path.
  .venv/bin/python -c 'import pathlib, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "workbench.pth").write_text("../../../..\n")'
  stamp >.venv/workbench-stamp.partial
  mv .venv/workbench-stamp.partial .venv/workbench-stamp
}

active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
if [[ -n $active && $active != "$PWD/.venv" ]] && is_new_enough "$active/bin/python" &&
  satisfies_pins "$active/bin/python"; then
  printf '%s\n' "$active/bin/python"
  exit
fi

if ! is_whole; then
  say "Setting up $PWD/.venv; if another run is at it, this one waits"
  mkdir -p runs
  exec 9>>runs/set-up.lock  # held until this process ends, and the last that it started
  flock 9 2>/dev/null || python3 -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' 2>/dev/null || true
  if ! is_whole; then
    rm -rf .venv
    make_with_conda || make_with_venv
    install
  fi
fi
printf '%s\n' "$PWD/.venv/bin/python"
