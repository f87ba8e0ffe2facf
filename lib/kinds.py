"""The kinds of launches in one table: a new kind is a row here and a branch in lib/launches.py."""

from dataclasses import dataclass

MEMCPY, KERNEL, GRAPH = "cudaMemcpyAsync", "cudaLaunchKernel", "cudaGraphLaunch"
CALL_FIGURES = {MEMCPY: "host_memcpy_us", KERNEL: "host_launch_us", GRAPH: "host_graph_us"}


@dataclass(frozen=True)
class Kind:
    """A kind of launch: how plots show it, how a trace does, and its figures in the device model.

    runtime: the CUDA call. work, event: name and kind of its work in a trace. op, host: the operator around
    it, and the figure of its time. figures: how the work's begin, `floor` and `rate`; "" for a graph.
    """

    label: str
    colour: str  # of Okabe and Ito's, which colour-blind readers can tell apart
    runtime: str
    work: str
    event: str
    op: str
    host: str
    figures: str = ""
    call = property(lambda self: CALL_FIGURES[self.runtime])
    floor = property(lambda self: self.figures and f"{self.figures}_floor_us")
    rate = property(lambda self: self.figures and f"{self.figures}_gb_per_s")


COPY = "aten::copy_", "host_copy_us"
FOREACH = "aten::_foreach_copy_", "host_foreach_us"
FILL = "aten::fill_", "host_fill_us"
FUSED = KERNEL, "fused_copy_kernel", "copy_kernel", "", "host_triton_us"
MULTI_TENSOR = KERNEL, "multi_tensor_apply_kernel<Copy<>>", "copy_kernel"
DIRECT = KERNEL, "direct_copy_kernel_cuda", "copy_kernel"
KINDS = {
    "memcpy": Kind("driver memcpy", "#0072B2", MEMCPY, "Memcpy DtoD", "memcpy", *COPY, "memcpy"),
    "htod": Kind("memcpy from the host", "#56B4E9", MEMCPY, "Memcpy HtoD", "memcpy_htod", *COPY, "htod"),
    "dtoh": Kind("memcpy to the host", "#882255", MEMCPY, "Memcpy DtoH", "memcpy_dtoh", *COPY, "htod"),
    "elementwise": Kind("elementwise kernel", "#D55E00", *DIRECT, *COPY, "elementwise"),
    "foreach": Kind("foreach kernel", "#E69F00", *MULTI_TENSOR, *FOREACH, "foreach"),
    "fused": Kind("one Triton kernel", "#CC79A7", *FUSED, "fused"),
    "fill": Kind("fill", "#F0E442", KERNEL, "FillFunctor", "kernel", *FILL, "fill"),
    "graph": Kind("graph replay", "#009E73", GRAPH, "CUDA graph", "graph", "", "host_graph_us"),
}


@dataclass(frozen=True)
class Launch:
    """What the host puts on a stream: kind of KINDS, pairs served, bytes written, why in this way."""

    kind: str
    n_copies: int
    bytes: int
    reason: str
