"""The copies of one speculative step, both replays together: counted, measured here, modelled for a GPU.

A step is: draft's copies | draft graph | verify | draft-extend's copies | draft-extend graph. Two regimes tell
what the copies cost. "gpu waits": the host begins each run of copies when the stream is empty, since it waited
for a result of verify or for its scheduler. "host ahead": it makes all its calls while earlier work still runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace

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
    def ends(self) -> tuple[float, float, float]:
        return self.low, self.middle, self.high

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
        """What is copied on the device, a row a field: replay, field, shape, dtype, source's dtype, bytes."""
        rows = []
        for replay, runner, batch in (
            ("draft", self.draft, self.draft_batch),
            ("draft-extend", self.draft_extend, self.draft_extend_batch),
        ):
            buffers = runner.inputs(batch.batch_size)
            for field in fields(batch):
                src, dst = getattr(batch, field.name), getattr(buffers, field.name)
                if isinstance(src, torch.Tensor) and not field.name.endswith("_cpu"):
                    dtypes = (str(tensor.dtype).removeprefix("torch.") for tensor in (dst, src))
                    rows.append((replay, field.name, tuple(src.shape), *dtypes, dst.nbytes))
        return pd.DataFrame(rows, columns=["replay", "field", "shape", "dtype", "source", "bytes"])


def count_kinds(launches: list[Launch]) -> dict[str, int]:
    """How many launches of each kind, by the kind's label, and of all; for a row of a table."""
    found = Counter(KINDS[launch.kind].label for launch in launches)
    return dict(found) | {"all": len(launches)}


def measured_lanes(way: Way, device: str = "cpu", runs: int = 15) -> Lanes:
    """What torch.profiler sees of one run on this machine: a host lane and, on CUDA, each stream's.

    Of several runs the shortest, the least disturbed one, is shown. The profiler itself slows the host, so what
    counts is order and shares; times to compare come from `timing`. Of nested operators the outermost is kept.
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
    table = from_profiler(profile)
    spans = table[(table.kind == "annotation") & (table.name == "one run")]
    start = spans.start_us[spans.dur_us.idxmin()]
    later = spans.start_us[spans.start_us > start].min()  # NaN after the last one
    table = table[(table.start_us >= start) & ~(table.start_us >= later)]
    table = table.assign(start_us=table.start_us - start)
    host = table[table.kind == "host_op"]
    ends = (host.start_us + host.dur_us).cummax().shift(fill_value=0.0)
    lanes = {"host · measured": host[host.start_us >= ends]}
    for track, events in table[table.kind.isin(DEVICE_KINDS)].groupby("track", observed=True):
        lanes[f"{track} · measured"] = events
    return lanes


def modelled_lanes(launches: list[Launch], profile: DeviceProfile) -> Lanes:
    """The launches played on a profile's device: a host lane and a stream lane."""
    return _lanes(simulate(launches, profile), profile)


def _lanes(table: pd.DataFrame, profile: DeviceProfile) -> Lanes:
    on_host = table.kind.isin([*HOST_KINDS, "wait"])
    name = f"modelled {profile.name}"
    return {f"host · {name}": table[on_host], f"stream · {name}": table[~on_host]}


def span_us(launches: list[Launch], profile: DeviceProfile) -> float:
    """Modelled time from the first host call to the end of the last work on the device."""
    table = simulate(launches, profile)
    return float((table.start_us + table.dur_us).max())


def idle_share(launches: list[Launch], profile: DeviceProfile) -> float:
    """Modelled share of the stream's span, first to last work, in which it executes nothing."""
    table = simulate(launches, profile)
    work = table[table.kind.isin(DEVICE_KINDS)]
    ends = work.start_us + work.dur_us
    return float(1 - work.dur_us.sum() / (ends.max() - work.start_us.min()))


def device_us(kind: str, size: int, profile: DeviceProfile) -> float:
    """Modelled time on the device of one launch of `kind` that writes `size` bytes."""
    table = simulate([Launch(kind, 1, size, "one tensor")], profile)
    return float(table.dur_us[table.kind.isin(DEVICE_KINDS)].iloc[0])


