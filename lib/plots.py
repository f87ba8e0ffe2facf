"""Nsight-style timelines, launch counts, timings and crossovers: one palette, one order, units on every axis.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; lightness differs too, for grey print.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.patches import Patch
from matplotlib.transforms import ScaledTranslation

from lib.routes import Launch
from lib.timing import Timing, quartiles

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Kinds of launches (lib/routes.py) and of events (lib/traces.py).
KIND_COLOURS = {
    "memcpy": "#0072B2",
    "memcpy_htod": "#56B4E9",
    "memcpy_dtoh": "#56B4E9",
    "elementwise": "#D55E00",
    "copy_kernel": "#E69F00",
    "foreach": "#E69F00",
    "fused": "#CC79A7",
    "fill": "#F0E442",
    "memset": "#F0E442",
    "graph": "#009E73",
    "kernel": "#009E73",
    "host_copy": "#0072B2",
    "host_foreach": "#E69F00",
    "host_op": "#8A93A6",
    "runtime": "#3C4354",
}
KIND_NAMES = {
    "memcpy": "driver memcpy",
    "memcpy_htod": "memcpy host to device",
    "memcpy_dtoh": "memcpy device to host",
    "elementwise": "elementwise copy kernel",
    "copy_kernel": "copy kernel",
    "foreach": "fused foreach kernel",
    "fused": "one Triton kernel",
    "graph": "graph replay",
    "host_copy": "copy_() on the host",
    "host_foreach": "_foreach_copy_() on the host",
    "host_op": "operator on the host",
    "runtime": "CUDA call on the host",
}
STRATEGY_COLOURS = {
    "per_copy": "#3C4354",
    "uint8_view": "#E69F00",
    "grouped_foreach": "#56B4E9",
    "grouped_foreach_dma": "#0072B2",
    "copy_plan": "#009E73",
    "arena": "#CC79A7",
    "fused_kernel": "#D55E00",
    "in_graph": "#8A93A6",
    "no_copy": "#B8BDC9",
}


def use_style() -> None:
    """Set the workbench's look: large enough to read at half width."""
    sns.set_theme(context="notebook", style="ticks", font="DejaVu Sans")
    plt.rcParams.update(
        {
            "figure.dpi": 110,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlelocation": "left",
            "axes.titleweight": "bold",
            "axes.titlesize": 13,
            "legend.frameon": False,
            "hatch.linewidth": 0.5,
        }
    )


def show(fig: Figure, name: str, alt: str, evidence: str) -> None:
    """Display a finished figure with the kind of its numbers under it; report.html takes it from there.

    Args:
        name: short and unique in its notebook; the figure's file name.
        alt: what the figure says, for those who cannot see it.
        evidence: from `lib.evidence.label`.
    """
    from IPython.display import display

    write_evidence(fig, evidence)
    display(fig, metadata={"image/png": {"name": name, "alt": alt, "evidence": evidence}})
    plt.close(fig)


def write_evidence(fig: Figure, evidence: str) -> None:
    """The small line under a finished figure."""
    fig.draw_without_rendering()  # settles the layout, which then stays as it is
    fig.set_layout_engine("none")
    below = fig.get_tightbbox().y0 / fig.get_figheight() - 0.01
    fig.text(0.01, below, evidence, fontsize=8.5, color="#555555", va="top", ha="left")


