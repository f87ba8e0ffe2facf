"""What notebooks stand on: a race, a step counted and modelled, a lab that checks, claims and asks."""

import re

import pytest
import torch

from lib.eagle import EagleConfig
from lib.launches import KINDS
from lib.profiles import AHEAD, WAITS, DeviceProfile
from lib.workbench import evidence, notebook, step
from lib.workbench.step import StepCopies
from lib.workbench.timing import Range, Timing, measure, ratio
from notebooks import drawings

TINY = EagleConfig.tiny()
V100 = DeviceProfile.load("v100")


def built(way, batch_size=8):
    return StepCopies.build(TINY, way, batch_size)


def test_rounds_alternate_their_order_and_warm_up_is_left_out():
    order = []
    ways = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    timings = measure(ways, rounds=2, calls=1, warmup=1)
    assert "".join(order) == "ab" + "ba" + "ab"
    assert [(len(timing.host_us), timing.gpu_us) for timing in timings.values()] == [(2, ()), (2, ())]
    # A neighbour that slows a whole round tenfold leaves the ratio alone.
    assert ratio(Timing((2.0, 20.0, 2.0)), Timing((1.0, 10.0, 1.0))) == 2.0


@pytest.mark.parametrize(
    ("number", "text", "clear"),
    [
        (Range(53.2, 3.42, 79.8), "53 µs (3.4 to 80)", True),
        (Range(0.25, -0.5, 1, " tokens"), "0.25 tokens (-0.5 to 1)", False),
        (Range(-11, -34, -0.3), "-11 µs (-34 to -0.3)", True),  # no -0
        (Range(0, 0, 0), "0 µs", False),
    ],
)
def test_a_range_says_so_and_whether_it_is_a_claim(number, text, clear):
    assert (str(number), number.clear) == (text, clear)


@pytest.mark.parametrize(
    ("way", "expected"),
    [("per_copy", 30), ("fused", 2), ("one_allocation", 2), ("copy_in_graph", 0), ("no_copy", 0)],
)
def test_a_way_is_built_counted_and_run(way, expected):
    copies = built(way, batch_size=5)
    copies.copy_inputs()
    counts = step.count_kinds(copies.launches())
    assert sum(map(len, copies.bursts())) == counts.pop("all") == sum(counts.values()) == expected
    assert set(counts) <= {kind.label for kind in KINDS.values()}
    fields = copies.fields()
    assert fields.groupby("replay").size().to_dict() == {"draft": 7, "draft_extend": 9}
    topk_p = ["draft", "topk_p", (5, TINY.topk), torch.float32, torch.float32, 5 * TINY.topk * 4]
    assert topk_p in fields.to_numpy().tolist()


@pytest.mark.parametrize("regime", step.REGIMES)
def test_a_step_is_copies_graph_verify_copies_graph(regime):
    copies, times = built("per_copy"), dict(zip(step.GRAPHS, (200.0, 900.0, 100.0)))
    host, stream = step.step_lanes(copies, V100, times, regime).values()
    graphs = [name.partition(",")[0] for name in stream.name[stream.kind == "graph"]]
    assert graphs == ["the step before"] * (regime == AHEAD) + list(step.GRAPHS)
    assert (stream.kind == "memcpy").sum() == 16
    assert (host.kind == "wait").sum() == (regime == WAITS)
    assert "verify, 0.9 ms" in set(stream.name)
    assert 1200 < step.step_us(copies, V100, times, regime) < 1600


def test_a_saving_is_smaller_where_the_host_is_ahead_and_copies_in_a_graph_take_time():
    per_copy, plan = built("per_copy"), built("copy_plan")
    waits, ahead = (step.saving(per_copy, plan, V100, regime) for regime in (WAITS, AHEAD))
    assert waits.low <= waits.middle <= waits.high and 0 < ahead.middle < waits.middle
    assert step.saving(per_copy, per_copy, V100, WAITS) == Range(0, 0, 0)
    inside, in_place = built("copy_in_graph"), built("no_copy")
    assert [len(nodes) for nodes in inside.nodes() + in_place.nodes()] == [3, 3, 0, 0]
    assert step.saving(inside, in_place, V100, AHEAD).low > 6 * V100["gap_us"]
    assert step.graph_times(EagleConfig.preset("llama3-8b"), V100)["verify"] > 10_000


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *[("batch_size", value, "a whole number from 1 to 64") for value in ("abc", 2.0, True, 65)],
        ("quick", 1, "one of True, False"),
        ("preset", "llama", "one of tiny, llama3-8b, qwen3-8b, deepseek-v3"),
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
def lab(one_thread):
    return notebook.start(device="cpu", quick=True, live=False, batch_size=8)


