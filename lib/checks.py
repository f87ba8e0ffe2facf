"""What must hold before a byte is written: for setting up and for finding faults, not for every step.

A loop of `copy_` would broadcast, wait for another device, write half of the pairs and then raise, or depend
on its order. `check_pairs` refuses all of that beforehand and names the pair.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

Tensors = Sequence[Tensor]
PLAIN = {Tensor, nn.Parameter}


def check_pairs(dsts: Tensors, srcs: Tensors, names: Sequence[str] | None = None) -> None:
    """Raise ValueError, with the pair's name, for what a loop of `copy_` would do wrong or half-way.

    That is: lists of different length; what is no tensor, or of another class than its partner, or nested,
    sparse or quantized; shapes or devices that differ; dtypes that torch does not convert; a destination that
    autograd or inference mode forbids to write, that overlaps itself, or that shares bytes with a tensor of
    another pair or in part with its own source. Sources may share memory, and the same pair may stand twice.

    Memory is compared by ranges of bytes, first to last, of up to 64 rows with gaps in between row by row.
    So columns of one matrix that interleave are refused, although no byte is shared.
    """
    if names is None:
        names = [f"pair {i}" for i in range(len(dsts))]
    counts = len(dsts), len(srcs), len(names)
    if len(set(counts)) > 1:
        raise ValueError(f"expected equal numbers of destinations, sources and names, got {counts}")
    for name, dst, src in zip(names, dsts, srcs):
        fault = fault_of(dst, src)
        if fault:
            raise ValueError(f"{name}: {fault}")
    check_overlaps(dsts, srcs, names)


def fault_of(dst: Tensor, src: Tensor) -> str:
    """What is wrong with a pair by itself; "" if nothing."""
    for side, tensor in (("destination", dst), ("source", src)):
        if not isinstance(tensor, Tensor):
            return f"expected a tensor as {side}, got {type(tensor)}"
        if tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided:
            got = f"{tensor.layout}, {tensor.dtype}"
            return f"expected a strided {side}, neither nested nor quantized, got {got}"
    classes = {type(dst), type(src)}
    if len(classes) > 1 and not classes <= PLAIN:
        return f"expected a source of {type(dst)}, got {type(src)}"
    if dst.shape != src.shape:
        return f"expected a source of shape {tuple(dst.shape)}, got {tuple(src.shape)}"
    if dst.device != src.device:
        return f"expected a source on {dst.device}, got {src.device}"
    if not can_convert(dst.dtype, src.dtype, src.is_neg()):
        return f"expected a source that converts to {dst.dtype}, got {src.dtype}, neg bit {src.is_neg()}"
    if torch.is_grad_enabled() and dst.requires_grad:
        return "expected a destination without grad; copy under no_grad()"
    if dst.is_inference() and not torch.is_inference_mode_enabled():
        return "expected no inference tensor as destination; copy under inference_mode()"
    if may_overlap_itself(dst):
        return f"expected a destination that does not overlap itself, got strides {dst.stride()}"
    return ""


@cache
def can_convert(dst: torch.dtype, src: torch.dtype, is_neg: bool) -> bool:
    """Whether `copy_` takes this pair of dtypes; some, float4 among them, it refuses, or cannot negate."""
    source = torch.empty(1, dtype=src)
    if is_neg:
        source = torch._neg_view(source)
    try:
        torch.empty(1, dtype=dst).copy_(source)
    except RuntimeError:
        return False
    return True


def may_overlap_itself(tensor: Tensor) -> bool:
    """Whether two elements may lie at one address: a stride that smaller ones reach over."""
    reached = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride <= reached:
            return tensor.numel() > 0
        reached += stride * (size - 1)
    return False


def check_overlaps(dsts: Tensors, srcs: Tensors, names: Sequence[str]) -> None:
    """Sorted by first byte, a destination may start inside nothing, a source inside no destination."""
    pairs = {}  # each once
    for name, dst, src in zip(names, dsts, srcs):
        pairs[elements(dst), elements(src)] = name, dst, src
    ranges = []
    for (written, read), (name, dst, src) in pairs.items():
        for row in byte_ranges(dst):
            ranges.append((*row, "destination", name))
        if read == written:
            continue
        for row in byte_ranges(src):
            ranges.append((*row, "source", name))
    reached = written = ("", 0, "")  # where the last range so far ends, of any tensor and of a destination
    for space, first, end, side, name in sorted(ranges):
        is_dst = side == "destination"
        last = reached if is_dst else written
        if (space, first) < last[:2]:
            raise ValueError(f"{name}: {side} shares memory with {last[2]}")
        here = space, end, name
        reached = max(reached, here)
        if is_dst:
            written = here


def elements(tensor: Tensor) -> tuple:
    """Equal for two tensors that are the same elements, seen alike."""
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def byte_ranges(tensor: Tensor, most: int = 64) -> list:
    """Where a tensor lies: an address space, first byte and end, of each row that counts for itself.

    On `meta` there are offsets in place of addresses, so that each storage is a space of its own.
    """
    if tensor.numel() == 0 or not (tensor.is_meta or tensor.data_ptr()):
        return []
    may_split = tensor.dim() > 1 and len(tensor) <= most
    if may_split and tensor.stride(0) > extent(tensor[0]):  # gaps between rows
        rows = []
        for row in tensor:
            rows += byte_ranges(row, most // len(tensor))
        return rows
    space = f"meta {tensor.untyped_storage()._cdata}" if tensor.is_meta else str(tensor.device)
    first = tensor.data_ptr()
    end = first + extent(tensor) * tensor.element_size()
    return [(space, first, end)]


def extent(tensor: Tensor) -> int:
    """How many elements from its first to its last."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        count += (size - 1) * stride
    return count
