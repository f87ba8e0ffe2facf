"""Read what scripts/record.py measured on one GPU: a folder of meta.json, one `.jsonl` a table (an object a
line, times in us), traces/ and profile.json. Of a run cut short the lines written so far are valid."""

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd

RECORDINGS = Path(__file__).resolve().parents[2] / "data" / "recordings"
FORMAT = 2
# A row a way: of copy_inputs of both runners; of replay of both (equal: outputs as per_copy's); of copying n
# tensors of `bytes` bytes, one also in_group, in a foreach call with 8 small ones, and beside_group, by a
# memcpy after. host_us, gpu_us: samples; predicted, counted: launches by kind, null if the profiler failed.
ROW = ("evidence", "way", "equal", "predicted", "counted", "host_us", "gpu_us")
STEP = ("preset", "layout", "batch_size")
TABLES = {"steps": STEP + ROW, "replays": STEP + ROW, "crossover": ("dtype", "n", "bytes", *ROW)}
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
    found = (ours for pattern, ours in WORK.items() if re.search(pattern, event))
    return next(found, f"{kind} {name[:80]}")


@dataclass(frozen=True)
class Recording:
    """One recording. meta: device, driver, torch, date and more; tables: each of TABLES, perhaps empty."""

    path: Path
    meta: dict
    tables: dict[str, pd.DataFrame]

    def label(self) -> str:
        """What every figure and table of it has to say; "modelled" where a stand-in for a GPU made it."""
        return "{evidence} · {device} · torch {torch} · {date}".format(**self.meta)

    def dma_bytes(self) -> int | None:
        """From so many bytes on a memcpy beside a group is as fast on the GPU, for any dtype; None: never."""
        rows = self.tables["crossover"].query("way in ('beside_group', 'in_group')")
        if rows.way.nunique() < 2:
            return None
        medians = rows.assign(us=rows.gpu_us.map(np.median)).pivot_table("us", "bytes", ["way", "dtype"])
        wins = (medians.beside_group - medians.in_group <= 0).all(axis=1)  # NaN where one was cut short
        from_here_on = wins[wins[::-1].cummin()]
        return int(from_here_on.index.min()) if len(from_here_on) else None


def load(recording: str | Path) -> Recording:
    """A recording of data/recordings/ by name, or any by path. ValueError: none there, or another format."""
    path = RECORDINGS / recording if (RECORDINGS / recording).is_dir() else Path(recording)
    tables = {}
    try:
        meta = msgspec.json.decode((path / "meta.json").read_bytes())
        if meta["format"] != FORMAT:
            raise ValueError(f"format {meta['format']}")
        for table, columns in TABLES.items():
            file = path / f"{table}.jsonl"
            text = file.read_bytes() if file.exists() else b""
            lines = text[: text.rfind(b"\n") + 1]  # a killed run's last line may be cut short
            tables[table] = pd.DataFrame(msgspec.json.Decoder().decode_lines(lines), columns=columns)
        found = Recording(path, meta, tables)
        found.label()
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"recording: {path}: not a recording of format {FORMAT}: {error!r}") from error
    return found


def choose(recording: str) -> Recording | None:
    """For a notebook: "auto" is the newest recording that is not modelled, "none" none; else as `load`."""
    if recording != "auto":
        return None if recording == "none" else load(recording)
    found = [load(meta.parent) for meta in RECORDINGS.glob("*/meta.json")]
    recorded = [each for each in found if each.meta["evidence"] == "recorded"]
    return max(recorded, key=lambda each: each.meta["date"], default=None)
