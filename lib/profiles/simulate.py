"""A list of launches as a timeline on a device profile, and what bursts of a trace would take if grouped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral

import numpy as np
import pandas as pd
import torch

from lib.copies import DEFAULT_DMA_BYTES, Call
from lib.launches import KINDS, Launch, launches
from lib.profiles.device import DeviceProfile
from lib.profiles.traces import COLUMNS, event_table

WAITS, AHEAD = "the GPU waits for the host", "the host is ahead"


def simulate(
    work: Sequence[Launch],
    profile: DeviceProfile,
    graph_us: float | Mapping[str, float] | None = None,
    ahead: bool = False,
) -> pd.DataFrame:
    """Play launches on an idle machine: one host thread issues them in turn, one stream runs them in order.

    Foreach launches in a row with the same reason are chunks of one call, and so are the copies of a slow foreach
    call. A copy to the host, or from pageable memory, holds the host up until it is done.

    Args:
        work: as a strategy or a runner lists them; Launch("graph", 0, 0, "verify") is a graph replay.
        graph_us: how long graph replays run on the device: all of them, or each by its reason.
        ahead: the host is ahead: the stream has other work until the last call is made, and nothing holds the
            host up.

    Returns:
        a table as of `load_trace`, evidence "modelled", times from the first call on.

    Raises:
        ValueError: an unknown kind, a count that is none, or a graph replay without its time.
    """
    for number, launch in enumerate(work, 1):
        _check(number, launch, graph_us)
    costs = [_host_costs(work, number, profile) for number in range(len(work))]
    stream = sum(before + op_us for before, op_us in costs) if ahead else -np.inf
    host, rows = 0.0, []
    for number, (launch, (before, op_us)) in enumerate(zip(work, costs), 1):
        kind = KINDS[launch.kind]
        host += before
        call = host + op_us - profile[kind.call]  # an operator makes its runtime call last
        start = max(call + profile["launch_latency_us"], stream + profile["gap_us"])
        duration = _graph_us(launch, graph_us) if launch.kind == "graph" else device_us(launch, profile)
        stream = start + duration
        waits = not ahead and (launch.kind == "dtoh" or launch.reason.startswith("pageable"))
        done = max(host + op_us, stream) if waits else host + op_us
        on_host = {"track": "host 0", "stream": -1, "thread": 0, "bytes": np.nan}
        if kind.op:
            rows.append(
                on_host
                | {
                    "name": kind.op,
                    "kind": "host_op",
                    "start_us": host,
                    "dur_us": done - host,
                    "correlation": -1,
                }
            )
        rows.append(
            on_host
            | {
                "name": kind.runtime,
                "kind": "runtime",
                "start_us": call,
                "dur_us": done - call,
                "correlation": number,
            }
        )
        rows.append({
            "name": launch.reason if launch.kind == "graph" and launch.reason else kind.work,
            "kind": kind.event,
            "track": "stream 7",
            "stream": 7,
            "thread": -1,
            "start_us": start,
            "dur_us": duration,
            "bytes": launch.bytes,
            "correlation": number,
        })  # fmt: skip
        host = done
    about = {"source": profile.name, "device": profile.device, "evidence": "modelled", "rocm": False}
    about |= {"resolution_us": 0.001, "left_out": [], "label": profile.label()}
    return event_table(pd.DataFrame(rows, columns=COLUMNS).fillna({"inputs": ""}), **about)


def both_regimes(
    work: Sequence[Launch], profile: DeviceProfile, graph_us: float | Mapping[str, float] | None = None
) -> dict[str, pd.DataFrame]:
    """The same launches on an idle machine, where the GPU waits for the host, and with the host ahead."""
    return {WAITS: simulate(work, profile, graph_us), AHEAD: simulate(work, profile, graph_us, ahead=True)}


def device_us(launch: Launch, profile: DeviceProfile) -> float:
    """How long the work of a launch other than a graph's runs."""
    kind = KINDS[launch.kind]
    return profile[kind.floor] + launch.bytes / (profile[kind.rate] * 1e3)


def _check(number: int, launch: Launch, graph_us: float | Mapping[str, float] | None) -> None:
    if launch.kind not in KINDS:
        raise ValueError(f"launch {number}: expected kind in {list(KINDS)}, got {launch}")
    if not all(isinstance(n, Integral) and n >= 0 for n in (launch.bytes, launch.n_copies)):
        raise ValueError(f"launch {number}: expected n_copies and bytes of 0 or more, got {launch}")
    if launch.kind == "graph":
        length = _graph_us(launch, graph_us)
        if length is None or not 0 <= length < np.inf:
            raise ValueError(
                f"graph_us: expected how long graph {launch.reason!r} runs, in us, got {graph_us}"
            )


def _graph_us(launch: Launch, graph_us: float | Mapping[str, float] | None) -> float | None:
    return graph_us.get(launch.reason) if isinstance(graph_us, Mapping) else graph_us


