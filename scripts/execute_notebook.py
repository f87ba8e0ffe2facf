"""One notebook through papermill: executed, its memory watched, its results collected. For runs and grids."""

# ruff: noqa: E402
from __future__ import annotations

import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

# jsonschema, imported below, would spend 1.5 s compiling a grammar of web addresses that no notebook needs.
sys.modules.setdefault("rfc3987_syntax", None)

import nbformat
import papermill
import psutil
import zmq
from nbclient.exceptions import DeadKernelError
from papermill.execute import ERROR_MARKER_TAG
from traitlets.config import Config

# As in lib/evidence.py, which is not imported here since it loads torch; a test compares the two.
RESULT_MIME = "application/vnd.replay-copy.result+json"
CLAIM_MARK = "✓ "
PEAK_LIMIT_MB = 1500
CELL_SECONDS = 900

# A python3 kernel that somebody installed for their user must not win over the one of this environment.
os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")


class PeakMemory(threading.Thread):
    """The highest resident size of any process that this one starts meanwhile, in MB (1e6 bytes)."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._before = set(psutil.Process().children(recursive=True))
        self._done = threading.Event()
        self.peak_mb = 0.0

    def started(self) -> list[psutil.Process]:
        return [p for p in psutil.Process().children(recursive=True) if p not in self._before]

    def look(self) -> None:
        self.peak_mb = max([self.peak_mb, *map(_peak_mb, self.started())])

    def run(self) -> None:
        while not self._done.wait(0.2):
            self.look()

    def stop(self) -> float:
        self._done.set()
        self.join()
        return round(self.peak_mb, 1)


def _peak_mb(process: psutil.Process) -> float:
    try:  # Linux keeps the peak itself, so nothing between two looks is missed
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024 / 1e6
    except (OSError, TypeError):
        pass
    try:
        return process.memory_info().rss / 1e6
    except psutil.Error:  # it has just ended
        return 0.0


def declared_parameters(notebook: Path) -> set[str]:
    """The names in the cell tagged `parameters`."""
    return set(papermill.inspect_notebook(str(notebook)))


def execute(source: Path, output: Path, parameters: dict, progress_bar: bool = True) -> dict[str, Any]:
    """Execute `source` with those parameters that it declares, in its own folder; leave it in `output`.

    A notebook that declares `live` gets False: no sliders where nobody can move them.

    Returns a JSON-ready record: notebook, title, status ("ok", "failed", "died": its kernel was killed,
    "interrupted": Ctrl-C), seconds, peak_mb of its largest process, parameters, error (None, or the cell,
    heading, line and message of what failed) and what `collect` finds in its outputs. Never raises for what
    happens inside the notebook.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    known = declared_parameters(source)
    parameters = {name: value for name, value in ({"live": False} | parameters).items() if name in known}
    at: dict[str, Any] = {"index": 0}
    status, message, started = "ok", "", time.monotonic()
    memory = PeakMemory()
    memory.start()
    try:
        papermill.execute_notebook(
            source,
            output,
            parameters,
            cwd=source.parent,
            progress_bar={"desc": source.stem} if progress_bar else False,
            execution_timeout=CELL_SECONDS,  # of a cell: a reply that never comes must not hold up a batch
            shutdown_kernel="immediate",  # else a busy kernel keeps Ctrl-C waiting
            on_notebook_start=lambda notebook: at.update(notebook=notebook),
            on_cell_executed=lambda **_: memory.look(),
            on_cell_start=lambda cell, cell_index: at.update(index=cell_index),
            config=Config(KernelManager={"transport_encryption": "auto" if zmq.has("curve") else "disabled"}),
        )
    except papermill.PapermillExecutionError as error:
        status, message = "failed", f"{error.ename}: {error.evalue}"
        at["index"] = error.cell_index
    except DeadKernelError:
        status, message = "died", "the kernel was killed (out of memory?) or crashed"
    except KeyboardInterrupt:
        status, message = "interrupted", "stopped by Ctrl-C"
    except Exception as error:  # a kernel that does not start, a notebook that cannot be written
        status, message = "failed", f"{type(error).__name__}: {error}"
    finally:
        seconds = time.monotonic() - started
        for process in memory.started():
            process.kill()
        peak_mb = memory.stop()

    # The one in memory: a file keeps no order of columns in a table.
    executed = at.get("notebook") or nbformat.read(source, as_version=4)
    return {
        "notebook": source.stem,
        "title": [*_headings(executed.cells), source.stem][0],
        "status": status,
        "seconds": round(seconds, 1),
        "peak_mb": peak_mb,
        "parameters": parameters,
        "error": None if status == "ok" else {**_name_cell(executed, at["index"]), "message": message},
        **collect(executed),
    }


def collect(notebook: nbformat.NotebookNode) -> dict[str, list]:
    """What the outputs hold: `figures` (name, alt, evidence, base64 png), published `results`, `claims`."""
    figures, results, claims = [], [], []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                about = output.metadata.get("image/png", {})
                name = re.sub(r"[^\w.-]+", "_", about.get("name") or f"figure_{len(figures) + 1}")
                name += f"_{len(figures) + 1}" if name in (figure["name"] for figure in figures) else ""
                figure = {"name": name, "alt": about.get("alt", ""), "evidence": about.get("evidence", "")}
                figures.append(figure | {"png": data["image/png"]})
            if RESULT_MIME in data:
                results.append(data[RESULT_MIME])
            if output.output_type == "stream" and output.name == "stdout":
                lines = output.text.splitlines()
                claims += [line.removeprefix(CLAIM_MARK) for line in lines if line.startswith(CLAIM_MARK)]
    return {"figures": figures, "results": results, "claims": claims}


def describe(error: dict[str, str]) -> str:
    """One line: which cell, under which heading, what it does, what happened."""
    heading = f' under "{error["heading"]}"' if error["heading"] else ""
    message = " ".join(error["message"].split())
    return f"{error['cell']}{heading} ({error['line']}): {message[:300]}"


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
