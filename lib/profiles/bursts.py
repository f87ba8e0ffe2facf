"""The runs of device copies in a trace: which call and operator stand behind each, and what they wait for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from lib.profiles.traces import DEVICE_KINDS, is_foreach

COPIES = ("memcpy", "copy_kernel")
FOREACH = "aten::_foreach_copy_"
SHORTEST_WAIT_US = 5  # a gap below tells nothing of another stream
# What the time between the copies of a burst went to.
REGIMES = {
    "host-bound": "the GPU waits for the host: group the copies, or copy inside the graph",
    "queued": "the host is ahead: grouping saves floors and gaps on the device, and no host time that counts",
    "blocked": "the stream waits for another stream that is at work: grouping cannot save that",
    "unknown": "the host calls were not recorded: record CPU activity, too",
}


def burst_copies(trace: pd.DataFrame, min_copies: int = 4, kinds: Sequence[str] = COPIES) -> pd.DataFrame:
    """The copies of every burst, one row each, with the host call that launched it.

    A burst is a run of at least `min_copies` events of `kinds` in a row on one stream, ordered by start,
    with no other device event between them on that stream.

    Returns:
        the trace's columns and index, and: burst (0, 1, ... by first start), end_us, ready_us (when the stream
        had finished all before; NaN for its first event), released_us (when the other stream was done that it
        then waited for; NaN for none), leads (whether it is the first work of its call), call, call_start_us,
        call_end_us, call_us (the runtime call; NaN where it was not recorded), op, op_start_us, op_us (the
        innermost operator or annotation around that call; op_us is NaN for an annotation, which holds more
        than the copy), foreach_start_us, foreach_us, foreach_tensors (of a `_foreach_copy_` around that). The
        bytes of a copy kernel and the dtypes of a copy are those of its aten::copy_.

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
    device = trace[trace["kind"].isin(DEVICE_KINDS)].sort_values(["track", "start_us"], kind="stable")
    device["end_us"] = device["start_us"] + device["dur_us"]
    device["track"] = device["track"].astype(object)
    device["ready_us"] = _done_before(device, device["track"])
    device["released_us"] = _released(device)
    device["leads"] = ~device.duplicated("correlation") & (device["correlation"] >= 0)
    is_copy = device["kind"].isin(kinds)
    other_track = device["track"].ne(device["track"].shift())
    device["run"] = (other_track | is_copy.ne(is_copy.shift())).cumsum()
    runs = device[is_copy].groupby("run")["start_us"]
    copies = device[is_copy].assign(size=runs.transform("size"), first=runs.transform("first"))
    copies = copies[copies["size"] >= min_copies].sort_values(["first", "run"], kind="stable")
    copies["burst"] = pd.factorize(copies["run"])[0]
    copies = copies.drop(columns=["run", "size", "first", "inputs"])
    copies = copies.join(_calls(copies, trace), on="correlation")
    by_copy = (copies["op"] == "aten::copy_") & copies["kind"].isin(COPIES)
    copies["bytes"] = copies["bytes"].fillna(copies.pop("op_bytes").where(by_copy))
    return copies


