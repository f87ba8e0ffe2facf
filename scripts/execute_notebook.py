"""One notebook through papermill: executed, its memory watched, its results collected. For runs and grids."""

# ruff: noqa: E402
from __future__ import annotations

import ast
import logging
import os
import re
import sys
import tempfile
import threading
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

# jsonschema, imported below, would spend 1.5 s compiling a grammar of web addresses that no notebook needs.
sys.modules.setdefault("rfc3987_syntax", None)

import nbformat
import papermill
import psutil
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
PNG_START = "iVBORw0KGgo"  # of every PNG, in base64
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
        for process in set(psutil.Process().children(recursive=True)) - self._before:
            self._seen.add(process)
            with suppress(psutil.Error, OSError):  # it has just ended
                self.peak_mb = max(self.peak_mb, peak_mb(process))

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


def peak_mb(process: psutil.Process) -> float:
    status = Path(f"/proc/{process.pid}/status")
    if status.exists():  # Linux keeps the peak itself, so nothing between two looks is missed
        peak = re.search(r"VmHWM:\s+(\d+)", status.read_text(encoding="utf-8", errors="replace"))
        return int(peak[1]) * 1024 / 1e6 if peak else 0.0
    return process.memory_info().rss / 1e6


def declared_parameters(notebook: Path) -> set[str]:
    """The names that the cell tagged `parameters` assigns; papermill's own search misses some annotations.

    Raises ValueError for a file that is no notebook and a cell that is not Python.
    """
    try:
        cells = nbformat.read(notebook, as_version=4).cells
        source = next((c.source for c in cells if "parameters" in c.metadata.get("tags", [])), "")
        names = list(ast.walk(ast.parse(source)))
    except SyntaxError as error:
        raise ValueError(f"{notebook}: parameters: expected plain Python, got {error.text!r}") from None
    except Exception as error:  # nbformat has a kind for each way in which a file is none
        raise ValueError(f"{notebook}: expected a notebook: {type(error).__name__}: {error}") from None
    return {name.id for name in names if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


def execute(source: Path, output: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """Execute `source` with those parameters that it declares, in its own folder; leave it in `output`.

    A notebook that declares `live` gets False: no sliders where nobody can move them.

    Returns a JSON-ready record: notebook, title, status ("ok", "failed", "died": its kernel was killed),
    seconds, peak_mb of its largest process, parameters, error (None, or the cell, heading, line and message
    of what failed) and what `collect` finds in its outputs. Never raises for what happens inside the
    notebook; OSError where `output` cannot be written.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    known = declared_parameters(source)
    parameters = {name: value for name, value in ({"live": False} | parameters).items() if name in known}
    at: dict[str, Any] = {"index": 0}
    status, message, started = "ok", "", time.monotonic()
    memory = PeakMemory()
    memory.start()
    # Two kernels that start at once may choose the same TCP port, and one then waits for ever: Unix sockets.
    sockets = tempfile.TemporaryDirectory(prefix="kernel-", ignore_cleanup_errors=True)
    try:
        papermill.execute_notebook(
            str(source).replace("{", "{{").replace("}", "}}"),  # it would fill braces in
            None,  # written below, whole
            parameters,
            cwd=source.parent,
            progress_bar=False,
            start_timeout=CELL_SECONDS,
            execution_timeout=CELL_SECONDS,  # of a cell: a reply that never comes must not hold up a batch
            iopub_timeout=CELL_SECONDS,  # the default, 4 s, is too short on a busy machine
            shutdown_kernel="immediate",
            extra_arguments=END_WITH_PARENT,
            on_notebook_start=lambda notebook: at.update(notebook=notebook),
            on_cell_start=lambda cell, cell_index: at.update(index=cell_index),
            on_cell_executed=lambda **_: memory.look(),
            config=Config(KernelManager={"transport": "ipc", "ip": f"{sockets.name}/kernel"}),
        )
    except papermill.PapermillExecutionError as error:
        status, message = "failed", f"{error.ename}: {error.evalue}"
        at["index"] = error.cell_index
    except DeadKernelError:
        status, message = "died", "the kernel was killed (out of memory?) or crashed"
    except Exception as error:  # a kernel that does not start
        status, message = "failed", f"{type(error).__name__}: {error}"
    finally:
        seconds = round(time.monotonic() - started, 1)
        peak = memory.stop()
        sockets.cleanup()

    # The one in memory: a file keeps no order of columns in a table.
    executed = at.get("notebook") or nbformat.read(source, as_version=4)
    write_whole(output, nbformat.writes(executed))
    lost = missing_figure(executed) if status == "ok" else None
    if lost:
        status, (at["index"], message) = "failed", lost
    error = None if status == "ok" else name_cell(executed, at["index"]) | {"message": message}
    title = [*headings(executed.cells), source.stem][0]
    record = {"notebook": source.stem, "title": title, "status": status, "seconds": seconds, "peak_mb": peak}
    return record | {"parameters": parameters, "error": error} | collect(executed)


def collect(notebook: nbformat.NotebookNode) -> dict[str, list]:
    """What the outputs hold: `figures` (name, alt, evidence, base64 png), published `results`, `claims`."""
    figures, results, claims = {}, [], []
    for output in chain.from_iterable(cell.get("outputs", []) for cell in notebook.cells):
        data = output.get("data", {})
        if has_picture(output):
            about = output.metadata.get("image/png", {})
            name = re.sub(r"[^\w.-]+", "_", about.get("name", "figure"))[:60]
            if name in figures:
                name += f"_{len(figures) + 1}"
            figure = {"name": name, "alt": about.get("alt", ""), "evidence": about.get("evidence", "")}
            figures[name] = figure | {"png": data["image/png"]}
        if RESULT_MIME in data:
            results.append(data[RESULT_MIME])
        if output.output_type == "stream" and output.name == "stdout":
            claims += re.findall(f"^(?:{CLAIM_MARK}|(?=no claim: ))(.*)", output.text, re.M)
    return {"figures": list(figures.values()), "results": results, "claims": claims}


def missing_figure(notebook: nbformat.NotebookNode) -> tuple[int, str] | None:
    """The first cell, by index, that showed a figure but holds no picture of it, and what to say of it.

    A figure gets lost without an error where matplotlib's backend is set from outside, or IPython to SVG.
    """
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            expected, found = len(SHOWS.findall(cell.source)), sum(map(has_picture, cell.outputs))
            if found < expected:
                return index, f"expected {expected} figures as PNG in the outputs of this cell, found {found}"
    return None


def has_picture(output: nbformat.NotebookNode) -> bool:
    return output.get("data", {}).get("image/png", "").startswith(PNG_START)


def describe(error: dict[str, str]) -> str:
    """One line: which cell, under which heading, what it does, what happened."""
    heading = f' under "{error["heading"]}"' if error["heading"] else ""
    return f"{error['cell']}{heading} ({error['line']}): {plain(error['message'])[:300]}"


def name_cell(notebook: nbformat.NotebookNode, index: int) -> dict[str, str]:
    cells = [cell for cell in notebook.cells if ERROR_MARKER_TAG not in cell.metadata.get("tags", [])]
    code = [cell for cell in cells[: index + 1] if cell.cell_type == "code"]
    lines = [line.strip() for line in code[-1].source.splitlines()] if code else []
    return {
        "cell": f"In [{code[-1].execution_count or len(code)}]" if code else "no cell",
        "heading": ["", *headings(cells[: index + 1])][-1],
        "line": next((line for line in lines if line and line[0] != "#"), ""),
    }


def headings(cells: list[nbformat.NotebookNode]) -> list[str]:
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.findall(r"^#+ +(.*\S)", prose, re.M)
