"""Which copies does this code make, where, and what would be fewer? Run one step of an engine inside `watch`:

    with watch() as seen:
        runner.fill(batch)
    seen.report()  # a table: where, how often, kind of launch, why, what would be better
    print(seen.suggest().lines)

Seen is what this thread sends through PyTorch's dispatcher: `copy_`, `fill_`, `zero_`, `_foreach_copy_`,
assignments to slices and elements, and `to()` where it makes a new tensor. Not seen: Triton kernels, numpy,
other operators (`cat`, `index_put_`, `out=`), sparse and nested tensors. Tensors on the CPU and on `meta`
count as device memory; a CPU tensor copied to another device is the host's.

The code computes what it computes without, 0.1 ms later a destination (more if busy, or if variables hold
thousands of attributes). Before Python 3.13, what a function deletes may live until it returns.
"""

import linecache
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from statistics import multimode
from traceback import walk_stack
from types import FrameType, ModuleType
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from lib.copies import Call, grouped_dma, place
from lib.launches import Explanation, Launch, explain, launches

LIBRARIES = (torch.__path__[0], __file__)
aten = torch.ops.aten
SOURCE = {  # operator -> which argument its source is
    aten.copy_: 1,
    aten.fill_: 1,
    aten.zero_: 1,  # there is none: 0
    aten.to: 0,  # whole in inference mode
    aten._to_copy: 0,
}


class Sighting(NamedTuple):
    """A destination of a call, on stand-ins, and where (file, line, code). origin: its source, or what that
    was uploaded or converted from. place: its memory. buffer, shape: expression, or "", and shape of the
    tensor that it is a part of. first: whether it starts where that does. rows: how many of that's first rows
    an equal source fills; else 0."""

    call: Call
    dst: Tensor
    origin: Tensor
    where: dict
    place: tuple
    buffer: str
    shape: tuple
    first: bool
    rows: int


class Suggestion(NamedTuple):
    """Launches as the code is, launches with the lines, and the lines to paste."""

    before: int
    after: int
    lines: str


