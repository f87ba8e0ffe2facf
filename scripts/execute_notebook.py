"""One notebook through papermill: executed, its memory watched, its results collected. For runs and grids."""

# ruff: noqa: E402
from __future__ import annotations

import ast
import base64
import binascii
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any

# jsonschema, imported below, would spend 1.5 s compiling a grammar of web addresses that no notebook needs.
sys.modules.setdefault("rfc3987_syntax", None)

import nbformat
import papermill
import psutil
import zmq
from command_line import ROOT, plain, write_whole
from nbclient.exceptions import DeadKernelError
from papermill.execute import ERROR_MARKER_TAG
from traitlets.config import Config

# As in lib, which is not imported here since it loads torch; a test compares the two.
RESULT_MIME = "application/vnd.replay-copy.result+json"
CLAIM_MARK = "✓ "
PEAK_LIMIT_MB = 1500
CELL_SECONDS = 900
# Our watcher of the parent process, and 1 for ipykernel's: none. See end_with_parent.py.
END_WITH_PARENT = [
    "--InteractiveShellApp.extra_extensions=scripts.end_with_parent",
    "--IPKernelApp.parent_handle=1",
]
SHOWS = re.compile(r"^(?:\w+\.)?show\(", re.M)  # a line that shows a figure whenever its cell runs

# A kernel sees this environment and this checkout, whatever is set where it is started: no other kernel that
# is named python3, no module in front of ours, no backend that draws elsewhere.
os.environ |= {"JUPYTER_PREFER_ENV_PATH": "1", "PYTHONPATH": str(ROOT), "PYTHONNOUSERSITE": "1"}
for _name in ("JUPYTER_PATH", "PYTHONHOME", "PYTHONOPTIMIZE", "MPLBACKEND"):
    os.environ.pop(_name, None)
logging.getLogger("papermill").setLevel(logging.ERROR)  # it does not know a parameter annotated `int | None`


class PeakMemory(threading.Thread):
    """The highest resident size of any process that this one starts meanwhile, in MB (1e6 bytes)."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._before = set(psutil.Process().children(recursive=True))
        self._seen: set[psutil.Process] = set()
        self._done = threading.Event()
        self.peak_mb = 0.0

    def look(self) -> None:
        now = set(psutil.Process().children(recursive=True)) - self._before
        self._seen |= now
        self.peak_mb = max([self.peak_mb, *map(_peak_mb, now)])

    def run(self) -> None:
        while not self._done.wait(0.2):
            self.look()

    def stop(self) -> float:
        """End what was started, also what its own parent, killed, has left behind."""
        self._done.set()
        self.join()
        self.look()
        for process in self._seen:
            with suppress(psutil.Error):  # it has ended
                process.kill()
        return round(self.peak_mb, 1)


def _peak_mb(process: psutil.Process) -> float:
    try:  # Linux keeps the peak itself, so nothing between two looks is missed
        status = Path(f"/proc/{process.pid}/status").read_bytes()
        return int(re.search(rb"VmHWM:\s+(\d+)", status)[1]) * 1024 / 1e6
    except (OSError, TypeError):
        pass
    try:
        return process.memory_info().rss / 1e6
    except psutil.Error:  # it has just ended
        return 0.0


def declared_parameters(notebook: Path) -> set[str]:
    """The names that the cell tagged `parameters` assigns; papermill's own search misses some annotations.

    Raises ValueError for a file that is no notebook and a cell that is not Python.
    """
    try:
        cells = nbformat.read(notebook, as_version=4).cells
        source = next((c.source for c in cells if "parameters" in c.metadata.get("tags", [])), "")
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(f"{notebook}: parameters: expected plain Python, got {error.text!r}") from None
    except Exception as error:  # nbformat has a kind for each way in which a file is none
        raise ValueError(f"{notebook}: expected a notebook: {type(error).__name__}: {error}") from None
    assignments = [one for one in statements if isinstance(one, ast.Assign | ast.AnnAssign)]
    targets = [getattr(one, "targets", None) or [one.target] for one in assignments]
    return {target.id for target in chain(*targets) if isinstance(target, ast.Name)}


def execute(
    source: Path,
    output: Path,
    parameters: dict,
    progress_bar: bool = True,
    stoppable: Callable[[], AbstractContextManager] = nullcontext,
) -> dict[str, Any]:
    """Execute `source` with those parameters that it declares, in its own folder; leave it in `output`.

    A notebook that declares `live` gets False: no sliders where nobody can move them. It is executed inside
    `stoppable()`, the one place where Ctrl-C takes effect.

    Returns a JSON-ready record: notebook, title, status ("ok", "failed", "died": its kernel was killed,
    "interrupted": Ctrl-C), seconds, peak_mb of its largest process, parameters, error (None, or the cell,
    heading, line and message of what failed) and what `collect` finds in its outputs. Never raises for what
    happens inside the notebook; OSError where `output` cannot be written.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    known = declared_parameters(source)
    parameters = {name: value for name, value in ({"live": False} | parameters).items() if name in known}
    at: dict[str, Any] = {"index": 0}
    status, message, started = "ok", "", time.monotonic()
    encryption = "auto" if zmq.has("curve") else "disabled"
    memory = PeakMemory()
    memory.start()
    try:
        with stoppable():
            papermill.execute_notebook(
                str(source).replace("{", "{{").replace("}", "}}"),  # it would fill braces in
                None,  # written below, whole
                parameters,
                cwd=source.parent,
                progress_bar={"desc": source.stem} if progress_bar else False,
                start_timeout=CELL_SECONDS,
                # Of a cell: a reply that never comes must not hold up a batch.
                execution_timeout=CELL_SECONDS,
                iopub_timeout=CELL_SECONDS,  # the default, 4 s, is too short on a busy machine
                shutdown_kernel="immediate",  # else a busy kernel keeps Ctrl-C waiting
                extra_arguments=END_WITH_PARENT,
                on_notebook_start=lambda notebook: at.update(notebook=notebook),
                on_cell_executed=lambda **_: memory.look(),
                on_cell_start=lambda cell, cell_index: at.update(index=cell_index),
                config=Config(KernelManager={"transport_encryption": encryption}),
            )
    except papermill.PapermillExecutionError as error:
        status, message = "failed", f"{error.ename}: {error.evalue}"
        at["index"] = error.cell_index
    except DeadKernelError:
        status, message = "died", "the kernel was killed (out of memory?) or crashed"
    except KeyboardInterrupt:
        status, message = "interrupted", "stopped by Ctrl-C"
    except Exception as error:  # a kernel that does not start
        status, message = "failed", f"{type(error).__name__}: {error}"
    finally:
        seconds = time.monotonic() - started
        peak_mb = memory.stop()

    # The one in memory: a file keeps no order of columns in a table.
    executed = at.get("notebook") or nbformat.read(source, as_version=4)
    write_whole(output, nbformat.writes(executed))
    found = collect(executed)
    lost = missing_figure(executed) if status == "ok" else None
    if lost:
        status, (at["index"], message) = "failed", lost
    return {
        "notebook": source.stem,
        "title": [*_headings(executed.cells), source.stem][0],
        "status": status,
        "seconds": round(seconds, 1),
        "peak_mb": peak_mb,
        "parameters": parameters,
        "error": None if status == "ok" else {**_name_cell(executed, at["index"]), "message": message},
        **found,
    }


