"""run_grid.py on tiny notebooks, here and on a Dask cluster of this machine."""

import csv
import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import run_grid as run_grid_module
from run_grid import read_grid
from tiny_notebooks import PATIENCE_S, PUBLISH, wait_for, write_notebook

ROOT = Path(__file__).resolve().parents[1]
LOG = "with open('log', 'a') as log:\n    log.write(f'{size}\\n')"  # notebooks run in their own folder
POINT = f"""{PUBLISH}
assert size != 3, 'three'
publish('double', 2 * size)
publish('on', {{'V100': 1.5}})
publish('table', [{{'a': 1}}])
"""
SLOW = f"{LOG}\nimport time\ntime.sleep(3600 if size > 1 else 0)"


def write_grid(folder: Path, parameters: str, *cells: str) -> Path:
    if cells:
        write_notebook(folder / "point.ipynb", *cells)
    grid = folder / "grid.yml"
    grid.write_text(f"notebook: point.ipynb\nparameters: {parameters}\n", encoding="utf-8")
    return grid


def command(grid: Path, *options: str) -> list[str]:
    return [sys.executable, "scripts/run_grid.py", str(grid), "--output", str(grid.parent / "out"), *options]


def run_grid(grid: Path, *options: str, **changes) -> subprocess.CompletedProcess:
    return subprocess.run(command(grid, *options), cwd=ROOT, capture_output=True, text=True, **changes)


def start(grid: Path, *options: str) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command(grid, *options), cwd=ROOT, start_new_session=True, **pipes)


def rows_of(grid: Path) -> list[dict[str, str]]:
    with (grid.parent / "out" / "table.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def log_of(folder: Path) -> list[str]:
    log = folder / "log"
    return sorted(log.read_text(encoding="utf-8").split()) if log.exists() else []


def test_every_point_is_a_row_and_a_rerun_does_only_what_is_missing_or_damaged(tmp_path):
    grid = write_grid(tmp_path, "{size: [1, 3], quick: [true]}", LOG, "## Experiment", POINT)
    done = run_grid(grid, "--jobs", "2")
    assert done.returncode == 1 and "2 of 2 points done, 1 of them failed" in done.stdout, done.stderr
    one, three = rows_of(grid)
    assert (one["size"], one["quick"], one["double"], one["status"]) == ("1", "True", "2", "ok")
    assert one["on: V100"] == "1.5" and "table" not in one
    assert (three["size"], three["double"], three["status"]) == ("3", "", "failed")
    assert three["error"] == "In [4]: AssertionError: three"
    assert (tmp_path / "out" / one["executed"]).exists()

    (tmp_path / "out" / one["executed"]).with_suffix(".json").write_text('{"status": ', encoding="utf-8")
    write_grid(tmp_path, "{size: [1, 3, 2], quick: [true]}")
    done = run_grid(grid, "--retry-failed")
    assert [row["size"] for row in rows_of(grid)] == ["1", "3", "2"], done.stderr
    again = run_grid(grid)  # now no row is missing
    assert again.returncode == 1 and again.stdout == done.stdout
    assert log_of(tmp_path) == ["1", "1", "2", "3", "3"]


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ("{size: 1}", "size: expected a list of values, got 1"),
        ("{width: [1]}", "width: the notebook declares device, quick, size"),
        ("{size: [2026-11-29]}", "size: expected numbers, words, true or false"),
        ("{size: [.inf]}", "size: expected numbers, words, true or false"),
        ("{size: [[1]]}", "size: expected numbers, words, true or false"),
        ("{status: [1]}", "got 'status'"),
        ("{1: [1]}", "got 1"),
        ("[", "while parsing"),
        ("{size: [1]}\nnotes: x", "expected the two keys notebook and parameters"),
    ],
)
def test_a_bad_grid_is_one_clear_line(tmp_path, parameters, said):
    grid = write_grid(tmp_path, parameters, "size")
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        read_grid(grid)
    assert said in str(refused.value) and str(grid) in str(refused.value)


