"""The notebooks: how they are built, that no output is committed, that each runs alone; their exercises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import command_line
import execute_notebook
import nbformat
import pytest
import report
import torch
import yaml

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
NUMBERED = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
BY_PAPERMILL = NUMBERED[2]
SOLUTIONS = sorted((NOTEBOOKS / "solutions").glob("*.ipynb"))
TASKS = yaml.safe_load((NOTEBOOKS / "exercises.yml").read_text(encoding="utf-8"))
ASKED = re.compile(r'lab\.exercise\(\s*"(\d+\.\d+)"')
each_notebook = pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)


@pytest.mark.parametrize("path", NUMBERED + SOLUTIONS, ids=lambda path: path.stem)
def test_no_output_is_committed(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


@each_notebook
def test_structure(path):
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert prose.startswith("# ") and "learn" in cells[0].source and "## Predict before you run" in prose
    assert [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])] == code[:1]
    assert 'device = "auto"' in code[0].source and "quick = False" in code[0].source
    assert cells[-1] is code[-1] and "claim(" in cells[-1].source
    assert not any("sys.path" in cell.source for cell in code)  # the set-up puts lib there
    assert max(len(cell.source.splitlines()) for cell in code) <= 30  # plumbing belongs in lib


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """What each notebook leaves after a quick run; the solutions are executed below."""
    folder, records = tmp_path_factory.mktemp("executed"), []
    tasks = [(path, folder / path.name, {"quick": True}) for path in NUMBERED if path != BY_PAPERMILL]
    command_line.run_here(execute_notebook.execute, tasks, 2, records.append)
    return {record["notebook"]: record for record in records} | {BY_PAPERMILL.stem: by_papermill(folder)}


def by_papermill(folder):
    """What papermill's own command leaves, in another folder, with lib where the set-up puts it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = [sys.executable, "-c", "import lib"]
    if subprocess.run(found, cwd=folder, env=environment, capture_output=True).returncode:
        environment["PYTHONPATH"] = str(ROOT)
    papermill = [sys.executable, "-m", "papermill", BY_PAPERMILL, "out.ipynb", "-p", "quick", "True"]
    subprocess.run([*papermill, "--no-progress-bar"], cwd=folder, env=environment, check=True)
    executed = execute_notebook.collect(nbformat.read(folder / "out.ipynb", as_version=4))
    return executed | {"error": None, "peak_mb": 0}


@pytest.mark.notebook
@each_notebook
def test_it_runs_alone_in_quick_mode(path, records):
    record = records[path.stem]
    assert record["error"] is None, execute_notebook.describe(record["error"])
    if not torch.cuda.is_available():  # a CUDA context alone takes more
        assert record["peak_mb"] < execute_notebook.PEAK_LIMIT_MB
    assert record["claims"] and record["figures"]
    assert all(figure["alt"] and figure["evidence"] for figure in record["figures"])


@pytest.mark.notebook
def test_the_numbers_at_the_top_of_the_report_are_published(records):
    published = {result["name"] for record in records.values() for result in record["results"]}
    assert {name for name, _ in report.HEADLINES} <= published


def code_cells(path):
    """Source and metadata of each."""
    cells = nbformat.read(path, as_version=4).cells
    return [(cell.source, cell.metadata) for cell in cells if cell.cell_type == "code"]


def test_every_task_is_asked_in_its_notebook_and_solved_in_its_solution():
    numbers = []
    for path, solution in zip(NUMBERED, SOLUTIONS, strict=True):
        assert path.name == solution.name
        asked, solved = (ASKED.findall("".join(code for code, _ in code_cells(p))) for p in (path, solution))
        assert asked == solved and {int(number.split(".")[0]) for number in asked} == {int(path.name[:2])}
        numbers += asked
    assert sorted(numbers) == sorted(TASKS)
    assert all(len(task["hints"]) == 2 and task["cases"] for task in TASKS.values())


@pytest.mark.parametrize("solution", SOLUTIONS, ids=lambda path: path.stem)
def test_solutions_pass_and_wrong_answers_are_told_why(solution, monkeypatch, capsys):
    """A solution's cell has `wrong` in its metadata: answers that must not pass, as expressions."""
    monkeypatch.chdir(NOTEBOOKS)
    asking = [code for code, _ in code_cells(NOTEBOOKS / solution.name) if ASKED.search(code)]
    assert all("answer = ..." in code for code in asking)
    namespace = {}
    for code, metadata in code_cells(solution):
        exec(code, namespace)
        said = capsys.readouterr().out
        if not ASKED.search(code):
            continue
        assert ": right" in said and "hint" not in said, said
        ask = code[code.index("lab.exercise(") :]
        for wrong in metadata["wrong"]:
            exec(ask, namespace | {"answer": eval(wrong, namespace)})
            assert ", expected " in capsys.readouterr().out, wrong
