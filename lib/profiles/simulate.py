"""A list of launches as a timeline on a device profile, and what bursts of a trace would take if grouped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from lib.copies import DEFAULT_DMA_BYTES
from lib.kinds import KINDS, Launch
from lib.launches import foreach_limits, tables
from lib.profiles.device import DeviceProfile
from lib.profiles.traces import COLUMNS, event_table

HOST = ("host 0", "", -1, 0)  # track, inputs, stream, thread
STREAM = ("stream 7", "", 7, -1)
WAITS, AHEAD = "the GPU waits for the host", "the host is ahead"
Work = Sequence[Launch]
GraphTimes = float | Mapping[str, float] | None


def simulate(
    work: Work, profile: DeviceProfile, graph_us: GraphTimes = None, ahead: bool = False
) -> pd.DataFrame:
    """Play launches on an idle machine: one host thread issues them in turn, one stream runs them in order.

    Foreach launches in a row with the same reason are chunks of one call, and so are the copies of a slow
    foreach call. A copy to the host, or from pageable memory, holds the host up until it is done.

    work: as `launches` lists them; Launch("graph", 0, 0, "verify") is a graph replay, named so. graph_us: how
    long replays run on the device, all of them or each by its reason. ahead: the stream has other work until
    the last call is made, and nothing holds the host up. Returns a table as of `load_trace`, evidence
    "modelled", times from the first call on.
    """
    costs = list(_host_costs(work, profile))
    rows = []
    host = 0.0
    stream = sum(map(sum, costs)) if ahead else -np.inf
    for number, (launch, (between, op_us)) in enumerate(zip(work, costs), 1):
        kind = KINDS[launch.kind]
        host += between
        returned = host + op_us
        call = returned - profile[kind.call]  # an operator makes its runtime call last
        earliest = call + profile["launch_latency_us"]
        start = max(earliest, stream + profile["gap_us"])
        duration = device_us(launch, profile, graph_us)
        stream = start + duration
        waits = launch.kind == "dtoh" or launch.reason.startswith("pageable")
        if waits and not ahead:
            returned = max(returned, stream)
        name = kind.work
        if launch.kind == "graph" and launch.reason:
            name = launch.reason
        if kind.op:
            rows.append((kind.op, "host_op", *HOST, host, returned - host, np.nan, -1))
        rows.append((kind.runtime, "runtime", *HOST, call, returned - call, np.nan, number))
        rows.append((name, kind.event, *STREAM, start, duration, launch.bytes, number))
        host = returned
    return event_table(
        pd.DataFrame(rows, columns=[*COLUMNS]),
        source=profile.name,
        device=profile.device,
        evidence="modelled",
        left_out=[],
        label=profile.label(),
    )


def device_us(launch: Launch, profile: DeviceProfile, graph_us: GraphTimes = None) -> float:
    """How long the work of a launch runs."""
    kind = KINDS[launch.kind]
    if kind.floor:
        return profile[kind.floor] + launch.bytes / (1e3 * profile[kind.rate])
    length = graph_us.get(launch.reason) if isinstance(graph_us, Mapping) else graph_us
    if length is None:
        raise ValueError(f"graph_us: expected how long graph {launch.reason!r} runs, in us")
    return length


def _host_costs(work: Work, profile: DeviceProfile) -> Iterator[tuple[float, float]]:
    """What the host takes before the operator of each launch, and in it."""
    before = None
    for launch in work:
        kind = KINDS[launch.kind]
        is_group = launch.kind == "foreach"
        tensors_us = launch.n_copies * is_group * profile["host_foreach_tensor_us"]
        of_a_list = is_group or launch.reason.startswith("slow path")
        if before and of_a_list and launch.reason == before.reason:  # in the same call
            yield 0.0, profile[kind.call if is_group else kind.host] + tensors_us
        else:
            op_us = max(profile[kind.host], profile[kind.call])
            yield profile["host_between_us"] if before else 0.0, op_us + tensors_us
        before = launch


# What grouping saves of a burst, in us, if times of the groups are `off` by a factor. One copy in a group
# stays as it is; `all_between`: whether the time between the calls that go is saved, too.
SAVING = """
    gone = n_small - n_grouped
    asked_us = op_us.clip(host_us)
    between_us = (host_span_us - asked_us).clip(0) * gone / n_copies
    host_bound_us = asked_us * n_small / n_copies - host_grouped * off + between_us * all_between
    scale = ((span_us - kept_us - blocked_us) / queued_today.clip(1e-9)).clip(0)
    device_us = scale * (queued_small - queued_grouped * off)
    copying_us = busy_us - kept_us
    on_device_us = (gone * floor_us).clip(upper=copying_us).clip(0)
    most_us = idle_us - blocked_us + on_device_us
    saved_us = host_bound_us.where(regime == 'host-bound', device_us).clip(upper=most_us)
