"""The runs of device copies in a trace: which call and operator stand behind each, and what they wait for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from lib.profiles.traces import COPY, DEVICE_KINDS, FOREACH, is_foreach

COPIES = ("memcpy", "copy_kernel")
SHORTEST_WAIT_US = 5  # a gap below tells nothing of another stream
# What the time between the copies of a burst went to.
REGIMES = {
    "blocked": "the stream waits for another one that is at work, which grouping cannot change",
    "unknown": "the host calls were not recorded: record CPU activity, too",
    "host-bound": "the GPU waits for the host: group the copies, or copy inside the graph",
    "queued": "the host is ahead: grouping saves floors and gaps on the device, but no host time that counts",
}


def burst_copies(trace: pd.DataFrame, min_copies: int = 4, kinds: Sequence[str] = COPIES) -> pd.DataFrame:
    """The copies of every burst, one row each, with the host call that launched it.

    A burst is a run of at least `min_copies` events of `kinds` in a row on one stream, ordered by start, with no
    other device event between them on that stream.

    Returns:
        the trace's columns and index (bytes and inputs of a copy kernel are those of its aten::copy_), and: burst
        (0, 1, ... by first start), end_us, ready_us (when the stream had finished all before; NaN for its first
        event), released_us (when other work on the GPU ended, last before the event and SHORTEST_WAIT_US or more
        after ready_us; NaN for none), leads (whether it is the first work of its call), call, call_start_us,
        call_us, call_end_us (the runtime call; NaN where it was not recorded), op, op_start_us, op_us (the
        innermost operator or annotation around that call; op_us is NaN for an annotation, which holds more than
        the copy), foreach_start_us, foreach_us, foreach_inputs (of a `_foreach_copy_` around that).

    Raises:
        ValueError: min_copies below 1, a kind that is none of DEVICE_KINDS, or an index with duplicates.
    """
    if min_copies < 1:
        raise ValueError(f"min_copies: expected at least 1, got {min_copies}")
    if not set(kinds) <= set(DEVICE_KINDS):
        raise ValueError(
            f"kinds: expected some of {DEVICE_KINDS}, got {sorted(set(kinds) - set(DEVICE_KINDS))}"
        )
    if not trace.index.is_unique:
        raise ValueError("trace: expected an index without duplicates (pd.concat with ignore_index=True)")
    device = trace[trace.kind.isin(DEVICE_KINDS)].eval("end_us = start_us + dur_us")
    device = device.sort_values(["track", "start_us"], kind="stable").astype({"track": object})
    device["ready_us"] = _done_before(device, "track")
    device["released_us"] = _released(device)
    device["leads"] = ~device.duplicated("correlation") & (device.correlation >= 0)
    device["copies"] = device.kind.isin(kinds)
    device["run"] = (device[["track", "copies"]] != device[["track", "copies"]].shift()).any(axis=1).cumsum()
    runs = device.groupby("run").start_us
    device["size"], device["first"] = runs.transform("size"), runs.transform("first")
    copies = device.query("copies and size >= @min_copies").sort_values(["first", "run"], kind="stable")
    copies.insert(0, "burst", pd.factorize(copies.run)[0])
    copies = copies.drop(columns=["run", "size", "first", "copies", "inputs"])
    copies = copies.join(_calls(copies, trace), on="correlation")
    copies["bytes"] = copies.bytes.fillna(copies.pop("op_bytes").where(copies.kind.isin(COPIES)))
    return copies


def find_copy_bursts(trace: pd.DataFrame, min_copies: int = 4, kinds: Sequence[str] = COPIES) -> pd.DataFrame:
    """Bursts of device copies (see `burst_copies`), one row each, in order of start.

    With kinds=("memcpy",) copies are device-to-device memcpys only. The idle time is that of the stream: another
    stream of the device may have been at work.

    Returns:
        track, n_copies, bytes (of the copies whose size is known, NaN for none), start_us, span_us (first start
        to last end), busy_us (in which the stream copied), blocked_us (in which it waited for another stream),
        idle_share (1 - busy / span), host_us (summed runtime calls), host_span_us (start of the first call to the
        end of the last), op_us (summed operators around them), n_fused (foreach kernels, grouped already), n_kept
        and kept_us (these and copies of unknown size: what-if leaves them alone), call and op (the most frequent;
        "aten::_foreach_copy_ > aten::copy_" on the slow route), regime (see REGIMES), sizes (float array: bytes
        of the others, in order). A burst is host-bound where most of its idle time came before copies whose call
        had not returned when the stream ran dry.
    """
    copies = burst_copies(trace, min_copies, kinds)
    copies["idle"] = (copies.start_us - _done_before(copies, "burst")).clip(lower=0).fillna(0)
    since = copies[["ready_us", "call_end_us"]].max(axis=1)
    copies["blocked"] = (copies.released_us - since).clip(0, copies.idle).fillna(0)
    copies["waited"] = copies.eval("(idle - blocked) * (call_end_us > ready_us)")
    copies["fused"] = copies.name.astype(str).map(is_foreach).astype(bool)
    copies["kept"] = copies.fused | copies.bytes.isna()
    copies["kept_us"] = copies.dur_us * copies.kept
    copies["op"] = copies.op.mask(copies.foreach_us.notna() & (copies.op == COPY), f"{FOREACH} > {COPY}")
    # a graph launch or a foreach call stands behind several copies, and counts once
    copies["call_us"] = copies.call_us.mask(copies.duplicated(["burst", "correlation"]))
    copies["op_us"] = copies.op_us.mask(copies.duplicated(["burst", "op_start_us"]))
    bursts = copies.groupby("burst").agg(
        track=("track", "first"),
        n_copies=("name", "size"),
        bytes=("bytes", lambda sizes: sizes.sum(min_count=1)),
        start_us=("start_us", "first"),
        end_us=("end_us", "max"),
        idle=("idle", "sum"),
        blocked_us=("blocked", "sum"),
        waited=("waited", "sum"),
        host_us=("call_us", "sum"),
        host_start_us=("call_start_us", "min"),
        host_end_us=("call_end_us", "max"),
        op_us=("op_us", "sum"),
        n_fused=("fused", "sum"),
        n_kept=("kept", "sum"),
        kept_us=("kept_us", "sum"),
        n_calls=("call_end_us", "count"),
        call=("call", _most_frequent),
        op=("op", _most_frequent),
    )
    bursts = bursts.eval("""
        span_us = end_us - start_us
        busy_us = span_us - idle
        host_span_us = host_end_us - host_start_us
    """)
    bursts["idle_share"] = (bursts.idle / bursts.span_us).where(bursts.span_us > 0, 0.0)
    cases = ["blocked_us > idle / 2", "2 * n_calls <= n_copies", "waited > idle / 2"]
    bursts["regime"] = np.select([bursts.eval(case) for case in cases], list(REGIMES)[:3], "queued")
    bursts["sizes"] = [burst.bytes[~burst.kept].to_numpy() for _, burst in copies.groupby("burst")]
    bursts.attrs = dict(trace.attrs)
    return bursts.drop(columns=["end_us", "idle", "waited", "host_start_us", "host_end_us", "n_calls"])


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
        known = ranges.name[ranges.kind == "annotation"].unique()[:20]
        raise ValueError(f"text: expected part of a range's name, such as {[*known]}, got {text!r}")
    first = found.iloc[0]
    inside = trace.query("track == @first.track and start_us >= @first.start_us")
    inside = inside.query("start_us + dur_us <= @first.start_us + @first.dur_us")
    launched = trace.kind.isin(DEVICE_KINDS) & trace.correlation.isin(set(inside.correlation) - {-1})
    cut = trace[launched | trace.index.isin(inside.index)]
    return cut.assign(start_us=cut.start_us - first.start_us)


def lanes(trace: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The tracks of a trace for a plot: "stream 7 · recorded" -> events."""
    evidence = trace.attrs.get("evidence", "recorded")
    return {f"{track} · {evidence}": events for track, events in trace.groupby("track", observed=True)}


