"""The named ways to fill static buffers from a step's inputs, in the order in which the notebooks tell them.

A strategy is called with destinations and sources and performs the copies; its `launches` says what CUDA
would be asked to do for them, on any device. Both check their input first (`grouped_copy.check_pairs`), so an
error leaves every destination as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from lib.grouped_copy import DEFAULT_DMA_BYTES, check_pairs, copy_groups, group_pairs, split_large
from lib.routes import Launch, foreach_launches, routed_launches

Tensors = Sequence[Tensor]
Names = Sequence[str] | None
Routes = tuple[list[list[int]], list[int]]  # pairs for one foreach call each, and pairs for `copy_`


class Strategy(Protocol):
    """What the runners and notebooks ask of a way of copying.

    large_outside: the runner copies large fields (`hidden_states`) itself, each by its own `copy_`.
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
        byte_dsts = [_as_bytes(name, dst) for name, dst in zip(names, dsts)]
        return byte_dsts, [_as_bytes(name, src) for name, src in zip(names, srcs)]


def _as_bytes(name: str, t: Tensor) -> Tensor:
    try:
        return t.view(torch.uint8)
    except RuntimeError as error:
        raise RuntimeError(f"{name}: {error}") from error


STRATEGIES: dict[str, Strategy] = {
    "per_copy": RoutedCopy("per_copy", per_copy),
    "uint8_view": Uint8View(),
    "grouped_foreach": RoutedCopy("grouped_foreach", grouped_foreach),
    "grouped_foreach_dma": with_dma_bytes(DEFAULT_DMA_BYTES),
}
