"""Figures of launches and times, drawn for 800 px and for print: units on every axis, evidence below.

Kinds of work are areas in Okabe and Ito's colours, which colour-blind readers can tell apart, the host is
grey, numbers are plum. Made under plots.mplstyle alone, whatever settings a reader has.
"""

from __future__ import annotations

import io
import textwrap
from pathlib import Path

import matplotlib.style
import numpy as np
import pandas as pd
import seaborn
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator
from matplotlib.transforms import Bbox

from lib.kinds import KINDS, Launch
from lib.workbench.evidence import plain
from lib.workbench.recordings import launch_kind
from lib.workbench.timing import Range, Timing, spread

SOFT, PAPER = "#565D6B", "#F3F4F7"
EVENT_COLOURS = {kind.label: kind.colour for kind in KINDS.values()} | {
    "verify (target model)": "#93D4BE",
    "other work": "#E3D9C6",
    "copy_() on the host": "#9AA3B2",
    "_foreach_copy_() on the host": "#66718A",
    "operator on the host": "#D3D7DF",
    "CUDA call on the host": "#2F3545",
    "host waits": "#F3CFC6",
}
EVENT_LABELS = {  # by name of an operator, else by the kind of event
    "aten::copy_": "copy_() on the host",
    "aten::_foreach_copy_": "_foreach_copy_() on the host",
    "host_op": "operator on the host",
    "runtime": "CUDA call on the host",
    "wait": "host waits",
    "verify": "verify (target model)",
}
in_style = matplotlib.style.context(["default", Path(__file__).with_name("plots.mplstyle")])  # a decorator


def new_figure(title: str, height: float) -> Figure:
    """A figure 800 px wide, of `height` inches, with its title."""
    fig = Figure(figsize=(8, height))
    fig.suptitle(wrapped(title, 88), x=0.01, ha="left")
    return fig


def wrapped(words: str, width: int, lines: int = 2) -> str:
    """As plain text on a few lines of at most `width` letters."""
    return textwrap.fill(plain(words, lines * width), width)


@in_style
def png(fig: Figure, evidence: str) -> bytes:
    """The finished figure with its evidence below, and so much higher."""
    text = "\n".join(wrapped(line, 122, 4) for line in evidence.split("\n"))
    width, height = fig.get_size_inches()
    fig.draw_without_rendering()  # now what stands below the axes has its place
    bottom = fig.get_tightbbox().y0
    below = fig.text(0.01, bottom / height - 0.02, text, va="top", fontsize=8.5, color=SOFT)
    bottom = below.get_window_extent().y0 / fig.dpi
    file = io.BytesIO()
    fig.savefig(file, format="png", bbox_inches=Bbox([[0, bottom - 0.04], [width, height]]))
    return file.getvalue()


@in_style
def timeline(groups: dict, title: str) -> Figure:
    """Groups of lanes of events, as Nsight Systems draws them.

    groups: by name (a strategy, a regime) its lanes, by label a table of events as of `profiles.load_trace`.
    """
    count = len(groups) + sum(map(len, groups.values()))
    fig = new_figure(title, 0.8 + 0.4 * count)
    ax = fig.subplots()
    rows = []
    tables = []
    for name, lanes in groups.items():
        ax.text(0, len(rows) + 0.1, plain(name, 90), va="center", fontweight="bold")
        rows.append("")
        for label, events in lanes.items():
            ax.axhspan(len(rows) - 0.36, len(rows) + 0.36, color=PAPER)  # seen when idle, too
            tables.append(events.assign(row=len(rows)))
            rows.append(label)
    _rows(ax, rows)
    events = pd.concat(tables)
    end = (events.start_us + events.dur_us).max()
    width = events.dur_us.clip(lower=end * 0.0015)
    height = np.where(events.kind == "runtime", 0.3, 0.68)  # drawn inside the operator that makes the call
    labels = [event_label(*event) for event in zip(events.name, events.kind)]
    colours = [EVENT_COLOURS[label] for label in labels]
    edge_width = 0.8 * (width > end * 0.006)  # an edge would hide a narrow one
    look = {"color": colours, "edgecolor": "white", "linewidth": edge_width}
    bars = ax.barh(events.row, width, height, events.start_us, **look)
    named = events.kind.isin(("graph", "wait")) & (width > end * 0.07)
    words = [wrapped(name, 20) for name in events.name.astype(object).where(named, "")]
    ax.bar_label(bars, words, label_type="center", fontsize=7.5)
    ax.set_xlim(0, end * 1.01)
    ax.set_ylim(top=-0.25)
    ax.set_xlabel("time (µs)")
    _legend(fig, labels)
    return fig


def event_label(name: str, kind: str) -> str:
    """What a legend calls an event: one of EVENT_COLOURS."""
    for key in (name.partition(",")[0], kind):
        if key in EVENT_LABELS:
            return EVENT_LABELS[key]
    work = KINDS.get(launch_kind(name, kind))
    return work.label if work else "other work"


