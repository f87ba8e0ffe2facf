"""What a host and its GPU take for a copy: figures fitted from traces, each with its range and its source.

The model behind them: one host thread issues calls, each of which costs it time. The work of a call can start one
launch latency after its runtime call began, and one gap after the stream finished what came before; it then takes
a floor plus its bytes at a rate. Nothing else is modelled: no caches, no contention, no Python between the calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from lib.profiles.bursts import burst_copies, find_copy_bursts
from lib.profiles.traces import COPY, DEVICE_KINDS, is_foreach

DEVICES = Path(__file__).resolve().parents[2] / "data" / "devices"
SMALL, LARGE = (
    16 << 10,
    256 << 10,
)  # bytes: below, a copy takes its floor (5 % more at 300 GB/s); from there on it may not
FASTEST_GB_PER_S = 4000  # no memory of 2026 copies faster: 8 TB/s, each byte read and written


class Meaning(NamedTuple):
    """What a figure is, and what is assumed where a trace does not tell it: `base` (a figure or a number) times
    factor, between base times low and base times high."""

    what: str
    base: str | float
    factor: float
    low: float
    high: float
    why: str


# Every figure of a profile, in us or GB/s (1e9 payload bytes a second); one stands after its base.
FIGURES = {
    "memcpy_floor_us": Meaning("device-to-device memcpy of a few bytes", 1.5, 1, 0.7, 3, "1.3 (V100) to 4.4 (MI300X)"),
    "memcpy_gb_per_s": Meaning("its rate, from 256 KiB on", 400, 1, 0.5, 5, "V100 345, A100 482 and 757, H100 1,530"),
    "gap_us": Meaning("end of an operation to the start of the next in the queue", "memcpy_floor_us", 0.7, 0, 1.3,
        "V100: 0.9 us between copies of 1.3 us; none on an MI300X"),
    "elementwise_floor_us": Meaning("copy kernel over a few elements", "memcpy_floor_us", 1.1, 0.7, 2, "V100, B300"),
    "elementwise_gb_per_s": Meaning("its rate", "memcpy_gb_per_s", 1, 0.5, 1.5, "both are bound by memory"),
    "foreach_floor_us": Meaning("fused foreach kernel over a few elements", "elementwise_floor_us", 1.1, 0.5, 1.5,
        "six calls recorded on a B300 and on MI300X"),
    "foreach_gb_per_s": Meaning("its rate", "memcpy_gb_per_s", 0.33, 0.1, 1,
        "about 3x slower for hidden_states in sglang pull request 28465"),
    "fused_floor_us": Meaning("one Triton kernel for all pairs, over a few elements", "foreach_floor_us", 1, 0.7, 1.5,
        "it reads a table of pointers, too"),
    "fused_gb_per_s": Meaning("its rate", "memcpy_gb_per_s", 0.5, 0.1, 1, "few blocks a pair"),
    "fill_floor_us": Meaning("fill kernel over a few elements", "elementwise_floor_us", 1, 0.8, 1.5,
        "it is an elementwise kernel"),
    "fill_gb_per_s": Meaning("bytes written", "elementwise_gb_per_s", 2, 1, 3, "it writes, and reads nothing"),
    "htod_floor_us": Meaning("memcpy from or to the host, of a few bytes", 1, 1, 0.7, 4, "H100: 0.75 to 3 us"),
    "htod_gb_per_s": Meaning("its rate", 25, 1, 0.2, 2.2, "H100, pinned: 28 GB/s; pageable memory is slower"),
    "host_launch_us": Meaning("runtime call of a kernel launch", "memcpy_floor_us", 4, 2, 8,
        "V100: 5.2 us beside copies of 1.3 us; hosts differ"),
    "host_memcpy_us": Meaning("runtime call of a memcpy", "host_launch_us", 0.9, 0.6, 1.5, "V100 and A100"),
    "host_copy_us": Meaning("aten::copy_ with its runtime call, without Python", "host_memcpy_us", 1.6, 1.4, 4,
        "V100; 4 on a slow host"),
    "host_between_us": Meaning("what the program does between two copies", "host_copy_us", 0.1, 0, 1,
        "V100: 0.7 us in a loop inside C++; Python takes longer"),
    "host_foreach_us": Meaning("aten::_foreach_copy_ with one launch, without its tensors", "host_launch_us", 2.5, 1, 5,
        "six calls recorded on a B300 and on MI300X, from warm to cold"),
    "host_foreach_tensor_us": Meaning("each tensor of it", "host_launch_us", 0.15, 0.1, 0.3,
        "aten::_foreach_add_ of optimizers: V100 0.66 us for each of 161, MI300X 0.8 for each of 62"),
    "host_fill_us": Meaning("aten::fill_ around a launch", "host_copy_us", 1.3, 0.8, 1.6, "V100 and A100"),
    "host_triton_us": Meaning("launch of a Triton kernel from Python", "host_copy_us", 2, 1, 4,
        "the launcher runs in Python; no trace at hand shows one"),
    "host_graph_us": Meaning("runtime call of a graph launch", "host_launch_us", 7, 3, 200,
        "A100: 27 us against 4 us; B300: 980 us, recorded with stacks"),
    "launch_latency_us": Meaning("start of a runtime call to the start of its work on an idle stream",
        "host_launch_us", 1.3, 0.9, 2, "V100: 6.5 us at calls of 5.2 us"),
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
    """What the model knows of a device and its host; as JSON in data/devices/.

    figures: each of FIGURES.
    unknown: the figures that the trace could not tell, each of which is an assumption with its range.
    error: regime ("host-bound", "queued", "blocked") -> median absolute relative error of burst spans, each
        predicted by a profile fitted without it (see `validate`); a regime that the trace does not show is
        missing.
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
        return f"modelled · {self.device or 'unknown device'}, profile {name} · {error}{assumed}"

    def save(self, path: str | Path) -> None:
        text = json.dumps(asdict(self), indent=1, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def available() -> list[str]:
        """Names of the profiles in data/devices/."""
        return sorted(path.stem for path in DEVICES.glob("*.json"))

    @classmethod
    def load(cls, name: str | Path) -> DeviceProfile:
        """A profile of data/devices/ by name, or any by path. A figure that it lacks is assumed.

        Raises:
            ValueError: there is none, a figure is not 0 <= low <= value <= high, or a field is not what the
                class says.
        """
        path = DEVICES / f"{name}.json" if str(name) in cls.available() else Path(name)
        if not path.is_file():
            raise ValueError(f"device profile {name}: expected one of {cls.available()}, or a file")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            given = {
                figure: Figure(**raw["figures"][figure]) for figure in FIGURES if figure in raw["figures"]
            }
            figures = _with_assumptions(given)
            unknown = [figure for figure in FIGURES if figure in raw["unknown"] or figure not in given]
            profile = cls(**raw | {"figures": figures, "unknown": tuple(unknown)})
            _check(profile, raw["unknown"])
            return profile
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}: not a device profile: {error!r}") from error


