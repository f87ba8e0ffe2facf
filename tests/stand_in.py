"""A stand-in for the GPU of scripts/record.py: work runs on the CPU, times are those of a device profile."""

from pathlib import Path

import numpy as np
import pandas as pd

from lib.launches import Launch
from lib.profiles import DeviceProfile, simulate
from lib.profiles.traces import event_table
from lib.workbench.timing import Timing
from scripts import record

ROOT = Path(__file__).resolve().parents[1]
V100 = DeviceProfile.load("v100")
WAIT = Launch("dtoh", 1, 0, "the host waits for the device")


class StandIn(record.Gpu):
    """Launches what lib/launches.py predicts, but for `quirk`, which may change a launch. fails: what to
    raise at the n-th call of `trace`, by n from 1."""

    torch_device = "cpu"
    evidence = "modelled"

    def __init__(self, quirk=lambda launch: launch, fails: dict[int, BaseException] | None = None) -> None:
        self.quirk, self.fails, self.traces = quirk, fails or {}, 0

    def facts(self) -> dict[str, object]:
        return {"device": f"modelled {V100.device}", "driver": "none"}

    def measure(self, ways: dict, rounds: int, calls: int) -> dict[str, Timing]:
        noise = 1 + 0.02 * np.sin(np.arange(rounds))
        timings = {}
        for name, (run, made) in ways.items():
            if name != "fused":  # which is interpreted, slow, and was tried before
                run()
            table = simulate([*map(self.quirk, made)] or [WAIT], V100, 300.0).set_index("kind")
            ends = table.start_us + table.dur_us
            timings[name] = Timing(tuple(ends["runtime"].max() * noise), tuple(ends.max() * noise))
        return timings

    def trace(self, ways: dict, repeats: int) -> pd.DataFrame:
        """Each way once, since every time is the same; its annotation lies between two waits."""
        self.traces += 1
        if self.traces in self.fails:
            raise self.fails[self.traces]
        work, waits = [WAIT], [1]
        for _, made in ways.values():
            work += [*map(self.quirk, made), WAIT]
            waits.append(len(work))
        table = simulate(work, V100, 300.0)
        called_us = table[table.kind == "runtime"].set_index("correlation").start_us[waits].to_numpy()
        spans = table.iloc[[0] * len(ways)].assign(name=[*ways], kind="annotation", correlation=-1)
        spans = spans.assign(start_us=called_us[:-1] + 0.1, dur_us=np.diff(called_us) - 0.2)
        return event_table(pd.concat([spans, table]), **table.attrs)
