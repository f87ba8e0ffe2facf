"""From the copies that `watch` saw in one step: how few launches would do, and the lines that make them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lib.copies import Call, grouped_dma
from lib.launches import launches


class Sighting(NamedTuple):
    """One destination of a call, on stand-ins, and where the code writes it.

    buffer: the expression that holds its memory, of `shape`; "" for a tensor that the call made.
    origin: the source, or what the source was uploaded or converted from. place: tells destinations apart.
    """

    call: Call
    dst: Tensor
    origin: Tensor | None
    place: tuple
    file: str
    line: int
    buffer: str
    shape: torch.Size

    @property
    def name(self) -> str:
        return re.findall(r"\w+", self.buffer)[-1]

    @property
    def dim(self) -> int:
        """The dimension along which the buffer is filled in part."""
        sizes = list(zip(self.dst.shape, self.shape))
        return next((dim for dim, (size, whole) in enumerate(sizes) if size != whole), 0)

    @property
    def rows(self) -> int:
        return self.dst.shape[self.dim] if self.dst.dim() else 1

    def part(self, extra: int) -> str:
        """The index of what is used of the buffer: fewer columns, and not the first `extra` rows."""
        used = [f":{size}" if size != whole else ":" for size, whole in zip(self.dst.shape, self.shape)]
        used[self.dim : self.dim + 1] = [f"{extra}:" if extra else ":"]
        return "" if set(used) == {":"} else f"[{', '.join(used)}]"


class Suggestion(NamedTuple):
    """Launches as the code is, launches with the lines, and the lines to paste."""

    before: int
    after: int
    lines: str


def suggest(sightings: Sequence[Sighting]) -> Suggestion:
    """Fields on the device go into one `ReplayCopies`, fields of the host into one `PackedInputs`.

    Both take what fills the same buffers along as padding. What belongs to no field stays as it is.
    """
    fields = {one.place: one for one in sightings if one.origin is not None and one.buffer}.values()
    pads = {one.buffer: one.call.value for one in sightings if one.call.op == "fill_"}
    device, host = [], []
    for one in fields:
        same = one.origin.device == one.dst.device
        (device if same else host).append(one)
    pairs = [(one.dst, one.origin) for one in device]
    for one in device:
        if one.buffer in pads:
            rows = torch.empty_strided(one.dst.shape, one.dst.stride(), dtype=one.dst.dtype, device="meta")
            pairs.append((rows, one.origin))
    before = {id(one.call): one.call for one in sightings}.values()
    after = launches(grouped_dma(pairs) + unrelated(sightings, fields))
    once = {one.buffer: one for one in reversed(device)}
    lines = replay_copies(list(reversed(once.values())), pads) + packed_inputs(host, pads)
    return Suggestion(len(launches(before)), len(after) + bool(host), "\n".join(lines))


def unrelated(sightings: Sequence[Sighting], fields: Sequence[Sighting]) -> list[Call]:
    """Fills of buffers that nothing is copied into, and new tensors that are not copied on."""
    buffers = {one.buffer for one in fields}
    origins = {id(one.origin) for one in fields}
    calls = []
    for one in sightings:
        if one.call.op == "fill_":
            keep = one.buffer not in buffers
        else:
            keep = not one.buffer and id(one.call.srcs[0]) not in origins
        if keep:
            calls.append(one.call)
    return calls


def replay_copies(fields: Sequence[Sighting], pads: Mapping[str, float]) -> list[str]:
    """The rows a request are a guess: those of a field over the fewest of any field."""
    requests = max(min((one.rows for one in fields), default=1), 1)
    lines = []
    for one in fields:
        rows, extra = divmod(one.rows, requests)
        arguments = [one.buffer + one.part(extra), f"rows={rows}", f"pad={pads.get(one.buffer)}"]
        if one.dim:
            arguments.append(f"dim={one.dim}")
        lines.append(f'    "{one.name}": StaticInput({", ".join(arguments)}),')
    if not lines:
        return []
    return ["copies = ReplayCopies({", *lines, "})", "copies(inputs, batch_size, captured)  # every step"]


def packed_inputs(fields: Sequence[Sighting], pads: Mapping[str, float]) -> list[str]:
    lines = []
    for one in fields:
        lines.append(f'    "{one.name}": ({tuple(one.shape)}, {one.dst.dtype}, {pads.get(one.buffer)}),')
    if not lines:
        return []
    step = "with packed.step() as host:  # every step; the graph reads packed.device"
    return ["packed = PackedInputs({", *lines, "}, device)", step]
