"""run_all.sh on tiny notebooks: what it leaves, what it says and how it ends when something goes wrong."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tiny_notebooks import FIGURE, PUBLISH, write_notebook

ROOT = Path(__file__).resolve().parents[1]


def command(folder: Path, *options: str) -> list[str]:
    where = ["--notebooks", str(folder / "notebooks"), "--output", str(folder / "run")]
    return [str(ROOT / "run_all.sh"), *where, *options]


def run_all(folder: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(folder, *options), cwd=folder, capture_output=True, text=True, timeout=120)


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "run" / "summary.json").read_text())


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """One run of three: the first is fine, the second fails, the third kills its own kernel."""
    folder = tmp_path_factory.mktemp("mixed")
    results = (
        PUBLISH
        + "publish('launches_per_copy', 16)\npublish('seen', f'{device} {quick} {size}')\nprint('✓ it ran')"
    )
    write_notebook(folder / "notebooks" / "00_fine.ipynb", results, FIGURE, "big = b'x' * 200_000_000")
    broken = "\n# a remark\nassert size == 1, 'size is not one'"
    write_notebook(
        folder / "notebooks" / "01_broken.ipynb", "print(size)", "## The claim", broken, "print('never')"
    )
    kill = "import os, signal, time\nos.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    write_notebook(folder / "notebooks" / "02_killed.ipynb", "## The end", "print('before')", kill)
    started = time.monotonic()
    done = run_all(folder, "--quick", "--device", "cpu", "-p", "size", "7")
    return folder, done, time.monotonic() - started


def test_a_failing_notebook_does_not_stop_the_others_and_its_cell_is_named(mixed):
    folder, done, _ = mixed
    assert done.returncode == 1, done.stderr
    assert [n["status"] for n in summary_of(folder)["notebooks"]] == ["ok", "failed", "died"]
    lines = done.stdout.splitlines()
    broken = next(i for i, line in enumerate(lines) if line.startswith("01_broken"))
    assert "failed" in lines[broken] and " s " in lines[broken] and " MB" in lines[broken]
    said = "In [4] under \"The claim\" (assert size == 1, 'size is not one'): AssertionError: size is not one"
    assert lines[broken + 1].strip() == said
    assert "00_fine" in done.stderr and "%|" in done.stderr  # papermill's progress bar, named


def test_a_killed_kernel_is_reported_at_once(mixed):
    folder, _, seconds = mixed
    killed = summary_of(folder)["notebooks"][2]
    assert killed["error"]["heading"] == "The end" and killed["error"]["line"].startswith("import os, signal")
    assert "killed" in killed["error"]["message"] and killed["seconds"] < 10 and seconds < 60


def test_parameters_memory_and_results_are_in_the_summary(mixed):
    folder, *_ = mixed
    summary = summary_of(folder)
    assert summary["complete"] and summary["parameters"] == {"device": "cpu", "quick": True, "size": 7}
    assert summary["machine"]["torch"] and summary["machine"]["name"]
    fine, broken, killed = summary["notebooks"]
    assert {r["name"]: r["value"] for r in fine["results"]} == {
        "launches_per_copy": 16,
        "seen": "cpu True 7",
    }
    assert fine["claims"] == ["it ran"] and fine["error"] is None
    assert 200 < fine["peak_mb"] < summary["peak_limit_mb"] == 1500
    assert 20 < broken["peak_mb"] < 200 and killed["peak_mb"] > 20  # of each kernel, not of all so far


def test_notebooks_html_and_figures_are_left(mixed):
    folder, *_ = mixed
    run = folder / "run"
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    stems = ("00_fine", "01_broken", "02_killed")
    executed = {f"notebooks/{stem}.{kind}" for stem in stems for kind in ("ipynb", "html")}
    assert names == executed | {"figures/00_dot.png", "summary.json", "report.html"}
    assert (run / "figures/00_dot.png").read_bytes().startswith(b"\x89PNG")
    assert "before" in (run / "notebooks/02_killed.html").read_text()


def test_ctrl_c_leaves_what_was_finished(tmp_path):
    write_notebook(tmp_path / "notebooks" / "00_fine.ipynb", FIGURE)
    mark = tmp_path / "started"
    busy = f"import pathlib, time\npathlib.Path({str(mark)!r}).touch()\ntime.sleep(60)"
    write_notebook(tmp_path / "notebooks" / "01_long.ipynb", busy)
    write_notebook(tmp_path / "notebooks" / "02_never.ipynb", "size")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen(command(tmp_path), cwd=tmp_path, start_new_session=True, **pipes)
    deadline = time.monotonic() + 60
    while not mark.exists():
        assert time.monotonic() < deadline and run.poll() is None
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=15)
    assert run.returncode == 130 and "interrupted" in out, err
    summary = summary_of(tmp_path)
    assert [n["status"] for n in summary["notebooks"]] == ["ok", "interrupted"] and not summary["complete"]
    assert (tmp_path / "run/figures/00_dot.png").exists()
    assert "stopped before its end" in (tmp_path / "run/report.html").read_text()


def test_only_takes_the_notebooks_named(tmp_path):
    for name in ("00_a", "01_b", "02_c"):
        write_notebook(tmp_path / "notebooks" / f"{name}.ipynb", "size")
    done = run_all(tmp_path, "--only", "2", "--only", "00")
    assert done.returncode == 0, done.stderr
    assert [n["notebook"] for n in summary_of(tmp_path)["notebooks"]] == ["00_a", "02_c"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only", "07"], "--only: expected one of 00, got 07"),
        (["-p", "width", "3"], "-p width: no such parameter; these notebooks declare device, quick, size"),
        (["-p", "size"], "-p: expected 2 arguments"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--qick"], "unrecognized arguments: --qick"),
        (["--output", "."], "--output: expected a new or empty folder"),
    ],
)
def test_a_bad_option_is_one_clear_line(tmp_path, options, said):
    write_notebook(tmp_path / "notebooks" / "00_a.ipynb", "size")
    refused = run_all(tmp_path, *options)
    assert refused.returncode == 2 and refused.stdout == ""
    assert said in refused.stderr and refused.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_cuda_is_refused_where_there_is_none(tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA or ROCm device")
    write_notebook(tmp_path / "notebooks" / "00_a.ipynb", "size")
    refused = run_all(tmp_path, "--device", "cuda")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "--device: expected a CUDA or ROCm device" in refused.stderr


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        ("true", True),
        ("None", None),
        ("[1, 2]", [1, 2]),
        ("a-b", "a-b"),
    ],
)
def test_values_on_the_command_line_are_literals_or_text(monkeypatch, text, value):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from run_notebooks import parse_value

    assert parse_value(text) == value and type(parse_value(text)) is type(value)


# The environment, on a copy of the project with a pip list of nothing and stand-ins for what is on the PATH.


@pytest.fixture
def checkout(tmp_path):
    project = tmp_path / "project"
    (project / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/setup_environment.sh", project / "scripts")
    (project / "environment.yml").write_text(
        "name: workbench-test\ndependencies:\n  - python=3.11\n  - pip:\n      # none\n"
    )
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "sed", "cat", "dirname", "env"):
        (tools / name).symlink_to(shutil.which(name))
    return project, tools


def put_tool(tools: Path, name: str, script: str) -> None:
    (tools / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (tools / name).chmod(0o755)


def set_up(project: Path, tools: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [project / "scripts/setup_environment.sh"],
        env={"PATH": str(tools), "HOME": str(project)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_venv_is_made_once_and_brought_up_to_date_when_the_list_changes(checkout):
    project, tools = checkout
    python = Path(os.path.realpath(os.sys.executable))
    put_tool(tools, "python3.11", f'exec {python} "$@"')
    first = set_up(project, tools)
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{project}/.venv/bin/python\n" and "Creating .venv" in first.stderr
    second = set_up(project, tools)
    assert second.stdout == first.stdout and second.stderr == ""
    with (project / "environment.yml").open("a") as file:
        file.write("      # changed\n")
    third = set_up(project, tools)
    assert third.returncode == 0 and "Installing" in third.stderr and "Creating" not in third.stderr


def test_conda_is_used_where_it_is_on_the_path(checkout):
    project, tools = checkout
    prefix = project.parent / "conda-env"
    python = Path(os.path.realpath(os.sys.executable))
    put_tool(
        tools,
        "micromamba",
        f"""case $1 in
        create) [[ "$*" == "create -y -n workbench-test -c conda-forge python=3.11 pip" ]] || exit 3
                {python} -m venv {prefix} ;;
        run) [[ -x {prefix}/bin/python ]] || exit 1; shift 3; shift; {prefix}/bin/python "$@" ;;
        esac""",
    )
    first = set_up(project, tools)
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{prefix}/bin/python\n" and not (project / ".venv").exists()
    second = set_up(project, tools)
    assert second.stdout == first.stdout and second.stderr == ""


def test_without_a_python_that_is_new_enough_the_message_says_what_is_needed(checkout):
    project, tools = checkout
    put_tool(tools, "python3", "exit 1")  # an older one: the version check fails
    refused = set_up(project, tools)
    assert refused.returncode == 1 and refused.stdout == ""
    assert (
        refused.stderr.startswith("error: Python 3.11 or newer was not found") and "conda" in refused.stderr
    )


def test_an_active_environment_that_has_the_pins_is_used_as_it_is(checkout):
    project, tools = checkout
    active = Path(os.sys.prefix)
    used = set_up(project, tools, VIRTUAL_ENV=str(active))
    assert used.returncode == 0 and used.stdout == f"{active}/bin/python\n" and used.stderr == ""
    with (project / "environment.yml").open("a") as file:
        file.write("      - pip==0.1  # which nobody has\n")
    other = set_up(project, tools, VIRTUAL_ENV=str(active))
    assert other.returncode == 1 and "was not found" in other.stderr  # and so it would make its own
