"""Measure on one GPU what the notebooks say about GPUs: `python scripts/record.py --out data/recordings`.

Needs torch, numpy, pandas and msgspec. Makes DIR/<device>-<date>/ for `lib.workbench.recordings`, and writes
as it goes: whatever ends a run, the lines written so far are valid. Exit status: 0; 1 where the profiler
counted other launches than lib/launches.py predicts, outputs are not per_copy's, or something failed, each
printed; 2 without a CUDA or ROCm device; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pandas as pd
import torch

from lib.copies import Call, run
from lib.eagle import EagleConfig
from lib.eagle.model import DraftModel
from lib.launches import Launch, launches
from lib.profiles import DEVICE_KINDS, fit_profile, from_profiler, load_trace, to_chrome_trace
from lib.strategies import STRATEGIES
from lib.workbench.evidence import device_name
from lib.workbench.recordings import FORMAT, launch_kind, load
from lib.workbench.step import GRAPH, OPTIONS, StepCopies
from lib.workbench.timing import Timing, measure

WAYS = (*STRATEGIES, *OPTIONS)
TRACED = "llama3-8b"
SIZES = (8, 5, 1, 64, 2, 4, 16, 32, 3, 12, 24, 48)  # requests; 5, 3, 12, 24 and 48 are padded
STEPS = [(preset, "2026-06", SIZES) for preset in ("llama3-8b", "deepseek-v3")]
STEPS += [("llama3-8b", layout, (8, 5)) for layout in ("int32_seq_lens", "2026-10")]
REPLAYS = [("tiny", "2026-06", (8, 5)), ("llama3-8b", "2026-06", (8, 5, 1, 64))]
TENSORS = (1, 8, 64, 65)  # in one crossover
DTYPES = (torch.int16, torch.int64)  # bfloat16 is moved as int16
BYTES = tuple(2**n for n in range(8, 27))  # of each, 256 B to 64 MiB
DRIVER = "nvidia-smi --query-gpu=driver_version --format=csv,noheader || cat /sys/module/amdgpu/version"
Way = tuple[Callable[[], object], list[Launch]]  # how to run it, and the launches it should make


class Gpu:
    """The first CUDA or ROCm device: all that is asked of one. The tests put a stand-in there."""

    torch_device = "cuda"
    evidence = "recorded"

    def facts(self) -> dict[str, object]:
        driver = subprocess.run(DRIVER, shell=True, capture_output=True, text=True).stdout.split()
        versions = {"cuda": torch.version.cuda, "rocm": torch.version.hip}
        return {"device": device_name("cuda"), "driver": (driver or ["unknown"])[0], **versions}

    def measure(self, ways: dict[str, Way], rounds: int, calls: int) -> dict[str, Timing]:
        return measure({name: way for name, (way, _) in ways.items()}, rounds, calls, device="cuda")

    def trace(self, ways: dict[str, Way], repeats: int) -> pd.DataFrame:
        """One profiler run of the ways in turn, each in an annotation with its name and on an idle device."""
        for way, _ in ways.values():
            way()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for name, (way, _) in list(ways.items()) * repeats:
                with torch.profiler.record_function(name):
                    way()
                torch.cuda.synchronize()
        return from_profiler(profile)


def count_launches(trace: pd.DataFrame) -> dict[str, dict[str, int]]:
    """Launches by kind, by name of the annotations in a trace.

    Work belongs to the annotation in which its host call began; one graph launch counts once. Of several
    outcomes the most frequent is taken: the profiler may lose an event.
    """
    calls = trace[trace.kind == "runtime"].drop_duplicates("correlation").set_index("correlation")
    work = trace[trace.kind.isin(DEVICE_KINDS) & trace.correlation.isin(calls.index)]
    runtime = work.correlation.map(calls.name.astype(str))
    kinds = [launch_kind(*event) for event in zip(work.name.astype(str), work.kind.astype(str), runtime)]
    work = work.assign(launch=kinds, called_us=work.correlation.map(calls.start_us))
    work = work[(work.launch != "graph") | ~work.duplicated("correlation")]
    outcomes: dict[str, Counter] = {}
    for span in trace[trace.kind == "annotation"].itertuples():
        inside = work[work.called_us.between(span.start_us, span.start_us + span.dur_us)]
        outcome = tuple(sorted(Counter(inside.launch).items()))
        outcomes.setdefault(span.name, Counter())[outcome] += 1
    return {name: dict(seen.most_common(1)[0][0]) for name, seen in outcomes.items()}


class Recorder:
    """Writes one recording. Its meta has what was left out, "skipped", and what went wrong, "problems"."""

    def __init__(self, device: Gpu, out: Path, minutes: float, rounds: int) -> None:
        self.device, self.rounds, self.deadline = device, rounds, time.monotonic() + 60 * minutes
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        self.meta = {"format": FORMAT, "evidence": device.evidence, **device.facts(), "date": date}
        self.meta |= {"torch": torch.__version__, "host": device_name(), "skipped": [], "problems": []}
        name = re.sub("[^a-z0-9]+", "-", f"{self.meta['device']}-{date}".lower()).strip("-")
        numbered = (out / f"{name}-{number}" for number in itertools.count(2))
        self.path = next(p for p in itertools.chain([out / name], numbered) if not p.exists())
        (self.path / "traces").mkdir(parents=True)
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

    def write(
        self, table: str, case: dict, ways: dict[str, Way], calls: int, equal: dict | None = None
    ) -> None:
        """Time the ways and count their launches; a row a way. Where the profiler fails the times stay."""
        timings = self.device.measure(ways, self.rounds, calls)
        what = f"{table} {' '.join(str(value) for value in case.values())}"
        counted: dict[str, dict] = {}
        try:
            counted = count_launches(self.device.trace(ways, repeats=3))
        except Exception as error:
            self.note("problems", f"{what}: not counted: {reason(error)}")
        rows = []
        for name, (_, made) in ways.items():
            predicted = dict(Counter(launch.kind for launch in made))
            if counted.get(name, predicted) != predicted:
                self.note("problems", f"{what} {name}: predicted {predicted}, counted {counted[name]}")
            row = {"evidence": self.meta["evidence"], **case, "way": name, "equal": equal.get(name)}
            row |= {"predicted": predicted, "counted": counted.get(name)}
            row |= {
                side: np.round(getattr(timings[name], side), 3).tolist() for side in ("host_us", "gpu_us")
            }
            rows.append(json.dumps(row) + "\n")
        with open(self.path / f"{table}.jsonl", "a", encoding="utf-8") as file:
            file.writelines(rows)


def steps_of(
    recorder: Recorder, config: EagleConfig, batch_size: int, model: object
) -> dict[str, StepCopies]:
    """Every way's runners with the same batches, tried once; one that cannot run here is noted."""
    steps = {}
    for name in WAYS:
        try:
            step = StepCopies.build(config, name, batch_size, recorder.device.torch_device, model=model)
            step.replay() if model else step.copy_inputs()
            steps[name] = step
        except Exception as error:
            recorder.note("skipped", f"{name}, {config.layout}: {reason(error)}")
    return steps


