"""What other engines copy before a replay: their calls today, and with what is here.

A row of data/engines.csv is a field of an engine; data/README.md explains the columns. Tensors lie on `meta`,
sources of the host on the CPU.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

from lib.copies import Call, grouped
from lib.launches import launches
from lib.strategies import ROUTES, Step, copies, fills, fused_pairs

CSV = Path(__file__).parents[1] / "data" / "engines.csv"
MAX_BATCH_SIZE = 64  # the largest that is captured: requests of the buffers
SIZES = {"k": 4, "s": 3, "w": 4, "hidden": 4096, "vocab": 32_000, "dsa": 64, "blocks": 64, "used": 16}
WAYS = {  # of the file
    "copy_": copies,
    "copy_ of upload": copies,
    "upload": copies,
    "foreach": grouped,
    "small_copy": fused_pairs,  # SGLang's kernel takes all of these
    "kernel": fused_pairs,
    "second kernel": fused_pairs,
    "fill": lambda pairs: [],  # one of the step's fills
}
TABLE = {  # way -> route of `Engine.calls`
    "today": "",
    "ReplayCopies": "copy_plan",
    "fused": "fused",
    "PackedInputs": "packed",
}


@cache
def sizes(shape: str, n: int, m: int) -> list[int]:
    """A shape of the file, such as "n*w, hidden", for n requests in a batch of m."""
    return pd.eval(f"[{shape}]", engine="python", local_dict=SIZES | {"n": n, "m": m})


class Engine(NamedTuple):
    """The rows of one engine that come in every step."""

    rows: list

    def step(self, batch_size: int, captured: int) -> Step:
        """What its buffers need for a batch in a graph captured for `captured` requests."""
        if not 0 < batch_size <= captured <= MAX_BATCH_SIZE:
            raise ValueError(f"expected 1 to {MAX_BATCH_SIZE} requests, got {batch_size} of {captured}")
        step = Step()
        padding = captured - batch_size
        for row in self.rows:
            room = sizes(row.shape.replace("used", "blocks"), MAX_BATCH_SIZE, MAX_BATCH_SIZE)
            buffer = torch.empty(room, dtype=getattr(torch, row.dtype), device="meta")
            first = [slice(size) for size in sizes(row.shape, batch_size, captured)]
            dst = buffer[tuple(first)]
            on_host = row.way == "upload"
            device = "cpu" if on_host else "meta"
            dtype = getattr(torch, row.source_dtype)
            step.small[row.field] = dst, torch.empty_like(dst, dtype=dtype, device=device)
            filled = {"every step": buffer}
            if padding and row.pad and not on_host:
                last = [slice(-size, None) for size in sizes(row.shape, padding, captured)]
                rest = buffer[tuple(last)]  # as many rows as padding takes
                step.pads.append((rest, torch.empty_like(rest, dtype=dtype)))
                filled |= {"padded": buffer, "tail": rest}
            if row.pad_writes in filled:
                step.fills.append((filled[row.pad_writes], int(row.pad)))
        return step

    def calls(self, batch_size: int, captured: int, route: str = "") -> list[Call]:
        """As made today; by `ReplayCopies` with a route of ROUTES; "packed": the host's in one upload."""
        step = self.step(batch_size, captured)
        ways = defaultdict(list)
        for row in self.rows:
            ways[row.way].append(step.small[row.field])
        if not route:
            made = fills(step)
            for way, pairs in ways.items():
                made += WAYS[way](pairs)
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


def table(batch_size: int, captured: int) -> pd.DataFrame:
    """Launches of a step: a row for each engine, a column for each way."""
    counts = defaultdict(dict)
    for name, engine in engines().items():
        for way, route in TABLE.items():
            made = launches(engine.calls(batch_size, captured, route))
            counts[way][name] = len(made)
    return pd.DataFrame(counts)
