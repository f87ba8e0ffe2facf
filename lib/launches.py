"""What CUDA will be asked to do for a list of calls, from shapes, strides and dtypes alone: no GPU needed.

The rules are PyTorch's (aten/src/ATen/native/cuda: Copy.cu, MultiTensorApply.cuh; ForeachUtils.h), for CUDA
builds of torch 2.6 and later; that a kernel over more than 2**31 elements is split is left out. Tensors on
the CPU count as device memory, unless the partner lies elsewhere: then as the host's. A source on `meta` is
one to come, on its destination's device. A new kind of launch: a row in lib/kinds.py, a branch in `served`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat

import torch
from torch import Tensor

from lib.copies import FUSED_DTYPES, Call, Tensors, grouped_dma, is_lazy, place
from lib.kinds import KINDS, Launch


def foreach_limits() -> tuple[int, int]:
    """Tensors and chunks that one launch over two lists can hold in this build (MultiTensorApply.cuh)."""
    # 32 KB of arguments in place of 4: pytorch pull request 178641, its release inferred from the date.
    if torch.__version__ >= "2.12.0.dev0" and (torch.version.cuda or "0") >= "13":
        return 448, 2_240
    return 64, 320


def launches(calls: Iterable[Call]) -> list[Launch]:
    """What CUDA would be asked to do for these calls, in order. Raises as `_foreach_copy_` for its dtypes."""
    return [launch for call in calls for launch, _ in served(call)]


def served(call: Call) -> Iterator[tuple]:
    """The launches of a call, each with the numbers of the pairs that it serves."""
    op, dsts, srcs = call[:3]
    kind = op.strip("_")
    slow = op == "foreach" and slow_because(dsts, srcs)
    if op == "copy_" or slow:
        for i, pair in enumerate(zip(dsts, srcs)):
            for launch in of_copy(*pair):
                yield replace(launch, reason=slow or launch.reason), [i]
    elif op == "foreach":
        dtype = dsts[0].dtype
        if dtype not in FUSED_DTYPES and dtype.itemsize > 1:
            raise NotImplementedError(f'"foreach_tensor_copy" not implemented for {dtype}')
        reason = f"one kernel for all pairs of {srcs[0].dtype} to {dtype}"
        for table in tables(map(Tensor.numel, dsts), *foreach_limits()):
            nbytes = table.total() * dtype.itemsize
            kernel = Launch(kind, len(table), nbytes, reason)
            yield kernel, table
    elif kind in KINDS:  # "fill" or "fused"
        nbytes = sum(dst.nbytes for dst in dsts)
        if nbytes:
            kernel = Launch(kind, len(dsts), nbytes, "one kernel for the call")
            yield kernel, range(len(dsts))
    elif op != "host_copy_":
        raise ValueError(f"op: expected one of a Call, got {op!r}")


def of_copy(dst: Tensor, src: Tensor) -> Iterator[Launch]:
    """`dst.copy_(src)`: a driver memcpy where one dtype lies alike on both sides, else a kernel (Copy.cu)."""
    if dst.numel() == 0 or dst is src:
        return
    found = obstacles(dst, src)
    if src.device != dst.device and not src.is_meta:
        yield from between_devices(dst, src)
    elif found:
        yield Launch("elementwise", 1, dst.nbytes, "; ".join(found))
    elif place(dst) != place(src):
        yield Launch("memcpy", 1, dst.nbytes, "same dtype, both contiguous")


def between_devices(dst: Tensor, src: Tensor) -> Iterator[Launch]:
    """The host converts; what is strided on the device goes by a contiguous copy there (Copy.cu)."""
    if src.device.type == "cpu":
        reason = "pinned" if src.is_pinned() else "pageable: the call waits for the copy"
        yield Launch("htod", 1, dst.nbytes, reason)
        yield from repacked(dst)
    else:
        kind = "dtoh" if dst.device.type == "cpu" else "memcpy"
        yield from repacked(src)
        yield Launch(kind, 1, dst.nbytes, f"from {src.device} to {dst.device}")


def repacked(on_device: Tensor) -> Iterator[Launch]:
    if not on_device.is_contiguous():
        yield Launch("elementwise", 1, on_device.nbytes, "between strided and contiguous")


def slow_because(dsts: Tensors, srcs: Tensors) -> str:
    """What sends a foreach call down the slow path, one copy a pair (ForeachUtils.h `can_use_fast_route`)."""
    device = dsts[0].device
    first = device, device, dsts[0].dtype, srcs[0].dtype
    for i, (dst, src) in enumerate(zip(dsts, srcs, strict=True)):
        of = device if src.is_meta else src.device
        if (dst.device, of, dst.dtype, src.dtype) != first:
            return f"slow path: pair {i}: {src.dtype} on {of} to {dst.dtype} on {dst.device}"
        for obstacle in apart(dst, src):
            return f"slow path: pair {i}: {obstacle}"
    return ""


def tables(sizes: Iterable[int], tensors: int, chunks: int, chunk: int = 65_536) -> Iterator[Counter]:
    """The launches of multi_tensor_apply for these sizes: tensor -> elements, for each.

    One goes out when its table of tensors or of chunks is full; what it breaks off goes on in the next.
    """
    made = [Counter()]
    n_chunks = 0
    for i, size in enumerate(sizes):
        for left in range(size, 0, -chunk):
            made[-1][i] += min(left, chunk)
            n_chunks += 1
            is_full = left <= chunk and len(made[-1]) == tensors
            if is_full or n_chunks == chunks:
                made.append(Counter())
                n_chunks = 0
    return filter(None, made)


def obstacles(dst: Tensor, src: Tensor) -> dict[str, str]:
    """What keeps `dst.copy_(src)` from being a memcpy, each with what would help."""
    found = apart(dst, src)
    if dst.dtype != src.dtype:
        found[f"converts {src.dtype} to {dst.dtype}"] = f"have the producer write {dst.dtype}"
    if is_lazy(dst) != is_lazy(src):
        found["a conjugate or negative view on one side only"] = "have the producer resolve it"
    return found


def apart(dst: Tensor, src: Tensor) -> dict[str, str]:
    """What keeps a pair from lying in memory alike, without gaps or repeats, and what would help."""
    strides = f"strides {dst.stride()} and {src.stride()}"
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(dst)
    dims = zip(dst.shape, dst.stride(), src.stride())
    if dst.shape != src.shape:
        shapes = f"{tuple(src.shape)} to {tuple(dst.shape)}"
        return {f"broadcasts {shapes}": "a source of equal shape"}
    if not is_dense:
        return {f"the destination has gaps: {strides}": "dense buffers per captured size, or Triton"}
    if any(to != of for size, to, of in dims if size != 1):
        return {f"the source lies otherwise: {strides}": "write it contiguous at its producer, or Triton"}
    return {}


@dataclass
class Explanation:
    """How one pair is copied, and what would be better. shares: how many pairs that launch serves."""

    name: str
    dst: str
    bytes: int
    kind: str
    shares: int
    reason: str
    better: str


NO_LAUNCH = Launch("none", 0, 0, "no elements, onto itself, or in host memory")
ADVICE = {  # kind of launch -> what would be better, whatever is copied
    "none": "nothing to gain by grouping",
    "dtoh": "nothing to gain by grouping",
    "htod": "PackedInputs: one upload for all fields of the host",
    "fill": "let the padding ride along in a group",
    "foreach": "one fused kernel for all dtypes; none where the producer writes in place",
    "fused": "none where the producer writes in place",
}


def explain(calls: Iterable[Call], names: Iterable[str] = ()) -> list[Explanation]:
    """How CUDA copies each pair (or fill) of these calls, named in order, why, and what would be better."""
    calls = list(calls)
    names = chain(names, repeat(""))
    single = [(call.dsts[0], call.srcs[0]) for call in calls if call.op == "copy_"]
    others = {}  # that a single copy could go together with
    for group in grouped_dma(single):
        n_others = len(group.dsts) - 1
        others |= dict.fromkeys(map(id, group.dsts), n_others)
    rows = []
    for call in calls:
        serving = {}
        for launch, pairs in served(call):
            serving = dict.fromkeys(pairs, launch) | serving  # of several the first
        for i, (dst, src) in enumerate(zip(call.dsts, call.srcs or call.dsts)):
            launch = serving.get(i, NO_LAUNCH)
            rows.append(
                Explanation(
                    name=next(names),
                    dst=f"{tuple(dst.shape)} {dst.dtype}",
                    bytes=dst.nbytes,
                    kind=launch.kind,
                    shares=launch.n_copies,
                    reason=launch.reason,
                    better=advice(launch, dst, src, others.get(id(dst), 0)),
                )
            )
    return rows


def advice(launch: Launch, dst: Tensor, src: Tensor, others: int) -> str:
    """What would be better, where a foreach call could take along so many others."""
    if launch.kind in ADVICE:
        return ADVICE[launch.kind]
    if launch.reason.startswith("slow path"):
        return "group by dtype pair and layout"
    if others:
        return f"one foreach call for {others + 1} fields"
    remedies = "; ".join(obstacles(dst, src).values())
    return remedies or "large or alone: only not copying, or one kernel for all dtypes"
