"""Notebook 09 on traces that are not its own: of other machines, without copies, with names meant to harm."""

import json

import pytest
from test_notebooks import NOTEBOOKS, code_cells
from traces_of import TRACES, copies, device, span, write

from lib.profiles import load_trace
from lib.workbench.notebook import ParameterError

NOTEBOOK = NOTEBOOKS / "09_your_trace.ipynb"
HARM = "$\\frac{a}{b}$ <script>alert(1)</script>\x1b[31m\n\u202e" + 20_000 * "x"


@pytest.fixture
def read(monkeypatch, capsys):
    """Runs the notebook's cells with these parameters; what it printed, and what it displayed."""
    shown = []
    monkeypatch.setattr("lib.workbench.notebook.display", lambda data, **_: shown.append(data))
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))

    def run(**parameters):
        first, *others = (code for code, _ in code_cells(NOTEBOOK))
        names = {}
        exec(first, names)
        names |= {"quick": True} | parameters
        for cell in others:
            exec(cell, names)
        return " ".join(capsys.readouterr().out.split()), shown

    return run


SHOWN = {
    "v100_ddp_training.pt.trace.json.gz": ["queued: 9 of 10 bursts", "4.7 times as long where the GPU waits"],
    "flux_foreach_slow_mi300x.pt.trace.json.gz": ["because dtypes mix", "assumed, not", "no claim"],
    "nsys_h100_2gpu.sqlite.gz": ["450 copies come from the host", "nothing to group"],
}


@pytest.mark.parametrize("name", SHOWN)
def test_it_says_what_a_trace_shows(read, name):
    said, shown = read(trace_path=str(TRACES / name))
    assert all(sentence in said for sentence in SHOWN[name]), said
    assert any("image/png" in data for data in shown)


ANY = {
    "no GPU event in the file": [span("cpu_op", "aten::copy_", 0, 4)],
    "at most 0: nothing to group": [device("kernel", "gemm", 5, 9, 1)],
    "host-bound: 1 of 1 bursts, of 12 copies": copies(12),
    "grouping saves time": copies(12, shift=0),  # whole us
}


@pytest.mark.parametrize("sentence", ANY)
def test_it_runs_on_any_trace(read, tmp_path, sentence):
    said, _ = read(trace_path=str(write(tmp_path / "my.json", {"traceEvents": ANY[sentence]})))
    assert sentence in said


def test_names_meant_to_harm_stay_text(read, tmp_path):
    events = [event | {"name": event["name"] + HARM * (event["cat"] == "cpu_op")} for event in copies(12)]
    path = tmp_path / "$x$ <b>.json"
    write(path, {"traceEvents": events, "deviceProperties": [{"id": 0, "name": HARM}]})
    said, shown = read(trace_path=str(path))
    pages = [data["text/html"] for data in shown if "text/html" in data]
    assert "aten::copy_$" in "".join(pages) and not any("<script" in page for page in pages)
    assert all("mathjax_ignore" in page and len(page) < 20_000 for page in pages)
    assert "\x1b" not in said and "\u202e" not in said


UNREAD = {"none.json": "No such file", "folder": "a folder", "my.nsys-rep": "export it", "bad.json": "JSON"}


@pytest.mark.parametrize("name", UNREAD)
def test_what_cannot_be_read_is_one_line(read, tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad.json").write_text('{"traceEvents": [', encoding="utf-8")
    with pytest.raises(ParameterError, match=rf"^trace_path: [^\n]*{UNREAD[name]}[^\n]*$"):
        read(trace_path=str(tmp_path / name))


def test_a_trace_is_written_for_perfetto_but_never_over_itself(read, tmp_path):
    path = write(tmp_path / "my.json", {"traceEvents": copies(5), "environment": "PASSWORD"})
    read(trace_path=str(path), perfetto_path=str(tmp_path / "out.json"))
    assert len(load_trace(tmp_path / "out.json")) == 15
    assert "PASSWORD" not in (tmp_path / "out.json").read_text(encoding="utf-8")
    before = path.read_bytes()
    for wrong in (path, tmp_path / "none" / "out.json"):
        with pytest.raises(ParameterError, match=r"^perfetto_path: "):
            read(trace_path=str(path), perfetto_path=str(wrong))
    assert path.read_bytes() == before and json.loads(before)["environment"]