def _check(profile: DeviceProfile, unknown: object) -> None:
    for name, figure in profile.figures.items():
        least = 1e-9 if name.endswith("per_s") else 0
        if not 0 <= figure.low <= figure.value <= figure.high < np.inf or figure.low < least:
            raise ValueError(f"{name}: expected 0 <= low <= value <= high, a rate above 0, got {figure}")
    texts = [profile.name, profile.device, profile.source, profile.date]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"name, device, source, date: expected texts, got {texts}")
    if not isinstance(unknown, list) or not set(unknown) <= set(FIGURES):
        raise ValueError(f"unknown: expected a list of figures, got {unknown}")
    errors = profile.error or {}
    if not all(type(error) in (int, float) and 0 <= error < np.inf for error in errors.values()):
        raise ValueError(f"error: expected a number from 0 on for each regime, got {errors}")


def _with_assumptions(found: dict[str, Figure]) -> dict[str, Figure]:
    """The figures of FIGURES, in their order: those found, and for the others what is assumed."""
    figures = {}
    for name, meaning in FIGURES.items():
        base = figures[meaning.base].value if isinstance(meaning.base, str) else meaning.base
        why = f"assumed: {meaning.factor} times {meaning.base}; {meaning.why}"
        figures[name] = found.get(name) or _figure(
            base * np.array([meaning.low, meaning.factor, meaning.high]), why
        )
    return figures


def _figure(ends: Sequence[float], source: str) -> Figure:
    """Of low, value and high."""
    low, value, high = (float(f"{end:.4g}") for end in ends)
    return Figure(value, min(low, value), max(high, value), source)


