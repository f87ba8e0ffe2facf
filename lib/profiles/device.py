"""What a host and its GPU take for a copy: figures fitted from traces, each with its range and its source.

The model behind them: one host thread issues calls, each of which costs it time. The work of a call can
start one launch latency after its runtime call began, and one gap after the stream finished what came before;
it then takes a floor plus its bytes at a rate. No more is modelled: no caches, no contention, no Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd

from lib.profiles.bursts import burst_copies, find_copy_bursts
from lib.profiles.traces import DEVICE_KINDS

DEVICES = Path(__file__).resolve().parents[2] / "data" / "devices"
# Every figure of a profile, in us or GB/s (1e9 payload bytes a second), after those that it rests on: what it
# is; of which device events (`where`) it is which value, and the percentiles for low, value and high; and
# what is assumed where a trace does not tell it: a base (a figure, or a number) times factor, low and high.
_TABLE = pd.read_csv(DEVICES / "figures.csv", index_col="figure", keep_default_na=False)
FIGURES = _TABLE.to_dict("index")
FITTED = _TABLE[_TABLE["where"] != ""].to_dict("index")  # the others no trace at hand tells
PERCENTILES = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1)
# of a time, and of a rate
ENDS = {"fast": ("low", "high"), "middle": ("value", "value"), "slow": ("high", "low")}


@dataclass(frozen=True)
class Figure:
    """A figure, the range in which it may lie, and where it came from ("fitted: ..." or "assumed: ...")."""

    value: float
    low: float
    high: float
    source: str

    @classmethod
    def of(cls, low: float, value: float, high: float, source: str) -> Figure:
        """Of four digits; a value outside its range widens it."""
        numbers = [f"{number:.4g}" for number in (low, value, high)]
        low, value, high = map(float, numbers)
        return cls(value, min(low, value), max(high, value), source)


@dataclass(frozen=True)
class DeviceProfile:
    """What the model knows of a device and its host; as JSON in data/devices/.

    figures: each of FIGURES.
    error: regime ("host-bound", "queued", "blocked") -> median absolute relative error of burst spans, each
        predicted by a profile fitted without it (see `validate`); a regime that the trace lacks is missing.
    """

    name: str
    device: str
    source: str
    date: str
    figures: dict[str, Figure]
    error: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, figure in self.figures.items():
            least = 1e-9 * name.endswith("gb_per_s")  # a copy at no rate would never end
            if not least <= figure.low <= figure.value <= figure.high:
                raise ValueError(f"{name}: expected {least} <= low <= value <= high, got {figure}")

    def __getitem__(self, figure: str) -> float:
        return self.figures[figure].value

    @property
    def unknown(self) -> tuple[str, ...]:
        """The figures that the trace could not tell, each of which is an assumption with its range."""
        figures = self.figures.items()
        return tuple(name for name, figure in figures if figure.source.startswith("assumed"))

    def at(self, end: str) -> DeviceProfile:
        """At one of ENDS of every figure but the runtime calls inside operators."""
        figures = dict(self.figures)
        for name in figures.keys() - {"host_memcpy_us", "host_launch_us"}:
            figure = figures[name]
            end_of_range = ENDS[end][name.endswith("gb_per_s")]
            figures[name] = replace(figure, value=getattr(figure, end_of_range))
        return replace(self, figures=figures)

    def label(self) -> str:
        """What a plot or table of modelled numbers has to say about them."""
        device = self.device or "unknown device"
        date = f" of {self.date}" if self.date else ""
        errors = [f"{regime} {error:.1%}" for regime, error in self.error.items()]
        checked = ", ".join(errors) or "unknown"
        line = f"modelled · {device}, profile {self.name}{date}"
        line += f" · median span error of single copies {checked}"
        if "host_foreach_us" in self.unknown:
            line += " · foreach figures assumed"
        return line

    def save(self, path: str | Path) -> None:
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        Path(path).write_bytes(text + b"\n")

    @staticmethod
    def available() -> list[str]:
        """Names of the profiles in data/devices/."""
        return sorted(path.stem for path in DEVICES.glob("*.json"))

    @classmethod
    def load(cls, name: str | Path) -> DeviceProfile:
        """A profile of data/devices/ by name, or any by path. A figure that it lacks is assumed."""
        path = DEVICES / f"{name}.json"
        if not path.is_file():
            path = Path(name)
        if not path.is_file():
            raise ValueError(f"device profile {name}: expected one of {cls.available()}, or a file")
        try:
            profile = msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}: not a device profile: {error}") from error
        return replace(profile, figures=_assumed(profile.figures))


def _assumed(found: dict[str, Figure]) -> dict[str, Figure]:
    """Every figure of FIGURES: as found, or else as assumed."""
    figures = {}
    for name, row in FIGURES.items():
        base = row["base"]
        times = figures[base].value if base in figures else float(base)
        ends = [times * row[end] for end in ("low", "factor", "high")]
        source = f"assumed: {row['factor']:g} times {base}; {row['why']}"
        assumed = Figure.of(*ends, source)
        figures[name] = found.get(name, assumed)
    return figures


def fit_profile(
    traces: pd.DataFrame | Sequence[pd.DataFrame],
    name: str = "fitted",
    source: str = "",
    date: str = "",
    without: Sequence[int] = (),
) -> DeviceProfile:
    """Read a profile out of one trace, or several of alike machines; what they do not tell is assumed.

    Args:
        source, date: of the recording; the file's name by default.
        without: index of device events that the fit must not look at; leaves `error` empty. For `validate`.

    Raises:
        ValueError: no device-to-device memcpy of known size.
    """
    traces = [traces] if isinstance(traces, pd.DataFrame) else traces
    sources = [trace.attrs["source"] for trace in traces]
    source = source or ", ".join(sources)
    device = pd.concat([_device_side(trace, without) for trace in traces], ignore_index=True)
    if device.query("kind == 'memcpy'").bytes.isna().all():
        raise ValueError(f"{source}: no device-to-device memcpy of known size to fit a profile from")
    found = {}
    for fitted, row in FITTED.items():
        known = _assumed(found).items()
        names = {name: figure.value for name, figure in known}  # as @name
        where = row["where"]
        value = row["value"]
        some = device.query(where, local_dict=names, engine="python")
        values = some.eval(value, local_dict=names, engine="python").dropna()
        if len(values):
            ends = values.describe(PERCENTILES)
            ends = ends[row["percentiles"].split()]
            what = f"fitted: {value} where {where}, n={len(values)}"
            found[fitted] = Figure.of(*ends, what)
    gpu = traces[0].attrs["device"]
    profile = DeviceProfile(name, gpu, source, date, _assumed(found))
    if len(without):
        return profile
    checked = pd.concat([validate(trace) for trace in traces]).dropna()
    error = checked.error.abs().groupby(checked.regime).median().round(4)
    return replace(profile, error=error.to_dict())


def _device_side(trace: pd.DataFrame, without: Sequence[int]) -> pd.DataFrame:
    """Device events, one row each, with what `where` and `value` of FIGURES name beside their columns.

    alone: the first work of a call that is in no foreach call. own: neither of a graph nor after a wait for
    another stream. after_copy: the one before on the stream was a memcpy, as this one is. op_before_us: when
    that one's operator ended. smallest: the bytes of the smallest memcpy.
    """
    device = burst_copies(trace, min_copies=1, kinds=DEVICE_KINDS)
    device = device.astype({"name": str, "call": str, "op": str, "foreach_inputs": str})
    device["hidden"] = device.index.isin(without)
    before = device.groupby("track").shift()  # noqa: F841, named below
    tensors = device.foreach_inputs.str.extract(r"^(\d+) ", expand=False)
    device["foreach_tensors"] = tensors.astype(float)
    device["smallest"] = device.query("kind == 'memcpy'").bytes.min()
    # a hidden event tells nothing, nor does its end of the event after it
    device = device.eval("""
        ready_us = ready_us.mask(@before.hidden == True)
        after_copy = kind == 'memcpy' and @before.kind == 'memcpy'
        op_before_us = @before.op_start_us + @before.op_us
        alone = leads and foreach_us.isna()
        own = leads and released_us.isna() and not call.str.contains('Graph')
    """)
    return device[~device.hidden]


def validate(trace: pd.DataFrame, min_copies: int = 4) -> pd.DataFrame:
    """Predict the span of every burst of memcpys by a profile fitted without it.

    The earlier half of the bursts is predicted by a fit to the rest of the trace, the later half likewise.
    Given are the starts of host calls and when work of another stream ended that copies wait for: the whole
    stream is played, copies of the half take what the profile says, other work what was recorded. No device
    time of a predicted burst is used.

    Returns:
        one row a burst: half, regime, n_copies, span_us, predicted_us, error (signed, relative; NaN where
        the rest of the trace has nothing to fit, or the burst no span).
    """
    bursts = find_copy_bursts(trace, min_copies, kinds=("memcpy",))
    copies = burst_copies(trace, min_copies, kinds=("memcpy",))
    device = burst_copies(trace, min_copies=1, kinds=DEVICE_KINDS)
    device = device.sort_values(["track", "start_us"], kind="stable")
    table = bursts[["regime", "n_copies", "span_us"]].assign(predicted_us=np.nan)
    is_earlier = bursts.index < len(bursts) // 2
    table["half"] = np.where(is_earlier, "earlier", "later")
    for _, held_out in copies.groupby(copies.burst.map(table.half)):
        try:
            profile = fit_profile(trace, without=held_out.index)
        except ValueError:  # no other memcpy in the trace
            continue
        played = _play(device, held_out.index, profile).loc[held_out.index]
        bursts = played.groupby(held_out.burst)
        spans_us = bursts.end_us.max() - bursts.begin_us.first()
        table["predicted_us"] = table.predicted_us.fillna(spans_us)
    return table.eval("error = predicted_us / span_us.where(span_us > 0) - 1")


def _play(device: pd.DataFrame, modelled: pd.Index, profile: DeviceProfile) -> pd.DataFrame:
    """Device events, in stream order, with begin_us and end_us, if `modelled` ones were as the profile says.

    begin[i] = max(call[i] + latency, end[i-1] + gap) is a recurrence. With done[i], the sum of all durations
    and gaps before i, it becomes begin[i] = done[i] + max over j <= i of (call[j] + latency - done[j]).
    """
    first = ~device.duplicated("track")  # where the recording begins
    device = device.assign(first=first, hidden=device.index.isin(modelled))
    names = {
        "floor_us": profile["memcpy_floor_us"],
        "bytes_per_us": profile["memcpy_gb_per_s"] * 1e3,
        "latency_us": profile["launch_latency_us"],
        "gap_us": profile["gap_us"],
        "later": np.fmax,
    }
    return device.eval(
        """
        model_us = @floor_us + bytes.fillna(0) / @bytes_per_us
        length_us = dur_us.mask(hidden, model_us)
        launched = @later(call_start_us + @latency_us, released_us).fillna(-1e300)
        earliest = launched.mask(first, start_us)
        done = (length_us + @gap_us).groupby(track).cumsum() - length_us - @gap_us
        begin_us = done + (earliest - done).groupby(track).cummax()
        end_us = begin_us + length_us
    """,
        local_dict=names,
    )
