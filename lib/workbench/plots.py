"""Figures of launches and times, drawn for 800 px and for print: units on every axis, evidence below.

Kinds of work have Okabe and Ito's colours, which colour-blind readers can tell apart; the host is grey,
numbers are plum. Made under plots.mplstyle alone, whatever settings a reader has.
"""

import io
import textwrap
from collections.abc import Iterable
from pathlib import Path

import matplotlib.style
import numpy as np
import pandas as pd
import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from lib.kinds import KINDS, Launch
from lib.workbench.evidence import plain
from lib.workbench.recordings import launch_kind
from lib.workbench.timing import Range, Timing, spread

SOFT, PAPER = "#565D6B", "#F3F4F7"
EVENTS = {  # a kind of launch or event, the name of an operator or graph -> its label in a legend, its colour
    **{name: (kind.label, kind.colour) for name, kind in KINDS.items()},
    "aten::copy_": ("copy_() on the host", "#9AA3B2"),
    "aten::_foreach_copy_": ("torch._foreach_copy_() on the host", "#66718A"),
    "host_op": ("operator on the host", "#D3D7DF"),
    "runtime": ("CUDA call on the host", "#2F3545"),
    "wait": ("host waits", "#F3CFC6"),
    "verify": ("verify (target model)", "#93D4BE"),
    "other": ("other work", "#E3D9C6"),
}
EVENT_COLOURS = dict(EVENTS.values())
in_style = matplotlib.style.context(["default", Path(__file__).with_name("plots.mplstyle")])  # a decorator


def new_figure(title: str, height: float, rows: Iterable[str] = ()) -> tuple[Figure, Axes]:
    """A figure 800 px wide, of `height` inches and a little for each row, with its title; and its axes. rows:
    their names, from the top; a long one breaks after its colon."""
    labels = []
    for name in rows:
        parts = name.split(": ") if len(name) > 32 else [name]
        labels.append(":\n".join(wrapped(part, 32) for part in parts))
    count = len(labels)
    fig = Figure(figsize=(8, height + 0.35 * count))
    fig.suptitle(wrapped(title, 88), x=0.01, ha="left")
    ax = fig.subplots()
    if rows:
        ax.set_yticks(range(count), labels)
        ax.set_ylim(count - 0.45, -0.55)
    return fig, ax


def wrapped(words: str, width: int, lines: int = 2) -> str:
    """As plain text on a few lines of at most `width` letters."""
    return textwrap.fill(plain(words, lines * width), width)


@in_style
def png(fig: Figure, evidence: str) -> bytes:
    """The finished figure with its evidence below, and so much higher."""
    lines = [wrapped(line, 122, 4) for line in evidence.split("\n")]
    text = "\n".join(lines)
    width, height = fig.get_size_inches()
    fig.draw_without_rendering()  # now what stands below the axes has its place
    fig.text(0.01, fig.get_tightbbox().y0 / height - 0.02, text, va="top", fontsize=8.5, color=SOFT)
    bottom = fig.get_tightbbox().y0 - 0.04
    file = io.BytesIO()
    fig.savefig(file, format="png", bbox_inches=Bbox([[0, bottom], [width, height]]))
    return file.getvalue()


@in_style
def timeline(groups: dict, title: str) -> Figure:
    """Lanes of events as Nsight Systems draws them. groups: by name (a strategy, a regime) their lanes, by
    label a table as of `profiles.load_trace`."""
    rows = [row for lanes in groups.values() for row in ("", *lanes)]
    fig, ax = new_figure(title, 0.95, rows)
    row = -1
    tables = []
    for name, lanes in groups.items():
        row += 1
        ax.text(0, row, plain(name, 90), va="center", fontweight="bold")
        for events in lanes.values():
            row += 1
            ax.axhspan(row - 0.36, row + 0.36, color=PAPER)  # seen when idle, too
            tables.append(events.assign(row=row))
    events = pd.concat(tables)
    end = (events.start_us + events.dur_us).max()
    share = events.dur_us / end
    width = share.clip(lower=0.0015) * end
    height = np.where(events.kind == "runtime", 0.3, 0.68)  # drawn inside the operator that makes the call
    labels = []
    for name, kind in zip(events.name, events.kind):
        keys = name.partition(",")[0], kind, launch_kind(name, kind), "other"
        found = next(key for key in keys if key in EVENTS)
        labels.append(EVENTS[found][0])
    edge = 0.8 * (share > 0.006)  # would hide a narrow one
    bars = _bars(ax, labels, events.row, width, height, events.start_us, edge)
    named = events.kind.isin(("graph", "wait")) & (share > 0.07)
    names = events.name.astype(object).where(named, "")
    words = [wrapped(name, 20) for name in names]
    ax.bar_label(bars, words, label_type="center", fontsize=7)
    ax.set(xlabel="time (µs)", xlim=(0, end * 1.01))
    return fig


