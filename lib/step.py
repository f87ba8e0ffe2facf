"""The copies of one speculative step, both replays together: counted, measured here, modelled for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lib.device_model import DeviceProfile, simulate
from lib.eagle import (
    DraftBatch,
    DraftExtendBatch,
    EagleConfig,
    EagleDraftCudaGraphRunner,
    EagleDraftExtendCudaGraphRunner,
)
from lib.routes import Launch
from lib.strategies import Strategy
from lib.traces import DEVICE_KINDS, HOST_KINDS, from_profiler

if TYPE_CHECKING:
    import pandas as pd

# Operators told apart in a measured host lane, by the plot's kinds.
HOST_COPIES = {"aten::copy_": "host_copy", "aten::_foreach_copy_": "host_foreach", "aten::fill_": "fill"}


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
        strategy: str | Strategy,
        batch_size: int,
        device: str = "cpu",
        seed: int = 0,
    ) -> StepCopies:
        """Runners without graphs, their buffers, and random batches where the strategy wants its sources."""
        draft = EagleDraftCudaGraphRunner(config, strategy, device)
        draft_extend = EagleDraftExtendCudaGraphRunner(config, strategy, device)
        return cls(
            draft,
            draft_extend,
            draft.place(DraftBatch.random(config, batch_size, seed, device)),
            draft_extend.place(DraftExtendBatch.random(config, batch_size, seed, device)),
        )

    def copy_inputs(self) -> None:
        self.draft.copy_inputs(self.draft_batch)
        self.draft_extend.copy_inputs(self.draft_extend_batch)

    def launches(self) -> list[Launch]:
        return self.draft.launches(self.draft_batch) + self.draft_extend.launches(self.draft_extend_batch)


def launch_rows(launches: list[Launch]) -> dict[str, int]:
    """How many launches of each kind, for a table."""
    kinds = ("memcpy", "elementwise", "foreach", "fused", "fill")
    return {kind: sum(launch.kind == kind for launch in launches) for kind in kinds} | {"all": len(launches)}


def without_fills(launches: list[Launch]) -> list[Launch]:
    return [launch for launch in launches if launch.kind != "fill"]


def measured_lanes(
    run: Callable[[], object], device: str = "cpu", warmup: int = 20
) -> dict[str, pd.DataFrame]:
    """What torch.profiler sees of one `run()` on this machine: a host lane and, on CUDA, each stream's.

    Of several runs the shortest, which is the least disturbed one, is shown. The profiler itself slows the
    host, so what counts here is order and shares, not the sum; times to compare come from `lib.timing`. Of
    nested operators only the outermost is kept.
    """
    on_gpu = torch.device(device).type == "cuda"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a copy shared out to threads would show their waiting, on a busy machine
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    try:
        for _ in range(warmup):
            run()
        with torch.profiler.profile(activities=activities) as prof:
            for _ in range(15):
                with torch.profiler.record_function("one step"):
                    run()
                if on_gpu:
                    torch.cuda.synchronize()
    finally:
        torch.set_num_threads(threads)
    table = from_profiler(prof)
    steps = table[(table.kind == "annotation") & (table.name == "one step")].sort_values("start_us")
    start = steps.start_us[steps.dur_us.idxmin()]
    following = steps.start_us[steps.start_us > start]
    stop = following.iloc[0] if len(following) else float("inf")
    table = table[(table.start_us >= start) & (table.start_us < stop)]
    table = table.assign(start_us=table.start_us - start)
    host = table[table.kind == "host_op"].sort_values("start_us")
    outermost = host.start_us >= (host.start_us + host.dur_us).cummax().shift(fill_value=0.0)
    host = host[outermost]
    lanes = {"host · measured": host.assign(kind=host.name.map(HOST_COPIES).fillna("host_op"))}
    for track, events in table[table.kind.isin(DEVICE_KINDS)].groupby("track"):
        lanes[f"{track} · measured"] = events
    return lanes


def modelled_lanes(launches: list[Launch], profile: DeviceProfile) -> dict[str, pd.DataFrame]:
    """The launches played on a profile's device: a host lane and a stream lane."""
    table = simulate(launches, profile)
    on_host = table.kind.isin(HOST_KINDS)
    return {
        f"host · modelled {profile.name}": table[on_host],
        f"stream · modelled {profile.name}": table[~on_host],
    }


def span_us(launches: list[Launch], profile: DeviceProfile) -> float:
    """Modelled time from the first host call to the end of the last work on the device."""
    table = simulate(launches, profile)
    return float((table.start_us + table.dur_us).max())


def assumed_range_us(launches: list[Launch], profile: DeviceProfile) -> tuple[float, float]:
    """`span_us` with the profile's assumed figures at their fast and at their slow ends; fitted ones stay."""
    ends = []
    for end in ("fast", "slow"):
        figures = profile.figures | {name: profile.at(end).figures[name] for name in profile.unknown}
        ends.append(span_us(launches, replace(profile, figures=figures)))
    return ends[0], ends[1]


def saving(before: list[Launch], after: list[Launch], profile: DeviceProfile) -> str:
    """ "63 µs (34 to 77)": the modelled saving, and its range over what the profile assumes of foreach."""
    whole, (fast, slow) = span_us(before, profile), assumed_range_us(after, profile)
    return f"{whole - span_us(after, profile):.0f} µs ({whole - slow:.0f} to {whole - fast:.0f})"


def idle_share(launches: list[Launch], profile: DeviceProfile) -> float:
    """Modelled share of the stream's span, first to last work, in which it executes nothing."""
    table = simulate(launches, profile)
    work = table[table.kind.isin(DEVICE_KINDS)]
    span = (work.start_us + work.dur_us).max() - work.start_us.min()
    return float(1 - work.dur_us.sum() / span)


def device_us(kind: str, nbytes: int, profile: DeviceProfile) -> float:
    """Modelled time on the device of one launch of `kind` that writes `nbytes`."""
    table = simulate([Launch(kind, 1, nbytes, "one tensor")], profile)
    return float(table.dur_us[table.kind.isin(DEVICE_KINDS)].iloc[0])
