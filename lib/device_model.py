"""A host thread and a CUDA stream as a timeline: figures fitted from a trace, and checked against traces.

The model: one host thread issues calls, each of which costs it time; the work of a call can start one launch
latency after the call began, and one gap after the stream finished what came before; it then takes a floor
plus its bytes at a rate. Nothing else is modelled: no other stream, no caches, no contention.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from lib.routes import Launch, foreach_launches
from lib.strategies import DEFAULT_DMA_BYTES
from lib.traces import COLUMNS, DEVICE_KINDS, KINDS, burst_copies, find_copy_bursts

DEVICES = Path(__file__).resolve().parent.parent / "data" / "devices"

FIGURES = {
    "host_copy_us": "one aten::copy_ with its runtime call, without the Python around it",
    "host_memcpy_us": "the runtime call of a memcpy",
    "host_launch_us": "the runtime call of a kernel launch",
    "host_foreach_us": "one aten::_foreach_copy_ with one launch, without its tensors",
    "host_foreach_tensor_us": "each tensor of a foreach call",
    "host_fill_us": "one aten::fill_",
    "host_triton_us": "one launch of a Triton kernel from Python",
    "host_graph_us": "the runtime call of a graph launch",
    "host_between_us": "what the program does between two copies",
    "launch_latency_us": "start of the runtime call to start of its work on an idle stream",
    "gap_us": "end of an operation to the start of the next that was waiting on the stream",
    "memcpy_floor_us": "device-to-device memcpy of a few bytes",
    "memcpy_gb_per_s": "its payload rate",
    "elementwise_floor_us": "copy kernel over a few elements",
    "elementwise_gb_per_s": "its payload rate",
    "foreach_floor_us": "fused foreach kernel over a few elements",
    "foreach_gb_per_s": "its payload rate",
    "fused_floor_us": "one Triton kernel for all pairs, over a few elements",
    "fused_gb_per_s": "its payload rate",
    "fill_floor_us": "fill kernel over a few elements",
    "fill_gb_per_s": "its rate of bytes written",
}
# What a trace did not tell: figure -> (taken as that figure, times a factor, and its range, because).
ASSUMED = {
    "host_memcpy_us": ("host_launch_us", 0.9, 0.6, 1.2, "ratio of the two on V100 and A100"),
    "host_copy_us": ("host_memcpy_us", 1.6, 1.4, 4.0, "ratio on V100; 4 on a slow host"),
    "host_foreach_us": ("host_copy_us", 1.5, 1.0, 2.5, "one dispatch and one launch, as for a copy, and list checks"),
    "host_foreach_tensor_us": ("host_copy_us", 0.07, 0.03, 0.14, "V100 trace: an optimizer's aten::_foreach_add_ "
                               "takes 107 us for what are, in a ResNet-50, 161 tensors; one copy_ 7.3 us"),
    "host_fill_us": ("host_copy_us", 1.3, 0.8, 1.6, "ratio on the V100 and both A100 traces"),
    "host_triton_us": ("host_copy_us", 2.0, 1.0, 4.0, "the launcher runs in Python; no trace at hand shows one"),
    "host_graph_us": ("host_launch_us", 7.0, 3.0, 15.0, "ratio in a100_graph_launches, graphs of unknown size"),
    "host_between_us": ("host_copy_us", 0.2, 0.0, 1.0, "V100: 1.6 us between copies of 7.3 us in a loop inside C++"),
    "launch_latency_us": ("host_launch_us", 1.3, 0.9, 2.0, "V100: 6.8 us against calls of 5.2 us"),
    "gap_us": ("memcpy_floor_us", 0.7, 0.5, 1.3, "V100: 0.9 us between copies of 1.3 us"),
    "elementwise_floor_us": ("memcpy_floor_us", 1.2, 1.0, 2.0, "V100: the shortest elementwise kernels"),
    "elementwise_gb_per_s": ("memcpy_gb_per_s", 1.0, 0.5, 1.5, "both are bound by memory"),
    "foreach_floor_us": ("elementwise_floor_us", 1.5, 1.0, 2.5, "it reads a table of pointers first"),
    "foreach_gb_per_s": ("memcpy_gb_per_s", 1 / 3, 0.1, 1.0, "sglang pull request 28465: about 3x slower"),
    "fused_floor_us": ("foreach_floor_us", 1.0, 0.7, 1.5, "it reads a table of pointers, too"),
    "fused_gb_per_s": ("memcpy_gb_per_s", 0.5, 0.1, 1.0, "few blocks a pair"),
    "fill_floor_us": ("elementwise_floor_us", 1.0, 0.8, 1.5, "an elementwise kernel"),
    "fill_gb_per_s": ("elementwise_gb_per_s", 2.0, 1.0, 3.0, "it writes, and does not read"),
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A figure, the range in which it may lie, and where it came from ("fitted: ..." or "assumed: ...")."""

    value: float
    low: float
    high: float
    source: str