@dataclass(frozen=True)
class Times:
    """How long the graphs of a step and the target's verify run on the device, in us."""

    draft_us: float = 1000.0
    verify_us: float = 1000.0
    extend_us: float = 1000.0

    @classmethod
    def of(cls, config: EagleConfig, profile: DeviceProfile, target_parameters: float = 8.03e9) -> Times:
        """The least they can take: reading the weights once, in two bytes each, at the rate of memcpys.

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
    """A whole step as lanes; graphs are drawn at most `longest_us` long, and say how long they are."""
    return _lanes(_play(copies, profile, times, regime, longest_us), profile)


def step_us(copies: StepCopies, profile: DeviceProfile, times: Times, regime: str) -> float:
    """Modelled time of a whole step, to the end of the draft-extend graph.

    It begins with the host's first call, or, where the host is ahead, when the step before ends.
    """
    table = _play(copies, profile, times, regime)
    ends = table.start_us + table.dur_us
    return float(ends.max() - ends[table.name == BEFORE].sum())


def copy_share(copies: StepCopies, profile: DeviceProfile, times: Times, regime: str) -> float:
    """Modelled share of a step that is neither graph nor verify."""
    graphs_us = times.draft_us + times.verify_us + times.extend_us
    return 1 - graphs_us / step_us(copies, profile, times, regime)


def saving(before: StepCopies, after: StepCopies, profile: DeviceProfile, regime: str) -> Range:
    """What a step is shorter by, with its range over all that the profile could only assume."""
    found = []
    for end in ("", "fast", "slow"):
        ends = profile.at(end).figures if end else {}
        assumed = {name: ends[name] for name in profile.unknown if end}
        played = replace(profile, figures=profile.figures | assumed)
        whole, less = (step_us(copies, played, Times(), regime) for copies in (before, after))
        found.append(whole - less)
    return Range(found[0], min(found), max(found))


def _play(
    copies: StepCopies, profile: DeviceProfile, times: Times, regime: str, longest_us: float = np.inf
) -> pd.DataFrame:
    """Host and device events of a step: name, kind, start_us, dur_us; the lengths of graphs are given."""
    if regime not in REGIMES:
        raise ValueError(f"regime: expected one of {REGIMES}, got {regime!r}")
    graphs = (("draft graph", "graph", times.draft_us), ("verify", "verify", times.verify_us),
              ("draft-extend graph", "graph", times.extend_us))  # fmt: skip
    first, second = copies.bursts()
    played = [simulate([*first, REPLAY, REPLAY], profile, 0.0), simulate([*second, REPLAY], profile, 0.0)]
    coming = iter(graphs)
    rows, host_us, free_us = [], 0.0, -np.inf
    if regime == "host ahead":  # work of the step before keeps the stream busy until all calls are made
        free_us = sum(float((part.start_us + part.dur_us).max()) for part in played)
        rows.append((BEFORE, "graph", 0.0, free_us))
    for part in played:
        if regime == "gpu waits" and part is played[1]:
            rows.append(("host waits", "wait", host_us, free_us - host_us))
            host_us = free_us
        part = part.assign(start_us=part.start_us + host_us)
        on_host = part.kind.isin(HOST_KINDS)
        rows += part.loc[on_host, ["name", "kind", "start_us", "dur_us"]].itertuples(index=False)
        called_us = part[part.kind == "runtime"].set_index("correlation").start_us
        for event in part[~on_host].sort_values("correlation").itertuples():
            name, kind, length_us = event.name, event.kind, event.dur_us
            if kind == "graph":
                name, kind, true_us = next(coming)
                name += f"\n{true_us / 1000:.3g} ms"
                length_us = min(true_us, longest_us)
            ready_us = called_us[event.correlation] + profile["launch_latency_us"]
            start_us = max(ready_us, free_us + profile["gap_us"])
            rows.append((name, kind, start_us, length_us))
            free_us = start_us + length_us
        host_us = float((part.start_us + part.dur_us)[on_host].max())
    return pd.DataFrame(rows, columns=["name", "kind", "start_us", "dur_us"])
