"""Read what `lib.record` measured on one GPU: tables, traces and a device profile, each with its evidence.

A recording is a folder: meta.json, one `.jsonl` a table (one JSON object a line, times in us), traces/ and
profile.json. It is valid from the moment its meta.json is there, however early the run was cut short.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from lib.device_model import DeviceProfile
from lib.evidence import label
from lib.routes import Launch
from lib.step import HOST_COPIES
from lib.strategies import DEFAULT_DMA_BYTES, RoutedCopy, with_dma_bytes
from lib.timing import Timing
from lib.traces import load_trace

RECORDINGS = Path(__file__).resolve().parent.parent / "data" / "recordings"
FORMAT = 1
META = {"device": str, "torch": str, "date": str, "parts": dict, "skipped": list}  # what is read of meta.json

# host_us, gpu_us: samples, as of `timing.Timing`. predicted, counted: launches by kind, {"memcpy": 7}; and of
# a few counted calls device_us, the sum of their work on the device, and op_us, the operator that launched.
MEASURED = ("host_us", "gpu_us", "device_us", "op_us", "predicted", "counted")
# A row a strategy. saved_us: quartiles of per_copy's GPU time less this, round by round. equal: whether the
# bits are per_copy's; of what was copied in steps (null where graphs read elsewhere), of outputs in replays.
RUNS = ("preset", "hidden_size", "layout", "batch_size", "padded", "strategy", "saved_us", "equal", *MEASURED)
TABLES = {
    "steps": RUNS,  # copy_inputs of both runners
    "replays": RUNS,  # replay of both runners
    # A row a way of copying n tensors of `bytes` bytes: those of WAYS, and for one tensor "in_group" and
    # "beside_group", in a foreach call with 8 small ones, or by a memcpy after that call.
    "crossover": ("dtype", "n", "bytes", "way", *MEASURED),
}
WAYS = {
    "memcpy": "driver memcpy",
    "foreach": "fused foreach kernel",
    "elementwise": "elementwise copy kernel",
}


@dataclass(frozen=True)
class Recording:
    """One recording, whole or cut short; `missing` says what it lacks.

    meta: device, driver, torch, date and more, as `lib.record` wrote them.
    tables: each of TABLES, without rows where nothing was recorded.
    """

    path: Path
    meta: dict
    tables: dict[str, pd.DataFrame]

    @property
    def evidence(self) -> str:
        """ "recorded", or "modelled" for one that a stand-in for a GPU made."""
        return self.meta["evidence"]

    def label(self) -> str:
        """What every figure and table of it has to say."""
        return label(self.evidence, self.meta["device"], self.meta["torch"], self.meta["date"])

    @property
    def missing(self) -> list[str]:
        """What a full recording has and this one lacks, one sentence each."""
        parts = self.meta["parts"].items()
        return [f"{part}: {state}" for part, state in parts if state != "done"] + self.meta["skipped"]

    @property
    def profile(self) -> DeviceProfile | None:
        path = self.path / "profile.json"
        return DeviceProfile.load(path) if path.is_file() else None

    def traces(self) -> list[str]:
        """Names of its traces: strategies, and "calibration", from which the profile was fitted."""
        return sorted(path.name.removesuffix(".json.gz") for path in self.path.glob("traces/*.json.gz"))

    def trace(self, name: str) -> pd.DataFrame:
        """A trace as of `traces.load_trace`.

        Raises:
            FileNotFoundError: there is none of that name.
            ValueError: it cannot be read, or contradicts the recording's evidence.
        """
        path = self.path / "traces" / f"{name}.json.gz"
        table = load_trace(path)
        if (evidence := table.attrs["evidence"]) != self.evidence:
            raise ValueError(f"{path}: meta.json says {self.evidence}, the trace says {evidence}")
        table.attrs |= {"evidence": self.evidence, "device": self.meta["device"], "label": self.label()}
        return table

    def lanes(self, strategy: str) -> dict[str, pd.DataFrame]:
        """The shortest step of a strategy's trace for `plots.timeline`: a lane a host thread or stream."""
        table = self.trace(strategy)
        steps = table[table.kind == "annotation"].sort_values("start_us")
        start = steps.start_us[steps.dur_us.idxmin()]
        stop = steps.start_us[steps.start_us > start].min()  # NaN after the last one
        table = table[(table.start_us >= start) & ~(table.start_us >= stop) & (table.kind != "annotation")]
        kind = table.name.astype(object).map(HOST_COPIES).fillna(table.kind.astype(object))
        tracks = table.assign(start_us=table.start_us - start, kind=kind).groupby("track", observed=True)
        on = f"{self.evidence} {self.meta['device'].removeprefix('modelled ')}"
        return {f"{track} · {on}": events for track, events in tracks}

    def where(self, table: str, **values: object) -> pd.DataFrame:
        """The rows of a table that have these values, e.g. where("steps", batch_size=8)."""
        rows = self.tables[table]
        for column, value in values.items():
            rows = rows[rows[column] == value]
        return rows

    def timings(self, table: str = "steps", **values: object) -> dict[str, Timing]:
        """Samples by strategy, for `plots.timings`, of one case of "steps" or "replays"."""
        rows = self.where(table, **values)
        return {r.strategy: Timing(r.strategy, tuple(r.host_us), tuple(r.gpu_us)) for r in rows.itertuples()}

    def launches(self, **values: object) -> dict[str, list[Launch]]:
        """Launches by strategy that the profiler counted in a case of "steps", for `plots.launch_counts`."""
        rows = self.where("steps", **values)
        return {
            row.strategy: [Launch(kind, 1, 0, "counted") for kind in Counter(row.counted).elements()]
            for row in rows.itertuples()
        }

    def crossover_lines(self, n: int = 1, dtype: str = "int16", column: str = "device_us") -> dict:
        """Bytes of each of n tensors, and median us of moving them, by way, for `plots.curves`."""
        lines = {}
        for way, name in WAYS.items():
            rows = self.where("crossover", n=n, dtype=dtype, way=way).sort_values("bytes")
            if len(rows):
                lines[name] = rows["bytes"].tolist(), rows[column].map(np.median).tolist()
        return lines

    def dma_bytes(self) -> int | None:
        """From this size on a memcpy of its own is at least as fast on the GPU as a place in the group.

        That is, beside 8 small tensors, at this and every larger size recorded, and for every dtype recorded.
        None where that was not recorded, or where the group won at the largest size.
        """
        sizes = []
        for _, rows in self.tables["crossover"].groupby("dtype"):
            rows = rows[rows["gpu_us"].astype(object).str.len() > 0].drop_duplicates(
                ["bytes", "way"], keep="last"
            )
            rows = rows.assign(median_us=rows["gpu_us"].map(np.median))
            of_way = (rows[rows["way"] == way].set_index("bytes") for way in ("in_group", "beside_group"))
            in_group, beside = (of_size["median_us"].dropna().sort_index() for of_size in of_way)
            in_group, beside = in_group.align(beside, join="inner")  # a run cut short has one of the two
            group_wins = (beside > in_group)[::-1].cummax()  # at this size or at a larger one
            sizes.append(group_wins.index[~group_wins].min())
        return int(max(sizes)) if sizes and not np.isnan(sizes).any() else None


