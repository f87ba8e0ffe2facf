"""What other engines copy before a replay (`data/engines.csv`): their calls today, and with what is here.

A row is a field: its dtype and its source's, its shape for n requests in words of SIZES, its padding and when
that is filled (pad, pad_writes), the way it gets there, whose memory it shares (same_as; it is copied again),
when it comes ("always" is counted), where that is to be read (place) and where we did (checked). Tensors lie
on `meta`, sources of the host on the CPU.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from lib.copies import DEFAULT_DMA_BYTES, Call, grouped
from lib.launches import launches
from lib.strategies import ROUTES, Step, copies, fills, fused_call, small_copy

CSV = Path(__file__).parents[1] / "data" / "engines.csv"
MAX_BATCH_SIZE = 64  # the largest that is captured: n of the buffers
SIZES = {  # what words in the file stand for
    "k": 4,  # of top-k
    "s": 3,  # speculative steps
    "w": 4,  # tokens a request
    "hidden": 4096,
    "vocab": 32_000,
    "dsa": 64,
    "blocks": 64,  # pages of a table
    "used": 16,  # of them, in a step
}
WAYS = {  # of the file
    "copy_": copies,
    "copy_ of upload": copies,
    "upload": copies,
    "foreach": grouped,
    "small_copy": lambda pairs: small_copy(Step(dict(enumerate(pairs)))),
    "kernel": lambda pairs: [fused_call(pairs)],
    "second kernel": lambda pairs: [fused_call(pairs)],
    "fill": lambda pairs: [],  # one of the step's fills
}
TABLE = {  # way -> route of `Engine.calls`
    "today": "",
    "ReplayCopies": "copy_plan",
    "fused": "fused",
    "PackedInputs": "packed",
}


def length(text: str, requests: int) -> int:
    """What the file writes as n*k, or n+1; no requests have no rows."""
    words = SIZES | {"n": requests, "n+1": requests and requests + 1}
    factors = [words.get(word, word) for word in text.split("*")]
    return prod(map(int, factors))


def part(row: NamedTuple, first: int, end: int) -> Tensor:
    """The part of a field's buffer for requests `first` up to `end`."""
    room, index = [], []
    for text in row.shape.split(", "):
        start = length(text, first)
        stop = length(text, end)
        room.append(length(text.replace("used", "blocks"), MAX_BATCH_SIZE))
        index.append(slice(start if start < stop else 0, stop))
    buffer = torch.empty(room, dtype=getattr(torch, row.dtype), device="meta")
    return buffer[tuple(index)]


class Engine(NamedTuple):
    """The rows of one engine that come in every step."""

    rows: list

    def step(self, batch_size: int, captured: int) -> Step:
        """What its buffers need for a batch in a graph captured for `captured` requests."""
        if not 0 < batch_size <= captured <= MAX_BATCH_SIZE:
            raise ValueError(f"expected 1 to {MAX_BATCH_SIZE} requests, got {batch_size} of {captured}")
        step = Step()
        for row in self.rows:
            requests = captured if row.pad_writes == "batch" else batch_size
            padded = requests < captured
            dst = part(row, 0, requests)
            rest = part(row, requests, captured)
            device = "cpu" if row.way == "upload" else "meta"
            dtype = getattr(torch, row.source_dtype)
            src = torch.empty(dst.shape, dtype=dtype, device=device)
            fields = step.large if dst.nbytes >= DEFAULT_DMA_BYTES else step.small
            fields[row.field] = dst, src
            when, _, what = row.pad_writes.partition(", ")
            if when == "every step" or (when == "padded" and padded):
                filled = rest if what == "tail" else dst._base
                step.fills.append((filled, int(row.pad)))
            if row.pad and padded and row.way != "upload":
                constant = torch.full_like(rest, int(row.pad), dtype=dtype)
                step.pads.append((rest, constant))
        return step

    def calls(self, batch_size: int, captured: int, route: str = "") -> list[Call]:
        """As made today; by `ReplayCopies` with a route of ROUTES; "packed": the host's in one upload."""
        step = self.step(batch_size, captured)
        pairs = step.small | step.large
        ways = defaultdict(list)
        for row in self.rows:
            ways[row.way].append(pairs[row.field])
        if not route:
            made = fills(step)
            for way, those in ways.items():
                made += WAYS[way](those)
            return made
        uploads = ways.pop("upload", [])
        if route in ROUTES:
            return copies(uploads) + ROUTES[route](sum(ways.values(), step.pads))
        size = sum(dst._base.nbytes for dst, _ in uploads)
        block = torch.empty(size, dtype=torch.uint8)
        others = Engine([row for row in self.rows if "upload" not in row.way])
        return copies([(block.to("meta"), block)]) + others.calls(batch_size, captured, "copy_plan")


def engines() -> dict[str, Engine]:
    """Name -> engine, for all of the file that copy the same fields every step."""
    file = pd.read_csv(CSV, dtype=str, keep_default_na=False)
    counted = file[file["when"].str.startswith("always")]
    by_engine = counted.groupby("engine", sort=False)
    return {name: Engine([*rows.itertuples()]) for name, rows in by_engine}


def table(batch_size: int = 13, captured: int = 16) -> pd.DataFrame:
    """Launches of a step by kind: a row for each engine, way, and batch (`captured` requests, or fewer)."""
    rows = []
    for (name, engine), requests, way in product(engines().items(), (captured, batch_size), TABLE):
        made = launches(engine.calls(requests, captured, TABLE[way]))
        kinds = Counter(launch.kind for launch in made)
        row = {"engine": name, "way": way, "padded": requests < captured}
        rows.append(row | {"launches": len(made)} | kinds)
    return pd.DataFrame(rows).fillna(0)
