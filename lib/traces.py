"""Profiler traces as one table of events, and the runs of device copies in it.

Read are Kineto / Chrome JSON (`torch.profiler`, plain or gzip) and Nsight Systems exports
(`nsys export --type sqlite`). Every reader gives the same pandas table, one row an event, sorted by start:

    name, kind (see KINDS), track ("host 1234", "stream 7"; with the process or the device in front where the
    file has several), stream and thread (int64, -1 where they do not apply), start_us (from the first event),
    dur_us, bytes (float, NaN where the trace does not tell), correlation (int64; a host call and the device
    work it launched share one; -1 for none).

`table.attrs` says where it came from: source, device, evidence ("recorded", "measured" or "modelled"),
resolution_us (1.0 where the file holds whole microseconds) and left_out, a list of sentences.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import sqlite3
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pandas as pd

try:
    import msgspec
except ImportError:  # the standard json module then does the same work, several times slower
    msgspec = None

COLUMNS = ("name", "kind", "track", "stream", "thread", "start_us", "dur_us", "bytes", "correlation")
KINDS = {
    "host_op": "an operator on the host, such as aten::copy_",
    "runtime": "a CUDA runtime or driver call",
    "annotation": "a range that the user named (record_function, NVTX)",
    "memcpy": "device-to-device memcpy",
    "memcpy_htod": "host-to-device memcpy",
    "memcpy_dtoh": "device-to-host memcpy",
    "memcpy_other": "any other memcpy, such as between two devices",
    "memset": "memset on the device",
    "copy_kernel": "a kernel that PyTorch copies with: elementwise or fused foreach",
    "kernel": "any other kernel",
    "graph": "a CUDA-graph replay recorded as one block",
}
HOST_KINDS = ("host_op", "runtime", "annotation")
DEVICE_KINDS = tuple(kind for kind in KINDS if kind not in HOST_KINDS)

# Kineto's categories in lower case, with the spellings of earlier years.
CATEGORIES = {
    "cpu_op": "host_op", "operator": "host_op",
    "cuda_runtime": "runtime", "cuda_driver": "runtime", "runtime": "runtime",
    "user_annotation": "annotation",
    "gpu_memcpy": "memcpy", "memcpy": "memcpy",
    "gpu_memset": "memset", "memset": "memset",
    "kernel": "kernel",
    "graph": "graph",  # written by to_chrome_trace
}  # fmt: skip
# Names of the kernels behind copy_ (Copy.cu) and _foreach_copy_ (ForeachBinaryOpList.cu).
FOREACH_COPY = r"multi_tensor_apply_kernel.*\bCopy(Functor)?<"
COPY_KERNEL = re.compile(rf"direct_copy_kernel|\w+_copy_kernel_cuda|neg_conj_kernel_cuda|{FOREACH_COPY}")
MEMCPY_DIRECTIONS = {"DtoD": "memcpy", "HtoD": "memcpy_htod", "DtoH": "memcpy_dtoh"}
# What an Nsight Systems export holds, as rows of `_rows`; a table is there only if it has rows.
NSYS_TABLES = {
    "CUPTI_ACTIVITY_KIND_RUNTIME": "runtime",
    "NVTX_EVENTS": "user_annotation",
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernel",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "memcpy",
    "CUPTI_ACTIVITY_KIND_MEMSET": "memset",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "graph",
}
NSYS_COLUMNS = ("globalTid", "globalPid", "deviceId", "streamId", "correlationId", "bytes", "copyKind",
                "nameId", "textId", "text", "demangledName")  # fmt: skip
NSYS_QUERY = """
    SELECT 'X', '{category}',
        COALESCE({text}, value, 'Memcpy ' || CASE {copyKind} WHEN 1 THEN 'HtoD' WHEN 2 THEN 'DtoH'
            WHEN 8 THEN 'DtoD' WHEN 10 THEN 'PtoP' END, '{category}'),
        [start], [end] - [start], ({task} >> 24) & 0xFFFFFF, {task} & 0xFFFFFF,
        {deviceId}, {streamId}, {correlationId}, {bytes}
    FROM {table} LEFT JOIN StringIds ON id = COALESCE({nameId}, {textId}, {demangledName})"""

_BLOCK = 8 << 20  # JSON text decoded at a time
_LIST_START = re.compile(rb'\A\s*\[|"traceEvents"\s*:\s*\[')
_BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*\{")
_ABSENT = np.iinfo(np.int64).min

if msgspec is not None:

    class _Args(msgspec.Struct, gc=False):
        stream: int | None = None
        device: int | None = None
        correlation: int | None = None
        bytes: int | None = None

    class _Event(msgspec.Struct, gc=False):
        ph: str | None = None
        name: str | None = None
        cat: str | None = None
        ts: Decimal | None = None  # 1.7e15 us since 1970: a float would round to 0.25 us
        dur: float | None = None
        pid: int | str | None = None
        tid: int | str | None = None
        args: _Args | None = None

    class _Device(msgspec.Struct):
        id: int | None = None
        name: str | None = None

    class _Trace(msgspec.Struct):
        traceEvents: list[_Event]  # the file's own spelling
        deviceProperties: list[_Device] | None = None

    _DECODER = msgspec.json.Decoder(_Trace | list[_Event])
    _NO_ARGS = _Args()


def load_trace(path: str | os.PathLike) -> pd.DataFrame:
    """Read a profiler trace into the table described at the top of this module.

    Complete events (`ph` "X") are read; flow, instant, counter and metadata events are not spans and are
    skipped. An event that cannot be placed (no or negative or non-finite duration, no stream, a category
    not in CATEGORIES) is left out, and counted in `attrs["left_out"]`.

    JSON is decoded in blocks of 8 MiB, so memory goes with the table rather than with the text: loading a
    file of 1 GB grows the process by @FACTOR@ of the file's size at the peak (measured).

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
            return _collect([_nsys_rows(path)], path, microseconds=1e-3)
        with (gzip.open if magic.startswith(b"\x1f\x8b") else open)(path, "rb") as stream:
            return _collect(_json_blocks(stream, path), path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: gzip is truncated or damaged: {error}") from error
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path}: SQLite cannot read it: {error}") from error


