"""Profiler traces as one table of events, whatever wrote them.

Read are Kineto / Chrome JSON (`torch.profiler`) and Nsight Systems exports (`nsys export --type sqlite`),
plain or gzip. Every reader gives the same pandas table, one row an event, sorted by start:

    name, kind (see KINDS), track ("host 1234", "stream 7"; with the process or the device where the file
    has several), inputs (of a copying operator whose shapes were recorded: "int <- long int", "4 tensors"),
    stream and thread (int64, -1 where they do not apply), start_us (from the first event), dur_us, bytes
    (float, NaN where the trace does not tell; of aten::copy_ what it writes), correlation (int64; a host call
    and the device work that it launched share one; nested calls, too, the outer first; -1 for none).

`attrs`: source, path, device, evidence ("recorded", "measured" or "modelled"), rocm, left_out (sentences).
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import mmap
import re
import sqlite3
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal, localcontext
from itertools import count
from pathlib import Path
from typing import Any

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
KINDS = (*HOST_KINDS, *DEVICE_KINDS)
TEXT = pd.CategoricalDtype()
COLUMNS = {"name": TEXT, "kind": pd.CategoricalDtype(KINDS), "track": TEXT, "inputs": TEXT, "stream": int}
COLUMNS |= {"thread": int, "start_us": float, "dur_us": float, "bytes": float, "correlation": int}

# Categories in lower case, with the spellings of earlier years, and the kinds that to_chrome_trace writes.
CATEGORIES = dict(zip(KINDS, KINDS)) | {"gpu_memcpy": "memcpy", "gpu_memset": "memset"}
CATEGORIES |= {"cpu_op": "host_op", "operator": "host_op", "user_annotation": "annotation"}
CATEGORIES |= {"python_function": "python", "cuda_runtime": "runtime", "cuda_driver": "runtime"}
COPY, FOREACH = "aten::copy_", "aten::_foreach_copy_"
FOREACH_KERNEL = r"^(?=.*multi_tensor_apply_kernel).*\bCopy(?:Functor)?<"  # ForeachBinaryOpList.cu; ^: linear
NVTX_NUMBERS = r"(?:, seq = \d+)?, op_id = \d+.*"  # of PyTorch's operators: "aten::copy_, seq = 4, op_id = 9"
COPY_KERNELS = (
    # behind copy_ (Copy.cu; of PyTorch 1.8, too), SGLang's one for all pairs, and this project's own
    "direct_copy_kernel|copy_device_to_device|_copy_kernel_cuda|neg_conj_kernel_cuda|_small_copy_kernel",
    FOREACH_KERNEL,
    *(re.escape(kind.work) for kind in LAUNCH_KINDS.values() if kind.event == "copy_kernel"),
)
# What the name says more than the category: category's kind, what the name holds, kind. The first one counts.
BY_NAME = (
    ("kernel", "^__amd_rocclr_copyBuffer", "memcpy"),
    ("kernel", "|".join(COPY_KERNELS), "copy_kernel"),
    ("memcpy", "DtoD|DeviceToDevice|^__amd_rocclr_copyBuffer", "memcpy"),  # the second spelling is ROCm's
    ("memcpy", "HtoD|HostToDevice", "memcpy_htod"),
    ("memcpy", "DtoH|DeviceToHost", "memcpy_dtoh"),
    ("memcpy", "", "memcpy_other"),
    ("annotation", NVTX_NUMBERS, "host_op"),
)
WIDTHS = {"double": 8, "long": 8, "long int": 8, "float": 4, "int": 4, "c10::Half": 2, "c10::BFloat16": 2}
WIDTHS |= {"short": 2, "short int": 2, "bool": 1, "signed char": 1, "unsigned char": 1}

NSYS_TABLES = {
    "CUPTI_ACTIVITY_KIND_RUNTIME": "runtime",
    "NVTX_EVENTS": "annotation",
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernel",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "memcpy",
    "CUPTI_ACTIVITY_KIND_MEMSET": "memset",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "graph",
}
NSYS_QUERY = (Path(__file__).parent / "nsys.sql").read_text(encoding="utf-8")
# a view may never end
REAL_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE 'CREATE TABLE%'"
SQLITE, GZIP = b"SQLite format 3", b"\x1f\x8b"
ADVICE = {
    "folder": "is a folder: give a file",
    ".nsys-rep": "not read as it is: export it, nsys export --type sqlite FILE, and read the .sqlite",
    ".zip": "not read as it is: unpack it, and read the trace that is in it",
    ".zst": "not read as it is: unpack it, zstd -d FILE",
}
EXPECTED = 'a JSON list, an object with a list "traceEvents", or SQLite of nsys (not what rocprofv3 writes)'
LARGEST_UNPACKED = 2 << 30  # bytes of text that a gzip file may hold
SPAN = 2**42  # us: 50 days, in which a double still tells nanoseconds apart


class _Args(msgspec.Struct, gc=False, rename={"dims": "Input Dims", "types": "Input type"}):
    track: str = ""  # this and the next are written by to_chrome_trace
    inputs: str = ""
    device: int = -1
    stream: int = -1
    correlation: int = -1
    bytes: int = -1
    dims: msgspec.Raw = msgspec.Raw()
    types: msgspec.Raw = msgspec.Raw()


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: Decimal = Decimal(-SPAN)  # a double would round 1.7e15 us since 1970 to 0.25 us
    dur: float = math.nan
    pid: int | str = -1
    tid: int | str = -1  # negative ones exist
    args: _Args = msgspec.field(default_factory=_Args)


class _Document(msgspec.Struct):
    traceEvents: list[msgspec.Raw] = []
    deviceProperties: list[dict[str, Any]] = []
    evidence: str = "recorded"  # this and the next are written by to_chrome_trace
    left_out: list[str] = []


UNREADABLE = (msgspec.DecodeError, ValueError, ArithmeticError, RecursionError)
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, sqlite3.Error)
NO_EVENT = _Event("X", "of no readable type")
# Few labels stand for many events: what is text, or the same for a whole stream.
LABEL = ("category", "name", "process", "thread", "track", "inputs", "device", "stream")
NUMBERS = {"label": int, "start_ns": int, "dur_us": float, "correlation": int, "bytes": float}
_decode = msgspec.json.Decoder(_Event, strict=False).decode


def load_trace(path: str | Path, python: bool = False) -> pd.DataFrame:
    """Read a profiler trace into the table described at the top of this module.

    Of the complete events (`ph` "X") those are left out, and counted in `attrs["left_out"]`, that cannot be
    read or placed: a field of another type, no usable time, duration, stream or thread, a category not in
    CATEGORIES. python: read the frames of Python functions, too. A gzip file may hold 2 GiB of text. Raises
    OSError: no such file; ValueError: a folder, damage, another format, an endless time, no event to be read.
    """
    path = Path(path)
    advice = ADVICE.get("folder" if path.is_dir() else path.suffix)
    if advice:
        raise ValueError(f"{path}: {advice}")
    try:
        text = _content(path)
        if text[: len(SQLITE)] == SQLITE:
            document = _Document()
            rows = _nsys_rows(path, text, document)
        else:
            document = msgspec.json.decode(text, type=_Document | list[msgspec.Raw])
            if not isinstance(document, _Document):
                document = _Document(document)
            rows = _json_rows(document.traceEvents)
        with localcontext(Emax=30, traps=[]):  # a time beyond is infinite, not a million digits
            return _table(path, rows, document, python)
    except (*UNREADABLE, *DAMAGED) as error:
        raise ValueError(f"{path}: {error}; expected {EXPECTED}") from error


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
    table = events[[*COLUMNS]].astype(COLUMNS)
    table = table.sort_values("start_us", kind="stable", ignore_index=True)
    table.attrs = attrs
    return table


def to_chrome_trace(table: pd.DataFrame, path: str | Path) -> None:
    """Write a table as Chrome JSON, for Perfetto or for `load_trace`; gzip where the name ends in .gz.

    Raises ValueError, before it writes, if a time is not finite or the table was read from that very file.
    """
    path = Path(path)
    if path.resolve() == table.attrs.get("path"):
        raise ValueError(f"{path}: the table was read from this file, and would overwrite it")
    args = table[["track", "inputs", "stream", "correlation"]].assign(
        bytes=table.bytes.fillna(-1).astype(int)
    )
    events = table[["name"]].assign(
        ph="X",
        cat=table.kind,
        pid=table.track,  # Perfetto shows a text as the name of a process
        tid=table[["thread", "stream"]].max(axis=1),
        ts=table.start_us.round(3),
        dur=table.dur_us.round(3),
        args=args.to_dict("records"),
    )
    document = {
        "deviceProperties": [{"name": table.attrs.get("device", "")}],
        "evidence": table.attrs.get("evidence", "recorded"),
        "left_out": table.attrs.get("left_out", []),
        "traceEvents": events.to_dict("records"),
    }
    text = json.dumps(document, allow_nan=False).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def _content(path: Path) -> bytes | mmap.mmap:
    """What is in a file; bytes, if it was packed."""
    with open(path, "rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if text[:2] == GZIP:
        text = gzip.GzipFile(fileobj=text).read(LARGEST_UNPACKED + 1)
        if len(text) > LARGEST_UNPACKED:
            raise ValueError("unpacks to more than 2 GiB: record fewer steps, or unpack it first")
    return text


def _json_rows(texts: list[msgspec.Raw]) -> Iterator[tuple]:
    """Of every complete event LABEL and NUMBERS, but for the label's."""
    for text in texts:
        try:
            event = _decode(text)
        except UNREADABLE:
            event = NO_EVENT
        args = event.args
        if event.name in (COPY, FOREACH):
            _add_shapes(event.name, args)
        if event.ph == "X":
            host = event.cat, event.name, event.pid, event.tid
            label = *host, args.track, args.inputs, args.device, args.stream
            yield label, 1000 * event.ts, event.dur, args.correlation, args.bytes


