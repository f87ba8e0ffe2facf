"""Figures: what they draw, that no name and no setting of the reader changes them, and how they are shown."""

import base64
import hashlib
import io
import itertools
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.colors
import pandas as pd
import pytest
from PIL import Image

from lib.launches import KINDS, Launch
from lib.strategies import STRATEGIES
from lib.workbench import drawings, plots
from lib.workbench.step import OPTIONS, Range
from lib.workbench.timing import Timing

ROOT = Path(__file__).resolve().parents[1]
HOSTILE = "a $x^$ name \x1b[31m\n<script>&amp; $y$ " + "long " * 60
COPY = Launch("memcpy", 1, 8, "")


def events(*rows):
    return pd.DataFrame(rows, columns=["name", "start_us", "dur_us", "kind"])


def texts(fig):
    found = [text.get_text() for ax in fig.axes for text in ax.texts]
    return found + [text.get_text() for legend in fig.legends for text in legend.get_texts()]


def bars(ax):
    """(start, width, hatch) of what is drawn on the lanes."""
    lane = matplotlib.colors.to_rgba(plots.PAPER)
    drawn = [patch for patch in ax.patches if patch.get_facecolor() != lane]
    return [(patch.get_x(), patch.get_width(), patch.get_hatch()) for patch in drawn]


def test_a_timeline_draws_every_event_at_its_time_and_marks_what_is_modelled():
    host = events(("aten::copy_", 0.0, 4.0, "host_op"), ("aten::fill_", 5.0, 2.0, "host_op"))
    stream = events((KINDS["foreach"].work, 3.0, 1.0, "copy_kernel"), ("any", 4.0, 9.0, "kernel"))
    lanes = {"host · measured": host, "stream · modelled": stream}
    fig = plots.timeline({"per_copy": lanes, "empty": {"host": host[:0]}}, "t")
    first, second = fig.axes
    assert bars(first) == [(0, 4, None), (5, 2, None), (3, 1, "////"), (4, 9, "////")]
    assert bars(second) == []
    assert {"copy_() on the host", KINDS["foreach"].label, "other work", "hatched: modelled"} < set(
        texts(fig)
    )
    assert "µs" in second.get_xlabel()


def test_launch_counts_draws_one_block_a_launch_and_writes_the_number():
    fused = Launch("foreach", 3, 24, "")
    fig = plots.launch_counts({"per_copy": [COPY] * 5, "an engine": [fused, COPY], "none": []}, "t")
    assert len(fig.axes[0].patches) == 7
    assert texts(fig) == ["5", "2", "0", KINDS["memcpy"].label, KINDS["foreach"].label]


def test_numbers_stand_beside_what_is_drawn_and_a_range_across_zero_is_no_claim():
    results = {"per_copy": Timing("per_copy", (1.0, 2.0, 9.0)), "x": Timing("x", (4.0, 5.0, 6.0), (7.0,) * 3)}
    assert texts(plots.timings(results, "t", "one replay")) == ["2.0 µs (1.5 to 5.5)", "5.0 µs (4.5 to 5.5)"]
    fig = plots.values(
        {"a": Range(3, 1, 5), "b": Range(3, -1, 5), "c": 2.5}, "t", "µs", marks={4: "reported"}
    )
    shown = [text.strip() for text in texts(fig)]
    assert shown == ["3.0 µs (1.0 to 5.0)", "3.0 µs (-1.0 to 5.0): no claim", "2.5", "reported"]
    fig = plots.values({"a": Range(-11, -34, -0.3)}, "t", "µs")
    assert texts(fig) == ["-11.0 µs (-34.0 to -0.3)"]  # no -0
    fig = plots.curves({"per_copy": ([1, 2], [3, 4])}, "t", "bytes", "µs", marks={1.5: "the crossing"})
    assert [text.strip() for text in texts(fig)] == ["per_copy", "the crossing"]