def from_profiler(prof) -> pd.DataFrame:
    """The table of a finished `torch.profiler.profile` (host events only on a machine without a GPU).

    PyTorch lets a run be exported once: afterwards export with `to_chrome_trace`.

    Raises:
        ValueError: the run is not finished, was exported before, or holds no events.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profiler.json"
        try:
            prof.export_chrome_trace(str(path))
        except (RuntimeError, AssertionError, AttributeError) as error:
            raise ValueError(
                f"profiler: the run cannot be exported (unfinished, or exported before): {error}"
            ) from error
        table = load_trace(path)
    table.attrs |= {"source": "torch.profiler", "evidence": "measured"}
    return table


def to_chrome_trace(table: pd.DataFrame, path: str | os.PathLike) -> None:
    """Write a table as Chrome JSON (gzip where the name ends in .gz) for Perfetto, or for `load_trace` again."""
    path = Path(path)
    categories = {kind: category for category, kind in reversed(CATEGORIES.items())}
    events, tracks = [], {}
    for row in table.itertuples(index=False):
        device, process = _track_parts(row.track)
        host = row.kind in HOST_KINDS
        pid, tid = (1_000_000 + process, row.thread) if host else (device, row.stream)
        tracks[pid, tid] = row.track
        args = {"device": device, "stream": row.stream} if not host else {}
        args |= {"correlation": row.correlation} if row.correlation >= 0 else {}
        args |= {"bytes": int(row.bytes)} if row.bytes == row.bytes else {}
        category = categories.get(row.kind, "memcpy" if row.kind.startswith("memcpy") else "kernel")
        events.append({"ph": "X", "cat": category, "name": row.name, "pid": pid, "tid": tid,
                       "ts": round(row.start_us, 3), "dur": round(row.dur_us, 3), "args": args})  # fmt: skip
    events += [{"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
               for (pid, tid), name in tracks.items()]  # fmt: skip
    names = str(table.attrs.get("device", "")).split(", ")
    document = {"deviceProperties": [{"id": i, "name": name} for i, name in enumerate(names)],
                "evidence": table.attrs.get("evidence", ""), "traceEvents": events}  # fmt: skip
    part = path.with_name(path.name + ".part")
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
        the trace's columns, its index, and: burst (0, 1, ... by first start), ready_us (when the stream had
        finished everything before; NaN for its first event), call, call_start_us, call_us (the runtime call;
        NaN where it was not recorded), op, op_us (the innermost operator or annotation around that call;
        op_us is NaN for an annotation, which holds more than the copy).
    """
    if min_copies < 1:
        raise ValueError(f"min_copies: expected at least 1, got {min_copies}")
    if unknown := set(kinds) - set(DEVICE_KINDS):
        raise ValueError(f"kinds: expected some of {DEVICE_KINDS}, got {sorted(unknown)}")
    device = trace[trace["kind"].isin(DEVICE_KINDS)].sort_values(["track", "start_us"], kind="stable")
    track, is_copy = device["track"].cat.codes.to_numpy(), device["kind"].isin(kinds).to_numpy()
    end = device["start_us"] + device["dur_us"]
    device["ready_us"] = end.groupby(track).cummax().groupby(track).shift()
    starts_run = np.ones(len(device), bool)
    starts_run[1:] = (track[1:] != track[:-1]) | (is_copy[1:] != is_copy[:-1])
    run = np.cumsum(starts_run) - 1
    copies = device[is_copy & (np.bincount(run, minlength=1)[run] >= min_copies)]
    run = run[device.index.get_indexer(copies.index)] if len(copies) else run[:0]
    first = copies["start_us"].groupby(run).transform("first")
    order = np.lexsort((copies["start_us"], run, first))
    copies = copies.iloc[order]
    copies["burst"] = pd.factorize(run[order])[0]
    return _join_calls(copies, trace)