@pytest.mark.parametrize(("content", "said"), [(None, "no file"), ("{", "expected a notebook")])
def test_a_grid_without_its_notebook_is_one_clear_line(tmp_path, content, said):
    if content:
        (tmp_path / "point.ipynb").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"^[^\n]*{said}[^\n]*$"):
        read_grid(write_grid(tmp_path, "{size: [1]}"))


def test_a_refused_grid_leaves_nothing_behind(tmp_path):
    refused = run_grid(tmp_path / "none.yml")
    assert refused.returncode == 2 and refused.stderr.startswith("run_grid.py: ")
    assert "none.yml" in refused.stderr and refused.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_example_is_a_grid_and_its_paths_count_from_it(tmp_path):
    notebook, points = read_grid(ROOT / "notebooks" / "grid_example.yml")
    assert notebook.parent == ROOT / "notebooks" and len(points) > 1
    write_notebook(tmp_path / "point.ipynb", parameters="trace_path = ''")
    _, points = read_grid(write_grid(tmp_path, "{trace_path: [my.json]}"))
    assert points == [{"trace_path": str(tmp_path / "my.json")}]


def test_ctrl_c_keeps_what_is_done(tmp_path):
    grid = write_grid(tmp_path, "{size: [1, 2]}", SLOW)
    run = start(grid)
    wait_for(lambda: log_of(tmp_path) == ["1", "2"])
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 130 and "1 of 2 points done, 0 of them failed" in out, err
    assert [row["size"] for row in rows_of(grid)] == ["1"]
    assert len(list((tmp_path / "out/points").glob("*.json"))) == 1


def test_killed_for_good_it_leaves_no_process_behind(tmp_path):
    grid = write_grid(tmp_path, "{size: [2, 3]}", SLOW)
    with start(grid, "--jobs", "2") as run:
        wait_for(lambda: log_of(tmp_path))
        started = psutil.Process(run.pid).children(recursive=True)
        run.kill()
    assert started
    _, alive = psutil.wait_procs(started, timeout=PATIENCE_S)
    assert not alive


def test_two_grids_do_not_work_in_one_folder(tmp_path):
    grid = write_grid(tmp_path, "{size: [1]}", "size")
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = run_grid(grid)
    assert run.returncode == 2 and "another run_grid.py is at work" in run.stderr


def test_a_full_disk_is_one_line_and_the_other_points_are_not_waited_for(tmp_path):
    import resource

    points = "list(pathlib.Path('out').rglob('*.json'))"
    wait = f"import pathlib, time\nwhile size == 2 and not {points}: time.sleep(0.1)"
    fill = "print('x' * 3_000_000) if size == 2 else time.sleep(3600 if size == 4 else 0)"
    grid = write_grid(tmp_path, "{size: [1, 2, 4]}", wait, fill)
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))}
    done = run_grid(grid, "--jobs", "3", **limit)
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and said.startswith("run_grid.py: OSError: ") and ".ipynb" in said
    assert "Traceback" not in done.stderr and not list((tmp_path / "out").rglob("*.partial"))
    assert "1 of 3 points done" in done.stdout and [row["size"] for row in rows_of(grid)] == ["1"]