def load(recording: str | Path) -> Recording:
    """A recording of data/recordings/ by name, or any by path.

    Raises:
        ValueError: no recording there, of another format, or one whose parts contradict its evidence.
    """
    path = Path(recording)
    path = RECORDINGS / path if not path.is_dir() and (RECORDINGS / path).is_dir() else path
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        if meta["format"] != FORMAT or meta["evidence"] not in ("recorded", "modelled"):
            raise ValueError(f"format {meta['format']}, evidence {meta['evidence']}")
        for field, what in META.items():
            if not isinstance(value := meta.get(field), what) or (what is str and not value.strip()):
                raise ValueError(f"{field}: expected a {what.__name__}, got {value!r}")
        tables = {name: _table(path / f"{name}.jsonl", columns) for name, columns in TABLES.items()}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: not a recording of format {FORMAT}: {error!r}") from error
    for name, table in tables.items():
        if wrong := set(table["evidence"]) - {meta["evidence"]}:
            raise ValueError(f"{path}: meta.json says {meta['evidence']}, {name}.jsonl says {sorted(wrong)}")
    return Recording(path, meta, tables)


def _table(path: Path, columns: tuple[str, ...]) -> pd.DataFrame:
    """The rows of a table; the last line of a run that was killed may be cut short, and is left out."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return pd.DataFrame(rows, columns=["evidence", *columns])


def find(device: str | None = None) -> list[Recording]:
    """What GPUs recorded in data/recordings/, that of this name if given, newest first; nothing modelled.

    A recording that cannot be read is left out with a warning.
    """
    found = []
    for meta in RECORDINGS.glob("*/meta.json"):
        try:
            recording = load(meta.parent)
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)
            continue
        if recording.evidence == "recorded" and device in (None, recording.meta["device"]):
            found.append(recording)
    return sorted(found, key=lambda r: (r.meta["date"], r.path.name), reverse=True)


def choose(recording: str | Path = "auto", device: str | None = None) -> Recording | None:
    """The recording that a notebook shows, for its parameter `recording`.

    "auto" is the newest one of `device` if there is one, else the newest one; "none" is none; anything else
    is a name or a path as for `load`, whose ValueError it raises.
    """
    if recording == "none":
        return None
    if recording != "auto":
        return load(recording)
    return next(iter(find(device) or find()), None)


def describe(recording: Recording | None) -> str:
    """What a notebook prints before it shows a recording, or where it has none to show."""
    if recording is None:
        return "No recording of a GPU: `python -m lib.record --out data/recordings` on one makes it."
    return "\n".join([recording.label(), *(f"  not in it: {what}" for what in recording.missing)])


def dma_bytes(device: str) -> int:
    """`dma_bytes` for a device by name: the newest crossover recorded on it, else DEFAULT_DMA_BYTES."""
    recorded = (r.dma_bytes() for r in find(device))
    return next((size for size in recorded if size is not None), DEFAULT_DMA_BYTES)


def grouped_foreach_dma(device: str) -> RoutedCopy:
    """The strategy of that name with the size that was recorded on this device; the default elsewhere."""
    return with_dma_bytes(dma_bytes(device))