def find_copy_bursts(
    trace: pd.DataFrame, min_copies: int = 4, kinds: Sequence[str] = ("memcpy", "copy_kernel")
) -> pd.DataFrame:
    """Bursts of device copies (see `burst_copies`), one row each, in order of start.

    Returns:
        stream, track, n_copies, bytes (of the copies whose size is known), start_us, span_us (first start to
        last end), busy_us (in which the stream copied), idle_share (1 - busy / span), host_us (summed
        runtime calls), host_span_us (start of the first call to the end of the last), op_us (summed operators
        around them), call and op (the most frequent), regime ("host-bound": most of the idle time was spent
        before copies whose call had not yet returned when the stream ran dry; "queued" otherwise; "unknown"
        where half of the calls were not recorded), joined (copies with a recorded call), n_fused and fused_us
        (foreach kernels among them, which are grouped already), sizes (float array: bytes of the others).
        The idle time is that of the stream: another stream of the device may have been at work.
    """
    copies = burst_copies(trace, min_copies, kinds)
    end = copies["start_us"] + copies["dur_us"]
    group = copies["burst"]
    done = end.groupby(group).cummax().groupby(group).shift()
    copies["busy"] = (end - np.fmax(copies["start_us"], done)).clip(lower=0)
    idle = (copies["start_us"] - done).clip(lower=0).fillna(0)
    copies["waited"] = idle.where(copies["call_start_us"] + copies["call_us"] > copies["ready_us"], 0)
    copies["idle"], copies["end"] = idle, end
    copies["call_end"] = copies["call_start_us"] + copies["call_us"]
    fused = copies["name"].astype(str).str.contains(FOREACH_COPY.replace("(Functor)", "(?:Functor)"))
    copies["fused"], copies["fused_us"] = fused, copies["dur_us"].where(fused, 0.0)
    grouped = copies.groupby("burst")
    bursts = grouped.agg(
        stream=("stream", "first"), track=("track", "first"), n_copies=("start_us", "size"),
        bytes=("bytes", "sum"), start_us=("start_us", "first"), span_us=("end", "max"), busy_us=("busy", "sum"),
        host_us=("call_us", "sum"), host_span_us=("call_end", "max"), op_us=("op_us", "sum"),
        joined=("call_us", "count"), n_fused=("fused", "sum"), fused_us=("fused_us", "sum"),
    )  # fmt: skip
    bursts["span_us"] -= bursts["start_us"]
    bursts["host_span_us"] -= grouped["call_start_us"].min()
    bursts.insert(7, "idle_share", 1 - bursts["busy_us"] / bursts["span_us"].replace(0, np.nan))
    for column in ("call", "op"):
        bursts[column] = _most_frequent(copies, column).reindex(bursts.index)
    waiting = grouped["waited"].sum() > grouped["idle"].sum() / 2
    bursts["regime"] = np.where(waiting, "host-bound", "queued")
    bursts.loc[bursts["joined"] * 2 <= bursts["n_copies"], "regime"] = "unknown"
    sizes = copies["bytes"][~fused].groupby(group).apply(np.asarray)
    bursts["sizes"] = [sizes.get(burst, np.empty(0)) for burst in bursts.index]
    bursts.attrs = dict(trace.attrs)
    return bursts