class watch(TorchDispatchMode):
    """What the code did, in order: `calls`, on stand-ins, to count and to explain, not to run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []
        self.sightings = []
        self.origins = WeakTensorKeyDictionary()  # of what was uploaded or converted into a new tensor
        self.outermost = sys._getframe(1)

    def launches(self) -> list[Launch]:
        """What CUDA is asked for. Raises where `_foreach_copy_` would on CUDA: NotImplementedError."""
        return launches(self.calls)

    def report(self) -> pd.DataFrame:
        """A row for each line and sort of destination: kind, bytes of one, why, what is better, how often."""
        names = [one.buffer for one in self.sightings]
        explained = explain(self.calls, names)
        rows = [one.where | vars(better) for one, better in zip(self.sightings, explained)]
        table = pd.DataFrame(rows, columns=["file", "line", "code", *Explanation.__annotations__])
        return table.value_counts(sort=False).reset_index(name="times")

    def suggest(self) -> Suggestion:
        """Fewer launches for the copies of one step: with a `ReplayCopies` and a `PackedInputs`.

        What fills the same buffers goes along as padding. The rows a request are a guess: a field's over
        those that most have. A comment names what stays as it is: buffers written in parts, in columns, not
        from the start, or in rows that are no multiple of the others'.
        """
        pads = {}
        copied = {}
        unlike = set()
        for one in self.sightings:
            if one.call.op == "fill_":
                pads[one.buffer] = one.call.value
            elif one.buffer and one.dst.is_meta:
                first = copied.setdefault(one.buffer, one)
                if one.place != first.place:
                    unlike.add(one.buffer)
        requests = min(multimode(one.rows for one in copied.values() if one.rows), default=1)
        static = {}
        packed = {}
        others = []
        pairs = []
        replaced = set()
        for buffer, one in copied.items():
            rows, rest = divmod(one.rows, requests)
            no_rows = one.origin.is_meta and (rest or not rows)
            if no_rows or not one.first or buffer in unlike:
                others.append(buffer)
                continue
            replaced |= {buffer, id(one.origin)}
            words = re.findall(r"\w+", buffer)
            name = words[-1]
            if name in static | packed:
                name = "_".join(words)
            pad = pads.get(buffer)
            if not one.origin.is_meta:
                packed[name] = f'    "{name}": ({one.shape}, {one.dst.dtype}, {pad}),'
                continue
            static[name] = f'    "{name}": StaticInput({buffer}, rows={rows}, pad={pad}),'
            pairs.append((one.dst, one.origin))
            if buffer in pads:
                pairs.append((one.dst, one.dst.clone()))
        left = {}
        for one in self.sightings:
            if (one.buffer or id(one.origin)) not in replaced:
                left[id(one.call)] = one.call
        after = launches([*grouped_dma(pairs), *left.values()])
        lines = []
        if others:
            lines.append(f"# not in rows a request, stay as they are: {', '.join(others)}")
        if static:
            lines += ["copies = ReplayCopies({", *static.values(), "})"]
            lines.append("copies(inputs, batch_size, captured)  # every step")
        if packed:
            lines += ["packed = PackedInputs({", *packed.values(), "}, device)"]
            lines.append("with packed.step() as host:  # every step; the graph reads packed.device")
        before = len(self.launches())
        return Suggestion(before, len(after) + bool(packed), "\n".join(lines))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        with suppress(Exception):  # the code goes on; not seen is a tensor without strides or storage
            call = asked_for(func.overloadpacket, args, result)
            if call:
                self.note(call)
            if call and SOURCE.get(func.overloadpacket) == 0:
                self.origins[result] = self.sightings[-1].origin
        return result

    def note(self, call: Call) -> None:
        frame = sys._getframe()
        while frame.f_code.co_filename.startswith(LIBRARIES):
            frame = frame.f_back
        file = frame.f_code.co_filename
        line = frame.f_lineno
        code = linecache.getline(file, line)
        where = {"file": file, "line": line, "code": code.strip()}
        kept = Call(call.op, [], [], call.value)
        noted = []
        for dst, src in zip(call.dsts, call.srcs or call.dsts):  # a fill has no sources
            like = stand_in(dst, src)
            like_src = stand_in(src, dst)
            kept.dsts.append(like)
            if call.srcs:
                kept.srcs.append(like_src)
            origin = self.origins.get(src, like_src)
            buffer, whole = self.holder(dst, frame)
            first = place(dst)[:2] == place(whole)[:2]
            rows = 0
            is_alike = dst.shape == src.shape and 0 < dst.dim() == whole.dim()
            if is_alike and place(dst) == place(whole[: len(dst)]):
                rows = len(dst)
            shape = tuple(whole.shape)
            one = Sighting(kept, like, origin, where, place(dst), buffer, shape, first, rows)
            noted.append(one)
        self.calls.append(kept)
        self.sightings += noted

    def holder(self, dst: Tensor, frame: FrameType) -> tuple[str, Tensor]:
        """Expression and tensor of its memory: an attribute or item before a variable, then the largest."""
        found = []
        for scope, _ in walk_stack(frame):
            found = [*tensors_in(scope.f_locals, dst), *found]  # first what is valid where `watch` stands
            if scope is self.outermost:
                break
        return max(found, key=lambda one: (not one[0].isidentifier(), one[1].numel()), default=("", dst))


def asked_for(operator, args: tuple, result: Tensor) -> Call | None:
    """The call that an operator makes, if it copies."""
    if operator is aten._foreach_copy_:
        return Call("foreach", *args[:2])
    src = (*args, 0)[SOURCE.get(operator, 0)]
    if operator not in SOURCE or result is src:
        return None
    is_number = operator is aten.fill_ or not isinstance(src, Tensor)
    if is_number or (src.is_meta and {*src.stride()} == {0}):  # `meta` expands a number to assign it
        return Call("fill_", [result], value=src)
    return Call("copy_", [result], [src])


def tensors_in(scope: Mapping, part: Tensor, form="{}{}", prefix="", levels=2) -> Iterator[tuple]:
    """Expression and tensor of a part's memory, among variables and two levels of attributes and items."""
    for name, value in list(scope.items()):
        path = form.format(prefix, name)
        kind = type(value)  # a proxy would answer isinstance, or raise
        if issubclass(kind, Tensor):
            is_alias = torch._C._is_alias_of(value, part) and value.dtype == part.dtype
            if is_alias and 0 <= part.storage_offset() - value.storage_offset() < value.numel():
                yield path, value
        elif levels and kind is dict:
            yield from tensors_in(value, part, "{}[{!r}]", path, 0)
        elif levels and kind.__dictoffset__ and not issubclass(kind, ModuleType):
            yield from tensors_in(vars(value), part, "{}.{}", path, levels - 1)


def stand_in(t: Tensor, partner: Tensor) -> Tensor:
    """A tensor laid out like this one, without memory; itself on the host with a partner elsewhere."""
    if t.is_cpu and not partner.is_cpu:
        return t.detach()
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
