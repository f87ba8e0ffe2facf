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
import io
import json
import math
import os
import re
import sqlite3
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import pandas as pd

from lib.kinds import KINDS as LAUNCH_KINDS

# An operator such as aten::copy_, a CUDA call, a range that the user named, a Python function (on request).
HOST_KINDS = ("host_op", "runtime", "annotation", "python")
# memcpy is from device to device, memcpy_other to another device or unknown. copy_kernel: elementwise, fused
# foreach, or one Triton kernel for all. graph: a CUDA-graph replay recorded as one block.
MEMCPYS = ("memcpy", "memcpy_htod", "memcpy_dtoh", "memcpy_other")
DEVICE_KINDS = (*MEMCPYS, "memset", "copy_kernel", "kernel", "graph")
TEXT = pd.CategoricalDtype()
COLUMN_TYPES = {
    "name": TEXT,
    "kind": pd.CategoricalDtype([*HOST_KINDS, *DEVICE_KINDS]),
    "track": TEXT,
    "inputs": TEXT,
    **dict.fromkeys(("stream", "thread"), np.int64),
    **dict.fromkeys(("start_us", "dur_us", "bytes"), np.float64),
    "correlation": np.int64,
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
DIRECTIONS = {  # the second spelling is ROCm's
    **dict.fromkeys(("DtoD", "DeviceToDevice"), "memcpy"),
    **dict.fromkeys(("HtoD", "HostToDevice"), "memcpy_htod"),
    **dict.fromkeys(("DtoH", "DeviceToHost"), "memcpy_dtoh"),
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
    ".zip": "unpack it, and read the trace that is in it",
    ".zst": "unpack it: zstd -d FILE",
}
EXPECTED = 'expected a JSON list, or an object with a list "traceEvents" (rocprofv3 writes neither)'

LARGEST_UNPACKED = 2 << 30  # bytes of text that a gzip file may hold
SPAN = 2**42  # us: 50 days, in which a double still tells nanoseconds apart
UNREADABLE = -(2**63)  # in the place of a time that is none
BLOCK = 1 << 16  # events made into arrays at a time

NONE = msgspec.Raw(b"null")
Number = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]  # -1 where it is absent


class _Args(msgspec.Struct, gc=False):
    track: str = ""  # this and the next are written by to_chrome_trace
    inputs: str = ""
    device: Number = -1
    stream: Number = -1
    correlation: Number = -1
    bytes: Number = -1
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=NONE)
    types: msgspec.Raw = msgspec.field(name="Input type", default=NONE)


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: msgspec.Raw = NONE
    dur: float = math.nan
    pid: int | str = -1
    tid: int | str = -1  # negative ones exist
    args: _Args = msgspec.field(default_factory=_Args)


class _Gpu(msgspec.Struct):
    id: int = -1
    name: str = ""


class _Document(msgspec.Struct):
    traceEvents: list[msgspec.Raw]
    deviceProperties: list[_Gpu] = []
    roctracer_version: Any = None
    evidence: str = "recorded"  # this and the next are written by to_chrome_trace
    left_out: list[str] = []


DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, sqlite3.Error)
FAILURES = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
NO_EVENT = _Event("X", "of no readable type")
# Few labels stand for many events: what is text, or the same for a whole stream.
LABEL = ("category", "name", "process", "thread", "track", "inputs", "device", "stream")
LABEL_TEXTS = ("kind", "name", "process", "track", "inputs")
NUMBERS = ("start_ns", "dur_us", "correlation", "bytes", "label")
_decode = msgspec.json.Decoder(_Event, strict=False).decode