def fit_profile(
    traces: pd.DataFrame | Sequence[pd.DataFrame],
    name: str = "fitted",
    source: str = "",
    date: str = "",
    without: pd.Index | None = None,
) -> DeviceProfile:
    """Read a profile out of one trace, or several of the same kind of device; see FIGURES for what none tells.

    Args:
        source: where the trace came from; the file's name by default.
        date: when it was recorded.
        without: index of device events that the fit must not look at; leaves `error` empty. For `validate`.

    Raises:
        ValueError: no device-to-device memcpy of known size.
    """
    traces = [traces] if isinstance(traces, pd.DataFrame) else list(traces)
    device = pd.concat([_device_side(trace, without) for trace in traces], ignore_index=True)
    host = pd.concat([trace.loc[trace["kind"] == "runtime", ["name", "dur_us"]] for trace in traces])
    if not (device["kind"].eq("memcpy") & device["bytes"].notna()).any():
        where = traces[0].attrs.get("source", "trace")
        raise ValueError(f"{where}: no device-to-device memcpy of known size to fit a profile from")
    found = _device_figures(device)
    figures = _with_assumptions(found | _host_figures(device, host))
    figures |= _foreach_figures(device, figures)
    figures = _with_assumptions({name: f for name, f in figures.items() if f.source.startswith("fitted")})
    unknown = tuple(name for name, figure in figures.items() if figure.source.startswith("assumed"))
    about = traces[0].attrs
    source = source or ", ".join(trace.attrs.get("source", "") for trace in traces)
    source += "; times in whole us" if about.get("resolution_us") == 1.0 else ""
    profile = DeviceProfile(name, about.get("device", ""), source, date, figures, unknown)
    if without is not None:
        return profile
    checked = pd.concat([validate(trace) for trace in traces]).dropna()
    error = checked["error"].abs().groupby(checked["regime"]).median().round(4).to_dict()
    return replace(profile, error=error)


def _device_side(trace: pd.DataFrame, without: pd.Index | None) -> pd.DataFrame:
    """Device events with their calls; `after_copy`: the one before on the stream was a memcpy, as this one is."""
    device = burst_copies(trace, min_copies=1, kinds=DEVICE_KINDS)
    before = device.groupby("track")
    device["after_copy"] = device["kind"].eq("memcpy") & before["kind"].shift().eq("memcpy")
    device["hidden"] = device.index.isin(() if without is None else without)
    # neither those events, nor what their ends say about the events after them
    device["ready_us"] = device["ready_us"].where(~device.groupby("track")["hidden"].shift(fill_value=False))
    return device[~device["hidden"]]


def _device_figures(device: pd.DataFrame) -> dict[str, Figure]:
    # work of a graph follows no call of its own, and a wait for another stream is no gap
    own = device[
        device["leads"] & device["released_us"].isna() & ~device["call"].astype(str).str.contains("Graph")
    ]
    waiting = own[own["call_end_us"] < own["ready_us"]]
    waiting = waiting[waiting["after_copy"]] if waiting["after_copy"].sum() >= 10 else waiting
    gap = (waiting["start_us"] - waiting["ready_us"]).clip(lower=0)
    gap = gap[gap <= 10 * max(gap.median(), 1)]
    late = own[own["call_end_us"] > own["ready_us"]]
    latency = late["start_us"] - late["call_start_us"]
    names = device["name"].astype(str)
    kernels = device[names.str.contains("elementwise_kernel")]
    copies = device[device["kind"].eq("copy_kernel") & (device["bytes"] <= SMALL)]
    few = len(copies) < 5
    found = {
        **_transfer(device[device["kind"] == "memcpy"], "memcpy"),
        **_transfer(device[device["kind"] == "memcpy_htod"], "htod"),
        "gap_us": _fitted(gap, "work that waited on the stream, mean", mean=True),
        "launch_latency_us": _fitted(latency[latency >= 0], "25th percentile on idle streams", (5, 25, 50)),
        "elementwise_floor_us": _fitted(kernels["dur_us"], "5th percentile of elementwise_kernel", (1, 5, 25))
        if few
        else _fitted(copies["dur_us"], "copy kernels of at most 16 KiB"),
        "fill_floor_us": _fitted(
            device["dur_us"][names.str.contains("FillFunctor")], "5th percentile of FillFunctor", (1, 5, 25)
        ),
    }
    return {name: figure for name, figure in found.items() if figure}


def _transfer(copies: pd.DataFrame, name: str) -> dict[str, Figure | None]:
    """Floor and rate of memcpys: the floor from the smallest, the rate from what lasts well beyond it."""
    copies = copies[copies["bytes"].notna()]
    small = copies[copies["bytes"] <= min(max(2048, copies["bytes"].min()), SMALL)]
    floor = _fitted(small["dur_us"], f"memcpys of at most {small['bytes'].max():.0f} bytes")
    least = floor.value if floor else 0
    long = copies[(copies["bytes"] >= LARGE) & (copies["dur_us"] >= 3 * least)]
    payload = long["dur_us"] - least
    rates = long["bytes"] / payload / 1e3
    rate = _fitted(rates, "memcpys of at least 256 KiB and three floors")
    if rate:  # weighs long copies more
        rate = replace(rate, value=float(f"{long['bytes'].sum() / payload.sum() / 1e3:.4g}"))
        rate = replace(rate, low=min(rate.low, rate.value), high=max(rate.high, rate.value))
    if rate and rate.value > FASTEST_GB_PER_S:
        rate = None
    return {f"{name}_floor_us": floor, f"{name}_gb_per_s": rate}


