"""Measure ways of doing the same thing against each other, on a machine that is never quiet: they take turns,
round by round, so that drift and neighbours hit all alike, and medians and their spread are reported."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

Way = Callable[[], object]


@dataclass(frozen=True)
class Range:
    """A number, by default a time in us, and between what it lies: by all that a profile assumes, say."""

    middle: float
    low: float
    high: float
    unit: str = " µs"

    @property
    def clear(self) -> bool:
        """Whether it is surely above zero, or surely below: else there is nothing to claim."""
        return self.low > 0 or self.high < 0

    def __repr__(self) -> str:
        numbers = self.middle, self.low, self.high
        middle, low, high = (f"{each:.0f}" if abs(each) >= 10 else f"{each:.2g}" for each in numbers)
        ends = f" ({low} to {high})" if low != high else ""  # nothing that was varied changes it
        return f"{middle}{self.unit}{ends}"


@dataclass(frozen=True)
class Timing:
    """Samples of one way, in us a call, one a round: until the call returns; from the stream's first event to
    its last, with the GPU's waiting for the host, empty on a CPU."""

    host_us: tuple[float, ...]
    gpu_us: tuple[float, ...] = ()

    @property
    def median_us(self) -> float:
        return float(np.median(self.host_us))


def spread(samples: Sequence[float]) -> Range:
    """The median of samples, and their middle half."""
    low, middle, high = np.percentile(samples, (25, 50, 75)).tolist()
    return Range(middle, low, high)


def ratio(timing: Timing, base: Timing) -> float:
    """How many times the other's host time one way takes: by the medians, which are what a figure shows."""
    return timing.median_us / base.median_us


def measure(
    ways: dict[str, Way], rounds: int = 30, calls: int = 20, warmup: int = 3, device: str = "cpu"
) -> dict[str, Timing]:
    """Time each way in every round, after `warmup` more, every other one in reverse, so that none always
    follows the same neighbour. A sample is the mean of `calls` calls in a row. On a GPU the stream is drained
    before: the host time is what issuing costs, and CUDA events give `gpu_us`."""
    samples = {name: [] for name in ways}
    order = list(ways)
    for _ in range(warmup + rounds):
        for name in order:
            samples[name].append(_sample(ways[name], calls, device.startswith("cuda")))
        order.reverse()
    return {name: Timing(*zip(*taken[warmup:])) for name, taken in samples.items()}


def _sample(way: Way, calls: int, on_gpu: bool) -> tuple[float, ...]:
    if on_gpu:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
    start = time.perf_counter()
    for _ in range(calls):
        way()
    host_us = (time.perf_counter() - start) / calls * 1e6
    if not on_gpu:
        return (host_us,)
    last.record()
    torch.cuda.synchronize()
    return host_us, first.elapsed_time(last) / calls * 1e3
