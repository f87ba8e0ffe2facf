"""Drawings of the mechanism, not to scale: what is copied where, and who waits for whom."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lib.launches import KINDS
from lib.workbench.evidence import plain
from lib.workbench.plots import EVENT_COLOURS, PAPER, SOFT, in_style, new_figure

CHUNK = 65_536  # elements that a block of the fused foreach kernel takes (MultiTensorApply.cuh)
MULTIPROCESSORS = 132  # of an H100
COPY = KINDS["memcpy"].colour
FOREACH = KINDS["foreach"].colour
GRAPH = KINDS["graph"].colour
PALE_GRAPH = EVENT_COLOURS["verify (target model)"]
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


class Canvas:
    """A figure of 800 by `height` units, a unit a pixel, y downwards."""

    def __init__(self, title: str, height: int) -> None:
        self.fig = new_figure(title, height / 100)
        self.ax = self.fig.subplots()
        self.ax.set(xlim=(0, 800), ylim=(height, 0))
        self.ax.axis("off")

    def say(self, x: float, y: float, words: str, **look: object) -> None:
        look = {"ha": "center", "va": "center", "fontsize": 8.3} | look
        self.ax.text(x, y, words, **look)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        words: str = "",
        **look: object,
    ) -> None:
        look = {"facecolor": fill, "edgecolor": SOFT} | look
        self.ax.add_patch(Rectangle((x, y), width, height, **look))
        self.say(x + width / 2, y + height / 2, words)

    def arrow(
        self,
        x: float,
        y: float,
        to_x: float,
        to_y: float,
        colour: str = SOFT,
        style: str = "-|>",
    ) -> None:
        look = {"arrowstyle": style, "color": colour, "shrinkA": 0, "shrinkB": 0}
        self.ax.annotate("", (to_x, to_y), (x, y), arrowprops=look)


@in_style
def buffers(fields: Sequence[str] = FIELDS) -> Figure:
    """Batch to static buffers to graph: one copy a field, since a graph reads the same addresses for ever."""
    bottom = 54 + 34 * len(fields)
    title = "Before a replay, every field is copied to where the graph reads"
    paper = Canvas(title, bottom + 20)
    paper.say(100, 24, "this step's tensors:\nnew addresses every step", fontweight="bold")
    paper.say(272, 24, "one launch\na field", fontweight="bold", color=COPY)
    paper.say(440, 24, "static buffers:\nthe same addresses for ever", fontweight="bold")
    paper.say(690, 24, "captured graph:\nreplayed by one call", fontweight="bold")
    paper.box(610, 50, 160, bottom - 56, "white", edgecolor=GRAPH, linewidth=2)
    for row, field in enumerate(fields):
        y = 54 + 34 * row
        left = 30 + 14 * (row * 5 % 3)  # scattered, as the tensors of a step lie in memory
        paper.box(left, y, 120, 24, "white", plain(field, 20), linestyle="--")
        paper.arrow(left + 120, y + 12, 360, y + 12, COPY)
        paper.box(360, y, 130, 24, PAPER, plain(field, 20))
        paper.box(490, y, 34, 24, "white", "pad", linestyle=":")
        paper.arrow(524, y + 12, 610, y + 12)
        paper.box(640, y, 100, 24, PALE_GRAPH, "kernel", edgecolor="none")
    paper.say(440, bottom + 8, "rows up to the captured batch size", color=SOFT)
    return paper.fig


@in_style
def blocks(elements: Mapping[str, int]) -> Figure:
    """What the blocks of one fused foreach kernel do: each takes one chunk of 65,536 elements of one pair.

    elements: of each pair, by name.
    """
    chunks = {name: math.ceil(n / CHUNK) for name, n in elements.items()}
    blocks = sum(chunks.values())
    busy = min(blocks, MULTIPROCESSORS)
    pairs = "1 pair" if len(elements) == 1 else f"{len(elements)} pairs"
    height = max(26 * len(elements), 130) + 76
    paper = Canvas(f"One launch for {pairs}: {blocks} blocks", height)
    head = {"ha": "left", "fontweight": "bold"}
    paper.say(10, 10, "pairs, cut into chunks of 65,536 elements", **head)
    words = f"{busy} of an H100's {MULTIPROCESSORS} multiprocessors work"
    paper.say(520, 10, words, **head)
    y = 30
    for name, n in elements.items():
        paper.say(140, y + 10, plain(name, 22), ha="right")
        x = 150
        for chunk in range(min(chunks[name], 10)):
            share = min(n / CHUNK - chunk, 1)
            paper.box(x, y, 3 + 28 * share, 20, FOREACH, edgecolor="white")
            x += 34
        if chunks[name] > 10:
            paper.say(x + 10, y + 10, "…")
        y += 26
    for place in range(MULTIPROCESSORS):
        row, column = divmod(place, 17)
        fill = FOREACH if place < busy else "white"
        paper.box(520 + 16 * column, 30 + 16 * row, 13, 13, fill)
    words = "A small pair fills a sliver of its block; a large one gets a block for each 65,536 elements."
    paper.say(10, height - 10, words, ha="left", color=SOFT)
    return paper.fig


@in_style
def tree(parents: Sequence[int], tokens: Sequence[str], accepted: Collection[int] = ()) -> Figure:
    """A draft tree, level by level; the path that verify keeps is filled.

    Args:
        parents: of each node the number of its parent, -1 for the last verified token; parents come first.
        tokens: what stands in each node.
        accepted: the nodes on the kept path.
    """
    levels = {-1: 0}
    for node, parent in enumerate(parents):
        levels[node] = levels[parent] + 1
    sizes = Counter(levels.values())
    height = 40 * max(sizes.values()) + 50
    paper = Canvas("A draft tree: the head proposes, one run of the target keeps a path", height)
    places: dict[int, tuple[float, float]] = {}
    drawn = Counter()
    step = 650 / max(len(sizes) - 1, 1)
    for node, level in levels.items():
        x = 60 + step * level
        y = 40 + (height - 50) * (drawn[level] + 0.5) / sizes[level]
        drawn[level] += 1
        places[node] = (x, y)
        kept = node in accepted or node < 0
        fill, edge = ("#DCEBF5", COPY) if kept else ("white", "#B4BAC6")
        words = "last token"
        if node >= 0:
            words = plain(tokens[node], 9)
            parent_x, parent_y = places[parents[node]]
            paper.arrow(parent_x + 34, parent_y, x - 34, y, edge)
        paper.box(x - 34, y - 13, 68, 26, fill, words, edgecolor=edge)
    for level in range(1, len(sizes)):
        source = "draft-extend" if level == 1 else "the draft graph"
        words = f"level {level}\nfrom {source}"
        paper.say(60 + step * level, 14, words, color=SOFT)
    return paper.fig


@in_style
def regimes() -> Figure:
    """Host and stream twice: the GPU waits for the host, and the host is ahead. The waits are marked."""
    paper = Canvas("Who waits? The same seven copies in two regimes", 360)
    heads = (
        "The GPU waits: its stream is empty when the host begins",
        "The host is ahead: an earlier graph runs",
    )
    for top, head in zip((0, 184), heads):
        paper.say(10, top + 12, head, ha="left", fontweight="bold")
        for y, lane in ((30, "host"), (82, "stream")):
            paper.say(70, top + y + 18, lane, ha="right")
            paper.box(80, top + y, 700, 36, PAPER, edgecolor="none")
        paper.box(440, top + 34, 70, 28, CALL, "replay()", edgecolor="white")
        for x in range(90, 440, 50):
            paper.box(x, top + 34, 44, 28, CALL, "copy_()", edgecolor="white")
    for x in range(130, 480, 50):  # each copy begins after its call, and is over long before the next one
        paper.arrow(x, 62, x, 86)
        paper.box(x - 4, 86, 9, 28, COPY)
    for x in range(536, 620, 12):
        paper.box(x, 270, 9, 28, COPY)
    paper.box(500, 86, 200, 28, GRAPH, "graph")
    paper.box(80, 270, 450, 28, PALE_GRAPH, "the graph before, still running")
    paper.box(622, 270, 158, 28, GRAPH, "graph")
    paper.arrow(126, 130, 498, 130, style="<|-|>")
    paper.say(312, 144, "the GPU is idle between the copies: fewer calls, sooner done")
    paper.arrow(534, 314, 621, 314, style="<|-|>")
    paper.say(578, 328, "the copies wait in the queue: only their GPU time counts")
    return paper.fig
