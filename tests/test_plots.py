"""Figures: what they draw, that no name and no setting of the reader changes them."""

import hashlib
import io
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.colors
import pandas as pd
import pytest
from PIL import Image

from lib.launches import KINDS, Launch
from lib.workbench import plots
from lib.workbench.timing import Range, Timing
from notebooks import drawings

ROOT = Path(__file__).resolve().parents[1]
HOSTILE = "a $x^$ name \x1b[31m\n<script>&amp; $y$ " + "long " * 60
COPY, GROUP = Launch("memcpy", 1, 8, ""), Launch("foreach", 3, 24, "")


def events(*rows):
    return pd.DataFrame(rows, columns=["name", "start_us", "dur_us", "kind"])


def texts(fig):
    found = [text.get_text() for ax in fig.axes for text in ax.texts]
    found += [text.get_text() for legend in fig.legends for text in legend.get_texts()]
    return [text.strip() for text in found if text.strip()]


def test_a_timeline_draws_every_event_at_its_time_in_its_lane():
    host = events(("aten::copy_", 0.0, 4.0, "host_op"), ("aten::fill_", 5.0, 2.0, "host_op"))
    stream = events((KINDS["foreach"].work, 3.0, 1.0, "copy_kernel"), ("verify, 9 ms", 4.0, 9.0, "graph"))
    fig = plots.timeline({"per_copy": {"host": host, "stream": stream}, "empty": {"host": host[:0]}}, "t")
    (ax,) = fig.axes
    lane = matplotlib.colors.to_rgba(plots.PAPER)
    bars = [patch for patch in ax.patches if patch.get_facecolor() != lane]
    drawn = [(bar.get_x(), bar.get_width(), round(bar.get_y() + bar.get_height() / 2)) for bar in bars]
    assert drawn == [(0, 4, 1), (5, 2, 1), (3, 1, 2), (4, 9, 2)]
    legend = ["copy_() on the host", "operator on the host", KINDS["foreach"].label, "verify (target model)"]
    assert texts(fig) == ["per_copy", "empty", "verify, 9 ms", *legend]
    assert "µs" in ax.get_xlabel()


def test_launch_counts_draws_one_block_a_launch_and_writes_the_number():
    fig = plots.launch_counts({"per_copy": [COPY] * 5, "an engine": [GROUP, COPY], "none": []}, "t")
    assert len(fig.axes[0].patches) == 7
    assert texts(fig) == ["5", "2", "0", KINDS["memcpy"].label, KINDS["foreach"].label]


def test_numbers_stand_beside_what_is_drawn_and_a_range_across_zero_is_no_claim():
    results = {"per_copy": Timing("per_copy", (1.0, 2.0, 9.0)), "x": Timing("x", (4.0, 5.0, 6.0))}
    assert texts(plots.timings(results, "t", "one replay")) == ["2 µs (1.5 to 5.5)", "5 µs (4.5 to 5.5)"]
    numbers = {"a": Range(3, 1, 5), "b": Range(3, -1, 5), "c": 2.5}
    shown = ["3 µs (1 to 5)", "3 µs (-1 to 5): no claim", "2.5", "reported"]
    assert texts(plots.values(numbers, "t", "µs", marks={4: "reported"})) == shown
    fig = plots.curves({"per_copy": ([1, 2], [3, 4])}, "t", "bytes", "µs", marks={1.5: "the crossing"})
    assert texts(fig) == ["the crossing", "per_copy"]


def figures(name="a name"):
    lanes = {name: events((name, 0.0, 4.0, "graph"), (name, 5.0, 2.0, "kernel"))}
    return [
        plots.timeline({name: lanes}, name),
        plots.launch_counts({name: [COPY]}, name),
        plots.timings({name: Timing(name, (1.0, 2.0, 3.0))}, name, "work"),
        plots.curves({name: ([1, 2], [3, 4])}, name, "x", "y", marks={1: name}),
        plots.values({name: Range(1, 0, 2)}, name, "x"),
        drawings.buffers(),
        drawings.blocks({"a": 3, "b": 2**20, "c": 0}),
        drawings.tree([-1, -1, 0], ["a", "b", "c"], [0, 2]),
        drawings.regimes(),
    ]


def test_whatever_a_name_holds_a_figure_is_as_wide_as_ever():
    for ordinary, hostile in zip(figures(), figures(HOSTILE)):
        image = Image.open(io.BytesIO(plots.png(hostile, f"recorded · {HOSTILE}\nmodelled")))
        short = Image.open(io.BytesIO(plots.png(ordinary, "measured")))
        assert image.width == short.width == 1280
        assert image.height > short.height  # a long line of evidence wraps


def test_no_setting_of_the_reader_changes_a_figure(tmp_path):
    settings = "text.usetex: True\nsavefig.format: svg\nsavefig.dpi: 20\nfont.size: 30\nsavefig.bbox: tight\n"
    (tmp_path / "matplotlibrc").write_text(settings)
    code = "import hashlib; from tests.test_plots import figures; from lib.workbench.plots import png\n"
    code += "print(hashlib.sha256(png(figures()[3], 'measured')).hexdigest())"
    readers = {"MATPLOTLIBRC": str(tmp_path), "MPLBACKEND": "svg", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | readers, cwd=ROOT, capture_output=True, text=True)
    expected = hashlib.sha256(plots.png(figures()[3], "measured")).hexdigest()
    assert done.stdout.strip() == expected, done.stderr


def test_no_colour_means_two_things():
    assert len(set(plots.EVENT_COLOURS.values())) == len(plots.EVENT_COLOURS)


@pytest.mark.parametrize(
    ("size", "name"), [(256, "256 B"), (1536, "1.5 KiB"), (2**26, "64 MiB"), (2**31, "2 GiB")]
)
def test_size_names(size, name):
    assert plots.size_name(size) == name
