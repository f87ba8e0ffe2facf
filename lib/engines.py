"""What other engines copy before a replay (`data/engines.csv`): their calls today, and with what is here.

A row is a field: its buffer (dtype; rows a request and extra_rows along `dim`; columns, and columns_used by a
step), its source's dtype, its padding and when that is filled (pad, pad_writes), the way it gets there, whose
memory it shares (same_as), when it comes ("always" is counted), where that is to be read (place) and where we
did (checked). Tensors lie on `meta`, those of the host on the CPU.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import prod
from pathlib import Path

import pandas as pd
import torch

from lib.copies import DEFAULT_DMA_BYTES, Call, StaticInput, grouped
from lib.launches import launches
from lib.strategies import ROUTES, Pair, Step, copies, fills, fused_call, small_copy

CSV = Path(__file__).parents[1] / "data" / "engines.csv"
MAX_BATCH_SIZE = 64  # the largest that is captured
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


def size(text: str) -> int:
    """What the file writes as k*s, say."""
    factors = [SIZES.get(part, part) for part in text.split("*")]
    return prod(map(int, factors))


WAYS = ROUTES | {
    "copy_": copies,
    "upload": copies,
    "foreach": grouped,
    "small_copy": lambda pairs: small_copy(Step(dict(enumerate(pairs)))),
    "kernel": lambda pairs: [fused_call(pairs)],
    "second kernel": lambda pairs: [fused_call(pairs)],
}
TABLE = {  # way -> route of `Engine.calls`
    "today": "",
    "ReplayCopies": "copy_plan",
    "fused": "fused",
    "PackedInputs": "packed",
}


class Field:
    """A row of the file, and its buffer."""

    def __init__(self, row: dict[str, str]) -> None:
        self.way = row["way"]
        self.same_as = row["same_as"]
        self.pad_writes = row["pad_writes"]
        self.pad = int(row["pad"]) if row["pad"] else None
        self.rows = size(row["rows"])
        self.extra = int(row["extra_rows"])
        self.dim = int(row["dim"])
        self.columns = size(row["columns_used"])
        self.src_dtype = getattr(torch, row["source_dtype"])
        self.src_device = "cpu" if self.way.startswith("upload") else "meta"
        shape = self.shape(MAX_BATCH_SIZE, size(row["columns"]))
        dtype = getattr(torch, row["dtype"])
        self.buffer = torch.empty(shape, dtype=dtype, device="meta")

    def shape(self, requests: int, columns: int) -> list[int]:
        shape = [self.rows * requests + self.extra]
        if columns:
            shape.insert(1 - self.dim, columns)
        return shape

    def pair(self, requests: int) -> Pair:
        shape = self.shape(requests, self.columns)
        src = torch.empty(shape, dtype=self.src_dtype, device=self.src_device)
        return self.buffer[tuple(map(slice, shape))], src

    def static(self) -> StaticInput:
        """Without rows that are no request's, as the leading 0 of cumulated lengths."""
        used, _ = self.pair(MAX_BATCH_SIZE)
        rest = used.narrow(self.dim, self.extra, self.rows * MAX_BATCH_SIZE)
        return StaticInput(rest, self.rows, self.pad, dim=self.dim)

    def fills(self, requests: int, captured: int) -> list[tuple]:
        """What the engine fills, and with what, for requests in a graph for `captured` of them."""
        when, _, what = self.pad_writes.partition(", ")
        if when != "every step" and not (when == "padded" and requests < captured):
            return []
        rows = self.buffer
        if what == "tail":
            rows = self.static().between(requests, captured)
        return [(rows, self.pad)]

    def pads(self, requests: int, captured: int) -> list[Pair]:
        """The rows of padding, to be copied along; none where they come from the host."""
        if self.pad is None or self.way in ("fill", "upload") or requests == captured:
            return []
        rows = self.static().between(requests, captured)
        constant = torch.full_like(rows, self.pad, dtype=self.src_dtype)
        return [(rows, constant)]