def test_evidence_says_what_it_is(lab):
    measured, *others = lab.label(["measured", V100, "ready made"]).split("\n")
    assert measured.startswith(f"measured · {evidence.device_name()} · torch {torch.__version__} · 20")
    assert others == [V100.label(), "ready made"]
    if not torch.cuda.is_available():
        with pytest.raises(notebook.ParameterError, match="torch finds none"):
            notebook.start(device="cuda")


def test_tables_figures_and_results_carry_their_evidence_and_names_stay_text(lab, monkeypatch):
    shown = []
    monkeypatch.setattr(notebook, "display", lambda data, **how: shown.append((data, how)))
    lab.table({"per_copy": {"a": 1, "<b>": 212904.25}, "x": {"a": 3, "<b>": None}}, "counted")
    lab.publish("rows", [{"a": 1}], "measured", "a note")
    lab.show(drawings.regimes(), "a_name", "what \x1b[2J it says", "drawing")
    (table, _), (result, _), (figure, how) = shown
    html = table["text/html"]
    assert "counted · " in html and "&lt;b&gt;" in html
    assert re.findall("<td>(.*)</td>", html) == ["1", "212904.2", "3", ""]  # what is not there is left blank
    expected = {"name": "rows", "value": [{"a": 1}], "kind": "measured", "note": "a note"}
    assert result[evidence.RESULT_MIME] == expected
    assert figure["image/png"].startswith(b"\x89PNG")
    about = {"name": "a_name", "alt": "what [2J it says", "evidence": "drawing", "width": 800}
    assert how["metadata"] == {"image/png": about}
    assert len(evidence.plain("x" * 10_000)) == 160


def test_a_claim_holds_or_is_none_or_fails(lab, capsys):
    for holds in (True, Range(5, 1, 9), Range(5, -1, 9)):
        lab.claim("it saves", holds)
    assert capsys.readouterr().out == "✓ it saves\n✓ it saves\nno claim: it saves\n"
    for holds in (False, Range(-5, -9, -1)):
        with pytest.raises(AssertionError, match="does not hold: the moon is cheese"):
            lab.claim("the moon is cheese", holds)


def test_an_exercise_says_what_came_hints_and_never_stops_a_run(lab, capsys):
    said = []
    for answer in (..., (1, 2), None, (3, torch.tensor(2))):
        lab.exercise("3.2", answer)
        said.append(capsys.readouterr().out)
    unanswered, wrong, wronger, right = said
    assert "not answered yet" in unanswered and right == "exercise 3.2: right\n"
    assert "answer gave (1, 2), expected [3, 2]\nhint: Either table" in wrong
    assert "answer gave None" in wronger and "hint: 130 tensors" in wronger
    lab.exercise("0.1", 161, profile={"host_copy_us": 10.0})  # a float: within 2 %
    lab.exercise("1.2", lambda size, captured: min(n for n in [*captured, 16] if n >= size))
    told = capsys.readouterr().out
    assert "0.1: right" in told and "raises(f, 9, [1, 2, 4, 8]) gave 'nothing', expected 'ValueError'" in told


def test_a_panel_has_controls_only_in_a_server_or_an_editor(monkeypatch, one_thread):
    made = []
    monkeypatch.setattr("ipywidgets.interact", lambda draw, **controls: made.append(controls))
    monkeypatch.delenv("VSCODE_PID", raising=False)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    notebook.start(device="cpu").panel(lambda: made.append("drawn"), size=(1, 9))
    monkeypatch.setenv("JPY_SESSION_NAME", "a notebook")
    notebook.start(device="cpu").panel(lambda: made.append("drawn"), size=(1, 9))
    assert made == ["drawn", {"size": (1, 9)}]