def _most_frequent(copies: pd.DataFrame, column: str) -> pd.Series:
    counts = copies.groupby(["burst", column], observed=True).size().reset_index(name="n")
    return counts.sort_values("n", kind="stable").groupby("burst")[column].last()


def _join_calls(copies: pd.DataFrame, trace: pd.DataFrame) -> pd.DataFrame:
    """Add the columns call ... op_us of `burst_copies`."""
    calls = trace[(trace["kind"] == "runtime") & trace["correlation"].isin(copies["correlation"])]
    calls = calls[calls["correlation"] >= 0].drop_duplicates("correlation").sort_values("start_us")
    ops = trace[trace["kind"].isin(("host_op", "annotation")) & trace["track"].isin(calls["track"].unique())]
    ops = ops.assign(shortest=-ops["dur_us"]).sort_values(["start_us", "shortest"])
    joined = [calls.assign(op=None, op_start_us=np.nan, op_us=np.nan).iloc[:0]]
    for track, here in calls.groupby("track", observed=True):
        op = ops[ops["track"] == track].reset_index(drop=True)
        op = op.reindex(_enclosing(op, here["start_us"]))  # position -1 gives a row of NaN
        op_us = op["dur_us"].where(op["kind"] == "host_op")
        here = here.assign(op=op["name"].astype(object).to_numpy(), op_start_us=op["start_us"].to_numpy())
        joined.append(here.assign(op_us=op_us.to_numpy()))
    calls = pd.concat(joined).set_index("correlation")
    calls = calls.assign(
        call=calls["name"].astype(object), call_start_us=calls["start_us"], call_us=calls["dur_us"]
    )
    return copies.join(
        calls[["call", "call_start_us", "call_us", "op", "op_start_us", "op_us"]], on="correlation"
    )


def _enclosing(ops: pd.DataFrame, times: pd.Series) -> np.ndarray:
    """Position of the innermost of the nested `ops` (sorted by start) around each of the sorted `times`, or -1."""
    start, end = ops["start_us"].tolist(), (ops["start_us"] + ops["dur_us"]).tolist()
    found, stack, following = [], [], 0
    for time in times.tolist():
        while following < len(start) and start[following] <= time:
            while stack and end[stack[-1]] <= start[following]:
                stack.pop()
            stack.append(following)
            following += 1
        while stack and end[stack[-1]] < time:
            stack.pop()
        found.append(stack[-1] if stack else -1)
    return np.array(found, int)