def load_trace(path: str | os.PathLike, python: bool = False) -> pd.DataFrame:
    """Read a profiler trace into the table described at the top of this module.

    Complete events (`ph` "X") are read; flow, instant, counter and metadata events are no spans. One that
    cannot be read or placed (a field of another type, no usable time or duration, no stream or thread, a
    category not in CATEGORIES) is left out, and `attrs["left_out"]` says how many.

    JSON takes about three times the memory of its text. A gzip file may hold 2 GiB of it.

    Args:
        python: read the frames of Python functions, too (`with_stack=True`).

    Raises:
        OSError: no such file, or a folder.
        ValueError: with the file and what is wrong: empty, damaged gzip, invalid JSON and where, no
            `traceEvents`, an SQLite file that nsys did not export, not a single event that could be read.
    """
    path = Path(path)
    if path.suffix in ADVICE:
        raise ValueError(f"{path}: not read as it is, {ADVICE[path.suffix]}")
    try:
        text, packed = _unpacked(path)
        if text.startswith(SQLITE):
            document = _Document([])
            return _table(path, _nsys_blocks(path, text if packed else b"", document), document, python)
        document = msgspec.json.decode(text, type=_Document | list[msgspec.Raw])
        document = document if isinstance(document, _Document) else _Document(document)
        return _table(path, _json_blocks(document.traceEvents), document, python)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {EXPECTED}: {error}") from error
    except (*DAMAGE, ValueError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def from_profiler(prof: Any) -> pd.DataFrame:
    """The table of a finished run of torch.profiler.profile (host events only on a machine without a GPU).

    PyTorch lets a run be exported once: export it afterwards with `to_chrome_trace`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "torch.profiler"
        prof.export_chrome_trace(str(path))
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
    pid, tracks = pd.factorize(table.track)
    events = table.assign(ph="X", pid=pid, tid=table[["thread", "stream"]].max(axis=1))
    categories = {kind: category for category, kind in CATEGORIES.items()} | {"copy_kernel": "kernel"}
    events["cat"] = [categories.get(kind, "memcpy") for kind in table.kind]
    events["ts"], events["dur"] = table.start_us.round(3), table.dur_us.round(3)
    args = table[["track", "inputs", "stream", "correlation"]].copy()
    args["bytes"] = table.bytes.fillna(-1).astype(int)
    events["args"] = args.to_dict("records")
    names = [
        {"ph": "M", "name": "process_name", "pid": n, "args": {"name": track}}
        for n, track in enumerate(tracks)
    ]
    columns = ["ph", "cat", "name", "pid", "tid", "ts", "dur", "args"]
    document = {
        "deviceProperties": [{"id": 0, "name": table.attrs.get("device", "")}],
        "roctracer_version": 1 if table.attrs.get("rocm") else None,
        "evidence": table.attrs.get("evidence", "recorded"),
        "left_out": table.attrs.get("left_out", []),
        "traceEvents": names + events[columns].to_dict("records"),
    }
    text = json.dumps(document, allow_nan=False).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


# ------------------------------------------------------------------ from a file to labels and numbers


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


def _json_blocks(texts: list[msgspec.Raw]) -> Iterator[tuple]:
    """Of complete events block by block LABEL, tuples, and NUMBERS, a list each."""
    for first in range(0, len(texts), BLOCK):
        some = map(_event, texts[first : first + BLOCK])
        events = [event for event in some if event.ph == "X"]
        args = [event.args for event in events]
        labels = (
            (event.cat, event.name, event.pid, event.tid, arg.track, arg.inputs, arg.device, arg.stream)
            for event, arg in zip(events, args)
        )
        if events:
            starts = _nanoseconds([event.ts for event in events])
            durations = [event.dur for event in events]
            correlations = [arg.correlation for arg in args]
            yield labels, starts, durations, correlations, [arg.bytes for arg in args]


def _nanoseconds(texts: list[msgspec.Raw]) -> pd.Series:
    """Times in us as exact ns: a double would round 1.7e15 us since 1970 to 0.25 us."""
    lines = b"\n".join(texts).replace(b".", b",.")
    columns = {"us": pd.Int64Dtype(), "fraction": np.float64}
    try:
        parts = pd.read_csv(io.BytesIO(lines), names=[*columns], dtype=columns)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"ts: expected decimal numbers, in us: {error}") from error
    fraction = (1000 * parts.fraction.fillna(0)).round()
    ns = 1000 * parts.us + fraction.astype(np.int64)
    return ns.fillna(UNREADABLE).astype(np.int64)


def _event(text: msgspec.Raw) -> _Event:
    try:
        event = _decode(text)
    except FAILURES:
        return NO_EVENT
    args = event.args
    if args.dims is not NONE and event.name in (COPY, FOREACH):
        with contextlib.suppress(msgspec.DecodeError, LookupError):
            _add_shapes(event.name, args)
    return event


def _add_shapes(name: str, args: _Args) -> None:
    """What a copying operator writes, as far as its recorded arguments tell."""
    if name == FOREACH:  # of lists no dtype is recorded
        lists = msgspec.json.decode(args.dims, type=list[list])
        args.inputs = f"{len(lists[0])} tensors"
        return
    shape = msgspec.json.decode(args.dims, type=list[list[int]])[0]
    to, of, *_ = msgspec.json.decode(args.types, type=list[str])
    args.bytes = math.prod(shape) * WIDTHS[to]
    args.inputs = f"{to} <- {of}"


def _nsys_blocks(path: Path, text: bytes | bytearray, document: _Document) -> Iterator[tuple]:
    """What `_json_blocks` gives, from an Nsight Systems export: the file, or `text` where that was packed."""
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
        if text:
            db.deserialize(text)
        tables = {name for (name,) in db.execute(REAL_TABLES)}  # a view may never end
        if "StringIds" not in tables or tables.isdisjoint(NSYS_TABLES):
            expected = f"StringIds and some of {[*NSYS_TABLES]}, as Nsight Systems exports them"
            raise ValueError(f"expected tables {expected}, got {sorted(tables)} (rocpd is rocprofv3's)")
        for table in sorted(tables.intersection(NSYS_TABLES)):
            fields = defaultdict(lambda: "NULL", table_category=NSYS_TABLES[table], table=table)
            for _, column, *_ in db.execute(f"PRAGMA table_info({table})"):
                fields[column] = f"[{column}]"
            fields["task"] = f"COALESCE({fields['globalTid']}, {fields['globalPid']})"
            rows = db.execute(NSYS_QUERY.format_map(fields))
            while some := rows.fetchmany(BLOCK):
                columns = [*zip(*some)]
                yield zip(*columns[:8]), *columns[8:]
        if "TARGET_INFO_GPU" in tables:
            document.deviceProperties = [
                _Gpu(*gpu) for gpu in db.execute("SELECT id, name FROM TARGET_INFO_GPU")
            ]
    unknown = sorted(name for name in tables if name.rpartition("_V")[0] in NSYS_TABLES)
    document.left_out += [f"table {name} left out: of a version that is not known here" for name in unknown]
    if "TARGET_INFO_SYSTEM_ENV" in tables:
        document.left_out.append(
            "the file holds the recorder's environment, secrets included: mind who gets it"
        )


# ------------------------------------------------------------------ from these to a table


def _kind(category: str, name: str) -> str | None:
    """Of HOST_KINDS and DEVICE_KINDS; None for an event that is not read."""
    kind = CATEGORIES.get(category.lower())
    if name.startswith(ROCM_MEMCPY):
        return "memcpy"
    if kind == "memcpy":
        found = [direction for word, direction in DIRECTIONS.items() if word in name]
        return found[0] if found else "memcpy_other"
    if kind == "kernel" and (COPY_KERNEL.search(name) or name in OUR_KERNELS or is_foreach(name)):
        return "copy_kernel"
    if kind == "annotation" and NVTX_OPERATOR.match(name):
        return "host_op"
    return kind


def _labelled(numbers: Iterable[tuple]) -> pd.DataFrame:
    """LABEL, kind and on_device. Of device work Kineto names no process, but the device again."""
    labels = pd.DataFrame([*numbers], columns=LABEL)
    labels["kind"] = [*map(_kind, labels.category, labels.name)]
    on_device = labels["on_device"] = labels.kind.isin(DEVICE_KINDS)
    labels["name"] = labels.name.str.replace(NVTX_OPERATOR, r"\1", regex=True)
    labels["process"] = labels.process.mask(on_device & (labels.process == labels.device), "").astype(str)
    threads = pd.to_numeric(labels.thread, errors="coerce")
    labels["thread"] = threads.mask(on_device).fillna(-1).astype(np.int64)
    labels["stream"] = labels.stream.where(on_device, -1)
    return labels


def _table(path: Path, blocks: Iterable[tuple], document: _Document, python: bool) -> pd.DataFrame:
    """The table of a file's events. What cannot be placed is left out, and said so."""
    numbers = defaultdict(count().__next__)  # every label once: its events hold its number
    frames = []
    for labels, *columns in blocks:
        columns.append([numbers[label] for label in labels])
        frames.append(pd.DataFrame(dict(zip(NUMBERS, map(np.array, columns)))))
    if not numbers:
        raise ValueError("holds no complete event (ph X)")
    labels = _labelled(numbers)
    told = [*document.left_out]
    events = _placed(pd.concat(frames, ignore_index=True), labels, python, told)
    if events.empty:
        raise ValueError(f"no event could be read: {'; '.join(told)}")
    labels = labels.loc[events.label.unique()]  # those in use
    calls = labels.name[labels.kind == "runtime"]
    names = {gpu.id: gpu.name for gpu in document.deviceProperties}
    at_work = labels.device[labels.on_device].map(names).dropna()
    gpus = set(at_work) or set(names.values())  # ROCm numbers devices in two ways
    if not labels.track.all():  # to_chrome_trace writes them
        labels = labels.assign(track=_tracks(labels))
    events = events.join(labels.astype(dict.fromkeys(LABEL_TEXTS, TEXT)), on="label")
    events["start_us"] = (events.start_ns - events.start_ns.min()) / 1000
    events = events.replace({"bytes": {-1: np.nan}, "correlation": {0: -1}})
    _join(events, told)
    table = event_table(
        events,
        source=path.name,
        path=path.resolve(),
        device=", ".join(sorted(gpus)),
        evidence=document.evidence,
        rocm=bool(document.roctracer_version) or calls.str.startswith("hip").any().item(),
    )
    whole = (table.start_us % 1 + table.dur_us % 1).sum() == 0
    table.attrs["resolution_us"] = 1.0 if whole else 0.001
    _check_streams(table, told)
    table.attrs["left_out"] = [*dict.fromkeys(told)]
    return table


def _tracks(labels: pd.DataFrame) -> pd.Series:
    """Names of threads and streams, with the device and the process where there are several."""
    texts = labels[["thread", "stream", "device", "process"]].astype(str)
    streams = "stream " + texts.stream
    if labels.device[labels.on_device].nunique() > 1:
        streams = "gpu " + texts.device + " " + streams
    tracks = streams.where(labels.on_device, "host " + texts.thread)
    known = texts.process != ""
    if texts.process[known].nunique() > 1:
        tracks = tracks.mask(known, tracks + " of " + texts.process)
    return tracks


def _placed(events: pd.DataFrame, labels: pd.DataFrame, python: bool, told: list[str]) -> pd.DataFrame:
    """The events that have a kind, a time and a place."""
    wanted = labels.kind.notna() & (python | labels.kind.ne("python"))
    unread = events.label.map(labels.category[~wanted])
    for category, n in unread.value_counts().items():
        told.append(f"{n} events of category {category!r} left out")
    events = events[wanted.to_numpy()[events.label]]
    somewhere = (labels.stream != -1) | (labels.thread != -1)
    apart = (events.start_ns - events.start_ns.median()).abs()
    fits = (apart < 1000 * SPAN) & events.dur_us.between(0, SPAN) & somewhere.to_numpy()[events.label]
    _tell(told, (~fits).sum(), "events without a usable time, duration, thread or stream left out")
    return events[fits].copy()


def _tell(told: list[str], n: int, what: str) -> None:
    if n:
        told.append(f"{n} {what}")


def _join(events: pd.DataFrame, told: list[str]) -> None:
    """Leave every correlation to one host call (the outer of nested ones, as of nsys 2022.2), or to none."""
    calls = events[events.kind == "runtime"]
    calls = calls[calls.correlation != -1].sort_values("dur_us", ascending=False)
    inner = calls.duplicated(["correlation", "process"])
    events.loc[inner.index[inner], "correlation"] = -1
    calls = calls[~inner]
    unclear = events.correlation.isin(calls.correlation[calls.duplicated("correlation")])
    events.loc[unclear, "correlation"] = -1
    _tell(told, unclear.sum(), "events not joined: several host calls have their correlation")


def _check_streams(table: pd.DataFrame, told: list[str]) -> None:
    """Cut impossible durations, and say what is odd on the streams."""
    device = table[table.kind.isin(DEVICE_KINDS)]
    if device.empty:
        told.append("no GPU event in the file: only the host side can be shown")
    room = device.groupby("track", observed=True).start_us.shift(-1) - device.start_us
    late = device.dur_us > room + 1000
    table.loc[late.index[late], "dur_us"] = room[late]
    why = "1 ms and more after the next on their stream began: cut there, as faults of the recorder"
    _tell(told, late.sum(), f"device events end {why}")
    overlap = ~late & (device.dur_us > room + 2)  # by more than the rounding to whole us explains
    why = "launched ahead, most likely (programmatic dependent launch), or of several processes"
    _tell(told, overlap.sum(), f"device events overlap on their stream: {why}; time is counted once")
    if table.attrs["rocm"]:
        why = "DtoD copies, some of which may come from pinned host memory: ROCm calls those so, too"
        _tell(told, (device.kind == "memcpy").sum(), why)
