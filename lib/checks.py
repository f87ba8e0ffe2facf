"""What must hold before a byte is written: for setting up and for finding faults, not for every step.

A loop of `copy_` would broadcast, wait for another device, write half of the pairs and then raise, or depend on
its order. `check_pairs` refuses all of that beforehand and names the pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter)


def check_pairs(dsts: Sequence[Tensor], srcs: Sequence[Tensor], names: Sequence[str] | None = None) -> None:
    """Raise ValueError, with the pair's name, for what a loop of `copy_` would do wrong or half-way.

    That is: lists of different length; what is no tensor, a subclass with another partner, nested, sparse or
    quantized; shapes or devices that differ; dtypes that torch does not convert; a destination that autograd or
    inference mode forbids to write, that overlaps itself, or that shares bytes with a tensor of another pair or
    in part with its own source. Sources may share memory with each other, and the same pair may stand twice.

    Memory is compared by ranges of bytes, first to last. So columns of one matrix that interleave are refused,
    although no byte is shared.
    """
    names = range(len(dsts)) if names is None else names
    if not len(dsts) == len(srcs) == len(names):
        counts = f"{len(dsts)} destinations, {len(srcs)} sources and {len(names)} names"
        raise ValueError(f"expected one source and name a destination, got {counts}")
    for name, dst, src in zip(names, dsts, srcs):
        fault = fault_of(dst, src)
        if fault is not None:
            raise ValueError(f"{pair_name(name)}: {fault}")
    check_overlaps(dsts, srcs, names)


def pair_name(name: str | int) -> str:
    return f"pair {name}" if isinstance(name, int) else name


def fault_of(dst: Tensor, src: Tensor) -> str | None:
    """What is wrong with a pair by itself."""
    for side, t in (("destination", dst), ("source", src)):
        if not isinstance(t, Tensor):
            return f"expected a tensor as {side}, got {type(t).__name__}"
        if t.layout != torch.strided or t.is_nested or t.is_quantized:
            return f"expected a strided {side}, got {'nested' if t.is_nested else t.layout} {t.dtype}"
    if type(dst) is not type(src) and not (type(dst) in PLAIN and type(src) in PLAIN):
        return f"expected one class of tensors, got {type(dst).__name__} and {type(src).__name__}"
    if dst.shape != src.shape:
        return f"expected shape {tuple(dst.shape)}, got {tuple(src.shape)}"
    if dst.device != src.device:
        return f"expected a source on {dst.device}, got {src.device}"
    if not can_convert(dst.dtype, src.dtype):
        return f"expected a dtype that copy_ makes {dst.dtype} of, got {src.dtype}"
    if torch.is_grad_enabled() and dst.requires_grad:
        return "destination requires grad; copy under no_grad()"
    if dst.is_inference() and not torch.is_inference_mode_enabled():
        return "destination is an inference tensor; copy under inference_mode()"
    if may_overlap_itself(dst):
        return f"destination overlaps itself, strides {dst.stride()}"
    return None


@cache
def can_convert(dst: torch.dtype, src: torch.dtype) -> bool:
    """Whether `copy_` takes this pair of dtypes: some, float4 among them, it refuses."""
    try:
        torch.empty(1, dtype=dst).copy_(torch.empty(1, dtype=src))
    except RuntimeError:
        return False
    return True


def may_overlap_itself(t: Tensor) -> bool:
    """Whether two elements may lie at one address: a stride that smaller strides reach over."""
    reach = 0
    for stride, size in sorted(zip(t.stride(), t.shape)):
        if size == 1:
            continue
        if stride <= reach:
            return t.numel() > 0
        reach += stride * (size - 1)
    return False


def check_overlaps(dsts: Sequence[Tensor], srcs: Sequence[Tensor], names: Sequence[str]) -> None:
    """Sorted by their first byte, a destination may not start inside anything, a source inside no destination."""
    ranges, listed = [], set()
    for name, dst, src in zip(names, dsts, srcs):
        if elements(dst) not in listed:
            ranges.append((*byte_range(dst), True, pair_name(name)))
        if elements(src) != elements(dst):
            ranges.append((*byte_range(src), False, pair_name(name)))
        listed.add(elements(dst))
    ranges.sort()
    space, all_end, dst_end, owner, writer = "", 0, 0, "", ""
    for where, first, end, is_dst, name in ranges:
        if where != space:
            space, all_end, dst_end = where, 0, 0
        reached, other = (all_end, owner) if is_dst else (dst_end, writer)
        if first < reached:
            side = "destination" if is_dst else "source"
            whose = "its own pair, in part" if other == name else other
            raise ValueError(f"{name}: {side} shares memory with {whose}")
        if end > all_end:
            all_end, owner = end, name
        if is_dst:
            dst_end, writer = end, name


def elements(t: Tensor) -> tuple:
    """Equal for two tensors that are the same elements, seen alike."""
    storage = t.untyped_storage()._cdata if t.numel() else 0
    return storage, t.storage_offset(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()


def byte_range(t: Tensor) -> tuple[str, int, int]:
    """Where a tensor lies: an address space, its first byte there and its end; (…, 0, 0) where it has no bytes.

    Tensors on `meta` have offsets in place of addresses, each storage for itself.
    """
    if t.numel() == 0 or not (t.is_meta or t.data_ptr()):
        return "", 0, 0
    space = f"meta {t.untyped_storage()._cdata}" if t.is_meta else str(t.device)
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
    first = t.data_ptr()
    return space, first, first + (last + 1) * t.element_size()
