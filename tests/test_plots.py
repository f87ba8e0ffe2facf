"""Figures: what they draw, that no name and no setting of the reader changes them."""

import io

import matplotlib
import pandas as pd
import pytest
from matplotlib.colors import to_rgba
from PIL import Image

from lib.launches import KINDS, Launch
from lib.workbench import plots
from lib.workbench.timing import Range, Timing

HOSTILE = "a $x^$ name \x1b[31m\n<script>&amp; $y$ " + "long " * 60
COPY, GROUP = Launch("memcpy", 1, 8, ""), Launch("foreach", 3, 24, "")


def events(*rows):
    return pd.DataFrame(rows, columns=["name", "start_us", "dur_us", "kind"])


def texts(fig):
    found = [text for ax in fig.axes for text in ax.texts]
    found += [text for legend in fig.legends for text in legend.get_texts()]
    return [text.get_text() for text in found if text.get_text()]


def test_a_timeline_draws_every_event_at_its_time_in_its_lane():
    host = events(("aten::_foreach_copy_", 0.0, 4.0, "host_op"), ("aten::fill_", 5.0, 2.0, "host_op"))
    stream = events((KINDS["foreach"].work, 3.0, 1.0, "copy_kernel"), ("verify, 9 ms", 4.0, 9.0, "graph"))
    fig = plots.timeline({"per_copy": {"host": host, "stream": stream}, "empty": {"host": host[:0]}}, "t")
    (ax,) = fig.axes
    bars = [patch for patch in ax.patches if patch.get_facecolor() != to_rgba(plots.PAPER)]
    drawn = [(bar.get_x(), bar.get_width(), round(bar.get_y() + bar.get_height() / 2)) for bar in bars]
    assert drawn == [(0, 4, 1), (5, 2, 1), (3, 1, 2), (4, 9, 2)]
    legend = ["torch._foreach_copy_() on the host", "operator on the host", KINDS["foreach"].label]
    assert texts(fig) == ["per_copy", "empty", "verify, 9 ms", *legend, "verify (target model)"]
    assert "µs" in ax.get_xlabel()


def test_launch_counts_draws_one_block_a_launch_and_writes_the_number():
    fig = plots.launch_counts({"per_copy": [COPY] * 5, "an engine": [GROUP, COPY], "none": []}, "t")
    assert len(fig.axes[0].patches) == 7
    assert texts(fig) == ["5", "2", "0", KINDS["memcpy"].label, KINDS["foreach"].label]


def test_numbers_stand_beside_what_is_drawn_and_a_range_across_zero_is_no_claim():
    results = {"per_copy": Timing((1.0, 2.0, 9.0)), "x": Timing((4.0, 5.0, 6.0))}
    assert texts(plots.timings(results, "t", "one replay")) == ["2 µs (1.5 to 5.5)", "5 µs (4.5 to 5.5)"]
    numbers = {"a": Range(3, 1, 5), "b": Range(3, -1, 5), "same": Range(0, 0, 0), "c": 2.5}
    shown = ["3 µs (1 to 5)", "3 µs (-1 to 5): no claim", "0 µs", "2.5", "reported"]
    assert texts(plots.values(numbers, "t", "µs", marks={4: "reported"})) == shown
    assert texts(curves()) == ["the crossing", "a"]


def curves():
    return plots.curves({"a": ([1, 2], [3, 4])}, "t", "x", "y", marks={1: "the crossing"})


@pytest.mark.filterwarnings("error")  # matplotlib's, where a name leaves no room to draw
@pytest.mark.parametrize(
    ("draw", "named", "others"),
    [
        (plots.timeline, {HOSTILE: events((HOSTILE, 0.0, 4.0, "graph"))}, ()),
        (plots.launch_counts, [COPY], ()),
        (plots.timings, Timing((1.0, 2.0, 3.0)), ("work",)),
        (plots.curves, ([1, 2], [3, 4]), ("x", "y", True, {1: HOSTILE})),
        (plots.values, Range(1, 0, 2), ("x",)),
    ],
)
def test_whatever_a_name_holds_a_figure_is_as_wide_as_ever_and_evidence_wraps(draw, named, others):
    sizes = []
    for evidence in ("measured", f"recorded · {HOSTILE}\nmodelled"):
        png = plots.png(draw({HOSTILE: named}, "t", *others), evidence)
        sizes.append(Image.open(io.BytesIO(png)).size)
    assert sizes[0][0] == sizes[1][0] == 1280 and sizes[0][1] < sizes[1][1]


def test_no_setting_of_the_reader_changes_a_figure():
    expected = plots.png(curves(), "measured")
    settings = {"text.usetex": True, "savefig.format": "svg", "savefig.dpi": 20, "font.size": 30}
    with matplotlib.rc_context(settings | {"savefig.bbox": "tight", "lines.linewidth": 9}):
        assert plots.png(curves(), "measured") == expected


def test_no_colour_means_two_things_no_label_is_hidden_and_sizes_have_names():
    assert len(set(plots.EVENT_COLOURS.values())) == len(plots.EVENT_COLOURS)
    assert not any(label.startswith("_") for label in plots.EVENT_COLOURS)  # matplotlib leaves these out
    names = {256: "256 B", 1536: "1.5 KiB", 2**26: "64 MiB", 2**31: "2 GiB"}
    assert {size: plots.size_name(size) for size in names} == names
