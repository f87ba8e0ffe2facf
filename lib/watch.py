"""Which copies does this code make, where, and what would be fewer? Run one step of an engine inside `watch`:

    with watch() as seen:
        runner.fill(batch)
    seen.report()  # a table: where, how often, kind of launch, why, what would be better
    print(seen.suggest().lines)

Seen is what this thread sends through PyTorch's dispatcher: `copy_`, `fill_`, `zero_`, `_foreach_copy_`,
assignments to slices and elements, and `to()`, which uploads or converts into a new tensor. Not seen: Triton
kernels, numpy, other operators (`cat`, `index_put_`, `out=`), sparse and nested tensors. Tensors on the CPU
and on `meta` count as device memory; a CPU tensor copied to another device is the host's.

The code computes what it computes without, 0.1 ms later a destination (on 2 CPU cores; 1 to 2 on busy ones,
more if variables hold thousands of attributes). Kept are shapes, strides and host sources; before Python
3.13, what a function deletes may live until it returns.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import astuple
from types import FrameType, ModuleType

import pandas as pd
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from lib.copies import Call, place
from lib.launches import Explanation, Launch, explain, launches
from lib.suggest import Sighting, Suggestion, suggest

COLUMNS = ["file", "line", "code", *Explanation.__annotations__]
LIBRARIES = (torch.__path__[0], __file__)
aten = torch.ops.aten
NEW_TENSOR = {aten.to, aten._to_copy}  # in inference mode `to` comes whole
WRITES = {aten.copy_, aten.fill_, aten.zero_, aten._foreach_copy_}


class Watch(TorchDispatchMode):
    """What the code did, in order: `calls`, on stand-ins, to count and to explain, not to run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []
        self.sightings = []
        self.origins = WeakTensorKeyDictionary()  # of what was uploaded or converted into a new tensor
        self.outermost = caller()

    def launches(self) -> list[Launch]:
        """What CUDA is asked for. Raises where `_foreach_copy_` would on CUDA: NotImplementedError."""
        return launches(self.calls)

    def report(self) -> pd.DataFrame:
        """A row for each line and sort of destination: kind, bytes of one, why, what is better, how often."""
        rows = []
        names = [one.buffer for one in self.sightings]
        for one, explained in zip(self.sightings, explain(self.calls, names)):
            code = linecache.getline(*one.where).strip()
            row = [*one.where, code]
            row += astuple(explained)
            rows.append(row)
        table = pd.DataFrame(rows, columns=COLUMNS)
        times = table.groupby(COLUMNS, sort=False).size()
        return times.reset_index(name="times")

    def suggest(self) -> Suggestion:
        """What would be fewer launches, for the copies of one step."""
        return suggest(self.calls, self.sightings)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operator = func.overloadpacket
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        with suppress(Exception):  # the code goes on; not seen is a tensor without strides or storage
            if operator in WRITES:
                self.note(written(operator, *args))
            elif operator in NEW_TENSOR and result is not args[0]:
                self.note(Call("copy_", [result], [args[0]]))
                self.origins[result] = self.sightings[-1].origin
        return result

    def note(self, call: Call) -> None:
        frame = caller()
        file = frame.f_code.co_filename
        where = (file, frame.f_lineno)
        kept = Call(call.op, [], [], call.value)
        noted = []
        srcs = call.srcs or call.dsts  # a fill has none
        for dst, src in zip(call.dsts, srcs):
            like = stand_in(dst, src)
            like_src = stand_in(src, dst)
            kept.dsts.append(like)
            if call.srcs:
                kept.srcs.append(like_src)
            buffer, whole = self.holder(dst, frame)
            whole_like = stand_in(whole, whole)
            origin = self.origins.get(src, like_src)
            start = place(dst)[:2]
            whole_start = place(whole)[:2]
            one = Sighting(kept, like, origin, where, buffer, whole_like, start, whole_start)
            noted.append(one)
        self.calls.append(kept)
        self.sightings += noted

    def holder(self, dst: Tensor, frame: FrameType | None) -> tuple[str, Tensor]:
        """Expression and tensor of its memory: an attribute or item before a variable, then the largest."""
        found = []
        while frame is not None:
            here = tensors_in(frame.f_locals, dst)
            found = [*here, *found]  # first what is valid where `watch` stands
            frame = None if frame is self.outermost else frame.f_back
        return max(found, key=lambda one: (not one[0].isidentifier(), one[1].numel()), default=("", dst))


watch = Watch  # with watch() as seen: errors of the code come through


def caller() -> FrameType:
    """The innermost frame that is neither this file's nor torch's."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return frame


def tensors_in(scope: Mapping, part: Tensor, form="{}{}", prefix="", levels=2) -> Iterator[tuple]:
    """Expression and tensor of a part's memory, among variables and two levels of attributes and items."""
    for name, value in list(scope.items()):
        path = form.format(prefix, name)
        kind = type(value)  # a proxy would answer isinstance, or raise
        if issubclass(kind, Tensor):
            if holds(value, part):
                yield path, value
        elif levels and kind is dict:
            yield from tensors_in(value, part, "{}[{!r}]", path, 0)
        elif levels and kind.__dictoffset__ and not issubclass(kind, ModuleType):
            yield from tensors_in(vars(value), part, "{}.{}", path, levels - 1)


def holds(buffer: Tensor, view: Tensor) -> bool:
    with suppress(RuntimeError, ValueError):  # it is sparse, or of a lazy module
        same_storage = buffer.untyped_storage()._cdata == view.untyped_storage()._cdata
        offset = view.storage_offset() - buffer.storage_offset()
        return same_storage and buffer.dtype == view.dtype and 0 <= offset < buffer.numel()
    return False


def stand_in(t: Tensor, partner: Tensor) -> Tensor:
    """A tensor laid out like this one, without memory; itself on the host with a partner elsewhere."""
    if "cpu" == t.device.type != partner.device.type:
        return t.detach()
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def written(operator, dst: Tensor, src: Tensor | float = 0, *rest) -> Call:
    """The call that an operator was asked for."""
    if operator is aten._foreach_copy_:
        return Call("foreach", dst, src)
    is_number = operator is not aten.copy_ or not isinstance(src, Tensor)
    if not is_number and src.is_meta:  # there, a number is assigned by an expanded tensor
        is_number = {*src.stride()} == {0}
    if is_number:
        return Call("fill_", [dst], value=src)
    return Call("copy_", [dst], [src])