class Cluster:
    """A scheduler and workers on this machine, each a process; a worker of `elsewhere` has no checkout."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.stack, self.folder, self.file = stack, folder, folder / "scheduler.json"
        self.scheduler = self.start("dask_scheduler", "--port", "0", "--no-dashboard")
        wait_for(self.file.exists)
        self.address = json.loads(self.file.read_text(encoding="utf-8"))["address"]

    def start(self, program: str, *options: str, **changes) -> subprocess.Popen:
        where = ["--scheduler-file", str(self.file), "--host", "127.0.0.1"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": self.folder}
        run = [sys.executable, "-m", f"distributed.cli.{program}", *where, *options]
        process = self.stack.enter_context(subprocess.Popen(run, **quiet | changes))
        self.stack.callback(process.kill)
        return process

    def start_worker(self) -> subprocess.Popen:
        return self.start("dask_worker", "--nthreads", "1", "--no-nanny", "--no-dashboard")


@pytest.fixture
def cluster(tmp_path):
    with ExitStack() as stack:
        yield Cluster(stack, tmp_path)


def test_on_a_cluster_whose_worker_is_killed_nothing_is_lost_and_nothing_done_twice(tmp_path, cluster):
    # Every point logs its start with the worker's pid (the kernel's parent) and, a little later, its end.
    started = "import os, time\nwith open('started', 'a') as log:\n    log.write(f'{size} {os.getppid()}\\n')"
    cells = (started, "time.sleep(0.5)", PUBLISH, LOG, "publish('double', 2 * size)")
    sizes = list(range(1, 6))
    grid = write_grid(tmp_path, f"{{size: {sizes}}}", *cells)
    workers = [cluster.start_worker() for _ in range(2)]
    driver = start(grid, "--scheduler", cluster.address)

    def starts() -> list[list[str]]:
        file = tmp_path / "started"
        return [line.split() for line in file.read_text("utf-8").splitlines()] if file.exists() else []

    victim = str(workers[0].pid)
    wait_for(lambda: [pid for _, pid in starts()].count(victim) == 2)  # mid-way in its second point
    workers[0].kill()
    out, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0 and "5 of 5 points done, 0 of them failed" in out, err
    assert [(row["size"], row["double"]) for row in rows_of(grid)] == [(str(n), str(2 * n)) for n in sizes]
    assert log_of(tmp_path) == list(map(str, sizes))  # each ended once
    lost = [size for size, pid in starts() if pid == victim][-1]
    begun = [size for size, _ in starts()]
    assert {size: begun.count(size) for size in map(str, sizes)} == {str(n): 1 for n in sizes} | {lost: 2}


def test_a_scheduler_that_dies_is_told_and_the_table_kept(tmp_path, cluster):
    grid = write_grid(tmp_path, "{size: [1, 2]}", SLOW)
    cluster.start_worker()
    driver = start(grid, "--scheduler", cluster.address)
    wait_for(lambda: log_of(tmp_path) == ["1", "2"])
    wait_for((tmp_path / "out" / "table.csv").exists)
    cluster.scheduler.kill()
    out, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 1 and err.splitlines()[-1].endswith(
        "the scheduler does not answer any more"
    ), err
    assert "Traceback" not in err and "1 of 2 points done" in out
    assert [row["size"] for row in rows_of(grid)] == ["1"]


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("tcp://127.0.0.1:9", "tcp://127.0.0.1:9"),
        ("localhost:x", "--scheduler: invalid literal"),
        ("nonsense://x", "unknown address scheme 'nonsense'"),
        ("worker", "the scheduler has no worker"),
        ("checkout", "a worker cannot do this: ModuleNotFoundError: No module named 'run_grid'"),
    ],
)
def test_what_a_cluster_lacks_is_said_in_one_line(tmp_path, monkeypatch, request, lacks, said):
    gc.collect()  # a refused client of the case before closes itself now, not while the next one starts
    address = lacks
    if lacks in ("worker", "checkout"):
        cluster = request.getfixturevalue("cluster")
        address = cluster.address
        monkeypatch.setattr(run_grid_module, "NO_WORKER_S", 0 if lacks == "worker" else PATIENCE_S)
    if lacks == "checkout":  # where ours is
        cluster.start_worker()
        monkeypatch.setattr(run_grid_module, "__file__", str(tmp_path / "elsewhere" / "run_grid.py"))
    monkeypatch.setattr(run_grid_module, "CONNECT_S", 1 if ":9" in lacks else PATIENCE_S)
    notebook = write_notebook(tmp_path / "point.ipynb", "size")
    record = run_grid_module.record_file(notebook, {"size": 1}, tmp_path)
    with pytest.raises(OSError, match=r"^[^\n]*$") as refused:
        list(run_grid_module.run_on_cluster([(notebook, {"size": 1}, record)], address))
    assert said in str(refused.value) and not record.exists()
