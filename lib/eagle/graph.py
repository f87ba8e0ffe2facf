"""Two ways to capture a fixed-shape computation: a CUDA graph, and the same contract on the CPU.

The contract: `capture(compute)` runs `compute`, whose outputs are new tensors, once or more; every `replay()`
computes again from what its static inputs then hold, and leaves the results in the same tensors as before.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

Compute = Callable[[], NamedTuple]  # closes over its static inputs; returns a NamedTuple of tensors


class CudaGraph:
    """One `torch.cuda.CUDAGraph`. Graphs that never run at the same time share a memory pool."""

    def __init__(self, compute: Compute, pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
        # Two warm-ups on the stream of the capture let libraries allocate their workspaces outside of it.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, stream=stream):
            self.outputs = compute()

    def replay(self) -> NamedTuple:
        self.graph.replay()
        return self.outputs


class EagerGraph:
    """The same contract without a graph: compute again, then copy into the outputs of the capture."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.outputs = compute()

    def replay(self) -> NamedTuple:
        torch._foreach_copy_(self.outputs, self.compute())
        return self.outputs


def capturer(device: torch.device) -> Callable[[Compute], CudaGraph | EagerGraph]:
    """What captures on a device; on CUDA its graphs share one memory pool, so capture the largest first."""
    if device.type != "cuda":
        return EagerGraph
    return partial(CudaGraph, pool=torch.cuda.graph_pool_handle(), stream=torch.cuda.Stream(device))
