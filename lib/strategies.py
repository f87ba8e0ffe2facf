"""The named ways to fill static buffers from a step's inputs, in the order in which the notebooks tell them.

A strategy is called with destinations and sources and performs the copies; its `launches` says what CUDA would
be asked to do for them, on any device. Both check their input first (`grouped_copy.check_pairs`), so an error
leaves every destination as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from lib.grouped_copy import check_pairs, group_pairs, grouped_foreach_copy_
from lib.routes import Launch, copy_launch, foreach_launches, memcpy_eligible

Tensors = Sequence[Tensor]
Names = Sequence[str] | None

# A fused kernel copies a chunk of 65,536 elements with one block, at about the rate of one multiprocessor: tens
# of GB/s, so 2 to 3 us for 64 KiB, which is what a memcpy of its own costs (4.6 us of host time on a V100,
# 1.3 us on the device). A first estimate: the crossover recorded on a device replaces it.
DEFAULT_DMA_BYTES = 64 * 1024


class Strategy(Protocol):
    """What the runners and notebooks ask of a way of copying.

    large_outside: the runner copies large fields (`hidden_states`) itself, each by its own `copy_`.
    """

    name: str
    large_outside: bool

    def __call__(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> None: ...

    def launches(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> list[Launch]: ...


@dataclass(frozen=True)
class PerCopy:
    """One `copy_()` a pair: SGLang before pull request 28465, and most engines today."""

    name: ClassVar[str] = "per_copy"
    large_outside: ClassVar[bool] = False

    def __call__(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> None:
        check_pairs(dsts, srcs, names)
        for dst, src in zip(dsts, srcs):
            dst.copy_(src)

    def launches(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> list[Launch]:
        check_pairs(dsts, srcs, names)
        return _copy_launches(dsts, srcs, range(len(dsts)))


@dataclass(frozen=True)
class Uint8View:
    """Every pair viewed as bytes, one foreach call for all: the first attempt of the pull request.

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
            torch._foreach_copy_(byte_dsts, byte_srcs)

    def launches(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> list[Launch]:
        byte_dsts, byte_srcs = self._views(dsts, srcs, names)
        return foreach_launches(byte_dsts, byte_srcs) if byte_dsts else []

    def _views(self, dsts: Tensors, srcs: Tensors, names: Names) -> tuple[list[Tensor], list[Tensor]]:
        check_pairs(dsts, srcs, names)
        names = names or [f"pair {i}" for i in range(len(dsts))]
        for name, dst, src in zip(names, dsts, srcs):
            if dst.dtype != src.dtype:
                raise ValueError(f"{name}: bytes cannot convert, expected {dst.dtype}, got {src.dtype}")
        return [_as_bytes(*pair) for pair in zip(names, dsts)], [
            _as_bytes(*pair) for pair in zip(names, srcs)
        ]


@dataclass(frozen=True)
class GroupedForeach:
    """One `_foreach_copy_` per dtype pair, every field inside, `hidden_states` too."""

    name: ClassVar[str] = "grouped_foreach"
    large_outside: ClassVar[bool] = False

    def __call__(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> None:
        grouped_foreach_copy_(dsts, srcs, names)

    def launches(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> list[Launch]:
        check_pairs(dsts, srcs, names)
        return _grouped_launches(dsts, srcs, range(len(dsts)))


@dataclass(frozen=True)
class GroupedForeachDma:
    """Small pairs grouped, the rest by `copy_`: the design of pull request 28465.

    By `copy_` goes a pair that is eligible for a driver memcpy and has `dma_bytes` or more, and one that is
    alone in its dtype group, for which a fused kernel would save nothing.
    """

    dma_bytes: int = DEFAULT_DMA_BYTES
    name: ClassVar[str] = "grouped_foreach_dma"
    large_outside: ClassVar[bool] = False

    def __call__(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> None:
        check_pairs(dsts, srcs, names)
        grouped, alone = self._split(dsts, srcs)
        grouped_foreach_copy_([dsts[i] for i in grouped], [srcs[i] for i in grouped])
        for i in alone:
            dsts[i].copy_(srcs[i])

    def launches(self, dsts: Tensors, srcs: Tensors, names: Names = None) -> list[Launch]:
        check_pairs(dsts, srcs, names)
        grouped, alone = self._split(dsts, srcs)
        return _grouped_launches(dsts, srcs, grouped) + _copy_launches(dsts, srcs, alone)

    def _split(self, dsts: Tensors, srcs: Tensors) -> tuple[list[int], list[int]]:
        """Indices of the pairs that go grouped, and of those that go by `copy_`."""
        groups, alone = group_pairs(dsts, srcs)
        grouped: list[int] = []
        for group in groups:
            small = [i for i in group if not self._by_memcpy(dsts[i], srcs[i])]
            (grouped if len(small) > 1 else alone).extend(small)
            alone.extend(i for i in group if i not in small)
        return grouped, sorted(alone)

    def _by_memcpy(self, dst: Tensor, src: Tensor) -> bool:
        return dst.nbytes >= self.dma_bytes and memcpy_eligible(dst, src)


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy for strategy in (PerCopy(), Uint8View(), GroupedForeach(), GroupedForeachDma())
}


def _as_bytes(name: str, t: Tensor) -> Tensor:
    try:
        return t.view(torch.uint8)
    except RuntimeError as error:
        raise RuntimeError(f"{name}: {error}") from error


def _copy_launches(dsts: Tensors, srcs: Tensors, indices: Sequence[int]) -> list[Launch]:
    launches = (copy_launch(dsts[i], srcs[i]) for i in indices)
    return [launch for launch in launches if launch is not None]


def _grouped_launches(dsts: Tensors, srcs: Tensors, indices: Sequence[int]) -> list[Launch]:
    """The launches of `grouped_foreach_copy_` on some of the pairs."""
    dsts, srcs = [dsts[i] for i in indices], [srcs[i] for i in indices]
    groups, singles = group_pairs(dsts, srcs)
    launches = []
    for group in groups:
        launches += foreach_launches([dsts[i] for i in group], [srcs[i] for i in group])
    return launches + _copy_launches(dsts, srcs, singles)