def collect(notebook: nbformat.NotebookNode) -> dict[str, list]:
    """What the outputs hold: `figures` (name, alt, evidence, base64 png), published `results`, `claims`."""
    figures, results, claims = [], [], []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if _has_picture(output):
                about = output.metadata.get("image/png", {})
                name = re.sub(r"[^\w.-]+", "_", about.get("name") or f"figure_{len(figures) + 1}")[:60]
                while name in (figure["name"] for figure in figures):
                    name += f"_{len(figures) + 1}"
                figure = {"name": name, "alt": about.get("alt", ""), "evidence": about.get("evidence", "")}
                figures.append(figure | {"png": data["image/png"]})
            if RESULT_MIME in data:
                results.append(data[RESULT_MIME])
            if output.output_type == "stream" and output.name == "stdout":
                lines = output.text.splitlines()
                claims += [line.removeprefix(CLAIM_MARK) for line in lines if line.startswith(CLAIM_MARK)]
    return {"figures": figures, "results": results, "claims": claims}


def missing_figure(notebook: nbformat.NotebookNode) -> tuple[int, str] | None:
    """The first cell, by index, that showed a figure but holds no picture of it, and what to say of it.

    A figure gets lost without an error where matplotlib's backend is set from outside, or IPython to SVG.
    """
    for index, cell in enumerate(notebook.cells):
        outputs = cell.get("outputs", [])
        pictures = sum(map(_has_picture, outputs))
        shown = len(SHOWS.findall(cell.source)) if cell.cell_type == "code" else 0
        expected = max(shown, sum(map(_tells_of_picture, outputs)))
        if pictures < expected:
            return index, f"expected {expected} figures as PNG in the outputs of this cell, found {pictures}"
    return None


def _tells_of_picture(output: nbformat.NotebookNode) -> bool:
    text = output.get("data", {}).get("text/plain", "")
    return "image/png" in output.get("metadata", {}) or text.startswith("<Figure size ")


def _has_picture(output: nbformat.NotebookNode) -> bool:
    try:
        return base64.b64decode(output.get("data", {}).get("image/png", "")).startswith(b"\x89PNG")
    except binascii.Error:
        return False


def describe(error: dict[str, str]) -> str:
    """One line: which cell, under which heading, what it does, what happened."""
    heading = f' under "{error["heading"]}"' if error["heading"] else ""
    return f"{error['cell']}{heading} ({error['line']}): {plain(error['message'])[:300]}"


def _name_cell(notebook: nbformat.NotebookNode, index: int) -> dict[str, str]:
    cells = [cell for cell in notebook.cells if ERROR_MARKER_TAG not in cell.metadata.get("tags", [])]
    code = [cell for cell in cells[: index + 1] if cell.cell_type == "code"]
    lines = [line.strip() for line in code[-1].source.splitlines()] if code else []
    return {
        "cell": f"In [{code[-1].execution_count or len(code)}]" if code else "no cell",
        "heading": ["", *_headings(cells[: index + 1])][-1],
        "line": next((line for line in lines if line and line[0] != "#"), ""),
    }


def _headings(cells: list[nbformat.NotebookNode]) -> list[str]:
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.findall(r"^#+ +(.*\S)", prose, re.M)