"""
RESULT = """
    saved_us = saved_middle_us
    saved_low_us = saved_us.clip(upper=saved_fast_us).clip(upper=saved_slow_us)
    saved_high_us = saved_us.clip(saved_fast_us).clip(saved_slow_us)
    launches = n_copies - n_small + n_grouped
    grouped_us = span_us - saved_us
    waiting_us = host_small - host_grouped
    ahead_us = queued_small - queued_grouped
"""


def what_if_grouped(bursts: pd.DataFrame, profile: DeviceProfile, groups: int = 3) -> pd.DataFrame:
    """What bursts of `find_copy_bursts` would take with their small copies grouped, by lib/launches.py.

    Copies below DEFAULT_DMA_BYTES, copy kernels among them, go into `groups` foreach calls (the number of
    dtype pairs, which few traces tell); larger ones, those of unknown size and foreach kernels stay.

    Where the burst is host-bound, the operators around its small copies (runtime calls, where no operator was
    recorded) are replaced by those of the groups; at the fast end of the range the time between them goes,
    too. Else floors and gaps count, in proportion to the model's time for today's copies. Never saved is more
    than the time idle, but not for another stream, and what the launches that go took on the device.

    Returns one row a burst: the columns of `bursts`, launches (afterwards), grouped_us, saved_us, its range
    saved_low_us to saved_high_us (figures at their fast and slow ends, and on the modelled part the error in
    that regime; below 0 grouping costs time), waiting_us and ahead_us: the saving, all modelled, if the GPU
    waited for the host, and if the host were ahead.
    """
    if groups < 1:
        raise ValueError(f"groups: expected at least 1, got {groups}")
    worst = max(profile.error.values(), default=0.0)
    error = bursts.regime.map(profile.error).astype(float).fillna(worst)
    dealt = [_dealt(sizes, groups) for sizes in bursts.sizes]
    dealt = pd.DataFrame(dealt, bursts.index, ["today", "small", "grouped"])
    terms = bursts.join([_times(dealt, profile), dealt.map(len).add_prefix("n_").astype(int)])
    terms["floor_us"] = profile["memcpy_floor_us"]
    offs = {"middle": 1.0, "fast": (1 - error).clip(0), "slow": 1 + error}
    for end, off in offs.items():
        grouped = _times(dealt[["grouped"]], profile.at(end))
        case = terms.assign(off=off, all_between=end == "fast", **grouped)
        terms[f"saved_{end}_us"] = case.eval(SAVING).saved_us
    table = terms.eval(RESULT)
    table.attrs = {"evidence": "modelled", "label": profile.label()}
    return table


def _times(dealt: pd.DataFrame, profile: DeviceProfile) -> pd.DataFrame:
    """What the host takes for each list of launches (host_...), and the device if they queue (queued_...)."""
    host_us = dealt.map(lambda work: sum(map(sum, _host_costs(work, profile))))
    queued_us = dealt.map(lambda work: sum(device_us(launch, profile) + profile["gap_us"] for launch in work))
    return host_us.add_prefix("host_").join(queued_us.add_prefix("queued_")).astype(float)


def _dealt(sizes: Sequence[float], groups: int) -> tuple[Work, Work, Work]:
    """Launches of copies of these bytes, the small ones thereof, and these dealt out into foreach calls."""
    copies = [Launch("memcpy", 1, int(size), "") for size in sizes]
    small = [copy for copy in copies if copy.bytes < DEFAULT_DMA_BYTES]
    made = []
    for number in range(groups):
        group = small[number::groups]
        if len(group) > 1:
            sizes = [max(copy.bytes, 1) for copy in group]
            chunks = tables(sizes, *foreach_limits())
            group = [Launch("foreach", len(part), part.total(), f"group {number}") for part in chunks]
        made += group
    return copies, small, made
