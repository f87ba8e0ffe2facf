"""Profiler traces as one table of events, and the runs of device copies in it.

Read are Kineto / Chrome JSON (`torch.profiler`, plain or gzip) and Nsight Systems exports
(`nsys export --type sqlite`). Every reader gives the same pandas table, one row an event, sorted by start:

    name, kind (see KINDS), track ("host 1234", "stream 7"; with the process or the device where the file has
    several), stream and thread (int64, -1 where they do not apply), start_us (from the first event), dur_us,
    bytes (float, NaN where the trace does not tell), correlation (int64; a host call and the device work that
    it launched share one, unique in the file; -1 for none).

`table.attrs` says where it came from: source, device, evidence ("recorded", "measured" or "modelled"),
resolution_us (1.0 where the file holds whole microseconds) and left_out, a list of sentences.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import math
import os
import re
import sqlite3
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from decimal import Context, Decimal
from functools import lru_cache
from itertools import repeat
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
COLUMN_TYPES = {
    "name": "category",
    "kind": pd.CategoricalDtype(list(KINDS)),
    "track": "category",
    **dict.fromkeys(("stream", "thread"), "int64"),
    **dict.fromkeys(("start_us", "dur_us", "bytes"), "float64"),
    "correlation": "int64",
}
COLUMNS = tuple(COLUMN_TYPES)

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
# globalTid and globalPid hold process and thread, 24 bits each; correlations count from 1 in every process.
NSYS_QUERY = """
    SELECT '{category}',
        COALESCE({text}, StringIds.value, 'Memcpy ' || CASE {copyKind} WHEN 1 THEN 'HtoD' WHEN 2 THEN 'DtoH'
            WHEN 8 THEN 'DtoD' WHEN 10 THEN 'PtoP' END, '{category}'),
        [start], [end] - [start], {task} >> 24 & 0xFFFFFF, {task} & 0xFFFFFF, {deviceId}, {streamId},
        CASE WHEN {correlationId} > 0 THEN ({task} >> 24 & 0xFFFFFF) << 32 | {correlationId} END, {bytes}
    FROM {table} LEFT JOIN StringIds ON StringIds.id = COALESCE({nameId}, {textId}, {demangledName})"""

_BLOCK = 1 << 18  # JSON text decoded at a time
_LIST_START = re.compile(rb'\A\s*\[|"traceEvents"\s*:\s*\[')
_BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*\{")
_EXACT = Context(prec=40, traps=[])  # 1.7e15 us since 1970: a double would round ts to 0.25 us
_NAN = Decimal("nan")
_FOREVER = 2**62 - 1  # ns: the year 2116; two of them differ by an int64
_SPAN = 2**42  # us: 50 days, in which a double still tells nanoseconds apart
_UNREADABLE = -(2**63)  # in the place of a number that is there, but is no integer

# An event as the readers hand it on; an integer that is absent is -1.
_FIELDS = ("cat", "name", "ts", "dur", "pid", "tid")
_ARGS = ("device", "stream", "correlation", "bytes")
if msgspec is not None:  # only the needed fields, typed

    class _Args(msgspec.Struct, frozen=True, gc=False):
        device: int = -1
        stream: int = -1
        correlation: int = -1
        bytes: int = -1

    class _Event(msgspec.Struct, gc=False):
        ph: str = ""
        cat: str = ""
        name: str = ""
        ts: Decimal = _NAN
        dur: float = math.nan
        pid: int | str = -1
        tid: int | str = -1
        args: _Args = _Args()

    class _Trace(msgspec.Struct):
        traceEvents: list[_Event]
        deviceProperties: list | None = None
        evidence: str = ""

    _DECODER = msgspec.json.Decoder(_Trace | list[_Event])
    _COLUMNS = [attrgetter(field) for field in (*_FIELDS, *(f"args.{field}" for field in _ARGS))]


def load_trace(path: str | os.PathLike) -> pd.DataFrame:
    """Read a profiler trace into the table described at the top of this module.

    Complete events (`ph` "X") are read; flow, instant, counter and metadata events are no spans. One that
    cannot be placed (no, a negative or a non-finite duration, no stream, a time weeks away from the others, a
    category not in CATEGORIES) is left out, and `attrs["left_out"]` says how many.

    JSON is decoded in blocks of 256 KiB, so memory goes with the table rather than the text: a file of 1 GB
    grows the process by 1.4 times the file's size at the peak (benchmarks/trace_loading.py --gigabytes 1).

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
            return _table([_read_nsys(path)], path, nsys=True)
        with (gzip.open if magic.startswith(b"\x1f\x8b") else open)(path, "rb") as stream:
            return _table(_read_json(stream, path), path)
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


