"""What CUDA will be asked to do for a list of calls, from shapes, strides and dtypes alone: no GPU needed.

The rules are PyTorch's (aten/src/ATen/native/cuda/Copy.cu, ForeachBinaryOpList.cu, MultiTensorApply.cuh,
ForeachUtils.h), for CUDA builds of torch 2.6 and later. Tensors on the CPU count as device memory, unless the
partner lies elsewhere: then the copy comes from the host, or goes there. A source on `meta` stands for one to
come, on its destination's device. To add a kind of launch: a row in lib/kinds.py, a branch in `launches`.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest

import torch
from torch import Tensor

from lib.copies import DEFAULT_DMA_BYTES, FUSED_DTYPES, Call, can_fuse, place
from lib.kinds import KINDS, Kind, Launch

__all__ = ["KINDS", "Kind", "Launch", "explain", "foreach_launches", "launches"]

Tensors = Sequence[Tensor]
ONE_KERNEL = {"fill_": "fill", "fused": "fused"}  # operations that are one kernel -> its kind


@dataclass(frozen=True)
class ForeachLimits:
    """What one multi-tensor launch over two lists can hold (MultiTensorApply.cuh)."""

    tensors: int = 64
    chunks: int = 320
    chunk_elements: int = 65_536


SMALL_ARGUMENTS = ForeachLimits()  # 4 KB of kernel arguments
LARGE_ARGUMENTS = ForeachLimits(tensors=448, chunks=2_240)  # 32 KB, pytorch pull request 178641


def foreach_limits() -> ForeachLimits:
    """The installed build's: 32 KB of arguments for CUDA 13 from torch 2.12 on (inferred from the date)."""
    major, minor, *_ = torch.__version__.split(".")
    cuda, *_ = (torch.version.cuda or "0").split(".")
    if int(cuda) >= 13 and (int(major), int(minor)) >= (2, 12):
        return LARGE_ARGUMENTS
    return SMALL_ARGUMENTS


def launches(calls: Iterable[Call]) -> list[Launch]:
    """What CUDA would be asked to do for these calls, in order.

    Raises what `_foreach_copy_` would: NotImplementedError for a dtype that its kernel is not built for,
    RuntimeError for empty lists or lists of different length.
    """
    made: list[Launch] = []
    for op, dsts, srcs, *_ in calls:
        if op == "copy_":
            made += copy_launches(dsts[0], srcs[0])
        elif op == "foreach":
            made += foreach_launches(dsts, srcs)
        elif op in ONE_KERNEL:
            made += kernel_launches(ONE_KERNEL[op], dsts)
    return made


def kernel_launches(kind: str, dsts: Tensors) -> list[Launch]:
    """A fill or a fused call: one kernel, none for zero elements."""
    nbytes = sum(dst.nbytes for dst in dsts)
    if nbytes == 0:
        return []
    return [Launch(kind, len(dsts), nbytes, "one kernel for the call")]


def copy_launches(dst: Tensor, src: Tensor) -> list[Launch]:
    """`dst.copy_(src)`: a driver memcpy where one dtype lies alike on both sides, else a kernel (Copy.cu).

    Nothing is launched for zero elements, nor for a memcpy onto itself. (A kernel over more than 2**31
    elements is split into several; that is not modelled.)
    """
    if dst.numel() == 0 or dst is src:
        return []
    if src.device != dst.device and not src.is_meta:
        return between_devices(dst, src)
    found = obstacles(dst, src)
    if found:
        reason = "; ".join(found)
        return [Launch("elementwise", 1, dst.nbytes, reason)]
    if place(dst) == place(src):
        return []
    reason = "same dtype, both contiguous"
    return [Launch("memcpy", 1, dst.nbytes, reason)]


