"""The runs of device copies in a trace: which call and operator stand behind each, and what they wait for."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from lib.profiles.traces import COPY, DEVICE_KINDS, FOREACH, FOREACH_KERNEL

COPIES = ("memcpy", "copy_kernel")
SHORTEST_WAIT_US = 5  # a gap below tells nothing of another stream
# What the time between the copies of a burst went to, and what that means.
REGIMES = {
    "blocked": "the stream waits for another one that is at work, which grouping cannot change",
    "unknown": "the host calls were not recorded: record CPU activity, too",
    "host-bound": "the GPU waits for the host: group the copies, or copy inside the graph",
    "queued": "the host is ahead: grouping saves floors and gaps on the device, no host time that counts",
}
RULES = {  # over the columns of `find_copy_bursts`; the first that holds counts, else it is "queued"
    "blocked": "blocked_us > idle_us / 2",
    "unknown": "2 * n_calls <= n_copies",
    "host-bound": "waited_us > idle_us / 2",
}
SLOW = f"{FOREACH} > {COPY}"
# Of the call behind a copy, of the operator around it, and of the foreach call around that.
OF_CALL = ["call", "call_start_us", "call_us", "call_end_us"]
OF_CALL += ["op", "op_start_us", "op_us", "op_bytes", "op_inputs"]
OF_CALL += ["foreach_start_us", "foreach_us", "foreach_inputs"]
OF_BURST = {  # what `find_copy_bursts` takes together, and how
    **dict.fromkeys(("track", "start_us"), "first"),
    **dict.fromkeys(("idle_us", "blocked_us", "waited_us", "n_calls", "host_us", "op_us", "kept_us"), "sum"),
    **dict.fromkeys(("end_us", "call_end_us"), "max"),
    "call_start_us": "min",
    **dict.fromkeys(("call", "op"), lambda names: names.mode().get(0, np.nan)),
}


def burst_copies(trace: pd.DataFrame, min_copies: int = 4, kinds: Sequence[str] = COPIES) -> pd.DataFrame:
    """The copies of every burst, one row each, with the host call that launched it: runs of at least
    `min_copies` events of `kinds` (of DEVICE_KINDS) on one stream, with no other device event between.

    Returns the trace's columns and index (of a copy kernel the bytes are those of its aten::copy_), burst
    (0, 1, ... by first start), end_us, ready_us (when the stream had finished all before; NaN for its first
    event), released_us (when other work of the GPU ended, last before the event and at least
    SHORTEST_WAIT_US after ready_us; else NaN), leads (whether it is the first work of its call), fused (a
    foreach kernel), and OF_CALL: of the runtime call (NaN where it was not recorded), of the innermost
    operator or annotation around it (op_us is NaN for an annotation, which holds more than the copy) and of a
    `_foreach_copy_` around that.
    """
    device = trace[trace.kind.isin(DEVICE_KINDS)].sort_values("start_us", kind="stable")
    device = device.eval("end_us = start_us + dur_us")
    device["gpu"] = device.track.str.extract(r"^(gpu \d+ )", expand=False).fillna("")
    ends = device[["gpu", "end_us"]].sort_values("end_us")
    ended = pd.merge_asof(device[["gpu", "start_us"]], ends, left_on="start_us", right_on="end_us", by="gpu")
    device["released_us"] = ended.end_us.to_numpy()
    device["fused"] = device.name.str.contains(FOREACH_KERNEL)
    device = device.sort_values(["track", "start_us"], kind="stable")
    device = device.astype({"track": object, "kind": object}).eval("""
        ready_us = end_us.groupby(track).cummax().groupby(track).shift()
        released_us = released_us.where(released_us - ready_us >= @SHORTEST_WAIT_US)
        leads = correlation >= 0 and not correlation.duplicated()
        is_copy = kind in @kinds
        run = (track != track.shift() or is_copy != is_copy.shift()).cumsum()
        first_us = start_us.groupby(run).transform('first')
        size = start_us.groupby(run).transform('size')
    """)
    copies = device.query("is_copy and size >= @min_copies")
    copies = copies.sort_values(["first_us", "run"], kind="stable")
    copies.insert(0, "burst", pd.factorize(copies.run)[0])
    copies = copies.join(_calls(copies, trace), on="correlation")
    copies = copies.eval("bytes = bytes.fillna(op_bytes.where(kind in @COPIES))")
    return copies.drop(columns=["gpu", "is_copy", "run", "first_us", "size", "op_bytes"])


def find_copy_bursts(trace: pd.DataFrame, min_copies: int = 4, kinds: Sequence[str] = COPIES) -> pd.DataFrame:
    """Bursts of device copies (see `burst_copies`), one row each, in order of start.

    Returns track, n_copies, bytes (of the copies whose size is known; NaN for none), start_us, span_us (first
    start to last end), busy_us (in which the stream copied), idle_us (in which not; another stream may have
    been at work), blocked_us (thereof: waiting for another stream), waited_us (thereof: before copies whose
    call had not returned when the stream ran dry), n_calls (copies whose call was recorded), host_us (summed
    runtime calls), host_span_us (start of the first call to the end of the last), op_us (summed operators
    around them), kept_us (foreach kernels and copies of unknown size: what-if leaves them alone), call and op
    (the most frequent; on the slow route SLOW), regime (see REGIMES), sizes (float array: bytes of the copies
    that are not kept, in order).
    """
    copies = burst_copies(trace, min_copies, kinds)
    # a graph launch or a foreach call stands behind several copies, and counts once
    copies["call_again"] = copies.duplicated(["burst", "correlation"])
    copies["op_again"] = copies.duplicated(["burst", "op_start_us"])
    later = np.fmax  # noqa: F841, of two times, if one is known
    copies = copies.eval("""
        idle_us = (start_us - end_us.groupby(burst).cummax().groupby(burst).shift()).clip(0).fillna(0)
        blocked_us = (released_us - @later(ready_us, call_end_us)).clip(0, idle_us).fillna(0)
        waited_us = (idle_us - blocked_us) * (call_end_us > ready_us)
        n_calls = call_end_us.notna()
        kept = fused or bytes.isna()
        kept_us = dur_us * kept
        op = op.mask(foreach_us.notna() and op == @COPY, @SLOW)
        host_us = call_us.mask(call_again)
        op_us = op_us.mask(op_again)
    """)
    groups = copies.groupby("burst")
    bursts = groups.agg(OF_BURST)
    bursts["n_copies"] = groups.size()
    bursts["bytes"] = groups.bytes.sum(min_count=1)
    bursts = bursts.eval("""
        span_us = end_us - start_us
        busy_us = span_us - idle_us
        host_span_us = call_end_us - call_start_us
    """)
    bursts["regime"] = np.select([bursts.eval(rule) for rule in RULES.values()], [*RULES], "queued")
    bursts["sizes"] = [burst.bytes[~burst.kept].to_numpy() for _, burst in groups]
    bursts.attrs = dict(trace.attrs)
    return bursts.drop(columns=["end_us", "call_start_us", "call_end_us"])


def of_range(trace: pd.DataFrame, text: str) -> pd.DataFrame:
    """One step out of a trace: a named range of a host thread, and the work that was launched within.

    It is the first annotation, operator or Python function whose name holds `text`, such as "step[DECODE";
    times count from its start on.
    """
    ranges = trace.query("kind in ('annotation', 'host_op', 'python')")
    found = ranges[ranges.name.str.contains(text, regex=False)]
    if found.empty:
        known = ranges.query("kind == 'annotation'").name.unique()[:20].tolist()
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
    trace = trace.eval("""
        last_us = (start_us + dur_us).clip(upper=@end_us) - @start_us
        start_us = (start_us - @start_us).clip(0)
        dur_us = last_us - start_us
    """)
    return trace.query("dur_us >= 0").drop(columns="last_us")


def lanes(trace: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The tracks of a trace for a plot: "stream 7 · recorded" -> events; a lone host thread is "host"."""
    evidence = trace.attrs.get("evidence", "recorded")
    tracks = trace.track.astype(str)
    on_host = trace.stream < 0
    if tracks[on_host].nunique() == 1:
        tracks[on_host] = "host"
    return {f"{track} · {evidence}": events for track, events in trace.groupby(tracks)}


