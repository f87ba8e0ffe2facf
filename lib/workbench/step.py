"""The copies of one speculative step, both replays together: counted, measured here, modelled for a GPU.

A step is: draft's copies | draft graph | verify | draft-extend's copies | draft-extend graph. What the copies
cost depends on the regime. WAITS: the host begins each run of copies on an empty stream, since it waited for
verify's result or for its scheduler. AHEAD: it makes all its calls while earlier work still runs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from statistics import median

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
from lib.kinds import KINDS, MEMCPY, Launch
from lib.launches import launches
from lib.profiles import (
    AHEAD,
    WAITS,
    DeviceProfile,
    device_us,
    from_profiler,
    lanes,
    of_range,
    simulate,
)
from lib.workbench.timing import Timing, Way, quartiles

Lanes = dict[str, pd.DataFrame]
Times = dict[str, float]  # of GRAPHS, in us on the device
REGIMES = (WAITS, AHEAD)
GRAPHS = ("draft graph", "verify", "draft-extend graph")
DRAFT, VERIFY, EXTEND = (Launch("graph", 0, 0, name) for name in GRAPHS)
# The host needs it to go on, unless it is ahead.
ACCEPTED = Launch("dtoh", 1, 256, "which tokens verify kept")
OPTIONS: dict[str, dict[str, bool]] = {  # ways that ask something of whoever makes the inputs
    "one_allocation": {"one_allocation": True},
    "copy_in_graph": {"copy_in_graph": True},
    "no_copy": {},
}


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
        size = abs(self.middle)
        digits = 0 if size >= 10 else 1 if size >= 1 else 2
        digits += any(end and not round(end, digits) for end in (self.low, self.high))  # not -0
        return f"{self.middle:.{digits}f}{self.unit} ({self.low:.{digits}f} to {self.high:.{digits}f})"


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

    @property
    def halves(self) -> tuple[tuple, tuple]:
        """(runner, batch) of the draft, and of the draft-extend."""
        return (self.draft, self.draft_batch), (self.draft_extend, self.draft_extend_batch)

    def copy_inputs(self) -> None:
        for runner, batch in self.halves:
            runner.copy_inputs(batch)

    def replay(self) -> list[torch.Tensor]:
        """Both replays whole; their outputs, valid until the next one."""
        outputs = []
        for runner, batch in self.halves:
            outputs += runner.replay(batch)
        return outputs

    def calls(self) -> list[Call]:
        made = []
        for runner, batch in self.halves:
            made += runner.calls(batch)
        return made

    def bursts(self) -> tuple[list[Launch], list[Launch]]:
        """The launches before the draft graph, and those before the draft-extend graph."""
        first, second = (runner.launches(batch) for runner, batch in self.halves)
        return first, second

    def launches(self) -> list[Launch]:
        first, second = self.bursts()
        return first + second

    def nodes(self) -> tuple[list[Launch], list[Launch]]:
        """The copies inside the draft and the draft-extend graph: no launches, but work of the device."""
        found = []
        for runner, batch in self.halves:
            producer = runner.producer(runner.padded_batch_size(batch.batch_size))
            found.append(launches(producer.inside))
        return tuple(found)

    def fields(self) -> pd.DataFrame:
        """What is copied on the device, a row a field."""
        rows = []
        for runner, batch in self.halves:
            for field in runner.buffers.fields:
                source = getattr(batch, field.name)
                if source is None or field.host:
                    continue
                row = {"replay": runner.table, "field": field.name, "shape": tuple(source.shape)}
                dtype = runner.buffers.tensors[field.name].dtype
                row["dtype"] = str(dtype).removeprefix("torch.")
                row["source"] = str(source.dtype).removeprefix("torch.")
                row["bytes"] = source.numel() * dtype.itemsize
                rows.append(row)
        return pd.DataFrame(rows)


def count_kinds(launches: list[Launch]) -> dict[str, int]:
    """How many launches of each kind, by the kind's label, and of all; for a row of a table."""
    found = Counter(KINDS[launch.kind].label for launch in launches)
    return {"all": len(launches)} | found


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
        for run in range(runs):
            with torch.profiler.record_function(f"run {run:02}"):
                way()
            if device == "cuda":
                torch.cuda.synchronize()
    trace = from_profiler(profile)
    runs = trace[trace.kind == "annotation"]
    return lanes(range_of(trace, runs.name[runs.dur_us.idxmin()]))


def range_of(trace: pd.DataFrame, name: str) -> pd.DataFrame:
    """What the first range of this name holds, without nested operators: they would hide the outermost."""
    inside = of_range(trace, name)
    inside = inside[inside.kind != "annotation"]
    operators = inside[inside.kind == "host_op"]
    ends = (operators.start_us + operators.dur_us).cummax().shift(fill_value=0.0)
    return inside.drop(operators.index[operators.start_us < ends])


