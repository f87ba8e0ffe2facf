"""Read what scripts/record.py measured on one GPU: tables, traces and a profile, each with its evidence.

A recording is a folder: meta.json, one `.jsonl` a table (one JSON object a line, times in us), traces/ and
profile.json. It is valid from the moment its meta.json is there: of a run cut short the lines written so far.
"""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from lib.launches import KINDS, Launch
from lib.profiles import lanes, load_trace
from lib.workbench.evidence import label
from lib.workbench.step import Lanes, range_of
from lib.workbench.timing import Timing

RECORDINGS = Path(__file__).resolve().parents[2] / "data" / "recordings"
FORMAT = 2
# steps: copy_inputs of both runners, a row a way. replays: replay of both; equal: whether the outputs' bits
# are per_copy's. crossover: a row a way of copying n tensors of `bytes` bytes, by memcpy, foreach or
# elementwise; for one tensor in_group and beside_group: in a foreach call with 8 small ones, or by a memcpy
# after it. In all: host_us and gpu_us, samples; predicted and counted, launches by kind, {"memcpy": 7}; the
# latter is null where the profiler failed.
TABLES = ("steps", "replays", "crossover")
WORK = {  # "<runtime call> <kind of event>: <name>" of work on a device -> its kind in KINDS
    "GraphLaunch| graph: ": "graph",
    "multi_tensor_apply_kernel.*Copy": "foreach",
    "fused_copy|small_copy": "fused",
    "FillFunctor": "fill",
    "memcpy_htod: ": "htod",
    "memcpy_dtoh: ": "dtoh",
    " memcpy: |rocclr_copyBuffer": "memcpy",  # ROCm's driver copies by a kernel of that name
    "copy_kernel: ": "elementwise",
}


def launch_kind(name: str, kind: str, call: str = "") -> str:
    """The kind in KINDS of an event on a device; for other work its own kind and name."""
    event = f"{call} {kind}: {name}"
    for pattern, ours in WORK.items():
        if re.search(pattern, event):
            return ours
    return f"{kind} {name[:80]}"


@dataclass(frozen=True)
class Recording:
    """One recording. meta: device, driver, torch, date and more; tables: each of TABLES, perhaps empty."""

    path: Path
    meta: dict
    tables: dict[str, pd.DataFrame]

    def label(self) -> str:
        """What every figure and table of it has to say; "modelled" where a stand-in for a GPU made it."""
        meta = self.meta
        return label(meta["evidence"], meta["device"], meta["torch"], meta["date"])

    def lanes(self, way: str) -> Lanes:
        """One step of a way's trace, as lanes for `plots.timeline`."""
        trace = load_trace(self.path / "traces" / f"{way}.json.gz")
        return lanes(range_of(trace, way))

    def where(self, table: str, **values: object) -> pd.DataFrame:
        """The rows of a table that have these values, e.g. where("steps", batch_size=8)."""
        rows = self.tables[table]
        for column, value in values.items():
            if len(rows):
                rows = rows[rows[column] == value]
        return rows

    def timings(self, table: str, **values: object) -> dict[str, Timing]:
        """Samples by way, for `plots.timings`, of one case of "steps" or "replays"."""
        found = {}
        for row in self.where(table, **values).itertuples():
            found[row.way] = Timing(row.way, tuple(row.host_us), tuple(row.gpu_us))
        return found

    def launches(self, **values: object) -> dict[str, list[Launch]]:
        """Launches by way that the profiler counted in a case of "steps", for `plots.launch_counts`."""
        made = {}
        for row in self.where("steps", **values).itertuples():
            if row.counted is not None:
                kinds = Counter(row.counted).elements()
                made[row.way] = [Launch(kind, 1, 0, "counted by a profiler") for kind in kinds]
        return made

    def crossover_lines(self, n: int = 1, dtype: str = "int16") -> dict[str, tuple[list, list]]:
        """Bytes of each of n tensors and the GPU's median us of moving them, by way, for `plots.curves`."""
        lines = {}
        for way in ("memcpy", "foreach", "elementwise"):
            rows = self.where("crossover", n=n, dtype=dtype, way=way)
            if len(rows):
                times = rows.gpu_us.map(np.median)
                lines[KINDS[way].label] = (rows.bytes.tolist(), times.tolist())
        return lines

    def dma_bytes(self) -> int | None:
        """From this size on a memcpy of its own is at least as fast on the GPU as a place in the group.

        That is, at this and every larger size recorded, for every dtype. None where that was not recorded, or
        where the group won at the largest size.
        """
        sizes = []
        rows = self.where("crossover", n=1)
        if rows.empty:
            return None
        for _, of_dtype in rows.groupby("dtype"):
            medians = of_dtype.assign(us=of_dtype.gpu_us.map(np.median))
            medians = medians.pivot_table("us", "bytes", "way").reindex(columns=["beside_group", "in_group"])
            wins = (medians.beside_group <= medians.in_group)[::-1].cummin()
            sizes.append(wins.index[wins].min())
        return None if np.isnan(sizes).any() else int(max(sizes))


def load(recording: str | Path) -> Recording:
    """A recording of data/recordings/ by name, or any by path.

    Raises:
        ValueError: no recording there, of another format, or one whose parts contradict its evidence.
    """
    path = RECORDINGS / recording if (RECORDINGS / recording).is_dir() else Path(recording)
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        if meta["format"] != FORMAT or meta["evidence"] not in ("recorded", "modelled"):
            raise ValueError(f"format {meta['format']}, evidence {meta['evidence']}")
        for field, of_type in {"device": str, "torch": str, "date": str, "skipped": list}.items():
            if not isinstance(meta[field], of_type) or meta[field] == "":
                raise ValueError(f"{field}: expected a {of_type.__name__}, got {meta[field]!r}")
        tables = {table: _rows(path / f"{table}.jsonl", meta["evidence"]) for table in TABLES}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: not a recording of format {FORMAT}: {error!r}") from error
    return Recording(path, meta, tables)


def _rows(path: Path, evidence: str) -> pd.DataFrame:
    """The rows of a table; the last line of a run that was killed may be cut short, and is left out."""
    rows = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            if line.endswith("\n"):
                rows.append(json.loads(line))
    for row in rows:
        if row["evidence"] != evidence:
            raise ValueError(f"meta.json says {evidence}, {path.name} says {row['evidence']}")
    return pd.DataFrame(rows)


def choose(recording: str, device: str) -> Recording | None:
    """The recording that a notebook shows, for its parameter `recording`.

    "auto" is the newest one of `device` in data/recordings/, else the newest of any GPU, nothing modelled;
    what cannot be read is left out with a warning. "none" is none; anything else as for `load`.
    """
    if recording == "none":
        return None
    if recording != "auto":
        return load(recording)
    found = []
    for meta in RECORDINGS.glob("*/meta.json"):
        try:
            found.append(load(meta.parent))
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)
    recorded = [each for each in found if each.meta["evidence"] == "recorded"]
    newest = sorted(recorded, key=lambda each: each.meta["date"], reverse=True)
    same = [each for each in newest if each.meta["device"] == device]
    return next(iter(same + newest), None)


def describe(recording: Recording | None) -> str:
    """What a notebook prints before it shows a recording, or where it has none to show."""
    if recording is None:
        return "No recording of a GPU: `python scripts/record.py --out data/recordings` on one makes it."
    missing = [f"  not in it: {what}" for what in recording.meta["skipped"]]
    return "\n".join([recording.label(), *missing])
