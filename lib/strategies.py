"""The named ways to fill static buffers, in the order in which the notebooks tell them.

A strategy is a function from a step to the calls that serve it: a new one is a function here and a line in
STRATEGIES. ROUTES has those that need pairs alone: their calls a `CopyPlan` or `ReplayCopies` can keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lib.checks import check_pairs
from lib.copies import DEFAULT_DMA_BYTES, FUSED_DTYPES, Call, grouped, grouped_dma
from lib.fused import MAX_PAIRS, FusedLaunch, describe
from lib.launches import obstacles

Pair = tuple[Tensor, Tensor]


@dataclass
class Step:
    """What a replay needs in its buffers.

    small, large: (destination, source) by field; large is what SGLang leaves out of the group, hidden_states.
    fills: (whole buffer, value), SGLang's way to pad. pads: (rows, constant), ours, to be copied along.
    """

    small: dict[str, Pair] = field(default_factory=dict)
    large: dict[str, Pair] = field(default_factory=dict)
    fills: list[tuple[Tensor, float]] = field(default_factory=list)
    pads: list[Pair] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        dsts: Sequence[Tensor],
        srcs: Sequence[Tensor],
        names: Sequence[str] | None = None,
    ) -> Step:
        """A step without padding; a pair from `DEFAULT_DMA_BYTES` on is large. Raises as `check_pairs`."""
        check_pairs(dsts, srcs, names)
        step = cls()
        for i, pair in enumerate(zip(dsts, srcs)):
            name = names[i] if names else f"pair {i}"
            large = dsts[i].nbytes >= DEFAULT_DMA_BYTES
            fields = step.large if large else step.small
            fields[name] = pair
        return step

    @property
    def pairs(self) -> list[Pair]:
        return [*self.small.values(), *self.large.values()]


def fills(step: Step) -> list[Call]:
    return [Call("fill_", [buffer], value=value) for buffer, value in step.fills]


def copies(pairs: Iterable[Pair]) -> list[Call]:
    return [Call("copy_", [dst], [src]) for dst, src in pairs]


def around(small: list[Call], step: Step) -> list[Call]:
    """As SGLang goes about it: fills first, the small fields in some way, large ones by `copy_`."""
    return fills(step) + small + copies(step.large.values())


def per_copy(step: Step) -> list[Call]:
    """One `copy_()` a field: SGLang before pull request 28465, and most engines today."""
    return fills(step) + copies(step.pairs)


def uint8_view(step: Step) -> list[Call]:
    """All small fields viewed as bytes, one foreach call for all: the first attempt of the pull request.

    Raises, with the field's name and before anything is written: RuntimeError where PyTorch cannot view a
    tensor as bytes (a last stride other than 1, a 0-dim tensor), ValueError for a pair that converts.
    """
    dsts = []
    srcs = []
    for name, (dst, src) in step.small.items():
        if dst.dtype != src.dtype:
            raise ValueError(f"{name}: bytes cannot convert, expected {dst.dtype}, got {src.dtype}")
        try:
            dsts.append(dst.view(torch.uint8))
            srcs.append(src.view(torch.uint8))
        except RuntimeError as error:
            raise RuntimeError(f"{name}: {error}") from error
    together = [Call("foreach", dsts, srcs)]
    return around(together if dsts else [], step)


def grouped_foreach(step: Step) -> list[Call]:
    """One `_foreach_copy_` per dtype pair, every field inside, `hidden_states` too."""
    return fills(step) + grouped(step.pairs)


def grouped_foreach_dma(step: Step, dma_bytes: int = DEFAULT_DMA_BYTES) -> list[Call]:
    """Small fields grouped, the rest by `copy_`: the design of pull request 28465."""
    return around(grouped(step.small.values(), dma_bytes), step)


def small_copy(step: Step) -> list[Call]:
    """SGLang since 0.5.21: one Triton kernel for all small fields where it takes them, else groups."""
    pairs = list(step.small.values())
    if not takes_small_copy(pairs):
        return around(grouped(pairs), step)
    filled = [pair for pair in pairs if pair[0].numel() > 0]
    small = [fused_call(filled)] if filled else []
    return around(small, step)


def copy_plan(step: Step) -> list[Call]:
    """As grouped_foreach_dma, with padding in the groups: the calls that a `CopyPlan` keeps."""
    return grouped_dma(step.pairs + step.pads)


def fused(step: Step) -> list[Call]:
    """One Triton kernel for fields of any dtypes and layouts, and their padding: lib/fused.py."""
    return fused_pairs(step.pairs + step.pads)


def fused_pairs(pairs: Iterable[Pair]) -> list[Call]:
    """A kernel for each 32 pairs; `copy_` for what it does not take, and for a large memcpy."""
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


def fused_call(pairs: Sequence[Pair]) -> Call:
    dsts, srcs = zip(*pairs)
    return Call("fused", dsts, srcs, kept=FusedLaunch(dsts, srcs))


# What SGLang 0.5.23's `try_small_copy` takes (kernels/ops/memory/small_copy.py).
SMALL_COPY_DTYPES = FUSED_DTYPES - {torch.complex64, torch.complex128}
SMALL_COPY_CONVERTS = {torch.int32, torch.int64}
SMALL_COPY_ELEMENTS = 8192


def takes_small_copy(pairs: Sequence[Pair]) -> bool:
    """Whether SGLang's kernel takes these pairs, all or none. Overlap is left to `check_pairs`."""
    devices = {tensor.device for pair in pairs for tensor in pair}
    if len(pairs) < 2 or len(devices) > 1:
        return False
    return all(takes_small_pair(*pair) for pair in pairs)


def takes_small_pair(dst: Tensor, src: Tensor) -> bool:
    """Equal dtypes or int32 <-> int64, one or two dimensions, a destination that runs forward in memory."""
    dtypes = {dst.dtype, src.dtype}
    if not dtypes <= SMALL_COPY_DTYPES:
        return False
    if len(dtypes) == 2 and dtypes != SMALL_COPY_CONVERTS:
        return False
    if dst.shape != src.shape or dst.dim() not in (1, 2):
        return False
    if dst.numel() > SMALL_COPY_ELEMENTS:
        return False
    if dst.is_neg() or src.is_neg():
        return False
    if dst.requires_grad or src.requires_grad:
        return False
    *outer, inner = dst.stride()
    row = max(dst.shape[-1], 1) * inner
    return inner > 0 and all(stride >= row for stride in outer)


ROUTES: dict[str, Callable] = {
    "copy_plan": grouped_dma,
    "fused": fused_pairs,
}

STRATEGIES: dict[str, Callable[[Step], list[Call]]] = {
    "per_copy": per_copy,
    "uint8_view": uint8_view,
    "grouped_foreach": grouped_foreach,
    "grouped_foreach_dma": grouped_foreach_dma,
    "small_copy": small_copy,
    "copy_plan": copy_plan,
    "fused": fused,
}
