"""The copies of one speculative step, both replays together: counted, measured here, modelled for a GPU.

A step is: draft's copies | draft graph | verify | draft-extend's copies | draft-extend graph. What the copies
cost depends on the regime. "gpu waits": the host begins each run of copies on an empty stream, since it waited
for a result of verify or for its scheduler. "host ahead": it makes all its calls while earlier work still runs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from lib.copies import Call
from lib.eagle import (
    DraftBatch,
    DraftExtendBatch,
    EagleConfig,
    EagleDraftCudaGraphRunner,
    EagleDraftExtendCudaGraphRunner,
)
from lib.eagle.model import DraftModel
from lib.launches import KINDS, Launch
from lib.profiles import DEVICE_KINDS, HOST_KINDS, DeviceProfile, from_profiler, simulate
from lib.workbench.timing import Way

Lanes = dict[str, pd.DataFrame]
REGIMES = ("gpu waits", "host ahead")
REPLAY = Launch("graph", 0, 0, "graph replay")
BEFORE = "the step before"
OPTIONS: dict[str, dict[str, bool]] = {  # ways that ask something of whoever makes the inputs
    "one_allocation": {"one_allocation": True},
    "copy_in_graph": {"copy_in_graph": True},
    "no_copy": {},
}


@dataclass(frozen=True)
class Range:
    """A modelled time in us, and between what it lies for all that the profile only assumes."""

    middle: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether it is surely above zero, or surely below: else there is nothing to claim."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.middle:.0f} µs ({self.low:.0f} to {self.high:.0f})"


@dataclass(frozen=True)
class StepCopies:
    """A draft and a draft-extend runner with one batch each."""

    draft: EagleDraftCudaGraphRunner
    draft_extend: EagleDraftExtendCudaGraphRunner
    draft_batch: DraftBatch
    draft_extend_batch: DraftExtendBatch

    @classmethod
    def build(
        cls,
        config: EagleConfig,
        way: str,
        batch_size: int,
        device: str = "cpu",
        seed: int = 0,
        model: DraftModel | None = None,
    ) -> StepCopies:
        """Runners and random batches. way: a strategy, or one of OPTIONS. model: what `replay` runs."""
        strategy = "grouped_foreach_dma" if way in OPTIONS else way
        options = {"device": device, "model": model} | OPTIONS.get(way, {})
        draft = EagleDraftCudaGraphRunner(config, strategy, **options)
        extend = EagleDraftExtendCudaGraphRunner(config, strategy, **options)
        batch = DraftBatch.random(config, batch_size, seed, device)
        extend_batch = DraftExtendBatch.random(config, batch_size, seed, device)
        if way in OPTIONS:  # the producer writes to where the runner wants it
            return cls(draft, extend, draft.place(batch), extend.place(extend_batch))
        return cls(draft, extend, batch, extend_batch)

    def copy_inputs(self) -> None:
        self.draft.copy_inputs(self.draft_batch)
        self.draft_extend.copy_inputs(self.draft_extend_batch)

    def replay(self) -> list[torch.Tensor]:
        """Both replays whole; their outputs, valid until the next one."""
        draft = self.draft.replay(self.draft_batch)
        return [*draft, *self.draft_extend.replay(self.draft_extend_batch)]

    def calls(self) -> list[Call]:
        return self.draft.calls(self.draft_batch) + self.draft_extend.calls(self.draft_extend_batch)

    def bursts(self) -> tuple[list[Launch], list[Launch]]:
        """The launches before the draft graph, and those before the draft-extend graph."""
        return self.draft.launches(self.draft_batch), self.draft_extend.launches(self.draft_extend_batch)

    def launches(self) -> list[Launch]:
        first, second = self.bursts()
        return first + second

    def fields(self) -> pd.DataFrame:
        """What is copied on the device, a row a field."""
        rows = []
        halves = (self.draft, self.draft_batch), (self.draft_extend, self.draft_extend_batch)
        for runner, batch in halves:
            for field in runner.buffers.fields:
                source = getattr(batch, field.name)
                if source is None or field.host:
                    continue
                dtype = runner.buffers.tensors[field.name].dtype
                row = {"replay": runner.table.replace("_", "-"), "field": field.name}
                row |= {
                    "shape": tuple(source.shape),
                    "dtype": str(dtype)[6:],
                    "source": str(source.dtype)[6:],
                }
                rows.append(row | {"bytes": source.numel() * dtype.itemsize})
        return pd.DataFrame(rows)


def count_kinds(launches: list[Launch]) -> dict[str, int]:
    """How many launches of each kind, by the kind's label, and of all; for a row of a table."""
    found = Counter(KINDS[launch.kind].label for launch in launches)
    return dict(found) | {"all": len(launches)}


