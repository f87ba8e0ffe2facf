"""run_all.sh on tiny notebooks: what it leaves, what it says and how it ends when something goes wrong."""

import datetime
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import command_line
import execute_notebook
import nbformat
import psutil
import pytest
import run_notebooks
from tiny_notebooks import FIGURE, PATIENCE_S, PNG, PUBLISH, wait_for, write_notebook

ROOT = Path(__file__).resolve().parents[1]
SAY_STARTED = "import pathlib\npathlib.Path('started').touch()"  # notebooks run in their own folder


def command(folder: Path, *options: str) -> list[str]:
    where = ["--notebooks", str(folder / "notebooks"), "--output", str(folder / "run")]
    return [str(ROOT / "run_all.sh"), *where, *options]


def run_all(folder: Path, *options: str, **changes) -> subprocess.CompletedProcess:
    return subprocess.run(command(folder, *options), cwd=folder, capture_output=True, text=True, **changes)


def start(folder: Path, *options: str) -> subprocess.Popen:
    """A run in a session of its own, once one of its notebooks has said that it has started."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen(command(folder, *options), cwd=folder, start_new_session=True, **pipes)
    wait_for(lambda: (folder / "notebooks" / "started").exists() or run.poll() is not None)
    assert run.poll() is None, run.communicate()
    return run


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """One run of four in a hostile place: one is fine, one fails, one is killed, one loses its figure."""
    folder = tmp_path_factory.mktemp("mixed") / "空 间 {x}"
    notebooks = folder / "notebooks"
    parameters = ("quick = False", 'device = "auto"', 'size = "a=b"  # = c', "rows: int | None = None")
    write_notebook(
        notebooks / "00_fine.ipynb",
        PUBLISH
        + "publish('launches_per_copy', 16)\npublish('seen', repr([device, quick, size, rows, trace_path]))\n"
        + "import numpy\nprint('✓ it ran')",
        FIGURE,
        "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()",
        "big = b'x' * 200_000_000",
        parameters="\n".join(parameters) + "\ntrace_path = ''",
    )
    broken = "\n# a remark\nassert size == 1, 'size is\\n\\x1b[31mnot one'"
    write_notebook(notebooks / "01_broken.ipynb", "print(size)", "## The claim", broken, "print('never')")
    child = "import subprocess\nprint(f\"child {subprocess.Popen(['sleep', '3600']).pid}.\")"
    kill = "import os, signal, time\nos.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(3600)"
    write_notebook(notebooks / "02_killed.ipynb", "## The end", child, kill)
    lost = "from IPython.display import display\ndef show(fig): display(fig)\nimport matplotlib.pyplot as plt"
    svg = "%config InlineBackend.figure_formats = ['svg']"
    write_notebook(notebooks / "03_lost.ipynb", lost, svg, "show(plt.plot([1, 2])[0].figure)\nplt.close()")

    kernel = folder / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    foreign = {"argv": ["/bin/false", "{connection_file}"], "display_name": "Theirs", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(foreign), encoding="utf-8")
    (folder / "numpy.py").write_text("raise ImportError('not ours')", encoding="utf-8")
    (folder / "run_all").symlink_to(ROOT / "run_all.sh")
    hostile = {"JUPYTER_PATH": str(folder / "jupyter"), "PYTHONPATH": str(folder), "PYTHONOPTIMIZE": "1"}
    hostile |= {"MPLBACKEND": "Agg", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    _, *options = command(folder, "--quick", "--device", "cpu", "-p", "size", "7", "-p", "rows", "(4, 2)")
    done = subprocess.run(
        [folder / "run_all", *options, "-p", "trace_path", "数据.json"],
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        env=os.environ | hostile,
    )
    return folder, done


def test_a_failing_notebook_does_not_stop_the_others_and_its_cell_is_named(mixed):
    folder, done = mixed
    assert done.returncode == 1, done.stderr
    assert [n["status"] for n in summary_of(folder)["notebooks"]] == ["ok", "failed", "died", "failed"]
    lines = done.stdout.splitlines()
    broken = next(i for i, line in enumerate(lines) if line.startswith("01_broken"))
    assert "failed" in lines[broken] and " s " in lines[broken] and " MB" in lines[broken]
    where = "In [4] under \"The claim\" (assert size == 1, 'size is\\n\\x1b[31mnot one'): "
    assert lines[broken + 1].strip() == where + "AssertionError: size is \\x1b[31mnot one"
    assert "00_fine" in done.stderr and "%|" in done.stderr  # papermill's progress bar, named
    assert "PYTHONPATH is left out" in done.stderr


def test_a_killed_kernel_is_reported_and_what_it_started_is_ended(mixed):
    folder, _ = mixed
    killed = summary_of(folder)["notebooks"][2]
    assert killed["error"]["heading"] == "The end" and killed["error"]["line"].startswith("import os, signal")
    assert "killed" in killed["error"]["message"]
    html = (folder / "run/notebooks/02_killed.html").read_text(encoding="utf-8")
    child = int(re.search(r"child (\d+)\.", html)[1])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_notebook_without_its_figures_is_not_ok(mixed):
    folder, _ = mixed
    lost = summary_of(folder)["notebooks"][3]
    assert lost["error"]["line"] == "show(plt.plot([1, 2])[0].figure)" and lost["figures"] == []
    assert lost["error"]["message"] == "expected 1 figures as PNG in the outputs of this cell, found 0"


def test_parameters_memory_and_results_are_in_the_summary(mixed):
    folder, _ = mixed
    summary = summary_of(folder)
    values = {"size": 7, "rows": [4, 2], "trace_path": str(folder / "数据.json")}
    assert summary["complete"] and summary["parameters"] == {"device": "cpu", "quick": True} | values
    assert summary["machine"]["torch"] and summary["machine"]["name"]
    fine, broken, killed, _ = summary["notebooks"]
    published = {result["name"]: result["value"] for result in fine["results"]}
    assert published == {"launches_per_copy": 16, "seen": repr(["cpu", True, *values.values()])}
    assert fine["claims"] == ["it ran"] and fine["error"] is None
    assert 200 < fine["peak_mb"] < summary["peak_limit_mb"] == 1500
    assert 20 < broken["peak_mb"] < 200 and killed["peak_mb"] > 20  # of each kernel, not of all so far


def test_notebooks_html_and_figures_are_left(mixed):
    folder, _ = mixed
    run = folder / "run"
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    stems = ("00_fine", "01_broken", "02_killed", "03_lost")
    executed = {f"notebooks/{stem}.{kind}" for stem in stems for kind in ("ipynb", "html")}
    figures = {"figures/00_dot.png", "figures/00_figure_2.png"}
    assert names == executed | figures | {"summary.json", "report.html"}
    for figure in figures:
        assert (run / figure).read_bytes().startswith(b"\x89PNG")


def test_set_up_code_is_folded_and_links_lead_to_the_pages_of_the_run(tmp_path):
    source, run = tmp_path / "notebooks" / "00_a.ipynb", tmp_path / "run"
    (run / "notebooks").mkdir(parents=True)
    source.parent.mkdir()
    for name, text in {"glossary.md": "### DtoD, HtoD\n", "01_b.ipynb": "", "02_c.ipynb": ""}.items():
        (source.parent / name).write_text(text, encoding="utf-8")
    links = "[w](glossary.md#dtod-htod) [b](01_b.ipynb#x) [c](02_c.ipynb) [gone](gone.md) [w](https://a.b/c)"
    hidden = nbformat.v4.new_code_cell("import this", metadata={"tags": ["hide-input"]})
    folded = "<details><summary>Answers</summary>\n\nso it is\n\n</details>"
    cells = [nbformat.v4.new_markdown_cell(links), hidden, nbformat.v4.new_code_cell("shown()")]
    cells.append(nbformat.v4.new_markdown_cell(folded))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), run / "notebooks" / "00_a.ipynb")
    run_notebooks.keep_files({"notebook": "00_a", "figures": []}, source, run, {"00_a", "01_b"})
    run_notebooks.write_glossary(source.with_name("glossary.md"), run / "notebooks" / "glossary.html")
    html = (run / "notebooks" / "00_a.html").read_text(encoding="utf-8")
    body = html[html.index("<body") :]
    pages = ["glossary.html#dtod-htod", "01_b.html#x"]
    found = [*pages, "../../notebooks/02_c.ipynb", "gone.md", "https://a.b/c"]
    assert [link for link in re.findall(r'href="([^"]+)"', body) if link in found] == found
    assert body.count("<details>") == 2 and body.index("</details>") < body.index("shown")
    assert body.index("so it is") < body.rindex("</details>")  # an answer is folded with its heading
    assert 'id="dtod-htod"' in (run / "notebooks" / "glossary.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("source", "outputs", "found"),
    [
        ("x", [], True),
        ("    show(fig)", [], True),  # may not have run
        ("plots.show(fig)", [], False),
        ("x", [{"data": {"text/plain": "<Figure size 640x480 with 1 Axes>"}}], False),
        ("x", [{"data": {"image/svg+xml": "<svg/>"}, "metadata": {"image/png": {"name": "a"}}}], False),
        ("show(fig)", [{"data": {"image/png": "AAAA"}}], False),
        ("show(a)\nshow(b)", [{"data": {"image/png": PNG}}], False),
        ("show(a)", [{"data": {"image/png": PNG, "text/plain": "<Figure size 1x1>"}}], True),
    ],
)
def test_every_figure_that_is_shown_has_its_picture(source, outputs, found):
    outputs = [{"output_type": "display_data", "metadata": {}} | output for output in outputs]
    cell = nbformat.v4.new_code_cell(source, outputs=[nbformat.from_dict(output) for output in outputs])
    assert (execute_notebook.missing_figure(nbformat.v4.new_notebook(cells=[cell])) is None) is found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_stop_leaves_what_was_finished(tmp_path, number):
    write_notebook(tmp_path / "notebooks" / "00_fine.ipynb", FIGURE)
    write_notebook(tmp_path / "notebooks" / "01_long.ipynb", f"{SAY_STARTED}\nimport time\ntime.sleep(3600)")
    write_notebook(tmp_path / "notebooks" / "02_never.ipynb", "size")
    run = start(tmp_path)
    if number == signal.SIGHUP:  # the terminal is gone: nobody reads what the run still says
        run.stdout.close()
        run.stderr.close()
    os.killpg(run.pid, number)
    if number == signal.SIGINT:
        assert "interrupted" in run.communicate(timeout=PATIENCE_S)[0]
    assert run.wait(PATIENCE_S) == 130
    summary = summary_of(tmp_path)
    assert [n["status"] for n in summary["notebooks"]] == ["ok", "interrupted"] and not summary["complete"]
    assert (tmp_path / "run/figures/00_dot.png").exists()
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert "stopped before its end" in page and "One dot" in page


def test_killed_for_good_it_leaves_no_process_and_no_wrong_ok(tmp_path):
    write_notebook(tmp_path / "notebooks" / "00_fine.ipynb", FIGURE)
    child = f"import subprocess\nsubprocess.Popen(['sleep', '3600'])\n{SAY_STARTED}"
    write_notebook(tmp_path / "notebooks" / "01_long.ipynb", child, "import time\ntime.sleep(3600)")
    with start(tmp_path) as run:
        started = psutil.Process(run.pid).children(recursive=True)
        run.kill()
    assert len(started) >= 2  # the kernel and what it started
    _, alive = psutil.wait_procs(started, timeout=PATIENCE_S)
    assert not alive
    summary = summary_of(tmp_path)
    assert not summary["complete"] and [n["status"] for n in summary["notebooks"]] == ["ok"]
    assert "One dot" in (tmp_path / "run/report.html").read_text(encoding="utf-8")


def test_a_stop_before_the_first_notebook_is_one_line(tmp_path):
    write_notebook(tmp_path / "notebooks" / "00_a.ipynb", "size")
    stopped = "import os, signal, sys, run_notebooks\n" + (
        "run_notebooks.choose_machine = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(run_notebooks.main())"
    )
    _, *options = command(tmp_path)
    run = [sys.executable, "-c", stopped, *options]
    done = subprocess.run(run, cwd=ROOT / "scripts", capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr.strip() == "interrupted before the first notebook"
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_one_line_and_what_was_finished_stays(tmp_path):
    resource = pytest.importorskip("resource")
    write_notebook(tmp_path / "notebooks" / "00_fine.ipynb", FIGURE)
    write_notebook(tmp_path / "notebooks" / "01_big.ipynb", FIGURE, "print('x' * 3_000_000)")
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))}
    done = run_all(tmp_path, **limit)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    said = done.stdout.splitlines()[-1]
    assert said.startswith("stopped: OSError: ") and "01_big.ipynb'; what was finished is in " in said
    names = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*.*")}
    kept = {"notebooks/00_fine.ipynb", "notebooks/00_fine.html", "figures/00_dot.png"}
    assert names == kept | {"summary.json", "report.html"}
    assert [n["notebook"] for n in summary_of(tmp_path)["notebooks"]] == ["00_fine"]


def test_only_takes_the_notebooks_named(tmp_path):
    for name in ("00_a", "01_b", "02_c"):
        write_notebook(tmp_path / "notebooks" / f"{name}.ipynb", "size")
    parser = run_notebooks.make_parser()
    chosen = run_notebooks.choose_notebooks(tmp_path / "notebooks", ["2", "00"], parser)
    assert [path.stem for path in chosen] == ["00_a", "02_c"]


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(run_notebooks, "ROOT", tmp_path)
    now, parser = datetime.datetime.now(datetime.UTC), run_notebooks.make_parser()
    runs = [run_notebooks.make_run_folder(None, now, parser) for _ in range(3)]
    assert len(set(runs)) == 3 and all(run.parent == tmp_path / "runs" for run in runs)
    run_notebooks.make_run_folder(tmp_path / "named", now, parser)
    with pytest.raises(SystemExit):
        run_notebooks.make_run_folder(tmp_path / "named", now, parser)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only", "07"], "--only: expected one of 00, got 07"),
        (["-p", "width", "3"], "-p width: no such parameter; these notebooks declare device, quick, size"),
        (["-p", "size"], "-p: expected 2 arguments"),
        (["-p", "size", "{1, 2}"], "-p size: expected what JSON can hold"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--qick"], "unrecognized arguments: --qick"),
        (["--output", "."], "--output: expected a new or empty folder"),
        (["--notebooks", "damaged"], "00_a.ipynb: expected a notebook: "),
        (["--notebooks", "magic"], "00_a.ipynb: parameters: expected plain Python, got '%time x"),
        (["--notebooks", "twice"], "twice have the number 00"),
    ],
)
def test_a_bad_option_is_one_clear_line(tmp_path, options, said):
    write_notebook(tmp_path / "notebooks" / "00_a.ipynb", "size")
    write_notebook(tmp_path / "magic" / "00_a.ipynb", parameters="%time x = 1")
    for name in ("twice/00_a.ipynb", "twice/00_b.ipynb", "damaged/00_a.ipynb"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{", encoding="utf-8")
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
        ("1e-3", 1e-3),
        ("true", True),
        ("None", None),
        ("[1, (2, 'x')]", [1, [2, "x"]]),
        ("{'a': 1}", {"a": 1}),
        ("a-b", "a-b"),
        ("1" * 5000, "1" * 5000),
    ],
)
def test_values_on_the_command_line_are_literals_or_text(text, value):
    assert command_line.parse_value(text) == value
    assert type(command_line.parse_value(text)) is type(value)


@pytest.mark.parametrize("text", ["{1, 2}", "b'x'", "1j", "...", "1e999", "{1: 2}", "[1, [b'']]", "a\udcff"])
def test_a_value_that_json_cannot_hold_is_refused(text):
    with pytest.raises(ValueError, match="expected what JSON can hold"):
        command_line.parse_value(text)


def test_paths_count_from_where_the_caller_stands(tmp_path):
    (tmp_path / "there").mkdir()
    given = {"trace_path": "x/../my.json", "perfetto_path": "", "profile": "v100", "recording": "./there"}
    kept = {"perfetto_path": "", "profile": "v100"}
    resolved = {"trace_path": str(tmp_path / "my.json"), "recording": str(tmp_path / "there")}
    assert command_line.resolve_paths(given, tmp_path) == kept | resolved
    assert command_line.resolve_paths(resolved, ROOT) == resolved


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "summary.json"
    command_line.write_json(file, {"kept": "µs \udce4"})
    with pytest.raises(TypeError):
        command_line.write_json(file, {"bad": object()})
    assert json.loads(file.read_text(encoding="utf-8")) == {"kept": "µs \udce4"}
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("text", ["a\x1b[2Jb", "a\r\nb", "a\u202eb", "a\x07b", "a\udce4b"])
def test_plain_text_holds_nothing_that_a_terminal_obeys(text):
    plain = command_line.plain(text)
    assert plain.isprintable() and plain[0] == "a" and plain[-1] == "b"