class _Numbering(dict):
    """Numbers its keys in the order in which they are first asked for."""

    def __missing__(self, key: object) -> int:
        self[key] = number = len(self)
        return number


def _collect(
    blocks: Iterable[tuple[list[tuple], dict]], path: Path, microseconds: float = 1.0
) -> pd.DataFrame:
    """Turn blocks of rows (see `_rows`) into the table; `microseconds` is the unit of their ts and dur."""
    names, processes = _Numbering(), _Numbering()  # (category, name), and process ids, which may be text
    chunks, gpus, origin = [], {}, None
    for rows, gpus_here in blocks:
        gpus |= gpus_here
        rows = [row for row in rows if row[0] == "X"]
        if not rows:
            continue
        _, category, name, ts, dur, pid, tid, *numbers = zip(*rows)
        origin = next((t for t in ts if t is not None), None) if origin is None else origin
        pids, tids, device, stream_id, correlation, size = map(_integers, (pid, tid, *numbers))
        chunks.append({
            "code": np.array([names[key] for key in zip(category, name)]),
            "start_us": np.array([np.nan if t is None else float(t - origin) for t in ts]) * microseconds,
            "dur_us": np.array(dur, float) * microseconds,
            "process": np.array([processes[p] for p in pid]),
            "thread": tids,
            "device": np.where(device == _ABSENT, pids, device),
            "stream": np.where(stream_id == _ABSENT, tids, stream_id),
            "correlation": correlation,
            "bytes": np.where(size == _ABSENT, np.nan, size),
        })  # fmt: skip
    raw = (
        {column: np.concatenate([chunk[column] for chunk in chunks]) for column in chunks[0]}
        if chunks
        else {}
    )
    if not raw:
        raise ValueError(f"{path}: holds no complete event (ph X)")
    return _table(pd.DataFrame(raw), list(names), list(processes), path, gpus)


