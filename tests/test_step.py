"""The copies of one step: counted, measured, modelled, explored."""

import matplotlib

matplotlib.use("Agg")

import pytest
import torch

from lib import evidence, explore, step
from lib.device_model import DeviceProfile
from lib.eagle import EagleConfig
from lib.routes import Launch

TINY = EagleConfig.tiny()
V100 = DeviceProfile.load("v100")


def launches(strategy, batch_size=8):
    return step.StepCopies.build(TINY, strategy, batch_size).launches()


def test_both_replays_are_counted_and_fills_can_be_left_out():
    padded = launches("per_copy", 5)
    assert step.launch_rows(padded) == {
        "memcpy": 16, "elementwise": 0, "foreach": 0, "fused": 0, "fill": 14, "all": 30
    }  # fmt: skip
    assert len(step.without_fills(padded)) == 16


def test_measured_lanes_show_one_run_from_its_start():
    copies = step.StepCopies.build(TINY, "per_copy", 8)
    threads = torch.get_num_threads()
    lanes = step.measured_lanes(copies.copy_inputs)
    assert torch.get_num_threads() == threads
    (table,) = lanes.values()  # no stream on a CPU
    assert (table.kind == "host_copy").sum() == 18  # 16 device fields and seq_lens_cpu twice
    assert table.start_us.min() >= 0 and (table.start_us.diff().dropna() >= 0).all()
    ends = table.start_us + table.dur_us
    assert (table.start_us.iloc[1:].to_numpy() >= ends.iloc[:-1].to_numpy() - 1e-6).all()  # none nested


def test_modelled_lanes_hold_every_launch_once():
    made = launches("grouped_foreach_dma", 5)
    host, stream = step.modelled_lanes(made, V100).values()
    assert len(stream) == len(made) == 20
    assert (host.kind == "runtime").sum() == 20
    assert step.span_us(made, V100) == pytest.approx((stream.start_us + stream.dur_us).max())
    span = (stream.start_us + stream.dur_us).max() - stream.start_us.min()
    assert step.idle_share(made, V100) == pytest.approx(1 - stream.dur_us.sum() / span)


def test_only_what_the_profile_assumes_gives_a_range():
    fitted, assumed = launches("per_copy"), launches("grouped_foreach_dma")
    assert step.assumed_range_us(fitted, V100) == pytest.approx([step.span_us(fitted, V100)] * 2)
    fast, slow = step.assumed_range_us(assumed, V100)
    assert fast < step.span_us(assumed, V100) < slow
    middle = step.span_us(fitted, V100) - step.span_us(assumed, V100)
    assert step.saving(fitted, assumed, V100).startswith(f"{middle:.0f} µs (")


def test_device_time_grows_with_the_bytes():
    small, large = (step.device_us("memcpy", n, V100) for n in (256, 2**24))
    assert small < large
    assert small == pytest.approx(V100["memcpy_floor_us"], rel=0.01)


@pytest.mark.parametrize(
    ("strategy", "count"),
    [("copy_plan", 6), ("fused_kernel", 2), ("arena", 2), ("in_graph", 0), ("no_copy", 0)],
)
def test_strategies_beyond_the_pull_request_are_counted_too(strategy, count):
    assert len(launches(strategy)) == len(launches(strategy, 5)) == count


def test_explore_shows_a_table_and_a_figure_with_its_evidence(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda *what, **how: shown.append((what, how)))
    explore.panel(False, strategy="uint8_view", batch_size=3, padding=True)
    (table,), _ = shown[0]
    assert table["all"].to_dict() == {"per_copy": 30, "uint8_view": 18}
    assert shown[1][1]["metadata"]["image/png"]["evidence"] == V100.label()


@pytest.mark.parametrize(("variable", "live"), [("JPY_SESSION_NAME", True), (None, False)])
def test_a_panel_has_controls_only_where_somebody_can_move_them(monkeypatch, variable, live):
    for name in ("JPY_SESSION_NAME", "VSCODE_PID"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "a notebook")
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda *what, **how: shown.extend(what))
    explore.panel(None, batch_size=4)
    assert any("GridBox" in type(what).__name__ for what in shown) == live


def test_labels_and_claims_say_what_they_are(capsys):
    text = evidence.label("recorded", "NVIDIA H200", "2.11.0", "2026-11-29")
    assert text == "recorded · NVIDIA H200 · torch 2.11.0 · 2026-11-29"
    assert torch.__version__ in evidence.label("measured")
    with pytest.raises(ValueError, match="kind: expected one of"):
        evidence.label("guessed")
    evidence.check("water is wet", True)
    assert capsys.readouterr().out == "✓ water is wet\n"
    with pytest.raises(AssertionError, match="does not hold: the moon is cheese"):
        evidence.check("the moon is cheese", False)
    with pytest.raises(ValueError, match="kind"):
        evidence.publish("x", 1, "guessed")


def test_a_device_is_chosen_or_refused():
    assert evidence.choose_device("cpu") == "cpu"
    assert evidence.choose_device("auto") in ("cpu", "cuda")
    with pytest.raises(ValueError, match="expected auto, cpu or cuda, got 'gpu'"):
        evidence.choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch finds none"):
            evidence.choose_device("cuda")


def test_a_launch_of_an_unknown_kind_is_not_modelled():
    with pytest.raises(ValueError, match="expected"):
        step.span_us([Launch("teleport", 1, 8, "")], V100)
