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
NO_GPU = """import sys
print("{}")
sys.exit("ValueError: device: expected a CUDA or ROCm device" if "cuda" in sys.argv else 0)"""
GIVEN = {"size": "7", "rows": "(4, 2)", "trace_path": "x/../数据.json"}
GIVEN |= {"profile": "v100", "folder": "./notebooks", "other_path": "", "flag": "true"}
SLEEP = "import subprocess, time\nsubprocess.Popen(['sleep', '3600'])\ntime.sleep(3600)"
FULL = "import os\nos.symlink('/dev/full', '../run/notebooks/01_long.ipynb.partial')"
STOPS = {  # a signal, or 0: the disk is full -> exit status and what is said
    signal.SIGINT: (130, "interrupted; what was finished is in "),
    signal.SIGKILL: (-signal.SIGKILL, ""),
    0: (1, "01_long.ipynb'; what was finished is in "),
}


def options(folder: Path, *more: str) -> list[str]:
    return ["--notebooks", str(folder / "notebooks"), "--output", str(folder / "run"), *more]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """One run of four in a hostile place: one is fine, one fails, one is killed, one loses its figure."""
    folder = tmp_path_factory.mktemp("mixed") / "空 间 {x}"
    notebooks = folder / "notebooks"
    paths = "trace_path = other_path = profile = folder = flag = ''"
    parameters = f'{PARAMETERS[:-1]}"a=b"  # = c\nrows: int | None = None\n{paths}'
    seen = f"publish('seen', repr([device, quick, {', '.join(GIVEN)}]))"
    links = "# [a](glossary.md#dtod-htod) [b](01_broken.ipynb#x) [c](c.md) [d](gone.md) [e](https://a.b)"
    plot = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nprint('✓ it ran')"
    cells = PUBLISH, "publish('launches_per_copy', 16)", seen, FIGURE, plot, "big = b'x' * 200_000_000"
    write_notebook(notebooks / "00_fine.ipynb", links, *cells, parameters=parameters, tags=["hide-input"])
    (notebooks / "c.md").touch()
    (notebooks / "glossary.md").write_text("### DtoD, HtoD", encoding="utf-8")
    broken = "\n# a remark\nassert size == 1, 'size is\\n\\x1b[31mnot one'"
    write_notebook(notebooks / "01_broken.ipynb", "print(size)", "## The claim", broken, "print('never')")
    child = "import subprocess\npublish('child', subprocess.Popen('exec sleep 999 >&- 2>&-', shell=True).pid)"
    kill = "import os, signal, time\nos.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(3600)"
    write_notebook(notebooks / "02_killed.ipynb", PUBLISH, "## The end", child, kill)
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
    given = [word for parameter in GIVEN.items() for word in ("-p", *parameter)]
    command = [folder / "run_all", *options(folder, "--quick", "--device", "cpu", *given)]
    pipes = {"capture_output": True, "encoding": "utf-8"}
    return folder / "run", subprocess.run(command, cwd=folder, env=os.environ | hostile, **pipes)


def test_a_failing_notebook_does_not_stop_the_others_and_its_cell_is_named(mixed):
    run, done = mixed
    assert done.returncode == 1, done.stderr
    _, _, killed, lost = notebooks = json.loads((run / "summary.json").read_bytes())["notebooks"]
    assert [n["status"] for n in notebooks] == ["ok", "failed", "died", "failed"]
    lines = done.stdout.splitlines()
    broken = next(i for i, line in enumerate(lines) if line.startswith("01_broken"))
    assert "failed" in lines[broken] and " s " in lines[broken] and " MB" in lines[broken]
    where = "In [4] under \"The claim\" (assert size == 1, 'size is\\n\\x1b[31mnot one'): "
    assert lines[broken + 1].strip() == where + "AssertionError: size is \\x1b[31mnot one"
    assert "4/4" in done.stderr  # the progress bar
    assert killed["error"]["heading"] == "The end" and killed["error"]["line"].startswith("import os, signal")
    assert "killed" in killed["error"]["message"]
    child = killed["results"][0]["value"]
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert lost["error"]["line"] == "show(plt.plot([1, 2])[0].figure)" and lost["figures"] == []
    assert lost["error"]["message"] == "expected 1 figures as PNG in the outputs of this cell, found 0"