def findings(trace: pd.DataFrame, bursts: pd.DataFrame, device: str = "") -> list[str]:
    """What a trace and its bursts show, in sentences, beside a profile of `device`; last what it left out."""
    work = burst_copies(trace, 1, DEVICE_KINDS)
    told = []
    for regime, counts in bursts.groupby("regime").n_copies:
        ends = " to ".join(map(str, sorted({counts.min(), counts.max()})))
        told.append(f"{regime}: {len(counts)} of {len(bursts)} bursts, of {ends} copies: {REGIMES[regime]}")
    lead_us = work.query("kind in @COPIES and leads").eval("start_us - call_end_us").median()
    if lead_us > 0:
        told.append(f"the median of all copies begins {lead_us:,.0f} µs after its call returned")
    is_alone = work.eval("fused and foreach_us.isna() or name.str.contains('small_copy|fused_copy')")
    if is_alone.any():
        told.append(f"{is_alone.sum()} kernels copy several tensors each: those are grouped already")
    work["slow"] = work.op != FOREACH
    work["pairs"] = work.op_inputs.where(work.slow, "")
    calls = work.groupby("foreach_start_us").agg({"slow": "any", "pairs": frozenset, "foreach_us": "first"})
    for (slow, pairs), host_us in calls.groupby(["slow", "pairs"], sort=False).foreach_us:
        route = "on the slow route" if slow else "fused"
        mixed = sorted(pairs - {""})  # of a copy whose shapes were not recorded
        if len(mixed) > 1:
            route += f" because dtypes mix ({', '.join(mixed)})"
        took = f"{len(host_us)} times, {host_us.median():.0f} µs of host each"
        told.append(f"already one foreach call, {route}: {took}")
    uploads = work.query("kind == 'memcpy_htod'")
    if len(uploads):
        n_small = len(uploads.query("bytes <= 65_536"))
        n_pinned = uploads.name.str.contains("Pinned").sum()
        sizes = f"{n_small} of at most 64 KiB, median {uploads.bytes.median():,.0f} bytes, {n_pinned} pinned"
        told.append(f"{len(uploads)} copies come from the host: {sizes}; small ones can share one upload")
    own = trace.attrs["device"]
    if device and own not in ("", device):
        told.append(f"the profile is of another GPU ({device}) than the trace ({own})")
    told += trace.attrs["left_out"]
    # names come from a file: nothing that a terminal would obey
    return ["".join(filter(str.isprintable, line)) for line in told]