def _add_shapes(name: str, args: _Args) -> None:
    """What a copying operator writes, as far as its recorded arguments tell."""
    with contextlib.suppress(*UNREADABLE, LookupError, TypeError):
        first, *_ = msgspec.json.decode(args.dims, type=list[list])
        if name == FOREACH:  # of lists no dtype is recorded
            args.inputs = f"{len(first)} tensors"
        else:
            to, of, *_ = msgspec.json.decode(args.types, type=list[str])
            args.bytes = math.prod(map(int, first)) * WIDTHS[to]
            args.inputs = f"{to} <- {of}"


def _nsys_rows(path: Path, text: bytes | mmap.mmap, document: _Document) -> Iterator[tuple]:
    """What `_json_rows` gives, from an Nsight Systems export: the file, or `text` where that was packed."""
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
        if isinstance(text, bytes):
            db.deserialize(text)
        tables = {name for (name,) in db.execute(REAL_TABLES)}
        for table in sorted(tables.intersection(NSYS_TABLES)):
            fields = defaultdict(lambda: "NULL", table_category=NSYS_TABLES[table], table=table)
            for _, column, *_ in db.execute(f"PRAGMA table_info({table})"):
                fields[column] = f"[{column}]"
            for row in db.execute(NSYS_QUERY.format_map(fields)):
                yield row[:8], *row[8:]
        if "TARGET_INFO_GPU" in tables:
            names = db.execute("SELECT name FROM TARGET_INFO_GPU")
            document.deviceProperties = [{"name": name} for (name,) in names]
    if "TARGET_INFO_SYSTEM_ENV" in tables:
        document.left_out = ["the file holds the recorder's environment, secrets included: mind who gets it"]


