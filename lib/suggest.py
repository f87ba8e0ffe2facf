"""From the copies that `watch` saw in one step: how few launches would do, and the lines that make them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lib.copies import Call, grouped_dma
from lib.launches import launches


class Sighting(NamedTuple):
    """One destination of a call, on stand-ins, and where the code writes it.

    buffer: the expression that holds its memory, of `shape`; "" for a new tensor, or where none was found.
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
    def memory(self) -> tuple:
        """Tells buffers apart; the variable of a loop is one expression for many."""
        storage, *_ = self.place
        return self.buffer, storage

    @property
    def dim(self) -> int:
        """The dimension along which the buffer is filled in part."""
        for dim, (size, whole) in enumerate(zip(self.dst.shape, self.shape)):
            if size != whole:
                return dim
        return 0

    @property
    def rows(self) -> int:
        return self.dst.shape[self.dim] if self.dst.dim() else 1

    def part(self, extra: int) -> str:
        """The index of what is used of the buffer: fewer columns, and not the first `extra` rows."""
        used = []
        for size, whole in zip(self.dst.shape, self.shape):
            used.append(":" if size == whole else f":{size}")
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
    pads = {one.memory: one.call.value for one in sightings if one.call.op == "fill_"}
    fields = {}
    for one in sightings:
        if one.origin is not None and one.buffer:
            fields[one.place] = one
    device, host, pairs = {}, {}, []
    for one in fields.values():
        if one.origin.device != one.dst.device:
            host.setdefault(one.memory, one)
            continue
        device.setdefault(one.memory, one)
        pairs.append((one.dst, one.origin))
        if one.memory in pads:
            padding = torch.empty_strided(
                one.dst.shape,
                one.dst.stride(),
                dtype=one.dst.dtype,
                device="meta",
            )
            pairs.append((padding, one.origin))
    calls = {id(one.call): one.call for one in sightings}
    before = launches(calls.values())
    left = unrelated(sightings, fields.values())
    after = launches(grouped_dma(pairs) + left)
    lines = replay_copies(device.values(), pads) + packed_inputs(host.values(), pads)
    return Suggestion(len(before), len(after) + bool(host), "\n".join(lines))


def unrelated(sightings: Sequence[Sighting], fields: Collection[Sighting]) -> list[Call]:
    """Fills of buffers that nothing is copied into, and new tensors that are not copied on."""
    buffers = {one.memory for one in fields}
    origins = {id(one.origin) for one in fields}
    calls = {}
    for one in sightings:
        spare_fill = one.call.op == "fill_" and one.memory not in buffers
        spare_tensor = not one.buffer and id(one.origin) not in origins
        if spare_fill or spare_tensor:
            calls[id(one.call)] = one.call
    return list(calls.values())


def named(fields: Collection[Sighting]) -> dict[str, Sighting]:
    """By the last word of the expression, and more of it where two end alike."""
    names = {}
    for one in fields:
        *before, name = re.findall(r"\w+", one.buffer)
        while name in names:
            name = f"{before.pop()}_{name}" if before else f"{name}_{len(names)}"
        names[name] = one
    return names


def replay_copies(fields: Collection[Sighting], pads: Mapping[tuple, float]) -> list[str]:
    """The rows a request are a guess: those of a field over the fewest of any field."""
    requests = max(min((one.rows for one in fields), default=1), 1)
    lines = []
    for name, one in named(fields).items():
        rows, extra = divmod(one.rows, requests)
        arguments = [
            one.buffer + one.part(extra),
            f"rows={rows}",
            f"pad={pads.get(one.memory)}",
        ]
        if one.dim:
            arguments.append(f"dim={one.dim}")
        static = f"StaticInput({', '.join(arguments)})"
        lines.append(f'    "{name}": {static},')
    if not lines:
        return []
    return ["copies = ReplayCopies({", *lines, "})", "copies(inputs, batch_size, captured)  # every step"]


def packed_inputs(fields: Collection[Sighting], pads: Mapping[tuple, float]) -> list[str]:
    lines = []
    for name, one in named(fields).items():
        pad = pads.get(one.memory)
        shape = tuple(one.shape)
        lines.append(f'    "{name}": ({shape}, {one.dst.dtype}, {pad}),')
    if not lines:
        return []
    step = "with packed.step() as host:  # every step; the graph reads packed.device"
    return ["packed = PackedInputs({", *lines, "}, device)", step]
