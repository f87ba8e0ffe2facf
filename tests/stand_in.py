"""A stand-in for the GPU of scripts/record.py: work runs on the CPU, times are those of a device profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from lib.launches import Launch
from lib.profiles import HOST_KINDS, DeviceProfile, simulate
from lib.workbench.timing import Timing
from scripts import record

ROOT = Path(__file__).resolve().parents[1]


class StandIn(record.Gpu):
    """Launches what lib/launches.py predicts, but for `quirk`, which may change a launch.

    fails: what to raise at the n-th call of `measure` or `trace`, by n from 1.
    """

    torch_device = "cpu"
    evidence = "modelled"

    def __init__(self, quirk=lambda launch: launch, fails: dict[int, BaseException] | None = None) -> None:
        self.profile = DeviceProfile.load("v100")
        self.quirk, self.fails, self.calls = quirk, fails or {}, 0
        self.played: dict[tuple, pd.DataFrame] = {}  # one step is played many times

    def facts(self) -> dict[str, object]:
        return {"device": f"modelled {self.profile.device}", "driver": "none"}

    def measure(self, ways: dict, rounds: int, calls: int) -> dict[str, Timing]:
        self._tick()
        noise = 1 + 0.02 * np.sin(np.arange(rounds))
        timings = {}
        for name, (run, made) in ways.items():
            if name != "fused":  # which is interpreted, slow, and was tried before
                run()
            table = self._play(made)
            ends = table.start_us + table.dur_us
            host_us = ends[table.kind.isin(HOST_KINDS)].max()
            timings[name] = Timing(tuple(host_us * noise), tuple(ends.max() * noise))
        return timings

    def trace(self, ways: dict, repeats: int) -> pd.DataFrame:
        """Each way once, since every time is the same: its annotation, host calls and work."""
        self._tick()
        tables, now = [], 0.0
        for number, (name, (_, made)) in enumerate(ways.items()):
            part = self._play(made)
            ends = part.start_us + part.dur_us
            host_us = ends[part.kind.isin(HOST_KINDS)].max() if made else 1.0
            span = part[:1].assign(name=name, kind="annotation", start_us=now, dur_us=host_us, correlation=-1)
            own = part.correlation.where(part.correlation < 0, part.correlation + 1000 * number)
            part = part.assign(start_us=part.start_us + now, correlation=own)
            tables += [span, part[: len(part) * bool(made)]]
            now += ends.max() + 50
        table = pd.concat(tables).sort_values("start_us", kind="stable", ignore_index=True)
        texts = dict.fromkeys(("name", "track", "kind"), "category")
        table = table.astype({**part.dtypes, **texts})
        table.attrs = dict(part.attrs)
        return table

    def _play(self, launches: Sequence[Launch]) -> pd.DataFrame:
        made = tuple(map(self.quirk, launches))
        if made not in self.played:  # nothing to play is a moment of something
            self.played[made] = simulate(made or [Launch("fill", 1, 0, "")], self.profile, 300.0)
        return self.played[made]

    def _tick(self) -> None:
        self.calls += 1
        if self.calls in self.fails:
            raise self.fails[self.calls]
