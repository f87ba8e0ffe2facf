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
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any

from command_line import (
    ROOT,
    OneLineParser,
    plain,
    prepare_process,
    resolve_paths,
    to_json,
    write_json,
    write_whole,
)
from end_with_parent import end_with

CONNECT_S = 15  # for an answer of the scheduler
NO_WORKER_S = 15  # for a worker to come, or to come back
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
        try:
            fits = not any(isinstance(to_json(value), list | dict) for value in values)
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"{path}: parameters: {name}: expected numbers, words, true or false, got {values}"
            )
    from execute_notebook import declared_parameters

    known = declared_parameters(notebook)
    for name in sorted(set(parameters) - known):
        raise ValueError(f"{path}: parameters: {name}: the notebook declares {', '.join(sorted(known))}")
    points = (dict(zip(parameters, values)) for values in itertools.product(*parameters.values()))
    return notebook, [resolve_paths(point, path.parent) for point in points]


def record_file(notebook: Path, parameters: dict[str, Any], folder: Path) -> Path:
    """Where a point leaves its record; another notebook text or other values are another point."""
    text = json.dumps([notebook.read_text(encoding="utf-8"), parameters], sort_keys=True)
    return folder / "points" / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


def read_record(file: Path) -> dict[str, Any] | None:
    """A point's record; None where there is none, or a damaged one: the point is done again."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return record if {*ABOUT_A_POINT[:-1], "results"} <= record.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def run_point(notebook: Path, parameters: dict[str, Any], record: Path) -> None:
    """Execute one point and write its record, whole or not at all; do nothing where the record is there."""
    from execute_notebook import execute

    with _one_at_a_time:
        if read_record(record):
            return
        result = execute(notebook, record.with_suffix(".ipynb"), parameters, progress_bar=False)
        if result["status"] != "interrupted":
            write_json(record, {name: value for name, value in result.items() if name != "figures"})


def start_worker() -> None:
    """Leave Ctrl-C and a closed terminal to the parent, and end with it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with(multiprocessing.parent_process().pid)


def run_here(points: list[tuple], jobs: int) -> Iterator[None]:
    """Yields as points end. A stop, or an error, ends the points in progress; they leave no record."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(points)), spawn, start_worker) as pool:
        try:
            for future in as_completed([pool.submit(run_point, *point) for point in points]):
                yield future.result()
        except BaseException:  # a stop, or a full disk: the other points need not go on
            import psutil

            for worker in multiprocessing.active_children():
                with suppress(psutil.Error):  # it has ended
                    for process in psutil.Process(worker.pid).children(recursive=True):
                        process.kill()
                worker.kill()
            raise


def run_on_cluster(points: list[tuple], address: str) -> Iterator[None]:
    """Yields as points end. A worker that dies loses the point it was at, which another one then does.

    Raises OSError with the reason why no more of them can end.
    """
    from dask.distributed import Client, KilledWorker

    scripts = str(Path(__file__).resolve().parent)

    def run_on_worker(notebook: Path, parameters: dict[str, Any], record: Path) -> None:
        if scripts not in sys.path:  # the worker shares our checkout, and finds this file in it
            sys.path.insert(0, scripts)
        from run_grid import run_point

        run_point(notebook, parameters, record)

    if ":" not in address.rpartition("/")[2]:
        address += ":8786"
    try:
        client = Client(address, timeout=f"{CONNECT_S}s")
    except (OSError, ValueError) as error:
        raise OSError(f"--scheduler: {error}") from None
    with client:
        of_key = {f"point-{point[-1].stem}": point for point in points}
        futures = [client.submit(run_on_worker, *point, key=key) for key, point in of_key.items()]
        for key, error in ended_points(client, futures, address):
            _, parameters, record = of_key[key]
            if isinstance(error, KilledWorker):  # several workers in turn died of this point
                about = {"cell": "worker", "message": f"{type(error).__name__}: {error}"}
                lost = {"status": "died", "seconds": 0.0, "peak_mb": 0.0, "error": about, "results": []}
                write_json(record, lost | {"parameters": parameters})
            elif error:
                raise OSError(f"{address}: a worker cannot do this: {type(error).__name__}: {error}")
            elif not record.exists():
                raise OSError(f"{address}: its workers do not share {record.parent} with this machine")
            yield


def ended_points(client: Any, futures: list[Any], address: str) -> Iterator[tuple[str, Exception | None]]:
    """Yields a future's key and error when it ends; OSError when nothing is left to end the rest."""
    from dask.distributed import wait

    gone = f"{address}: the scheduler does not answer any more"
    waiting, seen = set(futures), time.monotonic()  # when there was last a worker
    while waiting:
        ended = set()
        try:
            ended = wait(waiting, timeout=1, return_when="FIRST_COMPLETED").done
            errors = [(future.key, future.exception()) for future in ended]
        except CancelledError:
            raise OSError(gone) from None
        except TimeoutError:  # none yet: will there be one?
            try:
                workers = client.sync(client.scheduler.ncores, callback_timeout=CONNECT_S)
            except OSError:
                raise OSError(gone) from None
            if workers:
                seen = time.monotonic()
            elif time.monotonic() > seen + NO_WORKER_S:
                raise OSError(f"{address}: the scheduler has no worker") from None
        else:
            yield from errors
        waiting -= ended


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
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())
    return len(rows), failed


def main() -> int:
    stop = prepare_process()
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
    if options.retry_failed:
        for *_, file in points:
            if (read_record(file) or {}).get("error"):
                file.unlink()

    from tqdm import tqdm

    missing = [point for point in points if not read_record(point[-1])]
    run, how = (run_on_cluster, options.scheduler) if options.scheduler else (run_here, options.jobs)
    bar = {"total": len(points), "initial": len(points) - len(missing), "unit": "point"}
    table, code = folder / "table.csv", 0
    if options.scheduler:
        logging.disable()  # what matters is raised; Dask would add many lines about the connection
    try:
        with stop.allowed():
            for _ in tqdm(run(missing, how), **bar) if missing else ():
                write_table(points, table)
    except KeyboardInterrupt:
        code = 130
    except (OSError, MemoryError, BrokenProcessPool) as error:  # no scheduler; a process killed; a full disk
        print(f"run_grid.py: {type(error).__name__}: {plain(error)}", file=sys.stderr)
        code = 1
    try:
        done, failed = write_table(points, table)
    except OSError as error:
        parser.error(str(error))
    print(f"{done} of {len(points)} points done, {failed} of them failed: {plain(os.path.relpath(table))}")
    return code or int(failed > 0 or done < len(points))


if __name__ == "__main__":
    sys.exit(main())