def find_copy_bursts(trace: pd.DataFrame, min_copies: int = 4, kinds: Sequence[str] = COPIES) -> pd.DataFrame:
    """Bursts of device copies (see `burst_copies`), one row each, in order of start.

    With kinds=("memcpy",) copies are device-to-device memcpys only. The idle time is that of the stream:
    another stream of the device may have been at work.

    Returns:
        stream, track, n_copies, bytes (of the copies whose size is known, NaN for none), start_us, span_us
        (first start to last end), busy_us (in which the stream copied), blocked_us (in which it waited for
        another stream), idle_share (1 - busy / span), host_us (summed runtime calls), host_span_us (start of
        the first call to the end of the last), op_us (summed operators around them), lead_us (start of the
        first operator, or else call, to the start of the first copy), n_fused (foreach kernels, grouped
        already), n_slow (copies of a foreach call on the slow route), n_kept and kept_us (fused ones, and
        those of unknown size: what-if leaves them alone), call and op (the most frequent; "aten::_foreach_copy_ >
        aten::copy_" on the slow route), regime (see REGIMES), sizes (float array: bytes of the others, in order).
        A burst is host-bound where most of its idle time came before copies whose call had not returned when
        the stream ran dry.
    """
    copies = burst_copies(trace, min_copies, kinds)
    asked = copies["op_start_us"].fillna(copies["call_start_us"])
    idle = (copies["start_us"] - _done_before(copies, copies["burst"])).clip(lower=0).fillna(0)
    since = copies[["ready_us", "call_end_us"]].max(axis=1)
    blocked = (copies["released_us"] - since).clip(lower=0).fillna(0).clip(upper=idle)
    slow = copies["foreach_us"].notna() & (copies["op"] == "aten::copy_")
    fused = copies["name"].astype(str).map(is_foreach)
    kept = fused | copies["bytes"].isna()
    copies = copies.assign(
        asked=asked,
        idle=idle,
        blocked_us=blocked,
        waited=(idle - blocked).where(copies["call_end_us"] > copies["ready_us"], 0),
        n_fused=fused,
        n_slow=slow,
        n_kept=kept,
        kept_us=copies["dur_us"].where(kept, 0.0),
        op=copies["op"].where(~slow, f"{FOREACH} > aten::copy_"),
        # a graph launch or a foreach call stands behind several copies, and counts once
        host_us=copies["call_us"].where(~copies.duplicated(["burst", "correlation"])),
        op_us=copies["op_us"].where(~copies.duplicated(["burst", "op_start_us"])),
    )
    rows = copies.groupby("burst")
    summed = ["blocked_us", "host_us", "op_us", "n_fused", "n_slow", "n_kept", "kept_us", "idle", "waited"]
    bursts = rows[["stream", "track", "start_us"]].first().join(rows[summed].sum())
    bursts["n_copies"] = rows.size()
    bursts["bytes"] = rows["bytes"].sum(min_count=1)
    bursts["span_us"] = rows["end_us"].max() - bursts["start_us"]
    bursts["busy_us"] = bursts["span_us"] - bursts["idle"]
    bursts["idle_share"] = (bursts["idle"] / bursts["span_us"]).where(bursts["span_us"] > 0, 0.0)
    bursts["host_span_us"] = rows["call_end_us"].max() - rows["call_start_us"].min()
    bursts["lead_us"] = bursts["start_us"] - rows["asked"].min()
    for column in ("call", "op"):
        bursts[column] = rows[column].agg(_most_frequent).astype(object)
    half = bursts["idle"] / 2
    told = 2 * rows["call_us"].count() > bursts["n_copies"]
    cases = [bursts["blocked_us"] > half, ~told, bursts["waited"] > half]
    bursts["regime"] = np.select(cases, ["blocked", "unknown", "host-bound"], "queued")
    bursts["sizes"] = [burst["bytes"][~burst["n_kept"]].to_numpy() for _, burst in rows]
    bursts.attrs = dict(trace.attrs)
    return bursts.drop(columns=["idle", "waited"])


def of_range(trace: pd.DataFrame, text: str) -> pd.DataFrame:
    """One step out of a trace: a named range on its thread, and the work that was launched within.

    Args:
        text: what the name of the range (an annotation, an operator, a Python function) holds, such as
            "step[DECODE"; the first such range is taken.

    Returns:
        the events, times from the start of the range on.

    Raises:
        ValueError: no range has such a name.
    """
    on_host = trace["kind"].isin(("annotation", "host_op", "python"))
    named = on_host & trace["name"].astype(str).str.contains(text, regex=False)
    if not named.any():
        known = trace["name"][trace["kind"] == "annotation"].unique()[:20]
        raise ValueError(f"text: expected part of a range's name, such as {list(known)}, got {text!r}")
    first = trace[named].iloc[0]
    end = trace["start_us"] + trace["dur_us"]
    inside = trace["track"].eq(first["track"]) & trace["start_us"].ge(first["start_us"])
    inside &= end <= first["start_us"] + first["dur_us"]
    launched = set(trace["correlation"][inside]) - {-1}
    cut = trace[inside | (trace["kind"].isin(DEVICE_KINDS) & trace["correlation"].isin(launched))]
    return cut.assign(start_us=cut["start_us"] - first["start_us"])


def lanes(trace: pd.DataFrame, evidence: str = "") -> dict[str, pd.DataFrame]:
    """Its tracks, host first, for a plot: "stream 7 · recorded" -> events."""
    evidence = evidence or trace.attrs.get("evidence", "recorded")
    return {f"{track} · {evidence}": rows for track, rows in trace.groupby("track", observed=True)}


def findings(trace: pd.DataFrame, bursts: pd.DataFrame | None = None, device: str = "") -> list[str]:
    """What a trace shows of its copies, in sentences; `device` is that of the profile that is used with it."""
    work = burst_copies(trace, 1, DEVICE_KINDS)
    bursts = find_copy_bursts(trace) if bursts is None else bursts
    told = list(trace.attrs.get("left_out", []))
    for regime, some in bursts.groupby("regime"):
        counts = f"{some['n_copies'].min()} to {some['n_copies'].max()}"
        told.append(f"{len(some)} bursts of {counts} copies are {regime}: {REGIMES[regime]}")
    for start, call in work[work["foreach_us"].notna()].groupby("foreach_start_us"):
        head = f"at {start:,.0f} us {len(call)} copies come from one {FOREACH} call of {call['foreach_us'].iloc[0]:.0f} us"
        if call["op"].eq(FOREACH).all():
            told.append(f"{head}: already one foreach call, fused")
        else:
            dtypes = call["inputs"].dropna().unique()
            why = f"because dtypes mix ({', '.join(dtypes)})" if len(dtypes) > 1 else "one copy each"
            told.append(f"{head}: already one foreach call, on the slow route {why}")
    uploads = work[work["kind"] == "memcpy_htod"]
    if len(uploads):
        small = (uploads["bytes"] <= 65536).sum()
        pinned = uploads["name"].astype(str).str.contains("Pinned").sum()
        size = f"median {uploads['bytes'].median():,.0f} bytes, {small} of at most 64 KiB, {pinned} from pinned memory"
        told.append(f"{len(uploads)} copies come from the host: {size}; small ones can share one upload")
    own = trace.attrs.get("device", "")
    if device and own and device != own:
        told.append(f"the profile is of another GPU ({device}) than the trace ({own}): estimates are rough")
    return told


