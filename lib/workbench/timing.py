"""Measure ways of doing the same thing against each other, on a machine that is never quiet.

What is compared runs interleaved, round by round, so that drift and neighbours hit all alike. Medians and
spread are reported, and ratios are formed inside a round before their median is taken.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

Way = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Samples of one way, in microseconds a call, one sample a round.

    host_us: from the call until it returns. gpu_us: from the first to the last event on the stream, which
    contains the GPU's waiting for the host; empty on a CPU.
    """

    name: str
    host_us: tuple[float, ...]
    gpu_us: tuple[float, ...] = ()

    @property
    def median_us(self) -> float:
        return statistics.median(self.host_us)


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """The ends of the middle half of the samples."""
    first, third = np.percentile(samples, (25, 75))
    return float(first), float(third)


def ratio(timing: Timing, base: Timing) -> float:
    """Median over the rounds of one way's host time by the other's in the same round."""
    pairs = zip(timing.host_us, base.host_us, strict=True)
    return statistics.median(own / other for own, other in pairs)


def measure(
    ways: dict[str, Way],
    rounds: int = 30,
    calls: int = 20,
    warmup: int = 3,
    device: str = "cpu",
    on_round: Way = lambda: None,
) -> dict[str, Timing]:
    """Time each way `rounds` times, interleaved; a sample is the mean of `calls` calls in a row.

    Every other round runs the ways in reverse, so that no way always follows the same neighbour. On a GPU the
    stream is drained before a sample, so the host time is what issuing costs, and CUDA events give `gpu_us`.

    Args:
        ways: what to call, without arguments, by name.
        on_round: called after each round, e.g. a progress bar's `update`.

    Raises:
        ValueError: for no ways, or fewer than one round or call.
    """
    if not ways or rounds < 1 or calls < 1:
        raise ValueError(f"expected ways, rounds and calls of at least 1, got {len(ways)}, {rounds}, {calls}")
    sample = _gpu_sample if device.startswith("cuda") else _host_sample
    for way in ways.values():
        for _ in range(warmup):
            sample(way, calls)
    samples = {name: [] for name in ways}
    order = list(ways)
    for _ in range(rounds):
        for name in order:
            samples[name].append(sample(ways[name], calls))
        order.reverse()
        on_round()
    return {name: Timing(name, *zip(*samples[name])) for name in ways}


def _host_sample(way: Way, calls: int) -> tuple[float, ...]:
    start = time.perf_counter()
    for _ in range(calls):
        way()
    return ((time.perf_counter() - start) / calls * 1e6,)


def _gpu_sample(way: Way, calls: int) -> tuple[float, ...]:
    first = torch.cuda.Event(enable_timing=True)
    last = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    (host_us,) = _host_sample(way, calls)
    last.record()
    torch.cuda.synchronize()
    return host_us, first.elapsed_time(last) / calls * 1e3
