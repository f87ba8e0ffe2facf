"""What CUDA will be asked to do for a list of calls, from shapes, strides and dtypes alone: no GPU needed.

The rules are PyTorch's (aten/src/ATen/native/cuda/Copy.cu, ForeachBinaryOpList.cu, MultiTensorApply.cuh,
ForeachUtils.h), for CUDA builds of torch 2.6 and later. Tensors on the CPU count as device memory, unless the
partner lies elsewhere: then the copy comes from the host, or goes there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lib.copies import DEFAULT_DMA_BYTES, FUSED_DTYPES, Call, can_fuse, place

MEMCPY, KERNEL, GRAPH = "cudaMemcpyAsync", "cudaLaunchKernel", "cudaGraphLaunch"
CALL_FIGURES = {MEMCPY: "host_memcpy_us", KERNEL: "host_launch_us", GRAPH: "host_graph_us"}


@dataclass(frozen=True)
class Kind:
    """A kind of launch: how plots show it, how a trace does, and its figures in the device model.

    runtime: the CUDA call. work, event: name and kind of what runs on the device, as the trace reader sorts it.
    op, host: the operator around the call, and the figure of its time. figures: how the work's figures begin.
    """

    label: str
    colour: str  # of Okabe and Ito's, which colour-blind readers can tell apart
    runtime: str
    work: str
    event: str
    op: str
    host: str
    figures: str = ""

    @property
    def call(self) -> str:
        """The figure of the runtime call's time."""
        return CALL_FIGURES[self.runtime]

    @property
    def floor(self) -> str:
        """The figure of the work's time over few bytes; "" for a graph."""
        return self.figures and f"{self.figures}_floor_us"

    @property
    def rate(self) -> str:
        """The figure of its bytes a second beyond; "" for a graph."""
        return self.figures and f"{self.figures}_gb_per_s"


COPY = "aten::copy_", "host_copy_us"
FOREACH = "aten::_foreach_copy_", "host_foreach_us"
FUSED_KERNEL = "multi_tensor_apply_kernel<Copy<>>"
KINDS = {
    "memcpy": Kind("driver memcpy", "#0072B2", MEMCPY, "Memcpy DtoD", "memcpy", *COPY, "memcpy"),
    "htod": Kind("memcpy from the host", "#56B4E9", MEMCPY, "Memcpy HtoD", "memcpy_htod", *COPY, "htod"),
    "dtoh": Kind("memcpy to the host", "#882255", MEMCPY, "Memcpy DtoH", "memcpy_dtoh", *COPY, "htod"),
    "elementwise": Kind(
        "elementwise kernel",
        "#D55E00",
        KERNEL,
        "direct_copy_kernel_cuda",
        "copy_kernel",
        *COPY,
        "elementwise",
    ),
    "foreach": Kind("foreach kernel", "#E69F00", KERNEL, FUSED_KERNEL, "copy_kernel", *FOREACH, "foreach"),
    "fused": Kind(
        "one Triton kernel",
        "#CC79A7",
        KERNEL,
        "fused_copy_kernel",
        "copy_kernel",
        "",
        "host_triton_us",
        "fused",
    ),
    "fill": Kind("fill", "#F0E442", KERNEL, "FillFunctor", "kernel", "aten::fill_", "host_fill_us", "fill"),
    "graph": Kind("graph replay", "#009E73", GRAPH, "CUDA graph", "graph", "", "host_graph_us"),
}


@dataclass(frozen=True)
class Launch:
    """One piece of work that the host puts on a CUDA stream.

    kind: of KINDS. n_copies: how many pairs it serves. bytes: written to destinations. reason: why this way.
    """

    kind: str
    n_copies: int
    bytes: int
    reason: str


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
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    cuda = int((torch.version.cuda or "0").split(".")[0])
    return LARGE_ARGUMENTS if cuda >= 13 and release >= (2, 12) else SMALL_ARGUMENTS


