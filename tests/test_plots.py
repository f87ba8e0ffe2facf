import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from lib import plots
from lib.routes import Launch
from lib.timing import Timing


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def events(*rows):
    return pd.DataFrame(rows, columns=["start_us", "dur_us", "kind"])


def test_a_timeline_draws_every_event_at_its_time_and_marks_what_is_modelled():
    measured = events((0.0, 4.0, "host_op"), (5.0, 2.0, "host_op"))
    modelled = events((3.0, 1.0, "memcpy"))
    fig = plots.timeline({"per_copy": {"host · measured": measured, "stream · modelled": modelled}}, "t")
    (ax,) = fig.axes
    spans = [c.get_datalim(ax.transData) for c in ax.collections]
    assert [(s.x0, s.width) for s in spans] == [(0.0, 4.0), (5.0, 2.0), (3.0, 1.0)]
    assert [bool(c.get_hatch()) for c in ax.collections] == [False, False, True]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["host · measured", "stream · modelled"]
    assert "µs" in ax.get_xlabel()


def test_strategies_share_the_time_axis_and_it_can_be_cut():
    lanes = {"host": events((0.0, 4.0, "host_op"), (90.0, 20.0, "host_op"))}
    fig = plots.timeline({"per_copy": lanes, "grouped_foreach": lanes}, "t", until_us=50)
    assert {ax.get_xlim() for ax in fig.axes} == {(0.0, 51.0)}
    assert [len(ax.collections) for ax in fig.axes] == [1, 1]


def test_launch_counts_draws_one_block_a_launch_and_writes_the_number():
    copy, fused = Launch("memcpy", 1, 8, ""), Launch("foreach", 3, 24, "")
    fig = plots.launch_counts({"per_copy": [copy] * 5, "grouped_foreach": [fused, copy]}, "t")
    (ax,) = fig.axes
    assert len(ax.patches) == 7
    assert [t.get_text() for t in ax.texts] == ["5", "2"]


def test_timings_writes_the_median_of_each_way():
    results = {"per_copy": Timing("per_copy", (1.0, 2.0, 9.0)), "x": Timing("x", (4.0, 5.0, 6.0))}
    fig = plots.timings(results, "t", "one replay")
    assert [t.get_text() for t in fig.axes[0].texts] == ["2.0 µs", "5.0 µs"]


@pytest.mark.parametrize(
    ("size", "name"),
    [(256, "256 B"), (2048, "2 KiB"), (1536, "1.5 KiB"), (2**26, "64 MiB"), (2**41, "2.05e+03 GiB")],
)
def test_size_names(size, name):
    assert plots.size_name(size) == name


def test_every_strategy_has_a_colour_of_its_own():
    from lib import STRATEGIES

    colours = [plots.STRATEGY_COLOURS[name] for name in STRATEGIES]
    assert len(set(colours)) == len(colours)


def test_show_hands_alt_text_and_evidence_to_the_report(monkeypatch):
    seen = {}
    monkeypatch.setattr("IPython.display.display", lambda fig, metadata: seen.update(metadata["image/png"]))
    fig, _ = plt.subplots()
    plots.show(fig, "a_name", "what it says", "measured · here")
    assert seen == {"name": "a_name", "alt": "what it says", "evidence": "measured · here"}
    assert not plt.fignum_exists(fig.number)
