import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_notebooks import PUBLISH, write_notebook

ROOT = Path(__file__).resolve().parents[1]
POINT = f"""{PUBLISH}
assert size != 3, 'three'
publish('double', 2 * size)
publish('on', {{'V100': 1.5}})
publish('table', [{{'a': 1}}])
"""


def run_grid(grid: Path, *options: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "scripts/run_grid.py",
        str(grid),
        "--output",
        str(grid.parent / "out"),
        *options,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def rows_of(grid: Path) -> list[dict[str, str]]:
    with (grid.parent / "out" / "table.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_grid(folder: Path, text: str) -> Path:
    grid = folder / "grid.yml"
    grid.write_text(text)
    return grid


def log_end(folder: Path) -> str:
    return f"with open({str(folder / 'log')!r}, 'a') as log:\n    log.write(f'{{size}}\\n')"


def test_every_point_is_a_row_and_a_rerun_does_only_the_missing(tmp_path):
    write_notebook(tmp_path / "point.ipynb", log_end(tmp_path), "## Experiment", POINT)
    grid = write_grid(tmp_path, "notebook: point.ipynb\nparameters: {size: [1, 3], quick: [true]}\n")
    done = run_grid(grid, "--jobs", "2")
    assert done.returncode == 1 and "2 of 2 points done, 1 of them failed" in done.stdout, done.stderr
    one, three = rows_of(grid)
    assert (one["size"], one["quick"], one["double"], one["status"]) == ("1", "True", "2", "ok")
    assert one["on: V100"] == "1.5" and "table" not in one
    assert (three["size"], three["double"], three["status"]) == ("3", "", "failed")
    assert three["error"] == "In [4]: AssertionError: three"
    assert (tmp_path / "out" / one["executed"]).exists()

    write_grid(tmp_path, "notebook: point.ipynb\nparameters: {size: [1, 3, 2], quick: [true]}\n")
    done = run_grid(grid, "--retry-failed")
    assert [row["size"] for row in rows_of(grid)] == ["1", "3", "2"], done.stderr
    again = run_grid(grid)  # now no row is missing
    assert again.returncode == 1 and again.stdout == done.stdout
    assert sorted((tmp_path / "log").read_text().split()) == ["1", "2", "3", "3"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("notebook: point.ipynb\n", "expected the two keys notebook and parameters"),
        ("notebook: no.ipynb\nparameters: {size: [1]}\n", "no file"),
        ("notebook: point.ipynb\nparameters: {size: 1}\n", "size: expected a list of values, got 1"),
        (
            "notebook: point.ipynb\nparameters: {width: [1]}\n",
            "width: the notebook declares device, quick, size",
        ),
        (
            "notebook: point.ipynb\nparameters: {size: [2026-11-29]}\n",
            "size: expected numbers, words, true or false",
        ),
        ("notebook: [", "while parsing"),
    ],
)
def test_a_bad_grid_is_one_clear_line(tmp_path, monkeypatch, text, said):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from run_grid import read_grid

    write_notebook(tmp_path / "point.ipynb", "size")
    grid = write_grid(tmp_path, text)
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        read_grid(grid)
    assert said in str(refused.value) and str(grid) in str(refused.value)


def test_ctrl_c_keeps_what_is_done(tmp_path):
    mark = f"import pathlib, time\npathlib.Path({str(tmp_path)!r}, f'at{{size}}').touch()"
    write_notebook(tmp_path / "point.ipynb", mark, "time.sleep(60 if size == 2 else 0)")
    grid = write_grid(tmp_path, "notebook: point.ipynb\nparameters: {size: [1, 2]}\n")
    command = [sys.executable, "scripts/run_grid.py", str(grid), "--output", str(tmp_path / "out")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
    wait_for((tmp_path / "at2").exists)
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=15)
    assert run.returncode == 130 and "1 of 2 points done, 0 of them failed" in out, err
    assert [row["size"] for row in rows_of(grid)] == ["1"]
    assert len(list((tmp_path / "out/points").glob("*.json"))) == 1


def test_a_refused_grid_leaves_nothing_behind(tmp_path):
    refused = run_grid(tmp_path / "none.yml")
    assert (
        refused.returncode == 2
        and refused.stderr.startswith("run_grid.py: ")
        and "none.yml" in refused.stderr
    )
    assert refused.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def test_the_example_is_a_grid(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from run_grid import read_grid

    notebook, points = read_grid(ROOT / "notebooks" / "grid_example.yml")
    assert notebook.parent == ROOT / "notebooks" and len(points) > 1


def test_no_scheduler_at_the_address_is_said(tmp_path):
    pytest.importorskip("distributed")
    write_notebook(tmp_path / "point.ipynb", "size")
    grid = write_grid(tmp_path, "notebook: point.ipynb\nparameters: {size: [1]}\n")
    refused = run_grid(grid, "--scheduler", "tcp://127.0.0.1:9")
    assert refused.returncode == 1 and "tcp://127.0.0.1:9" in refused.stderr.splitlines()[-1]
    assert "0 of 1 points done" in refused.stdout


def test_on_a_cluster_whose_worker_is_killed_nothing_is_lost_and_nothing_done_twice(tmp_path):
    pytest.importorskip("distributed")
    # Every point logs its start with the worker's pid (the kernel's parent) and, a little later, its end.
    log_start = (
        f"import os, time\nopen({str(tmp_path / 'started')!r}, 'a').write(f'{{size}} {{os.getppid()}}\\n')"
    )
    write_notebook(
        tmp_path / "point.ipynb",
        log_start,
        "time.sleep(0.5)",
        PUBLISH,
        log_end(tmp_path),
        "publish('double', 2 * size)",
    )
    sizes = list(range(1, 6))
    grid = write_grid(tmp_path, f"notebook: point.ipynb\nparameters: {{size: {sizes}}}\n")

    address_file = tmp_path / "scheduler.json"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    where = ["--scheduler-file", str(address_file), "--host", "127.0.0.1", "--no-dashboard"]
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", *where, "--port", "0"]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", *where, "--nthreads", "1", "--no-nanny"]
    processes = [subprocess.Popen(scheduler, cwd=tmp_path, **quiet)]
    try:
        processes += [subprocess.Popen(worker, cwd=tmp_path, **quiet) for _ in range(2)]
        wait_for(address_file.exists)
        address = json.loads(address_file.read_text())["address"]
        options = ["--output", str(tmp_path / "out"), "--scheduler", address]
        command = [sys.executable, "scripts/run_grid.py", str(grid), *options]
        driver = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        processes.append(driver)

        def started() -> list[list[str]]:
            file = tmp_path / "started"
            return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

        victim = processes[1]
        wait_for(
            lambda: [pid for _, pid in started()].count(str(victim.pid)) == 2
        )  # mid-way in its second point
        victim.kill()
        out, err = driver.communicate(timeout=60)
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()

    assert driver.returncode == 0 and "5 of 5 points done, 0 of them failed" in out, err
    assert [(row["size"], row["double"]) for row in rows_of(grid)] == [(str(n), str(2 * n)) for n in sizes]
    ended = (tmp_path / "log").read_text().split()
    assert sorted(ended) == sorted(map(str, sizes))  # each ended once
    lost = [size for size, pid in started() if pid == str(victim.pid)][-1]
    starts = [size for size, _ in started()]
    assert {size: starts.count(size) for size in map(str, sizes)} == {str(n): 1 for n in sizes} | {lost: 2}


def wait_for(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_a_parameter_may_not_hide_a_column_of_the_table(tmp_path):
    write_notebook(tmp_path / "point.ipynb", "## Experiment", POINT)
    for text, got in (("{status: [1]}", "'status'"), ("{1: [1]}", "1")):
        run = run_grid(write_grid(tmp_path, f"notebook: point.ipynb\nparameters: {text}\n"))
        assert run.returncode == 2 and run.stderr.endswith(f"got {got} (--help lists the options)\n")


def test_two_grids_do_not_work_in_one_folder(tmp_path):
    import fcntl

    write_notebook(tmp_path / "point.ipynb", "## Experiment", POINT)
    grid = write_grid(tmp_path, "notebook: point.ipynb\nparameters: {size: [1]}\n")
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = run_grid(grid)
    assert run.returncode == 2 and "another run_grid.py is at work" in run.stderr


def test_killed_for_good_it_leaves_no_worker_behind(tmp_path):
    import psutil

    slow = log_end(tmp_path) + "\nimport time\ntime.sleep(60)"
    write_notebook(tmp_path / "point.ipynb", slow, "## Experiment", POINT)
    grid = write_grid(tmp_path, "notebook: point.ipynb\nparameters: {size: [1, 2]}\n")
    command = [
        sys.executable,
        "scripts/run_grid.py",
        str(grid),
        "--output",
        str(tmp_path / "out"),
        "--jobs",
        "2",
    ]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 60
        while not (tmp_path / "log").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        started = psutil.Process(run.pid).children(recursive=True)
        run.kill()
    assert started
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive
