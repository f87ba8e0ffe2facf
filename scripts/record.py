"""Measure on one GPU what the notebooks say about GPUs: `python scripts/record.py --out data/recordings`.

Needs torch, numpy and pandas only. Makes DIR/<device>-<date>/ for `lib.workbench.recordings`, and writes as it
goes: whatever ends a run, the lines written so far are valid. Exit status: 0; 1 where launches that torch.profiler
counted are not those that lib/launches.py predicts, outputs not per_copy's, or something failed, each printed; 2
without a CUDA or ROCm device; 130 after Ctrl-C.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import datetime
import itertools
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lib.copies import Call, run
from lib.eagle import EagleConfig
from lib.eagle.model import DraftModel
from lib.launches import Launch, launches
from lib.profiles import DEVICE_KINDS, fit_profile, from_profiler, load_trace, to_chrome_trace
from lib.strategies import STRATEGIES
from lib.workbench.evidence import device_name
from lib.workbench.recordings import FORMAT, launch_kind, load
from lib.workbench.step import OPTIONS, REPLAY, StepCopies
from lib.workbench.timing import Timing, measure

REPORTED_SAVING_US = 48  # a step, in sglang pull request 28465; GPU, model and batch size are not stated
MAX_TRACE_BYTES = 200_000
WAYS = (*STRATEGIES, *OPTIONS)
SIZES = (8, 5, 1, 64, 2, 4, 16, 32, 3, 12, 24, 48)  # requests; 5, 3, 12, 24 and 48 are padded
STEPS = (  # preset, layout, batch sizes
    ("llama3-8b", "2026-06", SIZES),
    ("llama3-8b", "int32_seq_lens", (8, 5)),
    ("llama3-8b", "2026-10", (8, 5)),
    ("deepseek-v3", "2026-06", SIZES),
)
REPLAYS = (("tiny", "2026-06", (8, 5)), ("llama3-8b", "2026-06", (8, 5, 1, 64)))
TENSORS = (1, 8, 64, 65)  # in one crossover
BYTES = tuple(2**n for n in range(8, 27))  # of each, 256 B to 64 MiB
DRIVER = "nvidia-smi --query-gpu=driver_version --format=csv,noheader || cat /sys/module/amdgpu/version"


@dataclass(frozen=True)
class Way:
    """One way of doing something: how to run it, and the launches it should make."""

    run: Callable[[], object]
    launches: list[Launch]

    @classmethod
    def of(cls, calls: list[Call]) -> Way:
        return cls(partial(run, calls), launches(calls))

    @property
    def predicted(self) -> dict[str, int]:
        return dict(Counter(launch.kind for launch in self.launches))


class Gpu:
    """The first CUDA or ROCm device: all that is asked of one. The tests put a stand-in there."""

    torch_device = "cuda"
    evidence = "recorded"

    def facts(self) -> dict[str, object]:
        driver = subprocess.run(DRIVER, shell=True, capture_output=True, text=True).stdout.split()
        return {"device": device_name("cuda"), "driver": (driver or ["unknown"])[0],
                "cuda": torch.version.cuda, "rocm": torch.version.hip}  # fmt: skip

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def measure(self, ways: dict[str, Way], rounds: int, calls: int) -> dict[str, Timing]:
        return measure({name: way.run for name, way in ways.items()}, rounds, calls, device="cuda")

    def trace(self, ways: dict[str, Way], repeats: int) -> pd.DataFrame:
        """One profiler run of the ways in turn, each in an annotation with its name and on an idle device."""
        for way in ways.values():
            way.run()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for name, way in list(ways.items()) * repeats:
                with torch.profiler.record_function(name):
                    way.run()
                torch.cuda.synchronize()
        return from_profiler(profile)


def count_launches(trace: pd.DataFrame) -> dict[str, dict]:
    """By name of the annotations in a trace: counted, launches by kind; device_us, its work's time, a value a run.

    Work belongs to the annotation in which its host call began, and that of one graph launch counts once. Of
    several outcomes the most frequent is taken: the profiler may lose an event.
    """
    spans = trace[trace.kind == "annotation"].sort_values("start_us", ignore_index=True)
    calls = trace[trace.kind == "runtime"].drop_duplicates("correlation").set_index("correlation")
    work = trace[trace.kind.isin(DEVICE_KINDS) & trace.correlation.isin(calls.index)]
    called_us = work.correlation.map(calls.start_us)
    work = work.assign(span=np.searchsorted(spans.start_us, called_us, side="right") - 1)
    work = work[(work.span >= 0) & (called_us < (spans.start_us + spans.dur_us).to_numpy()[work.span])]
    runtime = work.correlation.map(calls.name.astype(str))
    events = zip(work.name.astype(str), work.kind.astype(str), runtime)
    work = work.assign(launch=[launch_kind(*event) for event in events])
    found: dict[str, dict] = {}
    for number, name in enumerate(spans.name.astype(str)):
        inside = work[work.span == number]
        once = inside[(inside.launch != "graph") | ~inside.duplicated("correlation")]
        outcome = tuple(sorted(Counter(once.launch).items()))
        of_name = found.setdefault(name, {"outcomes": Counter(), "device_us": []})
        of_name["outcomes"][outcome] += 1
        of_name["device_us"].append(round(float(inside.dur_us.sum()), 3))
    for of_name in found.values():
        ((outcome, _),) = of_name.pop("outcomes").most_common(1)
        of_name["counted"] = dict(outcome)
    return found


class Recorder:
    """Writes one recording. What is left out is in its meta's "skipped", what went wrong in its "problems"."""

    def __init__(self, device: Gpu, out: Path, minutes: float, rounds: int) -> None:
        """Make the folder; with its meta.json it is a recording, though one without rows."""
        self.device, self.rounds = device, rounds
        self.deadline = time.monotonic() + 60 * minutes
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        self.meta = {"format": FORMAT, "evidence": device.evidence, **device.facts(), "date": date,
                     "torch": torch.__version__, "host": device_name(), "skipped": [], "problems": []}  # fmt: skip
        name = re.sub("[^a-z0-9]+", "-", f"{self.meta['device']}-{date}".lower()).strip("-")
        for number in itertools.count(1):
            self.path = out / (name if number == 1 else f"{name}-{number}")
            try:
                (self.path / "traces").mkdir(parents=True)
                break
            except FileExistsError:
                continue
        self.save()

    def save(self) -> None:
        part = self.path / "meta.json.part"
        part.write_text(json.dumps(self.meta, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path / "meta.json")

    def note(self, what: str, text: str) -> None:
        """Add to "skipped" or "problems" what is not there yet."""
        if text not in self.meta[what]:
            self.meta[what].append(text)
            self.save()
            print(f"{what}: {text}", file=sys.stderr, flush=True)

    def attempt(self, what: str, work: Callable[..., None], *arguments: object) -> None:
        """Do one case, unless the time is up; its failure leaves the others alone."""
        if time.monotonic() > self.deadline:
            return self.note("skipped", f"{what}: time was up")
        try:
            work(*arguments)
        except torch.OutOfMemoryError:
            self.note("skipped", f"{what}: no memory")
        except Exception as error:
            self.note("problems", f"{what}: {reason(error)}")

    def write(self, table: str, ways: dict[str, Way], rows: dict[str, dict], calls: int, what: str) -> None:
        """Time the ways and count their launches; a row a way. Without a profiler the times stay."""
        timings = self.device.measure(ways, self.rounds, calls)
        counts: dict[str, dict] = {}
        try:
            counts = count_launches(self.device.trace(ways, repeats=3))
        except Exception as error:
            self.note("problems", f"{what}: not counted: {reason(error)}")
        lines = []
        for name, way in ways.items():
            found = counts.get(name, {"counted": None, "device_us": None})
            if found["counted"] not in (None, way.predicted):
                text = f"{what}, {name}: predicted {way.predicted}, counted {found['counted']}"
                self.note("problems", text)
            row = {"evidence": self.meta["evidence"], **rows[name], "predicted": way.predicted, **found}
            row["host_us"] = np.round(timings[name].host_us, 3).tolist()
            row["gpu_us"] = np.round(timings[name].gpu_us, 3).tolist()
            if "per_copy" in timings:
                saved = np.subtract(timings["per_copy"].gpu_us, timings[name].gpu_us)
                row["saved_us"] = np.percentile(saved, (25, 50, 75)).round(3).tolist()
            lines.append(json.dumps(row) + "\n")
        with open(self.path / f"{table}.jsonl", "a", encoding="utf-8") as file:
            file.writelines(lines)


def steps_of(
    recorder: Recorder, config: EagleConfig, batch_size: int, model: DraftModel | None = None
) -> Iterator[tuple[str, StepCopies, list[Tensor]]]:
    """Every way's runners with the same batches, and with a model their outputs; one that cannot run is noted."""
    for name in WAYS:
        try:
            step = StepCopies.build(config, name, batch_size, recorder.device.torch_device, model=model)
            outputs = [tensor.clone() for tensor in step.replay()] if model else step.copy_inputs() or []
            yield name, step, outputs
        except Exception as error:
            recorder.note("skipped", f"{name}, {config.layout}: {reason(error)}")


def record_steps(recorder: Recorder, preset: str, layout: str, batch_size: int) -> None:
    """A row a way: the copies of a step, padding included."""
    config = EagleConfig.preset(preset, layout=layout)
    case = {"preset": preset, "layout": layout, "batch_size": batch_size}
    ways, rows = {}, {}
    for name, step, _ in steps_of(recorder, config, batch_size):
        ways[name] = Way(step.copy_inputs, step.launches())
        rows[name] = case | {"way": name}
    recorder.write("steps", ways, rows, 10, f"steps {preset} {layout} {batch_size}")


def record_replays(recorder: Recorder, preset: str, layout: str, batch_size: int) -> None:
    """A row a way: both replays whole, and whether their outputs are per_copy's bit by bit."""
    captured = (1 << (batch_size - 1).bit_length(),)
    config = EagleConfig.preset(preset, layout=layout, capture_batch_sizes=captured, max_context_len=256)
    model = DraftModel.random(config, recorder.device.torch_device)
    case = {"preset": preset, "layout": layout, "batch_size": batch_size}
    what = f"replays {preset} {layout} {batch_size}"
    ways, rows, expected = {}, {}, None
    for name, step, outputs in steps_of(recorder, config, batch_size, model):
        expected = expected or outputs
        equal = all(map(torch.equal, outputs, expected))
        if not equal:
            recorder.note("problems", f"{what}: {name} leaves other bits than per_copy")
        ways[name] = Way(step.replay, [*step.launches(), REPLAY, REPLAY])
        rows[name] = case | {"way": name, "equal": equal}
    recorder.write("replays", ways, rows, 1, what)


def record_crossover(recorder: Recorder, n: int, dtype: torch.dtype, sizes: Sequence[int]) -> None:
    """A row a size and way of copying n tensors."""
    room = 0.9 * recorder.device.free_bytes() / 2
    fitting = [size for size in sizes if n * (size + 512) <= room]
    if len(fitting) < len(sizes):
        recorder.note(
            "skipped", f"crossover: {n} tensors of more than {max(fitting, default=0)} bytes: no memory"
        )
    for size in fitting:
        half = size // dtype.itemsize // 2
        into, out_of = torch.zeros(2, n, 2 * half + 64, dtype=dtype, device=recorder.device.torch_device)
        dsts, srcs = ([row[: 2 * half].view(2, half) for row in side] for side in (into, out_of))
        # Two rows of a wider buffer: not contiguous as a pair, so `copy_` takes its elementwise kernel.
        wider = [row.as_strided((2, half), (half + 16, 1)) for row in out_of]
        calls = {
            "memcpy": [Call("copy_", [dst], [src]) for dst, src in zip(dsts, srcs)],
            "foreach": [Call("foreach", dsts, srcs)],
            "elementwise": [Call("copy_", [dst], [src]) for dst, src in zip(dsts, wider)],
        }
        if n == 1:  # the choice that `dma_bytes` makes
            small = torch.zeros(2, 8, 64, dtype=dtype, device=recorder.device.torch_device)
            calls["in_group"] = [Call("foreach", [*small[0], *dsts], [*small[1], *srcs])]
            calls["beside_group"] = [Call("foreach", list(small[0]), list(small[1])), *calls["memcpy"]]
        ways = {name: Way.of(made) for name, made in calls.items()}
        case = {"dtype": str(dtype).removeprefix("torch."), "n": n, "bytes": size}
        rows = {name: case | {"way": name} for name in ways}
        recorder.write(
            "crossover", ways, rows, 10 if n * size < 2**24 else 2, f"crossover {n} of {size} bytes"
        )


def record_traces(recorder: Recorder, preset: str) -> None:
    """A trace of eight steps a way; and "calibration", from which the profile is fitted."""
    config, on = EagleConfig.preset(preset), recorder.device.torch_device
    cases = {
        name: {name: Way(step.copy_inputs, step.launches())}
        for name, step, _ in steps_of(recorder, config, 8)
    }
    blocks = torch.zeros(2, 8, 2**22, dtype=torch.uint8, device=on)
    flag = torch.zeros(1, device=on)
    cases["calibration"] = ways = {  # each run of memcpys begins after another kernel: a burst of its own
        "fill": Way.of([Call("fill_", [flag], [])]),
        "8 memcpys of 4 MiB": Way.of([Call("copy_", [dst], [src]) for dst, src in zip(*blocks)]),
    }
    for name, batch_size in itertools.product(
        ("grouped_foreach", "per_copy"), (8, 5, config.max_batch_size - 1)
    ):
        step = StepCopies.build(config, name, batch_size, on)
        ways[f"{name}, batch {batch_size}"] = Way(step.copy_inputs, step.launches())
    small = blocks.view(2, -1, 64)
    for n in (2, 16, 64):  # how the host's time grows with the tensors
        ways[f"{n} in one call"] = Way.of([Call("foreach", list(small[0, :n]), list(small[1, :n]))])
    for name, ways in cases.items():
        trace, path = recorder.device.trace(ways, repeats=8), recorder.path / "traces" / f"{name}.json.gz"
        trace.attrs |= {key: recorder.meta[key] for key in ("device", "evidence")}
        to_chrome_trace(trace, path)
        if path.stat().st_size > MAX_TRACE_BYTES:
            path.unlink()
            recorder.note("skipped", f"traces: {name}, more than {MAX_TRACE_BYTES} bytes")


def record_profile(recorder: Recorder) -> None:
    meta = recorder.meta
    source = f"{meta['evidence']} by scripts/record.py, driver {meta['driver']}, torch {meta['torch']}"
    profile = fit_profile(
        load_trace(recorder.path / "traces" / "calibration.json.gz"), recorder.path.name, source, meta["date"]
    )
    profile.save(recorder.path / "profile.json")


def record(device: Gpu, out: Path, minutes: float = 8.0, quick: bool = False) -> tuple[Path, int]:
    """Record what fits into the time, the most wanted first; the folder made, and the exit status.

    quick: few cases, to see whether it works at all on a machine.
    """
    recorder = Recorder(device, out, minutes, rounds=5 if quick else 20)
    few = 2 if quick else None
    sizes = BYTES[::6] if quick else BYTES
    cases: list[tuple] = [("traces", record_traces, "llama3-8b"), ("profile", record_profile)]
    for part, function, table in (("steps", record_steps, STEPS), ("replays", record_replays, REPLAYS)):
        for preset, layout, batch_sizes in table[:few]:
            cases += [
                (f"{part} {preset} {layout} {n}", function, preset, layout, n) for n in batch_sizes[:few]
            ]
    for n, dtype in itertools.product(
        TENSORS, (torch.int16, torch.int64)[:few]
    ):  # bfloat16 is moved as int16
        cases.append((f"crossover {n} {dtype}", record_crossover, n, dtype, sizes))
    try:
        for case in cases:
            recorder.attempt(*case)
    except KeyboardInterrupt:
        recorder.note("skipped", "the rest: stopped by Ctrl-C")
        return recorder.path, 130
    return recorder.path, int(bool(recorder.meta["problems"]))


def summary(path: Path) -> str:
    """One screen: a line a way for batch 8 of the first preset, what was left out, what went wrong."""
    recording = load(path)
    case = {"preset": "llama3-8b", "layout": "2026-06"}
    lines = [recording.label()]
    for table, batch_size in (("steps", 8), ("steps", 5), ("replays", 8)):
        rows = recording.where(table, batch_size=batch_size, **case)
        if len(rows):
            shown = pd.DataFrame({"launches": rows.counted, "host_us": rows.host_us.map(np.median),
                                  "gpu_us": rows.gpu_us.map(np.median), "saved_us": rows.saved_us})  # fmt: skip
            lines += [f"{table}, {batch_size} requests", shown.set_axis(rows.way).round(1).to_string()]
    lines.append(
        f"pull request 28465 reports {REPORTED_SAVING_US} us less a step; GPU and model are not named"
    )
    lines.append(f"dma_bytes: {recording.dma_bytes()}")
    for what in ("skipped", "problems"):
        lines += [f"{what}: {text[:150]}" for text in recording.meta[what][:10]]
    return "\n".join([*lines, str(path)])


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="record.py", description="Record copies on this GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for recordings, e.g. data/recordings")
    parser.add_argument("--minutes", type=float, default=8.0, help="after this time no new case is begun")
    parser.add_argument("--quick", action="store_true", help="few cases, to see whether it works here")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(f"record.py: no CUDA or ROCm device: torch {torch.__version__} finds none", file=sys.stderr)
        return 2
    path, status = record(Gpu(), options.out, options.minutes, options.quick)
    print(summary(path))
    return status


if __name__ == "__main__":
    sys.exit(main())