@dataclass(frozen=True)
class DeviceProfile:
    """What the model knows of a host and its device; as JSON in data/devices/.

    figures: every name of FIGURES; us, or GB/s (1e9 bytes a second).
    unknown: the figures that the trace could not tell, each with a stated assumption.
    error: regime -> median absolute relative error of burst spans, each burst predicted by a profile fitted
        without it (see `validate`); empty where it could not be checked.
    """

    name: str
    device: str
    source: str
    date: str
    figures: dict[str, Figure]
    unknown: tuple[str, ...] = ()
    error: dict[str, float] | None = None

    def __getitem__(self, figure: str) -> float:
        return self.figures[figure].value

    def at(self, bound: str) -> DeviceProfile:
        """The profile with every figure at its "fast" or "slow" end."""
        end = {True: {"fast": "high", "slow": "low"}, False: {"fast": "low", "slow": "high"}}
        ends = {name: end[name.endswith("gb_per_s")][bound] for name in self.figures}
        figures = {name: replace(f, value=getattr(f, ends[name])) for name, f in self.figures.items()}
        return replace(self, figures=figures)

    def label(self) -> str:
        """What a plot or table of modelled numbers has to say."""
        errors = ", ".join(f"{regime} {error:.1%}" for regime, error in (self.error or {}).items())
        return f"modelled: {self.device}, profile {self.name} ({self.date}); median span error {errors or 'unknown'}"

    def save(self, path: str | Path) -> None:
        text = json.dumps(asdict(self), indent=1, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def available() -> list[str]:
        """Names of the profiles in data/devices/."""
        return sorted(path.stem for path in DEVICES.glob("*.json"))

    @classmethod
    def load(cls, name_or_path: str | Path) -> DeviceProfile:
        """A profile of data/devices/ by its name, or any by its path.

        Raises:
            ValueError: no such profile, or a file that does not hold every figure as a finite number above 0.
        """
        path = (
            DEVICES / f"{name_or_path}.json" if str(name_or_path) in cls.available() else Path(name_or_path)
        )
        if not path.is_file():
            raise ValueError(f"device profile {name_or_path}: expected one of {cls.available()} or a file")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            figures = {name: Figure(**raw["figures"][name]) for name in FIGURES}
            profile = cls(**raw | {"figures": figures, "unknown": tuple(raw["unknown"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: not a device profile: {error!r}") from error
        for name, f in figures.items():
            if not (0 <= f.low <= f.value <= f.high < np.inf):
                raise ValueError(f"{path}: {name}: expected 0 <= low <= value <= high, got {f}")
        return profile


def fit_profile(
    trace: pd.DataFrame,
    name: str = "fitted",
    source: str = "",
    date: str = "",
    without: pd.Index | None = None,
) -> DeviceProfile:
    """Read a profile out of a trace; what it cannot tell is assumed (ASSUMED) and listed in `unknown`.

    Args:
        without: index of device events that the fit must not look at (for `validate`).

    Raises:
        ValueError: the trace has no device-to-device memcpy, on which every assumption rests.
    """
    device = burst_copies(trace, min_copies=1, kinds=DEVICE_KINDS)
    device["after_copy"] = device["kind"].eq("memcpy") & device.groupby("track", observed=True)[
        "kind"
    ].shift().eq("memcpy")
    if without is not None:
        device = device.drop(without)
    copies = device[device["kind"] == "memcpy"]
    if copies["bytes"].notna().sum() == 0:
        where = trace.attrs.get("source", "trace")
        raise ValueError(f"{where}: no device-to-device memcpy to fit a profile from")
    found: dict[str, Figure] = {}

    def fit(figure: str, values: pd.Series, what: str, percentiles=(50, 25, 75), mean: bool = False) -> None:
        values = np.asarray(values.dropna(), float)
        if len(values):
            middle, low, high = np.percentile(values, percentiles).tolist()
            middle = float(values.mean()) if mean else middle
            found[figure] = Figure(
                middle, min(low, middle), max(high, middle), f"fitted: {what}, n={len(values)}"
            )

    host = trace[trace["kind"].isin(("host_op", "runtime"))]
    by_name = {name: rows for name, rows in host.groupby("name", observed=True)["dur_us"]}
    launches = [rows for name, rows in by_name.items() if "LaunchKernel" in name]
    none = pd.Series(dtype=float)
    one_copy = copies[copies["op"] == "aten::copy_"]
    fit("host_copy_us", one_copy["op_us"], "aten::copy_ around a memcpy")
    fit("host_memcpy_us", copies["call_us"], "runtime calls of memcpys")
    fit("host_launch_us", pd.concat(launches) if launches else none, "kernel launch calls")
    fit("host_fill_us", by_name.get("aten::fill_", none), "aten::fill_")
    fit("host_graph_us", by_name.get("cudaGraphLaunch", none), "cudaGraphLaunch")
    between = one_copy["op_start_us"] - (one_copy["op_start_us"] + one_copy["op_us"]).shift()
    fit(
        "host_between_us",
        between[one_copy["after_copy"] & (between >= 0)],
        "end of one aten::copy_ to the next",
    )

    call_end = device["call_start_us"] + device["call_us"]
    latency = (device["start_us"] - device["call_start_us"])[device["call_start_us"] > device["ready_us"]]
    fit("launch_latency_us", latency[latency >= 0], "work launched on an idle stream")
    gap = (device["start_us"] - device["ready_us"])[call_end < device["ready_us"]].clip(lower=0)
    gap = gap[device["after_copy"]] if device["after_copy"][gap.index].sum() >= 10 else gap
    fit("gap_us", gap[gap <= 10 * max(gap.median(), 1)], "queued work, mean", mean=True)
    small = copies[copies["bytes"] <= max(2048, copies["bytes"].min())]
    fit("memcpy_floor_us", small["dur_us"], f"memcpys of at most {small['bytes'].max():.0f} bytes")
    floor = found["memcpy_floor_us"].value
    large = copies[(copies["bytes"] >= 256 * 1024) & (copies["dur_us"] > floor)]
    if len(large):
        rates = large["bytes"] / (large["dur_us"] - floor) / 1e3
        low, high = np.percentile(rates, [5, 95])
        overall = float(large["bytes"].sum() / (large["dur_us"] - floor).sum() / 1e3)
        found["memcpy_gb_per_s"] = Figure(overall, min(low, overall), max(high, overall),
                                          f"fitted: memcpys of at least 256 KiB, n={len(large)}")  # fmt: skip
    kernels = trace[trace["kind"].isin(("kernel", "copy_kernel"))]
    names = kernels["name"].astype(str)

    shortest = (5, 1, 25)
    elementwise = kernels["dur_us"][names.str.contains("elementwise_kernel")]
    fit("elementwise_floor_us", elementwise, "5th percentile of elementwise kernels", shortest)
    fills = kernels["dur_us"][names.str.contains("FillFunctor")]
    fit("fill_floor_us", fills, "5th percentile of fill kernels", shortest)
    unknown = []
    for figure in ASSUMED:
        if figure not in found:
            base, factor, low, high, reason = ASSUMED[figure]
            value = found[base].value
            found[figure] = Figure(
                value * factor, value * low, value * high, f"assumed: {factor:.2g} {base}; {reason}"
            )
            unknown.append(figure)
    profile = DeviceProfile(
        name, trace.attrs.get("device", ""), source or trace.attrs.get("source", ""), date,
        {figure: found[figure] for figure in FIGURES}, tuple(f for f in FIGURES if f in unknown),
    )  # fmt: skip
    return profile if without is not None else replace(profile, error=_median_errors(validate(trace)))


def validate(trace: pd.DataFrame, min_copies: int = 4, kinds: Sequence[str] = ("memcpy",)) -> pd.DataFrame:
    """Predict the span of every burst by a profile fitted without it, from operations and host call times.

    The bursts are split into an earlier and a later half. Each half is predicted by a profile fitted on the
    rest of the trace. A whole stream is played: the start of each host call is given, copies take what the
    profile says, other operations what was recorded. No device time of a predicted burst is used.

    Returns:
        one row a burst: half, regime, n_copies, span_us, predicted_us, error (relative, signed).
    """
    bursts = find_copy_bursts(trace, min_copies, kinds)
    copies = burst_copies(trace, min_copies, kinds)
    device = burst_copies(trace, min_copies=1, kinds=DEVICE_KINDS)
    later = copies["burst"] >= len(bursts) // 2
    predicted = []
    for held_out in (copies[~later], copies[later]):
        if held_out.empty:
            continue
        profile = fit_profile(trace, without=held_out.index)
        start, end = _play(device, held_out.index, profile)
        group = held_out["burst"]
        span = end[held_out.index].groupby(group).max() - start[held_out.index].groupby(group).first()
        predicted.append(span)
    table = bursts[["regime", "n_copies", "span_us"]].copy()
    table.insert(0, "half", np.where(np.arange(len(bursts)) < len(bursts) // 2, "earlier", "later"))
    table["predicted_us"] = pd.concat(predicted) if predicted else np.nan
    table["error"] = table["predicted_us"] / table["span_us"] - 1
    return table


def _median_errors(validation: pd.DataFrame) -> dict[str, float]:
    return validation["error"].abs().groupby(validation["regime"]).median().round(4).to_dict()


def _play(device: pd.DataFrame, modelled: pd.Index, profile: DeviceProfile) -> tuple[pd.Series, pd.Series]:
    """Starts and ends of device events in stream order, those of `modelled` with the profile's durations.

    start[i] = max(call[i] + latency, end[i-1] + gap) is a recurrence; with done[i], the sum of all durations and
    gaps before i, it is start[i] = done[i] + max over j <= i of (call[j] + latency - done[j]).
    """
    model = profile["memcpy_floor_us"] + device["bytes"].fillna(0) / (profile["memcpy_gb_per_s"] * 1e3)
    duration = device["dur_us"].where(~device.index.isin(modelled), model)
    earliest = (device["call_start_us"] + profile["launch_latency_us"]).fillna(-np.inf)
    first = ~device.duplicated("track")
    earliest = earliest.where(~first, device["start_us"])
    track = device["track"].cat.codes
    done = (duration + profile["gap_us"]).groupby(track).cumsum() - duration - profile["gap_us"]
    start = done + (earliest - done).groupby(track).cummax()
    return start, start + duration


def simulate(
    launches: Sequence[Launch], profile: DeviceProfile, graph_us: float | None = None
) -> pd.DataFrame:
    """Play launches on an idle machine: one host thread issues them back to back, one stream runs them in order.

    Foreach launches in a row with the same reason are one call, as `routes.foreach_launches` lists its chunks.

    Args:
        launches: as a strategy or a runner lists them; a `Launch("graph", ...)` is a graph replay.
        graph_us: how long a graph replay runs on the device; needed where there is one.

    Returns:
        the table of `traces.load_trace`, `attrs["evidence"]` "modelled"; start_us counts from the first call.

    Raises:
        ValueError: a kind or call that the model does not know, or a graph without graph_us.
    """
    rows, host, free, before = [], 0.0, -np.inf, None
    for number, launch in enumerate(launches, 1):
        if launch.call not in _CALLS or launch.kind not in _WORK:
            raise ValueError(
                f"launch {number}: expected a kind of {list(_WORK)} and a call of {list(_CALLS)}, got {launch}"
            )
        if launch.kind == "graph" and (graph_us is None or not 0 <= graph_us < np.inf):
            raise ValueError(f"graph_us: expected the duration of the graph replay in us, got {graph_us}")
        op, op_us = _CALLS[launch.call]
        kind, work = _WORK[launch.kind]
        runtime = {"memcpy": "cudaMemcpyAsync", "graph": "cudaGraphLaunch"}.get(
            launch.kind, "cudaLaunchKernel"
        )
        call_us = profile[
            {"memcpy": "host_memcpy_us", "graph": "host_graph_us"}.get(launch.kind, "host_launch_us")
        ]
        same_call = launch.call == "foreach" and before == (launch.call, launch.reason)
        cost = call_us if same_call else max(profile[op_us], call_us)
        if launch.call == "foreach":
            cost += launch.n_copies * profile["host_foreach_tensor_us"]
        in_one_call = same_call or (launch.call == "foreach_slow" and before and before[0] == "foreach_slow")
        host += 0.0 if in_one_call or before is None else profile["host_between_us"]
        call_start = host + cost - call_us  # the runtime call comes last in its operator
        start = max(call_start + profile["launch_latency_us"], free + profile["gap_us"])
        duration = graph_us if launch.kind == "graph" else _work_us(launch.kind, launch.bytes, profile)
        if op:
            rows.append((op, "host_op", "host 0", -1, 0, host, cost, np.nan, -1))
        rows.append((runtime, "runtime", "host 0", -1, 0, call_start, call_us, np.nan, number))
        rows.append((work, kind, "stream 7", 7, -1, start, duration, float(launch.bytes), number))
        host, free, before = host + cost, start + duration, (launch.call, launch.reason)
    table = pd.DataFrame(rows, columns=list(COLUMNS)).astype(
        {"name": "category", "kind": pd.CategoricalDtype(list(KINDS)), "track": "category",
         "stream": "int64", "thread": "int64", "start_us": float, "dur_us": float, "bytes": float, "correlation": "int64"}
    )  # fmt: skip
    table = table.sort_values("start_us", kind="stable", ignore_index=True)
    table.attrs = {"source": profile.name, "device": profile.device, "evidence": "modelled", "resolution_us": 0.001,
                   "left_out": [], "label": profile.label()}  # fmt: skip
    return table


_CALLS = {  # Launch.call -> operator, and what it costs the host
    "copy_": ("aten::copy_", "host_copy_us"),
    "foreach": ("aten::_foreach_copy_", "host_foreach_us"),
    "foreach_slow": ("aten::copy_", "host_copy_us"),
    "fill_": ("aten::fill_", "host_fill_us"),
    "triton": ("", "host_triton_us"),
    "graph": ("", "host_graph_us"),
}
_WORK = {  # Launch.kind -> kind in the table, and a name that the trace reader sorts into that kind
    "memcpy": ("memcpy", "Memcpy DtoD (modelled)"),
    "elementwise": ("copy_kernel", "direct_copy_kernel (modelled)"),
    "foreach": ("copy_kernel", "multi_tensor_apply_kernel<Copy<>> (modelled)"),
    "fused": ("copy_kernel", "fused_copy_kernel_cuda (modelled)"),
    "fill": ("kernel", "FillFunctor (modelled)"),
    "graph": ("graph", "CUDA graph (modelled)"),
}


def _work_us(kind: str, size: float, profile: DeviceProfile) -> float:
    return profile[f"{kind}_floor_us"] + size / (profile[f"{kind}_gb_per_s"] * 1e3)


def what_if_grouped(bursts: pd.DataFrame, profile: DeviceProfile, groups: int = 3) -> pd.DataFrame:
    """What bursts would take with their small copies grouped by the rules of lib/routes.py.

    Copies below strategies.DEFAULT_DMA_BYTES go into `groups` foreach calls (a trace does not tell dtypes, so
    the number of dtype pairs is assumed), larger ones stay driver memcpys, foreach kernels stay as they are. A copy
    kernel, whose size a trace does not tell, counts as small and as one that the fused kernel can take.

    Of a host-bound burst the operators around the copies are replaced, the rest of the host's time between them
    stays; that it goes, too, is the fast end of the range. Of a queued burst the host is ahead, and only time
    on the device is saved; so is it counted where the calls were not recorded.

    Args:
        bursts: from `find_copy_bursts`.

    Returns:
        a row a burst: n_copies, regime, launches (after), span_us, grouped_us, saved_us, and the range of
        each, grouped_low_us ... saved_high_us: figures of the profile at their fast and slow ends, then the
        median error of the model in that regime. A negative saving says that grouping costs time.
    """
    if groups < 1:
        raise ValueError(f"groups: expected at least 1, got {groups}")
    errors, rows = profile.error or {}, []
    for burst in bursts.itertuples():
        error = errors.get(burst.regime, max(errors.values(), default=0.0))
        small = [0 if size != size else int(size) for size in burst.sizes if not size >= DEFAULT_DMA_BYTES]
        large = [int(size) for size in burst.sizes if size >= DEFAULT_DMA_BYTES]
        fused = _foreach(small, groups)
        if burst.regime == "host-bound":
            after = fused + [Launch("memcpy", 1, size, "large") for size in large]
            rest = max(burst.host_span_us - burst.op_us, 0.0)
            ends = [
                _host_bound_us(after, p) + burst.fused_us
                for p in (profile.at("fast"), profile, profile.at("slow"))
            ]
            fast, middle, slow = ends[0], ends[1] + rest, ends[2] + rest
            margin = error * middle
        else:
            today = _queued_us([Launch("memcpy", 1, size, "small") for size in small], profile)
            fast, middle, slow = (
                burst.span_us - today + _queued_us(fused, p)
                for p in (profile.at("fast"), profile, profile.at("slow"))
            )
            margin = error * today
        low, high = max(min(fast, middle) - margin, 0.0), max(middle, slow) + margin
        n_launches = len(fused) + len(large) + burst.n_fused
        rows.append((burst.n_copies, burst.regime, n_launches, burst.span_us, middle, low, high,
                     burst.span_us - middle, burst.span_us - high, burst.span_us - low))  # fmt: skip
    columns = ["n_copies", "regime", "launches", "span_us", "grouped_us", "grouped_low_us", "grouped_high_us",
               "saved_us", "saved_low_us", "saved_high_us"]  # fmt: skip
    table = pd.DataFrame(rows, columns=columns, index=bursts.index)
    table.attrs = {"evidence": "modelled", "label": profile.label(), "groups": groups}
    return table


def _foreach(sizes: list[int], groups: int) -> list[Launch]:
    """Launches of copies of these bytes, dealt out into foreach calls."""
    launches = []
    for group in filter(None, (sizes[start::groups] for start in range(groups))):
        tensors = [torch.empty(max(size, 1), dtype=torch.uint8, device="meta") for size in group]
        launches += foreach_launches(tensors, tensors)
    return launches


def _queued_us(launches: list[Launch], profile: DeviceProfile) -> float:
    return sum(_work_us(launch.kind, launch.bytes, profile) + profile["gap_us"] for launch in launches)


def _host_bound_us(launches: list[Launch], profile: DeviceProfile) -> float:
    """Time to the end of the last launch, from where the first copy_ on an idle machine would start its work."""
    played = simulate(launches, profile)
    lead = simulate([Launch("memcpy", 1, 0, "first copy")], profile)["start_us"].iloc[-1]
    return max((played["start_us"] + played["dur_us"]).max() - lead, 0.0) if launches else 0.0