def measured_lanes(way: Way, device: str = "cpu", runs: int = 15) -> Lanes:
    """What torch.profiler sees of one run on this machine: a host lane and, on CUDA, each stream's.

    Of several runs the shortest, the least disturbed one, is shown. The profiler itself slows the host, so
    what counts is order and shares; times to compare come from `timing`.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for _ in range(runs):
        way()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(runs):
            with torch.profiler.record_function("one run"):
                way()
            if device == "cuda":
                torch.cuda.synchronize()
    return shortest_run(from_profiler(profile), "measured")


def shortest_run(trace: pd.DataFrame, words: str) -> Lanes:
    """Of a trace's annotated ranges the shortest one, as lanes; of nested operators the outermost is kept."""
    ranges = trace[trace.kind == "annotation"]
    start = ranges.start_us[ranges.dur_us.idxmin()]
    later = ranges.start_us[ranges.start_us > start].min()  # NaN after the last one
    inside = trace[(trace.start_us >= start) & ~(trace.start_us >= later) & (trace.kind != "annotation")]
    inside = inside.assign(start_us=inside.start_us - start)
    lanes = {}
    for track, events in inside.groupby("track", observed=True):
        operators = events[events.kind == "host_op"]
        ends = (operators.start_us + operators.dur_us).cummax().shift(fill_value=0.0)
        nested = operators.index[operators.start_us < ends]
        lanes[f"{track} · {words}"] = events.drop(nested)
    return lanes


def modelled_lanes(launches: list[Launch], profile: DeviceProfile) -> Lanes:
    """The launches played on a profile's device: a host lane and a stream lane."""
    return split_lanes(simulate(launches, profile), profile)


def split_lanes(table: pd.DataFrame, profile: DeviceProfile) -> Lanes:
    on_host = table.kind.isin([*HOST_KINDS, "wait"])
    name = f"modelled {profile.name}"
    return {f"host · {name}": table[on_host], f"stream · {name}": table[~on_host]}


def span_us(launches: list[Launch], profile: DeviceProfile) -> float:
    """Modelled time from the first host call to the end of the last work on the device."""
    table = simulate(launches, profile)
    return float((table.start_us + table.dur_us).max())


def idle_share(launches: list[Launch], profile: DeviceProfile) -> float:
    """Modelled share of the time from the first to the last work in which the stream executes nothing."""
    table = simulate(launches, profile)
    work = table[table.kind.isin(DEVICE_KINDS)]
    ends = work.start_us + work.dur_us
    return float(1 - work.dur_us.sum() / (ends.max() - work.start_us.min()))


def device_us(kind: str, size: int, profile: DeviceProfile) -> float:
    """Modelled time on the device of one launch of `kind` that writes `size` bytes."""
    table = simulate([Launch(kind, 1, size, "one tensor")], profile)
    work = table[table.kind.isin(DEVICE_KINDS)]
    return float(work.dur_us.iloc[0])


@dataclass(frozen=True)
class Times:
    """How long the graphs of a step and the target's verify run on the device, in us."""

    draft_us: float = 1000.0
    verify_us: float = 1000.0
    extend_us: float = 1000.0

    @classmethod
    def of(cls, config: EagleConfig, profile: DeviceProfile, target_parameters: float = 8.03e9) -> Times:
        """The least they can take: reading all weights once, at two bytes each and the rate of memcpys.

        A memcpy reads and writes, so reading alone is twice as fast. The head: fc, one layer, the LM head.
        """
        hidden = config.hidden_size
        layer = 6 * hidden * hidden + 3 * hidden * config.intermediate_size
        bytes_a_us = 2 * profile["memcpy_gb_per_s"] * 1e3
        head_us = 2 * (layer + config.vocab_size * hidden) / bytes_a_us
        return cls((config.num_steps - 1) * head_us, 2 * target_parameters / bytes_a_us, head_us)


