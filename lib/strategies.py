"""The named ways to fill static buffers, in the order in which the notebooks tell them.

A strategy is a function from a step to the calls that serve it: a new one is a function here and a line in
STRATEGIES. ROUTES has those that need pairs alone: their calls a `CopyPlan` or `ReplayCopies` can keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from lib.checks import check_pairs
from lib.copies import DEFAULT_DMA_BYTES, FUSED_DTYPES, Call, Pairs, Tensors, grouped, grouped_dma
from lib.fused import MAX_PAIRS, FusedLaunch, describe
from lib.launches import obstacles

Pair = tuple[Tensor, Tensor]
Calls = list[Call]


@dataclass
class Step:
    """What a replay needs in its buffers.

    small, large: (destination, source) by field; large is what SGLang leaves out of the group, hidden_states.
    fills: (whole buffer, value), SGLang's way to pad. pads: (rows, constant), ours, to be copied along.
    """

    small: dict[str, Pair] = field(default_factory=dict)
    large: dict[str, Pair] = field(default_factory=dict)
    fills: list[tuple] = field(default_factory=list)
    pads: list[Pair] = field(default_factory=list)

    @classmethod
    def of(cls, dsts: Tensors, srcs: Tensors, names: Sequence[str] | None = None) -> Step:
        """A step without padding; a pair from `DEFAULT_DMA_BYTES` on is large. Raises as `check_pairs`."""
        check_pairs(dsts, srcs, names)
        step = cls()
        names = names or count()
        for name, dst, src in zip(names, dsts, srcs):
            large = dst.nbytes >= DEFAULT_DMA_BYTES
            fields = step.large if large else step.small
            fields[name] = dst, src
        return step

    @property
    def pairs(self) -> list[Pair]:
        return [*self.small.values(), *self.large.values()]


def fills(step: Step) -> Calls:
    return [Call("fill_", [buffer], value=value) for buffer, value in step.fills]


def copies(pairs: Pairs) -> Calls:
    return [Call("copy_", [dst], [src]) for dst, src in pairs]


def around(small: Calls, step: Step) -> Calls:
    """As SGLang goes about it: fills first, the small fields in some way, large ones by `copy_`."""
    large = copies(step.large.values())
    return fills(step) + small + large


def uint8_view(step: Step) -> Calls:
    """All small fields viewed as bytes, one foreach call for all: the first attempt of pull request 28465.

    Raises ValueError for a pair that converts, RuntimeError where a tensor has no byte view; with its name.
    """
    dsts = []
    srcs = []
    for name, (dst, src) in step.small.items():
        if dst.dtype != src.dtype:
            raise ValueError(f"{name}: bytes cannot convert {src.dtype} to {dst.dtype}")
        try:
            dsts.append(dst.view(torch.uint8))
            srcs.append(src.view(torch.uint8))
        except RuntimeError as error:
            raise RuntimeError(f"{name}: {error}") from error
    small = []
    if dsts:
        small.append(Call("foreach", dsts, srcs))
    return around(small, step)


def grouped_foreach_dma(step: Step, dma_bytes: int = DEFAULT_DMA_BYTES) -> Calls:
    """Small fields grouped, the rest by `copy_`: the design of pull request 28465."""
    small = grouped(step.small.values(), dma_bytes)
    return around(small, step)


def small_copy(step: Step) -> Calls:
    """SGLang since 0.5.21: one Triton kernel for all small fields where it takes them, else groups."""
    pairs = list(step.small.values())
    taken = len(pairs) > 1 and all(takes_small_pair(*pair) for pair in pairs)
    small = [fused_call(pairs)] if taken else grouped(pairs)
    return around(small, step)


def takes_small_pair(dst: Tensor, src: Tensor) -> bool:
    """Whether SGLang 0.5.23's kernel takes a pair (kernels/ops/memory/small_copy.py, `try_small_copy`)."""
    dtypes = {dst.dtype, src.dtype}
    if len(dtypes) > 1 and dtypes != {torch.int32, torch.int64}:
        return False
    if not dtypes <= FUSED_DTYPES or dst.is_complex() or src.requires_grad:
        return False
    if describe(dst, src) is None or dst.numel() > 8192:
        return False
    if dst.dim() == 2:  # a destination that runs forward in memory
        row = dst.shape[1] * dst.stride(1)
        return dst.stride(0) >= row
    return dst.dim() == 1


def fused_pairs(pairs: Pairs) -> Calls:
    """One Triton kernel for each 32 pairs of any dtypes and layouts; `copy_` for others and large memcpys."""
    taken = []
    left = []
    for dst, src in pairs:
        memcpy = dst.nbytes >= DEFAULT_DMA_BYTES and not obstacles(dst, src)
        if not memcpy and describe(dst, src) is not None:
            taken.append((dst, src))
        elif dst.numel() > 0:
            left.append((dst, src))
    calls = []
    for start in range(0, len(taken), MAX_PAIRS):
        chunk = taken[start : start + MAX_PAIRS]
        calls.append(fused_call(chunk))
    return calls + copies(left)


def fused_call(pairs: Pairs) -> Call:
    dsts, srcs = zip(*pairs)
    launch = FusedLaunch(dsts, srcs)
    return Call("fused", dsts, srcs, kept=launch)


ROUTES = {"copy_plan": grouped_dma, "fused": fused_pairs}
STRATEGIES = {
    # One `copy_()` a field: SGLang before pull request 28465, and most engines today.
    "per_copy": lambda step: fills(step) + copies(step.pairs),
    "uint8_view": uint8_view,
    # One `_foreach_copy_` per dtype pair, every field inside, `hidden_states` too.
    "grouped_foreach": lambda step: fills(step) + grouped(step.pairs),
    "grouped_foreach_dma": grouped_foreach_dma,
    "small_copy": small_copy,
    "copy_plan": lambda step: grouped_dma(step.pairs + step.pads),  # padding in the groups, too
    "fused": lambda step: fused_pairs(step.pairs + step.pads),
}