def _table(path: Path, rows: Iterator[tuple], document: _Document, python: bool) -> pd.DataFrame:
    """The table of a file's events. What cannot be placed is left out, and said so."""
    numbers = defaultdict(count().__next__)  # every label once: its events hold its number
    numbered = ((numbers[label], *others) for label, *others in rows)
    events = pd.DataFrame(np.fromiter(numbered, list(NUMBERS.items())))
    labels = pd.DataFrame(list(numbers), columns=LABEL)
    kind = labels.category.str.lower().map(CATEGORIES)
    named = [(kind == of) & labels.name.str.contains(text) for of, text, _ in BY_NAME]
    labels["kind"] = np.select(named, [found for *_, found in BY_NAME], kind)
    wanted = KINDS if python else set(KINDS) - {"python"}
    is_read = labels.kind.isin(wanted)
    unread = events.label.map(labels.category[~is_read]).value_counts()
    told = {f"events of category {category!r} left out": n for category, n in unread.items()}
    events = events.join(_placed(labels[is_read]), on="label", how="inner")
    timed = events.query(
        "(start_ns - start_ns.median()).abs() < 1000 * @SPAN and 0 <= dur_us <= @SPAN"
        " and (stream != -1 or thread != -1)"
    )
    told["events without a usable time, duration, thread or stream left out"] = len(events) - len(timed)
    if timed.empty:
        raise ValueError(f"no event that lasts (ph X) could be read: {told}")
    events = timed.eval("""
        start_us = (start_ns - start_ns.min()) / 1000
        bytes = bytes.where(bytes >= 0)
        correlation = correlation.where(correlation > 0, -1)
    """)
    calls = events[(events.kind == "runtime") & (events.correlation > 0)]
    processes = calls.groupby("correlation").process.nunique()
    unclear = events.correlation.isin(processes.index[processes > 1])
    events.loc[unclear, "correlation"] = -1
    told["events not joined: several processes have a host call with their correlation"] = unclear.sum()
    gpus = {str(gpu.get("name", "")) for gpu in document.deviceProperties}
    table = event_table(
        events,
        source=path.name,
        path=path.resolve(),
        device=", ".join(sorted(gpus)),
        evidence=document.evidence,
        rocm=calls.name.str.startswith("hip").any().item(),
    )
    told |= _oddities(table)
    sentences = [f"{n} {what}" for what, n in told.items() if n]
    if not table.kind.isin(DEVICE_KINDS).any():
        sentences.append("no GPU event in the file: only the host side can be shown")
    table.attrs["left_out"] = list(dict.fromkeys(document.left_out + sentences))
    return table