def record_runs(recorder: Recorder, table: str, preset: str, layout: str, batch_size: int) -> None:
    """A row a way: the copies of a step, padding included; or both replays whole, their outputs compared."""
    config, model = EagleConfig.preset(preset, layout=layout), None
    if table == "replays":
        captured = (1 << (batch_size - 1).bit_length(),)
        config = dataclasses.replace(config, capture_batch_sizes=captured, max_context_len=256)
        model = DraftModel.random(config, recorder.device.torch_device)
    case = {"preset": preset, "layout": layout, "batch_size": batch_size}
    steps = steps_of(recorder, config, batch_size, model)
    if model is None:
        ways = {name: (step.copy_inputs, step.launches()) for name, step in steps.items()}
        return recorder.write(table, case, ways, 10, {})
    ways = {name: (step.replay, [*step.launches(), GRAPH, GRAPH]) for name, step in steps.items()}
    expected = [output.clone() for output in steps["per_copy"].replay()]
    equal = {name: all(map(torch.equal, step.replay(), expected)) for name, step in steps.items()}
    for name in (name for name in equal if not equal[name]):
        recorder.note("problems", f"replays {preset} {batch_size}: other outputs than per_copy by {name}")
    return recorder.write(table, case, ways, 1, equal)


def record_crossover(recorder: Recorder, n: int, dtype: torch.dtype, size: int) -> None:
    """A row a way of copying n tensors of `size` bytes."""
    on, half = recorder.device.torch_device, size // dtype.itemsize // 2
    into, out_of = torch.zeros(2, n, 2 * half + 64, dtype=dtype, device=on)
    dsts, srcs = ([row[: 2 * half].view(2, half) for row in side] for side in (into, out_of))
    # Two rows of a wider buffer: not contiguous as a pair, so `copy_` takes its elementwise kernel.
    wider = [row.as_strided((2, half), (half + 16, 1)) for row in out_of]
    calls = {
        "memcpy": [Call("copy_", [dst], [src]) for dst, src in zip(dsts, srcs)],
        "foreach": [Call("foreach", dsts, srcs)],
        "elementwise": [Call("copy_", [dst], [src]) for dst, src in zip(dsts, wider)],
    }
    if n == 1:  # the choice that `dma_bytes` makes
        small = torch.zeros(2, 8, 64, dtype=dtype, device=on)
        calls["in_group"] = [Call("foreach", [*small[0], *dsts], [*small[1], *srcs])]
        calls["beside_group"] = [Call("foreach", list(small[0]), list(small[1])), *calls["memcpy"]]
    ways = {name: (partial(run, made), launches(made)) for name, made in calls.items()}
    case = {"dtype": str(dtype)[6:], "n": n, "bytes": size}
    recorder.write("crossover", case, ways, 10 if n * size < 2**24 else 2, {})


