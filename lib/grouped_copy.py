"""Copy many small tensors into static buffers with few launches. One file, torch only: take it away.

An engine that replays a CUDA graph first copies the step's inputs into the graph's static buffers. One
`copy_()` a field is one launch a field, each several microseconds of host work for a few hundred bytes.
`grouped_foreach_copy_` does the same with one launch per (destination dtype, source dtype) pair.

It is a drop-in for SGLang's `_grouped_foreach_copy_` (pull request 28465), with three differences: its inputs
are checked before the first byte is written; pairs that the fused kernel cannot take no longer drag their
whole group onto the slow path; and bits arrive as they were, NaN payloads of half types included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_foreach_copy_ = getattr(torch, "_foreach_copy_", None)

# What PyTorch's fused kernel is built for in every release since 2.6 (ForeachBinaryOpList.cu). For any other
# dtype, uint16/32/64, complex32, float8_e8m0fnu or float4, it raises on CUDA where `copy_` would not.
FUSED_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)

# The fused kernel passes these through float32, which may change a NaN's payload, and older releases lack the
# fp8 ones altogether. A pair that does not convert is copied as integers of the same width: exact everywhere.
SAME_WIDTH_INT = {torch.float16: torch.int16, torch.bfloat16: torch.int16} | {
    getattr(torch, name): torch.uint8
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
}

_INTEGERS = frozenset(d for d in FUSED_DTYPES if not d.is_floating_point and not d.is_complex)


def grouped_foreach_copy_(
    dsts: Sequence[Tensor], srcs: Sequence[Tensor], names: Sequence[str] | None = None
) -> None:
    """Copy `srcs[i]` into `dsts[i]` for every i: the effect of a loop of `copy_`, in few launches.

    One `torch._foreach_copy_` per (dst dtype, src dtype) pair, in the order in which the pairs first appear.
    Grouping by the *pair* is a matter of correctness: until January 2026 the fused kernel took equal source
    dtypes with mixed destination dtypes for one dtype and wrote wrong values (pytorch issue 173383). What the
    kernel cannot take (see `group_pairs`) goes to `copy_`, as does everything where torch lacks the op.

    Args:
        dsts: tensors of any shape and dtype; non-contiguous, 0-dim and empty ones are fine.
        srcs: as many tensors, each of exactly its destination's shape, on its device; dtypes may differ.
        names: what to call the pairs in errors, e.g. field names.

    Raises:
        ValueError: as `check_pairs`; nothing has been written then.
    """
    check_pairs(dsts, srcs, names)
    copy_groups(dsts, srcs, *group_pairs(dsts, srcs))


def copy_groups(
    dsts: Sequence[Tensor], srcs: Sequence[Tensor], groups: Sequence[Sequence[int]], singles: Sequence[int]
) -> None:
    """Copy each group by one `_foreach_copy_` and each single by `copy_`; nothing is checked here."""
    for group in groups:
        group_dsts, group_srcs = [dsts[i] for i in group], [srcs[i] for i in group]
        dtype = SAME_WIDTH_INT.get(group_dsts[0].dtype)
        if dtype is not None and group_srcs[0].dtype == group_dsts[0].dtype:
            group_dsts = [t.view(dtype) for t in group_dsts]
            group_srcs = [t.view(dtype) for t in group_srcs]
        _foreach_copy_(group_dsts, group_srcs)
    for i in singles:
        dsts[i].copy_(srcs[i])


def group_pairs(dsts: Sequence[Tensor], srcs: Sequence[Tensor]) -> tuple[list[list[int]], list[int]]:
    """Split pairs into groups for one `_foreach_copy_` each, and the ones left to `copy_`, as indices.

    A group shares device, destination dtype and source dtype. Left to `copy_` are pairs that would make the
    fused kernel raise (`FUSED_DTYPES`) or, silently, run the whole call as a loop of `copy_`: other strides
    than the partner's, gaps, a conjugate or negative bit (`can_use_fast_route` in ForeachUtils.h).
    """
    groups: dict[tuple, list[int]] = {}
    singles: list[int] = []
    for i, (dst, src) in enumerate(zip(dsts, srcs)):
        dst_dtype, src_dtype = dst.dtype, src.dtype
        fusable = dst_dtype in FUSED_DTYPES and src_dtype in FUSED_DTYPES
        if not fusable:
            fusable = dst_dtype == src_dtype and dst_dtype in SAME_WIDTH_INT
        if fusable and _foreach_copy_ is not None and same_dense_layout(dst, src) and not _lazy(dst, src):
            groups.setdefault((dst.device, dst_dtype, src_dtype), []).append(i)
        else:
            singles.append(i)
    return list(groups.values()), singles


def _lazy(dst: Tensor, src: Tensor) -> bool:
    """Whether a conj or neg bit is set, which integers never carry."""
    return (dst.dtype not in _INTEGERS and (dst.is_conj() or dst.is_neg())) or (
        src.dtype not in _INTEGERS and (src.is_conj() or src.is_neg())
    )


def same_dense_layout(dst: Tensor, src: Tensor) -> bool:
    """Whether both of a pair of equal shapes lie in memory alike, without gaps or repeats.

    Strides of size-1 dimensions do not count (PyTorch since 2.5).
    """
    if dst.is_contiguous() and src.is_contiguous():
        return True
    dims = [(d, s, n) for n, d, s in zip(dst.shape, dst.stride(), src.stride()) if n != 1]
    if any(d != s for d, s, _ in dims):
        return False
    expected = 1
    for stride, _, size in sorted(dims):
        if stride != expected:
            return False
        expected *= size
    return True


def check_pairs(dsts: Sequence[Tensor], srcs: Sequence[Tensor], names: Sequence[str] | None = None) -> None:
    """Raise ValueError for what a loop of `copy_` would do wrong, refuse half-way or do in some order only.

    That is: lists of different length (a `zip` drops the rest); shapes that are not equal (`copy_`
    broadcasts); partners on different devices (`copy_` synchronises); a layout other than strided; a
    destination that overlaps itself, its own source in part, or any tensor of another pair; a destination
    that autograd or inference mode forbids to write. Sources may share memory with each other.
    """
    if len(dsts) != len(srcs):
        raise ValueError(
            f"expected one source a destination, got {len(dsts)} destinations, {len(srcs)} sources"
        )
    if names is not None and len(names) != len(dsts):
        raise ValueError(f"expected one name a pair, got {len(names)} names for {len(dsts)} pairs")

    strided = torch.strided
    forbids_grad, forbids_inference = torch.is_grad_enabled(), not torch.is_inference_mode_enabled()
    spans: list[tuple[int, int, int, bool]] = []  # first byte, end, pair, whether a destination
    for i, (dst, src) in enumerate(zip(dsts, srcs)):
        if dst.shape != src.shape:
            raise ValueError(f"{_pair(i, names, dst, src)}: expected equal shapes")
        if dst.device != src.device:
            raise ValueError(
                f"{_pair(i, names, dst, src)}: expected one device, got {dst.device} and {src.device}"
            )
        if dst.layout != strided or src.layout != strided:
            raise ValueError(
                f"{_pair(i, names, dst, src)}: expected strided, got {dst.layout} and {src.layout}"
            )
        if forbids_grad and dst.requires_grad:
            raise ValueError(f"{_pair(i, names, dst, src)}: destination requires grad; copy under no_grad()")
        if forbids_inference and dst.is_inference():
            raise ValueError(f"{_pair(i, names, dst, src)}: destination is an inference tensor")
        if not dst.is_contiguous() and overlaps_itself(dst):
            raise ValueError(
                f"{_pair(i, names, dst, src)}: destination overlaps itself, strides {dst.stride()}"
            )
        if dst.numel() and not dst.is_meta:  # no memory, nothing to share
            start, end = _byte_span(dst)
            spans.append((start, end, i, True))
            start, end = _byte_span(src)
            spans.append((start, end, i, False))

    spans.sort()
    reach = 0
    for span in spans:
        if span[0] < reach:
            return _check_overlaps(spans, dsts, srcs, names)
        reach = span[1]
    return None


def _check_overlaps(spans: list[tuple], dsts, srcs, names) -> None:
    """The exact check, for spans of bytes of which some cross: sources may, columns of one matrix do."""
    active: list[tuple] = []  # spans that reach past the start of the current one
    for span in spans:
        active = [other for other in active if other[1] > span[0]]
        for other in active:
            if not (span[3] or other[3]):
                continue
            (_, _, i, _), (_, _, j, _) = (span, other) if span[3] else (other, span)
            s, t = ((dsts if is_dst else srcs)[k] for _, _, k, is_dst in (span, other))
            if _forbidden_overlap(s, t, same_pair=i == j):
                what = "its own source, in part" if i == j else f"memory of {_name(j, names)}"
                raise ValueError(f"{_pair(i, names, dsts[i], srcs[i])}: destination shares {what}")
        active.append(span)


def overlaps_itself(t: Tensor) -> bool:
    """Whether two elements of a strided tensor lie at one address (an expanded dimension, say)."""
    if t.numel() == 0:
        return False
    dims = sorted((stride, size) for size, stride in zip(t.shape, t.stride()) if size != 1)
    reach = 0
    for stride, size in dims:
        if stride == 0:
            return True
        if stride <= reach:  # interleaved dimensions: only the addresses themselves can tell
            return _element_offsets(t).unique().numel() != t.numel()
        reach += stride * (size - 1)
    return False


def _byte_span(t: Tensor) -> tuple[int, int]:
    start = t.data_ptr()
    if t.is_contiguous():
        return start, start + t.nbytes
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
    return start, start + (last + 1) * t.element_size()


def _forbidden_overlap(s: Tensor, t: Tensor, same_pair: bool) -> bool:
    """Whether two tensors share a byte; a pair whose two sides are the same elements is let through."""
    if same_pair and s.data_ptr() == t.data_ptr() and s.element_size() == t.element_size():
        dims = zip(s.shape, s.stride(), t.stride())
        if all(a == b for n, a, b in dims if n != 1):
            return False
    if s.is_contiguous() and t.is_contiguous():
        return True
    return bool(torch.isin(_byte_addresses(s), _byte_addresses(t)).any())


def _element_offsets(t: Tensor) -> Tensor:
    """int64 offsets, in elements, of every element of `t` from its first, flat, on the CPU."""
    offsets = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(t.shape, t.stride()):
        offsets = (offsets[:, None] + torch.arange(size) * stride).flatten()
    return offsets


def _byte_addresses(t: Tensor) -> Tensor:
    itemsize = t.element_size()
    return (t.data_ptr() + (_element_offsets(t) * itemsize)[:, None] + torch.arange(itemsize)).flatten()


def _name(i: int, names: Sequence[str] | None) -> str:
    return f"pair {i}" if names is None else names[i]


def _pair(i: int, names: Sequence[str] | None, dst: Tensor, src: Tensor) -> str:
    sides = (f"{side} {tuple(t.shape)} {t.dtype}" for side, t in (("destination", dst), ("source", src)))
    return f"{_name(i, names)} ({', '.join(sides)})"
