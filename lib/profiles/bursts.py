"""The runs of device copies in a trace: which call and operator stand behind each, and what they wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pandas as pd

from lib.profiles.traces import COPY, DEVICE_KINDS, FOREACH, FOREACH_KERNEL

COPIES = ("memcpy", "copy_kernel")
SHORTEST_WAIT_US = 5  # a gap below tells nothing of another stream
# What the time between the copies of a burst went to, and when (over the columns of `find_copy_bursts`).
REGIMES = {
    "blocked": "the stream waits for another one that is at work, which grouping cannot change",
    "unknown": "the host calls were not recorded: record CPU activity, too",
    "host-bound": "the GPU waits for the host: group the copies, or copy inside the graph",
    "queued": "the host is ahead: grouping saves floors and gaps on the device, no host time that counts",
}
SLOW = f"{FOREACH} > {COPY}"
# Of a call, the operator and the foreach call around it: column of the trace -> end of the column here.
ENDINGS = {
    "name": "",
    "kind": "_kind",
    "start_us": "_start_us",
    "dur_us": "_us",
    "bytes": "_bytes",
    "inputs": "_inputs",
}
UNUSED = ("call_kind", "call_bytes", "call_inputs", "op_kind", "foreach", "foreach_kind", "foreach_bytes")
RULES = ("blocked_us > idle_us / 2", "2 * n_calls <= n_copies", "waited_us > idle_us / 2")


def burst_copies(trace: pd.DataFrame, min_copies: int = 4, kinds: Sequence[str] = COPIES) -> pd.DataFrame:
    """The copies of every burst, one row each, with the host call that launched it.

    A burst is a run of at least `min_copies` events of `kinds` in a row on one stream, ordered by start, with
    no other device event between them on that stream.

    Returns:
        the trace's columns and index (of a copy kernel bytes and inputs are those of its aten::copy_), and:
        burst (0, 1, ... by first start), end_us, ready_us (when the stream had finished all before; NaN for
        its first event), released_us (when other work of the GPU ended, last before the event and at least
        SHORTEST_WAIT_US after ready_us; else NaN), leads (whether it is the first work of its call), call,
        call_start_us, call_us (the runtime call; NaN where it was not recorded), op, op_start_us, op_us (the
        innermost operator or annotation around that call; op_us is NaN for an annotation, which holds more
        than the copy), foreach_start_us, foreach_us, foreach_inputs (of a `_foreach_copy_` around that).

    Raises:
        ValueError: min_copies below 1, a kind that is none of DEVICE_KINDS, or an index with duplicates.
    """
    if min_copies < 1:
        raise ValueError(f"min_copies: expected at least 1, got {min_copies}")
    unknown = sorted(set(kinds) - set(DEVICE_KINDS))
    if unknown:
        raise ValueError(f"kinds: expected some of {DEVICE_KINDS}, got {unknown}")
    if not trace.index.is_unique:
        raise ValueError("trace: expected an index without duplicates (pd.concat with ignore_index=True)")
    device = trace[trace.kind.isin(DEVICE_KINDS)].sort_values(["track", "start_us"], kind="stable")
    device = (
        device.astype({"track": object, "kind": object})
        .drop(columns="inputs")
        .eval("""
        end_us = start_us + dur_us
        ready_us = end_us.groupby(track).cummax().groupby(track).shift()
        leads = correlation >= 0 and not correlation.duplicated()
        is_copy = kind in @kinds
        run = (track != track.shift() or is_copy != is_copy.shift()).cumsum()
        first_us = start_us.groupby(run).transform('first')
        size = start_us.groupby(run).transform('size')
    """)
    )
    device["released_us"] = _released(device)
    copies = device.query("is_copy and size >= @min_copies")
    copies = copies.sort_values(["first_us", "run"], kind="stable")
    copies.insert(0, "burst", pd.factorize(copies.run)[0])
    copies = copies.join(_calls(copies, trace), on="correlation")
    copies["bytes"] = copies.eval("bytes.fillna(op_bytes.where(kind in @COPIES))")
    return copies.drop(columns=["is_copy", "run", "first_us", "size", "op_bytes", *UNUSED])


def find_copy_bursts(trace: pd.DataFrame, min_copies: int = 4, kinds: Sequence[str] = COPIES) -> pd.DataFrame:
    """Bursts of device copies (see `burst_copies`), one row each, in order of start.

    With kinds=("memcpy",) copies are device-to-device memcpys only. The idle time is that of the stream:
    another stream of the device may have been at work.

    Returns:
        track, n_copies, bytes (of the copies whose size is known; NaN for none), start_us, span_us (first
        start to last end), busy_us (in which the stream copied), idle_us (in which not), blocked_us (thereof:
        waiting for another stream), waited_us (thereof: before copies whose call had not returned when the
        stream ran dry), idle_share, n_calls (copies whose call was recorded), host_us (summed runtime calls),
        host_span_us (start of the first call to the end of the last), op_us (summed operators around them),
        n_fused (foreach kernels, grouped already), n_kept and kept_us (these and copies of unknown size:
        what-if leaves them alone), call and op (the most frequent; on the slow route
        SLOW), regime (see REGIMES), sizes (float array: bytes of the copies
        that are not kept, in order).
    """
    copies = burst_copies(trace, min_copies, kinds)
    copies["fused"] = copies.name.astype(str).str.contains(FOREACH_KERNEL)
    # a graph launch or a foreach call stands behind several copies, and counts once
    copies["call_again"] = copies.duplicated(["burst", "correlation"])
    copies["op_again"] = copies.duplicated(["burst", "op_start_us"])
    later = np.fmax  # noqa: F841, of two times, if one is known
    copies = copies.eval("""
        call_end_us = call_start_us + call_us
        idle_us = (start_us - end_us.groupby(burst).cummax().groupby(burst).shift()).clip(0).fillna(0)
        blocked_us = (released_us - @later(ready_us, call_end_us)).clip(0, idle_us).fillna(0)
        waited_us = (idle_us - blocked_us) * (call_end_us > ready_us)
        kept = fused or bytes.isna()
        kept_us = dur_us * kept
        op = op.mask(foreach_us.notna() and op == @COPY, @SLOW)
        call_us = call_us.mask(call_again)
        op_us = op_us.mask(op_again)
    """)
    bursts = copies.groupby("burst").agg(
        track=("track", "first"),
        n_copies=("name", "size"),
        bytes=("bytes", lambda sizes: sizes.sum(min_count=1)),
        start_us=("start_us", "first"),
        end_us=("end_us", "max"),
        idle_us=("idle_us", "sum"),
        blocked_us=("blocked_us", "sum"),
        waited_us=("waited_us", "sum"),
        n_calls=("call_end_us", "count"),
        host_us=("call_us", "sum"),
        host_start_us=("call_start_us", "min"),
        host_end_us=("call_end_us", "max"),
        op_us=("op_us", "sum"),
        n_fused=("fused", "sum"),
        n_kept=("kept", "sum"),
        kept_us=("kept_us", "sum"),
        call=("call", _most_frequent),
        op=("op", _most_frequent),
    )
    bursts = bursts.eval("""
        span_us = end_us - start_us
        busy_us = span_us - idle_us
        idle_share = (idle_us / span_us).where(span_us > 0, 0)
        host_span_us = host_end_us - host_start_us
    """)
    cases = [bursts.eval(rule) for rule in RULES]
    bursts["regime"] = np.select(cases, list(REGIMES)[:3], "queued")
    bursts["sizes"] = [burst.bytes[~burst.kept].to_numpy() for _, burst in copies.groupby("burst")]
    bursts.attrs = dict(trace.attrs)
    return bursts.drop(columns=["end_us", "host_start_us", "host_end_us"])


def of_range(trace: pd.DataFrame, text: str) -> pd.DataFrame:
    """One step out of a trace: a named range of a host thread, and the work that was launched within.

    Args:
        text: what the name of the range (an annotation, an operator, a Python function) holds, such as
            "step[DECODE"; the first such range is taken.

    Returns:
        the events, times from the start of the range on.

    Raises:
        ValueError: no range has such a name.
    """
    ranges = trace[trace.kind.isin(("annotation", "host_op", "python"))]
    found = ranges[ranges.name.astype(str).str.contains(text, regex=False)]
    if found.empty:
        named = ranges.name[ranges.kind == "annotation"]
        known = list(named.unique()[:20])
        raise ValueError(f"text: expected part of a range's name, such as {known}, got {text!r}")
    first = found.iloc[0]
    inside = trace.query("track == @first.track and start_us >= @first.start_us")
    inside = inside.query("start_us + dur_us <= @first.start_us + @first.dur_us")
    launched = trace.query(
        "kind in @DEVICE_KINDS and correlation >= 0 and correlation in @inside.correlation"
    )
    cut = pd.concat([inside, launched]).sort_index()
    return cut.assign(start_us=cut.start_us - first.start_us)


def between(trace: pd.DataFrame, start_us: float, end_us: float) -> pd.DataFrame:
    """What runs in a span of time, cut to it, times from its start on."""
    ends = (trace.start_us + trace.dur_us).clip(upper=end_us)
    starts = trace.start_us.clip(lower=start_us)
    return trace.assign(start_us=starts - start_us, dur_us=ends - starts)[ends >= starts]


def lanes(trace: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The tracks of a trace for a plot: "stream 7 · recorded" -> events; a lone host thread is "host"."""
    evidence = trace.attrs.get("evidence", "recorded")
    threads = trace.track[trace.stream < 0].unique()
    drawn = {}
    for track, events in trace.groupby("track", observed=True):
        name = track
        if len(threads) == 1 and track in threads:
            name = "host"
        drawn[f"{name} · {evidence}"] = events
    return drawn


