"""A host thread and a CUDA stream as a timeline: figures fitted from a trace, and checked against traces.

The model: one host thread issues calls, each of which costs it time. The work of a call can start one launch
latency after its runtime call began, and one gap after the stream finished what came before; it then takes a
floor plus its bytes at a rate. Nothing else is modelled: no other stream, no caches, no contention.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral, Real
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from lib.routes import Launch, foreach_launches
from lib.strategies import DEFAULT_DMA_BYTES
from lib.traces import COLUMNS, DEVICE_KINDS, burst_copies, event_table, find_copy_bursts

DEVICES = Path(__file__).resolve().parent.parent / "data" / "devices"

# Every figure of a profile, in us or GB/s (1e9 payload bytes a second): what it is, and what is assumed where
# a trace does not tell it: another figure (or none) times a factor, the factor's range, and because of what.
FIGURES = {
    "memcpy_floor_us": ("device-to-device memcpy of a few bytes", None),
    "memcpy_gb_per_s": ("its rate, from 256 KiB on",
        (None, 400, 200, 2000, "V100 344 GB/s, A100 482 and 757 GB/s")),
    "gap_us": ("end of an operation to the start of the next one in the queue",
        ("memcpy_floor_us", 0.7, 0.5, 1.3, "V100: 0.9 us between copies of 1.3 us")),
    "elementwise_floor_us": ("copy kernel over a few elements",
        ("memcpy_floor_us", 1.2, 1, 2, "V100: the shortest elementwise kernels")),
    "elementwise_gb_per_s": ("its rate", ("memcpy_gb_per_s", 1, 0.5, 1.5, "both are bound by memory")),
    "foreach_floor_us": ("fused foreach kernel over a few elements",
        ("elementwise_floor_us", 1.5, 1, 2.5, "it reads a table of pointers first")),
    "foreach_gb_per_s": ("its rate",
        ("memcpy_gb_per_s", 0.33, 0.1, 1, "about 3x slower for hidden_states in sglang pull request 28465")),
    "fused_floor_us": ("one Triton kernel for all pairs, over a few elements",
        ("foreach_floor_us", 1, 0.7, 1.5, "it reads a table of pointers, too")),
    "fused_gb_per_s": ("its rate", ("memcpy_gb_per_s", 0.5, 0.1, 1, "few blocks a pair")),
    "fill_floor_us": ("fill kernel over a few elements",
        ("elementwise_floor_us", 1, 0.8, 1.5, "it is an elementwise kernel")),
    "fill_gb_per_s": ("bytes written", ("elementwise_gb_per_s", 2, 1, 3, "it writes, and reads nothing")),
    "host_launch_us": ("runtime call of a kernel launch",
        ("memcpy_floor_us", 4, 2, 8, "V100: 5.2 us beside copies of 1.3 us; hosts differ")),
    "host_memcpy_us": ("runtime call of a memcpy",
        ("host_launch_us", 0.9, 0.6, 1.5, "ratio on V100 and A100")),
    "host_copy_us": ("aten::copy_ with its runtime call, without Python",
        ("host_memcpy_us", 1.6, 1.4, 4, "ratio on V100; 4 on a slow host")),
    "host_between_us": ("what the program does between two copies",
        ("host_copy_us", 0.1, 0, 1, "V100: 0.7 us in a loop inside C++; Python takes longer")),
    "host_foreach_us": ("aten::_foreach_copy_ with one launch, without its tensors",
        ("host_copy_us", 1.5, 1, 2.5, "one dispatch and launch, as for a copy, and checks of lists")),
    "host_foreach_tensor_us": ("each tensor of it",
        ("host_copy_us", 0.07, 0.03, 0.14, "V100: 107 us for an optimizer's aten::_foreach_add_ over what "
         "are, in a ResNet-50, 161 tensors; a copy_ takes 7.3 us")),
    "host_fill_us": ("aten::fill_", ("host_copy_us", 1.3, 0.8, 1.6, "ratio on V100 and A100")),
    "host_triton_us": ("launch of a Triton kernel from Python",
        ("host_copy_us", 2, 1, 4, "the launcher runs in Python; no trace at hand shows one")),
    "host_graph_us": ("runtime call of a graph launch",
        ("host_launch_us", 7, 3, 15, "A100: 27 us against 4 us, graphs of unknown size")),
    "launch_latency_us": ("start of a runtime call to the start of its work on an idle stream",
        ("host_launch_us", 1.3, 0.9, 2, "V100: 6.5 us at calls of 5.2 us")),
}  # fmt: skip
# Figures that are the durations of host calls with such a name, and of the shortest of such kernels.
HOST_CALLS = {
    "host_launch_us": "LaunchKernel",
    "host_fill_us": "^aten::fill_$",
    "host_graph_us": "GraphLaunch",
}
SHORTEST_KERNELS = {"elementwise_floor_us": "elementwise_kernel", "fill_floor_us": "FillFunctor"}


@dataclass(frozen=True)
class Figure:
    """A figure, the range in which it may lie, and where it came from ("fitted: ..." or "assumed: ...")."""

    value: float
    low: float
    high: float
    source: str


@dataclass(frozen=True)
class DeviceProfile:
    """What the model knows of a device and its host; as JSON in data/devices/.

    figures: each of FIGURES.
    unknown: the figures that the trace could not tell, each of which is an assumption with its range.
    error: regime ("host-bound", "queued") -> median absolute relative error of burst spans, each predicted
        by a profile fitted without it (see `validate`); a regime that the trace does not show is missing.
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

    def at(self, end: str) -> DeviceProfile:
        """The profile at the "fast" or "slow" end of every figure but the runtime calls inside operators."""
        figures = dict(self.figures)
        for name in figures.keys() - {"host_memcpy_us", "host_launch_us"}:
            high = (end == "fast") == name.endswith("gb_per_s")
            figures[name] = replace(figures[name], value=figures[name].high if high else figures[name].low)
        return replace(self, figures=figures)

    def label(self) -> str:
        """What a plot or table of modelled numbers has to say about them."""
        errors = ", ".join(f"{regime} {error:.1%}" for regime, error in (self.error or {}).items())
        name = f"{self.name} of {self.date}" if self.date else self.name
        assumed = " · foreach figures assumed" if "host_foreach_us" in self.unknown else ""
        error = f"median span error of single copies {errors or 'unknown'}"
        return f"modelled · {self.device}, profile {name} · {error}{assumed}"

    def save(self, path: str | Path) -> None:
        text = json.dumps(asdict(self), indent=1, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def available() -> list[str]:
        """Names of the profiles in data/devices/."""
        return sorted(path.stem for path in DEVICES.glob("*.json"))

    @classmethod
    def load(cls, name: str | Path) -> DeviceProfile:
        """A profile of data/devices/ by name, or any by path.

        Raises:
            ValueError: there is none, a figure is missing or not 0 <= low <= value <= high, or a field
                is not what the class says.
        """
        path = DEVICES / f"{name}.json" if str(name) in cls.available() else Path(name)
        if not path.is_file():
            raise ValueError(f"device profile {name}: expected one of {cls.available()}, or a file")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            figures = {figure: Figure(**raw["figures"][figure]) for figure in FIGURES}
            for figure, f in figures.items():
                if not 0 <= f.low <= f.value <= f.high < np.inf or (figure.endswith("per_s") and f.low == 0):
                    raise ValueError(f"{figure}: expected 0 <= low <= value <= high, a rate above 0, got {f}")
            texts = [raw[field] for field in ("name", "device", "source", "date")]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"name, device, source, date: expected texts, got {texts}")
            if not isinstance(unknown := raw["unknown"], list) or not all(
                x in list(FIGURES) for x in unknown
            ):
                raise ValueError(f"unknown: expected a list of figures, got {unknown}")
            errors = raw.get("error")
            if not isinstance(errors or {}, dict) or not all(map(_is_size, (errors or {}).values())):
                raise ValueError(f"error: expected a number from 0 on for each regime, got {errors}")
            return cls(**raw | {"figures": figures, "unknown": tuple(unknown)})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{path}: not a device profile: {error!r}") from error


