"""What a host and its GPU take for a copy: figures fitted from traces, each with its range and its source.

The model behind them: one host thread issues calls, each of which costs it time. The work of a call can
start one launch latency after its runtime call began, and one gap after the stream finished what came before;
it then takes a floor plus its bytes at a rate. No more is modelled: no caches, no contention, no Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import pandas as pd

from lib.profiles.bursts import burst_copies, find_copy_bursts
from lib.profiles.traces import DEVICE_KINDS

DEVICES = Path(__file__).resolve().parents[2] / "data" / "devices"
# Every figure of a profile, in us or GB/s (1e9 payload bytes a second), after those that it rests on: what it
# is; of which device events (`where`, "" if no trace at hand tells it) it is which value, and the percentiles
# for low, value and high; what is assumed else: a base (a figure, or a number) times factor, low and high.
FIGURES = pd.read_csv(DEVICES / "figures.csv", index_col="figure", keep_default_na=False).to_dict("index")
PERCENTILES = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1)
ENDS = {"fast": ("low", "high"), "middle": ("value", "value"), "slow": ("high", "low")}  # of times, of rates


@dataclass(frozen=True)
class Figure:
    """A figure, the range in which it may lie, and where it came from ("fitted: ..." or "assumed: ...")."""

    value: float
    low: float
    high: float
    source: str

    @classmethod
    def of(cls, low: float, value: float, high: float, source: str) -> Self:
        """Of four digits; a value outside its range widens it."""
        low, value, high = (float(f"{number:.4g}") for number in (low, value, high))
        return cls(value, min(low, value), max(high, value), source)


@dataclass(frozen=True)
class DeviceProfile:
    """What the model knows of a device and its host; as JSON in data/devices/.

    figures: each of FIGURES; one that is not given is assumed. error: regime ("host-bound", "queued",
    "blocked") -> median absolute relative error of burst spans, each predicted by a profile fitted without it
    (see `validate`); a regime that the trace lacks is missing.
    """

    name: str
    device: str
    source: str
    date: str
    figures: dict[str, Figure]
    error: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        figures = {}
        for name, row in FIGURES.items():
            figure = self.figures.get(name)
            if figure is None:
                base = row["base"]
                times = figures[base].value if base in figures else float(base)
                ends = (times * row[end] for end in ("low", "factor", "high"))
                figure = Figure.of(*ends, f"assumed: {row['factor']:g} times {base}; {row['why']}")
            least = 1e-9 * name.endswith("gb_per_s")  # a copy at no rate would never end
            if not least <= figure.low <= figure.value <= figure.high:
                raise ValueError(f"{name}: expected {least} <= low <= value <= high, got {figure}")
            figures[name] = figure
        object.__setattr__(self, "figures", figures)

    def __getitem__(self, figure: str) -> float:
        return self.figures[figure].value

    @property
    def unknown(self) -> tuple[str, ...]:
        """The figures that the trace could not tell, each of which is an assumption with its range."""
        return tuple(name for name, figure in self.figures.items() if figure.source.startswith("assumed"))

    def at(self, end: str) -> Self:
        """At one of ENDS of every figure but the runtime calls inside operators."""
        figures = dict(self.figures)
        for name in figures.keys() - {"host_memcpy_us", "host_launch_us"}:
            end_of_range = ENDS[end][name.endswith("gb_per_s")]
            figures[name] = replace(figures[name], value=getattr(figures[name], end_of_range))
        return replace(self, figures=figures)

    def label(self) -> str:
        """What a plot or table of modelled numbers has to say about them."""
        date = f" of {self.date}" if self.date else ""
        errors = ", ".join(f"{regime} {error:.1%}" for regime, error in self.error.items())
        device = self.device or "unknown device"
        line = f"modelled · {device}, profile {self.name}{date}"
        line += f" · median span error of single copies {errors or 'unknown'}"
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
    def load(cls, name: str | Path) -> Self:
        """A profile of data/devices/ by name, or any by path."""
        path = DEVICES / f"{name}.json"
        if not path.is_file():
            path = Path(name)
        if not path.is_file():
            raise ValueError(f"device profile {name}: expected one of {cls.available()}, or a file")
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}: not a device profile: {error}") from error


def fit_profile(
    traces: pd.DataFrame | Sequence[pd.DataFrame],
    name: str = "fitted",
    source: str = "",
    date: str = "",
    without: Sequence[int] = (),
) -> DeviceProfile:
    """Read a profile out of one trace, or several of alike machines; what they do not tell is assumed.

    source, date: of the recording; the file's name by default. without: index of device events that the fit
    must not look at, for `validate`; leaves `error` empty. Raises ValueError if there is no device-to-device
    memcpy of known size.
    """
    traces = [traces] if isinstance(traces, pd.DataFrame) else traces
    source = source or ", ".join(trace.attrs["source"] for trace in traces)
    device = pd.concat([_device_side(trace, without) for trace in traces], ignore_index=True)
    if device.query("kind == 'memcpy'").bytes.isna().all():
        raise ValueError(f"{source}: no device-to-device memcpy of known size to fit a profile from")
    profile = DeviceProfile(name, traces[0].attrs["device"], source, date, {})
    found = {}
    for figure, row in FIGURES.items():
        if not row["where"]:
            continue
        names = {known: profile[known] for known in FIGURES}  # as @name
        some = device.query(row["where"], local_dict=names, engine="python")
        values = some.eval(row["value"], local_dict=names, engine="python").dropna()
        if len(values):
            ends = values.describe(PERCENTILES)[row["percentiles"].split()]
            what = f"fitted: {row['value']} where {row['where']}, n={len(values)}"
            found[figure] = Figure.of(*ends, what)
            profile = replace(profile, figures=found)
    if len(without):
        return profile
    checked = pd.concat([validate(trace) for trace in traces]).dropna()
    error = checked.error.abs().groupby(checked.regime).median().round(4)
    return replace(profile, error=error.to_dict())


def _device_side(trace: pd.DataFrame, without: Sequence[int]) -> pd.DataFrame:
    """Device events, one row each, with what `where` and `value` of FIGURES name beside their columns.

    alone: the first work of a call that is in no foreach call. own: neither of a graph nor after a wait for
    another stream. after_copy: a memcpy after a memcpy on the stream, whose operator ended at op_before_us.
    """
    device = burst_copies(trace, 1, DEVICE_KINDS)
    device = device.astype({"call": str, "op": str, "foreach_inputs": str})
    device["hidden"] = device.index.isin(without)
    before = device.groupby("track").shift()  # noqa: F841, named below
    # a hidden event tells nothing, nor does its end of the event after it
    device = device.eval("""
        ready_us = ready_us.mask(@before.hidden == True)
        after_copy = kind == 'memcpy' and @before.kind == 'memcpy'
        op_before_us = @before.op_start_us + @before.op_us
        alone = leads and foreach_us.isna()
        own = leads and released_us.isna() and not call.str.contains('Graph')
        foreach_tensors = foreach_inputs.str.extract('^([0-9]+) ', expand=False).astype('float')
        smallest = bytes.where(kind == 'memcpy').min()
    """)
    return device.query("not hidden")


def validate(trace: pd.DataFrame, min_copies: int = 4) -> pd.DataFrame:
    """Predict the span of every burst of memcpys by a profile fitted without it: earlier half, later half.

    Given are the starts of host calls and when work of another stream ended that copies wait for; copies of
    the half take what the profile says, other work what was recorded. No device time of a predicted burst is
    used. Returns one row a burst: half ("earlier", "later"), regime, n_copies, span_us, predicted_us, error
    (signed, relative; NaN where the rest of the trace has nothing to fit, or the burst no span).
    """
    bursts = find_copy_bursts(trace, min_copies, ("memcpy",))
    copies = burst_copies(trace, min_copies, ("memcpy",))
    device = burst_copies(trace, 1, DEVICE_KINDS)  # stream by stream
    table = bursts[["regime", "n_copies", "span_us"]].assign(predicted_us=np.nan)
    table["half"] = np.where(bursts.index < len(bursts) // 2, "earlier", "later")
    for _, held_out in copies.groupby(copies.burst.map(table.half)):
        try:
            profile = fit_profile(trace, without=held_out.index)
        except ValueError:  # no other memcpy in the trace
            continue
        names = {figure: profile[figure] for figure in FIGURES}
        names |= {"later": np.fmax, "hidden": device.index.isin(held_out.index)}
        # begin = max(earliest, end of the one before + gap), which is, with done, the sum of all lengths and
        # gaps before, done + the maximum so far of (earliest - done)
        played = device.eval(
            """
            length_us = dur_us.mask(@hidden, @memcpy_floor_us + bytes.fillna(0) / @memcpy_gb_per_s / 1e3)
            launched_us = @later(call_start_us + @launch_latency_us, released_us).fillna(-1e300)
            earliest_us = launched_us.where(track.duplicated(), start_us)
            done_us = (length_us + @gap_us).groupby(track).cumsum() - length_us - @gap_us
            begin_us = done_us + (earliest_us - done_us).groupby(track).cummax()
            end_us = begin_us + length_us
            """,
            local_dict=names,
        )
        played = played.loc[held_out.index].groupby(held_out.burst)
        table["predicted_us"] = table.predicted_us.fillna(played.end_us.max() - played.begin_us.first())
    return table.eval("error = predicted_us / span_us.where(span_us > 0) - 1")
