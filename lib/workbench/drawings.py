"""Drawings of the mechanism, not to scale: what is copied where, and who waits for whom."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from lib.launches import KINDS
from lib.workbench.evidence import plain
from lib.workbench.plots import EVENT_COLOURS, INK, SOFT, in_style, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHUNK = 65_536  # elements a block of the fused foreach kernel takes (MultiTensorApply.cuh)
MULTIPROCESSORS = 132  # of an H100
PAPER, PLUM = "#F3F4F7", "#68447E"
COPY, GRAPH = KINDS["memcpy"].colour, KINDS["graph"].colour
CALL = EVENT_COLOURS["copy_() on the host"]
FIELDS = (
    "seq_lens",
    "out_cache_loc",
    "positions",
    "topk_p",
    "topk_index",
    "req_pool_indices",
    "hidden_states",
)


def canvas(title: str, height: int) -> tuple[Figure, Axes]:
    """Axes of 800 by `height` units, a unit a pixel, y downwards, without anything on them."""
    fig, (ax,) = new_figure(title, height / 100)
    ax.set_xlim(0, 800)
    ax.set_ylim(height, 0)
    ax.axis("off")
    return fig, ax


def box(ax: Axes, x: float, y: float, width: float, height: float, text: str = "", **look: object) -> None:
    """A rectangle with its text in the middle."""
    ax.add_patch(Rectangle((x, y), width, height, **{"facecolor": PAPER, "edgecolor": SOFT} | look))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], **look: object) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 9, "shrinkA": 0, "shrinkB": 0, "color": SOFT}
    ax.add_patch(FancyArrowPatch(start, end, **style | look))


@in_style
def buffers(fields: Sequence[str] = FIELDS) -> Figure:
    """Batch to static buffers to graph: one copy a field, since a graph reads the same addresses for ever."""
    height = 34 * len(fields) + 80
    fig, ax = canvas("Before a replay: every field is copied to where the graph reads", height)
    heads = (
        (100, "this step's tensors\nnew addresses every step"),
        (440, "static buffers\nthe same addresses for ever"),
    )
    for x, text in heads:
        ax.text(x, 8, text, ha="center", va="top", fontweight="bold")
    ax.text(270, 8, "one launch a field", ha="center", va="top", color=COPY, fontweight="bold")
    for row, field in enumerate(fields):
        y = 54 + 34 * row
        wide = 60 * (field == "hidden_states")
        left = 30 + 14 * (row * 5 % 3)  # scattered, as tensors of a step lie in memory
        box(ax, left, y, 120, 24, plain(field, 20), linestyle="--", facecolor="white")
        box(ax, 360, y, 130, 24, plain(field, 20))
        box(ax, 490, y, 34, 24, "pad", facecolor="white", hatch="...", alpha=0.5)
        arrow(ax, (left + 122, y + 12), (358, y + 12), color=COPY, linewidth=1.2 + wide / 20)
        arrow(ax, (526, y + 12), (608, y + 12))
    bottom = 54 + 34 * len(fields)
    box(ax, 610, 54, 160, bottom - 64, facecolor="white", edgecolor=GRAPH, linewidth=2)
    ax.text(690, 8, "captured graph\nreplayed by one call", ha="center", va="top", fontweight="bold")
    for kernel in range(5):
        y = 68 + kernel * (bottom - 84) / 5
        box(ax, 640, y, 100, 24, "kernel", facecolor=EVENT_COLOURS["verify (target model)"], edgecolor="none")
    ax.text(
        440, bottom + 4, "rows up to the captured batch size", ha="center", va="top", color=SOFT, fontsize=8
    )
    return fig


@in_style
def blocks(elements: Mapping[str, int]) -> Figure:
    """What the blocks of one fused foreach kernel do: each takes one chunk of 65,536 elements of one pair.

    elements: of each pair, by name.
    """
    height = 26 * len(elements) + 96
    dealt = sum(-(-n // CHUNK) for n in elements.values())
    fig, ax = canvas(f"One launch, {len(elements)} pairs, {dealt} blocks at work", height)
    ax.text(10, 4, "pairs, cut into chunks of 65,536 elements", va="top", fontweight="bold")
    ax.text(520, 4, f"{MULTIPROCESSORS} multiprocessors", va="top", fontweight="bold")
    block = 0
    for row, (name, n) in enumerate(elements.items()):
        y = 30 + 26 * row
        ax.text(140, y + 10, plain(name, 22), ha="right", va="center", fontsize=8)
        for chunk in range(-(-n // CHUNK)):
            part = min(n - chunk * CHUNK, CHUNK) / CHUNK
            box(
                ax,
                150 + 36 * chunk,
                y,
                3 + 29 * part,
                20,
                facecolor=KINDS["foreach"].colour,
                edgecolor="white",
            )
            ax.text(166 + 36 * chunk, y + 10, str(block), ha="center", va="center", fontsize=8)
            block += 1
    for place in range(MULTIPROCESSORS):
        column, row = place % 17, place // 17
        busy = place < dealt
        look = {"facecolor": KINDS["foreach"].colour if busy else "white", "edgecolor": "#B4BAC6"}
        box(ax, 520 + 16 * column, 30 + 16 * row, 14, 14, **look)
    words = (
        "A small pair fills a sliver of its block, a large one gets a block for each 65,536 elements:\n"
        f"{min(dealt, MULTIPROCESSORS)} of {MULTIPROCESSORS} multiprocessors work. "
        "A driver memcpy of the large one could use all of the memory's bandwidth."
    )
    ax.text(10, height - 8, words, va="bottom", color=SOFT, fontsize=8.5)
    return fig


@in_style
def tree(parents: Sequence[int], tokens: Sequence[str], accepted: Collection[int] = ()) -> Figure:
    """A draft tree, level by level; the path that verify keeps is filled.

    parents: of each node the number of its parent, -1 for the last verified token; parents come first.
    tokens: what stands in each node. accepted: the nodes on the kept path.
    """
    levels: list[int] = []
    for parent in parents:
        levels.append(0 if parent < 0 else levels[parent] + 1)
    deepest = max(levels, default=0)
    widest = max((levels.count(level) for level in levels), default=1)
    fig, ax = canvas("A draft tree: the head proposes, one run of the target keeps a path", 40 * widest + 60)
    places = {-1: (60.0, 20.0 * widest + 40)}
    step = 640 / (deepest + 1)
    for node, level in enumerate(levels):
        rank = levels[:node].count(level)
        spread = 40 * widest / levels.count(level)
        places[node] = (60 + step * (level + 1), 44 + spread * (rank + 0.5))
    for node, parent in enumerate(parents):
        kept = node in accepted
        (x, y), (to_x, to_y) = places[parent], places[node]
        arrow(
            ax, (x + 34, y), (to_x - 34, to_y), color=PLUM if kept else "#B4BAC6", linewidth=2 if kept else 1
        )
    for node, (x, y) in places.items():
        kept = node in accepted or node == -1
        look = {"facecolor": "#E6DBEE" if kept else "white", "edgecolor": PLUM if kept else "#B4BAC6"}
        box(ax, x - 34, y - 13, 68, 26, "last token" if node < 0 else plain(tokens[node], 9), **look)
    for level in range(deepest + 1):
        words = f"level {level + 1}" + (": left by draft-extend" if level == 0 else ": draft graph")
        ax.text(60 + step * (level + 1), 14, words, ha="center", color=SOFT, fontsize=8.5)
    return fig


@in_style
def regimes() -> Figure:
    """Host and stream twice: the GPU waits for the host, and the host is ahead. The waits are marked."""
    fig, ax = canvas("Who waits? The same seven copies in two regimes", 372)
    heads = (
        "The GPU waits: the stream is empty when the host begins",
        "The host is ahead: an earlier graph still runs",
    )
    for top, head in zip((0, 190), heads):
        ax.text(10, top + 6, head, va="top", fontweight="bold")
        for row, name in enumerate(("host", "stream")):
            ax.text(70, top + 52 + 56 * row, name, ha="right", va="center")
            box(ax, 80, top + 34 + 56 * row, 700, 36, edgecolor="none")
        for copy in range(7):
            box(ax, 90 + 50 * copy, top + 38, 44, 28, "call", facecolor=CALL, edgecolor="white")
        box(ax, 440, top + 38, 70, 28, "replay()", facecolor=CALL, edgecolor="white")
    for copy in range(7):  # each begins after its call, and is over long before the next one
        box(ax, 126 + 50 * copy, 94, 9, 28, facecolor=COPY, edgecolor="none")
        arrow(ax, (130 + 50 * copy, 66), (130 + 50 * copy, 94), linewidth=0.8)
        box(ax, 536 + 12 * copy, 284, 9, 28, facecolor=COPY, edgecolor="none")
    box(ax, 500, 94, 200, 28, "graph", facecolor=GRAPH, edgecolor="none")
    box(
        ax, 80, 284, 450, 28, "the graph before, still running", facecolor=GRAPH, edgecolor="none", alpha=0.45
    )
    box(ax, 622, 284, 158, 28, "graph", facecolor=GRAPH, edgecolor="none")
    span = {"arrowstyle": "<|-|>", "color": INK, "linewidth": 1.2}
    arrow(ax, (126, 140), (498, 140), **span)
    ax.text(
        312,
        146,
        "the GPU is idle between copies: it waits for calls, so fewer calls help",
        ha="center",
        va="top",
    )
    arrow(ax, (536, 330), (620, 330), **span)
    ax.text(
        578, 336, "the copies wait in the queue: only their time on the GPU counts", ha="center", va="top"
    )
    return fig
