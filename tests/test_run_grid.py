"""run_grid.py on tiny notebooks, here and on a Dask cluster of this machine."""

import csv
import fcntl
import json
import signal
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import run_grid
from tiny_notebooks import PATIENCE_S, PUBLISH, hear_ctrl_c, wait_for, write_notebook

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


def start(grid: Path, *options: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "scripts/run_grid.py",
        str(grid),
        "--output",
        str(grid.parent / "out"),
        *options,
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, preexec_fn=hear_ctrl_c, **pipes)


def run(grid: Path, *options: str) -> tuple[int, str, str]:
    process = start(grid, *options)
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def rows_of(grid: Path) -> list[dict[str, str]]:
    with (grid.parent / "out" / "table.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def log_of(folder: Path, name: str = "log") -> list[str]:
    log = folder / name
    return sorted(log.read_text(encoding="utf-8").splitlines()) if log.exists() else []


def test_every_point_is_a_row_and_a_rerun_does_only_what_is_missing(tmp_path):
    grid = write_grid(tmp_path, "{size: [1, 3], quick: [true]}", LOG, "## Experiment", POINT)
    code, out, err = run(grid, "--jobs", "2")
    assert code == 1 and "2 of 2 points done, 1 of them failed" in out, err
    one, three = rows_of(grid)
    assert (one["size"], one["quick"], one["double"], one["status"]) == ("1", "True", "2", "ok")
    assert one["on: V100"] == "1.5" and "table" not in one
    assert (three["size"], three["double"], three["status"]) == ("3", "", "failed")
    assert three["error"] == "In [4]: AssertionError: three"
    assert (tmp_path / "out" / one["executed"]).exists()

    write_grid(tmp_path, "{size: [1, 3, 2], quick: [true]}")
    _, _, err = run(grid, "--retry-failed")
    assert [row["size"] for row in rows_of(grid)] == ["1", "3", "2"], err
    assert log_of(tmp_path) == ["1", "2", "3", "3"]


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ("{size: 1}", "size: expected a list of values, got 1"),
        ("{width: [1]}", "width: the notebook declares device, quick, size"),
        ("{size: [2026-11-29]}", "size: expected numbers, words, true or false"),
        ("{size: [[1]]}", "size: expected numbers, words, true or false"),
        ("[", "while parsing"),
        ("{size: [1]}\nnotes: x", "expected the two keys notebook and parameters"),
    ],
)
def test_a_bad_grid_is_one_clear_line(tmp_path, parameters, said):
    grid = write_grid(tmp_path, parameters, "size")
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        run_grid.read_grid(grid)
    assert said in str(refused.value) and str(grid) in str(refused.value)


def test_what_cannot_start_leaves_nothing_behind_and_is_one_line(tmp_path, monkeypatch, capsys):
    def refused(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["run_grid.py", *options, "--output", str(tmp_path / "out")])
        with pytest.raises(SystemExit, match="2"):
            run_grid.main()
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err

    grid = write_grid(tmp_path, "{size: [1]}")
    assert "none.yml" in refused(str(tmp_path / "none.yml")) and "no file" in refused(str(grid))
    assert not (tmp_path / "out").exists()
    write_grid(tmp_path, "{size: [1]}", "size")
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another run_grid.py is at work" in refused(str(grid))


def test_the_example_is_a_grid_and_its_paths_count_from_it(tmp_path):
    notebook, points = run_grid.read_grid(ROOT / "notebooks" / "grid_example.yml")
    assert notebook.parent == ROOT / "notebooks" and len(points) > 1
    write_notebook(tmp_path / "point.ipynb", parameters="trace_path = ''")
    _, points = run_grid.read_grid(write_grid(tmp_path, "{trace_path: [my.json]}"))
    assert points == [{"trace_path": str(tmp_path / "my.json")}]


def test_ctrl_c_keeps_what_is_done(tmp_path):
    grid = write_grid(tmp_path, "{size: [1, 2]}", SLOW)
    driver = start(grid)
    wait_for(lambda: log_of(tmp_path) == ["1", "2"])
    driver.send_signal(signal.SIGINT)
    out, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 130 and "1 of 2 points done, 0 of them failed" in out, err
    assert [row["size"] for row in rows_of(grid)] == ["1"]
    assert len(list((tmp_path / "out/points").glob("*.json"))) == 1


@pytest.fixture
def dask(tmp_path):
    """Starts `dask scheduler` or `dask worker` on this machine."""
    with ExitStack() as stack:

        def start(program: str, *options: str) -> subprocess.Popen:
            where = ["--scheduler-file", "scheduler.json", "--host", "127.0.0.1", "--no-dashboard", *options]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": tmp_path}
            command = [sys.executable, "-m", f"distributed.cli.dask_{program}", *where]
            process = stack.enter_context(subprocess.Popen(command, **quiet))
            stack.callback(process.kill)
            return process

        yield start


def test_on_a_cluster_a_dead_worker_loses_nothing_and_a_dead_scheduler_is_told(tmp_path, dask):
    scheduler = dask("scheduler", "--port", "0")
    workers = [dask("worker", "--nthreads", "1", "--no-nanny") for _ in range(2)]
    wait_for((tmp_path / "scheduler.json").exists)
    address = json.loads((tmp_path / "scheduler.json").read_text(encoding="utf-8"))["address"]
    # Every point logs its start with the worker's pid (the kernel's parent) and, a little later, its end.
    started = "import os, time\nwith open('started', 'a') as log:\n    log.write(f'{size} {os.getppid()}\\n')"
    cells = (started, "time.sleep(3600 if size == 6 else 0.5)", PUBLISH, LOG, "publish('double', 2 * size)")
    grid = write_grid(tmp_path, "{size: [1, 2, 3, 4, 5]}", *cells)
    driver = start(grid, "--scheduler", address)

    def starts() -> list[list[str]]:
        return [line.split() for line in log_of(tmp_path, "started")]

    def busiest() -> tuple[str, int]:
        return Counter(pid for _, pid in starts()).most_common(1)[0] if starts() else ("", 0)

    wait_for(lambda: busiest()[1] == 2)  # mid-way in its second point
    victim = busiest()[0]
    next(worker for worker in workers if str(worker.pid) == victim).kill()
    out, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0 and "5 of 5 points done, 0 of them failed" in out, err
    assert [(row["size"], row["double"]) for row in rows_of(grid)] == [
        (str(n), str(2 * n)) for n in range(1, 6)
    ]
    assert log_of(tmp_path) == list("12345")  # each ended once
    assert len(starts()) == 6  # the one that was lost began twice

    write_grid(tmp_path, "{size: [1, 6]}")
    driver = start(grid, "--scheduler", address)
    wait_for(lambda: len(starts()) == 7)
    scheduler.kill()
    out, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 1 and err.splitlines()[-1].endswith("it does not answer any more"), err
    assert "Traceback" not in err and "1 of 2 points done" in out


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nonsense://x"])
def test_a_scheduler_that_is_not_there_is_one_line(monkeypatch, address):
    monkeypatch.setattr(run_grid, "CONNECT_S", 1)
    with pytest.raises(OSError, match=rf"^--scheduler {address}[^\n]*$"):
        run_grid.run_on_cluster([], address, print)
