"""The copies of one speculative step, both replays together: counted, measured here, modelled for a GPU.

A step is: draft's copies | draft graph | verify | draft-extend's copies | draft-extend graph. What the copies
cost depends on the regime. WAITS: the host begins each run of copies on an empty stream, since it waited for
verify's result or for its scheduler. AHEAD: it makes all its calls while earlier work still runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

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
from lib.workbench.timing import Range, Timing, spread

REGIMES = (WAITS, AHEAD)
DRAFT = Launch("graph", 0, 0, "draft graph")
VERIFY = Launch("graph", 0, 0, "verify")
EXTEND = Launch("graph", 0, 0, "draft-extend graph")
GRAPHS = (DRAFT.reason, VERIFY.reason, EXTEND.reason)
EARLIER = Launch("graph", 0, 0, "the step before")  # runs while a host that is ahead makes its calls
ACCEPTED = Launch("dtoh", 1, 256, "which tokens verify kept")  # a host that is not needs it to go on
OPTIONS = ("one_allocation", "copy_in_graph", "no_copy")  # ways that ask something of who makes the inputs


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
    ) -> StepCopies:
        """Runners and random batches. way: a strategy, or one of OPTIONS. model: what `replay` runs."""
        strategy = "grouped_foreach_dma" if way in OPTIONS else way
        options = {"device": device, "model": model}
        if way in OPTIONS[:2]:
            options[way] = True
        draft = EagleDraftCudaGraphRunner(config, strategy, **options)
        extend = EagleDraftExtendCudaGraphRunner(config, strategy, **options)
        batch = DraftBatch.random(config, batch_size, device=device)
        extend_batch = DraftExtendBatch.random(config, batch_size, device=device)
        if way in OPTIONS:  # the producer writes to where the runner wants it
            batch = draft.place(batch)
            extend_batch = extend.place(extend_batch)
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
        calls = []
        for runner, batch in self.halves:
            calls += runner.calls(batch)
        return calls

    def bursts(self) -> list[list[Launch]]:
        """The launches before the draft graph, and those before the draft-extend graph."""
        return [runner.launches(batch) for runner, batch in self.halves]

    def launches(self) -> list[Launch]:
        return launches(self.calls())

    def nodes(self) -> list[list[Launch]]:
        """The copies inside the draft and the draft-extend graph: no launches, but work of the device."""
        found = []
        for runner, batch in self.halves:
            producer = runner.producer(runner.padded_batch_size(batch.batch_size))
            found.append(launches(producer.inside))
        return found

    def fields(self) -> pd.DataFrame:
        """What is copied on the device, a row a field."""
        rows = []
        for runner, batch in self.halves:
            for name, static in runner.buffers.static_inputs().items():
                source = getattr(batch, name)
                if source is not None:
                    dtype = static.buffer.dtype
                    dtypes = str(dtype)[6:], str(source.dtype)[6:]
                    size = source.numel() * dtype.itemsize
                    rows.append((batch.table, name, tuple(source.shape), *dtypes, size))
        return pd.DataFrame(rows, columns=["replay", "field", "shape", "dtype", "source", "bytes"])


def count_kinds(launches: list[Launch]) -> dict[str, int]:
    """How many launches of each kind, by the kind's label, and of all; for a row of a table."""
    found = Counter(KINDS[launch.kind].label for launch in launches)
    return {"all": len(launches)} | found


def graph_times(config: EagleConfig, profile: DeviceProfile) -> dict[str, float]:
    """The least time, in us, that the graphs of a step take: reading all their weights once, two bytes each.

    At the rate of memcpys, which read and write: reading alone is twice as fast. Verify runs a target of 8.03
    billion parameters; draft a head of fc, layer and LM head, once less than its levels; draft-extend once.
    """
    hidden = config.hidden_size
    layer = 6 * hidden * hidden + 3 * hidden * config.intermediate_size
    head = layer + config.vocab_size * hidden
    read = np.array([(config.num_steps - 1) * head, 8.03e9, head])
    return dict(zip(GRAPHS, read / profile["memcpy_gb_per_s"] / 1e3))


def play(
    copies: StepCopies, profile: DeviceProfile, times: dict, regime: str, earlier_us: float = 10_000.0
) -> pd.DataFrame:
    """A whole step as a table of `simulate`. earlier_us: left of the step before, where the host is ahead."""
    first, second = copies.bursts()
    longer = times | {EARLIER.reason: earlier_us}
    for graph, nodes in zip((DRAFT, EXTEND), copies.nodes()):
        for node in nodes:  # and the gap between two works of a stream
            longer[graph.reason] += device_us(node, profile) + profile["gap_us"]
    work = [*first, DRAFT, VERIFY, ACCEPTED, *second, EXTEND]
    if regime == AHEAD:
        work = [EARLIER, *first, DRAFT, VERIFY, *second, EXTEND]
    return simulate(work, profile, longer)


def step_lanes(
    copies: StepCopies, profile: DeviceProfile, times: dict, regime: str
) -> dict[str, pd.DataFrame]:
    """A whole step as lanes. Graphs are cut to 120 us, and say how long they are; waits are marked."""
    cut, words = {}, {}
    for graph, time_us in times.items():
        cut[graph] = min(time_us, 120.0)
        words[graph] = f"{graph}, {time_us / 1000:.3g} ms"
    table = play(copies, profile, cut, regime, earlier_us=250.0)
    table = table.astype({"name": object, "kind": object}).replace({"name": words})
    waits = (table.name == MEMCPY) & (table.dur_us > 2 * profile["host_memcpy_us"])
    table.loc[waits, ["name", "kind"]] = "waits for verify", "wait"
    return lanes(table)


def step_us(copies: StepCopies, profile: DeviceProfile, times: dict, regime: str) -> float:
    """Modelled time of a step, from the first call or, if the host is ahead, the end of the step before."""
    table = play(copies, profile, times, regime)
    ends = table.start_us + table.dur_us
    return float(ends.max() - ends[table.name == EARLIER.reason].sum())


def host_saving(before: Timing, after: Timing) -> Range:
    """What the host saves in one call: median over the rounds, and their middle half."""
    return spread(np.subtract(before.host_us, after.host_us))


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
