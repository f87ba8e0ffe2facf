"""Exercises: each has cases and two hints, takes its worked solution, and tells a wrong answer why."""

import json
import re

import pytest
import yaml

from lib.workbench.notebook import EXERCISES

NOTEBOOKS = EXERCISES.parent
TASKS = yaml.safe_load(EXERCISES.read_text(encoding="utf-8"))
SOLUTIONS = sorted((NOTEBOOKS / "solutions").glob("*.ipynb"))
ASKED = re.compile(r'lab\.exercise\(\s*"(\d+\.\d+)"')


def code_cells(path):
    """Source and metadata of each."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [("".join(cell["source"]), cell["metadata"]) for cell in cells if cell["cell_type"] == "code"]


def asked(path):
    return [number for code, _ in code_cells(path) for number in ASKED.findall(code)]


def test_every_task_is_asked_in_its_notebook_and_solved_in_its_solution():
    notebooks = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    assert [path.name for path in notebooks] == [path.name for path in SOLUTIONS]
    numbers = []
    for path, solution in zip(notebooks, SOLUTIONS):
        numbers += asked(path)
        assert asked(path) == asked(solution)
        assert all(int(number.split(".")[0]) == int(path.name[:2]) for number in asked(path))
    assert sorted(numbers) == sorted(TASKS)
    for number, task in TASKS.items():
        assert len(task["hints"]) == 2 and task["cases"], number


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
