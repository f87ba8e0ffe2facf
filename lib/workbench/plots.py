"""Figures of launches and times, drawn for 800 px and for print: units on every axis, evidence below.

Two palettes that cannot be taken for each other. Kinds of work are filled areas in Okabe and Ito's colours,
which colour-blind readers can tell apart (`launches.KINDS`); the host is grey. Strategies are outlines and
markers in one plum hue, from light to dark in the order of the notebooks, with their names beside them.

Figures are made without pyplot and under a style of their own: no MPLBACKEND, matplotlibrc or IPython setting
changes them, and `$` in a name is a dollar.
"""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib.style
import numpy as np
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lib.launches import KINDS, Launch
from lib.workbench.evidence import plain
from lib.workbench.recordings import launch_kind
from lib.workbench.timing import Timing, quartiles

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from lib.workbench.step import Range

WIDTH_PX = 800
DPI = 160  # of a figure of 8 inches: more than is shown, for print
LEGEND_COLUMNS = 4
INK, SOFT = "#1F2430", "#565D6B"
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
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.4,
    "hatch.linewidth": 0.6,
}
in_style = matplotlib.style.context(["default", STYLE])  # a decorator


def new_figure(title: str, height: float, rows: int = 1, **grid: object) -> tuple[Figure, Sequence[Axes]]:
    """A figure 800 px wide, of `height` inches, with its title, and its axes below each other."""
    fig = Figure(figsize=(8, height), layout="constrained")
    fig.suptitle(textwrap.fill(plain(title), 88), x=0.01, ha="left", fontweight="bold", fontsize=11.5)
    return fig, fig.subplots(rows, 1, squeeze=False, **grid)[:, 0]


