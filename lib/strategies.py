"""The named ways to fill static buffers from a step's inputs, in the order in which the notebooks tell them.

A strategy is called with destinations and sources and performs the copies; its `launches` says what CUDA
would be asked to do for them, on any device. Both check their input first (`grouped_copy.check_pairs`), so an
error leaves every destination as it was. A strategy with a `plan` method works things out once for a batch
size. Of `STRATEGIES`, those in `ANY_SOURCES` take any sources; those in `BEYOND` ask something of the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from lib.fused_copy import FusedPlan
from lib.grouped_copy import (
    DEFAULT_DMA_BYTES,
    CopyPlan,
    check_count,
    check_pairs,
    copy_groups,
    group_pairs,
    pair_names,
    split_large,
    unrecorded,
)
from lib.routes import Launch, copy_launch, foreach_launches, routed_launches

Tensors = Sequence[Tensor]
Names = Sequence[str] | None
Routes = tuple[list[list[int]], list[int]]  # pairs for one foreach call each, and pairs for `copy_`


class Strategy(Protocol):
    """What the runners and notebooks ask of a way of copying.

    large_outside: the runner copies large fields (`hidden_states`) itself, each by its own `copy_`.

    May have, and a runner uses where it is there: `plan(dsts, src_dtypes, names)`, a `CopyPlan` for a batch
    size, or where `fixed_addresses` is true a `FixedPlan` for a captured size; then perhaps
    `allocate(shapes, dtypes, device)`, which lays out the static buffers of that size.
    """

    name: str
    large_outside: bool

    def __call__(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> None: ...

    def launches(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> list[Launch]: ...


@dataclass(frozen=True)
class RoutedCopy:
    """A strategy that only has to decide which pairs share a foreach call and which go by `copy_`."""

    name: str
    route: Callable[[Tensors, Tensors], Routes]
    large_outside: ClassVar[bool] = False

    def __call__(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> None:
        check_pairs(dsts, srcs, names)
        copy_groups(dsts, srcs, *self.route(dsts, srcs))

    def launches(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> list[Launch]:
        check_pairs(dsts, srcs, names)
        return routed_launches(dsts, srcs, *self.route(dsts, srcs))


def per_copy(dsts: Tensors, srcs: Tensors) -> Routes:
    """One `copy_()` a pair: SGLang before pull request 28465, and most engines today."""
    return [], list(range(len(dsts)))


def grouped_foreach(dsts: Tensors, srcs: Tensors) -> Routes:
    """One `_foreach_copy_` per dtype pair, every field inside, `hidden_states` too."""
    return group_pairs(dsts, srcs)


def grouped_foreach_dma(dsts: Tensors, srcs: Tensors, dma_bytes: int = DEFAULT_DMA_BYTES) -> Routes:
    """Small pairs grouped, the rest by `copy_`: the design of pull request 28465 (`split_large`)."""
    return split_large(dsts, srcs, *group_pairs(dsts, srcs), dma_bytes)


def with_dma_bytes(dma_bytes: int) -> RoutedCopy:
    """`grouped_foreach_dma` with another size, in bytes, from which a pair goes by driver memcpy."""
    return RoutedCopy("grouped_foreach_dma", partial(grouped_foreach_dma, dma_bytes=dma_bytes))


@dataclass(frozen=True)
class Uint8View:
    """Every pair viewed as bytes, one foreach call for all: the first attempt of the pull request.

    As with every strategy, autograd does not record the copy.

    Raises:
        RuntimeError: PyTorch's own, with the pair named, where a tensor cannot be viewed as bytes: the last
            stride is not 1, a 0-dim tensor, a conjugate view.
        ValueError: for a pair that converts, whose byte counts differ.
    """

    name: ClassVar[str] = "uint8_view"
    large_outside: ClassVar[bool] = True

    def __call__(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> None:
        byte_dsts, byte_srcs = self._views(dsts, srcs, names)
        if byte_dsts:
            with unrecorded():
                torch._foreach_copy_(byte_dsts, byte_srcs)

    def launches(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> list[Launch]:
        byte_dsts, byte_srcs = self._views(dsts, srcs, names)
        return foreach_launches(byte_dsts, byte_srcs) if byte_dsts else []

    def _views(self, dsts: Tensors, srcs: Tensors, names: Names) -> tuple[list[Tensor], list[Tensor]]:
        check_pairs(dsts, srcs, names)
        names = _refuse_conversion("bytes", dsts, [src.dtype for src in srcs], names)
        byte_dsts = [_as_bytes(name, dst) for name, dst in zip(names, dsts)]
        return byte_dsts, [_as_bytes(name, src) for name, src in zip(names, srcs)]


def _as_bytes(name: str, t: Tensor) -> Tensor:
    try:
        return t.view(torch.uint8)
    except RuntimeError as error:
        raise RuntimeError(f"{name}: {error}") from error


@dataclass(frozen=True)
class PlannedCopy:
    """A strategy whose work is done by a plan; called as a function it builds one and runs it once."""

    name: str
    plan: type[CopyPlan]
    large_outside: ClassVar[bool] = False
    fixed_addresses: ClassVar[bool] = False

    def __call__(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> None:
        self.plan(dsts, [src.dtype for src in srcs], names)(srcs)

    def launches(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> list[Launch]:
        return self.plan(dsts, [src.dtype for src in srcs], names).launches(srcs)


class FixedPlan:
    """What is left to do before a replay when the producer writes to fixed addresses; for one captured size.

    dsts: the static buffers, padding included. outputs: where the producer has to write, padding included.
    move: (destination, source) of the one copy before the replay, if any. record: makes the copies that
    belong into the graph, if any; to be called while it is captured.
    """

    def __init__(
        self,
        dsts: Tensors,
        outputs: Tensors,
        names: Names,
        move: tuple[Tensor, Tensor] | None = None,
        record: Callable[[], None] | None = None,
    ) -> None:
        check_pairs(dsts, outputs, names)
        self.dsts, self.outputs, self.move, self.record = list(dsts), list(outputs), move, record
        self._names = pair_names(dsts, names)
        self._places = [_place(output) for output in outputs]

    def __call__(self, srcs: Tensors, check: bool = True, constants: bool = True) -> None:
        """Do what is left to do; `constants` changes nothing, padding being the producer's.

        Raises ValueError as `check`.
        """
        if check:
            self.check(srcs)
        if self.move is not None:
            self.move[0].copy_(self.move[1])

    def check(self, srcs: Tensors) -> None:
        """Raise ValueError for sources that are not `outputs` or their first rows, e.g. temporaries.

        A captured copy would read the address it was captured with, whatever lies there now.
        """
        check_count(self.outputs, "source", srcs)
        for name, src, output, planned in zip(self._names, srcs, self.outputs, self._places):
            if (place := _place(src)) != planned or src.shape[:1] > output.shape[:1]:
                raise ValueError(
                    f"{name}: expected at {planned[0]:#x}, at most {tuple(output.shape)} {planned[1:]}, "
                    f"as planned, got {place[0]:#x} {place[1:]}"
                )

    def launches(self, srcs: Tensors | None = None, constants: bool = True) -> list[Launch]:
        """What CUDA would be asked to do before the replay. Raises ValueError as `check`, given `srcs`."""
        if srcs is not None:
            self.check(srcs)
        launch = None if self.move is None else copy_launch(*self.move)
        if launch is None:
            return []
        return [replace(launch, n_copies=len(self.dsts), reason="from one arena to the other")]


def _place(t: Tensor) -> tuple:
    """Address, and what else a place has to agree in but the number of rows."""
    if t.layout != torch.strided or t.is_nested:
        return 0, str(t.layout)
    stride = t.stride() if t.numel() else None
    return t.data_ptr(), stride, t.shape[1:], t.dtype, t.is_conj(), t.is_neg()


ALIGNMENT = 16  # bytes, of each field of an arena: the widest access of a thread


def arena(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], device="cpu") -> list[Tensor]:
    """Uninitialised tensors in one allocation, each aligned, which costs at most 15 bytes a field.

    A copy from one arena to another is of all bytes, so nothing else may be kept in the gaps between fields.
    """
    check_count(shapes, "dtype", dtypes)
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes)]
    starts = _arena_starts(sizes)
    memory = torch.empty(max(map(sum, zip(starts, sizes)), default=0), dtype=torch.uint8, device=device)
    fields = zip(starts, sizes, shapes, dtypes)
    return [memory[start : start + n].view(dtype).view(tuple(shape)) for start, n, shape, dtype in fields]


def _arena_starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)][: len(sizes)]


def _arena_bytes(tensors: Tensors, names: Names) -> Tensor:
    """All bytes from the first tensor to the end of the last. Raises ValueError where they are no arena."""
    names = pair_names(tensors, names)
    storage, first = tensors[0].untyped_storage(), tensors[0].storage_offset() * tensors[0].element_size()
    starts = _arena_starts([t.nbytes for t in tensors])
    for name, t, start in zip(names, tensors, starts):
        if not t.is_contiguous() or t.is_conj() or t.is_neg():
            raise ValueError(f"{name}: expected contiguous in an arena, got strides {t.stride()}")
        if t.untyped_storage().data_ptr() != storage.data_ptr():
            raise ValueError(f"{name}: expected in one allocation with {names[0]}, as `arena` makes it")
        if t.numel() and t.storage_offset() * t.element_size() != first + start:
            got = t.storage_offset() * t.element_size() - first
            raise ValueError(f"{name}: expected {start} bytes after {names[0]}, as in an `arena`, got {got}")
    memory = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    return memory.set_(storage, first, (starts[-1] + tensors[-1].nbytes,))


@dataclass(frozen=True)
class Arena:
    """Destinations and sources each in one `arena`, laid out alike: one memcpy, whatever the dtypes.

    The uint8 idea, made to work by laying memory out for it. The producer has to write into `plan.outputs`,
    padding included. Raises ValueError for tensors that lie otherwise and for a pair that converts.
    """

    name: ClassVar[str] = "arena"
    large_outside: ClassVar[bool] = False
    fixed_addresses: ClassVar[bool] = True
    allocate = staticmethod(arena)

    def __call__(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> None:
        for dst, src in self._spans(dsts, srcs, names):
            dst.copy_(src)

    def launches(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> list[Launch]:
        spans = self._spans(dsts, srcs, names)
        return FixedPlan(dsts, srcs, names, *spans).launches()

    def plan(self, dsts: Tensors, src_dtypes: Sequence[torch.dtype], names: Names = None) -> FixedPlan:
        outputs = arena([dst.shape for dst in dsts], src_dtypes, dsts[0].device if dsts else "cpu")
        return FixedPlan(dsts, outputs, names, *self._spans(dsts, outputs, names))

    def _spans(self, dsts: Tensors, srcs: Tensors, names: Names) -> list[tuple[Tensor, Tensor]]:
        check_pairs(dsts, srcs, names)
        _refuse_conversion(self.name, dsts, [src.dtype for src in srcs], names)
        return [(_arena_bytes(dsts, names), _arena_bytes(srcs, names))] if dsts else []


@dataclass(frozen=True)
class InGraph:
    """The copies are part of the captured graph: nodes of it, and no launch of their own.

    The sources have to stay where they were at capture, for as long as the graph lives. As a function it
    makes the copies that the graph would; a runner captures `plan.record`.
    """

    name: ClassVar[str] = "in_graph"
    large_outside: ClassVar[bool] = False
    fixed_addresses: ClassVar[bool] = True

    def __call__(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> None:
        CopyPlan(dsts, [src.dtype for src in srcs], names)(srcs)

    def launches(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> list[Launch]:
        check_pairs(dsts, srcs, names)
        return []

    def plan(self, dsts: Tensors, src_dtypes: Sequence[torch.dtype], names: Names = None) -> FixedPlan:
        copies = CopyPlan(dsts, src_dtypes, names)
        outputs = [torch.empty_like(dst, dtype=dtype) for dst, dtype in zip(dsts, src_dtypes)]
        return FixedPlan(dsts, outputs, names, record=partial(copies, outputs))


@dataclass(frozen=True)
class NoCopy:
    """The producer writes into the static buffers. Raises ValueError for a source elsewhere."""

    name: ClassVar[str] = "no_copy"
    large_outside: ClassVar[bool] = False
    fixed_addresses: ClassVar[bool] = True

    def __call__(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> None:
        check_pairs(dsts, srcs, names)
        self.plan(dsts, [src.dtype for src in srcs], names).check(srcs)

    def launches(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> list[Launch]:
        self(dsts, srcs, names)
        return []

    def plan(self, dsts: Tensors, src_dtypes: Sequence[torch.dtype], names: Names = None) -> FixedPlan:
        _refuse_conversion(self.name, dsts, src_dtypes, names)
        return FixedPlan(dsts, dsts, names)


def _refuse_conversion(who: str, dsts: Tensors, src_dtypes: Sequence[torch.dtype], names: Names) -> list[str]:
    """The pairs' names. Raises ValueError for a pair that converts."""
    check_count(dsts, "dtype", src_dtypes)
    names = pair_names(dsts, names)
    for name, dst, dtype in zip(names, dsts, src_dtypes):
        if dst.dtype != dtype:
            raise ValueError(f"{name}: {who} cannot convert, expected {dst.dtype}, got {dtype}")
    return names


ANY_SOURCES: dict[str, Strategy] = {
    "per_copy": RoutedCopy("per_copy", per_copy),
    "uint8_view": Uint8View(),
    "grouped_foreach": RoutedCopy("grouped_foreach", grouped_foreach),
    "grouped_foreach_dma": with_dma_bytes(DEFAULT_DMA_BYTES),
    "copy_plan": PlannedCopy("copy_plan", CopyPlan),
}

# They ask for Triton, and for a producer that writes to a matching arena, to fixed addresses, in place.
BEYOND: dict[str, Strategy] = {
    "fused_kernel": PlannedCopy("fused_kernel", FusedPlan),
    "arena": Arena(),
    "in_graph": InGraph(),
    "no_copy": NoCopy(),
}

STRATEGIES = ANY_SOURCES | BEYOND
