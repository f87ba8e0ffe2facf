"""Runs a notebook over every combination of parameters, here or on a Dask cluster; leaves one table.

A grid file names the notebook (relative to the file) and lists the values of its parameters:

    notebook: ../notebooks/04_grouped_foreach_plus_dma.ipynb
    parameters:
      batch_size: [1, 4, 16]
      top_k: [1, 4]

table.csv has a row for each point: parameters, published numbers, result, time, peak memory and, of a failed
point, the error. A point that has its row is not done again, unless the notebook changed or --retry-failed is
given.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from run_notebooks import ROOT, OneLineParser

ABOUT_A_POINT = ("status", "seconds", "peak_mb", "error", "executed")  # the table's last columns
_one_at_a_time = threading.Lock()  # timings must not disturb each other on a worker that has several threads


def read_grid(path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The notebook and the points, in the file's order, the last parameter running fastest.

    Raises ValueError that says what was expected, also for a parameter that the notebook does not declare.
    """
    import yaml

    try:
        grid = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(grid, dict) or set(grid) != {"notebook", "parameters"}:
        raise ValueError(f"{path}: expected the two keys notebook and parameters, got {grid!r:.80}")
    notebook, parameters = (path.parent / str(grid["notebook"])).resolve(), grid["parameters"]
    if not notebook.is_file():
        raise ValueError(f"{path}: notebook: no file {notebook}")
    if not isinstance(parameters, dict) or not parameters:
        raise ValueError(f"{path}: parameters: expected names with lists of values, got {parameters!r:.80}")
    for name, values in parameters.items():
        if not isinstance(name, str) or name in ABOUT_A_POINT:
            raise ValueError(f"{path}: parameters: expected a name other than {ABOUT_A_POINT}, got {name!r}")
        if not isinstance(values, list) or not values:
            raise ValueError(f"{path}: parameters: {name}: expected a list of values, got {values!r:.80}")
        if not all(isinstance(value, bool | int | float | str | None) for value in values):
            raise ValueError(
                f"{path}: parameters: {name}: expected numbers, words, true or false, got {values}"
            )
    from execute_notebook import declared_parameters

    known = declared_parameters(notebook)
    for name in sorted(set(parameters) - known):
        raise ValueError(f"{path}: parameters: {name}: the notebook declares {', '.join(sorted(known))}")
    points = itertools.product(*parameters.values())
    return notebook, [dict(zip(parameters, values, strict=True)) for values in points]


def record_file(notebook: Path, parameters: dict[str, Any], folder: Path) -> Path:
    """Where a point leaves its record; another notebook text or other values are another point."""
    text = json.dumps([notebook.read_text(encoding="utf-8"), parameters], sort_keys=True)
    return folder / "points" / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


def run_point(notebook: Path, parameters: dict[str, Any], record: Path) -> None:
    """Execute one point and write its record, whole or not at all; do nothing where the record is there."""
    from execute_notebook import execute
    from report import write_json

    with _one_at_a_time:
        if record.exists():
            return
        result = execute(notebook, record.with_suffix(".ipynb"), parameters, progress_bar=False)
        if result["status"] != "interrupted":
            write_json(record, {name: value for name, value in result.items() if name != "figures"})


def run_on_worker(scripts: str, notebook: Path, parameters: dict[str, Any], record: Path) -> None:
    """run_point in a Dask worker, which finds this file in the checkout that it shares with us."""
    if scripts not in sys.path:
        sys.path.insert(0, scripts)
    import run_grid

    run_grid.run_point(notebook, parameters, record)


def start_worker() -> None:
    """Leave Ctrl-C to the parent, and end when it is gone, killed, say, without a chance to tell."""

    def outlive_nobody(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=outlive_nobody, args=(os.getppid(),), daemon=True).start()


