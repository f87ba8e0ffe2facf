"""What other engines copy before a replay (`data/engines.csv`): their calls today, and with what is here.

A row is a field: its buffer (dtype, rows a request + extra_rows along `dim`, columns, of which a step uses
columns_used), its source (source_dtype if another), its padding (pad) and when that is written (pad_writes),
the way it gets there, when ("always" is counted), where to read it (place) and where we did (checked).
Tensors lie on `meta`, those of the host on the CPU; a random fill is counted as a fill.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import prod
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from lib.copies import DEFAULT_DMA_BYTES, Call, StaticInput, grouped
from lib.launches import launches
from lib.strategies import ROUTES, Pair, Step, copies, fills, fused_call, small_copy

CSV = Path(__file__).parents[1] / "data" / "engines.csv"
MAX_BATCH_SIZE = 64  # the largest that is captured
# What words in the file stand for: top-k, steps, tokens a request; widths; pages of a table, and in use.
SIZES = {"k": 4, "s": 3, "w": 4, "hidden": 4096, "vocab": 32_000, "dsa": 64, "blocks": 64, "used": 16}
WAYS = {  # by which an engine copies its pairs together; the others by `copy_`
    "foreach": grouped,
    "small_copy": lambda pairs: small_copy(Step(dict(enumerate(pairs)))),
    "kernel": lambda pairs: [fused_call(pairs)],
    "second kernel": lambda pairs: [fused_call(pairs)],
}


def size(text: str) -> int:
    """What the file writes as k*s, say; 0 for nothing."""
    if not text:
        return 0
    return prod(SIZES[part] if part in SIZES else int(part) for part in text.split("*"))


class Field:
    """A row of the file, and its buffer."""

    def __init__(self, row: dict[str, str]) -> None:
        self.way = row["way"]
        self.pad_writes = row["pad_writes"]
        self.pad = int(row["pad"].replace("random", "0")) if row["pad"] else None
        self.rows = size(row["rows"])
        self.extra = int(row["extra_rows"])
        self.dim = int(row["dim"])
        self.columns = size(row["columns_used"] or row["columns"])
        self.src_dtype = getattr(torch, row["source_dtype"] or row["dtype"])
        self.src_device = "cpu" if self.way.startswith("upload") else "meta"
        dtype = getattr(torch, row["dtype"])
        self.whole = self.tensor(MAX_BATCH_SIZE, size(row["columns"]), dtype, "meta")

    def tensor(self, requests: int, columns: int, dtype: torch.dtype, device: str) -> Tensor:
        shape = [self.rows * requests + self.extra]
        if columns:
            shape.insert(1 - self.dim, columns)
        return torch.empty(shape, dtype=dtype, device=device)

    @property
    def static(self) -> StaticInput:
        """Without the row that is no request's: the leading 0 of cumulated lengths, say."""
        used = self.whole.narrow(1 - self.dim, 0, self.columns) if self.columns else self.whole
        rest = used.narrow(self.dim, self.extra, self.rows * MAX_BATCH_SIZE)
        return StaticInput(rest, self.rows, self.pad, dim=self.dim)

    def pair(self, requests: int) -> Pair:
        src = self.tensor(requests, self.columns, self.src_dtype, self.src_device)
        dst = self.whole.narrow(self.dim, 0, src.shape[self.dim])
        return dst.narrow(1 - self.dim, 0, self.columns) if self.columns else dst, src

    def fills(self, batch_size: int, captured: int) -> list[tuple[Tensor, float]]:
        """What the engine fills, and with what, for a batch in a graph for `captured` requests."""
        if self.way == "fill":
            return [(self.pair(batch_size)[0], self.pad)]
        when, _, what = self.pad_writes.partition(", ")
        if when == "every step" or (when == "padded" and batch_size < captured):
            rows = self.static.between(batch_size, captured) if what == "tail" else self.whole
            return [(rows, self.pad)]
        return []

    def pads(self, batch_size: int, captured: int) -> list[Pair]:
        """The padding as rows to copy along, where it is not written on the host or by the batch."""
        if self.pad is None or self.way in ("fill", "upload") or batch_size == captured:
            return []
        rows = self.static.between(batch_size, captured)
        return [(rows, torch.full_like(rows, self.pad, dtype=self.src_dtype))]


