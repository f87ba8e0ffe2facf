"""The numbered notebooks: how they are built, that no output is committed, and that each runs alone."""

import subprocess
import sys
from pathlib import Path

import execute_notebook
import nbformat
import pytest
import report
import torch

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
SOLUTIONS = sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb"))


def by_stem(paths: list[Path]):
    return [pytest.param(path, id=path.stem) for path in paths]


def test_they_are_numbered_without_a_gap():
    assert [int(path.name[:2]) for path in NOTEBOOKS] == list(range(len(NOTEBOOKS))) and len(NOTEBOOKS) >= 5


@pytest.mark.parametrize("path", by_stem(NOTEBOOKS + SOLUTIONS))
def test_no_output_is_committed(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.parametrize("path", by_stem(NOTEBOOKS))
def test_structure(path):
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")
    assert "learn" in cells[0].source
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert tagged == code[:1]
    assert 'device = "auto"' in tagged[0].source and "quick = False" in tagged[0].source
    assert "## Predict before you run" in prose
    assert cells[-1] is code[-1] and "claim(" in cells[-1].source
    assert any(execute_notebook.SHOWS.search(cell.source) for cell in code)
    assert not any("sys.path" in cell.source for cell in code)  # the set-up puts lib there
    longest = max(len(cell.source.splitlines()) for cell in code)
    assert longest <= 30, f"{longest} lines in one cell: plumbing belongs in lib"


@pytest.mark.notebook
@pytest.mark.parametrize("path", by_stem(NOTEBOOKS))  # the solutions are executed in test_exercises.py
def test_it_runs_alone_in_quick_mode(path, tmp_path):
    record = execute_notebook.execute(path, tmp_path / path.name, {"quick": True, "device": "auto"}, False)
    assert record["status"] == "ok", execute_notebook.describe(record["error"])
    assert record["claims"] and record["figures"]
    assert all(figure["alt"] and figure["evidence"] for figure in record["figures"])
    if not torch.cuda.is_available():  # a CUDA context alone takes more
        assert record["peak_mb"] < execute_notebook.PEAK_LIMIT_MB


@pytest.mark.notebook
def test_papermill_runs_one_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    if subprocess.run([sys.executable, "-c", "import lib.copies"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("the set-up has not put lib on the path of this Python")
    papermill = [sys.executable, "-m", "papermill", NOTEBOOKS[0], "out.ipynb", "-p", "quick", "True"]
    subprocess.run([*papermill, "--no-progress-bar"], check=True)
    assert (tmp_path / "out.ipynb").exists()


def test_the_numbers_at_the_top_of_the_report_are_published():
    cells = [cell for path in NOTEBOOKS for cell in nbformat.read(path, as_version=4).cells]
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    assert [name for name, _ in report.HEADLINES if f'publish("{name}"' not in code] == []
