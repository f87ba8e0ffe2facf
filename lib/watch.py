"""Which copies does this code make, where, and what would be fewer? Run one step of an engine inside `watch`:

    with watch() as seen:
        runner.fill(batch)
    seen.report()  # a table: where, how often, kind of launch, why, what would be better
    print(seen.suggest().lines)

Seen is what this thread sends through PyTorch's dispatcher: `copy_`, `fill_`, `zero_`, `_foreach_copy_`,
assignments to slices and elements, and `to()`, which uploads or converts into a new tensor. Not seen: kernels
launched without PyTorch, writes through numpy, other operators that write (`cat`, `index_put_`, `out=`).

The code computes what it computes without, 0.1 to 0.5 ms later a destination (on 2 CPU cores with torch 2.13;
the first time, torch loads for 2 s). Kept are shapes and strides, and tensors uploaded from the host. Tensors
on the CPU and on `meta` count as device memory; a CPU tensor copied to another device comes from the host.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from inspect import CO_OPTIMIZED
from itertools import zip_longest
from types import FrameType, ModuleType

import pandas as pd
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from lib.checks import elements
from lib.copies import Call
from lib.launches import Launch, explain, launches
from lib.suggest import Sighting, Suggestion, suggest

LIBRARIES = (f"{torch.__path__[0]}{os.sep}", contextlib.__file__, __file__)
REFERENCES = 3  # to a frame's variables that nobody else holds: the frame's, ours, getrefcount's
aten = torch.ops.aten


@dataclass
class Seen:
    """What the code did, in order. The calls are on stand-ins: to count and to explain, not to run."""

    calls: list[Call] = field(default_factory=list)
    sightings: list[Sighting] = field(default_factory=list)

    def launches(self) -> list[Launch]:
        """What CUDA is asked for. Raises where `_foreach_copy_` would on CUDA: NotImplementedError."""
        return launches(self.calls)

    def report(self) -> pd.DataFrame:
        """A row for each line and destination: how often, bytes of one time, kind, why, what is better."""
        rows = {}
        names = [one.buffer for one in self.sightings]
        for one, explained in zip(self.sightings, explain(self.calls, names)):
            where = {
                "file": one.file,
                "line": one.line,
                "code": linecache.getline(one.file, one.line).strip(),
                "times": 0,
            }
            key = (one.file, one.line, one.place)
            row = rows.setdefault(key, where | asdict(explained))
            row["times"] += 1
        return pd.DataFrame(rows.values())

    def suggest(self) -> Suggestion:
        """What would be fewer launches, for the copies of one step."""
        return suggest(self.sightings)


class Recorder(TorchDispatchMode):
    """Notes what PyTorch was asked to copy and to fill, once that is done."""

    def __init__(self, seen: Seen, outermost: FrameType) -> None:
        super().__init__()
        self.seen = seen
        self.outermost = outermost
        self.made = {}  # by an upload or conversion: elements of the new tensor -> (it, weakly; its source)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operator = func.overloadpacket
        if operator is aten.to:  # in inference mode it comes whole
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if operator in READERS:
            call = Call(*READERS[operator](result, *args))
            if all(map(has_memory, (*call.dsts, *call.srcs))):
                self.note(call, operator is aten._to_copy)
        return result

    def note(self, call: Call, is_new: bool) -> None:
        kept = Call(call.op, [], [], call.value)
        self.seen.calls.append(kept)
        frame = caller()
        for dst, src in zip_longest(call.dsts, call.srcs):
            like, origin = self.keep(kept, dst, src)
            place = elements(dst)
            buffer, shape = "", dst.shape
            if is_new:
                self.made[place] = weakref.ref(dst), origin
            else:
                buffer, shape = self.buffer(dst, frame)
            sighting = Sighting(
                kept,
                like,
                origin,
                place,
                frame.f_code.co_filename,
                frame.f_lineno,
                buffer,
                shape,
            )
            self.seen.sightings.append(sighting)

    def keep(self, kept: Call, dst: Tensor, src: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Add stand-ins for a pair; return that of the destination, and the origin of the source."""
        if src is None:
            kept.dsts.append(stand_in(dst, dst.device))
            return kept.dsts[-1], None
        like = stand_in(dst, src.device)
        like_src = like if elements(src) == elements(dst) else stand_in(src, dst.device)
        kept.dsts.append(like)
        kept.srcs.append(like_src)
        made, origin = self.made.get(elements(src), (None, like_src))
        if made is None or made() is None:
            origin = like_src
        return like, origin

    def buffer(self, dst: Tensor, frame: FrameType | None) -> tuple[str, torch.Size]:
        """The expression that holds the memory, an attribute or item rather than a name, and its shape."""
        best = ""
        shape = dst.shape
        rank = (False, 0)
        while frame is not None and not rank[0]:
            for path, tensor in tensors_in(variables(frame)):
                if not holds(tensor, dst):
                    continue
                found = (not path.isidentifier(), tensor.numel())
                if found >= rank:
                    best, shape, rank = path, tensor.shape, found
            frame = None if frame is self.outermost else frame.f_back
        return best, shape