def launches(calls: Iterable[Call]) -> list[Launch]:
    """What CUDA would be asked to do for these calls, in order.

    Raises:
        NotImplementedError: as the foreach kernel for a dtype that it is not built for.
        RuntimeError: as `_foreach_copy_` for empty lists or lists of different length.
    """
    made: list[Launch] = []
    for call in calls:
        if call.op == "foreach":
            made += foreach_launches(call.dsts, call.srcs)
        elif call.op == "copy_":
            made += copy_launches(call.dsts[0], call.srcs[0])
        elif call.op != "host_copy_":
            made += kernel_launches(call)
    return made


def kernel_launches(call: Call) -> list[Launch]:
    """A fill or a fused call: one kernel, none for zero elements."""
    kind, reason = {"fill_": ("fill", "one fill"), "fused": ("fused", "one kernel for all dtypes")}[call.op]
    nbytes = sum(dst.nbytes for dst in call.dsts)
    return [Launch(kind, len(call.dsts), nbytes, reason)] if nbytes else []


def copy_launches(dst: Tensor, src: Tensor) -> list[Launch]:
    """`dst.copy_(src)`: a driver memcpy where one dtype lies contiguous on both sides, else a kernel (Copy.cu).

    Nothing is launched for zero elements, nor for a memcpy onto itself. (A kernel over more than 2**31 elements
    is split into several; that is not modelled.)
    """
    if dst.numel() == 0 or dst is src:
        return []
    if src.device != dst.device and not src.is_meta:
        return between_devices(dst, src)
    found = obstacles(dst, src)
    if found:
        return [Launch("elementwise", 1, dst.nbytes, "; ".join(found))]
    if place(dst) == place(src):
        return []
    return [Launch("memcpy", 1, dst.nbytes, "same dtype, both contiguous")]


def between_devices(dst: Tensor, src: Tensor) -> list[Launch]:
    """A copy from or to the host converts on its source's side, and goes by a contiguous one (Copy.cu)."""
    if src.device.type == "cpu":
        reason = "pinned" if src.is_pinned() else "pageable: the call waits for the copy"
        made = [Launch("htod", 1, dst.nbytes, reason)]
        strided = Launch("elementwise", 1, dst.nbytes, "from a contiguous copy into the strided destination")
        return made if dst.is_contiguous() else [*made, strided]
    kind = "dtoh" if dst.device.type == "cpu" else "memcpy"
    return [Launch(kind, 1, dst.nbytes, f"from {src.device} to {dst.device}")]


def foreach_launches(
    dsts: Sequence[Tensor], srcs: Sequence[Tensor], limits: ForeachLimits | None = None
) -> list[Launch]:
    """`torch._foreach_copy_(dsts, srcs)`: fused kernels, or silently one copy a pair."""
    if not dsts or len(dsts) != len(srcs):
        raise RuntimeError(f"_foreach_copy_: expected equal lists, got {len(dsts)} and {len(srcs)} tensors")
    obstacle = slow_because(dsts, srcs)
    if obstacle is None:
        return chunked_launches(dsts, limits or foreach_limits())
    made = []
    for dst, src in zip(dsts, srcs):
        made += copy_launches(dst, src)
    return [replace(launch, reason=f"slow path: {obstacle}") for launch in made]


def slow_because(dsts: Sequence[Tensor], srcs: Sequence[Tensor]) -> str | None:
    """What keeps a call off the fused kernel (ForeachUtils.h `can_use_fast_route`, dtypes as of 2026)."""
    for i, (dst, src) in enumerate(zip(dsts, srcs)):
        if (dst.dtype, src.dtype) != (dsts[0].dtype, srcs[0].dtype):
            first = f"the first {srcs[0].dtype} to {dsts[0].dtype}"
            return f"pair {i}: {src.dtype} to {dst.dtype}, {first}"
        if dst.device != dsts[0].device or not (src.is_meta or src.device == dst.device):
            return f"pair {i}: from {src.device} to {dst.device}, the first is on {dsts[0].device}"
        if dst.shape != src.shape or not same_dense_layout(dst, src):
            return f"pair {i}: shapes {tuple(dst.shape)}, {tuple(src.shape)}, strides {dst.stride()}, {src.stride()}"
    return None