def run_here(points: list[tuple], jobs: int) -> Iterator[None]:
    """Yields as points end. Ctrl-C ends the points in progress; they leave no record."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(points)), spawn, start_worker) as pool:
        try:
            for future in as_completed([pool.submit(run_point, *point) for point in points]):
                yield future.result()
        except (KeyboardInterrupt, GeneratorExit):
            import psutil

            for process in psutil.Process().children(recursive=True):
                process.kill()
            raise


def run_on_cluster(points: list[tuple], address: str) -> Iterator[None]:
    """Yields as points end. A worker that dies loses the point it was at, which another one then does."""
    from dask.distributed import Client
    from dask.distributed import as_completed as as_completed_on_cluster
    from report import write_json

    with Client(address, timeout="5s") as client:
        scripts = str(Path(__file__).resolve().parent)
        of_key = {f"point-{point[-1].stem}": point for point in points}
        futures = [client.submit(run_on_worker, scripts, *point, key=key) for key, point in of_key.items()]
        for future in as_completed_on_cluster(futures):
            _, parameters, record = of_key[future.key]
            if error := future.exception():  # e.g. three workers in turn died of this point
                about = {"cell": "worker", "message": f"{type(error).__name__}: {error}"}
                lost = {"status": "died", "seconds": 0.0, "peak_mb": 0.0, "error": about, "results": []}
                write_json(record, lost | {"parameters": parameters})
            if not record.exists():
                raise OSError(f"{address}: its workers do not share {record.parent} with this machine")
            yield


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
        if file.exists():
            record = json.loads(file.read_text(encoding="utf-8"))
            error = record["error"]
            numbers = flatten(record["results"])
            failed += error is not None
            rows.append(
                parameters
                | {name: value for name, value in numbers.items() if name not in parameters}
                | {"status": record["status"], "seconds": record["seconds"], "peak_mb": record["peak_mb"]}
                | {"error": f"{error['cell']}: {error['message']}" if error else ""}
                | {"executed": f"points/{file.stem}.ipynb"}
            )
    names = dict.fromkeys(itertools.chain(*rows))
    columns = [name for name in names if name not in ABOUT_A_POINT] + [*ABOUT_A_POINT]
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(partial, path)
    return len(rows), failed


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = OneLineParser(prog="run_grid.py", description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("grid", type=Path, help="YAML file: notebook, and parameters with lists of values")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="notebooks at a time, here")
    cluster = "a Dask scheduler, tcp://host:8786; its workers, one a GPU, share this checkout and the output"
    parser.add_argument("--scheduler", metavar="ADDRESS", help=cluster)
    parser.add_argument("--output", type=Path, metavar="DIR", help="instead of runs/grid-<the file's name>")
    parser.add_argument(
        "--retry-failed", action="store_true", help="do again the points whose row is an error"
    )
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs: expected at least 1, got {options.jobs}")
    try:
        notebook, combinations = read_grid(options.grid)
    except ValueError as error:
        parser.error(str(error))
    folder = (options.output or ROOT / "runs" / f"grid-{options.grid.stem}").resolve()
    try:
        (folder / "points").mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
    except BlockingIOError:
        parser.error(f"--output: another run_grid.py is at work in {folder}")
    except OSError as error:
        parser.error(f"--output: {error}")
    records = {record_file(notebook, values, folder): values for values in combinations}
    points = [(notebook, values, record) for record, values in records.items()]
    if options.retry_failed:
        for *_, file in points:
            if file.exists() and json.loads(file.read_text(encoding="utf-8"))["error"]:
                file.unlink()

    from tqdm import tqdm

    missing = [point for point in points if not point[-1].exists()]
    table, code = folder / "table.csv", 0
    try:
        if missing:
            run, how = (run_on_cluster, options.scheduler) if options.scheduler else (run_here, options.jobs)
            for _ in tqdm(
                run(missing, how), total=len(points), initial=len(points) - len(missing), unit="point"
            ):
                write_table(points, table)
    except KeyboardInterrupt:
        code = 130
    except (OSError, BrokenProcessPool) as error:  # no scheduler at that address; a process killed
        print(f"run_grid.py: {type(error).__name__}: {error}", file=sys.stderr)
        code = 1
    done, failed = write_table(points, table)
    print(f"{done} of {len(points)} points done, {failed} of them failed: {os.path.relpath(table)}")
    return code or int(failed > 0 or done < len(points))


if __name__ == "__main__":
    sys.exit(main())