def findings(trace: pd.DataFrame, bursts: pd.DataFrame, device: str = "") -> list[str]:
    """What a trace and its bursts show, in sentences, and last what of the file was left out.

    device: that of the profile they are used with.
    """
    work = burst_copies(trace, 1, DEVICE_KINDS)
    told = []
    for regime, some in bursts.groupby("regime"):
        counts = dict.fromkeys((some.n_copies.min(), some.n_copies.max()))
        counts = " to ".join(map(str, counts))
        many = f"{len(some)} of {len(bursts)} bursts"
        told.append(f"{regime}: {many}, of {counts} copies: {REGIMES[regime]}")
    copies = work.query("kind in @COPIES and leads")
    lead_us = copies.eval("start_us - call_start_us - call_us").median()
    if lead_us > 0:
        told.append(f"the median of all copies begins {lead_us:,.0f} us after its call returned")
    told += _grouped_already(work)
    uploads = work[work.kind == "memcpy_htod"]
    if len(uploads):
        small = (uploads.bytes <= 65_536).sum()
        pinned = uploads.name.astype(str).str.contains("Pinned").sum()
        sizes = f"{small} of at most 64 KiB, median {uploads.bytes.median():,.0f} bytes, {pinned} pinned"
        share = "; small ones can share one upload" if small > 1 else ""
        told.append(f"{len(uploads)} copies come from the host: {sizes}{share}")
    own = trace.attrs["device"]
    if device and own and device != own:
        told.append(f"the profile is of another GPU ({device}) than the trace ({own})")
    return told + trace.attrs["left_out"]