def _legend(fig, labels):
    """What the colours mean, each once, below the axes."""
    handles = []
    for label in dict.fromkeys(labels):
        handles.append(Patch(facecolor=EVENT_COLOURS[label], edgecolor=SOFT, label=label))
    fig.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, 0), ncols=4)


def _rows(ax, names):
    """One row a name, from the top; a long name breaks after its colon."""
    labels = []
    for name in names:
        parts = name.split(": ") if len(name) > 26 else [name]
        labels.append(":\n".join(wrapped(part, 26) for part in parts))
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.45, -0.55)


@in_style
def launch_counts(
    launches: dict[str, list[Launch]], title: str, xlabel: str = "launches a step (both replays)"
) -> Figure:
    """How many launches each strategy or engine makes, by kind, a block a launch: no time."""
    fig = new_figure(title, 1.0 + 0.32 * len(launches))
    ax = fig.subplots()
    labels = []
    for row, made in enumerate(launches.values()):
        kinds = [KINDS[launch.kind].label for launch in made]
        kinds.sort(key=list(EVENT_COLOURS).index)
        colours = [EVENT_COLOURS[kind] for kind in kinds]
        count = len(kinds)
        ax.barh([row] * count, 0.88, 0.62, np.arange(count) + 0.06, color=colours)
        ax.text(count + 0.25, row, count, va="center", fontweight="bold")
        labels += kinds
    _rows(ax, launches)
    ax.set(xlabel=xlabel, xlim=(0, None))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(fig, labels)
    return fig


@in_style
def curves(
    lines: dict, title: str, xlabel: str, ylabel: str, log: bool = True, marks: dict | None = None
) -> Figure:
    """Lines, xs and ys by name; kinds of work, named by their labels, in their colours.

    log: both axes logarithmic, x a size in bytes. marks: what is at some places of x, a crossing say.
    """
    fig = new_figure(title, 3.7)
    ax = fig.subplots()
    if log:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.xaxis.set_major_formatter(lambda size, _: size_name(size))
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("")
    shades = seaborn.light_palette("#57356D", len(lines) + 1, reverse=True)
    for shade, (name, points) in zip(shades, lines.items()):
        ax.plot(*points, label=wrapped(name, 20, 3), color=EVENT_COLOURS.get(name, shade))
    fig.legend(loc="outside right center")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    _marks(ax, marks)
    return fig


def _marks(ax, marks):
    """Thin lines across, with their words on top."""
    for place, words in (marks or {}).items():
        ax.axvline(place, color=SOFT, linestyle="--")
        top = ax.get_xaxis_transform()
        ax.text(place, 1, wrapped(words, 16, 3), transform=top, ha="center", va="bottom")


@in_style
def timings(results: dict[str, Timing], title: str, work: str) -> Figure:
    """Host times, one row a way. work: what was timed, e.g. "one step's copies"."""
    samples = pd.DataFrame({name: timing.host_us for name, timing in results.items()})
    fig = new_figure(title, 0.95 + 0.36 * len(results))
    ax = fig.subplots()
    middle_half = {"errorbar": ("pi", 50), "err_kws": {"marker": ""}}
    seaborn.pointplot(samples, orient="h", estimator="median", linestyle="none", ax=ax, **middle_half)
    _rows(ax, results)
    _beside(ax, map(spread, samples.T.values))
    ax.set(xlabel=f"host time for {work} (µs): median and middle half of the rounds", xlim=(0, None))
    return fig


@in_style
def values(numbers: dict, title: str, xlabel: str, marks: dict | None = None) -> Figure:
    """Numbers, or a Range each, one row a name; a range across zero is no claim, and hollow."""
    fig = new_figure(title, 0.95 + 0.36 * len(numbers))
    ax = fig.subplots()
    texts = []
    for row, number in enumerate(numbers.values()):
        text, inside = str(number), None
        if not isinstance(number, Range):
            text = f"{number:.3g}"
            number = Range(number, 0, number)
        elif not number.clear and number.low < number.high:  # else nothing changes, which is no doubt
            text += ": no claim"
            inside = "white"
        ax.hlines(row, number.low, number.high, linewidth=2.6)
        ax.plot(number.middle, row, "o", markerfacecolor=inside)
        texts.append(text)
    _rows(ax, numbers)
    _beside(ax, texts)
    ax.axvline(0, color=SOFT)
    ax.set_xlabel(xlabel)
    _marks(ax, marks)
    return fig


def _beside(ax, words):
    """A word for each row, right of the axes."""
    for row, word in enumerate(words):
        ax.text(1.01, row, word, transform=ax.get_yaxis_transform(), va="center")


def size_name(size: float) -> str:
    """2048 -> "2 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