def _calls(copies: pd.DataFrame, trace: pd.DataFrame) -> pd.DataFrame:
    """The host calls behind these copies by correlation, with the operators around them (see OF_CALL)."""
    calls = trace.query("kind == 'runtime' and correlation >= 0 and correlation in @copies.correlation")
    calls = calls.drop_duplicates("correlation")
    ops = trace.query("kind in ('host_op', 'annotation') and track in @calls.track")
    ops = ops.sort_values("dur_us", ascending=False, kind="stable")
    # at equal starts the longer operator before those within it, and these before their calls
    host = pd.concat([ops, calls]).sort_values("start_us", kind="stable")
    host = host.eval("""
        end_us = start_us + dur_us
        op_us = dur_us.where(kind == 'host_op')
    """)
    (none,) = pd.DataFrame(None, [0], host.columns).itertuples()
    found = {-1: [np.nan] * len(OF_CALL)}
    for _, events in host.groupby("track", observed=True):
        around = [(none, none)]  # operators that have begun, each in the one before, with its foreach call
        for row in events.itertuples():
            while around[-1][0].end_us < row.start_us:
                around.pop()
            op, foreach = around[-1]
            if row.kind == "runtime":
                of_op = op.name, op.start_us, op.op_us, op.bytes, op.inputs
                of_foreach = foreach.start_us, foreach.dur_us, foreach.inputs
                found[row.correlation] = row.name, row.start_us, row.dur_us, row.end_us, *of_op, *of_foreach
            else:
                around.append((row, row if row.name == FOREACH else foreach))
    return pd.DataFrame.from_dict(found, "index", columns=OF_CALL)