def _bars(ax, labels, row, width, height, start, edge):
    """Bars in their labels' colours, with white edges; below the axes what the colours mean, each once."""
    labels = pd.Series(labels, dtype=object)
    look = {"color": labels.map(EVENT_COLOURS), "edgecolor": "white", "linewidth": edge}
    once = labels.mask(labels.duplicated(), "_").tolist()
    bars = ax.barh(row, width, height, start, label=once, **look)
    ax.figure.legend(loc="upper left", bbox_to_anchor=(0, 0), ncols=4)
    return bars


@in_style
def launch_counts(
    launches: dict[str, list[Launch]],
    title: str,
    xlabel: str = "launches a step (both replays)",
) -> Figure:
    """How many launches each strategy or engine makes, by kind, a block a launch: no time."""
    fig, ax = new_figure(title, 0.95, launches)
    order = list(EVENT_COLOURS)
    rows = []
    starts = []
    labels = []
    for row, made in enumerate(launches.values()):
        count = len(made)
        rows += [row] * count
        starts += range(count)
        found = [KINDS[launch.kind].label for launch in made]
        labels += sorted(found, key=order.index)
        ax.text(count + 0.25, row, count, va="center", fontweight="bold")
    _bars(ax, labels, rows, 1, 0.62, starts, edge=1.6)
    ax.set_xlabel(xlabel)
    ax.locator_params(axis="x", integer=True)
    return fig


@in_style
def curves(
    lines: dict,
    title: str,
    xlabel: str,
    ylabel: str,
    log: bool = True,
    marks: dict | None = None,
) -> Figure:
    """Lines, xs and ys by name; kinds of work, named by their labels, in their colours. log: both axes are,
    and x is a size in bytes. marks: what is at some places of x, a crossing say."""
    fig, ax = new_figure(title, 3.7)
    if log:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", subs=(2, 5))
        ax.xaxis.set_major_formatter(lambda size, _: size_name(size))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("{x:g}")
    for name, points in lines.items():
        ax.plot(*points, label=wrapped(name, 20, 3), color=EVENT_COLOURS.get(name))
    fig.legend(loc="outside right center")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    _marks(ax, marks)
    return fig


def _marks(ax, marks):
    """Thin lines across, with their words on top."""
    for place, words in (marks or {}).items():
        ax.axvline(place, color=SOFT, linestyle="--")
        top = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
        ax.annotate(wrapped(words, 16, 3), (place, 1), **top)


def timings(results: dict[str, Timing], title: str, work: str) -> Figure:
    """Host times, one row a way. work: what was timed, e.g. "one step's copies"."""
    numbers = {name: spread(timing.host_us) for name, timing in results.items()}
    return values(numbers, title, f"host time for {work} (µs): median and middle half of the rounds")


@in_style
def values(numbers: dict, title: str, xlabel: str, marks: dict | None = None) -> Figure:
    """Numbers, or a Range each, one row a name; a range across zero is no claim."""
    fig, ax = new_figure(title, 0.95, numbers)
    ends = {}
    for row, number in enumerate(numbers.values()):
        text = str(number)
        if not isinstance(number, Range):
            text = f"{number:.3g}"
            number = Range(number, 0, number)
        elif not number.clear and number.low < number.high:  # else nothing changes, which is no doubt
            text += ": no claim"
        ends[row] = number.low, number.middle, number.high
        right = {"xycoords": ("axes fraction", "data"), "va": "center"}
        ax.annotate(text, (1.01, row), **right)
    look = {"orient": "h", "native_scale": True, "linestyle": "none", "err_kws": {"marker": ""}}
    seaborn.pointplot(pd.DataFrame(ends), ax=ax, estimator="median", errorbar=("pi", 100), **look)
    ax.axvline(0, color=SOFT)
    ax.set_xlabel(xlabel)
    _marks(ax, marks)
    return fig


def size_name(size: float) -> str:
    """2048 -> "2 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