def findings(trace: pd.DataFrame, bursts: pd.DataFrame, device: str = "") -> list[str]:
    """What a trace and its bursts show, in sentences; `device` is that of the profile that they are used with."""
    work = burst_copies(trace, 1, DEVICE_KINDS)
    told = list(trace.attrs["left_out"])
    for regime, some in bursts.groupby("regime"):
        counts = f"of {some.n_copies.min()} to {some.n_copies.max()} copies"
        told.append(f"{len(some)} {regime} bursts {counts}: {REGIMES[regime]}")
    for start, call in work.groupby("foreach_start_us"):
        told.append(f"at {start:,.0f} us, {len(call)} copies: {_foreach_route(call)}")
    uploads = work[work.kind == "memcpy_htod"]
    if len(uploads):
        small = (uploads.bytes <= 65_536).sum()
        pinned = uploads.name.astype(str).str.contains("Pinned").sum()
        sizes = f"{small} of at most 64 KiB, median {uploads.bytes.median():,.0f} bytes, {pinned} pinned"
        told.append(f"{len(uploads)} copies come from the host: {sizes}; small ones can share one upload")
    own = trace.attrs["device"]
    if device and own and device != own:
        told.append(f"the profile is of another GPU ({device}) than the trace ({own})")
    return told


def _foreach_route(call: pd.DataFrame) -> str:
    made = f"already one foreach call of {call.foreach_us.iloc[0]:.0f} us"
    if (call.op == FOREACH).all():
        return f"{made}, fused"
    dtypes = sorted(set(call.inputs.dropna()))
    why = f"because dtypes mix ({', '.join(dtypes)})" if len(dtypes) > 1 else "with one copy for each pair"
    return f"{made}, on the slow route {why}"