class Engine:
    """The fields of one engine that come in every step."""

    def __init__(self, rows: Sequence[dict[str, str]]) -> None:
        self.version = rows[0]["version"]
        self.fields = {row["field"]: Field(row) for row in rows}
        for field in self.fields.values():
            if field.way.startswith("same as "):
                field.whole = self.fields[field.way.removeprefix("same as ")].whole
        # A batch that dummy requests pad is copied as if it were of the captured size.
        self.comes_padded = any(field.pad_writes == "batch" for field in self.fields.values())

    def step(self, batch_size: int, captured: int) -> Step:
        """What its buffers need for a batch in a graph captured for `captured` requests."""
        step = Step()
        requests = captured if self.comes_padded else batch_size
        for name, field in self.fields.items():
            step.fills += field.fills(requests, captured)
            step.pads += field.pads(requests, captured)
            dst, src = field.pair(requests)
            kind = step.large if dst.nbytes >= DEFAULT_DMA_BYTES else step.small
            if field.way != "fill":
                kind[name] = (dst, src)
        return step

    def calls(self, batch_size: int, captured: int) -> list[Call]:
        """As the engine makes them today."""
        step = self.step(batch_size, captured)
        made = fills(step)
        together = defaultdict(list)
        for name, pair in (step.small | step.large).items():
            way = self.fields[name].way
            if way in WAYS:
                together[way].append(pair)
            else:
                made += copies(by_way_of(pair) if way == "upload, copy_" else [pair])
        for way, pairs in together.items():
            made += WAYS[way](pairs)
        return made

    def static_inputs(self) -> dict[str, StaticInput]:
        """For `ReplayCopies`: each buffer once, but those that are filled or uploaded into."""
        inputs = {}
        for name, field in self.fields.items():
            if field.rows and field.way not in ("fill", "upload") and not field.way.startswith("same as"):
                inputs[name] = field.static
        return inputs

    def calls_with(self, way: str, batch_size: int, captured: int) -> list[Call]:
        """With `ReplayCopies` by a route of ROUTES; "packed": and what the host has in one upload."""
        requests = captured if self.comes_padded else batch_size
        made, pairs, packed_bytes = [], [], 0
        for field in self.fields.values():
            dst, src = field.pair(requests)
            if field.way == "fill":
                made += [Call("fill_", [dst], value=field.pad)]
            elif field.way.startswith("same as"):
                continue
            elif src.device == dst.device:
                pairs += [(dst, src), *field.pads(requests, captured)]
            elif way == "packed":
                packed_bytes += field.whole.nbytes
            elif field.way == "upload":
                made += copies([(dst, src)])
            else:
                upload, copy = by_way_of((dst, src))
                made += copies([upload])
                pairs += [copy, *field.pads(requests, captured)]
        if packed_bytes:
            block = torch.empty(packed_bytes, dtype=torch.uint8)
            made += copies([(block.to("meta"), block)])
        return made + ROUTES["copy_plan" if way == "packed" else way](pairs)


def by_way_of(pair: Pair) -> list[Pair]:
    """An upload into a new tensor, and a copy of that."""
    dst, src = pair
    uploaded = torch.empty_like(src, device=dst.device)
    return [(uploaded, src), (dst, uploaded)]


def engines() -> dict[str, Engine]:
    """Name -> engine, for all of the file that copy the same fields every step."""
    rows = defaultdict(list)
    with open(CSV, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["when"].startswith("always") and row["dtype"] and row["way"] != "host":
                rows[row["engine"]].append(row)
    return {name: Engine(of_engine) for name, of_engine in rows.items()}


def table(batch_size: int = 13, captured: int = 16) -> pd.DataFrame:
    """Launches of a step by kind: a row for each engine, way, and batch (`captured` requests, or fewer)."""
    rows = []
    for name, engine in engines().items():
        for requests in (captured, batch_size):
            ways = {"today": engine.calls(requests, captured)}
            for label, way in (("ReplayCopies", "copy_plan"), ("fused", "fused"), ("PackedInputs", "packed")):
                ways[label] = engine.calls_with(way, requests, captured)
            for label, calls in ways.items():
                made = launches(calls)
                row = {"engine": name, "way": label, "padded": requests < captured, "launches": len(made)}
                rows.append(row | Counter(launch.kind for launch in made))
    return pd.DataFrame(rows).fillna(0)
