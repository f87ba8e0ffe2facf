"""Small notebooks for the tests of the batch scripts: no torch, so a kernel starts within a second."""

import time
from collections.abc import Callable
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

PATIENCE_S = 300  # what happens within a second on a quiet machine may take long on a busy one
PARAMETERS = 'device = "auto"\nquick = False\nsize = 3'
PUBLISH = """
from IPython.display import display
def publish(name, value, kind="counted", note=""):
    result = {"name": name, "value": value, "kind": kind, "note": note}
    display({"application/vnd.replay-copy.result+json": result, "text/plain": name}, raw=True)
"""
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
FIGURE = f"""
png = "{PNG}"
about = {{"name": "dot", "alt": "One dot", "evidence": "counted · shapes alone"}}
from IPython.display import display
display({{"image/png": png, "text/plain": "dot"}}, raw=True, metadata={{"image/png": about}})
"""


def write_notebook(path: Path, *cells: str, parameters: str = PARAMETERS, tags: tuple = ()) -> None:
    """A notebook titled like its file: a parameters cell, then the cells; one that starts with # is prose."""
    tagged = new_code_cell(parameters, metadata={"tags": ["parameters", *tags]})
    rest = [new_markdown_cell(c) if c.startswith("#") else new_code_cell(c) for c in cells]
    notebook = new_notebook(cells=[new_markdown_cell(f"# {path.stem}"), tagged, *rest])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)
