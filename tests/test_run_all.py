"""run_all.sh on tiny notebooks: what it leaves, what it says and how it ends when something goes wrong."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import command_line
import psutil
import pytest
import run_notebooks
from tiny_notebooks import FIGURE, PARAMETERS, PATIENCE_S, PUBLISH, wait_for, write_notebook

ROOT = Path(__file__).resolve().parents[1]
# Without asking what torch finds, which takes seconds.
RUN = """import command_line, run_notebooks
run_notebooks.choose_machine = lambda *_: dict(device="cpu", name="", torch="", python="", system="")
command_line.run_main(run_notebooks.main)"""
NO_GPU = """import sys
print('{"device": "cpu"}')
sys.exit("ValueError: device: expected a CUDA or ROCm device" if "cuda" in sys.argv else 0)"""
SLEEP = "import subprocess, sys, time\nsubprocess.Popen(['sleep', '3600'])\ntime.sleep(3600)"


def options(folder: Path, *more: str) -> list[str]:
    return ["--notebooks", str(folder / "notebooks"), "--output", str(folder / "run"), *more]


def summary_of(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """One run of four in a hostile place: one is fine, one fails, one is killed, one loses its figure."""
    folder = tmp_path_factory.mktemp("mixed") / "空 间 {x}"
    notebooks = folder / "notebooks"
    parameters = f'{PARAMETERS[:-1]}"a=b"  # = c\nrows: int | None = None\ntrace_path = ""'
    seen = "publish('seen', repr([device, quick, size, rows, trace_path]))"
    links = "# [a](glossary.md#dtod-htod) [b](01_broken.ipynb#x) [c](more/04_c.ipynb) [d](gone.md) [e](https://a.b)"
    plot = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nprint('✓ it ran')"
    cells = PUBLISH, "publish('launches_per_copy', 16)", seen, FIGURE, plot, "big = b'x' * 200_000_000"
    write_notebook(notebooks / "00_fine.ipynb", links, *cells, parameters=parameters, tags=["hide-input"])
    write_notebook(notebooks / "more" / "04_c.ipynb")
    (notebooks / "glossary.md").write_text("### DtoD, HtoD", encoding="utf-8")
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
    given = ["--quick", "--device", "cpu", "-p", "size", "7", "-p", "rows", "(4, 2)", "-p", "trace_path"]
    command = [folder / "run_all", *options(folder, *given, "数据.json")]
    pipes = {"capture_output": True, "encoding": "utf-8"}
    return folder / "run", subprocess.run(command, cwd=folder, env=os.environ | hostile, **pipes)


def test_a_failing_notebook_does_not_stop_the_others_and_its_cell_is_named(mixed):
    run, done = mixed
    assert done.returncode == 1, done.stderr
    _, _, killed, lost = notebooks = summary_of(run)["notebooks"]
    assert [n["status"] for n in notebooks] == ["ok", "failed", "died", "failed"]
    lines = done.stdout.splitlines()
    broken = next(i for i, line in enumerate(lines) if line.startswith("01_broken"))
    assert "failed" in lines[broken] and " s " in lines[broken] and " MB" in lines[broken]
    where = "In [4] under \"The claim\" (assert size == 1, 'size is\\n\\x1b[31mnot one'): "
    assert lines[broken + 1].strip() == where + "AssertionError: size is \\x1b[31mnot one"
    assert "4/4" in done.stderr  # the progress bar
    assert killed["error"]["heading"] == "The end" and killed["error"]["line"].startswith("import os, signal")
    assert "killed" in killed["error"]["message"]
    assert lost["error"]["line"] == "show(plt.plot([1, 2])[0].figure)" and lost["figures"] == []
    assert lost["error"]["message"] == "expected 1 figures as PNG in the outputs of this cell, found 0"


def test_what_a_killed_kernel_started_is_ended(mixed):
    html = (mixed[0] / "notebooks/02_killed.html").read_text(encoding="utf-8")
    child = int(re.search(r"child (\d+)\.", html)[1])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_parameters_memory_results_pages_and_figures_are_left(mixed):
    run, _ = mixed
    summary = summary_of(run)
    values = {"size": 7, "rows": [4, 2], "trace_path": str(run.parent / "数据.json")}
    assert summary["complete"] and summary["parameters"] == {"device": "cpu", "quick": True} | values
    assert summary["machine"]["torch"] and summary["machine"]["name"]
    fine, broken, killed, _ = summary["notebooks"]
    published = {result["name"]: result["value"] for result in fine["results"]}
    assert published == {"launches_per_copy": 16, "seen": repr(["cpu", True, *values.values()])}
    assert fine["claims"] == ["it ran"] and fine["error"] is None
    assert 200 < fine["peak_mb"] < summary["peak_limit_mb"] == 1500
    assert 20 < broken["peak_mb"] < 200 and killed["peak_mb"] > 20  # of each kernel, not of all so far
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    stems = ("00_fine", "01_broken", "02_killed", "03_lost")
    pages = {f"notebooks/{stem}.{kind}" for stem in stems for kind in ("ipynb", "html")}
    figures = {"figures/00_dot.png", "figures/00_figure.png"}
    assert names == pages | figures | {"notebooks/glossary.html", "summary.json", "report.html"}


def test_set_up_code_is_folded_and_links_lead_to_the_pages_of_the_run(mixed):
    pages = mixed[0] / "notebooks"
    html = (pages / "00_fine.html").read_text(encoding="utf-8")
    body = html[html.index("<body") :]
    found = ["glossary.html#dtod-htod", "01_broken.html#x", "../../notebooks/more/04_c.ipynb"]
    found += ["gone.md", "https://a.b"]
    assert [link for link in re.findall(r'href="([^"]+)"', body) if link in found] == found
    assert body.count("<details>") == 1 and body.index("</details>") < body.index("launches_per_copy")
    assert 'id="dtod-htod"' in (pages / "glossary.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stop_leaves_what_was_finished_and_no_process(tmp_path, number):
    """The first notebook is done, and the second at work with a process of its own."""
    write_notebook(tmp_path / "notebooks" / "00_fine.ipynb", FIGURE)
    write_notebook(tmp_path / "notebooks" / "01_long.ipynb", SLEEP)
    page, processes = tmp_path / "run" / "report.html", []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Tests that a shell runs in its background hand on that SIGINT is ignored.
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, "-c", RUN, *options(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT / "scripts", **pipes) as run:

        def is_half_way() -> bool:
            processes[:] = psutil.Process(run.pid).children(recursive=True)
            sleeps = any(process.name() == "sleep" for process in processes)
            return run.poll() is not None or (sleeps and "One dot" in page.read_text(encoding="utf-8"))

        wait_for(is_half_way)
        run.send_signal(number)
        out, err = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == (130 if number == signal.SIGINT else -number), err
    assert ("interrupted; what was finished is in" in out) == (number == signal.SIGINT)
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive
    summary, text = summary_of(tmp_path / "run"), page.read_text(encoding="utf-8")
    assert [n["notebook"] for n in summary["notebooks"]] == ["00_fine"] and not summary["complete"]
    assert (tmp_path / "run/figures/00_dot.png").exists()
    assert "stopped before its end" in text and "One dot" in text


BAD_OPTIONS = {  # what is said -> the options
    "--only: expected one of 00, got 07": ["--only", "0", "--only", "07"],
    "-p width: no such parameter; these notebooks declare device, quick, size": ["-p", "width", "3"],
    "-p size: expected a number, text, true, false, null or": ["-p", "size", "{1, 2}"],
    "unrecognized arguments: --qick": ["--qick"],
    "--output: expected a new or empty folder": ["--output", "."],
    "00_a.ipynb: expected a notebook: ": ["--notebooks", "damaged"],
    "00_a.ipynb: parameters: expected plain Python, got '%time x": ["--notebooks", "magic"],
    "--device: expected a CUDA or ROCm device": ["--device", "cuda"],
}


@pytest.mark.parametrize("said", BAD_OPTIONS)
def test_a_bad_option_is_one_clear_line(tmp_path, monkeypatch, capsys, said):
    monkeypatch.setattr(run_notebooks, "MACHINE", NO_GPU)
    monkeypatch.chdir(tmp_path)
    write_notebook(tmp_path / "notebooks" / "00_a.ipynb", "size")
    write_notebook(tmp_path / "magic" / "00_a.ipynb", parameters="%time x = 1")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "00_a.ipynb").write_text("{", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["run_notebooks.py", *options(tmp_path, *BAD_OPTIONS[said])])
    with pytest.raises(SystemExit, match="2"):
        run_notebooks.main()
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1 and not (tmp_path / "run").exists()


def test_values_on_the_command_line_are_literals_or_text():
    values = {"3": 3, "true": True, "[1, (2, 'x')]": [1, [2, "x"]], "a-b": "a-b"}
    parsed = {text: command_line.parse_value(text) for text in values}
    assert parsed == values and parsed["true"] is True


def test_paths_count_from_where_the_caller_stands(tmp_path):
    (tmp_path / "there").mkdir()
    given = {"trace_path": "x/../my.json", "perfetto_path": "", "profile": "v100", "recording": "./there"}
    kept = {"perfetto_path": "", "profile": "v100"}
    resolved = {"trace_path": str(tmp_path / "my.json"), "recording": str(tmp_path / "there")}
    assert command_line.resolve_paths(given, tmp_path) == kept | resolved
    assert command_line.resolve_paths(resolved, ROOT) == resolved
