"""Figures of launches and times, drawn for 800 px and for print: units on every axis, evidence below.

Two palettes that cannot be taken for each other. Kinds of work are filled areas in Okabe and Ito's colours,
which colour-blind readers can tell apart (`launches.KINDS`); the host is grey. Strategies are outlines and
markers in one plum hue, from light to dark in the order of the notebooks, with their names beside them.

Figures are made without pyplot and under plots.mplstyle alone: no MPLBACKEND, matplotlibrc or IPython setting
changes them, and `$` in a name is a dollar.
"""

from __future__ import annotations

import base64
import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import matplotlib.style
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator

from lib.launches import KINDS, Launch
from lib.workbench.evidence import plain
from lib.workbench.recordings import launch_kind
from lib.workbench.step import Range
from lib.workbench.timing import Timing, quartiles

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    Lanes = Mapping[str, pd.DataFrame]
    Line = tuple[Sequence[float], Sequence[float]]
    Marks = Mapping[float, str]

LEGEND_COLUMNS = 4
INK, SOFT, PAPER = "#1F2430", "#565D6B", "#F3F4F7"
EVENT_COLOURS = {kind.label: kind.colour for kind in KINDS.values()} | {
    "verify (target model)": "#93D4BE",
    "other work": "#E3D9C6",
    "copy_() on the host": "#9AA3B2",
    "_foreach_copy_() on the host": "#66718A",
    "operator on the host": "#D3D7DF",
    "CUDA call on the host": "#2F3545",
    "host waits": "#FFFFFF",
}
EVENT_LABELS = {  # by name of an operator, else by the kind of event
    "aten::copy_": "copy_() on the host",
    "aten::_foreach_copy_": "_foreach_copy_() on the host",
    "host_op": "operator on the host",
    "runtime": "CUDA call on the host",
    "wait": "host waits",
    "verify": "verify (target model)",
}
STRATEGY_COLOURS = {
    "per_copy": "#B79CC4",
    "uint8_view": "#A98BB8",
    "grouped_foreach": "#9A79AB",
    "grouped_foreach_dma": "#8A679D",
    "small_copy": "#79558E",
    "copy_plan": "#68447E",
    "fused": "#57356D",
    "one_allocation": "#46275B",
    "copy_in_graph": "#361A49",
    "no_copy": "#270E38",
}
BESIDE = {  # words beside a point, over the line of a mark
    "textcoords": "offset points",
    "va": "center",
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5},
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
    """The finished figure with its evidence below; a long one takes more lines, not smaller letters."""
    text = "\n".join(wrapped(line, 140, 4) for line in evidence.split("\n"))
    text_inches = 0.14 * text.count("\n") + 0.22
    legend_inches = 0.0
    for legend in fig.legends:
        legend_inches += 0.2 * math.ceil(len(legend.legend_handles) / LEGEND_COLUMNS)
    height = fig.get_figheight() + text_inches + legend_inches
    below = (text_inches + legend_inches) / height
    fig.set_figheight(height)
    fig.get_layout_engine().set(rect=(0, below, 1, 1 - below))
    for legend in fig.legends:
        legend.set_bbox_to_anchor((0, text_inches / height), fig.transFigure)
    fig.text(0.01, 0.04 / height, text, fontsize=7.5, color=SOFT)
    file = io.BytesIO()
    fig.savefig(file, format="png")
    return file.getvalue()


def show(fig: Figure, name: str, alt: str, evidence: str) -> None:
    """Display a figure as the PNG it draws itself, with what the report says about it.

    Args:
        name: short and unique in its notebook; the figure's file name.
        alt: what the figure says, for those who cannot see it.
        evidence: the label of `evidence.label`, a profile or a recording; more of them a line each.
    """
    from IPython.display import display

    about = {"name": name, "alt": plain(alt, 400), "evidence": evidence, "width": 800}
    image = base64.b64encode(png(fig, evidence)).decode()
    data = {"image/png": image, "text/plain": about["alt"]}
    display(data, raw=True, metadata={"image/png": about})