def test_names_at_the_ends_of_lines_lie_apart():
    lines = {"a": ([1, 2], [3.0, 5.0]), "b": ([1, 2], [1.0, 4.95]), "c": ([1, 2], [2.0, 1.0])}
    fig = plots.curves(lines, "t", "x", "y", log=False)
    plots.png(fig, "measured")
    fig.canvas.draw()
    boxes = [text.get_window_extent() for text in fig.axes[0].texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_a_busy_machine_does_not_squeeze_what_is_compared():
    slow = Timing("x", (150.0,) * 3 + (2000.0,) * 2)
    fig = plots.timings({"per_copy": Timing("per_copy", (30.0,) * 5), "x": slow}, "t", "a step")
    assert fig.axes[0].get_xlim()[1] < 500 and "150 µs (150 to 2000)" in texts(fig)


def figures(name="a name"):
    lanes = {name: events((name, 0.0, 4.0, "graph"), (name, 5.0, 2.0, "kernel"))}
    timing = Timing(name, (1.0, 2.0, 3.0))
    return {
        "timeline": plots.timeline({name: lanes}, name),
        "counts": plots.launch_counts({name: [COPY]}, name),
        "timings": plots.timings({name: timing}, name, "work"),
        "curves": plots.curves({name: ([1, 2], [3, 4])}, name, "x", "y", marks={1: name}),
        "values": plots.values({name: Range(1, 0, 2)}, name, "x"),
        "buffers": drawings.buffers([name, "b"]),
        "blocks": drawings.blocks({name: 3, "b": 2**20, "c": 0}),
        "tree": drawings.tree([-1, -1, 0], [name, "b", "c"], {0, 2}),
        "regimes": drawings.regimes(),
    }


def test_whatever_a_name_holds_a_figure_is_as_wide_as_ever():
    ordinary = figures()
    for kind, hostile in figures(HOSTILE).items():
        image = Image.open(io.BytesIO(plots.png(hostile, f"recorded · {HOSTILE}\nmodelled")))
        short = Image.open(io.BytesIO(plots.png(ordinary[kind], "measured")))
        assert image.width == short.width == 1280
        assert image.height > short.height, kind  # a long line of evidence wraps


def test_no_setting_of_the_reader_changes_a_figure(tmp_path):
    (tmp_path / "matplotlibrc").write_text(
        "text.usetex: True\nsavefig.format: svg\nsavefig.dpi: 20\nfont.size: 30\nsavefig.bbox: tight\n"
    )
    code = "import hashlib; from tests.test_plots import figures; from lib.workbench.plots import png\n"
    code += "print(hashlib.sha256(png(figures()['curves'], 'measured')).hexdigest())"
    settings = {"MATPLOTLIBRC": str(tmp_path), "MPLBACKEND": "svg", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | settings, cwd=ROOT, capture_output=True, text=True)
    expected = hashlib.sha256(plots.png(figures()["curves"], "measured")).hexdigest()
    assert done.stdout.strip() == expected, done.stderr


def test_show_emits_a_png_with_what_the_report_wants(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **how: shown.append((data, how["metadata"])))
    plots.show(drawings.regimes(), "a_name", "what \x1b[2J it says", "measured · here")
    ((data, metadata),) = shown
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    about = {"name": "a_name", "alt": "what [2J it says", "evidence": "measured · here", "width": 800}
    assert metadata == {"image/png": about}


def test_no_colour_means_two_things():
    assert set(plots.STRATEGY_COLOURS) == {*STRATEGIES, *OPTIONS}
    colours = [*plots.STRATEGY_COLOURS.values(), *plots.EVENT_COLOURS.values()]
    assert len({colour.lower() for colour in colours}) == len(colours)


@pytest.mark.parametrize(
    ("size", "name"),
    [(256, "256 B"), (2048, "2 KiB"), (1536, "1.5 KiB"), (2**26, "64 MiB"), (2**41, "2.05e+03 GiB")],
)
def test_size_names(size, name):
    assert plots.size_name(size) == name