def event_table(events: pd.DataFrame, **attrs: object) -> pd.DataFrame:
    """Events with the columns of COLUMNS as a table with their types, sorted by start."""
    table = events[list(COLUMNS)].astype(COLUMN_TYPES)
    table = table.sort_values("start_us", kind="stable", ignore_index=True)
    table.attrs = attrs
    return table


def to_chrome_trace(table: pd.DataFrame, path: str | os.PathLike) -> None:
    """Write a table as Chrome JSON, for Perfetto or for `load_trace`; gzip where the name ends in .gz.

    Raises:
        ValueError: a time is not finite; `path` is then as it was before.
    """
    path, category = Path(path), {kind: category for category, kind in reversed(CATEGORIES.items())}
    events, lanes, hosts = [], {}, {}
    for row in table.drop_duplicates("track").itertuples():
        if row.kind in HOST_KINDS:  # Perfetto wants a number for a process: one that no device has
            process = row.track.rpartition(":")[0] or "host"
            lane = {"pid": hosts.setdefault(process, 1_000_000 + len(hosts)), "tid": row.thread}
        else:
            gpu = re.match(r"gpu (\d+) ", row.track)
            lane = {"pid": int(gpu[1]) if gpu else 0, "tid": row.stream}
            process = f"GPU {lane['pid']}"
        lanes[row.track] = lane
        events.append({"ph": "M", "name": "process_name", **lane, "args": {"name": process}})
        events.append({"ph": "M", "name": "thread_name", **lane, "args": {"name": row.track}})
    for row in table.itertuples():
        lane = lanes[row.track]
        args = {} if row.kind in HOST_KINDS else {"device": lane["pid"], "stream": lane["tid"]}
        args |= {"correlation": row.correlation} if row.correlation >= 0 else {}
        args |= {"bytes": int(row.bytes)} if row.bytes == row.bytes else {}
        cat = category.get(row.kind, "gpu_memcpy" if row.kind.startswith("memcpy") else "kernel")
        times = {"ts": round(row.start_us, 3), "dur": round(row.dur_us, 3)}
        events.append({"ph": "X", "cat": cat, "name": row.name, **lane, **times, "args": args})
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
        ValueError: min_copies below 1, a kind that is none of DEVICE_KINDS, or an index with duplicates.
    """
    if min_copies < 1:
        raise ValueError(f"min_copies: expected at least 1, got {min_copies}")
    if unknown := set(kinds) - set(DEVICE_KINDS):
        raise ValueError(f"kinds: expected some of {DEVICE_KINDS}, got {sorted(unknown)}")
    if not trace.index.is_unique:
        raise ValueError("trace: expected an index without duplicates (pd.concat with ignore_index=True)")
    device = trace[trace["kind"].isin(DEVICE_KINDS)].sort_values(["track", "start_us"], kind="stable")
    is_copy, track = device["kind"].isin(kinds), pd.Series(pd.factorize(device["track"])[0], device.index)
    device["ready_us"] = _done_before(device, track)
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
    copies["end"] = copies["start_us"] + copies["dur_us"]
    copies["call_end"] = copies["call_start_us"] + copies["call_us"]
    copies["asked"] = copies["op_start_us"].fillna(copies["call_start_us"])
    copies["idle"] = (copies["start_us"] - _done_before(copies, copies["burst"])).clip(lower=0)
    copies["waited"] = copies["idle"].where(copies["call_end"] > copies["ready_us"], 0)
    # A graph launch or a foreach call stands behind several copies, and counts once.
    copies["host_us"] = copies["call_us"].where(~copies.duplicated(["burst", "correlation"]))
    copies["op_us"] = copies["op_us"].where(~copies.duplicated(["burst", "op_start_us"]))
    copies["n_fused"] = copies["name"].astype(str).str.contains(FOREACH_COPY)
    copies["fused_us"] = copies["dur_us"].where(copies["n_fused"], 0.0)
    rows = copies.groupby("burst")
    sums = rows[["bytes", "host_us", "op_us", "n_fused", "fused_us", "idle", "waited"]].sum()
    bursts = rows[["stream", "track", "start_us"]].first().join(sums)
    bursts["n_copies"] = rows.size()
    bursts["span_us"] = rows["end"].max() - bursts["start_us"]
    bursts["busy_us"] = bursts["span_us"] - bursts["idle"]
    bursts["idle_share"] = (bursts["idle"] / bursts["span_us"]).where(bursts["span_us"] > 0, 0.0)
    bursts["host_span_us"] = rows["call_end"].max() - rows["call_start_us"].min()
    bursts["lead_us"] = bursts["start_us"] - rows["asked"].min()
    for column in ("call", "op"):
        bursts[column] = [_most_frequent(names) for _, names in rows[column]]
    known = 2 * rows["call_us"].count() > bursts["n_copies"]
    host_bound = bursts["waited"] > bursts["idle"] / 2
    bursts["regime"] = np.where(known, np.where(host_bound, "host-bound", "queued"), "unknown")
    bursts["sizes"] = [burst["bytes"][~burst["n_fused"]].to_numpy() for _, burst in rows]
    bursts.attrs = dict(trace.attrs)
    return bursts.drop(columns=["idle", "waited"])


def _most_frequent(names: pd.Series) -> object:
    return max(counts, key=counts.get) if (counts := Counter(names.dropna())) else np.nan


def _done_before(events: pd.DataFrame, by: pd.Series) -> pd.Series:
    """When all earlier events of the same `by` had ended, in us; NaN for the first of them."""
    end = events["start_us"] + events["dur_us"]
    return end.groupby(by, observed=True).cummax().groupby(by, observed=True).shift()


def _calls(copies: pd.DataFrame, trace: pd.DataFrame) -> pd.DataFrame:
    """The columns call ... op_us of `burst_copies`, by correlation."""
    kind, wanted = trace["kind"], set(copies["correlation"]) - {-1}
    calls = trace[(kind == "runtime") & trace["correlation"].isin(wanted)].drop_duplicates("correlation")
    ops = trace[kind.isin(("host_op", "annotation")) & trace["track"].isin(calls["track"].unique())]
    host = pd.concat([ops, calls])  # at equal starts operators before calls, and the longer first
    host = host.assign(is_call=host["kind"] == "runtime", shortest=-host["dur_us"])
    host = host.sort_values(["track", "start_us", "is_call", "shortest"], kind="stable")
    around, stack = {}, []  # the operators that have begun, each inside the one before
    columns = (host["track"], host["start_us"], host["dur_us"], host["is_call"])
    for index, track, start, dur, is_call in zip(host.index, *columns):
        while stack and (stack[-1][1] != track or stack[-1][2] < start):
            stack.pop()
        if not is_call:
            stack.append((index, track, start + dur))
        elif stack:
            around[index] = stack[-1][0]
    op = ops.reindex(calls.index.map(around)).set_axis(calls.index)
    joined = calls[["correlation"]].assign(
        call=calls["name"].astype(object),
        call_start_us=calls["start_us"],
        call_us=calls["dur_us"],
        op=op["name"].astype(object),
        op_start_us=op["start_us"],
        op_us=op["dur_us"].where(op["kind"] == "host_op"),
    )
    return joined.set_index("correlation")


def _read_json(stream: BinaryIO, path: Path) -> Iterator[tuple[list, dict]]:
    """Yield what `_decode` gives, block by block.

    A block ends between two events. Text that only looks like such a place (in a string, in a list of `args`,
    in another list after the trace's) does not decode as a list, and an earlier place is tried.
    """
    text = stream.read(_BLOCK).removeprefix(codecs.BOM_UTF8)
    while not (start := _LIST_START.search(text)):
        if text.lstrip()[:1] != b"{" or not (more := stream.read(_BLOCK)):
            raise ValueError(f'{path}: expected a JSON list, or an object with a list "traceEvents"')
        text += more
    head, text = text[: start.end()], text[start.end() :]
    # Where no place was found (an event longer than a block, a long tail), twice the text is tried.
    while more := stream.read(max(_BLOCK, len(text))):
        text += more
        for place in list(_BETWEEN_EVENTS.finditer(text, len(text) - _BLOCK // 16))[:-4:-1]:
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                yield _decode(b"[" + text[: place.start() + 1] + b"]")
                text = text[place.end() - 1 :]
                break
    try:
        yield _decode(head + text)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path}: invalid JSON, or cut short: {error}") from error


def _decode(text: bytes) -> tuple[list, dict]:
    """The complete events of a JSON trace as columns, _FIELDS and _ARGS, and what else the trace says."""
    if msgspec is not None:
        # null, NaN, or a field of an unexpected type: json below takes what it can
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            trace = _DECODER.decode(text)
            trace = _Trace(trace) if isinstance(trace, list) else trace
            events = [event for event in trace.traceEvents if event.ph == "X"]
            columns = [[*map(column, events)] for column in _COLUMNS]
            return columns, {"deviceProperties": trace.deviceProperties, "evidence": trace.evidence}
    trace = json.loads(text.decode("utf-8", "replace"), parse_float=Decimal, parse_constant=Decimal)
    trace = {"traceEvents": trace} if isinstance(trace, list) else trace
    rows = []
    for event in trace["traceEvents"]:
        event = event if isinstance(event, dict) else {"ph": "X"}  # counted as one of no category
        args = event["args"] if isinstance(event.get("args"), dict) else {}
        if event.get("ph") == "X":
            rows.append(_row(*map(event.get, _FIELDS), *map(args.get, _ARGS)))
    return [*zip(*rows)], trace


def _row(category, name, ts, dur, pid, *numbers) -> tuple:
    """An event whose fields may have any type in the file."""
    times = (_EXACT.create_decimal(t) if isinstance(t, int | str | Decimal) else _NAN for t in (ts, dur))
    times = map(_EXACT.plus, times)  # makes a signalling NaN quiet
    return str(category or ""), str(name or ""), *times, str(-1 if pid is None else pid), *numbers


def _read_nsys(path: Path) -> tuple[list, dict]:
    """What `_decode` gives, from an Nsight Systems export; ts and dur in nanoseconds."""
    rows = []
    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        if "StringIds" not in tables or tables.isdisjoint(NSYS_TABLES):
            expected = f"expected StringIds and some of {', '.join(NSYS_TABLES)}, got {sorted(tables)}"
            raise ValueError(f"{path}: SQLite, but no Nsight Systems export: {expected}")
        for table in sorted(tables.intersection(NSYS_TABLES)):
            fields = defaultdict(lambda: "NULL", category=NSYS_TABLES[table], table=table)
            fields |= {column: f"[{column}]" for _, column, *_ in db.execute(f"PRAGMA table_info({table})")}
            fields["task"] = f"COALESCE({fields['globalTid']}, {fields['globalPid']})"
            rows += [_row(*event) for event in db.execute(NSYS_QUERY.format_map(fields))]
        gpus = db.execute("SELECT id, name FROM TARGET_INFO_GPU") if "TARGET_INFO_GPU" in tables else ()
        return [*zip(*rows)], {"deviceProperties": [{"id": number, "name": name} for number, name in gpus]}


@lru_cache(2**12)
def _text(value: object) -> str:
    return str(value).encode("utf-8", "replace").decode()  # a lone surrogate, which JSON can hold, is no text


def _kind(category: str, name: str) -> str | None:
    kind = CATEGORIES.get(category.lower())
    if kind == "memcpy":
        return next((k for direction, k in DIRECTIONS.items() if direction in name), "memcpy_other")
    return "copy_kernel" if kind == "kernel" and COPY_KERNEL.search(name) else kind


def _integers(values: Sequence[object]) -> np.ndarray:
    """int64 array, with -1 for what is absent and _UNREADABLE for what is no integer of 64 bits."""
    if {*map(type, values)} == {int}:
        with contextlib.suppress(OverflowError):
            return np.fromiter(values, np.int64, len(values))
    return np.fromiter(map(_integer, values), np.int64, len(values))


def _integer(value: object) -> int:
    if value is None:
        return -1
    if isinstance(value, str) and re.fullmatch("-?[0-9]{1,19}", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return _UNREADABLE
    # the comparison comes first: int() of 1e999999999 would not end
    within = isinstance(value, int) or math.isfinite(value)
    return int(value) if within and abs(value) < 2**63 and value == int(value) else _UNREADABLE


def _nanoseconds(times: Sequence[Decimal], factor: int) -> np.ndarray:
    """int64 array of times * factor, held within _FOREVER; _UNREADABLE for what is not finite."""
    try:
        array = np.fromiter(map(int, map(_EXACT.multiply, times, repeat(factor))), np.int64, len(times))
    except (ValueError, OverflowError):
        scaled = map(_EXACT.multiply, times, repeat(factor))
        held = (min(max(t, -_FOREVER), _FOREVER) if t.is_finite() else _UNREADABLE for t in scaled)
        return np.fromiter(map(int, held), np.int64, len(times))
    return array.clip(-_FOREVER, _FOREVER)


def _table(blocks: Iterable[tuple[list, dict]], path: Path, nsys: bool = False) -> pd.DataFrame:
    """The table of a file's events; `nsys` tells that ts and dur are in nanoseconds, not microseconds.

    What cannot be placed is left out, and said so.
    """
    frames, labels, gpus, evidence = [], {}, {}, "recorded"
    for columns, about in blocks:
        evidence = "modelled" if about.get("evidence") == "modelled" else evidence
        properties = about.get("deviceProperties")
        for gpu in properties if isinstance(properties, list) else ():
            if isinstance(gpu, dict) and isinstance(gpu.get("id"), int) and isinstance(gpu.get("name"), str):
                gpus[gpu["id"]] = _text(gpu["name"])
        if not columns or not columns[0]:
            continue
        category, name, ts, dur, pid, *numbers = columns
        frame = dict(zip(("thread", *_ARGS), map(_integers, numbers)))
        frame["start_ns"] = _nanoseconds(ts, 1 if nsys else 1000)
        frame["dur_us"] = np.array(dur, float) * (1e-3 if nsys else 1.0)
        frame["process"] = np.array([*map(_text, pid)], object)
        # every text once: its events hold its number
        frame["label"] = [labels.setdefault(pair, len(labels)) for pair in zip(category, name)]
        frames.append(pd.DataFrame(frame))
    if not frames:
        raise ValueError(f"{path}: holds no complete event (ph X)")
    events = pd.concat(frames, ignore_index=True)
    frames.clear()

    events["name"] = np.array([_text(name) for _, name in labels], object)[events["label"]]
    events["kind"] = np.array([_kind(*pair) for pair in labels], object)[events["label"]]
    keep, on_device = events["kind"].notna(), events["kind"].isin(DEVICE_KINDS)
    categories = [category for category, _ in labels]
    counts = Counter(categories[label] for label in events["label"][~keep])
    left_out = [f"{n} events of category {category!r} left out" for category, n in counts.items()]
    finite = (events["start_ns"] != _UNREADABLE) & np.isfinite(events["dur_us"])
    middle = events["start_ns"][keep & finite].quantile(interpolation="lower")
    far = ((events["start_ns"] - middle).abs() > 1000 * _SPAN) | (events["dur_us"] > _SPAN)
    for why, wrong in {
        "no finite ts and dur": ~finite,
        "a negative duration": events["dur_us"] < 0,
        "a time weeks away from the others": far,
        "no stream": on_device & (events["stream"] < 0),
        "no thread": ~on_device & events["thread"].isin((-1, _UNREADABLE)),
    }.items():
        left_out += [f"{n} events with {why} left out"] if (n := (keep & wrong).sum()) else []
        keep &= ~wrong
    events, on_device = events[keep].copy(), on_device[keep]
    if events.empty:
        raise ValueError(f"{path}: no event could be read: {'; '.join(left_out)}")

    for field in ("device", "correlation", "bytes"):
        if n := (events[field] == _UNREADABLE).sum():
            left_out.append(f"{n} events of which {field} is no integer: read as absent")
    used = [gpus[gpu] for gpu in sorted(set(events["device"][on_device]) & set(gpus))]
    events["start_us"] = (events["start_ns"] - events["start_ns"].min()) / 1000
    events["bytes"] = events["bytes"].where(events["bytes"] >= 0)
    events["correlation"] = events["correlation"].where(events["correlation"] > 0, -1)
    left_out += _name_tracks(events, on_device, nsys)
    table = event_table(events)
    device = table[table["kind"].isin(DEVICE_KINDS)]
    if device.empty:
        left_out.append("no GPU event in the file: only the host side can be shown")
    # by more than the rounding to whole microseconds explains
    if n := (_done_before(device, device["track"]) > device["start_us"] + 2).sum():
        why = "several processes or devices may share its name here; time is counted once"
        left_out.append(f"{n} device events overlap on their stream: {why}")
    whole = not (table[["start_us", "dur_us"]] % 1).any(axis=None)
    table.attrs |= {"source": path.name, "device": ", ".join(dict.fromkeys(used)), "evidence": evidence}
    table.attrs |= {"resolution_us": 1.0 if whole else 0.001, "left_out": left_out}
    return table


def _name_tracks(events: pd.DataFrame, on_device: pd.Series, nsys: bool) -> list[str]:
    """Set track, stream and thread; unset a correlation that several host calls have. Returns what was lost.

    nsys says to which process device work belongs. JSON does not: with several in the file it is that of the
    host call, else the one that all other work on its stream belongs to.
    """
    calls = events[(events["kind"] == "runtime") & (events["correlation"] > 0)].set_index("correlation")
    twice = events["correlation"].isin(calls.index[calls.index.duplicated()])
    events["correlation"] = events["correlation"].where(~twice, -1)
    told = [f"{n} events not joined: several host calls have their correlation"] if (n := twice.sum()) else []
    process = events["process"].where(~on_device | (nsys & (events["process"] != "-1")))
    if process.nunique() > 1:
        caller = calls["process"][~calls.index.duplicated(keep=False)]
        process = process.fillna(events["correlation"].map(caller))
        owners = process[on_device].groupby([events["device"], events["stream"]])
        process = process.fillna(owners.transform("first").where(owners.transform("nunique") == 1))
        if n := process.isna().sum():
            told.append(
                f"{n} device events of which several processes may be the owner: on tracks of their own"
            )
        process = process.fillna("")
    else:
        process[:] = ""
    several_gpus = events["device"][on_device].nunique() > 1
    gpu = events["device"].where(on_device & several_gpus, -1)
    events["stream"] = events["stream"].where(on_device, -1)
    events["thread"] = events["thread"].where(~on_device, -1)
    lanes = (process, gpu, events["stream"], events["thread"])
    events["track"] = [*map(_track, *(column.tolist() for column in lanes))]
    return told


@lru_cache(2**12)
def _track(process: str, gpu: int, stream: int, thread: int) -> str:
    if stream < 0:
        return f"host {process}:{thread}" if process else f"host {thread}"
    return (f"gpu {gpu} " if gpu >= 0 else "") + f"stream {stream}" + (f" of {process}" if process else "")