def timeline(
    strategies: Mapping[str, Mapping[str, pd.DataFrame]], title: str, until_us: float | None = None
) -> Figure:
    """Lanes of events on one axis, strategies stacked above each other, as Nsight Systems draws them.

    Args:
        strategies: per strategy its lanes, from label to events: a table with `start_us`, `dur_us` and `kind`
            as `lib.traces.load_trace` returns. A label that contains "modelled" is drawn hatched.
        until_us: where to cut the axis, in microseconds; by default after the last event.
    """
    lanes = [(name, label, table) for name, tables in strategies.items() for label, table in tables.items()]
    fig, axes = plt.subplots(
        len(strategies),
        1,
        sharex=True,
        squeeze=False,
        figsize=(10, 0.9 + 0.55 * len(lanes) + 0.35 * len(strategies)),
        height_ratios=[len(tables) for tables in strategies.values()],
        layout="constrained",
    )
    end = (
        until_us
        or max(float((table.start_us + table.dur_us).max()) for _, _, table in lanes if len(table))
        or 1.0
    )
    kinds: dict[str, None] = {}
    for ax, (name, tables) in zip(axes[:, 0], strategies.items()):
        for row, (label, table) in enumerate(tables.items()):
            _draw_lane(ax, -row, table, end, hatched="modelled" in label)
            kinds |= dict.fromkeys(map(_kind, table.itertuples()))
        ax.set_yticks([-row for row in range(len(tables))], list(tables), fontsize=9.5)
        ax.set_ylim(-len(tables) + 0.45, 0.55)
        ax.set_title(name, fontsize=11, color=STRATEGY_COLOURS.get(name, "black"))
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
    axes[-1, 0].set_xlim(0, end * 1.02)
    axes[-1, 0].set_xlabel("time (µs)")
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=13)
    _legend_of_kinds(axes[-1, 0], kinds)
    return fig


def _kind(row) -> str:
    """PyTorch fills with a kernel; a trace tells it by its name only."""
    return "fill" if "FillFunctor" in getattr(row, "name", "") else row.kind


def _legend_of_kinds(ax: Axes, kinds: Iterable[str]) -> None:
    """Below the axis label, at a distance in points, so that it fits axes of any height."""
    handles = [
        Patch(color=KIND_COLOURS.get(kind, "#BBBBBB"), label=KIND_NAMES.get(kind, kind)) for kind in kinds
    ]
    below = ax.transAxes + ScaledTranslation(0, -46 / 72, ax.figure.dpi_scale_trans)
    ax.legend(
        handles=handles,
        loc="upper right",
        bbox_to_anchor=(1, 0),
        bbox_transform=below,
        ncols=5,
        fontsize=9,
        borderaxespad=0,
    )


def _draw_lane(ax: Axes, y: float, table: pd.DataFrame, end: float, hatched: bool) -> None:
    ax.axhspan(y - 0.36, y + 0.36, color="#F2F3F6", zorder=0)  # an idle lane is visible too
    for row in table.itertuples():
        start, stop = row.start_us, min(row.start_us + row.dur_us, end)
        if start > end:
            continue
        nested = row.kind == "runtime"  # drawn inside the operator that makes the call
        wide = stop - start > end * 0.004  # a white edge or a hatch would hide a narrow one
        ax.broken_barh(
            [(start, max(stop - start, end * 0.0015))],
            (y - (0.14 if nested else 0.34), 0.28 if nested else 0.68),
            facecolor=KIND_COLOURS.get(_kind(row), "#BBBBBB"),
            edgecolor="white",
            linewidth=0.5 if wide else 0,
            hatch="////" if hatched and wide else None,
            zorder=3 if nested else 2,
        )


def launch_counts(launches: Mapping[str, Sequence[Launch]], title: str) -> Figure:
    """How many launches each strategy makes, by kind: exact counts, no time."""
    fig, ax = plt.subplots(figsize=(9, 1.3 + 0.5 * len(launches)), layout="constrained")
    order = [kind for kind in KIND_COLOURS if any(x.kind == kind for xs in launches.values() for x in xs)]
    for row, made in enumerate(launches.values()):
        left = 0
        for kind in order:
            count = sum(launch.kind == kind for launch in made)
            for i in range(count):  # one block a launch: they can be counted by eye
                ax.barh(-row, 0.88, left=left + i + 0.06, height=0.62, color=KIND_COLOURS[kind])
            left += count
        ax.text(left + 0.25, -row, f"{left}", va="center", fontweight="bold")
    ax.set_yticks([-row for row in range(len(launches))], list(launches))
    for tick, name in zip(ax.get_yticklabels(), launches):
        tick.set_color(STRATEGY_COLOURS.get(name, "black"))
    ax.set_xlabel("launches a step (draft + draft-extend replay)")
    ax.set_title(title)
    ax.tick_params(axis="y", length=0)
    ax.set_xlim(0)
    ax.xaxis.get_major_locator().set_params(integer=True)
    _legend_of_kinds(ax, order)
    return fig


