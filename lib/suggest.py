"""From the copies that `watch` saw in one step: how few launches would do, and the lines that make them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import multimode
from typing import NamedTuple

from torch import Tensor

from lib.copies import Call, grouped_dma
from lib.launches import launches

COPY = "copies(inputs, batch_size, captured)  # every step"
PACK = "with packed.step() as host:  # every step; the graph reads packed.device"


class Sighting(NamedTuple):
    """One destination of a call, on stand-ins, and where the code writes it.

    origin: its source, or what that was uploaded or converted from. buffer: the expression for the tensor
    `whole`, of which it is a part, or "". start, whole_start: storage and element at which either starts.
    """

    call: Call
    dst: Tensor
    origin: Tensor
    where: tuple[str, int]
    buffer: str
    whole: Tensor
    start: tuple
    whole_start: tuple

    @property
    def rows(self) -> int:
        """How many whole rows of a buffer it fills from a source of equal shape; 0 if it does not."""
        dst = self.dst
        like_buffer = dst.is_contiguous() and dst.stride() == self.whole.stride()
        if dst.dim() and like_buffer and dst.shape == self.origin.shape:
            return len(dst)
        return 0


class Suggestion(NamedTuple):
    """Launches as the code is, launches with the lines, and the lines to paste."""

    before: int
    after: int
    lines: str


def suggest(calls: Sequence[Call], sightings: Sequence[Sighting]) -> Suggestion:
    """Fields on the device go into one `ReplayCopies`, fields of the host into one `PackedInputs`.

    What fills the same buffers goes along as padding. The rows a request are a guess: a field's over those
    that most have. A comment names buffers that stay as they are: written in parts, in columns, not from the
    start, or in rows that are no multiple of the others'.
    """
    copied = defaultdict(list)
    pads = {}
    for one in sightings:
        if one.call.op == "fill_":
            pads[one.buffer] = one.call.value
        elif one.buffer and one.dst.is_meta:
            copied[one.buffer].append(one)
    rows = [one.rows for parts in copied.values() for one in parts if one.rows]
    requests = min(multimode(rows), default=1)
    static, packed = {}, {}
    pairs, others = [], []
    replaced = set()
    for buffer, parts in copied.items():
        one = max(parts, key=lambda part: part.dst.numel())
        starts = {part.start for part in parts}
        on_host = not one.origin.is_meta
        fits = on_host or (one.rows and one.rows % requests == 0)
        if not fits or starts != {one.whole_start}:
            others.append(buffer)
            continue
        replaced |= {buffer, id(one.origin)}
        words = re.findall(r"\w+", buffer)
        name = words[-1]
        if name in static.keys() | packed:
            name = "_".join(words)
        pad = pads.get(buffer)
        if on_host:
            packed[name] = f"({tuple(one.whole.shape)}, {one.dst.dtype}, {pad})"
            continue
        static[name] = f"StaticInput({buffer}, rows={one.rows // requests}, pad={pad})"
        pairs.append((one.dst, one.origin))
        if buffer in pads:
            pairs.append((one.dst.clone(), one.dst.clone()))
    left = {}
    for one in sightings:
        if (one.buffer or id(one.origin)) not in replaced:
            left[id(one.call)] = one.call
    after = launches([*grouped_dma(pairs), *left.values()])
    lines = [f"# not in rows a request, stay as they are: {', '.join(others)}"] if others else []
    lines += block("copies = ReplayCopies({", static, "})", COPY)
    lines += block("packed = PackedInputs({", packed, "}, device)", PACK)
    return Suggestion(len(launches(calls)), len(after) + bool(packed), "\n".join(lines))


def block(first: str, fields: dict[str, str], *last: str) -> list[str]:
    if not fields:
        return []
    entries = [f'    "{name}": {field},' for name, field in fields.items()]
    return [first, *entries, *last]