def step_lanes(
    copies: StepCopies, profile: DeviceProfile, times: Times, regime: str, longest_us: float = 120.0
) -> Lanes:
    """A whole step as lanes; graphs are cut at `longest_us`, and say how long they are."""
    return split_lanes(play(copies, profile, times, regime, longest_us), profile)


def step_us(copies: StepCopies, profile: DeviceProfile, times: Times, regime: str) -> float:
    """Modelled time of a whole step, to the end of the draft-extend graph.

    It begins with the host's first call, or, where the host is ahead, when the step before ends.
    """
    table = play(copies, profile, times, regime)
    ends = table.start_us + table.dur_us
    return float(ends.max() - ends[table.name == BEFORE].sum())


def copy_share(copies: StepCopies, profile: DeviceProfile, times: Times, regime: str) -> float:
    """Modelled share of a step that is neither graph nor verify."""
    graphs_us = times.draft_us + times.verify_us + times.extend_us
    return 1 - graphs_us / step_us(copies, profile, times, regime)


def saving(before: StepCopies, after: StepCopies, profile: DeviceProfile, regime: str) -> Range:
    """What a step gets shorter by, with its range over all that the profile only assumes."""
    found = []
    for end in (None, "fast", "slow"):
        figures = dict(profile.figures)
        for name in profile.unknown if end else ():
            figures[name] = profile.at(end).figures[name]
        played = dataclasses.replace(profile, figures=figures)
        whole = step_us(before, played, Times(), regime)
        found.append(whole - step_us(after, played, Times(), regime))
    return Range(found[0], min(found), max(found))


def play(
    copies: StepCopies, profile: DeviceProfile, times: Times, regime: str, longest_us: float = np.inf
) -> pd.DataFrame:
    """Host and device events of a step: name, kind, start_us, dur_us. Raises ValueError for an unknown regime.

    The device model plays the calls of each run of copies; here the stream is played on, over the whole step.
    """
    if regime not in REGIMES:
        raise ValueError(f"regime: expected one of {REGIMES}, got {regime!r}")
    first, second = copies.bursts()
    halves = [simulate([*first, REPLAY, REPLAY], profile, 0.0), simulate([*second, REPLAY], profile, 0.0)]
    graphs = [("draft graph", "graph", times.draft_us), ("verify", "verify", times.verify_us)]
    graphs.append(("draft-extend graph", "graph", times.extend_us))
    rows = []
    host_us, free_us = 0.0, -np.inf
    if regime == "host ahead":  # work of the step before keeps the stream busy until all calls are made
        free_us = sum(float((half.start_us + half.dur_us).max()) for half in halves)
        rows.append((BEFORE, "graph", 0.0, free_us))
    for number, half in enumerate(halves):
        if regime == "gpu waits" and number:
            rows.append(("host waits", "wait", host_us, free_us - host_us))
            host_us = free_us
        half = half.assign(start_us=half.start_us + host_us)
        on_host = half.kind.isin(HOST_KINDS)
        calls = half[on_host]
        rows += calls[["name", "kind", "start_us", "dur_us"]].itertuples(index=False)
        host_us = float((calls.start_us + calls.dur_us).max())
        called_us = calls[calls.kind == "runtime"].set_index("correlation").start_us
        for event in half[~on_host].sort_values("correlation").itertuples():
            name, kind, length_us = event.name, event.kind, event.dur_us
            if kind == "graph":
                name, kind, length_us = graphs.pop(0)
                cut = ", cut" if length_us > longest_us else ""
                name += f"\n{length_us / 1000:.3g} ms{cut}"
                length_us = min(length_us, longest_us)
            ready_us = called_us[event.correlation] + profile["launch_latency_us"]
            start_us = max(ready_us, free_us + profile["gap_us"])
            rows.append((name, kind, start_us, length_us))
            free_us = start_us + length_us
    return pd.DataFrame(rows, columns=["name", "kind", "start_us", "dur_us"])
