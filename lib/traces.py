"""Profiler traces as one table of events, and the runs of device copies in it.

Read are Kineto / Chrome JSON (`torch.profiler`, plain or gzip) and Nsight Systems exports
(`nsys export --type sqlite`). Every reader gives the same pandas table, one row an event, sorted by start:

    name, kind (see KINDS), track ("host 1234", "stream 7"; with the process or the device where the file has
    several), stream and thread (int64, -1 where they do not apply), start_us (from the first event), dur_us,
    bytes (float, NaN where the trace does not tell), correlation (int64; a host call and the device work that
    it launched share one; -1 for none).

`table.attrs` says where it came from: source, device, evidence ("recorded", "measured" or "modelled"),
resolution_us (1.0 where the file holds whole microseconds) and left_out, a list of sentences.
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
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import pandas as pd

try:
    import msgspec
except ImportError:  # the standard json module then does the same work, several times slower
    msgspec = None

if TYPE_CHECKING:
    import torch

COLUMNS = ("name", "kind", "track", "stream", "thread", "start_us", "dur_us", "bytes", "correlation")
KINDS = {
    "host_op": "an operator on the host, such as aten::copy_",
    "runtime": "a CUDA runtime or driver call",
    "annotation": "a range that the user named (record_function, NVTX)",
    "memcpy": "device-to-device memcpy",
    "memcpy_htod": "host-to-device memcpy",
    "memcpy_dtoh": "device-to-host memcpy",
    "memcpy_other": "any other memcpy, such as one between two devices",
    "memset": "memset on the device",
    "copy_kernel": "a kernel that PyTorch copies with: elementwise or fused foreach",
    "kernel": "any other kernel",
    "graph": "a CUDA-graph replay recorded as one block",
}
HOST_KINDS = ("host_op", "runtime", "annotation")
DEVICE_KINDS = tuple(kind for kind in KINDS if kind not in HOST_KINDS)

# Categories in lower case, with the spellings of earlier years; "graph" is what to_chrome_trace writes.
CATEGORIES = {
    "cpu_op": "host_op", "operator": "host_op", "user_annotation": "annotation",
    "cuda_runtime": "runtime", "cuda_driver": "runtime", "runtime": "runtime",
    "gpu_memcpy": "memcpy", "memcpy": "memcpy", "gpu_memset": "memset", "memset": "memset",
    "kernel": "kernel", "graph": "graph",
}  # fmt: skip
DIRECTIONS = {"DtoD": "memcpy", "HtoD": "memcpy_htod", "DtoH": "memcpy_dtoh"}
# The kernels behind _foreach_copy_ (ForeachBinaryOpList.cu) and copy_ (Copy.cu).
FOREACH_COPY = r"multi_tensor_apply_kernel.*\bCopy(?:Functor)?<"
COPY_KERNEL = re.compile(rf"direct_copy_kernel|\w_copy_kernel_cuda|neg_conj_kernel_cuda|{FOREACH_COPY}")

NSYS_TABLES = {
    "CUPTI_ACTIVITY_KIND_RUNTIME": "runtime",
    "NVTX_EVENTS": "user_annotation",
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernel",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "memcpy",
    "CUPTI_ACTIVITY_KIND_MEMSET": "memset",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "graph",
}
NSYS_COLUMNS = (
    "globalTid", "globalPid", "deviceId", "streamId", "correlationId", "bytes", "copyKind",
    "nameId", "textId", "text", "demangledName",
)  # fmt: skip
NSYS_QUERY = """
    SELECT '{category}',
        COALESCE({text}, StringIds.value, 'Memcpy ' || CASE {copyKind} WHEN 1 THEN 'HtoD' WHEN 2 THEN 'DtoH'
            WHEN 8 THEN 'DtoD' WHEN 10 THEN 'PtoP' END, '{category}'),
        [start], [end] - [start], ({task} >> 24) & 0xFFFFFF, {task} & 0xFFFFFF,
        {deviceId}, {streamId}, COALESCE({correlationId}, 0), {bytes}
    FROM {table} LEFT JOIN StringIds ON StringIds.id = COALESCE({nameId}, {textId}, {demangledName})"""

_BLOCK = 4 << 20  # JSON text decoded at a time
_LIST_START = re.compile(rb'\A\s*\[|"traceEvents"\s*:\s*\[')
_BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*\{")
_ABSENT = np.iinfo(np.int64).min

_INTEGERS = ("device", "stream", "correlation", "bytes")

if msgspec is not None:  # only the needed fields, typed
    _Args = msgspec.defstruct("_Args", [(field, int, _ABSENT) for field in _INTEGERS], frozen=True, gc=False)
    _NO_ARGS = _Args()
    _Event = msgspec.defstruct(
        "_Event",
        [(field, str, "") for field in ("ph", "cat", "name")]
        # 1.7e15 us since 1970: a double would round ts to 0.25 us, so its text is kept
        + [("ts", msgspec.Raw, msgspec.Raw(b"nan")), ("dur", float, math.nan), ("args", _Args, _NO_ARGS)]
        + [("pid", int | str, _ABSENT), ("tid", int | str, _ABSENT)],
        gc=False,
    )
    _Trace = msgspec.defstruct(
        "_Trace", [("traceEvents", list[_Event]), ("deviceProperties", list, []), ("evidence", str, "")]
    )
    _DECODER = msgspec.json.Decoder(_Trace | list[_Event])


def load_trace(path: str | os.PathLike) -> pd.DataFrame:
    """Read a profiler trace into the table described at the top of this module.

    Complete events (`ph` "X") are read; flow, instant, counter and metadata events are no spans. One that
    cannot be placed (no, a negative or a non-finite duration, no stream, a category not in CATEGORIES) is
    left out, and `attrs["left_out"]` says how many.

    JSON is decoded in blocks of 4 MiB, so memory goes with the table rather than the text: a file of 1 GB
    grows the process by 1.6 times the file's size at the peak (benchmarks/trace_loading.py --gigabytes 1).

    Raises:
        FileNotFoundError: no such file.
        ValueError: with the file and what is wrong: empty, damaged gzip, invalid JSON, no `traceEvents`, an
            SQLite file that nsys did not export, not a single event that could be read.
    """
    path = Path(path)
    with open(path, "rb") as file:
        magic = file.read(16)
    if not magic:
        raise ValueError(f"{path}: the file is empty")
    try:
        if magic.startswith(b"SQLite format 3"):
            return _collect([_nsys_columns(path)], path, microseconds=1e-3)
        with (gzip.open if magic.startswith(b"\x1f\x8b") else open)(path, "rb") as stream:
            return _collect(_json_blocks(stream, path), path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: gzip is truncated or damaged: {error}") from error
    except sqlite3.Error as error:
        raise ValueError(f"{path}: not as Nsight Systems exports it: {error}") from error


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


def to_chrome_trace(table: pd.DataFrame, path: str | os.PathLike) -> None:
    """Write a table as Chrome JSON, for Perfetto or for `load_trace`; gzip where the name ends in .gz."""
    path, category = Path(path), {kind: category for category, kind in reversed(CATEGORIES.items())}
    events, lanes, hosts = [], {}, _Numbering()
    for row in table.itertuples(index=False):
        process = re.search(r"host (\S+):|stream \S+ of (\S+)$", row.track)
        gpu = re.match(r"gpu (\d+) ", row.track)
        device, host = int(gpu[1]) if gpu else 0, row.kind in HOST_KINDS
        if host:  # numbers that no device has: Perfetto wants a number for a process
            name = f"host {process[1]}" if process else "host"
            lane, args = {"pid": 1_000_000 + hosts[name], "tid": row.thread}, {}
        else:
            name = f"GPU {device}"
            lane = {"pid": device, "tid": row.stream}
            args = {"device": device, "stream": row.stream}
        lanes[row.track] = lane, name
        args |= {"correlation": row.correlation} if row.correlation >= 0 else {}
        args |= {"bytes": int(row.bytes)} if row.bytes == row.bytes else {}
        cat = category.get(row.kind, "gpu_memcpy" if row.kind.startswith("memcpy") else "kernel")
        times = {"ts": round(row.start_us, 3), "dur": round(row.dur_us, 3)}
        events.append({"ph": "X", "cat": cat, "name": row.name, **lane, **times, "args": args})
    for track, (lane, name) in lanes.items():
        events.append({"ph": "M", "name": "process_name", **lane, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_name", **lane, "args": {"name": track}})
    gpus = [{"id": i, "name": name} for i, name in enumerate(table.attrs.get("device", "").split(", "))]
    document = {"deviceProperties": gpus, "evidence": table.attrs.get("evidence", ""), "traceEvents": events}
    part = path.with_name(f"{path.name}.part")
    try:
        with (gzip.open if path.suffix == ".gz" else open)(part, "wt", encoding="utf-8") as file:
            json.dump(document, file, allow_nan=False)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def burst_copies(
    trace: pd.DataFrame, min_copies: int = 4, kinds: Sequence[str] = ("memcpy", "copy_kernel")
) -> pd.DataFrame:
    """The copies of every burst, one row each, with the host call that launched it.

    A burst is a run of at least `min_copies` events of `kinds` in a row on one stream, ordered by start,
    with no other device event between them on that stream.

    Returns:
        the trace's columns and index, and: burst (0, 1, ... by first start), ready_us (when the stream had
        finished all before; NaN for its first event), call, call_start_us, call_us (the runtime call; NaN
        where it was not recorded), op, op_start_us, op_us (the innermost operator or annotation around that
        call; op_us is NaN for an annotation, which holds more than the copy).

    Raises:
        ValueError: min_copies below 1, or a kind that is none of DEVICE_KINDS.
    """
    if min_copies < 1:
        raise ValueError(f"min_copies: expected at least 1, got {min_copies}")
    if unknown := set(kinds) - set(DEVICE_KINDS):
        raise ValueError(f"kinds: expected some of {DEVICE_KINDS}, got {sorted(unknown)}")
    device = trace[trace["kind"].isin(DEVICE_KINDS)].sort_values(["track", "start_us"], kind="stable")
    track, is_copy = device["track"].cat.codes, device["kind"].isin(kinds)
    end = device["start_us"] + device["dur_us"]
    device["ready_us"] = end.groupby(track).cummax().groupby(track).shift()
    device["run"] = (track.diff().ne(0) | is_copy.ne(is_copy.shift())).cumsum()
    runs = device[is_copy].groupby("run")["start_us"]
    copies = device[is_copy].assign(size=runs.transform("size"), first=runs.transform("first"))
    copies = copies[copies["size"] >= min_copies].sort_values(["first", "run"], kind="stable")
    copies["burst"] = pd.factorize(copies["run"])[0]
    return copies.drop(columns=["run", "size", "first"]).join(_calls(copies, trace), on="correlation")


def find_copy_bursts(
    trace: pd.DataFrame, min_copies: int = 4, kinds: Sequence[str] = ("memcpy", "copy_kernel")
) -> pd.DataFrame:
    """Bursts of device copies (see `burst_copies`), one row each, in order of start.

    With kinds=("memcpy",) copies are device-to-device memcpys only. The idle time is that of the stream:
    another stream of the device may have been at work.

    Returns:
        stream, track, n_copies, bytes (of the copies whose size is known), start_us, span_us (first start to
        last end), busy_us (in which the stream copied), idle_share (1 - busy / span), host_us (summed runtime
        calls), host_span_us (start of the first call to the end of the last), op_us (summed operators around
        them), lead_us (start of the first operator, or else call, to the start of the first copy), n_fused
        and fused_us (foreach kernels, which are grouped already), call and op (the most frequent), regime,
        sizes (float array, in order: bytes of the copies that are no foreach kernel).
        regime is "host-bound" where most of the idle time came before copies whose call had not returned when
        the stream ran dry, else "queued"; "unknown" where half of the calls or more were not recorded.
    """
    copies = burst_copies(trace, min_copies, kinds)
    burst, end = copies["burst"], copies["start_us"] + copies["dur_us"]
    done = end.groupby(burst).cummax().groupby(burst).shift()
    idle = (copies["start_us"] - done).clip(lower=0)
    call_end = copies["call_start_us"] + copies["call_us"]
    fused = copies["name"].astype(str).str.contains(FOREACH_COPY)
    copies = copies.assign(
        end=end, idle=idle, call_end=call_end, fused=fused, fused_us=copies["dur_us"].where(fused, 0.0),
        busy=(end - np.fmax(copies["start_us"], done)).clip(lower=0),
        waited=idle.where(call_end > copies["ready_us"], 0),
        # a graph launch or a foreach call stands behind several copies, and counts once
        host_us=copies["call_us"].where(~copies.duplicated(["burst", "correlation"])),
        op_us=copies["op_us"].where(~copies.duplicated(["burst", "op_start_us"])),
    )  # fmt: skip
    rows = copies.groupby("burst")
    bursts = rows.agg(
        stream=("stream", "first"), track=("track", "first"), n_copies=("start_us", "size"),
        bytes=("bytes", "sum"), start_us=("start_us", "first"), span_us=("end", "max"),
        busy_us=("busy", "sum"), idle_share=("idle", "sum"), host_us=("host_us", "sum"),
        host_span_us=("call_end", "max"), op_us=("op_us", "sum"),
        n_fused=("fused", "sum"), fused_us=("fused_us", "sum"),
    )  # fmt: skip
    bursts["span_us"] -= bursts["start_us"]
    asked = copies["op_start_us"].fillna(copies["call_start_us"]).groupby(burst).min()
    bursts["lead_us"] = bursts["start_us"] - asked
    bursts["host_span_us"] -= rows["call_start_us"].min()
    bursts["idle_share"] = 1 - bursts["busy_us"] / bursts["span_us"].replace(0, np.nan)
    for column in ("call", "op"):
        times = copies.groupby(["burst", column]).size().sort_values(kind="stable").reset_index()
        bursts[column] = times.groupby("burst")[column].last()
    waited = rows["waited"].sum() > rows["idle"].sum() / 2
    known = rows["call_us"].count() * 2 > bursts["n_copies"]
    bursts["regime"] = np.where(known, np.where(waited, "host-bound", "queued"), "unknown")
    bursts["sizes"] = [rows.get_group(number)["bytes"][~fused].to_numpy() for number in bursts.index]
    bursts.attrs = dict(trace.attrs)
    return bursts


def _calls(copies: pd.DataFrame, trace: pd.DataFrame) -> pd.DataFrame:
    """The columns call ... op_us of `burst_copies`, by correlation."""
    calls = trace[(trace["kind"] == "runtime") & trace["correlation"].isin(set(copies["correlation"]) - {-1})]
    calls = calls.drop_duplicates("correlation").sort_values("start_us")
    ops = trace[trace["kind"].isin(("host_op", "annotation")) & trace["track"].isin(calls["track"].unique())]
    ops = ops.assign(shortest=-ops["dur_us"]).sort_values(["start_us", "shortest"])
    around = [ops.iloc[:0]]
    for track, here in calls.groupby("track", observed=True):
        candidates = ops[ops["track"] == track].reset_index(drop=True)
        positions = _innermost(candidates, here["start_us"])
        around.append(candidates.reindex(positions).set_index(here.index))  # position -1 gives a row of NaN
    op = pd.concat(around)[["name", "kind", "start_us", "dur_us"]].reindex(calls.index)
    return pd.DataFrame({
        "call": calls["name"].astype(object), "call_start_us": calls["start_us"], "call_us": calls["dur_us"],
        "op": op["name"].astype(object), "op_start_us": op["start_us"],
        "op_us": op["dur_us"].where(op["kind"] == "host_op"),
    }).set_index(calls["correlation"])  # fmt: skip


def _innermost(ops: pd.DataFrame, times: pd.Series) -> list[int]:
    """Position of the innermost of the nested `ops` around each time, or -1; both in order of start."""
    start, end = ops["start_us"].tolist(), (ops["start_us"] + ops["dur_us"]).tolist()
    found, stack, following = [], [], 0
    for time in times:
        while following < len(start) and start[following] <= time:
            while stack and end[stack[-1]] <= start[following]:
                stack.pop()
            stack.append(following)
            following += 1
        while stack and end[stack[-1]] < time:
            stack.pop()
        found.append(stack[-1] if stack else -1)
    return found


class _Numbering(dict):
    """Numbers its keys in the order in which they are first asked for."""

    def __missing__(self, key: object) -> int:
        self[key] = number = len(self)
        return number


def _json_blocks(stream: BinaryIO, path: Path) -> Iterator[tuple[list, dict]]:
    """Yield what `_columns` gives, block by block.

    A block ends between two events. Text that only looks like such a place (in a string, in a list of `args`)
    leaves something open, so it does not decode, and an earlier place is tried.
    """
    text = stream.read(_BLOCK)
    while not (start := _LIST_START.search(text)):
        if text.lstrip()[:1] != b"{" or not (more := stream.read(_BLOCK)):
            raise ValueError(f'{path}: expected a JSON list, or an object with a list "traceEvents"')
        text += more
    head, text, failed = text[: start.end()], text[start.end() :], 0
    closing = b"]}" if head.lstrip().startswith(b"{") else b"]"
    while more := stream.read(_BLOCK):
        text += more
        if len(text) < 2 * failed:
            continue
        failed = len(text)  # no place found: an event longer than a block, or a long tail after the events
        for place in list(_BETWEEN_EVENTS.finditer(text, len(text) - _BLOCK // 64))[:-4:-1]:
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                yield _columns(head + text[: place.start() + 1] + closing)
                text, failed = text[place.end() - 1 :], 0
                break
    try:
        yield _columns(head + text)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path}: invalid JSON, or cut short: {error}") from error


def _columns(text: bytes) -> tuple[list[Sequence], dict]:
    """Decode a trace: its complete events as columns, and its GPUs and kind of evidence.

    The columns are cat, name, ts (long double array), dur, pid, tid, device, stream, correlation, bytes; what
    is absent is "", nan or _ABSENT.
    """
    if msgspec is not None:
        # null, NaN, or a field of an unexpected type: json below takes what it can
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, DeprecationWarning):
            trace = _DECODER.decode(text)
            trace = _Trace(trace) if isinstance(trace, list) else trace
            events = [e for e in trace.traceEvents if e.ph == "X"]
            columns = [list(map(attrgetter(f), events)) for f in ("cat", "name", "ts", "dur", "pid", "tid")]
            with warnings.catch_warnings(action="error"):  # numpy's, for text that is no number
                columns[2] = np.fromstring(b" ".join(columns[2]).decode(), np.longdouble, sep=" ")
            args = [e.args for e in events]
            columns += [list(map(attrgetter(f), args)) for f in _INTEGERS]
            return columns, {"gpus": trace.deviceProperties, "evidence": trace.evidence}
    trace = json.loads(text.decode("utf-8", "replace"), parse_float=Decimal, parse_constant=lambda _: None)
    trace = {"traceEvents": trace} if isinstance(trace, list) else trace
    rows = [_row(e) for e in trace["traceEvents"] if not isinstance(e, dict) or e.get("ph") == "X"]
    gpus = trace.get("deviceProperties")
    about = {"gpus": gpus if isinstance(gpus, list) else [], "evidence": trace.get("evidence")}
    return _transposed(rows), about


def _row(event: object) -> tuple:
    """One event as in `_columns`, whatever its fields are; what is no event counts as one of no category."""
    event = event if isinstance(event, dict) else {}
    args = event.get("args") if isinstance(event.get("args"), dict) else {}
    texts = (str(event.get(field) or "") for field in ("cat", "name"))
    times = (t if _is_number(t := event.get(field)) else math.nan for field in ("ts", "dur"))
    ids = (i if isinstance(i := event.get(field), int | str) else _ABSENT for field in ("pid", "tid"))
    return *texts, *times, *ids, *map(args.get, _INTEGERS)


def _is_number(value: object) -> bool:
    return isinstance(value, Decimal) or (isinstance(value, int) and abs(value) < 2**63)


def _transposed(rows: Iterable[tuple]) -> list[Sequence]:
    """Rows (cat, name, ts, ...) as the columns of `_columns`."""
    columns = list(zip(*rows))
    if columns:
        columns[2] = np.array([np.longdouble(str(t)) for t in columns[2]])
    return columns


def _nsys_columns(path: Path) -> tuple[list, dict]:
    """What `_columns` gives, from an Nsight Systems export; ts and dur in nanoseconds."""
    rows: list[tuple] = []
    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        if "StringIds" not in tables or tables.isdisjoint(NSYS_TABLES):
            raise ValueError(f"{path}: SQLite, but no Nsight Systems export: expected StringIds and some of "
                             f"{', '.join(NSYS_TABLES)}, got {sorted(tables)}")  # fmt: skip
        for table in tables & set(NSYS_TABLES):
            present = {column[1] for column in db.execute(f"PRAGMA table_info({table})")}
            field = {c: f"[{c}]" if c in present else "NULL" for c in NSYS_COLUMNS}
            task = f"COALESCE({field['globalTid']}, {field['globalPid']})"  # process and thread, 24 bits each
            rows += db.execute(
                NSYS_QUERY.format(**field, task=task, category=NSYS_TABLES[table], table=table)
            )
        gpus = db.execute("SELECT id, name FROM TARGET_INFO_GPU") if "TARGET_INFO_GPU" in tables else ()
        gpus = [{"id": number, "name": name} for number, name in gpus]
    several = len({row[4] for row in rows}) > 1  # correlations count from 1 in every process

    def row(category, name, ts, dur, pid, tid, device, stream, correlation, size) -> tuple:
        correlation |= (pid or 0) << 32 if several and correlation else 0
        ts, dur = (t if isinstance(t, int) else math.nan for t in (ts, dur))
        return category, name, ts, dur, pid, tid, device, stream, correlation, size

    return _transposed(row(*fields) for fields in rows), {"gpus": gpus}


def _collect(blocks: Iterable[tuple[list, dict]], path: Path, microseconds: float = 1.0) -> pd.DataFrame:
    """Turn blocks of `_columns` into the table; `microseconds` is the unit of their ts and dur."""
    names, processes = _Numbering(), _Numbering()  # (category, name), and process ids, which may be text
    chunks, gpus, origin, evidence = [], {}, None, "recorded"
    for columns, about in blocks:
        evidence = "modelled" if about.get("evidence") == "modelled" else evidence
        known = (gpu for gpu in about["gpus"] if isinstance(gpu, dict) and isinstance(gpu.get("id"), int))
        gpus |= {gpu["id"]: str(gpu.get("name")) for gpu in known}
        if not columns or not columns[0]:
            continue
        category, name, ts, dur, pid, tid, *numbers = columns
        origin = next((t for t in ts if t == t), None) if origin is None else origin
        pids, thread, device, stream, correlation, size = map(_integers, (pid, tid, *numbers))
        chunks.append({
            "code": np.array([names[key] for key in zip(category, name)]),
            "start_us": (ts - (origin or 0)).astype(float) * microseconds,
            "dur_us": np.array(dur, float) * microseconds,
            "process": np.array([processes[p] for p in pid]),
            "gpu": np.where(device == _ABSENT, pids, device),
            "thread": thread,
            "stream": np.where(stream == _ABSENT, thread, stream),
            "bytes": np.where(size < 0, np.nan, size),
            "correlation": np.where(correlation > 0, correlation, -1),
        })  # fmt: skip
    if not chunks:
        raise ValueError(f"{path}: holds no complete event (ph X)")
    raw = pd.DataFrame(
        {column: np.concatenate([chunk.pop(column) for chunk in chunks]) for column in list(chunks[0])}
    )
    table = _table(raw, list(names), list(processes), path, gpus)
    # Where a long double is no wider than a double, ts of epoch size are rounded: then this says so.
    rounded = float(np.spacing(origin or np.longdouble(0))) * microseconds
    table.attrs |= {"evidence": evidence, "resolution_us": max(table.attrs["resolution_us"], rounded)}
    return table


def _integers(values: Sequence[object]) -> np.ndarray:
    """int64 array, with _ABSENT for what is no integer of 64 bits."""
    try:
        return np.fromiter(values, np.int64, len(values))
    except (TypeError, ValueError, OverflowError):
        fits = (v if isinstance(v, int) and -(2**63) <= v < 2**63 else _ABSENT for v in values)
        return np.fromiter(fits, np.int64, len(values))


def _kind(category: str | None, name: str | None) -> str | None:
    kind = CATEGORIES.get((category or "").lower())
    if kind == "memcpy":
        return next((k for direction, k in DIRECTIONS.items() if direction in (name or "")), "memcpy_other")
    return "copy_kernel" if kind == "kernel" and COPY_KERNEL.search(name or "") else kind


def _table(raw: pd.DataFrame, names: list[tuple], processes: list, path: Path, gpus: dict) -> pd.DataFrame:
    """Leave out what cannot be placed and say so, name the tracks, order the events."""
    code_of = {kind: number for number, kind in enumerate(KINDS)}
    raw["kind"] = np.array([code_of.get(_kind(*key), -1) for key in names])[raw["code"]]
    raw["device"] = raw["kind"] >= len(HOST_KINDS)
    unknown = raw["code"][raw["kind"] < 0].map(dict(enumerate(category for category, _ in names)))
    left_out = [f"{n} events of category {category!r} left out" for category, n in Counter(unknown).items()]
    keep = raw["kind"] >= 0
    for why, wrong in {
        "no finite ts and dur": ~np.isfinite(raw["start_us"] + raw["dur_us"]),
        "a negative duration": raw["dur_us"] < 0,
        "no stream": raw["device"] & (raw["stream"] == _ABSENT),
        "no thread": ~raw["device"] & (raw["thread"] == _ABSENT),
    }.items():
        left_out += [f"{n} events with {why} left out"] if (n := (keep & wrong).sum()) else []
        keep &= ~wrong
    raw = raw[keep]
    if raw.empty:
        raise ValueError(f"{path}: no event could be read: {'; '.join(left_out)}")

    call = raw[(raw["kind"] == code_of["runtime"]) & (raw["correlation"] >= 0)]
    call = call.set_index("correlation")["process"]
    twice = raw["correlation"].isin(call.index[call.index.duplicated()])
    raw = raw.assign(correlation=raw["correlation"].where(~twice, -1))
    if twice.any():
        left_out.append(f"{twice.sum()} events not joined: several host calls have their correlation")
    # A device event of JSON does not name its process; with several in the file it is that of its host call.
    several = raw["process"][~raw["device"]].nunique() > 1
    caller = raw["correlation"].map(call[~call.index.duplicated(keep=False)]).fillna(-1).astype(int)
    lanes = pd.DataFrame({
        "device": raw["device"], "process": caller.where(raw["device"], raw["process"]) if several else -1,
        "gpu": raw["gpu"].where(raw["device"], 0),
        "number": raw["stream"].where(raw["device"], raw["thread"]),
    })  # fmt: skip
    several_gpus, labels = lanes["gpu"][lanes["device"]].nunique() > 1, []
    for lane in lanes.drop_duplicates().itertuples(index=False):
        owner = processes[lane.process] if lane.process >= 0 else ""
        if lane.device:
            gpu = f"gpu {lane.gpu} " if several_gpus else ""
            labels.append(f"{gpu}stream {lane.number}" + (f" of {owner}" if owner != "" else ""))
        else:
            labels.append(f"host {owner}:{lane.number}" if owner != "" else f"host {lane.number}")
    track = lanes.groupby(list(lanes), sort=False).ngroup()

    code, unique_names = pd.factorize(np.array([name or "" for _, name in names], object))
    table = pd.DataFrame({
        "name": pd.Categorical.from_codes(code[raw["code"]], unique_names),
        "kind": pd.Categorical.from_codes(raw["kind"], list(KINDS)),
        "track": pd.Categorical.from_codes(track, labels),
        "stream": raw["stream"].where(raw["device"], -1), "thread": raw["thread"].where(~raw["device"], -1),
        "start_us": raw["start_us"] - raw["start_us"].min(), "dur_us": raw["dur_us"],
        "bytes": raw["bytes"], "correlation": raw["correlation"],
    }).sort_values("start_us", kind="stable", ignore_index=True)  # fmt: skip
    device = table[table["kind"].isin(DEVICE_KINDS)]
    ready = (device["start_us"] + device["dur_us"]).groupby(device["track"], observed=True).cummax()
    overlaps = int((ready.groupby(device["track"], observed=True).shift() > device["start_us"] + 2).sum())
    if device.empty:
        left_out.append("no GPU event in the file: only the host side can be shown")
    if overlaps:
        left_out.append(f"{overlaps} device events overlap on their stream: several processes or devices may "
                        "share its name here; time is counted once")  # fmt: skip
    whole = bool((table["start_us"] % 1 == 0).all() and (table["dur_us"] % 1 == 0).all())
    used = [gpus[gpu] for gpu in sorted(set(raw["gpu"][raw["device"]]) & set(gpus))]
    table.attrs = {
        "source": path.name, "device": ", ".join(dict.fromkeys(used)),
        "resolution_us": 1.0 if whole else 0.001, "left_out": left_out,
    }  # fmt: skip
    return table