@in_style
def png(fig: Figure, evidence: str) -> bytes:
    """The finished figure with its evidence below; a long one takes more lines, not smaller letters."""
    lines = [line for part in evidence.split("\n") for line in textwrap.wrap(plain(part, 600), 118)]
    legend_rows = sum(-(-len(legend.legend_handles) // LEGEND_COLUMNS) for legend in fig.legends)
    text_inches = 0.14 * len(lines) + 0.08
    below = text_inches + 0.2 * legend_rows
    height = fig.get_figheight() + below
    fig.set_figheight(height)
    fig.get_layout_engine().set(rect=(0, below / height, 1, 1 - below / height))
    for legend in fig.legends:
        legend.set_bbox_to_anchor((0, text_inches / height), fig.transFigure)
    fig.text(0.01, 0.04 / height, "\n".join(lines), fontsize=7.5, color=SOFT)
    file = io.BytesIO()
    fig.savefig(file, format="png", dpi=DPI)
    return file.getvalue()


def show(fig: Figure, name: str, alt: str, evidence: str) -> None:
    """Display a figure as the PNG it draws itself, with what the report says about it.

    Args:
        name: short and unique in its notebook; the figure's file name.
        alt: what the figure says, for those who cannot see it.
        evidence: the label of `evidence.label`, a profile or a recording; more of them a line each.
    """
    from IPython.display import display

    about = {"name": name, "alt": plain(alt, 400), "evidence": evidence, "width": WIDTH_PX}
    image = base64.b64encode(png(fig, evidence)).decode()
    data = {"image/png": image, "text/plain": f"{name}: {about['alt']}"}
    display(data, raw=True, metadata={"image/png": about})


@in_style
def timeline(
    groups: Mapping[str, Mapping[str, pd.DataFrame]],
    title: str,
    until_us: float | None = None,
    shorten_us: float | None = None,
) -> Figure:
    """Lanes of events on one axis, groups stacked above each other, as Nsight Systems draws them.

    Args:
        groups: by name (a strategy, a regime) its lanes, from label to events: a table with `name`, `kind`,
            `start_us` and `dur_us` as of `profiles.load_trace`. A label with "modelled" is drawn hatched.
        until_us: where to cut the axis; by default after the last event.
        shorten_us: no stretch in which nothing begins or ends is drawn longer; graphs say how long they are.
    """
    lanes = [table for tables in groups.values() for table in tables.values()]
    ratios = [len(tables) for tables in groups.values()]
    height = 0.75 + 0.42 * len(lanes) + 0.3 * len(groups)
    fig, axes = new_figure(title, height, len(groups), sharex=True, height_ratios=ratios)
    place, breaks = _places(lanes, shorten_us)
    last = max((float((lane.start_us + lane.dur_us).max()) for lane in lanes if len(lane)), default=1.0)
    end = float(place(until_us or last)) or 1.0
    seen: dict[str, None] = {}
    for ax, (name, tables) in zip(axes, groups.items()):
        for row, (label, table) in enumerate(tables.items()):
            seen |= _draw_lane(ax, -row, table, place, end, "////" if "modelled" in label else None)
        _rows(ax, tables)
        ax.set_title(plain(name), fontsize=9.5, loc="left", fontweight="bold", pad=4)
        ax.spines["left"].set_visible(False)
        for middle in breaks:
            ax.axvline(middle, color="white", linewidth=5, zorder=5)
            ax.axvline(middle, color=SOFT, linestyle=":", linewidth=1.5, zorder=6)
    ax.set_xlim(0, end * 1.01)
    ax.set_xlabel("time (µs)")
    if breaks:
        ax.set_xticks([0, shorten_us], ["0", f"{shorten_us:g} µs"])
        ax.set_xlabel("time, cut short at the dotted lines")
    _legend(fig, seen, any("modelled" in label for tables in groups.values() for label in tables))
    return fig


def _places(lanes: Iterable[pd.DataFrame], shorten_us: float | None) -> tuple[Callable, list[float]]:
    """Where a time stands on the axis, and the middles of the stretches that were shortened."""
    times = [column for lane in lanes for column in (lane.start_us, lane.start_us + lane.dur_us)]
    edges = np.unique(np.concatenate([[0.0], *times]))
    steps = np.diff(edges)
    shown = np.minimum(steps, np.inf if shorten_us is None else shorten_us)
    ends = np.append(0.0, shown.cumsum())
    middles = (ends[1:] + ends[:-1]) / 2
    return lambda time: np.interp(time, edges, ends), middles[steps > shown].tolist()


def _draw_lane(
    ax: Axes, y: float, table: pd.DataFrame, place: Callable, end: float, hatch: str | None
) -> dict[str, None]:
    """Draw one lane; the labels of what is in it."""
    ax.axhspan(y - 0.36, y + 0.36, color="#F3F4F7", zorder=0)  # an idle lane is visible too
    seen = {}
    for row in table.itertuples():
        start, stop = place(row.start_us), min(place(row.start_us + row.dur_us), end)
        if start > end:
            continue
        label = event_label(row.name, row.kind)
        seen[label] = None
        half = 0.15 if row.kind == "runtime" else 0.34  # drawn inside the operator that makes the call
        wide = stop - start > end * 0.006  # an edge or a hatch would hide a narrow one
        ax.broken_barh(
            [(start, max(stop - start, end * 0.0015))],
            (y - half, 2 * half),
            facecolor=EVENT_COLOURS[label],
            edgecolor=SOFT if row.kind == "wait" else "white",
            linewidth=0.8 if wide else 0,
            hatch=hatch if wide and row.kind != "wait" else None,
            zorder=3 if row.kind == "runtime" else 2,
        )
        if row.kind in ("graph", "verify", "wait") and stop - start > end * 0.07:
            box = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 0.8}
            text = f"{row.name}\n{duration(row.dur_us)}"
            ax.text((start + stop) / 2, y, text, ha="center", va="center", fontsize=7.5, zorder=7, bbox=box)
    return seen


def event_label(name: str, kind: str) -> str:
    """What a legend calls an event: one of EVENT_COLOURS."""
    work = KINDS.get(launch_kind(name, kind))
    return EVENT_LABELS.get(name) or EVENT_LABELS.get(kind) or (work.label if work else "other work")


def _legend(fig: Figure, labels: Iterable[str], hatched: bool = False) -> None:
    handles = [Patch(facecolor=EVENT_COLOURS[label], edgecolor=SOFT, label=label) for label in labels]
    if hatched:
        handles.append(Patch(facecolor="white", edgecolor=SOFT, hatch="////", label="hatched: modelled"))
    fig.legend(handles=handles, loc="lower left", ncols=LEGEND_COLUMNS)


def _rows(ax: Axes, names: Iterable[str]) -> None:
    """One row a name, from the top."""
    labels = [textwrap.fill(plain(name, 70), 26) for name in names]
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
    fig, (ax,) = new_figure(title, 1.0 + 0.32 * len(launches))
    order = [kind for kind in KINDS if any(x.kind == kind for made in launches.values() for x in made)]
    for row, made in enumerate(launches.values()):
        kinds = sorted((launch.kind for launch in made), key=order.index)
        for place, kind in enumerate(kinds):  # one block a launch, to be counted by eye
            ax.barh(-row, 0.88, left=place + 0.06, height=0.62, color=KINDS[kind].colour)
        ax.text(len(made) + 0.25, -row, str(len(made)), va="center", fontweight="bold")
    _rows(ax, launches)
    ax.set_xlabel(xlabel)
    ax.set_xlim(0)
    ax.xaxis.get_major_locator().set_params(integer=True)
    _legend(fig, (KINDS[kind].label for kind in order))
    return fig


@in_style
def timings(results: Mapping[str, Timing], title: str, work: str, gpu: bool = False) -> Figure:
    """Every sample, the median and the middle half, one row a way; the axis begins at zero.

    work: what was timed, e.g. "one step's copies". gpu: the samples of the GPU's time instead of the host's.
    """
    fig, (ax,) = new_figure(title, 0.95 + 0.45 * len(results))
    samples = [timing.gpu_us if gpu else timing.host_us for timing in results.values()]
    values = np.concatenate(samples)
    rows = np.repeat(-np.arange(len(samples)), [len(column) for column in samples])
    sns.stripplot(x=values, y=rows, orient="h", native_scale=True, size=2.6, color="#A3AAB8", ax=ax)
    for row, (name, column) in enumerate(zip(results, samples)):
        low, high = quartiles(column)
        middle = float(np.median(column))
        colour = STRATEGY_COLOURS.get(name, INK)
        ax.barh(-row, high - low, left=low, height=0.4, facecolor="none", edgecolor=colour, linewidth=1.6)
        ax.plot([middle] * 2, [-row - 0.26, -row + 0.26], color=colour, linewidth=2.6)
        ax.text(middle, -row + 0.28, f"{middle:.1f} µs", ha="center", va="bottom", fontweight="bold")
    _rows(ax, results)
    ax.set_ylim(top=0.8)
    worst = max(quartiles(column)[1] for column in samples)
    ax.set_xlim(0, worst * 1.35)  # far outliers of a busy machine would squeeze what is compared
    ax.set_xlabel(f"{'GPU' if gpu else 'host'} time for {work} (µs); box: the middle half of the rounds")
    return fig


@in_style
def curves(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    title: str,
    xlabel: str,
    ylabel: str,
    log: bool = True,
    marks: Mapping[float, str] | None = None,
) -> Figure:
    """Lines with their names at their ends; kinds of work by their labels in `KINDS`, strategies by name.

    log: both axes logarithmic, x a size in bytes. marks: what is at some places of x, a crossing say.
    """
    fig, (ax,) = new_figure(title, 3.7)
    for (name, (xs, ys)), marker in zip(lines.items(), "osD^vPX*<>"):
        colour = EVENT_COLOURS.get(name) or STRATEGY_COLOURS.get(name, INK)
        inside = colour if name in EVENT_COLOURS else "white"
        ax.plot(xs, ys, marker=marker, markersize=5, color=colour, markerfacecolor=inside, linewidth=1.8)
        text = f"   {textwrap.fill(plain(name), 20)}"
        ax.text(xs[-1], ys[-1], text, va="center")
    if log:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.xaxis.set_major_formatter(lambda size, _: size_name(size))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    _marks(ax, marks)
    return fig


def _marks(ax: Axes, marks: Mapping[float, str] | None) -> None:
    """Thin lines across, with their words along them."""
    for place, words in (marks or {}).items():
        ax.axvline(place, color=SOFT, linewidth=1, linestyle="--", zorder=1)
        upright = {"rotation": 90, "ha": "right", "va": "top", "fontsize": 8, "color": SOFT}
        ax.text(place, 0.98, f"{plain(words)} ", transform=ax.get_xaxis_transform(), **upright)


@in_style
def values(
    numbers: Mapping[str, float | Range],
    title: str,
    xlabel: str,
    marks: Mapping[float, str] | None = None,
    digits: int = 1,
) -> Figure:
    """Numbers, or modelled ones with their ranges, one row each; a range across zero is no claim: hollow."""
    fig, (ax,) = new_figure(title, 0.95 + 0.3 * len(numbers))
    for row, value in enumerate(numbers.values()):
        is_range = hasattr(value, "low")
        low, middle, high = (value.low, value.middle, value.high) if is_range else (value,) * 3
        hollow = is_range and not value.clear
        ax.plot([low if is_range else 0, high], [-row, -row], color="#A98BB8", linewidth=2.4)
        ax.plot(middle, -row, "o", color="#57356D", markerfacecolor="white" if hollow else "#57356D")
        text = f"   {value}" if is_range else f"   {value:.{digits}f}"
        ax.text(high, -row, text + ": no claim" * hollow, va="center")
    _rows(ax, numbers)
    ax.axvline(0, color=SOFT, linewidth=1)
    ax.margins(x=0.2)
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


def duration(time_us: float) -> str:
    """4600.0 -> "4.6 ms"."""
    return f"{time_us:.0f} µs" if time_us < 1000 else f"{time_us / 1000:.3g} ms"