@in_style
def timeline(groups: Mapping[str, Lanes], title: str) -> Figure:
    """Lanes of events on one axis, groups stacked above each other, as Nsight Systems draws them.

    groups: by name (a strategy, a regime) its lanes, from label to events: a table with `name`, `kind`,
    `start_us` and `dur_us` as of `profiles.load_trace`. A label with "modelled" is drawn hatched.
    """
    ratios = [len(lanes) for lanes in groups.values()]
    fig = new_figure(title, 0.75 + 0.42 * sum(ratios) + 0.3 * len(groups))
    axes = fig.subplots(len(groups), 1, squeeze=False, sharex=True, height_ratios=ratios)
    end = 1e-3
    for lanes in groups.values():
        for events in lanes.values():
            end = max([end, *(events.start_us + events.dur_us)])
    seen: dict[str, None] = {}
    hatched = False
    for (ax,), (name, lanes) in zip(axes, groups.items()):
        for row, (label, events) in enumerate(lanes.items()):
            modelled = "modelled" in label
            seen |= _draw_lane(ax, -row, events, end, "////" if modelled else None)
            hatched |= modelled
        _rows(ax, lanes)
        ax.set_title(plain(name, 90))
        ax.spines["left"].set_visible(False)
    ax.set_xlim(0, end * 1.01)
    ax.set_xlabel("time (µs)")
    _legend(fig, seen, hatched)
    return fig


def _draw_lane(ax: Axes, y: float, events: pd.DataFrame, end: float, hatch: str | None) -> dict[str, None]:
    """Draw one lane; the labels of what is in it."""
    ax.axhspan(y - 0.36, y + 0.36, color=PAPER, zorder=0)  # an idle lane is visible too
    seen = {}
    for row in events.itertuples():
        label = event_label(row.name, row.kind)
        seen[label] = None
        half = 0.15 if row.kind == "runtime" else 0.34  # drawn inside the operator that makes the call
        width = max(row.dur_us, end * 0.0015)
        colour = EVENT_COLOURS[label]
        bar = ax.barh(y, width, 2 * half, row.start_us, color=colour, zorder=2.5 - half)
        if width > end * 0.006:  # an edge or a hatch would hide a narrow one
            edge = SOFT if row.kind == "wait" else "white"
            bar[0].set(edgecolor=edge, linewidth=0.8, hatch=hatch)
        if row.kind in ("graph", "wait") and width > end * 0.07:
            box = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 0.8}
            name, _, length = row.name.partition("\n")
            words = f"{plain(name, 24)}\n{plain(length, 24)}".strip()
            ax.bar_label(bar, [words], label_type="center", fontsize=7.5, bbox=box)
    return seen


def event_label(name: str, kind: str) -> str:
    """What a legend calls an event: one of EVENT_COLOURS."""
    for key in (name.partition("\n")[0], kind):
        if key in EVENT_LABELS:
            return EVENT_LABELS[key]
    work = KINDS.get(launch_kind(name, kind))
    return work.label if work else "other work"


def _legend(fig: Figure, labels: Iterable[str], hatched: bool = False) -> None:
    handles = [Patch(facecolor=EVENT_COLOURS[label], edgecolor=SOFT, label=label) for label in labels]
    if hatched:
        handles.append(Patch(facecolor="white", edgecolor=SOFT, hatch="////", label="hatched: modelled"))
    fig.legend(handles=handles, loc="lower left", ncols=LEGEND_COLUMNS)


def _rows(ax: Axes, names: Iterable[str]) -> None:
    """One row a name, from the top."""
    labels = [wrapped(name, 26) for name in names]
    ax.set_yticks([-row for row in range(len(labels))], labels)
    ax.set_ylim(-len(labels) + 0.45, 0.55)
    ax.tick_params(axis="y", length=0)


