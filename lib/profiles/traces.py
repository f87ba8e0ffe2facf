"""Profiler traces as one table of events, whatever wrote them.

Read are Kineto / Chrome JSON (`torch.profiler`) and Nsight Systems exports (`nsys export --type sqlite`),
plain or gzip. Every reader gives the same pandas table, one row an event, sorted by start:

    name, kind (see KINDS), track ("host 1234", "stream 7"; with the process or the device where the file
    has several), inputs (of a copying operator whose shapes were recorded: "int <- long int", "4 tensors"),
    stream and thread (int64, -1 where they do not apply), start_us (from the first event), dur_us, bytes
    (float, NaN where the trace does not tell; of aten::copy_ what it writes), correlation (int64; a host call
    and the device work that it launched share one, unique in the file; -1 for none).

`table.attrs` says where it came from: source, path, device, evidence ("recorded", "measured" or "modelled"),
resolution_us (1.0 where the file holds whole microseconds), rocm, and left_out, a list of sentences.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import re
import sqlite3
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import lru_cache
from itertools import count, repeat
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import pandas as pd

from lib.kinds import KINDS as LAUNCH_KINDS

if TYPE_CHECKING:
    import torch

KINDS = {
    "host_op": "an operator on the host, such as aten::copy_",
    "runtime": "a CUDA runtime or driver call",
    "annotation": "a range that the user named (record_function, NVTX)",
    "python": "a Python function, read on request",
    "memcpy": "device-to-device memcpy",
    "memcpy_htod": "host-to-device memcpy",
    "memcpy_dtoh": "device-to-host memcpy",
    "memcpy_other": "any other memcpy, such as one between two devices",
    "memset": "memset on the device",
    "copy_kernel": "a kernel that copies: elementwise, fused foreach, or one Triton kernel for all",
    "kernel": "any other kernel",
    "graph": "a CUDA-graph replay recorded as one block",
}
HOST_KINDS = ("host_op", "runtime", "annotation", "python")
DEVICE_KINDS = tuple(kind for kind in KINDS if kind not in HOST_KINDS)
COLUMN_TYPES = {
    "name": "category",
    "kind": pd.CategoricalDtype(list(KINDS)),
    "track": "category",
    "inputs": "category",
    "stream": "int64",
    "thread": "int64",
    "start_us": "float64",
    "dur_us": "float64",
    "bytes": "float64",
    "correlation": "int64",
}
COLUMNS = tuple(COLUMN_TYPES)

# Categories in lower case, with the spellings of earlier years; "graph" is what to_chrome_trace writes.
CATEGORIES = {
    "cpu_op": "host_op",
    "operator": "host_op",
    "user_annotation": "annotation",
    "python_function": "python",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "runtime": "runtime",
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
    "kernel": "kernel",
    "graph": "graph",
}
DIRECTIONS = {
    "DtoD": "memcpy",
    "HtoD": "memcpy_htod",
    "DtoH": "memcpy_dtoh",
    "DeviceToDevice": "memcpy",  # on ROCm
    "HostToDevice": "memcpy_htod",
    "DeviceToHost": "memcpy_dtoh",
}
ROCM_MEMCPY = "__amd_rocclr_copyBuffer"
# The kernels behind copy_ (Copy.cu; of PyTorch 1.8, too), SGLang's one for all pairs, and this project's own.
COPY_KERNEL = re.compile(
    "direct_copy_kernel|copy_device_to_device|_copy_kernel_cuda|neg_conj_kernel_cuda|_small_copy_kernel"
)
OUR_KERNELS = {kind.work for kind in LAUNCH_KINDS.values() if kind.event == "copy_kernel"}
FUNCTOR = re.compile(r"\bCopy(?:Functor)?<")  # of _foreach_copy_ (ForeachBinaryOpList.cu)
# How PyTorch names its operators to NVTX: "aten::copy_, seq = 45395, op_id = 990883".
NVTX_OPERATOR = re.compile(r"([^,]+)(?:, seq = \d+)?, op_id = \d+")
COPY, FOREACH = "aten::copy_", "aten::_foreach_copy_"
WIDTHS = {
    **dict.fromkeys(("double", "long", "long int"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("c10::Half", "c10::BFloat16", "short", "short int"), 2),
    **dict.fromkeys(("bool", "signed char", "unsigned char"), 1),
}

NSYS_TABLES = {
    "CUPTI_ACTIVITY_KIND_RUNTIME": "cuda_runtime",
    "NVTX_EVENTS": "user_annotation",
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernel",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "memcpy",
    "CUPTI_ACTIVITY_KIND_MEMSET": "memset",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "graph",
}
NSYS_QUERY = (Path(__file__).parent / "nsys.sql").read_text(encoding="utf-8")
REAL_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE 'CREATE TABLE%'"
SQLITE = b"SQLite format 3"
ADVICE = {
    ".nsys-rep": "export it, nsys export --type sqlite FILE, and read the .sqlite",
    ".qdrep": "export it, nsys export --type sqlite FILE, and read the .sqlite",
    ".zip": "unpack it, and read the trace that is in it",
    ".zst": "unpack it: zstd -d FILE",
    ".xz": "unpack it: xz -d FILE",
}
NO_LIST = 'expected a JSON list, or an object with a list "traceEvents" (rocprofv3 writes neither)'

LARGEST_UNPACKED = 2 << 30  # bytes of text that a gzip file may hold
LARGEST_LOOSE = 256 << 20  # bytes of text for Python's json, which takes up to 15 times as much memory
LATEST = 9 * 10**15  # us: the year 2255; in ns it is an int64
SPAN = 2**42  # us: 50 days, in which a double still tells nanoseconds apart
UNREADABLE = -(2**63)  # in the place of a time that is none
BLOCK = 1 << 16  # events made into arrays at a time

NO_SHAPES = msgspec.Raw(b"0")
Number = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]  # -1 where it is absent


class _Args(msgspec.Struct, gc=False):
    track: str = ""  # this and the next are written by to_chrome_trace
    inputs: str = ""
    device: Number = -1
    stream: Number = -1
    correlation: Number = -1
    bytes: Number = -1
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=NO_SHAPES)
    types: msgspec.Raw = msgspec.field(name="Input type", default=NO_SHAPES)


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: Decimal = Decimal("nan")  # 1.7e15 us since 1970: a double would round it to 0.25 us
    dur: float = math.nan
    pid: int | str = -1
    tid: int | str = -1
    args: _Args = msgspec.field(default_factory=_Args)


class _Document(msgspec.Struct):
    traceEvents: list[msgspec.Raw] | None = None
    deviceProperties: Any = ()
    roctracer_version: Any = None
    evidence: Any = None  # this and the next are written by to_chrome_trace
    left_out: Any = ()


FAILURES = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
FIELDS = ("cat", "name", "ts", "dur", "pid", "tid")
ARGS = ("track", "inputs", "device", "stream", "correlation", "bytes")
_decode = msgspec.json.Decoder(_Event, strict=False).decode
NO_EVENT = _Event("X", "of no readable type")


def load_trace(path: str | os.PathLike, python: bool = False) -> pd.DataFrame:
    """Read a profiler trace into the table described at the top of this module.

    Complete events (`ph` "X") are read; flow, instant, counter and metadata events are no spans. One that
    cannot be read or placed (a field of another type, no, a negative or a non-finite duration, no stream, a
    time weeks away from the others, a category not in CATEGORIES) is left out, and `attrs["left_out"]` says
    how many.

    JSON takes about three times the memory of its text. A gzip file may hold 2 GiB of it, an invalid one
    (NaN, a lone surrogate), which Python's own json then reads, 256 MiB.

    Args:
        python: read the frames of Python functions, too (`with_stack=True`).

    Raises:
        FileNotFoundError: no such file.
        ValueError: with the file and what is wrong: empty, damaged gzip, invalid JSON and where, no
            `traceEvents`, an SQLite file that nsys did not export, not a single event that could be read.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path}: a folder, read one trace in it")
    if path.suffix in ADVICE:
        raise ValueError(f"{path}: not read as it is, {ADVICE[path.suffix]}")
    try:
        text, packed = _unpacked(path)
        if text.startswith(SQLITE):
            return _table(path, *_read_nsys(path, text if packed else b""), python, nsys=True)
        return _table(path, *_read_json(text), python)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: gzip is truncated or damaged: {error}") from error
    except (sqlite3.Error, ArithmeticError) as error:
        raise ValueError(f"{path}: not as Nsight Systems exports it: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def from_profiler(prof: torch.profiler.profile) -> pd.DataFrame:
    """The table of a finished profiler run (host events only on a machine without a GPU).

    PyTorch lets a run be exported once: export it afterwards with `to_chrome_trace`.

    Raises:
        ValueError: the run is not finished, was exported before, or holds no event.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "torch.profiler"
        try:
            prof.export_chrome_trace(str(path))
        except (RuntimeError, AssertionError, AttributeError) as error:
            raise ValueError(f"profiler: unfinished, or exported before: {error}") from error
        table = load_trace(path)
    table.attrs["evidence"] = "measured"
    return table


def event_table(events: pd.DataFrame, **attrs: object) -> pd.DataFrame:
    """Events with the columns of COLUMNS as a table with their types, sorted by start."""
    table = events[list(COLUMNS)].astype(COLUMN_TYPES)
    table = table.sort_values("start_us", kind="stable", ignore_index=True)
    table.attrs = attrs
    return table


def is_foreach(name: str) -> bool:
    """Whether a kernel of this name is the fused one behind `_foreach_copy_`."""
    return "multi_tensor_apply_kernel" in name and bool(FUNCTOR.search(name))


def to_chrome_trace(table: pd.DataFrame, path: str | os.PathLike) -> None:
    """Write a table as Chrome JSON, for Perfetto or for `load_trace`; gzip where the name ends in .gz.

    Raises:
        ValueError: a time is not finite, or `path` is the file that the table was read from; it is then as
            it was before.
    """
    path = Path(path)
    if path.resolve() == table.attrs.get("path"):
        raise ValueError(f"{path}: the table was read from this file, and would overwrite it")
    categories = {kind: category for category, kind in reversed(CATEGORIES.items())}
    categories |= {"copy_kernel": "kernel"}
    tracks = list(table.track.unique())
    events = []
    for number, track in enumerate(tracks):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": track}})
    for row in table.fillna({"bytes": -1}).astype({"bytes": int}).to_dict("records"):
        told = {name: row[name] for name in ("track", "inputs", "stream", "correlation", "bytes")}
        event = {
            "ph": "X",
            "cat": categories.get(row["kind"], "gpu_memcpy"),
            "name": row["name"],
            "pid": tracks.index(row["track"]),
            "tid": max(row["thread"], row["stream"]),
            "ts": round(row["start_us"], 3),
            "dur": round(row["dur_us"], 3),
            "args": {name: value for name, value in told.items() if value != -1},
        }
        events.append(event)
    document = {
        "deviceProperties": [{"id": 0, "name": table.attrs.get("device", "")}],
        "roctracer_version": 1 if table.attrs.get("rocm") else None,
        "evidence": table.attrs.get("evidence", ""),
        "left_out": table.attrs.get("left_out", []),
        "traceEvents": events,
    }
    part = path.with_name(f"{path.name}.part")
    try:
        with (gzip.open if path.suffix == ".gz" else open)(part, "wt", encoding="utf-8") as file:
            json.dump(document, file, allow_nan=False)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


# ------------------------------------------------------------------ from a file to rows


def _unpacked(path: Path) -> tuple[bytearray, bool]:
    """What is in a file, and whether it was packed; of an SQLite file that was not only the start."""
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    text = bytearray()
    with (gzip.open if packed else open)(path, "rb") as stream:
        while more := stream.read(1 << 20):
            text += more
            if text.startswith(SQLITE) and not packed:
                break
            if packed and len(text) > LARGEST_UNPACKED:
                raise ValueError("unpacks to more than 2 GiB: record fewer steps, or unpack it first")
    return text, packed


def _read_json(text: bytearray) -> tuple[Iterable[list], _Document]:
    """FIELDS and ARGS of complete events, block by block, and what else the document says."""
    if text.startswith(b"\xef\xbb\xbf"):  # a byte order mark
        del text[:3]
    first = text[: 1 << 16].lstrip()[:1]
    if first not in (b"{", b"["):
        raise ValueError(NO_LIST if text else "the file is empty")
    kind = _Document if first == b"{" else list[msgspec.Raw]
    try:
        document = msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{NO_LIST}: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        if len(text) > LARGEST_LOOSE:
            raise ValueError(f"invalid JSON, or cut short at byte {len(text)}: {error}") from error
        document = msgspec.json.decode(_mended(text), type=kind)
    document = document if isinstance(document, _Document) else _Document(document)
    events = document.traceEvents
    if events is None:
        raise ValueError(NO_LIST)
    starts = range(0, len(events), BLOCK)
    return (_columns(events[start : start + BLOCK]) for start in starts), document


def _mended(text: bytearray) -> bytes:
    """What Python's json takes and msgspec does not (NaN, control and half characters) as both take it."""
    try:
        loose = json.loads(
            text.decode("utf-8", "replace"), strict=False, parse_float=str, parse_constant=lambda _: None
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"invalid JSON, or cut short at byte {len(text)}: {error}") from error
    return json.dumps(loose, ensure_ascii=False).encode("utf-8", "replace")


def _columns(texts: list[msgspec.Raw]) -> list[list]:
    """FIELDS and ARGS of the complete ones of these events."""
    try:
        events = [event for event in map(_decode, texts) if event.ph == "X"]
    except FAILURES:
        events = [event for event in map(_event, texts) if event.ph == "X"]
    args = [event.args for event in events]
    for event in events:
        if event.name in (COPY, FOREACH) and event.args.dims is not NO_SHAPES:
            _add_shapes(event.name, event.args)
    columns = [[*map(attrgetter(field), events)] for field in FIELDS]
    return columns + [[*map(attrgetter(field), args)] for field in ARGS]


def _event(text: msgspec.Raw) -> _Event:
    try:
        return _decode(text)
    except FAILURES:
        return NO_EVENT


def _add_shapes(name: str, args: _Args) -> None:
    """What a copying operator writes, as far as its recorded arguments tell."""
    with contextlib.suppress(ValueError, TypeError, LookupError, msgspec.DecodeError):
        dims, types = (msgspec.json.decode(text) for text in (args.dims, args.types))
        if name == FOREACH:
            args.inputs = f"{len(dims[0])} tensors"  # of lists no dtype is recorded
        else:
            width = WIDTHS[types[0]]
            args.bytes = math.prod(map(int, dims[0])) * width
            args.inputs = f"{types[0]} <- {types[1]}"


def _read_nsys(path: Path, text: bytes | bytearray) -> tuple[list[list], _Document]:
    """What `_read_json` gives, from an Nsight Systems export: the file, or `text` where that was packed."""
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    blocks, document = [], _Document()
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
        if text:
            db.deserialize(text)
        tables = {name for (name,) in db.execute(REAL_TABLES)}  # a view may never end
        if "StringIds" not in tables or tables.isdisjoint(NSYS_TABLES):
            expected = f"expected StringIds and some of {', '.join(NSYS_TABLES)} (rocpd is rocprofv3's)"
            raise ValueError(f"SQLite, but no Nsight Systems export: {expected}, got {sorted(tables)}")
        for table in sorted(tables.intersection(NSYS_TABLES)):
            fields = defaultdict(lambda: "NULL", table_category=NSYS_TABLES[table], table=table)
            for _, column, *_ in db.execute(f"PRAGMA table_info({table})"):
                fields[column] = f"[{column}]"
            fields["task"] = f"COALESCE({fields['globalTid']}, {fields['globalPid']})"
            rows = db.execute(NSYS_QUERY.format_map(fields))
            while some := rows.fetchmany(BLOCK):
                category, name, start, duration, *others = zip(*some)
                times = [*map(Decimal, start)], [*map(Decimal, duration)]
                blocks.append([category, name, *times, *others])
        if "TARGET_INFO_GPU" in tables:
            gpus = db.execute("SELECT id, name FROM TARGET_INFO_GPU")
            document.deviceProperties = [{"id": number, "name": name} for number, name in gpus]
    unknown = sorted(name for name in tables if name.rpartition("_V")[0] in NSYS_TABLES)
    document.left_out = [f"table {name} left out: of a version that is not known here" for name in unknown]
    if "TARGET_INFO_SYSTEM_ENV" in tables:
        document.left_out.append(
            "the file holds the recorder's environment, secrets included: mind who gets it"
        )
    return blocks, document


# ------------------------------------------------------------------ from rows to a table


@lru_cache(2**12)
def _text(value: object) -> str:
    """Text without what a terminal would obey, a page would hide or UTF-8 cannot hold."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _nanoseconds(times: Sequence[Decimal]) -> list[int]:
    """Times in us as exact ns; UNREADABLE for one that is not finite, or beyond LATEST."""
    with contextlib.suppress(ArithmeticError):  # comparing a NaN
        if min(times) > -LATEST and max(times) < LATEST:
            return [int(time * 1000) for time in times]
    # the size comes first: int() of 1e999990 would not end
    fits = [time.is_finite() and time.copy_abs() < LATEST for time in times]
    return [int(time * 1000) if fit else UNREADABLE for time, fit in zip(times, fits)]


def _label(category: str, name: str, track: str, inputs: str) -> tuple[str | None, ...]:
    """Kind (None for one that is not read) of the events with these texts, and the texts."""
    kind = CATEGORIES.get(category.lower())
    if name.startswith(ROCM_MEMCPY):
        kind = "memcpy"
    elif kind == "memcpy":
        kind = next((DIRECTIONS[word] for word in DIRECTIONS if word in name), "memcpy_other")
    elif kind == "kernel" and (COPY_KERNEL.search(name) or name in OUR_KERNELS or is_foreach(name)):
        kind = "copy_kernel"
    elif kind == "annotation" and NVTX_OPERATOR.match(name):
        kind, name = "host_op", NVTX_OPERATOR.match(name)[1]
    return kind, _text(category), _text(name), _text(track), _text(inputs)


def _tell(told: list[str], n: int, what: str) -> None:
    if n:
        told.append(f"{n} {what}")


def _table(
    path: Path, blocks: Iterable[list], document: _Document, python: bool, nsys: bool = False
) -> pd.DataFrame:
    """The table of a file's events. What cannot be placed is left out, and said so."""
    frames = []
    labels = defaultdict(count().__next__)  # every text once: its events hold its number
    for category, name, start, duration, process, thread, track, inputs, *numbers in filter(any, blocks):
        frame = pd.DataFrame(dict(zip(ARGS[2:], numbers)), dtype="int64")
        frame["start_ns"] = _nanoseconds(start)
        frame["dur_us"] = np.array(duration, float)
        frame["process"] = pd.Series(map(_text, process), dtype=object)
        threads = pd.to_numeric(pd.Series(thread), errors="coerce")
        frame["thread"] = threads.fillna(-1).astype("int64")
        frame["label"] = [labels[texts] for texts in zip(category, name, track, inputs)]
        frames.append(frame)
    if not frames:
        raise ValueError("holds no complete event (ph X)")
    columns = ["kind", "category", "name", "track", "inputs"]
    texts = pd.DataFrame([_label(*label) for label in labels], columns=columns, dtype="category")
    told = []
    if isinstance(document.left_out, list):
        told += [_text(str(sentence)) for sentence in document.left_out]
    events = pd.concat(frames, ignore_index=True).join(texts, on="label")
    events = _placed(events, python, told)
    if events.empty:
        raise ValueError(f"no event could be read: {'; '.join(told)}")
    on_device = events.kind.isin(DEVICE_KINDS)
    hip = events.name[events.kind == "runtime"].str.startswith("hip").any()
    attrs = {
        "source": path.name,
        "path": path.resolve(),
        "device": _gpu_names(document.deviceProperties, set(events.device[on_device])),
        "evidence": "modelled" if document.evidence == "modelled" else "recorded",
        "rocm": bool(hip or document.roctracer_version),
    }
    _join(events, told)
    several = _name_tracks(events, on_device, nsys, told)
    table = event_table(events, **attrs)
    fractions = table[["start_us", "dur_us"]] % 1
    table.attrs["resolution_us"] = 0.001 if fractions.any(axis=None) else 1.0
    _check_streams(table, several, told)
    table.attrs["left_out"] = [*dict.fromkeys(told)]
    return table


def _placed(events: pd.DataFrame, python: bool, told: list[str]) -> pd.DataFrame:
    """The events that have a kind, a time and a place."""
    wanted = events.kind.notna() & (python | events.kind.ne("python"))
    for category, n in events.category[~wanted].value_counts().items():
        _tell(told, n, f"events of category {category!r} left out")
    on_device = events.kind.isin(DEVICE_KINDS)
    readable = (events.start_ns != UNREADABLE) & np.isfinite(events.dur_us)
    middle = events.start_ns[wanted & readable].median()
    checks = {
        "no finite ts and dur": ~readable,
        "a negative duration": events.dur_us < 0,
        "a time weeks away from the others": (events.start_ns - middle).abs() > 1000 * SPAN,
        "a duration of weeks": events.dur_us > SPAN,
        "no stream": on_device & (events.stream < 0),
        "no thread": ~on_device & (events.thread == -1),
    }
    for why, wrong in checks.items():
        _tell(told, (wanted & wrong).sum(), f"events with {why} left out")
        wanted &= ~wrong
    return events[wanted].copy()


def _join(events: pd.DataFrame, told: list[str]) -> None:
    """Set start_us, and leave every correlation to one host call, or to none.

    nsys 2022.2 nests a call in another of the same correlation: the outer one keeps it.
    """
    events["start_us"] = (events.start_ns - events.start_ns.min()) / 1000
    events["bytes"] = events.bytes.where(events.bytes >= 0)
    events["correlation"] = events.correlation.where(events.correlation > 0, -1)
    calls = events[(events.kind == "runtime") & (events.correlation > 0)]
    calls = calls[calls.duplicated("correlation", keep=False)]
    calls = calls.assign(end=calls.start_us + calls.dur_us)
    calls = calls.sort_values(["start_us", "end"], ascending=[True, False])
    thread = ["correlation", "process", "thread"]
    outer_end = calls.groupby(thread).end.transform("first")
    nested = calls.duplicated(thread) & (calls.end <= outer_end)
    events.loc[nested.index[nested], "correlation"] = -1
    calls = calls[~nested]
    unclear = events.correlation.isin(calls.correlation[calls.duplicated("correlation")])
    events.loc[unclear, "correlation"] = -1
    _tell(told, unclear.sum(), "events not joined: several host calls have their correlation")


def _name_tracks(events: pd.DataFrame, on_device: pd.Series, nsys: bool, told: list[str]) -> bool:
    """Set track (where to_chrome_trace did not), stream and thread. Returns whether there are processes.

    nsys says to which process device work belongs. JSON does not: with several in the file it is that of the
    host call, else the one that all other work on its stream belongs to.
    """
    events["stream"] = events.stream.where(on_device, -1)
    events["thread"] = events.thread.where(~on_device, -1)
    if events.track.ne("").all():
        return False
    process = events.process.where(~on_device | (nsys & (events.process != "-1")))
    several = process.nunique() > 1
    if several:
        calls = events.query("kind == 'runtime' and correlation > 0").set_index("correlation")
        process = process.fillna(events.correlation.map(calls.process))
        owners = process[on_device].groupby([events.device, events.stream])
        alone = owners.transform("nunique") == 1
        process = process.fillna(owners.transform("first").where(alone))
        why = "device events of which several processes may be the owner: on tracks of their own"
        _tell(told, process.isna().sum(), why)
    several_gpus = events.device[on_device].nunique() > 1
    gpu = events.device.where(on_device & several_gpus, -1)
    owners = process.fillna("") if several else repeat("")
    lanes = defaultdict(count().__next__)
    numbers = zip(gpu.tolist(), events.stream.tolist(), events.thread.tolist())
    codes = [lanes[owner, *lane] for owner, lane in zip(owners, numbers)]
    events["track"] = pd.Categorical.from_codes(codes, [_track(*lane) for lane in lanes])
    return several


def _track(process: str, gpu: int, stream: int, thread: int) -> str:
    if stream < 0:
        return f"host {process}:{thread}" if process else f"host {thread}"
    name = f"stream {stream}"
    if gpu >= 0:
        name = f"gpu {gpu} {name}"
    return f"{name} of {process}" if process else name


def _gpu_names(properties: Any, used: set[int]) -> str:
    """Names of the GPUs that were at work. Where ids do not match, on ROCm, the one name that all have."""
    try:
        names = {gpu["id"]: _text(gpu["name"] or "") for gpu in properties}
    except (TypeError, LookupError):
        return ""  # not as Kineto writes them
    every = set(names.values())
    found = {names[number] for number in used.intersection(names)}
    if used and not found and len(every) == 1:
        found = every
    return ", ".join(sorted(found))


def _check_streams(table: pd.DataFrame, several: bool, told: list[str]) -> None:
    """Cut impossible durations, and say what is odd on the streams."""
    device = table[table.kind.isin(DEVICE_KINDS)]
    if device.empty:
        told.append("no GPU event in the file: only the host side can be shown")
    room = device.groupby("track", observed=True).start_us.shift(-1) - device.start_us
    late = device.dur_us > room + 1000
    longest = device.dur_us[late].max() / 1000
    table.loc[late.index[late], "dur_us"] = room[late]
    why = f"1 ms and more after the next on their stream began, after up to {longest:.0f} ms: cut there"
    _tell(told, late.sum(), f"device events end {why}, as faults of the recorder")
    overlap = ~late & (device.dur_us > room + 2)  # by more than the rounding to whole us explains
    alone = "launched ahead, most likely (programmatic dependent launch)"
    why = "several processes or devices may share its name here" if several else alone
    _tell(told, overlap.sum(), f"device events overlap on their stream: {why}; time is counted once")
    if table.attrs["rocm"]:
        why = "DtoD copies, some of which may come from pinned host memory: ROCm calls those so, too"
        _tell(told, (device.kind == "memcpy").sum(), why)
