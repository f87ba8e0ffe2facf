"""What notebooks stand on: a step counted, measured and modelled; a lab that checks, claims and asks."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from lib.eagle import EagleConfig
from lib.launches import KINDS
from lib.profiles import AHEAD, WAITS, DeviceProfile
from lib.strategies import STRATEGIES
from lib.workbench import evidence, notebook, step
from lib.workbench.step import OPTIONS, StepCopies
from lib.workbench.timing import Range
from notebooks import drawings

TINY = EagleConfig.tiny()
V100 = DeviceProfile.load("v100")
BY_STRATEGY = {"per_copy": (16, 30), "uint8_view": (4, 18), "grouped_foreach": (6, 20),
               "grouped_foreach_dma": (6, 20), "small_copy": (4, 18), "copy_plan": (6, 6), "fused": (2, 2),
               "one_allocation": (2, 2), "copy_in_graph": (0, 0), "no_copy": (0, 0)}  # fmt: skip


def built(way, batch_size=8):
    return StepCopies.build(TINY, way, batch_size)


@pytest.mark.parametrize("way", [*STRATEGIES, *OPTIONS])
def test_every_way_is_built_counted_and_run(way):
    for batch_size, expected in zip((8, 5), BY_STRATEGY[way]):
        copies = built(way, batch_size)
        copies.copy_inputs()
        assert len(copies.launches()) == sum(map(len, copies.bursts())) == expected
        counts = step.count_kinds(copies.launches())
        assert counts.pop("all") == sum(counts.values()) == expected
        assert set(counts) <= {kind.label for kind in KINDS.values()}


def test_a_step_has_seven_and_nine_fields_on_the_device():
    fields = built("per_copy").fields()
    assert fields.groupby("replay").size().to_dict() == {"draft": 7, "draft_extend": 9}
    row = fields[(fields.replay == "draft") & (fields.field == "topk_p")].iloc[0]
    assert (row["shape"], row["dtype"], row["bytes"]) == ((8, TINY.topk), "float32", 8 * TINY.topk * 4)


@pytest.mark.parametrize("regime", step.REGIMES)
def test_a_step_is_copies_graph_verify_copies_graph(regime):
    copies, times = built("per_copy"), dict(zip(step.GRAPHS, (200.0, 900.0, 100.0)))
    host, stream = step.step_lanes(copies, V100, times, regime).values()
    graphs = [name.partition(",")[0] for name in stream.name[stream.kind == "graph"]]
    assert graphs == ["the step before"] * (regime == AHEAD) + list(step.GRAPHS)
    assert (stream.kind == "memcpy").sum() == 16
    assert (host.kind == "wait").sum() == (regime == WAITS)
    ends = stream.start_us + stream.dur_us
    assert (stream.start_us.iloc[1:].to_numpy() >= ends.iloc[:-1].to_numpy()).all()  # one at a time
    assert "verify, 0.9 ms" in set(stream.name)
    assert 1200 < step.step_us(copies, V100, times, regime) < 1600


def test_a_saving_is_smaller_where_the_host_is_ahead():
    waits, ahead = (step.saving(built("per_copy"), built("copy_plan"), V100, r) for r in (WAITS, AHEAD))
    assert waits.low <= waits.middle <= waits.high
    assert 0 < ahead.middle < waits.middle
    nothing = step.saving(built("per_copy"), built("per_copy"), V100, WAITS)
    assert (nothing.low, nothing.high, nothing.clear) == (0, 0, False)
    assert step.graph_times(EagleConfig.preset("llama3-8b"), V100)["verify"] > 10_000


def test_copies_in_a_graph_are_no_launches_but_take_time():
    inside, written_in_place = built("copy_in_graph"), built("no_copy")
    assert [len(nodes) for nodes in inside.nodes() + written_in_place.nodes()] == [3, 3, 0, 0]
    assert step.saving(inside, written_in_place, V100, AHEAD).low > 6 * V100["gap_us"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *[("batch_size", v, "a whole number from 1 to 64") for v in ("abc", 2.5, True, 65)],
        ("quick", 1, "one of True, False"),
        ("preset", "llama", "one of tiny, llama3-8b, qwen3-8b, deepseek-v3"),
        ("trace_path", 3, "a text"),
        ("mine", 5, "a whole number from 1 to 3"),
    ],
)
def test_a_parameter_that_is_not_admitted_is_refused_in_one_line(name, value, message):
    with pytest.raises(ValueError) as raised:
        notebook.start(admit={"mine": range(1, 4)}, **{name: value})
    line = f"{name}: expected {message}, got {value!r}"
    assert str(raised.value) == line
    assert raised.value._render_traceback_() == [f"ParameterError: {line}"]  # what Jupyter shows


@pytest.fixture
def shown(monkeypatch):
    found = []
    monkeypatch.setattr(notebook, "display", lambda data, **how: found.append((data, how)))
    return found


@pytest.fixture
def lab(one_thread):
    return notebook.start(device="cpu", quick=True, live=False, batch_size=8)


def test_evidence_says_what_it_is(lab):
    assert lab.label("measured").startswith(f"measured · {lab.on} · torch {torch.__version__} · 20")
    assert lab.label(["counted", V100, "ready made"]).split("\n")[1:] == [V100.label(), "ready made"]
    if not torch.cuda.is_available():
        with pytest.raises(notebook.ParameterError, match="torch finds none"):
            notebook.start(device="cuda")


def test_tables_figures_and_results_carry_their_evidence_and_names_stay_text(lab, shown):
    lab.table({"per_copy": {"a": 1, "<b>": 2.25}, "x": {"a": 3}}, "counted")
    lab.publish("rows", [{"a": 1}], "measured", "a note")
    lab.show(drawings.regimes(), "a_name", "what \x1b[2J it says", "drawing")
    (table, _), (result, _), (figure, how) = shown
    assert "counted · " in table["text/html"] and "&lt;b&gt;" in table["text/html"]
    assert "NA&gt;" not in table["text/html"]  # what is not there is left blank
    expected = {"name": "rows", "value": [{"a": 1}], "kind": "measured", "note": "a note"}
    assert json.loads(json.dumps(result[evidence.RESULT_MIME])) == expected
    assert figure["image/png"].startswith(b"\x89PNG")
    about = {"name": "a_name", "alt": "what [2J it says", "evidence": "drawing", "width": 800}
    assert how["metadata"] == {"image/png": about}


def test_a_claim_holds_or_is_none_or_fails(lab, capsys):
    lab.claim("water is wet", True)
    lab.claim("grouping saves", Range(5, 1, 9))
    lab.claim("grouping saves", Range(5, -1, 9))
    assert capsys.readouterr().out == "✓ water is wet\n✓ grouping saves\nno claim: grouping saves\n"
    for holds in (False, Range(-5, -9, -1)):
        with pytest.raises(AssertionError, match="does not hold: the moon is cheese"):
            lab.claim("the moon is cheese", holds)


EXERCISES = """
"9.1": {hints: [vague, near], cases: {f(2): 4, f(3): "= 3 * factor", "raises(f, None)": TypeError}}
"9.2": {hints: [vague, near], cases: {answer: [[1, 2], 2.5]}}
"""


@pytest.mark.parametrize(
    ("number", "answer", "said"),
    [
        ("9.1", ..., "not answered yet"),
        ("9.1", lambda x: 3 * x, "f(2) gave 6, expected 4\nhint: vague"),
        ("9.1", lambda x: x**2, "f(3) gave 9, expected 6\nhint: vague"),
        ("9.1", lambda x: 2 * x if x else 0, "raises(f, None) gave 'nothing', expected 'TypeError'"),
        ("9.1", lambda x: 2 * x, ": right"),
        ("9.2", [torch.tensor([1, 2]), 2.5], ": right"),
        ("9.2", ([1, 2], 2.6), "answer gave ([1, 2], 2.6), expected [[1, 2], 2.5]"),
        ("9.2", None, "answer gave None"),
    ],
)
def test_an_exercise_says_what_came_and_never_stops_a_run(
    lab, monkeypatch, tmp_path, capsys, number, answer, said
):
    (tmp_path / "exercises.yml").write_text(EXERCISES)
    monkeypatch.setattr(notebook, "EXERCISES", tmp_path / "exercises.yml")
    lab.exercise(number, answer, factor=2)
    assert said in capsys.readouterr().out
    lab.exercise(number, answer, factor=2)
    again = capsys.readouterr().out
    assert ("hint: near" in again) == ("hint" in again)


def test_a_panel_has_controls_only_in_a_server_or_an_editor(monkeypatch, one_thread):
    drawn, controls = [], []
    interact = SimpleNamespace(interact=lambda draw, **how: controls.append(how))
    monkeypatch.setitem(sys.modules, "ipywidgets", interact)
    for name in ("JPY_SESSION_NAME", "VSCODE_PID"):
        monkeypatch.delenv(name, raising=False)
    notebook.start(device="cpu").panel(lambda size=3: drawn.append(size), size=(1, 9))
    monkeypatch.setenv("JPY_SESSION_NAME", "a notebook")
    notebook.start(device="cpu").panel(drawn.append, size=(1, 9))
    assert (drawn, controls) == ([3], [{"size": (1, 9)}])


def test_names_from_outside_become_one_line_of_text():
    assert evidence.plain("a\x1b[31m\n\tb\x00 $c$") == "a [31m b $c$"
    assert len(evidence.plain("x" * 10_000)) == 160