@in_style
def launch_counts(
    launches: Mapping[str, Sequence[Launch]],
    title: str,
    xlabel: str = "launches a step (draft and draft-extend replay)",
) -> Figure:
    """How many launches each strategy or engine makes, by kind, a block a launch: no time."""
    fig = new_figure(title, 1.0 + 0.32 * len(launches))
    ax = fig.subplots()
    order = list(KINDS)
    seen = set()
    for row, made in enumerate(launches.values()):
        kinds = sorted((launch.kind for launch in made), key=order.index)
        for place, kind in enumerate(kinds):
            ax.barh(-row, 0.88, 0.62, place + 0.06, color=KINDS[kind].colour)
        count = len(kinds)
        ax.text(count + 0.25, -row, f"{count}", va="center", fontweight="bold")
        seen.update(kinds)
    _rows(ax, launches)
    ax.set_xlabel(xlabel)
    ax.set_xlim(0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(fig, [KINDS[kind].label for kind in order if kind in seen])
    return fig


@in_style
def curves(
    lines: Mapping[str, Line],
    title: str,
    xlabel: str,
    ylabel: str,
    log: bool = True,
    marks: Marks | None = None,
) -> Figure:
    """Lines with their names at their ends; kinds of work by their labels in `KINDS`, strategies by name.

    log: both axes logarithmic, x a size in bytes. marks: what is at some places of x, a crossing say.
    """
    fig = new_figure(title, 3.7)
    ax = fig.subplots()
    for (name, (xs, ys)), marker in zip(lines.items(), "osD^vPX*<>"):
        colour = EVENT_COLOURS.get(name) or STRATEGY_COLOURS.get(name, INK)
        inside = colour if name in EVENT_COLOURS else "white"
        ax.plot(xs, ys, marker=marker, markersize=5, color=colour, markerfacecolor=inside)
    if log:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.xaxis.set_major_formatter(lambda size, _: size_name(size))
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _name_ends(ax, lines)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    _marks(ax, marks)
    return fig


def _name_ends(ax: Axes, lines: Mapping[str, Line]) -> None:
    """The lines' names at their ends, from the lowest on, none on top of another."""
    ax.autoscale_view()
    in_axis = ax.transScale + ax.transLimits
    free = 0.0
    for y, x, name in sorted((ys[-1], xs[-1], name) for name, (xs, ys) in lines.items()):
        place = 200 * in_axis.transform((x, y))[1]  # in points: such an axis is about 200 high
        free = max(free, place)
        ax.annotate(wrapped(name, 20, 3), (x, y), (8, free - place), **BESIDE)
        free += 13


def _marks(ax: Axes, marks: Marks | None) -> None:
    """Thin lines across, with their words on top."""
    for place, words in (marks or {}).items():
        ax.axvline(place, color=SOFT, linewidth=1, linestyle="--", zorder=1)
        top = ax.get_xaxis_transform()
        ax.text(place, 1, wrapped(words, 16, 3), transform=top, ha="center", va="bottom", fontsize=8)


def timings(results: Mapping[str, Timing], title: str, work: str, gpu: bool = False) -> Figure:
    """Every sample, the median and the middle half, one row a way.

    work: what was timed, e.g. "one step's copies". gpu: the samples of the GPU's time instead of the host's.
    """
    side = "GPU" if gpu else "host"
    samples, middles = {}, {}
    for name, timing in results.items():
        samples[name] = timing.gpu_us if gpu else timing.host_us
        middles[name] = Range(median(samples[name]), *quartiles(samples[name]))
    xlabel = f"{side} time for {work} (µs): median and middle half of the rounds"
    return values(middles, title, xlabel, samples=samples)


@in_style
def values(
    numbers: Mapping[str, float | Range],
    title: str,
    xlabel: str,
    marks: Marks | None = None,
    samples: Mapping[str, Sequence[float]] | None = None,
) -> Figure:
    """Numbers, or modelled ones with their ranges, one row each; a range across zero is no claim: hollow.

    samples: what a number is the median of, drawn as dots.
    """
    fig = new_figure(title, 0.95 + 0.36 * len(numbers))
    ax = fig.subplots()
    lowest = farthest = 0.0
    # Far outliers of a busy machine would squeeze what is compared.
    seen = 2 * max(number.middle for number in numbers.values()) if samples else math.inf
    for row, (name, value) in enumerate(numbers.items()):
        is_range = isinstance(value, Range)
        number = value if is_range else Range(value, min(value, 0), max(value, 0))
        open_ = is_range and not value.clear
        colour = STRATEGY_COLOURS.get(name, INK)
        if samples:
            dots = {"orient": "h", "native_scale": True, "size": 2.5, "color": "#A3AAB8"}
            sns.stripplot(x=samples[name], y=-row - 0.25, ax=ax, **dots)
        ax.hlines(-row, number.low, number.high, color=colour, linewidth=2.6)
        inside = "white" if open_ else colour
        ax.plot(number.middle, -row, "o", color=colour, markerfacecolor=inside, clip_on=False)
        text = str(value) if is_range else f"{value:.3g}"
        text += ": no claim" if open_ else ""
        ax.annotate(text, (min(number.high, seen), -row), (8, 0), **BESIDE)
        lowest = min(lowest, number.low)
        farthest = max(farthest, number.high)
    _rows(ax, numbers)
    ax.axvline(0, color=SOFT, linewidth=1)
    ax.set_xlim(lowest * 1.1, min(farthest, seen) * 1.35)
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