def _host_costs(work: Sequence[Launch], number: int, profile: DeviceProfile) -> tuple[float, float]:
    """What the host takes before a launch's operator, and in it."""
    launch = work[number]
    kind = KINDS[launch.kind]
    is_group = launch.kind == "foreach"
    same_call = number > 0 and launch.reason == work[number - 1].reason
    same_call &= is_group or launch.reason.startswith("slow path")
    before = 0.0 if same_call or number == 0 else profile["host_between_us"]
    cost = profile[kind.call] if same_call and is_group else max(profile[kind.host], profile[kind.call])
    return before, cost + is_group * launch.n_copies * profile["host_foreach_tensor_us"]


def what_if_grouped(bursts: pd.DataFrame, profile: DeviceProfile, groups: int = 3) -> pd.DataFrame:
    """What bursts of `find_copy_bursts` would take with their small copies grouped, by lib/launches.py.

    Copies below DEFAULT_DMA_BYTES go into `groups` foreach calls (the number of dtype pairs, which few traces
    tell), larger ones and those of unknown size stay, foreach kernels stay. A copy kernel counts as a pair that
    the fused kernel can take.

    Where the burst is host-bound, the operators around its small copies (runtime calls, where no operator was
    recorded) are replaced by those of the groups; at the fast end of the range the time between them goes, too.
    Else the device counts: floors and gaps. Waiting for another stream stays. Never saved is more than the idle
    time that is left plus what the launches that go took on the device.

    Returns:
        one row a burst: n_copies, regime, launches (afterwards), span_us, grouped_us, saved_us, and the range of
        both: figures at their fast and slow ends, and on the modelled part the error in that regime. A
        negative saving means that grouping costs time. waiting_us and ahead_us: the saving, all modelled, if the
        GPU waited for the host, and if the host were ahead.
    """
    if groups < 1:
        raise ValueError(f"groups: expected at least 1, got {groups}")
    errors, rows = profile.error or {}, []
    ends = ((profile, 0), (profile.at("fast"), -1), (profile.at("slow"), 1))  # and the sign of the error
    for burst in bursts.itertuples():
        small = [Launch("memcpy", 1, int(size), "small") for size in burst.sizes if size < DEFAULT_DMA_BYTES]
        large = [Launch("memcpy", 1, int(size), "large") for size in burst.sizes if size >= DEFAULT_DMA_BYTES]
        grouped = _grouped(small, groups)
        error = errors.get(burst.regime, max(errors.values(), default=0.0))
        host_us = max(burst.op_us, burst.host_us) * len(small) / burst.n_copies
        others = (
            (burst.host_span_us - max(burst.op_us, burst.host_us))
            * (len(small) - len(grouped))
            / burst.n_copies
        )
        # on the device in proportion to the model's time for today's copies, where those filled the span
        filled = max(burst.span_us - burst.kept_us - burst.blocked_us, 0.0)
        scale = filled / (_queued_us(small + large, profile) or 1)
        gone = min((len(small) - len(grouped)) * profile["memcpy_floor_us"], burst.busy_us - burst.kept_us)
        most = burst.span_us - burst.busy_us - burst.blocked_us + max(gone, 0.0)
        after = []
        for figures, sign in ends:
            off = max(1 + sign * error, 0.0)
            if burst.regime == "host-bound":
                saved = host_us - _host_us(grouped, figures) * off + (sign < 0) * max(others, 0.0)
            else:
                saved = scale * (_queued_us(small, profile) - _queued_us(grouped, figures) * off)
            after.append(burst.span_us - min(saved, most))
        waiting = _host_us(small, profile) - _host_us(grouped, profile)
        ahead = _queued_us(small, profile) - _queued_us(grouped, profile)
        n_launches = len(grouped) + len(large) + burst.n_kept
        rows.append((n_launches, after[0], min(after), max(after), waiting, ahead))
    columns = ["launches", "grouped_us", "grouped_low_us", "grouped_high_us", "waiting_us", "ahead_us"]
    table = bursts[["n_copies", "regime", "span_us"]].join(
        pd.DataFrame(rows, columns=columns, index=bursts.index)
    )
    table["saved_us"] = table["span_us"] - table["grouped_us"]
    table["saved_low_us"] = table["span_us"] - table["grouped_high_us"]
    table["saved_high_us"] = table["span_us"] - table["grouped_low_us"]
    table.attrs = {"evidence": "modelled", "label": profile.label(), "groups": groups}
    return table


def _grouped(small: Sequence[Launch], groups: int) -> list[Launch]:
    """Launches of these copies, dealt out into foreach calls; one alone goes by copy_."""
    made = []
    for number in range(groups):
        dealt = small[number::groups]
        tensors = [torch.empty(max(launch.bytes, 1), dtype=torch.uint8, device="meta") for launch in dealt]
        if len(dealt) > 1:
            chunks = launches([Call("foreach", tensors, tensors)])
            made += [Launch(chunk.kind, chunk.n_copies, chunk.bytes, f"group {number}") for chunk in chunks]
        else:
            made += dealt
    return made


def _queued_us(work: Sequence[Launch], profile: DeviceProfile) -> float:
    return sum(device_us(launch, profile) + profile["gap_us"] for launch in work)


def _host_us(work: Sequence[Launch], profile: DeviceProfile) -> float:
    return sum(sum(_host_costs(work, number, profile)) for number in range(len(work)))