def _most_frequent(names: pd.Series) -> object:
    counts = names.dropna().value_counts()
    return counts.index[0] if len(counts) else np.nan


def _done_before(events: pd.DataFrame, by: pd.Series) -> pd.Series:
    """When all earlier events of the same `by` had ended, in us; NaN for the first of them."""
    return events["end_us"].groupby(by).cummax().groupby(by).shift()


def _released(device: pd.DataFrame) -> pd.Series:
    """When other work of the GPU ended that filled the time in which an event's stream stood idle; else NaN."""
    found = pd.Series(np.nan, device.index)
    gpu = device["track"].str.extract(r"^(gpu \d+ )", expand=False).fillna("")
    for _, events in device.sort_values("start_us", kind="stable").groupby(gpu):
        reach = events["end_us"].cummax()
        begins = events["start_us"] > reach.shift(fill_value=-np.inf)
        ends = reach.groupby(begins.cumsum()).last()
        # the time in which any stream works, as a line through the begins and the ends of its periods
        knots = np.column_stack([events["start_us"][begins], ends])
        worked = np.column_stack([np.zeros(len(knots)), np.diff(knots).ravel()]).cumsum().ravel()

        done = np.sort(events["end_us"])
        last = done[np.searchsorted(done, events["start_us"], "right") - 1]
        ready = events["ready_us"]
        meanwhile = np.interp(last, knots.ravel(), worked) - np.interp(ready, knots.ravel(), worked)
        waited = (last <= events["start_us"]) & (last - ready >= SHORTEST_WAIT_US)
        filled = meanwhile >= 0.9 * (last - ready)
        found[events.index[waited & filled]] = last[waited & filled]
    return found


def _calls(copies: pd.DataFrame, trace: pd.DataFrame) -> pd.DataFrame:
    """The columns call ... foreach_tensors, dtypes and op_bytes of `burst_copies`, by correlation."""
    kind, wanted = trace["kind"], set(copies["correlation"]) - {-1}
    calls = trace[(kind == "runtime") & trace["correlation"].isin(wanted)].drop_duplicates("correlation")
    ops = trace[kind.isin(("host_op", "annotation")) & trace["track"].isin(calls["track"].unique())]
    host = pd.concat([ops, calls])  # at equal starts operators before calls, and the longer first
    host = host.assign(is_call=host["kind"] == "runtime", shortest=-host["dur_us"])
    host = host.sort_values(["track", "start_us", "is_call", "shortest"], kind="stable")
    around, foreach, stack = {}, {}, []  # the operators that have begun, each inside the one before
    is_foreach_call = host["name"] == FOREACH
    for index, track, start, length, is_call, is_group in zip(
        host.index, host["track"], host["start_us"], host["dur_us"], host["is_call"], is_foreach_call
    ):
        while stack and (stack[-1][1] != track or stack[-1][2] < start):
            stack.pop()
        group = index if is_group else stack[-1][3] if stack else None
        if not is_call:
            stack.append((index, track, start + length, group))
        elif stack:
            around[index], foreach[index] = stack[-1][0], group
    op = ops.reindex(calls.index.map(around)).set_axis(calls.index)
    group = ops.reindex(calls.index.map(foreach)).set_axis(calls.index)
    joined = calls[["correlation"]].assign(
        call=calls["name"].astype(object),
        call_start_us=calls["start_us"],
        call_end_us=calls["start_us"] + calls["dur_us"],
        call_us=calls["dur_us"],
        op=op["name"].astype(object),
        op_start_us=op["start_us"],
        op_us=op["dur_us"].where(op["kind"] == "host_op"),
        op_bytes=op["bytes"],
        dtypes=op["inputs"].astype(object).replace("", np.nan),
        foreach_start_us=group["start_us"],
        foreach_us=group["dur_us"],
        foreach_tensors=group["inputs"]
        .astype(str)
        .str.extract(r"^(\d+) tensors", expand=False)
        .astype(float),
    )
    return joined.set_index("correlation")
