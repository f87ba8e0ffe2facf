"""What CUDA will be asked to do for a copy, from shapes, strides and dtypes alone: no GPU needed.

The rules are PyTorch's (aten/src/ATen/native/cuda/Copy.cu, ForeachBinaryOpList.cu, MultiTensorApply.cuh,
ForeachUtils.h), for CUDA builds of torch 2.6 and later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lib.grouped_copy import (
    DEFAULT_DMA_BYTES,
    FUSED_DTYPES,
    SAME_WIDTH_INT,
    check_count,
    check_pairs,
    group_pairs,
    pair_names,
    same_dense_layout,
    split_large,
)


@dataclass(frozen=True)
class Launch:
    """One piece of work that the host puts on a CUDA stream.

    kind: "memcpy" (driver memcpy), "elementwise" (PyTorch's copy kernel), "foreach" (fused multi-tensor
        kernel), "fused" (one Triton kernel), "fill", or "graph" (a graph replay).
    n_copies: how many pairs it serves; 1 except for fused kernels.
    bytes: bytes written to destinations.
    reason: why it takes this way.
    call: the host call it comes from: "copy_", "foreach", "foreach_slow" (the loop of `copy_` inside one
        foreach call), "fill_", "triton" or "graph".
    """

    kind: str
    n_copies: int
    bytes: int
    reason: str
    call: str = "copy_"


@dataclass(frozen=True)
class ForeachLimits:
    """What one multi-tensor launch over two lists can hold (MultiTensorApply.cuh)."""

    tensors: int = 64
    chunks: int = 320
    chunk_elements: int = 65_536


SMALL_ARGUMENTS = ForeachLimits()  # 4 KB of kernel arguments
LARGE_ARGUMENTS = ForeachLimits(tensors=448, chunks=2_240)  # 32 KB, pytorch pull request 178641


def foreach_limits() -> ForeachLimits:
    """The limits of the installed build: 32 KB of kernel arguments for CUDA 13 from torch 2.12 on, else 4 KB.

    The release is inferred from the pull request's date; `lib.record` tells on a GPU whether it holds.
    """
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    cuda = int((torch.version.cuda or "0").split(".")[0])
    return LARGE_ARGUMENTS if cuda >= 13 and release >= (2, 12) else SMALL_ARGUMENTS


def memcpy_eligible(dst: Tensor, src: Tensor) -> bool:
    """Whether `dst.copy_(src)` on one CUDA device is a driver memcpy rather than a kernel.

    Same dtype, neither side with a conj/neg bit that the other lacks, and both contiguous once dimensions are
    merged and reordered (Copy.cu, `copy_device_to_device`).
    """
    return not _obstacles(dst, src)


def copy_launch(dst: Tensor, src: Tensor, call: str = "copy_") -> Launch | None:
    """The launch of `dst.copy_(src)` on one CUDA device; None where there is none.

    Nothing is launched for zero elements, nor for a memcpy onto itself. (An elementwise kernel over more than
    2**31 elements is split into several; that is not modelled.)
    """
    if dst.numel() == 0 or dst is src:
        return None
    if obstacles := _obstacles(dst, src):
        return Launch("elementwise", 1, dst.nbytes, "; ".join(reason for reason, _ in obstacles), call)
    if dst.device.type != "meta" and dst.data_ptr() == src.data_ptr():
        return None
    return Launch("memcpy", 1, dst.nbytes, "same dtype, both contiguous", call)


def fill_launch(dst: Tensor) -> Launch | None:
    """The launch of `dst.fill_(value)` or `dst.zero_()` on CUDA; None for zero elements."""
    return Launch("fill", 1, dst.nbytes, "one fill", "fill_") if dst.numel() else None


def foreach_launches(
    dsts: Sequence[Tensor], srcs: Sequence[Tensor], limits: ForeachLimits | None = None
) -> list[Launch]:
    """The launches of one `torch._foreach_copy_(dsts, srcs)` call on one CUDA device.

    Raises:
        NotImplementedError: as the fused kernel does for a dtype that it is not built for.
        RuntimeError: for empty lists, as PyTorch does.
    """
    if not dsts or len(dsts) != len(srcs):
        raise RuntimeError(
            f"_foreach_copy_ takes lists of one length above 0, got {len(dsts)} and {len(srcs)}"
        )
    obstacle = _why_slow_path(dsts, srcs)
    if obstacle is not None:
        launches = [copy_launch(dst, src, "foreach_slow") for dst, src in zip(dsts, srcs)]
        return [replace(launch, reason=f"slow path: {obstacle}") for launch in launches if launch is not None]
    for t in (dsts[0], srcs[0]):
        if t.dtype not in FUSED_DTYPES and t.dtype not in SAME_WIDTH_INT:
            raise NotImplementedError(f'"foreach_tensor_copy" not implemented for {t.dtype}')
    return _chunked_launches(dsts, limits or foreach_limits())


def routed_launches(
    dsts: Sequence[Tensor], srcs: Sequence[Tensor], groups: Sequence[Sequence[int]], singles: Sequence[int]
) -> list[Launch]:
    """The launches of one foreach call a group and one `copy_` a single, given as indices of pairs."""
    launches: list[Launch] = []
    for group in groups:
        launches += foreach_launches([dsts[i] for i in group], [srcs[i] for i in group])
    copies = (copy_launch(dsts[i], srcs[i]) for i in singles)
    return launches + [copy for copy in copies if copy is not None]


def _chunked_launches(dsts: Sequence[Tensor], limits: ForeachLimits) -> list[Launch]:
    """Follow multi_tensor_apply: a launch goes out when its table of tensors or of chunks is full."""
    reason = f"one fused kernel for {dsts[0].dtype} destinations"
    launches: list[Launch] = []
    tensors, chunks, elements = 0, 0, 0
    for dst in dsts:
        n_chunks = -(-dst.numel() // limits.chunk_elements)
        tensors += n_chunks > 0
        for chunk in range(n_chunks):
            last = chunk == n_chunks - 1
            chunks += 1
            elements += dst.numel() - chunk * limits.chunk_elements if last else limits.chunk_elements
            if chunks == limits.chunks or (last and tensors == limits.tensors):
                launches.append(Launch("foreach", tensors, elements * dst.element_size(), reason, "foreach"))
                tensors, chunks, elements = (0 if last else 1), 0, 0
    if chunks:
        launches.append(Launch("foreach", tensors, elements * dsts[0].element_size(), reason, "foreach"))
    return launches


def _obstacles(dst: Tensor, src: Tensor) -> list[tuple[str, str]]:
    """(what keeps `dst.copy_(src)` from being a memcpy, what would help), as many as there are."""
    found = []
    if dst.dtype != src.dtype:
        found.append((f"converts {src.dtype} to {dst.dtype}", f"have the producer write {dst.dtype}"))
    if dst.is_conj() != src.is_conj() or dst.is_neg() != src.is_neg():
        remedy = "have the producer resolve_conj() and resolve_neg() what it writes"
        found.append(("a conjugate or negative view on one side only", remedy))
    if dst.shape != src.shape:
        found.append((f"broadcasts {tuple(src.shape)} to {tuple(dst.shape)}", "a source of equal shape"))
    elif not same_dense_layout(dst, src):
        why, remedy = "the source lies otherwise", "write it contiguous at its producer, or Triton"
        if not same_dense_layout(dst, dst):
            why, remedy = "the destination has gaps", "dense buffers per captured size, or Triton"
        strides = f"strides {dst.stride()} and {src.stride()}"
        found.append((f"not contiguous as a pair, {why}: {strides}", remedy))
    return found


def _why_slow_path(dsts: Sequence[Tensor], srcs: Sequence[Tensor]) -> str | None:
    """What keeps a call off the fused kernel (ForeachUtils.h `can_use_fast_route`, dtypes as of 2026)."""
    for i, (dst, src) in enumerate(zip(dsts, srcs)):
        for t, first, side in ((dst, dsts[0], "destination"), (src, srcs[0], "source")):
            if t.device != dsts[0].device:
                return f"pair {i}: {side} on {t.device}, the first destination on {dsts[0].device}"
            if t.dtype != first.dtype:
                return f"pair {i}: {side} is {t.dtype}, the first {first.dtype}"
        if dst.shape != src.shape:
            return f"pair {i}: shapes {tuple(dst.shape)} and {tuple(src.shape)}"
        if not same_dense_layout(dst, src):
            return f"pair {i}: strides {dst.stride()} and {src.stride()}"
    return None


@dataclass(frozen=True)
class Explanation:
    """How one pair is best copied as it is, and what would make it cheaper.

    route: "foreach" (in a fused kernel with others), "memcpy", "elementwise", "none" (nothing to launch) or
        "refused" (the helpers raise).
    shares: how many pairs its launch serves. bytes: written to the destination.
    """

    name: str
    dst: str
    src: str
    bytes: int
    route: str
    shares: int
    reason: str
    better: str


def explain(
    dsts: Sequence[Tensor], srcs: Sequence[Tensor], names: Sequence[str] | None = None
) -> list[Explanation]:
    """Say for each pair which way `grouped_foreach_dma` sends it on CUDA, why, and what would help.

    Raises:
        ValueError: for lists of different length. What the helpers refuse for a pair is its reason instead.
    """
    check_count(dsts, "source", srcs)
    names = pair_names(dsts, names)
    rows: list[tuple[str, int, str, str]] = [("none", 0, "no elements, or onto itself", "leave it out")]
    rows *= len(dsts)  # route, shares, reason, better
    fit: list[int] = []
    for i in range(len(dsts)):
        tried = [*fit, i]
        try:
            check_pairs([dsts[j] for j in tried], [srcs[j] for j in tried], [names[j] for j in tried])
            fit.append(i)
        except ValueError as error:
            better = "copy_ would broadcast, overwrite or wait: change what is named"
            rows[i] = ("refused", 0, str(error), better)
    pairs = [dsts[i] for i in fit], [srcs[i] for i in fit]
    groups, singles = split_large(*pairs, *group_pairs(*pairs))
    for group in groups:
        members = [fit[j] for j in group if pairs[0][j].numel()]
        for i in members:
            rows[i] = ("foreach", len(members), *_advice(dsts[i], srcs[i], None))
    for i in (fit[j] for j in singles):
        if (launch := copy_launch(dsts[i], srcs[i])) is not None:
            rows[i] = (launch.kind, 1, *_advice(dsts[i], srcs[i], launch))

    def described(t: Tensor) -> str:
        return f"{'nested' if t.is_nested else tuple(t.shape)} {str(t.dtype)[6:]}"

    pairs = zip(names, dsts, srcs, rows)
    return [Explanation(name, described(d), described(s), d.nbytes, *row) for name, d, s, row in pairs]


def _advice(dst: Tensor, src: Tensor, launch: Launch | None) -> tuple[str, str]:
    """(reason, what would be better) for a pair with a launch of its own, or in a group (None)."""
    obstacles = _obstacles(dst, src)
    if launch is None and obstacles:
        return f"{obstacles[0][0]}, and so do others", f"{obstacles[0][1]}: one group less"
    if launch is None:
        return (
            "small, dense, and others of its dtype share the launch",
            "a byte arena or a fused Triton kernel: one launch for all dtypes; writing in place: none",
        )
    if launch.kind == "memcpy" and dst.nbytes >= DEFAULT_DMA_BYTES:
        return (
            f"dense, of one dtype, at least {DEFAULT_DMA_BYTES:,} bytes",
            "only not copying: write in place",
        )
    if launch.kind == "memcpy" and dst.dtype not in FUSED_DTYPES and dst.dtype not in SAME_WIDTH_INT:
        return f"the foreach kernel is not built for {dst.dtype}", "view both as integers of that width"
    if launch.kind == "memcpy":
        return "alone with its dtypes: a group would save nothing", "a byte arena or a fused Triton kernel"
    alone = ", alone in that or not in the foreach kernel's dtypes"
    only_converts = len(obstacles) == 1 and dst.dtype != src.dtype
    return launch.reason + alone * only_converts, "; ".join(remedy for _, remedy in obstacles)