def _json_blocks(stream: BinaryIO, path: Path) -> Iterator[tuple[list[tuple], dict]]:
    """Yield what `_rows` gives, block by block.

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
        for place in list(_BETWEEN_EVENTS.finditer(text, max(0, len(text) - _BLOCK // 8)))[:-4:-1]:
            with contextlib.suppress(ValueError, RecursionError):
                yield _rows(head + text[: place.start() + 1] + closing)
                text, failed = text[place.end() - 1 :], 0
                break
    try:
        yield _rows(head + text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: invalid JSON, or cut short: {error}") from error


def _rows(text: bytes) -> tuple[list[tuple], dict]:
    """Decode a trace to rows (ph, cat, name, ts, dur, pid, tid, device, stream, correlation, bytes), and GPU names.

    None stands for a ts or dur that is absent or no finite number.
    """
    with contextlib.suppress(
        ValueError
    ):  # NaN, or a field of an unexpected type: json below takes what it can
        if msgspec is not None:
            trace = _DECODER.decode(text)
            trace = _Trace(trace) if isinstance(trace, list) else trace
            pairs = ((e, e.args or _NO_ARGS) for e in trace.traceEvents)
            rows = [(e.ph, e.cat, e.name, e.ts, e.dur, e.pid, e.tid, a.device, a.stream, a.correlation, a.bytes)
                    for e, a in pairs]  # fmt: skip
            return rows, {gpu.id: gpu.name for gpu in trace.deviceProperties or ()}
    trace = json.loads(text.decode("utf-8", "replace"), parse_float=Decimal, parse_constant=lambda _: None)
    trace = {"traceEvents": trace} if isinstance(trace, list) else trace
    gpus = [gpu for gpu in trace.get("deviceProperties") or () if isinstance(gpu, dict)]
    return [_row(e) for e in trace["traceEvents"]], {gpu.get("id"): gpu.get("name") for gpu in gpus}


def _row(event: object) -> tuple:
    """One event as `_rows` gives it, whatever it is; what is no event counts as one of no category."""
    event = event if isinstance(event, dict) else {"ph": "X", "name": "no event"}
    args = event.get("args") if isinstance(event.get("args"), dict) else {}
    times = (t if isinstance(t := event.get(field), int | Decimal) else None for field in ("ts", "dur"))
    texts = (None if v is None else str(v) for v in map(event.get, ("ph", "cat", "name")))
    ids = (v if isinstance(v, int | str) else None for v in map(event.get, ("pid", "tid")))
    return (*texts, *times, *ids, *map(args.get, ("device", "stream", "correlation", "bytes")))


def _integers(values: Sequence[object]) -> np.ndarray:
    """int64 array with _ABSENT for what is no integer of 64 bits."""
    try:
        return np.fromiter((_ABSENT if v is None else v for v in values), np.int64, len(values))
    except (TypeError, ValueError, OverflowError):
        fits = (v if isinstance(v, int) and abs(v) < 2**63 else _ABSENT for v in values)
        return np.fromiter(fits, np.int64, len(values))


def _nsys_rows(path: Path) -> tuple[list[tuple], dict]:
    """The rows of an Nsight Systems export as `_rows` gives them, times in nanoseconds, and GPU names."""
    rows: list[tuple] = []
    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        if "StringIds" not in tables or tables.isdisjoint(NSYS_TABLES):
            raise ValueError(f"{path}: SQLite, but no Nsight Systems export: expected StringIds and at least one "
                             f"of {', '.join(NSYS_TABLES)}, got {sorted(tables)}")  # fmt: skip
        for table in tables & set(NSYS_TABLES):
            present = {column[1] for column in db.execute(f"PRAGMA table_info({table})")}
            has = {c: f"[{c}]" if c in present else "NULL" for c in NSYS_COLUMNS}
            task = "COALESCE({globalTid}, {globalPid})".format(**has)  # process and thread, 24 bits each
            query = NSYS_QUERY.format(**has, task=task, category=NSYS_TABLES[table], table=table)
            rows += db.execute(query).fetchall()
        gpus = dict(db.execute("SELECT id, name FROM TARGET_INFO_GPU")) if "TARGET_INFO_GPU" in tables else {}
    if len({row[5] for row in rows}) > 1:  # correlations count from 1 in every process
        rows = [(*row[:9], (row[5] or 0) << 32 | (row[9] or 0), row[10]) for row in rows]
    return rows, gpus


def _kind(category: str | None, name: str | None) -> str | None:
    kind = CATEGORIES.get((category or "").lower())
    if kind == "memcpy":
        return next((k for way, k in MEMCPY_DIRECTIONS.items() if way in (name or "")), "memcpy_other")
    return "copy_kernel" if kind == "kernel" and COPY_KERNEL.search(name or "") else kind


def _table(raw: pd.DataFrame, names: list[tuple], processes: list, path: Path, gpus: dict) -> pd.DataFrame:
    """Leave out what cannot be placed and say so, name the tracks, and order the events."""
    order = {kind: number for number, kind in enumerate(KINDS)}
    kind = np.array([order.get(_kind(*name), -1) for name in names])[raw["code"]]
    device = kind >= len(HOST_KINDS)
    categories = np.array([f"of category {category!r}" for category, _ in names], object)[raw["code"]]
    left_out: list[str] = []
    keep = np.ones(len(raw), bool)
    for wrong, why in (
        (kind < 0, None),
        (~np.isfinite(raw["start_us"] + raw["dur_us"]), "without a finite ts and dur"),
        (raw["dur_us"] < 0, "with a negative duration"),
        (device & (raw["stream"] == _ABSENT), "on a device, without a stream"),
        (~device & (raw["thread"] == _ABSENT), "on the host, without a thread"),
    ):
        wrong = keep & np.asarray(wrong)
        reasons = Counter(categories[wrong]) if why is None else {why: wrong.sum()}
        left_out += [f"{n} events {reason} are left out" for reason, n in reasons.items() if n]
        keep &= ~wrong
    if not keep.any():
        raise ValueError(f"{path}: no event could be read: {'; '.join(left_out)}")
    raw, kind, device = raw[keep].reset_index(drop=True), kind[keep], device[keep]

    call = (kind == order["runtime"]) & (raw["correlation"] > 0)
    twice = raw["correlation"].isin(raw["correlation"][call][raw["correlation"][call].duplicated()])
    if twice.any():
        left_out.append(f"{twice.sum()} events have a correlation that several host calls claim: not joined")
    raw.loc[twice | (raw["correlation"] <= 0), "correlation"] = -1
    host_processes = raw["process"][~device].nunique()
    caller = raw[call & ~twice].set_index("correlation")["process"]
    owner = raw["correlation"].map(caller).fillna(-1).astype(int).where(device, raw["process"])
    lanes = pd.DataFrame({
        "device": device, "process": owner if host_processes > 1 else 0, "gpu": raw["device"].where(device, 0),
        "lane": raw["stream"].where(device, raw["thread"]),
    })  # fmt: skip
    several = lanes["gpu"][device].nunique() > 1
    labels = []
    for lane in lanes.drop_duplicates().itertuples(index=False):
        owner = f"{processes[lane.process]}" if host_processes > 1 and lane.process >= 0 else ""
        if lane.device:
            label = f"gpu {lane.gpu} stream {lane.lane}" if several else f"stream {lane.lane}"
            labels.append(f"{label} of {owner}" if owner else label)
        else:
            labels.append(f"host {owner}:{lane.lane}" if owner else f"host {lane.lane}")
    track = lanes.groupby(list(lanes), sort=False).ngroup().to_numpy()

    name_codes, unique_names = pd.factorize(np.array([name or "" for _, name in names], object))
    whole = bool((raw["start_us"] % 1 == 0).all() and (raw["dur_us"] % 1 == 0).all())
    table = pd.DataFrame({
        "name": pd.Categorical.from_codes(name_codes[raw["code"]], unique_names),
        "kind": pd.Categorical.from_codes(kind, list(KINDS)),
        "track": pd.Categorical.from_codes(track, labels),
        "stream": raw["stream"].where(device, -1), "thread": raw["thread"].where(~device, -1),
        "start_us": raw["start_us"] - raw["start_us"].min(), "dur_us": raw["dur_us"],
        "bytes": raw["bytes"], "correlation": raw["correlation"],
    }).sort_values("start_us", kind="stable", ignore_index=True)  # fmt: skip
    on_device = table[table["kind"].isin(DEVICE_KINDS)]
    if on_device.empty:
        left_out.append("no GPU event in the file: only the host side can be shown")
    end = (on_device["start_us"] + on_device["dur_us"]).groupby(on_device["track"], observed=True)
    overlaps = int(
        (end.cummax().groupby(on_device["track"], observed=True).shift() > on_device["start_us"] + 2).sum()
    )
    if overlaps:
        left_out.append(f"{overlaps} device events start before an earlier one on their stream ends: several "
                        "processes or devices may share its name here; busy time counts overlaps once")  # fmt: skip
    used = sorted(set(raw["device"][device]) & set(gpus))
    table.attrs = {
        "source": path.name, "device": ", ".join(dict.fromkeys(str(gpus[i]) for i in used)), "evidence": "recorded",
        "resolution_us": 1.0 if whole else 0.001, "left_out": left_out,
    }  # fmt: skip
    return table


def _track_parts(track: str) -> tuple[int, str]:
    """Device number and process label out of a track's name."""
    gpu = re.match(r"gpu (\d+) ", track)
    process = re.search(r"host (\S+):|stream \S+ of (\S+)$", track)
    return int(gpu[1]) if gpu else 0, (process[1] or process[2]) if process else ""