def same_dense_layout(dst: Tensor, src: Tensor) -> bool:
    """Whether a pair lies in memory alike, without gaps or repeats; dimensions of size 1 do not count."""
    expected = 1
    for dst_stride, src_stride, size in sorted(zip(dst.stride(), src.stride(), dst.shape)):
        if size != 1 and not dst_stride == src_stride == expected:
            return False
        expected *= size
    return True


def chunked_launches(dsts: Sequence[Tensor], limits: ForeachLimits) -> list[Launch]:
    """Follow multi_tensor_apply: a launch goes out when its table of tensors or of chunks is full."""
    if dsts[0].dtype not in FUSED_DTYPES and dsts[0].element_size() > 1:
        raise NotImplementedError(f'"foreach_tensor_copy" not implemented for {dsts[0].dtype}')
    made: list[Launch] = []
    reason = f"one kernel for all pairs to {dsts[0].dtype}"
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
                made.append(Launch("foreach", tensors, elements * dst.element_size(), reason))
                tensors, chunks, elements = int(left > 0), 0, 0
    if chunks:
        made.append(Launch("foreach", tensors, elements * dsts[0].element_size(), reason))
    return made


def obstacles(dst: Tensor, src: Tensor) -> dict[str, str]:
    """What keeps `dst.copy_(src)` from being a memcpy, each with what would help."""
    found = {}
    if dst.dtype != src.dtype:
        found[f"converts {src.dtype} to {dst.dtype}"] = f"have the producer write {dst.dtype}"
    if dst.is_conj() != src.is_conj() or dst.is_neg() != src.is_neg():
        found["a conjugate or negative view on one side only"] = "have the producer resolve it"
    if dst.shape != src.shape:
        found[f"broadcasts {tuple(src.shape)} to {tuple(dst.shape)}"] = "a source of equal shape"
    elif not same_dense_layout(dst, src):
        strides = f"strides {dst.stride()} and {src.stride()}"
        if same_dense_layout(dst, dst):
            found[f"the source lies otherwise: {strides}"] = "write it contiguous at its producer, or Triton"
        else:
            found[f"the destination has gaps: {strides}"] = "dense buffers per captured size, or Triton"
    return found


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
    rows = []
    calls = list(calls)
    single = Counter(group_of(call.dsts[0], call.srcs[0]) for call in calls if call.op == "copy_")
    for call in calls:
        made = launches([call])
        for i, dst in enumerate(call.dsts):
            src = call.srcs[i] if call.srcs else None
            launch = (
                made[min(i, len(made) - 1)] if made else Launch("none", 0, 0, "no elements, or onto itself")
            )
            name = names[len(rows)] if names else f"pair {len(rows)}"
            better = advice(launch, dst, src, single)
            described = [f"{tuple(t.shape)} {str(t.dtype)[6:]}" for t in (dst, src) if t is not None]
            rows.append(
                Explanation(
                    name,
                    described[0],
                    described[-1],
                    dst.nbytes,
                    launch.kind,
                    launch.n_copies,
                    launch.reason,
                    better,
                )
            )
    return rows


def group_of(dst: Tensor, src: Tensor) -> tuple | None:
    """What pairs of one foreach call have in common; None for a pair that cannot, or need not, join one."""
    large = dst.nbytes >= DEFAULT_DMA_BYTES and dst.dtype == src.dtype
    return None if large or not can_fuse(dst, src) else (dst.device, dst.dtype, src.dtype)


def advice(launch: Launch, dst: Tensor, src: Tensor | None, single: Counter) -> str:
    if launch.kind == "htod":
        return "PackedInputs: one upload for all fields of the host"
    if launch.kind in ("none", "dtoh"):
        return "leave it out"
    if launch.kind == "fill":
        return "let the padding ride along in a group"
    if launch.kind in ("foreach", "fused"):
        return "one fused kernel for all dtypes; none where the producer writes in place"
    if launch.reason.startswith("slow path"):
        return "group by dtype pair and layout"
    others = single[group_of(dst, src)] - 1 if group_of(dst, src) else 0
    if others > 0:
        return f"one foreach call with {others} others"
    remedies = obstacles(dst, src).values()
    return "; ".join(remedies) or "large or alone: only not copying, or one kernel for all dtypes"