class Engine:
    """The fields of one engine that come in every step."""

    def __init__(self, rows: Sequence[dict[str, str]]) -> None:
        self.version = rows[0]["version"]
        self.fields = {row["field"]: Field(row) for row in rows}
        for field in self.fields.values():
            if field.same_as:
                field.buffer = self.fields[field.same_as].buffer
        self.comes_padded = any(row["pad_writes"] == "batch" for row in rows)

    def requests(self, batch_size: int, captured: int) -> int:
        if not 0 < batch_size <= captured <= MAX_BATCH_SIZE:
            raise ValueError(f"expected 1 to {MAX_BATCH_SIZE} requests, got {batch_size} of {captured}")
        return captured if self.comes_padded else batch_size

    def step(self, batch_size: int, captured: int) -> Step:
        """What its buffers need for a batch in a graph captured for `captured` requests."""
        step = Step()
        requests = self.requests(batch_size, captured)
        for name, field in self.fields.items():
            step.fills += field.fills(requests, captured)
            step.pads += field.pads(requests, captured)
            dst, src = field.pair(requests)
            kind = step.large if dst.nbytes >= DEFAULT_DMA_BYTES else step.small
            if field.way != "fill":
                kind[name] = (dst, src)
        return step

    def static_inputs(self) -> dict[str, StaticInput]:
        """For `ReplayCopies`: each buffer once, but those that are filled or uploaded into."""
        inputs = {}
        for name, field in self.fields.items():
            if field.rows and not field.same_as and field.way not in ("fill", "upload"):
                inputs[name] = field.static()
        return inputs

    def calls(self, batch_size: int, captured: int, route: str = "") -> list[Call]:
        """As made today; by `ReplayCopies` with a route of ROUTES; "packed": the host's in one upload."""
        requests = self.requests(batch_size, captured)
        device_route = "copy_plan" if route == "packed" else route
        made, packed_bytes = [], 0
        together = defaultdict(list)
        for field in self.fields.values():
            dst, src = field.pair(requests)
            if field.way == "fill" or not route:
                made += fills(Step(fills=field.fills(requests, captured)))
            if field.way == "fill" or (route and field.same_as):
                continue
            if route == "packed" and src.device != dst.device:
                packed_bytes += field.buffer.nbytes
                continue
            way = field.way
            if way == "upload, copy_":
                uploaded = torch.empty_like(src, device="meta")
                made += copies([(uploaded, src)])
                way, src = "copy_", uploaded
            if route and way != "upload":
                way = device_route
                together[way] += field.pads(requests, captured)
            together[way].append((dst, src))
        for way, pairs in together.items():
            made += WAYS[way](pairs)
        if packed_bytes:
            block = torch.empty(packed_bytes, dtype=torch.uint8)
            made += copies([(block.to("meta"), block)])
        return made


def engines() -> dict[str, Engine]:
    """Name -> engine, for all of the file that copy the same fields every step."""
    file = pd.read_csv(CSV, dtype=str, keep_default_na=False)
    every_step = file["when"].str.startswith("always")
    on_device = (file["dtype"] != "") & (file["way"] != "host")
    by_engine = file[every_step & on_device].groupby("engine", sort=False)
    return {name: Engine(rows.to_dict("records")) for name, rows in by_engine}


def table(batch_size: int = 13, captured: int = 16) -> pd.DataFrame:
    """Launches of a step by kind: a row for each engine, way, and batch (`captured` requests, or fewer)."""
    rows = []
    for name, engine in engines().items():
        for requests in (captured, batch_size):
            for way, route in TABLE.items():
                calls = engine.calls(requests, captured, route)
                made = launches(calls)
                row = {
                    "engine": name,
                    "way": way,
                    "padded": requests < captured,
                    "launches": len(made),
                }
                kinds = Counter(launch.kind for launch in made)
                rows.append(row | kinds)
    return pd.DataFrame(rows).fillna(0)
