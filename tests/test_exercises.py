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
    assert [path.name for path in SOLUTIONS] == sorted(p.name for p in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    numbers = []
    for solution in SOLUTIONS:
        numbers += asked(solution)
        assert asked(NOTEBOOKS / solution.name) == asked(solution)
        assert {int(number.split(".")[0]) for number in asked(solution)} == {int(solution.name[:2])}
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