def caller() -> FrameType:
    """The innermost frame that is neither this file's nor torch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return frame


def variables(frame: FrameType) -> dict:
    """A copy; emptied is the dictionary in which Python before 3.13 would keep them alive with the frame."""
    scope = frame.f_locals
    found = dict(scope)
    held_by_code = sys.getrefcount(scope) > REFERENCES  # what `locals()` gave it
    if frame.f_code.co_flags & CO_OPTIMIZED and isinstance(scope, dict) and not held_by_code:
        scope.clear()
    return found


def tensors_in(scope: Mapping, depth: int = 2) -> Iterator[tuple[str, Tensor]]:
    """Tensors among variables, in dictionaries, and in attributes and those of these.

    Objects are not asked for their class or attributes: a proxy would answer, or raise.
    """
    for name, value in list(scope.items()):
        kind = type(value)
        if issubclass(kind, Tensor):
            yield name, value
        elif issubclass(kind, dict):
            for key, item in list(dict.items(value)):
                if issubclass(type(item), Tensor):
                    yield f"{name}[{key!r}]", item
        elif depth and not issubclass(kind, ModuleType | type):
            for path, item in tensors_in(attributes(value), depth - 1):
                yield f"{name}.{path}", item


def attributes(value: object) -> Mapping:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def has_memory(t: Tensor) -> bool:
    """Whether shape and strides say where it lies: not of a nested tensor, a lazy module, or under `vmap`."""
    if t.layout != torch.strided or t.is_nested or t.is_quantized or is_lazy(t):
        return False
    return not is_functorch_wrapped_tensor(t)


def holds(buffer: Tensor, view: Tensor) -> bool:
    if not has_memory(buffer) or buffer.dtype != view.dtype:
        return False
    same_storage = elements(buffer)[0] == elements(view)[0]
    offset = view.storage_offset() - buffer.storage_offset()
    return same_storage and 0 <= offset < max(buffer.numel(), 1)


def stand_in(t: Tensor, partner: torch.device) -> Tensor:
    """A tensor laid out like this one, without memory; itself on the host with a partner elsewhere."""
    if t.device.type == "cpu" and partner.type != "cpu":
        return t.detach()
    like = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    if t.is_conj():
        like = like.conj()
    if t.is_neg():
        like = torch._neg_view(like)
    return like


def read_copy(_, dst: Tensor, src: Tensor | float, *rest) -> tuple:
    src = torch.as_tensor(src)
    if src.is_meta and src.numel() > 1 and not any(src.stride()):
        return "fill_", [dst], [], float("nan")  # on meta, a number is assigned like this
    return "copy_", [dst], [src]


def number(value: Tensor | float) -> float:
    """Without waiting for a device."""
    if not isinstance(value, Tensor):
        return value
    if value.device.type != "cpu":
        return float("nan")
    return value.item()


READERS = {  # what an operator returned and its arguments -> the arguments of a Call
    aten.copy_: read_copy,
    aten.fill_: lambda _, dst, value: ("fill_", [dst], [], number(value)),
    aten.zero_: lambda _, dst: ("fill_", [dst], [], 0),
    aten._foreach_copy_: lambda _, dsts, srcs, *rest: ("foreach", dsts, srcs),
    aten._to_copy: lambda made, src: ("copy_", [made], [src]),
}


@contextlib.contextmanager
def watch() -> Iterator[Seen]:
    """Records what the code in the block asks PyTorch to copy and to fill. Its errors come through."""
    seen = Seen()
    with Recorder(seen, caller()):
        yield seen