def record_traces(recorder: Recorder, preset: str) -> None:
    """A trace of eight steps a way; and "calibration", from which the profile is fitted."""
    config, on = EagleConfig.preset(preset), recorder.device.torch_device
    cases = {}
    for name, step in steps_of(recorder, config, 8, None).items():
        cases[name] = {name: (step.copy_inputs, step.launches())}
    blocks = torch.zeros(2, 8, 2**22, dtype=torch.uint8, device=on)  # between fills: a burst of memcpys
    small = blocks.view(2, -1, 64)
    pairs = [Call("copy_", [dst], [src]) for dst, src in zip(*blocks)]
    calls = {"one fill": [Call("fill_", [small[0, 0]])], "8 of 4 MiB": pairs}
    for n in (2, 16, 64):
        calls[f"{n} in one call"] = [Call("foreach", list(small[0, :n]), list(small[1, :n]))]
    cases["calibration"] = {name: (partial(run, made), launches(made)) for name, made in calls.items()}
    for way, batch_size in itertools.product(
        ("grouped_foreach", "per_copy"), (8, 5, config.max_batch_size - 1)
    ):
        step = StepCopies.build(config, way, batch_size, on)
        cases["calibration"][f"{way} {batch_size}"] = (step.copy_inputs, step.launches())
    for name, ways in cases.items():
        trace = recorder.device.trace(ways, repeats=8)
        trace.attrs |= {key: recorder.meta[key] for key in ("device", "evidence")}
        to_chrome_trace(trace, recorder.path / "traces" / f"{name}.json.gz")
    source = "{evidence} by scripts/record.py, driver {driver}, torch {torch}".format(**recorder.meta)
    trace = load_trace(recorder.path / "traces" / "calibration.json.gz")
    profile = fit_profile(trace, recorder.path.name, source, recorder.meta["date"])
    profile.save(recorder.path / "profile.json")


def record(device: Gpu, out: Path, minutes: float = 8.0, quick: bool = False) -> tuple[Path, int]:
    """Record what fits into the time, the most wanted first; the folder made, and the exit status.

    quick: few cases, to see whether it works at all on a machine.
    """
    recorder = Recorder(device, out, minutes, rounds=5 if quick else 20)
    few = 2 if quick else None
    cases: list[tuple] = [(record_traces, TRACED)]
    for table, runs in (("steps", STEPS), ("replays", REPLAYS)):
        for preset, layout, sizes in runs[:few]:
            cases += [(record_runs, table, preset, layout, size) for size in sizes[:few]]
    sizes = BYTES[:: 6 if quick else 1]
    cases += itertools.product([record_crossover], TENSORS[:few], DTYPES[:few], sizes)
    for work, *arguments in cases:
        what = " ".join(map(str, [work.__name__.removeprefix("record_"), *arguments]))
        if time.monotonic() > recorder.deadline:
            recorder.note("skipped", f"{what}: time was up")
            continue
        try:  # the failure of one case leaves the others alone
            work(recorder, *arguments)
        except torch.OutOfMemoryError:
            recorder.note("skipped", f"{what}: no memory")
        except KeyboardInterrupt:
            recorder.note("skipped", f"{what} and the rest: stopped by Ctrl-C")
            return recorder.path, 130
        except Exception as error:
            recorder.note("problems", f"{what}: {reason(error)}")
    return recorder.path, int(bool(recorder.meta["problems"]))


def summary(path: Path) -> str:
    """One screen: a line a way for batch 8 of the first preset, what was left out, what went wrong."""
    recording = load(path)
    case = "batch_size == 8 and preset == 'llama3-8b' and layout == '2026-06'"
    lines = [recording.label(), f"dma_bytes: {recording.dma_bytes()}"]
    for row in recording.tables["steps"].query(case).itertuples():
        medians = f"host {np.median(row.host_us):.1f} us, GPU {np.median(row.gpu_us):.1f} us"
        lines.append(f"{row.way}: {row.counted}, {medians}")
    lines += [f"skipped: {text[:150]}" for text in recording.meta["skipped"][:10]]
    return "\n".join([*lines, *recording.meta["problems"][:10], str(path)])


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