def test_parameters_memory_results_pages_and_figures_are_left(mixed):
    run, _ = mixed
    summary = json.loads((run / "summary.json").read_bytes())
    values = {"size": 7, "rows": [4, 2], "trace_path": str(run.parent / "数据.json")}
    values |= {"profile": "v100", "folder": str(run.parent / "notebooks"), "other_path": "", "flag": True}
    assert summary["complete"] and summary["parameters"] == {"device": "cpu", "quick": True} | values
    assert summary["machine"]["torch"] and summary["machine"]["name"]
    fine, broken, killed, _ = summary["notebooks"]
    published = {result["name"]: result["value"] for result in fine["results"]}
    assert published == {"launches_per_copy": 16, "seen": repr(["cpu", True, *values.values()])}
    assert fine["claims"] == ["it ran"] and fine["error"] is None
    assert 200 < fine["peak_mb"] < summary["peak_limit_mb"] == 1500
    assert 20 < broken["peak_mb"] < 200 and killed["peak_mb"] > 20  # of each kernel, not of all so far
    assert {path.name for path in run.glob("figures/*")} == {"00_dot.png", "00_figure.png"}
    assert len([*run.glob("notebooks/0*.ipynb")]) == len([*run.glob("notebooks/0*.html")]) == 4


def test_set_up_code_is_folded_and_links_lead_to_the_pages_of_the_run(mixed):
    pages = mixed[0] / "notebooks"
    html = (pages / "00_fine.html").read_text(encoding="utf-8")
    body = html[html.index("<body") :]
    found = ["glossary.html#dtod-htod", "01_broken.html#x", "../../notebooks/c.md", "gone.md", "https://a.b"]
    assert [link for link in re.findall(r'href="([^"]+)"', body) if link in found] == found
    assert body.count("<details>") == 1 and body.index("</details>") < body.index("launches_per_copy")
    assert 'id="dtod-htod"' in (pages / "glossary.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", STOPS)
def test_a_stop_leaves_what_was_finished_and_no_process(tmp_path, number):
    """The first notebook is done, and the second at work with a process of its own."""
    write_notebook(tmp_path / "notebooks" / "00_fine.ipynb", FIGURE, "size" if number else FULL)
    write_notebook(tmp_path / "notebooks" / "01_long.ipynb", SLEEP if number else "size")
    page, processes = tmp_path / "run" / "report.html", []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Tests that a shell runs in its background hand on that SIGINT is ignored.
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, ROOT / "scripts" / "run_notebooks.py", *options(tmp_path)]
    with subprocess.Popen(command, **pipes) as run:

        def is_half_way() -> bool:
            processes[:] = psutil.Process(run.pid).children(recursive=True)
            sleeps = any(process.name() == "sleep" for process in processes)
            return run.poll() is not None or (sleeps and "One dot" in page.read_text(encoding="utf-8"))

        wait_for(is_half_way)
        run.send_signal(number)
        out, err = run.communicate(timeout=PATIENCE_S)
    code, said = STOPS[number]
    assert run.returncode == code and said in out and "Traceback" not in err, err
    assert not psutil.wait_procs(processes, timeout=PATIENCE_S)[1]  # alive
    summary, text = json.loads(page.with_name("summary.json").read_bytes()), page.read_text(encoding="utf-8")
    assert [n["notebook"] for n in summary["notebooks"]] == ["00_fine"] and not summary["complete"]
    assert "stopped before its end" in text and "One dot" in text
    left = {path.name for path in tmp_path.glob("run/*/*")}
    assert left == {"00_fine.ipynb", "00_fine.html", "00_dot.png"}


BAD_OPTIONS = {  # what is said -> the options
    "--only: expected one of 00, got 07": ["--only", "0", "--only", "07"],
    "-p width: no such parameter; these notebooks declare device, quick, size": ["-p", "width", "3"],
    "-p size: expected a number, text, true, false, null or": ["-p", "size", "{1, 2}"],
    "unrecognized arguments: --qick": ["--qick"],
    "--output: expected a new or empty folder": ["--output", "."],
    "00_a.ipynb: expected a notebook: ": ["--notebooks", "damaged"],
    "--device: expected a CUDA or ROCm device": ["--device", "cuda"],
}


@pytest.mark.parametrize("said", BAD_OPTIONS)
def test_a_bad_option_is_one_clear_line(tmp_path, monkeypatch, capsys, said):
    monkeypatch.setattr(run_notebooks, "MACHINE", NO_GPU)
    monkeypatch.chdir(tmp_path)
    write_notebook(tmp_path / "notebooks" / "00_a.ipynb", "size")
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


@pytest.mark.parametrize("text", ["a\x1b[2Jb", "a\r\nb", "a\u202eb", "a\x07b", "a\udce4b"])
def test_plain_text_holds_nothing_that_a_terminal_obeys(text):
    plain = command_line.plain(text)
    assert plain.isprintable() and plain[0] == "a" and plain[-1] == "b"
