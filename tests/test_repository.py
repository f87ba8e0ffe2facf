"""Rules of the house that no single module can see: pins, the import chain, nothing tied to one machine."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# No module of lib imports one of a later set.
CHAIN = (
    {"grouped_copy", "routes", "fused_copy"},
    {"strategies"},
    {"eagle"},
    {"timing", "traces"},
    {"device_model"},
    {"step"},
    {"plots"},
    {"explore", "recordings"},
    {"record"},
)
ANYWHERE = {"evidence"}  # a leaf: imports nothing of lib
TABLES = {"numpy", "pandas", "matplotlib", "seaborn"}
MAY_LOAD_TABLES = {"traces", "device_model", "plots", "recordings", "record"}


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def imports(path: Path, top_level: bool) -> set[str]:
    """The dotted names that a module imports; only those executed on import, or all of them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    names = set()
    for node in ast.walk(tree):
        if top_level and id(node) in lazy:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = (
                ".".join(path.relative_to(ROOT).with_suffix("").parts[: -node.level]) if node.level else ""
            )
            module = ".".join(filter(None, (package, node.module)))
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def lib_modules() -> dict[str, list[Path]]:
    """The first-level modules of lib, a package under its own name, with their files."""
    modules: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "lib").rglob("*.py")):
        parts = path.relative_to(ROOT / "lib").with_suffix("").parts
        if parts != ("__init__",):
            modules.setdefault(parts[0], []).append(path)
    return modules


def places() -> dict[str, int]:
    return {name: place for place, names in enumerate(CHAIN) for name in names}


def test_every_module_of_lib_has_its_place():
    assert set(lib_modules()) <= set(places()) | ANYWHERE


@pytest.mark.parametrize("module", sorted(lib_modules()))
def test_no_module_of_lib_imports_a_later_one(module):
    used = {
        parts[1]
        for path in lib_modules()[module]
        for parts in (name.split(".") for name in imports(path, top_level=False))
        if parts[0] == "lib" and len(parts) > 1 and parts[1] in lib_modules()
    } - {module}
    if module in ANYWHERE:
        assert not used
    else:
        assert {name for name in used - ANYWHERE if places()[name] > places()[module]} == set()


@pytest.mark.parametrize("module", sorted(set(lib_modules()) - MAY_LOAD_TABLES))
def test_lib_runs_with_torch_alone(module):
    for path in lib_modules()[module]:
        roots = {name.split(".")[0] for name in imports(path, top_level=True)}
        assert not roots & TABLES, path


def test_every_package_is_pinned_once():
    lines = (ROOT / "environment.yml").read_text(encoding="utf-8").splitlines()
    pins = [
        line.strip().removeprefix("- ").partition(" #")[0].strip()
        for line in lines
        if line.startswith(" " * 6)
    ]
    pins = [pin for pin in pins if pin and not pin.startswith("#")]
    assert "torch==2.13.0" in pins and any(pin.startswith("jupyterlab==") for pin in pins)
    for pin in pins:
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*( *;.+)?", pin), pin
    names = [re.split("[=;]", pin)[0].lower() for pin in pins]
    assert len(names) == len(set(names))


def test_everything_that_the_project_imports_is_pinned():
    provided = {"yaml": "pyyaml", "IPython": "ipykernel", "zmq": "ipykernel", "psutil": "ipykernel"}
    provided |= {"traitlets": "ipykernel", "nbformat": "nbclient", "dask": "distributed"}
    provided |= {"PIL": "matplotlib"}
    pinned = (ROOT / "environment.yml").read_text(encoding="utf-8").lower()
    modules = [path for path in tracked_files() if path.suffix == ".py"]
    own = {"lib", "scripts", "tests", *(path.stem for path in modules), *sys.stdlib_module_names}
    for path in modules:
        for root in {name.split(".")[0] for name in imports(path, top_level=False)} - own:
            assert f"- {provided.get(root, root).lower()}==" in pinned, (
                f"{path.relative_to(ROOT)} imports {root}"
            )


def test_nothing_committed_names_a_machine():
    home = r"(?<![\w.])/(work|root|home/\w+|tmp|opt|Users)/\w"
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # weights, archives
            continue
        found = [line for line in text.splitlines() if re.search(home, line)]
        assert not found, f"{path.relative_to(ROOT)}: {found[0].strip()[:120]}"


def test_scripts_that_people_start_are_executable():
    for name in ("run_all.sh", "run_tests.sh", ".ci/run", "scripts/setup_environment.sh"):
        assert (ROOT / name).stat().st_mode & 0o111, name