def modelled_lanes(launches: list[Launch], profile: DeviceProfile) -> Lanes:
    """The launches played on a profile's device: a host lane and a stream lane."""
    return lanes(simulate(launches, profile))


def span_us(launches: list[Launch], profile: DeviceProfile) -> float:
    """Modelled time from the first host call to the end of the last work on the device."""
    table = simulate(launches, profile)
    return float((table.start_us + table.dur_us).max())


def graph_times(config: EagleConfig, profile: DeviceProfile, parameters: float = 8.03e9) -> Times:
    """The least time, in us, that the graphs of a step take: reading all their weights once, two bytes each.

    At the rate of memcpys, which read and write: reading alone is twice as fast. The head that draft runs a
    step less than its levels, and draft-extend once, has fc, one layer and the LM head.

    parameters: of the target, which verify runs.
    """
    hidden = config.hidden_size
    layer = 6 * hidden * hidden + 3 * hidden * config.intermediate_size
    head = layer + config.vocab_size * hidden
    weights_a_us = profile["memcpy_gb_per_s"] * 1e3
    read = ((config.num_steps - 1) * head, parameters, head)
    return {name: weights / weights_a_us for name, weights in zip(GRAPHS, read)}


def play(copies: StepCopies, profile: DeviceProfile, times: Times, regime: str) -> pd.DataFrame:
    """A whole step as a table of `simulate`. Raises ValueError for a regime that is none of REGIMES."""
    if regime not in REGIMES:
        raise ValueError(f"regime: expected one of {REGIMES}, got {regime!r}")
    first, second = copies.bursts()
    longer = dict(times)  # by the copies in a graph, each with the gap between two works of a stream
    for graph, nodes in zip((DRAFT, EXTEND), copies.nodes()):
        for node in nodes:
            longer[graph.reason] += device_us(node, profile) + profile["gap_us"]
    work = [*first, DRAFT, VERIFY, ACCEPTED, *second, EXTEND]
    return simulate(work, profile, longer, ahead=regime == AHEAD)


def step_lanes(
    copies: StepCopies, profile: DeviceProfile, times: Times, regime: str, longest_us: float = 120.0
) -> Lanes:
    """A whole step as lanes. Graphs are cut at `longest_us`, and say how long they are; waits are marked.

    Where the host is ahead, the step before is equally long in all that is compared, if that is long enough.
    """
    cut, words = {}, {}
    for graph, time_us in times.items():
        cut[graph] = min(time_us, longest_us)
        words[graph] = f"{graph}\n{time_us / 1000:.3g} ms"
    table = play(copies, profile, cut, regime)
    name = table.name.astype(object).replace(words)
    kind = table.kind.astype(object)
    waits = (name == MEMCPY) & (table.dur_us > 2 * profile["host_memcpy_us"])
    name = name.mask(waits, "waits for verify")
    table = table.assign(name=name, kind=kind.mask(waits, "wait"))
    if regime == AHEAD:
        on_stream = table.stream >= 0
        first_us = table.start_us[on_stream].min()
        later_us = max(250.0 - first_us, 0.0)
        first_us += later_us
        table["start_us"] += later_us * on_stream
        before = table[table.kind == "graph"].iloc[:1]
        before = before.assign(
            name="the step before",
            start_us=0.0,
            dur_us=first_us - profile["gap_us"],
        )
        table = pd.concat([before, table])
    return lanes(table)


def step_us(copies: StepCopies, profile: DeviceProfile, times: Times, regime: str) -> float:
    """Modelled time of a whole step, to the end of the draft-extend graph.

    It begins with the host's first call, or, where the host is ahead, with the first work on the device.
    """
    table = play(copies, profile, times, regime)
    begin_us = 0.0
    if regime == AHEAD:
        begin_us = table.start_us[table.stream >= 0].min()
    return float((table.start_us + table.dur_us).max() - begin_us)


def copy_share(copies: StepCopies, profile: DeviceProfile, times: Times, regime: str) -> float:
    """Modelled share of a step in which no graph runs."""
    return 1 - sum(times.values()) / step_us(copies, profile, times, regime)


def host_saving(before: Timing, after: Timing) -> Range:
    """What the host saves in one call: median over the rounds, and their middle half."""
    saved = [old - new for old, new in zip(before.host_us, after.host_us, strict=True)]
    return Range(median(saved), *quartiles(saved))


def saving(before: StepCopies, after: StepCopies, profile: DeviceProfile, regime: str) -> Range:
    """What a step gets shorter by, with its range over all that the profile only assumes."""
    times = dict.fromkeys(GRAPHS, 1000.0)  # of graphs that outlast the host's calls
    found = []
    for end in (None, "fast", "slow"):
        figures = dict(profile.figures)
        for name in profile.unknown if end else ():
            figures[name] = profile.at(end).figures[name]
        played = dataclasses.replace(profile, figures=figures)
        whole = step_us(before, played, times, regime)
        found.append(whole - step_us(after, played, times, regime))
    return Range(found[0], min(found), max(found))