def _grouped_already(work: pd.DataFrame) -> list[str]:
    told = []
    names = work.name.astype(str)
    fused = (names.str.contains(FOREACH_KERNEL) & work.foreach_us.isna()) | names.str.contains(
        "small_copy|fused_copy"
    )
    if fused.any():
        told.append(f"{fused.sum()} kernels copy several tensors each: those are grouped already")
    routes = defaultdict(list)
    for _, call in work.groupby("foreach_start_us"):
        routes[_foreach_route(call)].append(call.foreach_us.iloc[0])
    for route, times in routes.items():
        took = f"{np.median(times):.0f} us of host each"
        told.append(f"already one foreach call, {route}: {len(times)} times, {took}")
    return told


def _foreach_route(call: pd.DataFrame) -> str:
    if (call.op == FOREACH).all():
        return "fused"
    inputs = sorted(set(call.op_inputs.dropna()))
    why = f"because dtypes mix ({', '.join(inputs)})" if len(inputs) > 1 else "one copy for each pair"
    return f"on the slow route {why}"


def _most_frequent(names: pd.Series) -> object:
    return next(iter(names.dropna().value_counts().index), np.nan)


def _released(device: pd.DataFrame) -> pd.Series:
    """When other work of the GPU ended, last before an event whose stream stood idle meanwhile; else NaN."""
    gpu = device.track.str.extract(r"^(gpu \d+ )", expand=False).fillna("")
    last = pd.Series(np.nan, device.index)
    for _, events in device.groupby(gpu):
        ends = np.sort(events.end_us)
        last[events.index] = ends[np.searchsorted(ends, events.start_us, "right") - 1]
    waited = device.assign(last=last).eval("last <= start_us and last - ready_us >= @SHORTEST_WAIT_US")
    return last.where(waited)


def _calls(copies: pd.DataFrame, trace: pd.DataFrame) -> pd.DataFrame:
    """The host calls behind these copies by correlation, with the operators around them (see ENDINGS)."""
    calls = trace[(trace.kind == "runtime") & (trace.correlation != -1)]
    calls = calls[calls.correlation.isin(copies.correlation)].drop_duplicates("correlation")
    ops = trace[trace.kind.isin(("host_op", "annotation")) & trace.track.isin(set(calls.track))]
    texts = dict.fromkeys(("name", "kind", "track", "inputs"), object)
    host = pd.concat([ops, calls]).eval("end_us = start_us + dur_us").astype(texts)
    # at equal starts operators before calls, and the longer first
    host["rank"] = (host.kind == "runtime") - host.dur_us / (host.dur_us.max() + 1)
    host = host.sort_values(["track", "start_us", "rank"], kind="stable")
    stack, ops, groups = [], [], []  # stack: the operators that have begun, each inside the one before
    for row in host.itertuples():
        while stack and (stack[-1].track != row.track or stack[-1].end_us < row.start_us):
            stack.pop()
        if row.kind != "runtime":
            stack.append(row)
            continue
        ops.append(stack[-1].Index if stack else -1)
        groups.append(next((op.Index for op in reversed(stack) if op.name == FOREACH), -1))
    calls = host[host.kind == "runtime"]
    table = {}
    for part, found in {"call": calls.index, "op": ops, "foreach": groups}.items():
        rows = host.reindex(found)
        table |= {part + ending: rows[column].to_numpy() for column, ending in ENDINGS.items()}
    table = pd.DataFrame(table, index=calls.correlation)
    return table.assign(op_us=table.op_us.where(table.op_kind == "host_op"))
