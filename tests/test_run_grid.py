"""run_grid.py on tiny notebooks, here and on a Dask cluster of this machine."""

import fcntl
import json
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pandas as pd
import pytest
import run_grid
from tiny_notebooks import PARAMETERS, PATIENCE_S, PUBLISH, wait_for, write_notebook

ROOT = Path(__file__).resolve().parents[1]
LOG = "with open('log', 'a') as log:\n    log.write(f'{size}\\n')"  # notebooks run in their own folder
DOUBLE = "publish('double', 2 * size)"
POINT = f"assert size != 3, 'three'\n{DOUBLE}\npublish('on', {{'V100': 1.5}})\npublish('table', [{{'a': 1}}])"
# The start with the worker's pid, which is the kernel's parent; the end once the test says so.
WAIT = """import os, time
with open('started', 'a') as log:
    log.write(f'{size} {os.getppid()}\\n')
while not os.path.exists('go'):
    time.sleep(0.1)"""


def write_grid(folder: Path, parameters: str, *cells: str) -> Path:
    if cells:
        write_notebook(folder / "point.ipynb", *cells, parameters=f"{PARAMETERS}\ntrace_path = ''")
    grid = folder / "grid.yml"
    grid.write_text(f"notebook: point.ipynb\nparameters: {parameters}\n", encoding="utf-8")
    return grid


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a grid with options; its exit status and what it says."""

    def run_with(*options: object) -> tuple[int, str, str]:
        given = [*map(str, options), "--output", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["run_grid.py", *given])
        with pytest.raises(SystemExit) as ended:
            sys.exit(run_grid.main())
        return ended.value.code, *capsys.readouterr()

    yield run_with
    logging.disable(logging.NOTSET)


def table_of(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "out" / "table.csv", dtype=str, keep_default_na=False)


def log_of(folder: Path, name: str = "log") -> list[str]:
    log = folder / name
    return sorted(log.read_text(encoding="utf-8").splitlines()) if log.exists() else []


def test_every_point_is_a_row_and_a_rerun_does_only_what_is_missing(tmp_path, run, monkeypatch):
    """The first run is stopped. What that ends, a test of run_all.sh sees: both use the same function."""

    def stopped_after_the_first(function, tasks, jobs, done):
        done(function(*tasks[0]))
        raise KeyboardInterrupt

    parameters = "{size: [1, 3], quick: [true], trace_path: [my.json]}"
    grid = write_grid(tmp_path, parameters, LOG, PUBLISH, "## Experiment", POINT)
    with monkeypatch.context() as patch:
        patch.setattr(run_grid, "run_here", stopped_after_the_first)
        status, out, _ = run(grid)
    assert status == 130 and "1 of 2 points done, 0 of them failed" in out
    status, out, err = run(grid, "--jobs", "2")
    assert status == 1 and "2 of 2 points done, 1 of them failed" in out, err
    table = table_of(tmp_path)
    assert (tmp_path / "out" / table.pop("executed")[0]).exists()
    expected = {"size": ["1", "3"], "quick": ["True"] * 2, "trace_path": [str(tmp_path / "my.json")] * 2}
    expected |= {"double": ["2", ""], "on: V100": ["1.5", ""], "status": ["ok", "failed"]}
    expected["error"] = ["", "In [5]: AssertionError: three"]
    assert table.drop(columns=["seconds", "peak_mb"]).to_dict("list") == expected

    write_grid(tmp_path, parameters.replace("3", "3, 2"))
    run(grid, "--retry-failed")
    assert [*table_of(tmp_path)["size"]] == ["1", "3", "2"]
    assert log_of(tmp_path) == ["1", "2", "3", "3"]


BAD_GRIDS = {  # what is said -> parameters of the grid
    "size: expected a list of values, got 1": "{size: 1}",
    "width: the notebook declares device, quick, size": "{width: [1]}",
    "size: expected numbers, words, true or false": "{size: [[1]]}",
    "while parsing": "[",
    "expected the two keys notebook and parameters": "{size: [1]}\nnotes: x",
    "notebook: no file": "{size: [1]}\nnotebook: missing.ipynb",
}


@pytest.mark.parametrize("said", BAD_GRIDS)
def test_a_bad_grid_is_one_clear_line_and_leaves_nothing_behind(tmp_path, run, said):
    grid = write_grid(tmp_path, BAD_GRIDS[said], "size")
    status, out, err = run(grid)
    assert (status, out) == (2, "") and err.count("\n") == 1 and f"{grid}: " in err and said in err
    assert not (tmp_path / "out").exists()


def test_what_cannot_start_is_one_line(tmp_path, run, monkeypatch):
    grid = ROOT / "notebooks" / "grid_example.yml"
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another run_grid.py is at work" in run(grid)[-1]
    monkeypatch.setattr(run_grid, "CONNECT_S", 1)
    status, _, err = run(grid, "--scheduler", "tcp://127.0.0.1:9")
    assert status == 1 and "--scheduler tcp://127.0.0.1:9: " in err.splitlines()[-1]


@pytest.fixture
def cluster(tmp_path):
    """A Dask scheduler and two workers on this machine: its address, and the three processes."""
    where = ["--scheduler-file", "scheduler.json", "--host", "127.0.0.1", "--no-dashboard"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": tmp_path}
    programs = [("scheduler", "--port", "0"), *[("worker", "--nthreads", "1", "--no-nanny")] * 2]
    processes = []
    with ExitStack() as stack:
        for program, *options in programs:
            command = [sys.executable, "-m", f"distributed.cli.dask_{program}", *where, *options]
            processes.append(stack.enter_context(subprocess.Popen(command, **quiet)))
            stack.callback(processes[-1].kill)
        wait_for((tmp_path / "scheduler.json").exists)
        yield json.loads((tmp_path / "scheduler.json").read_text(encoding="utf-8"))["address"], *processes


def test_on_a_cluster_a_dead_worker_loses_nothing_and_a_dead_scheduler_is_told(tmp_path, run, cluster):
    address, scheduler, *workers = cluster
    grid = write_grid(tmp_path, "{size: [1, 2, 3]}", WAIT, PUBLISH, LOG, DOUBLE)
    beside = ThreadPoolExecutor()  # which ends with the scheduler, whatever the test finds
    running = beside.submit(run, grid, "--scheduler", address)
    wait_for(lambda: len(log_of(tmp_path, "started")) == 2)  # one a worker
    victim = log_of(tmp_path, "started")[0].split()[1]
    next(worker for worker in workers if str(worker.pid) == victim).kill()
    (tmp_path / "go").touch()
    status, out, err = running.result(PATIENCE_S)
    assert status == 0 and "3 of 3 points done, 0 of them failed" in out, err
    assert [*table_of(tmp_path).double] == ["2", "4", "6"]
    assert log_of(tmp_path) == ["1", "2", "3"]  # each ended once
    assert len(log_of(tmp_path, "started")) == 4  # the one that was lost began twice

    (tmp_path / "go").unlink()
    write_grid(tmp_path, "{size: [1, 6]}")
    running = beside.submit(run, grid, "--scheduler", address)
    wait_for(lambda: len(log_of(tmp_path, "started")) == 5)
    scheduler.kill()
    status, out, err = running.result(PATIENCE_S)
    assert status == 1 and err.splitlines()[-1].endswith("it does not answer any more"), err
    assert "Traceback" not in err and "1 of 2 points done" in out
