"""The copies of one speculative step, both replays together: counted, measured here, modelled for a GPU.

A step is: draft's copies | draft graph | verify | draft-extend's copies | draft-extend graph. The regimes are
WAITS: the host begins each run of copies on an empty stream, since it waited for verify's result or for its
scheduler; and AHEAD: it makes all its calls while earlier work still runs."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Self

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
from lib.kinds import KINDS, MEMCPY, Launch
from lib.launches import launches
from lib.profiles import AHEAD, WAITS, DeviceProfile, device_us, lanes, simulate
from lib.workbench.timing import Range

REGIMES = (WAITS, AHEAD)
GRAPHS = ("draft graph", "verify", "draft-extend graph")
GRAPH = Launch("graph", 0, 0, "")
EARLIER = replace(GRAPH, reason="the step before")  # runs while a host that is ahead makes its calls
ACCEPTED = Launch("dtoh", 1, 256, "which tokens verify kept")  # a host that is not needs it to go on
OPTIONS = {  # ways that ask something of who makes the inputs: a runner's options
    "one_allocation": {"one_allocation": True},
    "copy_in_graph": {"copy_in_graph": True},
    "no_copy": {},
}


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
        model: DraftModel | None = None,
    ) -> Self:
        """Runners and random batches. way: a strategy, or one of OPTIONS. model: what `replay` runs."""
        strategy = "grouped_foreach_dma" if way in OPTIONS else way
        options = OPTIONS.get(way, {})
        runners = []
        batches = []
        for runner_class in (EagleDraftCudaGraphRunner, EagleDraftExtendCudaGraphRunner):
            runner = runner_class(config, strategy, device, model, **options)
            batch = runner.batch_class.random(config, batch_size, device=device)
            if way in OPTIONS:  # the producer writes to where the runner wants it
                batch = runner.place(batch)
            runners.append(runner)
            batches.append(batch)
        return cls(*runners, *batches)

    @property
    def halves(self) -> tuple[tuple, tuple]:
        """(runner, batch) of the draft, and of the draft-extend."""
        return (self.draft, self.draft_batch), (self.draft_extend, self.draft_extend_batch)

    def copy_inputs(self) -> None:
        for runner, batch in self.halves:
            runner.copy_inputs(batch)

    def replay(self) -> list[torch.Tensor]:
        """Both replays whole; their outputs, valid until the next one."""
        return [output for runner, batch in self.halves for output in runner.replay(batch)]

    def calls(self) -> list[Call]:
        return [call for runner, batch in self.halves for call in runner.calls(batch)]

    def bursts(self) -> list[list[Launch]]:
        """The launches before the draft graph, and those before the draft-extend graph."""
        return [runner.launches(batch) for runner, batch in self.halves]

    def launches(self) -> list[Launch]:
        return launches(self.calls())

    def nodes(self) -> list[list[Launch]]:
        """The copies inside the draft and the draft-extend graph: no launches, but work of the device."""
        found = []
        for runner, batch in self.halves:
            captured = runner.padded_batch_size(batch.batch_size)
            found.append(launches(runner.producer(captured).inside))
        return found

    def fields(self) -> pd.DataFrame:
        """What is copied on the device, a row a field."""
        rows = []
        for runner, batch in self.halves:
            for name, static in runner.buffers.static_inputs().items():
                source = getattr(batch, name)
                dtype = static.buffer.dtype
                size = source.numel() * dtype.itemsize
                rows.append((batch.table, name, tuple(source.shape), dtype, source.dtype, size))
        return pd.DataFrame(rows, columns=["replay", "field", "shape", "dtype", "source", "bytes"])


def count_kinds(launches: list[Launch]) -> dict[str, int]:
    """How many launches of each kind, by the kind's label, and of all; for a row of a table."""
    found = Counter(KINDS[launch.kind].label for launch in launches)
    return {"all": len(launches)} | found


def graph_times(config: EagleConfig, profile: DeviceProfile) -> dict[str, float]:
    """The least us that each of GRAPHS takes: reading all its weights once, two bytes each, at the rate of
    memcpys, which read and write: reading alone is twice as fast. Verify runs a target of 8.03 billion
    parameters; draft a head of fc, layer and LM head, once less than its levels; draft-extend once."""
    hidden = config.hidden_size
    head = hidden * (6 * hidden + 3 * config.intermediate_size + config.vocab_size)
    read = np.array([(config.num_steps - 1) * head, 8.03e9, head])
    return dict(zip(GRAPHS, read / profile["memcpy_gb_per_s"] / 1e3))


def play(copies: StepCopies, profile: DeviceProfile, times: dict, regime: str) -> pd.DataFrame:
    """A whole step as a table of `simulate`. times: of the three graphs by name, then of others."""
    first, second = copies.bursts()
    draft, verify, extend, *_ = (replace(GRAPH, reason=name) for name in times)
    longer = {EARLIER.reason: 10_000.0} | times
    for graph, nodes in zip((draft, extend), copies.nodes()):
        for node in nodes:  # and the gap between two works of a stream
            longer[graph.reason] += device_us(node, profile) + profile["gap_us"]
    work = [*first, draft, verify, ACCEPTED, *second, extend]
    if regime == AHEAD:
        work = [EARLIER, *first, draft, verify, *second, extend]
    return simulate(work, profile, longer)


def step_lanes(
    copies: StepCopies, profile: DeviceProfile, times: dict, regime: str
) -> dict[str, pd.DataFrame]:
    """A whole step as lanes. Graphs are cut to 120 us, and say how long they are; waits are marked."""
    cut = {f"{graph}, {us / 1000:.3g} ms": min(us, 120.0) for graph, us in times.items()}
    table = play(copies, profile, cut | {EARLIER.reason: 250.0}, regime)
    table = table.astype({"name": object, "kind": object})
    waits = (table.name == MEMCPY) & (table.dur_us > 2 * profile["host_memcpy_us"])
    table.loc[waits, ["name", "kind"]] = "waits for verify", "wait"
    return lanes(table)


def step_us(copies: StepCopies, profile: DeviceProfile, times: dict, regime: str) -> float:
    """Modelled time of a step, from the first call or, if the host is ahead, the end of the step before."""
    table = play(copies, profile, times, regime)
    ends = table.start_us + table.dur_us
    earlier = table.name == EARLIER.reason
    return float(ends.max() - ends[earlier].sum())


def saving(before: StepCopies, after: StepCopies, profile: DeviceProfile, regime: str) -> Range:
    """What a step gets shorter by, with its range over all that the profile only assumes."""
    times = dict.fromkeys(GRAPHS, 1000.0)  # of graphs that outlast the host's calls
    found = []
    for end in ("middle", "fast", "slow"):
        assumed = profile.at(end).figures
        figures = profile.figures | {name: assumed[name] for name in profile.unknown}
        played = replace(profile, figures=figures)
        before_us = step_us(before, played, times, regime)
        after_us = step_us(after, played, times, regime)
        found.append(before_us - after_us)
    return Range(found[0], min(found), max(found))