def _placed(labels: pd.DataFrame) -> pd.DataFrame:
    """With the tracks of threads and streams, named after device and process where there are several."""
    on_device = labels.kind.isin(DEVICE_KINDS)
    threads = pd.to_numeric(labels.thread, errors="coerce").mask(on_device).fillna(-1).astype(int)
    # of device work Kineto names no process, but the device again
    process = labels.process.mask(on_device & (labels.process == labels.device), "").astype(str)
    stream = "stream " + labels.stream.astype(str)
    if labels.device[on_device & (labels.stream != -1)].nunique() > 1:
        stream = "gpu " + labels.device.astype(str) + " " + stream
    track = stream.where(on_device, "host " + threads.astype(str))
    if process[process != ""].nunique() > 1:
        track = track.mask(process != "", track + " of " + process)
    track = track.mask(labels.track != "", labels.track)
    name = labels.name.str.replace(NVTX_NUMBERS, "", regex=True)
    texts = labels[["kind", "inputs"]].assign(name=name, process=process, track=track).astype(TEXT)
    return texts.assign(thread=threads, stream=labels.stream.where(on_device, -1))


def _oddities(table: pd.DataFrame) -> dict[str, int]:
    """Cut impossible durations; what is odd on the streams, and of how many events."""
    device = table[table.kind.isin(DEVICE_KINDS)]
    room_us = device.groupby("track", observed=True).start_us.shift(-1) - device.start_us
    late = device.dur_us > room_us + 1000
    table.loc[late.index[late], "dur_us"] = room_us[late]
    overlap = ~late & (device.dur_us > room_us + 2)  # more than the rounding to whole us explains
    return {
        "device events end 1 ms and more after the next on their stream began: cut there, as faults of the "
        "recorder": late.sum(),
        "device events overlap on their stream: launched ahead, most likely (programmatic dependent launch), "
        "or of several processes; time is counted once": overlap.sum(),
        "DtoD copies, some of which may come from pinned host memory: ROCm calls those so, too": (
            table.attrs["rocm"] * (device.kind == "memcpy").sum()
        ),
    }
