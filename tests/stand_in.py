"""A stand-in for the GPU of scripts/record.py: work runs on the CPU, times are those of a device profile."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from lib.launches import Launch
from lib.profiles import HOST_KINDS, DeviceProfile, simulate
from lib.workbench.timing import Timing
from scripts import record

ROOT = Path(__file__).resolve().parents[1]
V100 = DeviceProfile.load("v100")


@cache  # one step is played many times
def play(made: tuple[Launch, ...]) -> tuple[pd.DataFrame, float, float]:
    """What is modelled, of nothing a moment, and when the host and the device are done with it (us)."""
    table = simulate(made or [Launch("fill", 1, 0, "")], V100, 300.0)
    ends = table.start_us + table.dur_us
    return table, ends[table.kind.isin(HOST_KINDS)].max(), ends.max()


class StandIn(record.Gpu):
    """Launches what lib/launches.py predicts, but for `quirk`, which may change a launch. fails: what to
    raise at the n-th call of `measure` or `trace`, by n from 1."""

    torch_device = "cpu"
    evidence = "modelled"

    def __init__(self, quirk=lambda launch: launch, fails: dict[int, BaseException] | None = None) -> None:
        self.quirk, self.fails, self.calls = quirk, fails or {}, 0

    def facts(self) -> dict[str, object]:
        return {"device": f"modelled {V100.device}", "driver": "none"}

    def measure(self, ways: dict, rounds: int, calls: int) -> dict[str, Timing]:
        self._tick()
        noise = 1 + 0.02 * np.sin(np.arange(rounds))
        timings = {}
        for name, (run, made) in ways.items():
            if name != "fused":  # which is interpreted, slow, and was tried before
                run()
            _, host_us, end_us = play(tuple(map(self.quirk, made)))
            timings[name] = Timing(name, tuple(host_us * noise), tuple(end_us * noise))
        return timings

    def trace(self, ways: dict, repeats: int) -> pd.DataFrame:
        """Each way once, since every time is the same: its annotation, host calls and work."""
        self._tick()
        tables, now = [], 0.0
        for number, (name, (_, made)) in enumerate(ways.items()):
            part, host_us, end_us = play(tuple(map(self.quirk, made)))
            host_us = host_us if made else 1.0
            span = part[:1].assign(name=name, kind="annotation", start_us=now, dur_us=host_us, correlation=-1)
            own = part.correlation.where(part.correlation < 0, part.correlation + 1000 * number)
            part = part.assign(start_us=part.start_us + now, correlation=own)
            tables += [span, part[: len(part) * bool(made)]]
            now += end_us + 50
        table = pd.concat(tables).sort_values("start_us", kind="stable", ignore_index=True)
        table = table.astype({**part.dtypes, "name": "category", "track": "category", "kind": "category"})
        table.attrs = dict(part.attrs)
        return table

    def _tick(self) -> None:
        self.calls += 1
        if self.calls in self.fails:
            raise self.fails[self.calls]