def between_devices(dst: Tensor, src: Tensor) -> list[Launch]:
    """The host converts; what is strided on the device goes by a contiguous copy there (Copy.cu).

    A pinned source spares the host its wait only where the caller asks for non_blocking=True.
    """
    made = []
    if src.device.type == "cpu":
        reason = "pinned" if src.is_pinned() else "pageable: the call waits for the copy"
        made.append(Launch("htod", 1, dst.nbytes, reason))
        on_device = dst
    else:
        kind = "dtoh" if dst.device.type == "cpu" else "memcpy"
        reason = f"from {src.device} to {dst.device}"
        made.append(Launch(kind, 1, dst.nbytes, reason))
        on_device = src
    if not on_device.is_contiguous():
        reason = "between strided and contiguous"
        made.append(Launch("elementwise", 1, on_device.nbytes, reason))
    return made if on_device is dst else made[::-1]


def foreach_launches(dsts: Tensors, srcs: Tensors, limits: ForeachLimits | None = None) -> list[Launch]:
    """`torch._foreach_copy_(dsts, srcs)`: fused kernels, or silently one copy a pair."""
    if not dsts or len(dsts) != len(srcs):
        raise RuntimeError(f"_foreach_copy_: expected equal lists, got {len(dsts)} and {len(srcs)} tensors")
    obstacle = slow_because(dsts, srcs)
    if obstacle is None:
        made = chunked_launches(dsts, limits or foreach_limits())
        # Chunks of one call have the same reason, calls in a row for other dtype pairs have another.
        dtypes = f"{srcs[0].dtype} to {dsts[0].dtype}"
        reason = f"one kernel for all pairs of {dtypes}"
        return [replace(launch, reason=reason) for launch in made]
    made = []
    for dst, src in zip(dsts, srcs):
        made += copy_launches(dst, src)
    return [replace(launch, reason=f"slow path: {obstacle}") for launch in made]


def slow_because(dsts: Tensors, srcs: Tensors) -> str | None:
    """What keeps a call off the fused kernel (ForeachUtils.h `can_use_fast_route`, dtypes as of 2026)."""
    dst, src = dsts[0], srcs[0]
    first = f"{src.dtype} to {dst.dtype}"
    device = dst.device
    for i, (dst, src) in enumerate(zip(dsts, srcs)):
        dtypes = f"{src.dtype} to {dst.dtype}"
        if dtypes != first:
            return f"pair {i}: {dtypes}, the first {first}"
        devices = {dst.device, device if src.is_meta else src.device}
        if devices != {device}:
            return f"pair {i}: from {src.device} to {dst.device}, the first is on {device}"
        if dst.shape != src.shape:
            return f"pair {i}: shapes {tuple(dst.shape)}, {tuple(src.shape)}"
        if not same_dense_layout(dst, src):
            return f"pair {i}: strides {dst.stride()}, {src.stride()}"
    return None


def same_dense_layout(dst: Tensor, src: Tensor) -> bool:
    """Whether a pair lies in memory alike, without gaps or repeats; dimensions of size 1 do not count."""
    expected = 1
    for dst_stride, src_stride, size in sorted(zip(dst.stride(), src.stride(), dst.shape)):
        gap = dst_stride != expected and dst.numel() > 0
        if size != 1 and (gap or dst_stride != src_stride):
            return False
        expected *= size
    return True


def chunked_launches(dsts: Tensors, limits: ForeachLimits) -> list[Launch]:
    """Follow multi_tensor_apply: a launch goes out when its table of tensors or of chunks is full."""
    dtype = dsts[0].dtype
    if dtype not in FUSED_DTYPES and dtype.itemsize > 1:
        raise NotImplementedError(f'"foreach_tensor_copy" not implemented for {dtype}')
    made: list[tuple[int, int]] = []
    tensors = chunks = elements = 0
    for dst in dsts:
        left = dst.numel()
        tensors += left > 0
        while left > 0:
            size = min(left, limits.chunk_elements)
            left -= size
            chunks += 1
            elements += size
            if chunks == limits.chunks or (left == 0 and tensors == limits.tensors):
                made.append((tensors, elements * dtype.itemsize))
                tensors = int(left > 0)
                chunks = elements = 0
    if chunks:
        made.append((tensors, elements * dtype.itemsize))
    return [Launch("foreach", *sizes, "one kernel") for sizes in made]


