"""Runs a notebook over every combination of parameters, here or on a Dask cluster; leaves one table.

A grid file names the notebook (relative to the file) and lists the values of its parameters:

    notebook: ../notebooks/04_grouped_foreach_plus_dma.ipynb
    parameters:
      batch_size: [1, 4, 16]
      preset: [llama3-8b, deepseek-v3]

Paths count from the file too. table.csv has a row for each point: parameters, published numbers, result,
time, peak memory and, of a failed point, the error. A point that has its row is not done again, unless the
notebook changed or --retry-failed is given.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import io
import itertools
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import yaml
from command_line import (
    ROOT,
    OneLineParser,
    plain,
    resolve_paths,
    run_here,
    run_main,
    write_json,
    write_whole,
)
from execute_notebook import declared_parameters, execute
from tqdm import tqdm

CONNECT_S = 15  # for an answer of the scheduler
WORKER_S = 15  # for its first worker
ABOUT_A_POINT = ("status", "seconds", "peak_mb", "error", "executed")  # the table's last columns
_one_at_a_time = threading.Lock()  # timings must not disturb each other on a worker that has several threads


def read_grid(path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The notebook and the points, in the file's order, the last parameter running fastest.

    Raises ValueError that says what was expected, also for a parameter that the notebook does not declare.
    """
    try:
        grid = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {plain(error)}") from None
    if not isinstance(grid, dict) or set(grid) != {"notebook", "parameters"}:
        raise ValueError(f"{path}: expected the two keys notebook and parameters, got {grid!r:.80}")
    notebook, parameters = (path.parent / str(grid["notebook"])).resolve(), grid["parameters"]
    if not notebook.is_file():
        raise ValueError(f"{path}: notebook: no file {notebook}")
    if not isinstance(parameters, dict) or not parameters:
        raise ValueError(f"{path}: parameters: expected names with lists of values, got {parameters!r:.80}")
    known = declared_parameters(notebook)
    for name, values in parameters.items():
        if name not in known:
            raise ValueError(f"{path}: parameters: {name}: the notebook declares {', '.join(sorted(known))}")
        if not isinstance(values, list) or not values:
            raise ValueError(f"{path}: parameters: {name}: expected a list of values, got {values!r:.80}")
        if not all(isinstance(value, int | float | str | None) for value in values):
            expected = "expected numbers, words, true or false"
            raise ValueError(f"{path}: parameters: {name}: {expected}, got {values}")
    points = (dict(zip(parameters, values)) for values in itertools.product(*parameters.values()))
    return notebook, [resolve_paths(point, path.parent) for point in points]


def record_file(notebook: Path, parameters: dict[str, Any], folder: Path) -> Path:
    """Where a point leaves its record; another notebook text or other values are another point."""
    text = json.dumps([notebook.read_text(encoding="utf-8"), parameters], sort_keys=True)
    return folder / "points" / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


def read_record(file: Path) -> dict[str, Any] | None:
    """A point's record, which was written whole; None where there is none."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def run_point(notebook: Path, parameters: dict[str, Any], record: Path) -> Path:
    """Execute one point and write its record; where that is there already, only return it."""
    with _one_at_a_time:
        if not record.exists():
            result = execute(notebook, record.with_suffix(".ipynb"), parameters)
            write_json(record, {name: value for name, value in result.items() if name != "figures"})
    return record


def run_on_cluster(points: list[tuple], address: str, done: Callable[[Path], None]) -> None:
    """Call `done` as points end. A worker that dies loses the point it was at, which another one then does.

    Raises OSError with the reason why no more of them can end.
    """
    from dask.distributed import Client, as_completed

    scripts = str(Path(__file__).resolve().parent)

    def run_on_worker(notebook: Path, parameters: dict[str, Any], record: Path) -> Path:
        if scripts not in sys.path:  # the worker shares our checkout, and finds this file in it
            sys.path.insert(0, scripts)
        from run_grid import run_point

        return run_point(notebook, parameters, record)

    if ":" not in address.rpartition("/")[2]:
        address += ":8786"
    try:
        with Client(address, timeout=f"{CONNECT_S}s") as client:
            client.wait_for_workers(1, timeout=WORKER_S)
            futures = [
                client.submit(run_on_worker, *point, key=f"point-{point[-1].stem}") for point in points
            ]
            for future in as_completed(futures):
                record = future.result()
                if not record.exists():
                    raise OSError(f"its workers do not share {record.parent} with this machine")
                done(record)
    except CancelledError:
        raise OSError(f"--scheduler {address}: it does not answer any more") from None
    except Exception as error:  # no scheduler, no worker, a worker that cannot
        raise OSError(f"--scheduler {address}: {type(error).__name__}: {error}") from None


def flatten(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Published numbers and texts by name, those of a dict by "name: key"; a table has no place in a row."""
    flat = {}
    for name, value in ((result["name"], result["value"]) for result in results):
        if isinstance(value, dict):
            flat |= {f"{name}: {key}": number for key, number in value.items()}
        elif not isinstance(value, list):
            flat[name] = value
    return flat


