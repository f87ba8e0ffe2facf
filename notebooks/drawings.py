"""Drawings of the mechanism, not to scale: what is copied where, and who waits for whom."""

import math
from collections import Counter

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lib.kinds import KINDS
from lib.workbench.plots import EVENT_COLOURS, PAPER, SOFT, in_style, new_figure

CHUNK = 65_536  # elements that a block of the fused foreach kernel takes (MultiTensorApply.cuh)
MULTIPROCESSORS = 80  # of a V100
COPY, FOREACH, GRAPH = (KINDS[kind].colour for kind in ("memcpy", "foreach", "graph"))
PALE_GRAPH = "#93D4BE"
CALL = EVENT_COLOURS["copy_() on the host"]
FIELDS = [
    "seq_lens",
    "out_cache_loc",
    "positions",
    "topk_p",
    "topk_index",
    "req_pool_indices",
    "hidden_states",
]


class Canvas:
    """A figure of 800 by `height` units, a unit a pixel, y downwards."""

    def __init__(self, title, height):
        self.fig, self.ax = new_figure(title, height / 100)
        self.ax.set(xlim=(0, 800), ylim=(height, 0))
        self.ax.axis("off")

    def say(self, x, y, words, **look):
        self.ax.text(x, y, words, **{"ha": "center", "va": "center", "fontsize": 8.3} | look)

    def box(self, x, y, width, height, fill, words="", **look):
        look = {"facecolor": fill, "edgecolor": SOFT} | look
        self.ax.add_patch(Rectangle((x, y), width, height, **look))
        self.say(x + width / 2, y + height / 2, words)

    def arrow(self, x, y, to_x, to_y, colour=SOFT, style="-|>"):
        look = {"arrowstyle": style, "color": colour, "shrinkA": 0, "shrinkB": 0}
        self.ax.annotate("", (to_x, to_y), (x, y), arrowprops=look)


@in_style
def buffers() -> Figure:
    """Batch to static buffers to graph: one copy a field, since a graph reads the same addresses for ever."""
    bottom = 54 + 34 * len(FIELDS)
    paper = Canvas("Before a replay, every field is copied to where the graph reads", bottom + 20)
    paper.say(100, 24, "this step's tensors:\nnew addresses every step", fontweight="bold")
    paper.say(272, 24, "one launch\na field", fontweight="bold", color=COPY)
    paper.say(440, 24, "static buffers:\nthe same addresses for ever", fontweight="bold")
    paper.say(690, 24, "captured graph:\nreplayed by one call", fontweight="bold")
    paper.box(610, 50, 160, bottom - 56, "white", edgecolor=GRAPH, linewidth=2)
    for row, field in enumerate(FIELDS):
        y = 54 + 34 * row
        left = 30 + 14 * (row * 5 % 3)  # scattered, as the tensors of a step lie in memory
        paper.box(left, y, 120, 24, "white", field, linestyle="--")
        paper.arrow(left + 120, y + 12, 360, y + 12, COPY)
        paper.box(360, y, 130, 24, PAPER, field)
        paper.box(490, y, 34, 24, "white", "pad", linestyle=":")
        paper.arrow(524, y + 12, 610, y + 12)
        paper.box(640, y, 100, 24, PALE_GRAPH, "kernel", edgecolor="none")
    paper.say(440, bottom + 8, "pad: rows left over, up to the captured batch size", color=SOFT)
    return paper.fig


@in_style
def blocks(elements: dict[str, int]) -> Figure:
    """What the blocks of one fused foreach kernel do, for pairs of so many elements: each takes a chunk."""
    chunks = {name: math.ceil(n / CHUNK) for name, n in elements.items()}
    count = sum(chunks.values())
    busy = min(count, MULTIPROCESSORS)
    height = max(26 * len(elements), 84) + 76
    pairs = "1 pair" if len(elements) == 1 else f"{len(elements)} pairs"
    paper = Canvas(f"One launch for {pairs}: {count} blocks", height)
    head = {"ha": "left", "fontweight": "bold"}
    paper.say(10, 10, "pairs, cut into chunks of 65,536 elements", **head)
    paper.say(520, 10, f"{busy} of a V100's {MULTIPROCESSORS} multiprocessors work", **head)
    for row, (name, n) in enumerate(elements.items()):
        y = 30 + 26 * row
        paper.say(140, y + 10, name, ha="right")
        for chunk in range(min(chunks[name], 10)):
            share = min(n / CHUNK - chunk, 1)
            paper.box(150 + 34 * chunk, y, 3 + 28 * share, 20, FOREACH, edgecolor="white")
        if chunks[name] > 10:
            paper.say(500, y + 10, "…")
    for place in range(MULTIPROCESSORS):
        row, column = divmod(place, 17)
        paper.box(520 + 16 * column, 30 + 16 * row, 13, 13, FOREACH if place < busy else "white")
    words = "A small pair fills a sliver of its block; a large one gets a block for each 65,536 elements."
    paper.say(10, height - 10, words, ha="left", color=SOFT)
    return paper.fig


@in_style
def tree(parents: list[int], tokens: list[str], accepted: list[int]) -> Figure:
    """A draft tree, level by level; the path that verify keeps is filled.

    parents: of each node the number of its parent, -1 for the last verified token; parents come first.
    tokens: what stands in each node. accepted: the nodes on the kept path.
    """
    levels = {-1: 0}
    for node, parent in enumerate(parents):
        levels[node] = levels[parent] + 1
    sizes = Counter(levels.values())
    height = 40 * max(sizes.values()) + 50
    paper = Canvas("A draft tree: the head proposes, one run of the target keeps a path", height)
    places, drawn = {}, Counter()
    step = 650 / max(levels.values())
    for node, level in levels.items():
        x = 60 + step * level
        y = 40 + (height - 50) * (drawn[level] + 0.5) / sizes[level]
        drawn[level] += 1
        places[node] = x, y
        kept = node in accepted or node < 0
        fill, edge = ("#DCEBF5", COPY) if kept else ("white", "#B4BAC6")
        if node >= 0:
            parent_x, parent_y = places[parents[node]]
            paper.arrow(parent_x + 34, parent_y, x - 34, y, edge)
        words = tokens[node] if node >= 0 else "last token"
        paper.box(x - 34, y - 13, 68, 26, fill, words, edgecolor=edge)
    for level in range(1, len(sizes)):
        source = "draft-extend" if level == 1 else "the draft graph"
        paper.say(60 + step * level, 14, f"level {level}\nfrom {source}", color=SOFT)
    return paper.fig


@in_style
def regimes() -> Figure:
    """Host and stream twice: the GPU waits for the host, and the host is ahead. The waits are marked."""
    paper = Canvas("Who waits? The same seven copies in two regimes", 360)
    first = "The GPU waits: its stream is empty when the host begins"
    for top, head in ((0, first), (184, "The host is ahead: an earlier graph runs")):
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