def _most_frequent(names: pd.Series) -> object:
    counts = names.dropna().value_counts()
    return counts.index[0] if len(counts) else np.nan


def _done_before(events: pd.DataFrame, by: str) -> pd.Series:
    """When all earlier events of the same `by` had ended, in us; NaN for the first of them."""
    return events.groupby(by).end_us.cummax().groupby(events[by]).shift()


def _released(device: pd.DataFrame) -> pd.Series:
    """When other work of its GPU ended, last before an event whose stream had stood idle meanwhile; else NaN."""
    released = pd.Series(np.nan, device.index)
    gpu = device.track.str.extract(r"^(gpu \d+ )", expand=False).fillna("")
    for _, events in device.groupby(gpu):
        ends = np.sort(events.end_us)
        last = ends[np.searchsorted(ends, events.start_us, "right") - 1]
        waited = (last <= events.start_us) & (last - events.ready_us >= SHORTEST_WAIT_US)
        released[events.index] = np.where(waited, last, np.nan)
    return released


def _calls(copies: pd.DataFrame, trace: pd.DataFrame) -> pd.DataFrame:
    """The columns call ... foreach_inputs, inputs and op_bytes of `burst_copies`, by correlation."""
    wanted = set(copies.correlation) - {-1}
    calls = trace[(trace.kind == "runtime") & trace.correlation.isin(wanted)].drop_duplicates("correlation")
    ops = trace[trace.kind.isin(("host_op", "annotation")) & trace.track.isin(calls.track.unique())]
    host = pd.concat([ops, calls])  # at equal starts operators before calls, and the longer first
    host = host.assign(
        is_call=host.kind == "runtime", shortest=-host.dur_us, end_us=host.start_us + host.dur_us
    )
    host = host.sort_values(["track", "start_us", "is_call", "shortest"], kind="stable")
    around, stack = {}, []  # the operators that have begun, each inside the one before
    for row in host[["track", "start_us", "end_us", "is_call", "name"]].itertuples():
        while stack and (stack[-1].track != row.track or stack[-1].end_us < row.start_us):
            stack.pop()
        if not row.is_call:
            stack.append(row)
        elif stack:
            foreach = [op.Index for op in stack if op.name == FOREACH]
            around[row.Index] = (stack[-1].Index, foreach[-1] if foreach else None)
    op, foreach = (ops.reindex([around.get(i, (None, None))[n] for i in calls.index]) for n in (0, 1))
    joined = calls[["correlation"]].assign(
        call=calls.name.astype(object),
        call_start_us=calls.start_us,
        call_us=calls.dur_us,
        call_end_us=calls.start_us + calls.dur_us,
        op=op.name.astype(object).array,
        op_start_us=op.start_us.array,
        op_us=op.dur_us.where(op.kind == "host_op").array,
        op_bytes=op.bytes.array,
        inputs=op.inputs.astype(object).array,
        foreach_start_us=foreach.start_us.array,
        foreach_us=foreach.dur_us.array,
        foreach_inputs=foreach.inputs.astype(object).array,
    )
    return joined.set_index("correlation")
