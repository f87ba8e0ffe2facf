"""Measure on one GPU what the notebooks say about GPUs: `python -m lib.record --out DIR`, no install needed.

Makes DIR/<device>-<date>/ for `lib.recordings`, and writes as it goes: a run cut short (--minutes, Ctrl-C, a
kill) leaves a valid, smaller recording. Exit status: 0; 1 where launches that torch.profiler counted are not
those that lib/routes.py predicts, bits not per_copy's, or a part failed, each printed; 2 without a CUDA or
ROCm device; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lib import recordings
from lib.device_model import DeviceProfile, Figure, fit_profile
from lib.eagle import EagleConfig, EagleDraftCudaGraphRunner, EagleDraftExtendCudaGraphRunner
from lib.eagle.model import DraftModel
from lib.evidence import device_name
from lib.grouped_copy import copy_groups
from lib.recordings import Recording
from lib.routes import Launch, fill_launch, routed_launches
from lib.step import StepCopies
from lib.strategies import STRATEGIES
from lib.timing import Timing, measure
from lib.traces import DEVICE_KINDS, FOREACH_COPY, burst_copies, from_profiler, to_chrome_trace

REPORTED_SAVING_US = 48  # a step, in sglang pull request 28465; GPU, model and batch size are not stated
MAX_TRACE_BYTES = 200_000
REPLAY = Launch("graph", 0, 0, "graph replay", "graph")
# Work on a device, as "<runtime call> <kind of event>: <name>", to `routes.Launch.kind`; the first that fits.
LAUNCH_KINDS = {
    "GraphLaunch": "graph",
    FOREACH_COPY: "foreach",
    r": _copy\b|fused_copy": "fused",  # lib/fused_copy.py, and its name in lib/device_model.py
    "FillFunctor": "fill",
    " memcpy: |rocclr_copyBuffer": "memcpy",  # ROCm's driver copies by a kernel of that name
    " copy_kernel: ": "elementwise",
}
DRIVER = "nvidia-smi --query-gpu=driver_version --format=csv,noheader || cat /sys/module/amdgpu/version"
SIZES = (8, 5, 1, 64, 2, 4, 16, 32, 3, 12, 24, 48)  # requests; 5, 3, 12, 24 and 48 are padded
Run = tuple[str, str, int]  # preset, layout, batch size


@dataclass(frozen=True)
class Plan:
    """The cases of every part, arguments of its function in PARTS; what matters most comes first."""

    traces: tuple[tuple[str], ...] = (("llama3-8b",),)
    steps: tuple[Run, ...] = (
        *product(("llama3-8b", "deepseek-v3"), ("int64_seq_lens",), SIZES),  # hidden sizes 4096 and 7168
        *product(("llama3-8b",), ("int32_seq_lens",), SIZES[:2]),  # the layout that converts
    )
    replays: tuple[Run, ...] = (
        *product(("tiny",), ("int64_seq_lens",), (8, 5)),
        *product(("llama3-8b",), ("int64_seq_lens",), (8, 5, 1, 64)),
    )
    crossover: tuple[tuple[int, torch.dtype], ...] = tuple(  # tensors; bfloat16 is moved as int16
        product((1, 65, 8, 2, 4, 16, 32, 64), (torch.int16, torch.int64))
    )
    profile: tuple[tuple[()], ...] = ((),)
    sizes: tuple[int, ...] = tuple(2**n for n in range(8, 27))  # bytes a tensor, 256 B to 64 MiB
    rounds: int = 20


class Way(NamedTuple):
    """One way of doing something: how to run it, what it should launch, the pairs it copies with names."""

    run: Callable[[], object]
    launches: list[Launch]
    pairs: list[tuple[str, Tensor, Tensor]]

    @property
    def predicted(self) -> dict[str, int]:
        """Launches by kind."""
        return dict(Counter(launch.kind for launch in self.launches))


def copies(dsts: Sequence[Tensor], srcs: Sequence[Tensor], fused: int = 0) -> Way:
    """The first `fused` pairs by one foreach call, then every other one by its own `copy_`."""
    route = [range(fused)] if fused else [], range(fused, len(dsts))
    pairs = [("tensor", *pair) for pair in zip(dsts, srcs)]
    return Way(partial(copy_groups, dsts, srcs, *route), routed_launches(dsts, srcs, *route), pairs)


def halves(step: StepCopies) -> tuple[tuple, tuple]:
    """(runner, batch) of the draft, and of the draft-extend."""
    return (step.draft, step.draft_batch), (step.draft_extend, step.draft_extend_batch)


def step_way(step: StepCopies, replay: bool = False) -> Way:
    """The copies of one step, padding included; with `replay` both replays whole, graphs included."""

    def run() -> None:
        for runner, batch in halves(step):
            runner.last_plan = None  # else a plan skips the padding of its last run, which `launches` counts
            (runner.replay if replay else runner.copy_inputs)(batch)

    launches, pairs = [], []
    for runner, batch in halves(step):
        launches += [*runner.launches(batch), *[REPLAY] * replay]
        pairs += [(f"{runner.table}.{name}", d, s) for d, s, name in zip(*runner.buffers.pairs(batch))]
    return Way(run, launches, pairs)


class GpuDevice:
    """The first CUDA or ROCm device: all that is asked of one. The tests put a stand-in there."""

    torch_device = "cuda"

    def facts(self) -> dict[str, object]:
        driver = subprocess.run(DRIVER, shell=True, capture_output=True, text=True).stdout.split()
        return {"device": device_name("cuda"), "driver": driver[0] if driver else "unknown",
                "cuda": torch.version.cuda, "rocm": torch.version.hip}  # fmt: skip

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def measure(self, ways: dict[str, Way], rounds: int, calls: int) -> dict[str, Timing]:
        return measure({name: way.run for name, way in ways.items()}, rounds, calls, device="cuda")

    def trace(self, ways: dict[str, Way], repeats: int) -> pd.DataFrame:
        """One profiler run of the ways in turn, `repeats` times, after one turn outside of it.

        Each call is in an annotation with the way's name, and finds the device idle.
        """
        for way in ways.values():
            way.run()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as prof:
            for name, way in list(ways.items()) * repeats:
                with torch.profiler.record_function(name):
                    way.run()
                torch.cuda.synchronize()
        return from_profiler(prof)


def count_launches(trace: pd.DataFrame) -> dict[str, dict]:
    """By name of the annotations in a trace: counted, launches by kind; device_us and op_us, a value a call.

    Work belongs to the annotation in which its host call began, and that of one graph launch counts once. Of
    several outcomes the most frequent is taken: the profiler may lose an event. op_us: the operator around
    the first launch.
    """
    spans = trace[trace["kind"] == "annotation"].sort_values("start_us", ignore_index=True)
    work = burst_copies(trace, min_copies=1, kinds=DEVICE_KINDS).dropna(subset="call")
    work["span"] = np.searchsorted(spans["start_us"], work["call_start_us"], side="right") - 1
    ends = (spans["start_us"] + spans["dur_us"]).to_numpy()
    work = work[(work["span"] >= 0) & (work["call_start_us"] < ends[work["span"]])]
    work["launch"] = [launch_kind(*event) for event in zip(work["name"], work["kind"], work["call"])]
    us = work.groupby("span").agg(device_us=("dur_us", "sum"), op_us=("op_us", "first"))
    us = us.reindex(spans.index).fillna(0.0).round(3)
    launched = work[(work["launch"] != "graph") | ~work.duplicated("correlation")].groupby("span")["launch"]
    outcomes = {span: tuple(sorted(Counter(kinds).items())) for span, kinds in launched}
    found = {}
    for name, calls in spans.groupby(spans["name"].astype(str)).groups.items():
        (outcome, _), *_ = Counter(outcomes.get(call, ()) for call in calls).most_common()
        found[name] = {"counted": dict(outcome)} | us.loc[calls].to_dict("list")
    return found


def launch_kind(name: str, kind: str, call: str) -> str:
    """The `routes.Launch.kind` of an event on the device; for any other event its own kind and name."""
    event = f"{call} {kind}: {name}"
    known = (ours for pattern, ours in LAUNCH_KINDS.items() if re.search(pattern, event))
    return next(known, f"{kind} {name[:80]}")


class Recorder:
    """Writes one recording. Any "problems" in its meta.json make the exit status 1."""

    def __init__(self, device: GpuDevice, out: Path, minutes: float) -> None:
        """Make the folder; with its meta.json it is a recording, though one without rows.

        Only what a GpuDevice measured is called recorded. Otherwise the device's name, and so the folder's,
        that of every trace and of the profile, begins with "modelled".
        """
        self.device, self.deadline = device, time.monotonic() + 60 * minutes
        facts, evidence = device.facts(), "recorded" if type(device) is GpuDevice else "modelled"
        name = facts["device"] if evidence == "recorded" else f"modelled {facts['device']}"
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        self.meta = {"format": recordings.FORMAT, "evidence": evidence, **facts, "device": name, "date": date,
                "torch": torch.__version__, "host": device_name(),
                "parts": dict.fromkeys(PARTS, "not reached"), "skipped": [], "problems": []}  # fmt: skip
        folder = f"{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}-{date}"
        names = chain([folder], (f"{folder}-{n}" for n in count(2)))
        self.path = next(out / name for name in names if not (out / name).exists())
        (self.path / "traces").mkdir(parents=True)
        self.save()

    def save(self) -> None:
        part = self.path / "meta.json.part"
        part.write_text(json.dumps(self.meta, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path / "meta.json")

    def note(self, what: str, text: str) -> None:
        """Add to "skipped" or "problems" what is not there yet; a problem is printed."""
        if text in self.meta[what]:
            return
        self.meta[what].append(text)
        self.save()
        if what == "problems":
            print(text, file=sys.stderr, flush=True)

    def cases(self, part: str, cases: Sequence) -> Iterator:
        """Hand out the cases of a part while there is time."""
        self.meta["parts"][part] = "cut short"
        self.save()
        for i, case in enumerate(cases):
            if time.monotonic() > self.deadline:
                return self.note("skipped", f"{part}: {len(cases) - i} of {len(cases)} cases, time was up")
            yield case
        self.meta["parts"][part] = "done"
        self.save()

    def write(self, table: str, rows: Iterable[dict]) -> None:
        lines = "".join(json.dumps({"evidence": self.meta["evidence"]} | row) + "\n" for row in rows)
        with open(self.path / f"{table}.jsonl", "a", encoding="utf-8") as file:
            file.write(lines)

    def count(self, ways: dict[str, Way], case: str) -> dict[str, dict]:
        """`count_launches`, and "predicted", of every way; one that differs from it is a problem."""
        found = count_launches(self.device.trace(ways, repeats=3))
        for name, way in ways.items():
            found[name]["predicted"] = way.predicted
            if way.predicted != (counted := found[name]["counted"]):
                text = f"{case}, {name}: predicted {way.predicted}, counted {counted}"
                self.note("problems", "\n  ".join([text, *self.suspects(way)]))
        return found

    def suspects(self, way: Way) -> list[str]:
        """The pairs whose copy alone differs from its prediction, too, else all pairs; equal ones once."""
        pairs = [pair for pair in way.pairs if pair[1].numel()]
        alone = {f"{i} {fused}": copies([pairs[i][1]], [pairs[i][2]], fused)
                 for i, fused in product(range(len(pairs)), (0, 1))}  # fmt: skip
        found = count_launches(self.device.trace(alone, repeats=1)) if alone else {}
        wrong = {int(key.split()[0]) for key in alone if alone[key].predicted != found[key]["counted"]}
        described = (
            f"{name}: {' <- '.join(f'{tuple(t.shape)} strides {t.stride()} {t.dtype}' for t in tensors)}"
            for i, (name, *tensors) in enumerate(pairs)
            if i in wrong or not wrong
        )
        return list(dict.fromkeys(described))


def steps_of(
    recorder: Recorder, part: str, config: EagleConfig, batch_size: int, model: DraftModel | None = None
) -> dict[str, StepCopies]:
    """Runners of every strategy with the same batches, tried once; what cannot run here is skipped by name.

    model: the one to replay; without it only the copies of the inputs are tried.
    """
    on, steps = recorder.device.torch_device, {}
    first = StepCopies.build(config, "per_copy", batch_size, on)
    for name in STRATEGIES:
        try:
            draft = EagleDraftCudaGraphRunner(config, name, on, model)
            draft_extend = EagleDraftExtendCudaGraphRunner(config, name, on, model)
            batches = draft.place(first.draft_batch), draft_extend.place(first.draft_extend_batch)
            step = StepCopies(draft, draft_extend, *batches)
            step_way(step, replay=model is not None).run()
            steps[name] = step
        except Exception as error:
            if name == "per_copy":  # with which all others are compared
                raise
            recorder.note("skipped", f"{part}: {name}, {config.layout}: {_reason(error)}")
    return steps


def record_runs(
    recorder: Recorder, plan: Plan, preset: str, layout: str, batch_size: int, replay: bool
) -> None:
    """A row a strategy: the copies of a step, or with `replay` both replays whole, with their graphs."""
    part, config, model = "replays" if replay else "steps", EagleConfig.preset(preset, layout=layout), None
    if replay:
        captured = (1 << (batch_size - 1).bit_length(),)
        config = replace(config, capture_batch_sizes=captured, max_context_len=256)
        model = DraftModel.random(config, recorder.device.torch_device)
    steps = steps_of(recorder, part, config, batch_size, model)
    ways = {name: step_way(step, replay) for name, step in steps.items()}
    timings = recorder.device.measure(ways, plan.rounds, calls=1 if replay else 10)
    case, rows = f"{part}: {preset}, {layout}, batch {batch_size}", []
    counts, expected = recorder.count(ways, case), results(steps["per_copy"], replay)
    for name, step in steps.items():
        found, padded = results(step, replay), step.draft.padded_batch_size(batch_size) > batch_size
        equal = all(map(torch.equal, found, expected)) if found else None
        if equal is False:
            recorder.note("problems", f"{case}: {name} leaves other bits than per_copy")
        saved = np.subtract(timings["per_copy"].gpu_us, timings[name].gpu_us)
        row = {"preset": preset, "hidden_size": config.hidden_size, "layout": layout,
               "batch_size": batch_size, "padded": padded, "strategy": name, "equal": equal,
               "saved_us": np.percentile(saved, (25, 50, 75)).round(3).tolist()}  # fmt: skip
        rows.append(row | _samples(timings[name]) | counts[name])
    recorder.write(part, rows)


def results(step: StepCopies, replay: bool) -> list[Tensor]:
    """The bits of both replays' outputs, or of what `copy_inputs` writes, padding included.

    None of the latter where the strategy has graphs read elsewhere than in the runners' buffers.
    """
    tensors: list[Tensor] = []
    for runner, batch in halves(step):
        if replay:
            tensors += map(torch.clone, runner.replay(batch))
        elif not runner.fixed:
            pads = runner.buffers.pads(batch, runner.padded_batch_size(batch.batch_size))
            tensors += [*runner.buffers.pairs(batch)[0], *(dst for dst, _ in pads)]
    return [t.contiguous().view(-1).view(torch.uint8) for t in tensors]


def record_crossover(recorder: Recorder, plan: Plan, n: int, dtype: torch.dtype) -> None:
    """A row a size and way of copying n tensors."""
    room, on = 0.9 * recorder.device.free_bytes() / 2, recorder.device.torch_device
    sizes = [size for size in plan.sizes if n * (size + 512) <= room]
    if len(sizes) < len(plan.sizes):
        too_large = plan.sizes[len(sizes)]
        recorder.note("skipped", f"crossover: {n} tensors of {too_large} bytes or more: no memory")
    elements = max(sizes, default=0) // dtype.itemsize + 64
    into, out_of = torch.zeros(2, n, elements, dtype=dtype, device=on)
    small = torch.zeros(2, 8, 64, dtype=dtype, device=on)
    ways, rows = {}, {}
    for size in sizes:
        half = size // dtype.itemsize // 2
        dsts, srcs = ([t[: 2 * half].view(2, half) for t in side] for side in (into, out_of))
        # Two rows of a wider buffer: not contiguous as a pair, so `copy_` takes its elementwise kernel.
        wider = [t.as_strided((2, half), (half + 16, 1), t.storage_offset()) for t in out_of]
        of_size = {"memcpy": copies(dsts, srcs), "foreach": copies(dsts, srcs, fused=n),
                   "elementwise": copies(dsts, wider)}  # fmt: skip
        if n == 1:  # the choice that `dma_bytes` makes
            grouped = [*small[0], *dsts], [*small[1], *srcs]
            of_size |= {"in_group": copies(*grouped, fused=9), "beside_group": copies(*grouped, fused=8)}
        timings = recorder.device.measure(of_size, plan.rounds, calls=10 if n * size < 2**24 else 2)
        for name, way in of_size.items():
            key, row = f"{size} {name}", {"dtype": str(dtype)[6:], "n": n, "bytes": size, "way": name}
            ways[key], rows[key] = way, row | _samples(timings[name])
    counts = recorder.count(ways, f"crossover: {n} of {dtype}")
    recorder.write("crossover", (rows[key] | counts[key] for key in rows))


def record_traces(recorder: Recorder, plan: Plan, preset: str) -> None:
    """A trace of eight steps a strategy; and "calibration", to fit a profile from: steps and a queue.

    In the latter every run of memcpys begins after a fill or a foreach kernel, so is a burst of its own.
    """
    config, on = EagleConfig.preset(preset), recorder.device.torch_device
    cases = {name: {name: step_way(step)} for name, step in steps_of(recorder, "traces", config, 8).items()}
    flag = torch.zeros(1, device=on)
    cases["calibration"] = ways = {
        "fill": Way(partial(flag.fill_, 0), [fill_launch(flag)], []),
        "8 memcpys of 4 MiB": copies(*torch.zeros(2, 8, 2**22, dtype=torch.uint8, device=on)),
    }
    padded = [("per_copy", size) for size in (5, config.max_batch_size - 1)]
    for name, batch_size in (("grouped_foreach", 8), *padded):
        ways[f"{name}, batch {batch_size}"] = step_way(StepCopies.build(config, name, batch_size, on))
    for name, ways in cases.items():
        trace, path = recorder.device.trace(ways, repeats=8), recorder.path / "traces" / f"{name}.json.gz"
        trace.attrs |= {key: recorder.meta[key] for key in ("device", "evidence")}
        to_chrome_trace(trace, path)
        if path.stat().st_size > MAX_TRACE_BYTES:
            path.unlink()
            recorder.note("skipped", f"traces: {name}, more than {MAX_TRACE_BYTES} bytes")


def record_profile(recorder: Recorder, plan: Plan) -> None:
    part = recorder.path / "profile.json.part"
    profile_of(recordings.load(recorder.path)).save(part)
    part.replace(recorder.path / "profile.json")


def profile_of(recording: Recording) -> DeviceProfile:
    """Fit a profile from the calibration trace, and what it can only assume there from the crossover table.

    The floor of a kernel comes from single tensors of at most 2 KiB, its rate from those of 64 KiB and more
    (median; it grows with size), the host's share of a tensor in a foreach call from the slope over n.
    """
    meta, found, small, large = recording.meta, {}, 2**11, 2**16
    source = f"{meta['evidence']} by lib.record on {meta['device']}, driver {meta['driver']}"
    source += f", torch {meta['torch']}"
    profile = fit_profile(recording.trace("calibration"), recording.path.name, source, meta["date"])
    for way in ("foreach", "elementwise"):
        rows = recording.where("crossover", n=1, way=way)
        us, size = rows["device_us"].map(np.median), rows["bytes"]
        found[f"{way}_floor_us"] = floor = us[size <= small]
        above = us[size >= large] - floor.median()
        found[f"{way}_gb_per_s"] = size / above[above > 0] / 1e3
    calls = recording.where("crossover", way="foreach", counted={"foreach": 1})
    calls = calls[calls["bytes"] <= small]
    if calls["n"].nunique() > 1:
        n, op_us = calls["n"].astype(float), calls["op_us"].map(np.median)
        slope, start = np.polyfit(n, op_us, 1)
        found["host_foreach_us"] = op_us - slope * n
        found["host_foreach_tensor_us"] = ((op_us - start) / n)[n > 1]
    figures = dict(profile.figures)
    for name, values in found.items():
        if len(values := values.dropna().clip(lower=0)):
            low, middle, high = (float(values.quantile(q)) for q in (0.25, 0.5, 0.75))
            figures[name] = Figure(middle, low, high, f"fitted: crossover table, n={len(values)}")
    unknown = tuple(name for name in profile.unknown if figures[name] == profile.figures[name])
    return replace(profile, figures=figures, unknown=unknown)


PARTS: dict[str, Callable[..., None]] = {
    "traces": record_traces,
    "steps": partial(record_runs, replay=False),
    "replays": partial(record_runs, replay=True),
    "crossover": record_crossover,
    "profile": record_profile,
}


def record(device: GpuDevice, out: Path, minutes: float = 6.0, plan: Plan | None = None) -> tuple[Path, int]:
    """Record what fits into the time; the folder made, and the exit status."""
    recorder, plan = Recorder(device, out, minutes), plan or Plan()
    for part, run in PARTS.items():
        try:
            for case in recorder.cases(part, getattr(plan, part)):
                run(recorder, plan, *case)
        except KeyboardInterrupt:
            return recorder.path, 130
        except torch.OutOfMemoryError as error:
            recorder.note("skipped", f"{part}: the rest, {_reason(error)}")
        except Exception as error:  # the other parts are worth having
            traceback.print_exc()
            recorder.note("problems", f"{part}: {_reason(error)}")
    return recorder.path, int(bool(recorder.meta["problems"]))


def summary(recording: Recording) -> str:
    """One screen: a line a strategy for batch 8 of the first preset, the crossovers, what is missing."""
    meta, of = recording.meta, {"preset": "llama3-8b", "layout": "int64_seq_lens"}
    steps, padded, replays = (
        recording.where(table, batch_size=batch_size, **of).set_index("strategy")
        for table, batch_size in (("steps", 8), ("steps", 5), ("replays", 8))
    )
    columns = {"launches": steps["counted"].map(_total), "padded": padded["counted"].map(_total)}
    columns |= {f"{column}, median": steps[column].map(np.median) for column in ("host_us", "gpu_us")}
    columns |= {
        f"saved_us, {what}": replays["saved_us"].str[i] for i, what in enumerate(("q1", "median", "q3"))
    }
    launches = recording.where("crossover", n=65, way="foreach")["counted"].map(_total)
    in_one = "not recorded" if launches.empty else "yes" if launches.min() == 1 else "no"
    return "\n".join([
        recording.label(),
        f"driver {meta['driver']}, host {meta['host']}; steps of {of['preset']}, batch 8; padded: batch 5",
        pd.DataFrame(columns, steps.index, dtype=float).round(1).to_string(),
        f"reported by sglang pull request 28465, for a GPU and model not named: {REPORTED_SAVING_US} us",
        f"dma_bytes: {recording.dma_bytes()}; 65 tensors in one launch: {in_one}",
        f"profile: {recording.profile.label() if recording.profile else 'none'}",
        *(f"missing: {what[:150]}" for what in recording.missing[:10]),
        *(f"PROBLEM: {text.splitlines()[0][:150]}" for text in meta["problems"][:5]),
        f"{len(recording.missing)} missing, {len(meta['problems'])} problems; {recording.path}",
    ])  # fmt: skip


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"


def _samples(timing: Timing) -> dict[str, list[float]]:
    return {"host_us": np.round(timing.host_us, 3).tolist(), "gpu_us": np.round(timing.gpu_us, 3).tolist()}


def _total(kinds: dict[str, int]) -> int:
    return sum(kinds.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lib.record", description="Record copies on this GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for recordings, e.g. data/recordings")
    parser.add_argument("--minutes", type=float, default=6.0, help="after this time no new case is begun")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(f"lib.record: no CUDA or ROCm device: torch {torch.__version__} finds none", file=sys.stderr)
        return 2
    path, status = record(GpuDevice(), options.out, options.minutes)
    print(summary(recordings.load(path)))
    return status


if __name__ == "__main__":
    sys.exit(main())