def timings(results: Mapping[str, Timing], title: str, unit_of_work: str, gpu: bool = False) -> Figure:
    """Every sample, the median and the middle half, one row a way; direct labels, axis from zero."""
    fig, ax = plt.subplots(figsize=(9, 1.2 + 0.5 * len(results)), layout="constrained")
    samples = {name: (t.gpu_us if gpu else t.host_us) for name, t in results.items()}
    names = [name for name, values in samples.items() for _ in values]
    values = [value for column in samples.values() for value in column]
    sns.stripplot(
        x=values,
        y=names,
        hue=names,
        palette=_palette(results),
        size=3,
        alpha=0.45,
        ax=ax,
        legend=False,
        zorder=1,
    )
    for row, (name, column) in enumerate(samples.items()):
        low, high = quartiles(column)
        middle = sorted(column)[len(column) // 2]
        ax.plot(
            [low, high], [row, row], color="black", linewidth=5, solid_capstyle="butt", alpha=0.35, zorder=2
        )
        ax.plot([middle], [row], "|", color="black", markersize=18, markeredgewidth=2, zorder=3)
        ax.text(
            middle, row - 0.36, f"{middle:.1f} µs", ha="center", va="bottom", fontweight="bold", fontsize=10
        )
        ax.get_yticklabels()[row].set_color(STRATEGY_COLOURS.get(name, "black"))
    worst = max(quartiles(column)[1] for column in samples.values())
    ax.set_xlim(0, worst * 1.35)  # far outliers of a busy machine would squeeze what is compared
    ax.set_ylim(len(results) - 0.5, -0.75)
    ax.set_xlabel(f"{'GPU' if gpu else 'host'} time for {unit_of_work} (µs); bar: middle half of the rounds")
    ax.set_ylabel("")
    ax.set_title(title)
    ax.tick_params(axis="y", length=0)
    return fig


def curves(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    title: str,
    xlabel: str,
    ylabel: str,
    log: bool = True,
    colours: Mapping[str, str] | None = None,
) -> Figure:
    """Lines with their names at their ends: a crossover of ways of copying over size, say.

    log: both axes logarithmic, the x axis a size in bytes.
    """
    fig, ax = plt.subplots(figsize=(9, 4.4), layout="constrained")
    colours = {
        **STRATEGY_COLOURS,
        **{KIND_NAMES.get(k, k): c for k, c in KIND_COLOURS.items()},
        **(colours or {}),
    }
    fallback = sns.color_palette("colorblind", len(lines))
    markers = "osD^vP*X"
    for i, (name, (xs, ys)) in enumerate(lines.items()):
        colour = colours.get(name, fallback[i])
        ax.plot(xs, ys, marker=markers[i % len(markers)], markersize=5, color=colour, linewidth=2)
        ax.annotate(
            name,
            (xs[-1], ys[-1]),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=10,
        )
    if log:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.xaxis.set_major_formatter(lambda size, _: size_name(size))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.set_title(title)
    return fig


def size_name(size: float) -> str:
    """2048 -> "2 KiB"."""
    units = ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.3g} {units[0]}"


def _palette(names: Mapping[str, object]) -> dict[str, str]:
    fallback = sns.color_palette("colorblind", len(names)).as_hex()
    return {name: STRATEGY_COLOURS.get(name, fallback[i]) for i, name in enumerate(names)}
