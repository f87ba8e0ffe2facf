"""The set-up, on a copy of the project with one pin, under stand-ins for what is on a machine's PATH.

Nothing is downloaded: environments made here see the packages of this one, and their pip installs nothing.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = os.path.realpath(sys.executable)
PIP = "import sys; sys.exit('pip==0.1' in open(sys.argv[-1]).read())"  # which nobody has
MAKE = f"""make() {{
  '{PYTHON}' -m venv --without-pip "$1"
  for packages in "$1"/lib/python*/site-packages; do
    echo '{sysconfig.get_paths()["purelib"]}' >"$packages/of_this_one.pth"
    echo "{PIP}" >"$packages/pip.py"
  done
}}
"""
ELSE = f"; else exec '{PYTHON}' \"$@\"; fi"
GOOD_PYTHON = MAKE + 'if [[ "$1 $2" == "-m venv" ]]; then make "$3"' + ELSE
NO_PIP = f"mkdir -p .venv/bin; ln -s '{PYTHON}' .venv/bin/python"  # as Ctrl-C leaves it, or no ensurepip
NO_VENV = f'if [[ "$1 $2" == "-m venv" ]]; then {NO_PIP}; exit 1' + ELSE
MICROMAMBA = MAKE + '[[ "$*" == "create -y -p $PWD/.venv -c conda-forge python=3.11 pip" ]] && make "$4"'
SETUPTOOLS = f"setuptools=={version('setuptools')}"


@pytest.fixture
def project(tmp_path):
    """A checkout whose path has blanks and Chinese in it; tools/ beside it is the PATH."""
    folder = tmp_path / "工 作" / "project"
    for name in ("scripts", "lib", "../tools"):
        (folder / name).mkdir(parents=True)
    for name in ("scripts/setup_environment.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "lib/__init__.py").touch()
    names = "bash", "sed", "dirname", "readlink", "env", "rm", "mv", "mkdir", "ln", "flock"
    for tool in filter(None, map(shutil.which, names)):  # a Mac has no flock
        (folder.parent / "tools" / Path(tool).name).symlink_to(tool)
    pin(folder, SETUPTOOLS)
    put_tool(folder, "python3", GOOD_PYTHON)
    return folder


def pin(project: Path, *pins: str) -> None:
    lines = "".join(f"      - {one}  # a remark\n" for one in pins)
    text = f"name: test\ndependencies:\n  - python=3.11\n  - pip:\n      # the subject\n{lines}"
    (project / "environment.yml").write_text(text, encoding="utf-8")


def put_tool(project: Path, name: str, script: str) -> None:
    tool = project.parent / "tools" / name
    tool.write_text(f"#!/usr/bin/env bash\n{script}\n", encoding="utf-8")
    tool.chmod(0o755)


def set_up(project: Path, **environment: str) -> tuple[int, str, str]:
    clean = {"PATH": str(project.parent / "tools"), "HOME": str(project), "PIP_NO_INDEX": "1", "LC_ALL": "C"}
    command = [project / "scripts/setup_environment.sh"]
    done = subprocess.run(command, env=clean | environment, capture_output=True, encoding="utf-8")
    return done.returncode, done.stdout, done.stderr


def assert_made(project: Path) -> str:
    """Two set-ups at once make one environment; it finds lib from anywhere, and is used without a word."""
    with ThreadPoolExecutor() as beside:
        codes, outs, errs = zip(*beside.map(set_up, [project] * 2))
    err = "".join(errs)
    assert codes == (0, 0) and {*outs} == {f"{project}/.venv/bin/python\n"}, err
    assert err.count("Installing the packages") == 1
    assert_finds_lib(project, PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")  # Chinese in the path, yet no UTF-8
    assert set_up(project) == (0, outs[0], "")
    return err


def assert_finds_lib(project: Path, **environment: str) -> None:
    """From a folder with another lib in it."""
    other = project.parent / "elsewhere" / "lib"
    other.mkdir(parents=True, exist_ok=True)
    command = [f"{project}/.venv/bin/python", "-c", "import lib, os; print(ascii(os.fsencode(lib.__file__)))"]
    found = subprocess.check_output(command, cwd=other.parent, env={"LC_ALL": "C"} | environment, text=True)
    assert found.strip() == ascii(bytes(project / "lib" / "__init__.py"))


def test_it_is_made_once_and_anew_when_it_is_not_whole_or_pins_or_place_change(project):
    subprocess.run(["bash", "-c", NO_PIP], cwd=project, check=True)
    assert_made(project)
    pin(project, SETUPTOOLS, f"pip=={version('pip')}")
    put_tool(project, "micromamba", MICROMAMBA)
    assert "with micromamba" in assert_made(project)
    put_tool(project, "micromamba", "exit 1")
    project = project.rename(project.with_name("moved"))
    assert "micromamba could not create it" in assert_made(project)
    # So does pip for another environment. In plain C Python would not start on the file that it writes.
    next(project.glob(".venv/lib/*/site-packages/workbench.pth")).unlink()
    pip = [PYTHON, "-m", "pip", "--python", ".venv/bin/python", "install", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "--no-deps", "-q", "-e", "."], cwd=project, check=True)
    assert_finds_lib(project, LC_ALL="C.UTF-8")


def test_without_what_makes_environments_it_says_so(project):
    older = "exit 1", "error: Python 3.11 or newer was not found"  # the version check fails
    for python, said in (older, (NO_VENV, "error: python3 cannot make a virtual environment")):
        put_tool(project, "python3", python)
        status, out, err = set_up(project)
        assert status == 1 and out == "" and said in err and not (project / ".venv").exists()


def test_an_active_environment_that_has_the_pins_is_used_as_it_is(project):
    modules = project / "modules"
    modules.mkdir()
    for name in ("packaging", "sitecustomize", "pip"):
        (modules / f"{name}.py").write_text("raise SystemExit('not ours')", encoding="utf-8")
    hostile = {"PYTHONPATH": str(modules), "PYTHONOPTIMIZE": "1", "VIRTUAL_ENV": sys.prefix}
    assert set_up(project, **hostile) == (0, f"{sys.prefix}/bin/python\n", "")
    pin(project, SETUPTOOLS, "pip==0.1")
    code, _, err = set_up(project, **hostile)
    assert code == 1 and "Creating .venv" in err and "error: pip could not install" in err