def _host_figures(device: pd.DataFrame, host: pd.DataFrame) -> dict[str, Figure]:
    alone = device[device["leads"] & device["foreach_us"].isna()]
    copies = alone[alone["kind"].isin(("memcpy", "copy_kernel"))]
    by_torch = copies[copies["op"] == COPY]
    between = by_torch["op_start_us"] - (by_torch["op_start_us"] + by_torch["op_us"]).shift()
    between = between[by_torch["after_copy"] & (between >= 0)]
    calls = host["name"].astype(str)
    found = {
        "host_copy_us": _fitted(by_torch["op_us"], "aten::copy_ around a copy on the device"),
        "host_between_us": _fitted(between, "end of one aten::copy_ to the next"),
        "host_memcpy_us": _fitted(copies["call_us"][copies["kind"] == "memcpy"], "runtime calls of memcpys"),
        "host_launch_us": _fitted(host["dur_us"][calls.str.contains("LaunchKernel")], "LaunchKernel"),
        "host_graph_us": _fitted(host["dur_us"][calls.str.contains("GraphLaunch")], "GraphLaunch"),
        "host_fill_us": _fitted(alone["op_us"][alone["op"] == "aten::fill_"], "aten::fill_ around a launch"),
    }
    return {name: figure for name, figure in found.items() if figure}


def _foreach_figures(device: pd.DataFrame, figures: dict[str, Figure]) -> dict[str, Figure]:
    """From `_foreach_copy_` calls on the fast route, whose number of tensors was recorded."""
    kernels = device[device["foreach_tensors"].notna() & device["name"].astype(str).map(is_foreach)]
    small = kernels["dur_us"] <= 3 * figures["elementwise_floor_us"].value  # a longer one moved bytes
    calls = kernels.drop_duplicates("foreach_start_us")
    one = calls["foreach_us"] - calls["foreach_tensors"] * figures["host_foreach_tensor_us"].value
    found = {
        "foreach_floor_us": _fitted(kernels["dur_us"][small], "kernels of _foreach_copy_", (0, 50, 100)),
        "host_foreach_us": _fitted(one[one > 0], "_foreach_copy_ less its tensors", (0, 50, 100)),
    }
    return {name: figure for name, figure in found.items() if figure}


def _fitted(
    values: pd.Series, what: str, percentiles: tuple[int, int, int] = (25, 50, 75), mean: bool = False
) -> Figure | None:
    """Percentiles of measured values, their mean instead of the middle one; None where there are none."""
    values = values.dropna().to_numpy(float)
    if not len(values):
        return None
    low, middle, high = np.percentile(values, percentiles)
    return _figure((low, values.mean() if mean else middle, high), f"fitted: {what}, n={len(values)}")


def validate(trace: pd.DataFrame, min_copies: int = 4) -> pd.DataFrame:
    """Predict the span of every burst of memcpys by a profile fitted without it.

    The earlier half of the bursts is predicted by a profile fitted on the rest of the trace, and the later
    half likewise. Given are the operations, the starts of their host calls and when work of another stream that
    they wait for ended: the whole stream is played, copies of the half take what the profile says, other work
    what was recorded. No device time of a predicted burst is used. A trace with fewer than ten bursts of four
    can be checked with min_copies=1.

    Returns:
        one row a burst: half, regime, n_copies, span_us, predicted_us, error (signed, relative; NaN where
        the rest of the trace has nothing to fit, or the burst no span).
    """
    bursts = find_copy_bursts(trace, min_copies, kinds=("memcpy",))
    copies = burst_copies(trace, min_copies, kinds=("memcpy",))
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
    device = device.sort_values(["track", "start_us"], kind="stable")
    model = profile["memcpy_floor_us"] + device["bytes"].fillna(0) / (profile["memcpy_gb_per_s"] * 1e3)
    duration = device["dur_us"].where(~device.index.isin(modelled), model)
    earliest = device["call_start_us"] + profile["launch_latency_us"]
    earliest = pd.concat([earliest, device["released_us"]], axis=1).max(axis=1).fillna(-np.inf)
    earliest = earliest.where(device.duplicated("track"), device["start_us"])  # where the recording begins
    step = duration + profile["gap_us"]
    done = step.groupby(device["track"]).cumsum() - step
    start = done + (earliest - done).groupby(device["track"]).cummax()
    return start, start + duration
