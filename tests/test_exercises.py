"""Exercises accept the worked solutions and nothing else, and stand in notebook and solution alike."""

import json
from pathlib import Path

import pytest
from lib.evidence import exercise

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SOLUTIONS = sorted((NOTEBOOKS / "solutions").glob("*.ipynb"))


def code_cells(path):
    cells = json.loads(path.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def exercises(path):
    return [cell for cell in code_cells(path) if "exercise" in cell["metadata"].get("tags", [])]


def source(cell):
    return "".join(cell["source"])


def check_of(cell):
    """What follows the last answer in an exercise cell."""
    lines = source(cell).splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("answer = "))
    return "\n".join(lines[last + 1 :]).strip()


def test_every_numbered_notebook_has_exercises_with_solutions():
    numbered = sorted(path.name for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    assert numbered == [path.name for path in SOLUTIONS]


@pytest.mark.parametrize("solution", SOLUTIONS, ids=lambda path: path.stem)
def test_solutions_pass_and_wrong_answers_do_not(solution, monkeypatch, capsys):
    monkeypatch.chdir(NOTEBOOKS / "solutions")
    open_ones = exercises(NOTEBOOKS / solution.name)
    solved = exercises(solution)
    assert 2 <= len(solved) <= 3 and len(open_ones) == len(solved)
    namespace = {}
    for cell in code_cells(solution):
        exec(source(cell), namespace)
        if cell not in solved:
            continue
        for wrong in cell["metadata"]["wrong"]:
            attempt = dict(namespace) | {"answer": eval(wrong, namespace)}
            with pytest.raises(AssertionError, match="not yet"):
                exec(check_of(cell), attempt)
    assert capsys.readouterr().out.count(": right") == len(solved)
    for asked, answered in zip(open_ones, solved):
        assert check_of(asked) == check_of(answered)
        assert "answer = ..." in source(asked)


def test_an_exercise_lets_a_batch_run_pass_and_hints_otherwise(capsys):
    exercise("0.0", ..., lambda answer: False, "hint")
    assert "not answered yet" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="a hint"):
        exercise("0.0", 1, lambda answer: answer == 2, "a hint")
    with pytest.raises(AssertionError, match="a hint"):
        exercise("0.0", "no number", lambda answer: answer + 1 == 2, "a hint")
    exercise("0.0", 2, lambda answer: answer == 2, "a hint")
    assert "right" in capsys.readouterr().out