def obstacles(dst: Tensor, src: Tensor) -> dict[str, str]:
    """What keeps `dst.copy_(src)` from being a memcpy, each with what would help."""
    found = {}
    if dst.dtype != src.dtype:
        found[f"converts {src.dtype} to {dst.dtype}"] = f"have the producer write {dst.dtype}"
    if dst.is_conj() != src.is_conj() or dst.is_neg() != src.is_neg():
        found["a conjugate or negative view on one side only"] = "have the producer resolve it"
    strides = f"strides {dst.stride()} and {src.stride()}"
    if dst.shape != src.shape:
        found[f"broadcasts {tuple(src.shape)} to {tuple(dst.shape)}"] = "a source of equal shape"
    elif not same_dense_layout(dst, dst):
        found[f"the destination has gaps: {strides}"] = "dense buffers per captured size, or Triton"
    elif not same_dense_layout(dst, src):
        found[f"the source lies otherwise: {strides}"] = "write it contiguous at its producer, or Triton"
    return found


NO_LAUNCH = Launch(
    kind="none",
    n_copies=0,
    bytes=0,
    reason="no elements, onto itself, or in host memory",
)


@dataclass(frozen=True)
class Explanation:
    """How one pair is copied, and what would make it cheaper.

    kind: of its launch, "none" where nothing is launched. shares: how many pairs that launch serves.
    """

    name: str
    dst: str
    src: str
    bytes: int
    kind: str
    shares: int
    reason: str
    better: str


def explain(calls: Iterable[Call], names: Sequence[str] | None = None) -> list[Explanation]:
    """Say for each pair (or fill) of these calls how CUDA copies it, why, and what would be better.

    names: one a pair, in the order of the calls.
    """
    calls = list(calls)
    copies = [call for call in calls if call.op == "copy_"]
    single = Counter(group_of(call.dsts[0], call.srcs[0]) for call in copies)
    rows = []
    for call in calls:
        made = launches([call])
        ends = list(accumulate(launch.n_copies for launch in made))
        served = 0
        for dst, src in zip_longest(call.dsts, call.srcs):
            launch = NO_LAUNCH
            if made and dst.numel() > 0:
                number = bisect(ends, served)
                launch = made[min(number, len(made) - 1)]
                served += 1
            row = Explanation(
                name=names[len(rows)] if names else f"pair {len(rows)}",
                dst=described(dst),
                src=described(dst if src is None else src),
                bytes=dst.nbytes,
                kind=launch.kind,
                shares=launch.n_copies,
                reason=launch.reason,
                better=advice(launch, dst, src, single),
            )
            rows.append(row)
    return rows


def described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype)[6:]}"


def group_of(dst: Tensor, src: Tensor) -> tuple | None:
    """What pairs of one foreach call have in common; None for a pair that cannot, or need not, join one."""
    large = dst.nbytes >= DEFAULT_DMA_BYTES and dst.dtype == src.dtype
    if large or not can_fuse(dst, src):
        return None
    return dst.device, dst.dtype, src.dtype


def advice(launch: Launch, dst: Tensor, src: Tensor | None, single: Counter) -> str:
    if launch.kind == "htod":
        return "PackedInputs: one upload for all fields of the host"
    if launch.kind in ("none", "dtoh"):
        return "nothing to gain by grouping"
    if launch.kind == "fill":
        return "let the padding ride along in a group"
    if launch.kind in ("foreach", "fused"):
        return "one fused kernel for all dtypes; none where the producer writes in place"
    if launch.reason.startswith("slow path"):
        return "group by dtype pair and layout"
    group = group_of(dst, src)
    others = single[group] - 1
    if group is not None and others > 0:
        return f"one foreach call with {others} others"
    remedies = "; ".join(obstacles(dst, src).values())
    return remedies or "large or alone: only not copying, or one kernel for all dtypes"