def _is_size(x: object) -> bool:
    """Whether it is a finite number from 0 on."""
    return isinstance(x, Real) and not isinstance(x, bool) and 0 <= x < np.inf


def fit_profile(
    trace: pd.DataFrame,
    name: str = "fitted",
    source: str = "",
    date: str = "",
    without: pd.Index | None = None,
) -> DeviceProfile:
    """Read a profile out of a trace; what it cannot tell is assumed (FIGURES) and listed in `unknown`.

    Args:
        source: where the trace came from; the file's name by default.
        date: when it was recorded.
        without: index of device events that the fit must not look at; leaves `error` empty. For `validate`.

    Raises:
        ValueError: no device-to-device memcpy of known size, on which the assumptions rest.
    """
    device = burst_copies(trace, min_copies=1, kinds=DEVICE_KINDS)
    before = device.groupby("track", observed=True)
    device["after_copy"] = device["kind"].eq("memcpy") & before["kind"].shift().eq("memcpy")
    if without is not None:  # neither those events, nor what their ends say about the events after them
        device["hidden"] = device.index.isin(without)
        device["ready_us"] = device["ready_us"].where(~before["hidden"].shift(fill_value=False))
        device = device[~device["hidden"]]
    copies = device[(device["kind"] == "memcpy") & device["bytes"].notna()]
    if copies.empty:
        where = trace.attrs.get("source", "trace")
        raise ValueError(f"{where}: no device-to-device memcpy of known size to fit a profile from")

    small = copies[copies["bytes"] <= max(2048, copies["bytes"].min())]
    floor = _figure(small["dur_us"], f"memcpys of at most {small['bytes'].max():.0f} bytes")
    payload_us = copies["dur_us"] - floor.value
    large = (copies["bytes"] >= 2**18) & (payload_us > 0)
    size, payload_us = copies["bytes"][large], payload_us[large]
    mean_rate = size.sum() / payload_us.sum() / 1e3 if large.any() else None  # weighs long copies more
    waiting = device[device["call_start_us"] + device["call_us"] < device["ready_us"]]
    waiting = waiting[waiting["after_copy"]] if waiting["after_copy"].sum() >= 10 else waiting
    gap = (waiting["start_us"] - waiting["ready_us"]).clip(lower=0)
    gap = gap[gap <= 10 * max(gap.median(), 1)]
    late = device[device["call_start_us"] + device["call_us"] > device["ready_us"]]
    latency = late["start_us"] - late["call_start_us"]
    by_torch = copies[copies["op"] == "aten::copy_"]
    between = by_torch["op_start_us"] - (by_torch["op_start_us"] + by_torch["op_us"]).shift()
    found = {
        "memcpy_floor_us": floor,
        "memcpy_gb_per_s": _figure(size / payload_us / 1e3, "memcpys of at least 256 KiB", value=mean_rate),
        "gap_us": _figure(gap, "work that waited on the stream, mean", value=gap.mean()),
        # waiting for another stream only adds to it
        "launch_latency_us": _figure(latency[latency >= 0], "25th percentile on idle streams", 5, 25, 50),
        "host_copy_us": _figure(by_torch["op_us"], "aten::copy_ around a memcpy"),
        "host_between_us": _figure(
            between[by_torch["after_copy"] & (between >= 0)], "end of one aten::copy_ to the next"
        ),
        "host_memcpy_us": _figure(copies["call_us"], "runtime calls of memcpys"),
    }
    for kinds, patterns, percentiles, which in (
        (("host_op", "runtime"), HOST_CALLS, (25, 50, 75), ""),
        (("kernel", "copy_kernel"), SHORTEST_KERNELS, (1, 5, 25), "5th percentile of "),
    ):
        events = trace[trace["kind"].isin(kinds)]
        for figure, pattern in patterns.items():
            matching = events["dur_us"][events["name"].astype(str).str.contains(pattern)]
            found[figure] = _figure(matching, which + pattern.strip("^$"), *percentiles)

    figures = {}
    for figure, (_, assumption) in FIGURES.items():
        if (fitted := found.get(figure)) is None:
            base, factor, low, high, why = assumption
            value, why = (figures[base].value, f"{factor} times {base}; {why}") if base else (1.0, why)
            fitted = _rounded(value * factor, value * low, value * high, f"assumed: {why}")
        figures[figure] = fitted
    unknown = tuple(figure for figure in FIGURES if found.get(figure) is None)
    source = source or trace.attrs.get("source", "")
    source += "; times in whole us" if trace.attrs.get("resolution_us") == 1.0 else ""
    profile = DeviceProfile(name, trace.attrs.get("device", ""), source, date, figures, unknown)
    if without is not None:
        return profile
    checked = validate(trace).dropna()
    error = checked["error"].abs().groupby(checked["regime"]).median().round(4).to_dict()
    return replace(profile, error=error)