def write_table(points: list[tuple], path: Path) -> tuple[int, int]:
    """Write the rows of the points that are done; return how many are done and how many of them failed."""
    rows, failed = [], 0
    for _, parameters, file in points:
        record = read_record(file)
        if record is None:
            continue
        error = record["error"]
        failed += error is not None
        row = flatten(record["results"]) | parameters
        row |= {name: record[name] for name in ("status", "seconds", "peak_mb")}
        row["error"] = f"{error['cell']}: {error['message']}" if error else ""
        row["executed"] = f"points/{file.stem}.ipynb"
        rows.append(row)
    names = dict.fromkeys(itertools.chain(points[0][1], *rows))
    columns = [name for name in names if name not in ABOUT_A_POINT] + [*ABOUT_A_POINT]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())
    return len(rows), failed


def make_parser() -> OneLineParser:
    parser = OneLineParser(prog="run_grid.py", description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("grid", type=Path, help="YAML file: notebook, and parameters with lists of values")
    add("--jobs", type=int, default=1, metavar="N", help="notebooks at a time, here")
    cluster = "a Dask scheduler, tcp://host:8786; its workers, one a GPU, share this checkout and the output"
    add("--scheduler", metavar="ADDRESS", help=cluster)
    add("--output", type=Path, metavar="DIR", help="instead of runs/grid-<the file's name>")
    add("--retry-failed", action="store_true", help="do again the points whose row is an error")
    return parser


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs: expected at least 1, got {options.jobs}")
    try:
        notebook, combinations = read_grid(options.grid.absolute())
    except ValueError as error:
        parser.error(str(error))
    folder = (options.output or ROOT / "runs" / f"grid-{options.grid.stem}").resolve()
    try:
        (folder / "points").mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
    except BlockingIOError:
        parser.error(f"--output: another run_grid.py is at work in {folder}")
    except OSError as error:
        parser.error(f"--output: {error}")
    records = {record_file(notebook, values, folder): values for values in combinations}
    points = [(notebook, values, record) for record, values in records.items()]
    missing = []
    for point in points:
        record = read_record(point[-1])
        if record is None or (options.retry_failed and record["error"]):
            point[-1].unlink(missing_ok=True)
            missing.append(point)

    table, code = folder / "table.csv", 0
    bar = tqdm(total=len(points), initial=len(points) - len(missing), unit="point")

    def done(_: Path) -> None:
        write_table(points, table)
        bar.update()

    try:
        with bar:
            if options.scheduler and missing:
                logging.disable()  # what matters is raised; Dask would add many lines about the connection
                run_on_cluster(missing, options.scheduler, done)
            elif missing:
                run_here(run_point, missing, options.jobs, done)
    except KeyboardInterrupt:
        code = 130
    except (OSError, BrokenProcessPool) as error:  # no scheduler; a process killed; a full disk
        print(f"run_grid.py: {type(error).__name__}: {plain(error)}", file=sys.stderr)
        code = 1
    try:
        count, failed = write_table(points, table)
    except OSError as error:
        parser.error(str(error))
    print(f"{count} of {len(points)} points done, {failed} of them failed: {plain(os.path.relpath(table))}")
    return code or int(failed > 0 or count < len(points))


if __name__ == "__main__":
    run_main(main)
