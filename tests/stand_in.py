"""A stand-in for the GPU of lib/record.py: work runs on the CPU, times are those of a device profile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pandas as pd

from lib.device_model import DeviceProfile, simulate
from lib.record import GpuDevice, Way
from lib.routes import Launch
from lib.timing import Timing
from lib.traces import KINDS


class StandIn(GpuDevice):
    """Launches what lib/routes.py predicts, but for `quirk`, which may change a launch or make it None.

    fail_after: raise KeyboardInterrupt at this call of `measure` or `trace`, counted from 1.
    """

    torch_device = "cpu"

    def __init__(self, profile: str = "v100", free: int = 2**28, quirk=None, fail_after: int | None = None):
        self.profile, self.free, self.quirk, self.left = DeviceProfile.load(profile), free, quirk, fail_after
        self.calls = 0
        self._played = lru_cache(maxsize=4096)(self._simulate)  # one step is played many times

    def facts(self) -> dict[str, object]:
        return {"device": self.profile.device, "driver": "none"}

    def free_bytes(self) -> int:
        return self.free

    def measure(self, ways: dict[str, Way], rounds: int, calls: int) -> dict[str, Timing]:
        self._tick()
        noise = 1 + 0.02 * np.sin(np.arange(rounds))
        timings = {}
        for name, way in ways.items():
            table = self._play(way.launches)
            end, host = table["start_us"] + table["dur_us"], table["thread"] >= 0
            timings[name] = Timing(name, tuple(end[host].max() * noise), tuple(end.max() * noise))
        return timings

    def trace(self, ways: dict[str, Way], repeats: int) -> pd.DataFrame:
        self._tick()
        tables, now = [], 0.0
        for name, way in list(ways.items()) * repeats:
            played = self._play(way.launches)
            end = played["start_us"] + played["dur_us"]
            on_host = {"kind": "annotation", "track": "host 0", "stream": -1, "thread": 0, "correlation": -1}
            host_us = end[played["thread"] >= 0].max()
            span = on_host | {"name": name, "start_us": 0.0, "dur_us": host_us}
            text = dict.fromkeys(("name", "kind", "track"), object)
            one = pd.concat([pd.DataFrame([span]), played.astype(text)])
            own = one["correlation"].where(one["correlation"] < 0, one["correlation"] + 1000 * len(tables))
            tables.append(one.assign(start_us=one["start_us"] + now, correlation=own))
            now += end.max() + 50
        table = pd.concat(tables).sort_values("start_us", kind="stable", ignore_index=True)
        types = {"name": "category", "kind": pd.CategoricalDtype(list(KINDS)), "track": "category"}
        table = table.astype(types | {"correlation": "int64", "bytes": float})
        table.attrs = played.attrs
        return table

    def _play(self, launches: Sequence[Launch]) -> pd.DataFrame:
        made = (self.quirk(x) if self.quirk else x for x in launches)
        return self._played(tuple(x for x in made if x))

    def _simulate(self, made: tuple[Launch, ...]) -> pd.DataFrame:
        if not made:  # nothing to play: an empty table of the same shape, one moment long
            return simulate([Launch("fill", 1, 0, "")], self.profile).iloc[:1].assign(dur_us=0.1)
        return simulate(made, self.profile, graph_us=300.0)

    def _tick(self) -> None:
        self.calls += 1
        if self.calls == self.left:
            raise KeyboardInterrupt