def _figure(
    values: pd.Series, what: str, low: int = 25, middle: int = 50, high: int = 75, value: float | None = None
) -> Figure | None:
    """Percentiles of measured values, `value` instead of the middle one; None where there are no values."""
    values = values.dropna().to_numpy(float)
    if not len(values):
        return None
    ends = np.percentile(values, (low, middle, high))
    return _rounded(ends[1] if value is None else value, ends[0], ends[2], f"fitted: {what}, n={len(values)}")


def _rounded(value: float, low: float, high: float, source: str) -> Figure:
    digits = (float(f"{x:.4g}") for x in (value, min(low, value), max(high, value)))
    return Figure(*digits, source)


def validate(trace: pd.DataFrame) -> pd.DataFrame:
    """Predict the span of every burst of memcpys by a profile fitted without it.

    The earlier half of the bursts is predicted by a profile fitted on the rest of the trace, and the later
    half likewise. Given are the operations and the starts of their host calls: the whole stream is played,
    copies of the half take what the profile says, other work what was recorded. No device time of a predicted
    burst is used.

    Returns:
        one row a burst: half, regime, n_copies, span_us, predicted_us, error (signed, relative; NaN where
        the rest of the trace has nothing to fit, or the burst no span).
    """
    bursts = find_copy_bursts(trace, kinds=("memcpy",))
    copies = burst_copies(trace, kinds=("memcpy",))
    device = burst_copies(trace, min_copies=1, kinds=DEVICE_KINDS)
    table = bursts[["regime", "n_copies", "span_us"]].assign(predicted_us=np.nan)
    table.insert(0, "half", np.where(np.arange(len(bursts)) < len(bursts) // 2, "earlier", "later"))
    for half in table["half"].unique():
        held_out = copies[copies["burst"].map(table["half"]) == half]
        try:
            profile = fit_profile(trace, without=held_out.index)
        except ValueError:  # no other memcpy in the trace
            continue
        start, end = _play(device, held_out.index, profile)
        start, end = (times[held_out.index].groupby(held_out["burst"]) for times in (start, end))
        table["predicted_us"] = table["predicted_us"].fillna(end.max() - start.first())
    return table.assign(error=table["predicted_us"] / table["span_us"].where(table["span_us"] > 0) - 1)


def _play(device: pd.DataFrame, modelled: pd.Index, profile: DeviceProfile) -> tuple[pd.Series, pd.Series]:
    """Starts and ends of device events, in stream order, those of `modelled` with the profile's durations.

    start[i] = max(call[i] + latency, end[i-1] + gap) is a recurrence. With done[i], the sum of all durations
    and gaps before i, it becomes start[i] = done[i] + max over j <= i of (call[j] + latency - done[j]).
    """
    model = profile["memcpy_floor_us"] + device["bytes"].fillna(0) / (profile["memcpy_gb_per_s"] * 1e3)
    duration = device["dur_us"].where(~device.index.isin(modelled), model)
    earliest = (device["call_start_us"] + profile["launch_latency_us"]).fillna(-np.inf)
    earliest = earliest.where(device.duplicated("track"), device["start_us"])  # where the recording begins
    track, step = device["track"].cat.codes, duration + profile["gap_us"]
    done = step.groupby(track).cumsum() - step
    start = done + (earliest - done).groupby(track).cummax()
    return start, start + duration


CALLS = {  # Launch.call -> the operator in a trace ("" for none), and its cost to the host
    "copy_": ("aten::copy_", "host_copy_us"),
    "foreach": ("aten::_foreach_copy_", "host_foreach_us"),
    "foreach_slow": ("aten::copy_", "host_copy_us"),
    "fill_": ("aten::fill_", "host_fill_us"),
    "triton": ("", "host_triton_us"),
    "graph": ("", "host_graph_us"),
}
WORK = {  # Launch.kind -> runtime call, its cost, kind and name of the work as the trace reader sorts it
    "memcpy": ("cudaMemcpyAsync", "host_memcpy_us", "memcpy", "Memcpy DtoD"),
    "elementwise": ("cudaLaunchKernel", "host_launch_us", "copy_kernel", "direct_copy_kernel_cuda"),
    "foreach": ("cudaLaunchKernel", "host_launch_us", "copy_kernel", "multi_tensor_apply_kernel<Copy<>>"),
    "fused": ("cuLaunchKernel", "host_launch_us", "copy_kernel", "fused_copy_kernel_cuda"),
    "fill": ("cudaLaunchKernel", "host_launch_us", "kernel", "FillFunctor"),
    "graph": ("cudaGraphLaunch", "host_graph_us", "graph", "CUDA graph"),
}


def simulate(
    launches: Sequence[Launch], profile: DeviceProfile, graph_us: float | None = None
) -> pd.DataFrame:
    """Play launches on an idle machine: one host thread issues them in turn, one stream runs them in order.

    Foreach launches in a row with the same reason are chunks of one call (see `routes.foreach_launches`), and
    so are those of a slow foreach call.

    Args:
        launches: as a strategy or a runner lists them; Launch("graph", 0, 0, "", "graph") is a graph replay.
        graph_us: how long a graph replay runs on the device.

    Returns:
        a table as of `traces.load_trace`, evidence "modelled", times from the first call on.

    Raises:
        ValueError: an unknown kind or call, a count that is none, or a graph replay without graph_us.
    """
    rows, host, free, before = [], 0.0, -np.inf, None
    for number, launch in enumerate(launches, 1):
        if launch.call not in CALLS or launch.kind not in WORK:
            expected = f"kind in {list(WORK)}, call in {list(CALLS)}"
            raise ValueError(f"launch {number}: expected {expected}, got {launch}")
        if not all(isinstance(n, Integral) and n >= 0 for n in (launch.bytes, launch.n_copies)):
            raise ValueError(f"launch {number}: expected n_copies and bytes of 0 or more, got {launch}")
        if launch.kind == "graph" and (graph_us is None or not 0 <= graph_us < np.inf):
            raise ValueError(f"graph_us: expected how long the graph runs, in us, got {graph_us}")
        (op, cost), (runtime, call_us, kind, work) = CALLS[launch.call], WORK[launch.kind]
        call_us = profile[call_us]
        inside = launch.call.startswith("foreach") and before == (launch.call, launch.reason)
        host += 0.0 if inside or before is None else profile["host_between_us"]
        op_us = call_us if inside and launch.call == "foreach" else max(profile[cost], call_us)
        op_us += launch.n_copies * profile["host_foreach_tensor_us"] if launch.call == "foreach" else 0.0
        call = host + op_us - call_us  # an operator makes its runtime call last
        start = max(call + profile["launch_latency_us"], free + profile["gap_us"])
        duration = graph_us if launch.kind == "graph" else _work_us(launch, profile)
        if op:
            rows.append((op, "host_op", "host 0", -1, 0, host, op_us, np.nan, -1))
        rows.append((runtime, "runtime", "host 0", -1, 0, call, call_us, np.nan, number))
        rows.append((work, kind, "stream 7", 7, -1, start, duration, launch.bytes, number))
        host, free, before = host + op_us, start + duration, (launch.call, launch.reason)
    about = {"source": profile.name, "device": profile.device, "evidence": "modelled"}
    about |= {"resolution_us": 0.001, "left_out": [], "label": profile.label()}
    return event_table(pd.DataFrame(rows, columns=COLUMNS), **about)


def _work_us(launch: Launch, profile: DeviceProfile) -> float:
    return profile[f"{launch.kind}_floor_us"] + launch.bytes / (profile[f"{launch.kind}_gb_per_s"] * 1e3)


def what_if_grouped(bursts: pd.DataFrame, profile: DeviceProfile, groups: int = 3) -> pd.DataFrame:
    """What bursts of `traces.find_copy_bursts` would take with their small copies grouped, by lib/routes.py.

    Copies below strategies.DEFAULT_DMA_BYTES go into `groups` foreach calls (no trace tells dtypes, so the
    number of dtype pairs is assumed), larger ones stay memcpys, foreach kernels stay. A copy kernel, whose
    size no trace tells, counts as small, and as a pair that the fused kernel can take.

    A burst ends with the later of two. The host: its operators around the copies (runtime calls, where no
    operator was recorded) are replaced, the rest of its time between them stays; that this goes, too, is the
    fast end of the range. The device, which starts where it does today. Where the regime is unknown, only
    the device counts.

    Returns:
        one row a burst: n_copies, regime, launches (afterwards), span_us, grouped_us, saved_us, and the
        range of both: figures at their fast and slow ends, and on the modelled part the error in that regime.
        A negative saving means that grouping costs time.
    """
    if groups < 1:
        raise ValueError(f"groups: expected at least 1, got {groups}")
    errors, rows = profile.error or {}, []
    ends = ((profile, 0), (profile.at("fast"), -1), (profile.at("slow"), 1))  # and the sign of the error
    for burst in bursts.itertuples():
        is_large = burst.sizes >= DEFAULT_DMA_BYTES
        small = np.nan_to_num(burst.sizes[~is_large]).astype(int).tolist()
        copies = [Launch("memcpy", 1, size, "small") for size in small]
        large = [Launch("memcpy", 1, int(size), "large") for size in burst.sizes[is_large]]
        grouped = _grouped(small, groups)
        launches = grouped + large if is_large[-1:].any() else large + grouped
        # On the device: in proportion to the model's time for today's copies, where those filled the span.
        today = _queued_us(copies + large, profile)
        filled = max(burst.span_us - burst.fused_us, 0.0)  # fused kernels may overlap, and take longer
        scale = filled / today if today and burst.regime != "host-bound" else 1.0
        stays = burst.fused_us + scale * _queued_us(large, profile)
        # On the host: what it does between the copies today, of which the model has a part, too.
        others = burst.host_span_us - max(burst.op_us, burst.host_us)
        others = max(others - profile["host_between_us"] * (len(launches) - 1), 0.0)
        error = errors.get(burst.regime, max(errors.values(), default=0.0))
        after = []
        for p, sign in ends:
            off = max(1 + sign * error, 0.0)
            device = stays + scale * _queued_us(grouped, p) * off
            host = _host_us(launches, p) * off - burst.lead_us + (sign >= 0) * others
            after.append(device if burst.regime == "unknown" else max(device, host))
        rows.append((len(launches) + burst.n_fused, after[0], min(after), max(after)))
    columns = ["launches", "grouped_us", "grouped_low_us", "grouped_high_us"]
    table = pd.DataFrame(rows, columns=columns, index=bursts.index)
    table = bursts[["n_copies", "regime", "span_us"]].join(table)
    table["saved_us"] = table["span_us"] - table["grouped_us"]
    table["saved_low_us"] = table["span_us"] - table["grouped_high_us"]
    table["saved_high_us"] = table["span_us"] - table["grouped_low_us"]
    table.attrs = {"evidence": "modelled", "label": profile.label(), "groups": groups}
    return table


def _grouped(sizes: Sequence[int], groups: int) -> list[Launch]:
    """Launches of copies of these bytes, dealt out into foreach calls; one alone goes by copy_."""
    launches = []
    for number in range(groups):
        sizes_here = [max(size, 1) for size in sizes[number::groups]]
        group = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes_here]
        if len(group) == 1:
            launches.append(Launch("memcpy", 1, sizes[number], "alone in its group"))
        elif group:
            launches += [replace(x, reason=f"group {number}") for x in foreach_launches(group, group)]
    return launches


def _queued_us(launches: Sequence[Launch], profile: DeviceProfile) -> float:
    return sum(_work_us(launch, profile) + profile["gap_us"] for launch in launches)


def _host_us(launches: Sequence[Launch], profile: DeviceProfile) -> float:
    """From the first host call to the end of the last work, where the device never holds it up, in us."""
    if not launches:
        return 0.0
    played = simulate(launches, profile)
    last_call = float(played["start_us"][played["kind"] == "runtime"].max())
    return last_call + profile["launch_latency_us"] + _work_us(launches[-1], profile)
