"""Measure on one GPU everything that the notebooks say about GPUs: `python -m lib.record --out DIR`.

Makes DIR/<device>-<date>/, read back by `lib.recordings`: for every strategy the launches that torch.profiler
counts beside those that lib/routes.py predicts, times, and correctness; the sizes where ways of copying
cross; replays with real graphs; a trimmed trace a strategy; a device profile fitted from them.

Writes as it goes, so that what is cut short (--minutes, Ctrl-C, a kill) leaves a valid, smaller recording.
Exit status: 0; 1 where a count differs from its prediction, bits from per_copy's, or a part failed, each
printed; 2 without a CUDA or ROCm device; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from lib.recordings import Recording
from lib.routes import Launch, copy_launch, fill_launch, foreach_launches
from lib.step import StepCopies
from lib.strategies import BEYOND, STRATEGIES
from lib.timing import Timing, measure, quartiles
from lib.traces import DEVICE_KINDS, FOREACH_COPY, from_profiler, to_chrome_trace

REPORTED_SAVING_US = (
    48  # sglang pull request 28465, both replays; its GPU, model and batch size are not stated
)
MAX_TRACE_BYTES = 200_000
RUNNERS = (EagleDraftCudaGraphRunner, EagleDraftExtendCudaGraphRunner)
REPLAY = Launch("graph", 0, 0, "graph replay", "graph")
# Kernels told apart by name: PyTorch's, ours in Triton, and the one by which ROCm's driver does a memcpy.
KERNELS = {
    FOREACH_COPY: "foreach",
    r"^_copy\b|fused_copy": "fused",
    "FillFunctor": "fill",
    "rocclr_copyBuffer": "memcpy",
}


@dataclass(frozen=True)
class Plan:
    """What to record. What matters most comes first, for the case that time runs out."""

    presets: tuple[str, ...] = ("llama3-8b", "deepseek-v3")  # hidden sizes 4096 and 7168
    batch_sizes: tuple[int, ...] = (8, 5, 1, 64, 2, 4, 16, 32, 3, 12, 24, 48)  # 5, 3, 12, 24, 48 are padded
    replays: tuple[tuple[str, int, int], ...] = (  # preset, the batch size captured, the one replayed
        ("tiny", 8, 8), ("tiny", 8, 5),
        ("llama3-8b", 8, 8), ("llama3-8b", 8, 5), ("llama3-8b", 1, 1), ("llama3-8b", 64, 64),
    )  # fmt: skip
    dtypes: tuple[torch.dtype, ...] = (torch.int16, torch.int64)  # bfloat16 is moved as int16
    tensors: tuple[int, ...] = (1, 65, 8, 2, 4, 16, 32, 64)
    sizes: tuple[int, ...] = tuple(2**n for n in range(8, 27))  # bytes a tensor, 256 B to 64 MiB
    rounds: int = 15


class Way(NamedTuple):
    """One way of doing something: how to run it, what it should launch, and the pairs it copies, by name."""

    run: Callable[[], object]
    launches: Callable[[], Sequence[Launch]]
    pairs: Callable[[], Sequence[tuple[str, Tensor, Tensor]]]


class GpuDevice:
    """The first CUDA or ROCm device: all that is asked of one. The tests put a stand-in there."""

    torch_device = "cuda"

    def facts(self) -> dict[str, object]:
        """Device, driver, versions; "device" and "driver" are what a stand-in has to tell, too."""
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            driver = subprocess.check_output(command, text=True, timeout=20).split()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            amd = Path("/sys/module/amdgpu/version")
            driver = amd.read_text().strip() if amd.is_file() else "unknown"
        chip = torch.cuda.get_device_properties(0)
        return {"device": chip.name, "driver": driver, "cuda": torch.version.cuda, "rocm": torch.version.hip,
                "multiprocessors": chip.multi_processor_count, "memory_bytes": chip.total_memory}  # fmt: skip

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def measure(self, ways: dict[str, Way], rounds: int, calls: int) -> dict[str, Timing]:
        return measure({name: way.run for name, way in ways.items()}, rounds, calls, device="cuda")

    def trace(self, ways: dict[str, Way], repeats: int) -> pd.DataFrame:
        """One profiler run; each call in an annotation with the way's name, after one call outside of it."""
        for way in ways.values():
            way.run()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as prof:
            for name, way in ways.items():
                for _ in range(repeats):
                    with torch.profiler.record_function(name):
                        way.run()
                    torch.cuda.synchronize()
        return from_profiler(prof)


class Counted(NamedTuple):
    """Of one way in a trace: launches by kind; us a call, on the device (quartiles) and in operators."""

    kinds: dict[str, int]
    device_us: list[float]
    op_us: float


def count_launches(trace: pd.DataFrame) -> dict[str, Counted]:
    """The launches in the annotations of a trace, by their name; of several the most frequent outcome.

    Device work belongs to the annotation in which the host call with its correlation began, and all work of
    one graph launch counts as one launch.
    """
    ranges = trace[trace["kind"] == "annotation"].sort_values("start_us").reset_index(drop=True)
    ends = (ranges["start_us"] + ranges["dur_us"]).to_numpy()

    def inside(events: pd.DataFrame) -> pd.DataFrame:
        at = np.searchsorted(ranges["start_us"], events["start_us"], side="right") - 1
        return events.assign(range=at)[(at >= 0) & (events["start_us"].to_numpy() < ends[at])]

    calls = inside(trace[(trace["kind"] == "runtime") & (trace["correlation"] >= 0)])
    calls = calls.drop_duplicates("correlation").assign(call=calls["name"].astype(str))
    work = trace[trace["kind"].isin(DEVICE_KINDS)]
    work = work.merge(calls[["correlation", "range", "call"]], on="correlation")
    again = work["call"].str.contains("GraphLaunch") & work.duplicated("correlation")
    launched = [
        (e.range, launch_kind(str(e.name), e.kind, e.call)) for e in work[~again].itertuples(index=False)
    ]
    ops = inside(trace[trace["name"].isin(("aten::copy_", "aten::_foreach_copy_"))])
    sums = [
        rows.groupby("range")["dur_us"].sum().reindex(ranges.index, fill_value=0.0) for rows in (work, ops)
    ]
    found = {}
    for name, rows in ranges.groupby(ranges["name"].astype(str)):
        outcomes = [
            tuple(sorted(Counter(kind for at, kind in launched if at == i).items())) for i in rows.index
        ]
        device_us, op_us = (of_range[rows.index] for of_range in sums)
        found[name] = Counted(
            dict(Counter(outcomes).most_common(1)[0][0]), _quartiles(device_us), op_us.median()
        )
    return found


def launch_kind(name: str, kind: str, call: str) -> str:
    """The `routes.Launch.kind` of an event on the device; for any other event its own kind and name."""
    if "GraphLaunch" in call:
        return "graph"
    known = next((ours for pattern, ours in KERNELS.items() if re.search(pattern, name)), None)
    return known or {"memcpy": "memcpy", "copy_kernel": "elementwise"}.get(kind, f"{kind} {name[:80]}")


@dataclass
class Recorder:
    """Writes one recording. `problems`, in meta.json, is what makes the exit status 1."""

    device: GpuDevice
    path: Path
    meta: dict
    deadline: float

    @classmethod
    def start(cls, device: GpuDevice, out: Path, minutes: float) -> Recorder:
        """Make the folder; with its meta.json it is a recording, though one without rows.

        Only what a GpuDevice measured is called recorded. Otherwise the device's name, and so the folder's,
        that of every trace and of the profile, begins with "modelled".
        """
        facts, recorded = device.facts(), type(device) is GpuDevice
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        name = facts["device"] if recorded else f"modelled {facts['device']}"
        meta = {"format": recordings.FORMAT, "evidence": "recorded" if recorded else "modelled"} | facts
        meta |= {"device": name, "torch": torch.__version__, "host": device_name(), "date": date,
                 "planned": list(PARTS), "reached": [], "done": [], "skipped": [], "seconds": {},
                 "problems": []}  # fmt: skip
        folder = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + f"-{date}"
        paths = (out / (folder + suffix) for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
        path = next(path for path in paths if not path.exists())
        (path / "traces").mkdir(parents=True)
        recorder = cls(device, path, meta, time.monotonic() + 60 * minutes)
        recorder.save()
        return recorder

    def save(self) -> None:
        part = self.path / "meta.json.part"
        part.write_text(json.dumps(self.meta, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path / "meta.json")

    def skip(self, part: str, why: str) -> None:
        if [part, why] not in self.meta["skipped"]:
            self.meta["skipped"].append([part, why])
            self.save()

    def problem(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        self.meta["problems"].append(text)
        self.save()

    def cases(self, part: str, cases: Sequence) -> Iterator:
        """Hand out the cases of a part while there is time."""
        self.meta["reached"].append(part)
        self.save()
        for i, case in enumerate(cases):
            if time.monotonic() > self.deadline:
                return self.skip(part, f"{len(cases) - i} of {len(cases)} cases, time was up")
            yield case
        self.meta["done"].append(part)
        self.save()

    def write(self, table: str, rows: Sequence[dict]) -> None:
        lines = "".join(json.dumps({"evidence": self.meta["evidence"]} | row) + "\n" for row in rows)
        with open(self.path / f"{table}.jsonl", "a", encoding="utf-8") as file:
            file.write(lines)

    def count(self, ways: dict[str, Way], case: str) -> dict[str, tuple[Counted, dict]]:
        """Counted and predicted launches of every way; a difference seen twice is a problem."""
        found, result = count_launches(self.device.trace(ways, repeats=3)), {}
        for name, way in ways.items():
            predicted, counted = dict(Counter(x.kind for x in way.launches())), found.get(name)
            if counted is None or predicted != counted.kinds:  # the profiler may have lost an event
                counted = count_launches(self.device.trace({name: way}, repeats=1))[name]
            if predicted != counted.kinds:
                text = f"{case}, {name}: predicted {predicted}, counted {counted.kinds}"
                self.problem("\n  ".join([text, *self.suspects(way)]))
            result[name] = counted, {"predicted": predicted, "counted": counted.kinds}
        return result

    def suspects(self, way: Way) -> list[str]:
        """The pairs whose copy alone differs from its prediction, too, else all pairs; equal ones once."""
        pairs = [(name, dst, src) for name, dst, src in way.pairs() if dst.numel()]
        alone = {f"{i} {make.__name__}": make([dst], [src]) for i, (_, dst, src) in enumerate(pairs)
                 for make in (copy_way, foreach_way)}  # fmt: skip
        found = count_launches(self.device.trace(alone, repeats=1)) if alone else {}
        wrong = {int(key.split()[0]) for key, each in alone.items()
                 if Counter(x.kind for x in each.launches()) != found[key].kinds}  # fmt: skip
        described = Counter(
            f"{name}: {' <- '.join(f'{tuple(t.shape)} strides {t.stride()} {t.dtype}' for t in pair)}"
            for i, (name, *pair) in enumerate(pairs)
            if i in wrong or not wrong
        )
        return [f"{times} x {text}" if times > 1 else text for text, times in described.items()]


def copy_way(dsts: Sequence[Tensor], srcs: Sequence[Tensor]) -> Way:
    def run() -> None:
        for dst, src in zip(dsts, srcs):
            dst.copy_(src)

    return Way(run, lambda: [x for x in map(copy_launch, dsts, srcs) if x], lambda: _named(dsts, srcs))


def foreach_way(dsts: list[Tensor], srcs: list[Tensor]) -> Way:
    def run() -> None:
        torch._foreach_copy_(dsts, srcs)

    return Way(run, lambda: foreach_launches(dsts, srcs), lambda: _named(dsts, srcs))


def in_turn(*ways: Way) -> Way:
    """The given ways one after the other."""

    def run() -> None:
        for way in ways:
            way.run()

    launches, pairs = (lambda part=part: [x for way in ways for x in way[part]()] for part in (1, 2))
    return Way(run, launches, pairs)


def _named(dsts: Sequence[Tensor], srcs: Sequence[Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    return [("tensor", *pair) for pair in zip(dsts, srcs)]


def step_way(step: StepCopies, replay: bool = False) -> Way:
    """The copies of one step, padding written anew; with `replay` both replays whole, graphs included."""
    both = ((step.draft, step.draft_batch), (step.draft_extend, step.draft_extend_batch))

    def run() -> None:
        for runner, batch in both:
            runner.last_plan = None  # as after a batch of another size: `launches` counts the padding, too
            (runner.replay if replay else runner.copy_inputs)(batch)

    def launches() -> list[Launch]:
        return [x for runner, batch in both for x in (*runner.launches(batch), *[REPLAY] * replay)]

    def pairs() -> list[tuple[str, Tensor, Tensor]]:
        fields = ((runner.table, *runner.buffers.pairs(batch)) for runner, batch in both)
        return [(f"{table}.{name}", d, s) for table, *lists in fields for d, s, name in zip(*lists)]

    return Way(run, launches, pairs)


def steps_of(
    recorder: Recorder, part: str, config: EagleConfig, batch_size: int, model: DraftModel | None = None
) -> dict[str, StepCopies]:
    """Runners of every strategy with the same batches, tried once; what cannot run here is skipped by name.

    model: the one to replay; without it only the copies of the inputs are tried.
    """
    on = recorder.device.torch_device
    first, steps = StepCopies.build(config, "per_copy", batch_size, on), {}
    for name in STRATEGIES | BEYOND:
        try:
            draft, draft_extend = (runner(config, name, on, model) for runner in RUNNERS)
            batches = draft.place(first.draft_batch), draft_extend.place(first.draft_extend_batch)
            step = StepCopies(draft, draft_extend, *batches)
            way = step_way(step, replay=model is not None)
            way.run()
            way.launches()
            steps[name] = step
        except Exception as error:
            if name == "per_copy":  # with which all others are compared
                raise
            recorder.skip(part, f"{name}, {config.layout}: {_reason(error)}")
    return steps


def record_steps(recorder: Recorder, plan: Plan) -> None:
    cases = [(preset, "int64_seq_lens", size) for preset in plan.presets for size in plan.batch_sizes]
    cases += [(plan.presets[0], "int32_seq_lens", size) for size in plan.batch_sizes[:2]]  # it converts
    for preset, layout, batch_size in recorder.cases("steps", cases):
        config = EagleConfig.preset(preset, layout=layout)
        steps = steps_of(recorder, "steps", config, batch_size)
        _record_runs(recorder, "steps", preset, steps, step_way, plan.rounds, calls=10)


def record_replays(recorder: Recorder, plan: Plan) -> None:
    for preset, captured, batch_size in recorder.cases("replays", plan.replays):
        config = EagleConfig.preset(preset, capture_batch_sizes=(captured,), max_context_len=256)
        model = DraftModel.random(config, recorder.device.torch_device)
        steps = steps_of(recorder, "replays", config, batch_size, model)
        _record_runs(
            recorder, "replays", preset, steps, partial(step_way, replay=True), 2 * plan.rounds, calls=1
        )


def _record_runs(
    recorder, part: str, preset: str, steps: dict, way_of: Callable, rounds: int, calls: int
) -> None:
    first = steps["per_copy"]
    config, batch_size = first.draft.config, first.draft_batch.batch_size
    case, rows, expected = f"{part}: {preset}, {config.layout}, batch {batch_size}", [], None
    ways = {name: way_of(step) for name, step in steps.items()}
    timings = recorder.device.measure(ways, rounds, calls)
    counts = recorder.count(ways, case)
    for name, step in steps.items():
        bits, eager_error = _replayed(step) if part == "replays" else (_copied(step), None)
        expected = expected or bits
        equal = all(map(torch.equal, bits, expected)) if bits else None
        if equal is False:
            recorder.problem(f"{case}: {name} leaves other bits than per_copy")
        timing, padded = timings[name], step.draft.padded_batch_size(batch_size) > batch_size
        saved = [a - b for a, b in zip(timings["per_copy"].gpu_us, timing.gpu_us)]
        row = {"preset": preset, "hidden_size": config.hidden_size, "layout": config.layout,
               "batch_size": batch_size, "padded": padded, "strategy": name,
               "host_us": _rounded(timing.host_us), "gpu_us": _rounded(timing.gpu_us),
               "saved_us": _quartiles(saved), "equal": equal, "eager_error": eager_error}  # fmt: skip
        rows.append(row | counts[name][1])
    recorder.write(part, rows)


def _copied(step: StepCopies) -> list[Tensor]:
    """The bits that a graph reads and that matter: padding's, too, but of large fields, which no row needs.

    An empty list where the strategy has graphs read elsewhere: "replays" compares its outputs.
    """
    if getattr(step.draft.strategy, "fixed_addresses", False):
        return []
    rows = []
    for runner, batch in ((step.draft, step.draft_batch), (step.draft_extend, step.draft_extend_batch)):
        captured = runner.padded_batch_size(batch.batch_size)
        for f in runner.buffers.fields:
            padded = f.pad is not None and not f.large
            rows.append(runner.buffers.rows(f, captured if padded else batch.batch_size))
    return _bits(rows)


def _replayed(step: StepCopies) -> tuple[list[Tensor], float | None]:
    """The bits of both replays' outputs, and their largest difference from the same without a graph.

    None for the second where the graphs do not read the runners' own buffers.
    """
    outputs, error = [], 0.0
    for runner, batch in ((step.draft, step.draft_batch), (step.draft_extend, step.draft_extend_batch)):
        graph, padded = [t.clone() for t in runner.replay(batch)], runner.padded_batch_size(batch.batch_size)
        outputs += graph
        for a, b in zip(graph, runner.forward(runner.buffers.inputs(padded))):
            error = max(error, float((a.double() - b[: len(a)].double()).abs().max()))
    elsewhere = getattr(step.draft.strategy, "fixed_addresses", False)
    return _bits(outputs), None if elsewhere or not math.isfinite(error) else error


def record_crossover(recorder: Recorder, plan: Plan) -> None:
    on, few = recorder.device.torch_device, max(plan.rounds // 2, 3)
    for n, dtype in recorder.cases("crossover", [(n, dtype) for n in plan.tensors for dtype in plan.dtypes]):
        room = 0.9 * recorder.device.free_bytes() / 2
        sizes = [size for size in plan.sizes if n * (size + 512) <= room]
        if len(sizes) < len(plan.sizes):
            recorder.skip("crossover", f"{n} tensors of {plan.sizes[len(sizes)]} bytes or more: no memory")
        ways, timings, elements = {}, {}, max(sizes, default=0) // dtype.itemsize + 64
        into, out_of = ([torch.zeros(elements, dtype=dtype, device=on) for _ in range(n)] for _ in range(2))
        small = [[torch.zeros(64, dtype=dtype, device=on) for _ in range(8)] for _ in range(2)]
        for size in sizes:
            half = size // dtype.itemsize // 2
            dsts, srcs = ([t[: 2 * half].view(2, half) for t in side] for side in (into, out_of))
            # Two rows of a wider buffer: not contiguous as a pair, so `copy_` takes its elementwise kernel.
            wider = [t.as_strided((2, half), (half + 16, 1)) for t in out_of]
            of_size = {"memcpy": copy_way(dsts, srcs), "foreach": foreach_way(dsts, srcs),
                       "elementwise": copy_way(dsts, wider)}  # fmt: skip
            if n == 1:  # the choice that `dma_bytes` makes
                of_size["in_group"] = foreach_way(small[0] + dsts, small[1] + srcs)
                of_size["beside_group"] = in_turn(foreach_way(*small), copy_way(dsts, srcs))
            of_size = {f"{size} {name}": way for name, way in of_size.items()}
            timings |= recorder.device.measure(of_size, few, calls=10 if n * size < 2**24 else 2)
            ways |= of_size
        rows = []
        for key, (counted, launches) in recorder.count(ways, f"crossover: {n} of {dtype}").items():
            size, way = key.split()
            row = {"dtype": str(dtype).removeprefix("torch."), "n": n, "bytes": int(size), "way": way,
                   "host_us": _quartiles(timings[key].host_us), "gpu_us": _quartiles(timings[key].gpu_us),
                   "device_us": counted.device_us, "op_us": round(counted.op_us, 3)}  # fmt: skip
            rows.append(row | launches)
        recorder.write("crossover", rows)


def record_traces(recorder: Recorder, plan: Plan) -> None:
    """One trace of three steps a strategy; one to fit a profile from: steps, and queues of memcpys."""
    config, on = EagleConfig.preset(plan.presets[0]), recorder.device.torch_device
    steps = steps_of(recorder, "traces", config, 8)
    queue = [[torch.zeros(2**22, dtype=torch.uint8, device=on) for _ in range(8)] for _ in range(2)]
    flag = torch.zeros(1, device=on)
    # Its work ends a run of copies, so that every repetition is a burst of its own.
    mark = Way(lambda: flag.fill_(0), lambda: [fill_launch(flag)], tuple)
    calibration = {"8 memcpys of 4 MiB": in_turn(mark, copy_way(*queue))}
    of_sizes = [("per_copy", size) for size in (5, 8, config.max_batch_size)]
    for name, batch_size in (("grouped_foreach", 8), *of_sizes):
        step = StepCopies.build(config, name, batch_size, on)
        calibration[f"{name}, batch {batch_size}"] = in_turn(mark, step_way(step))
    cases = {name: {name: step_way(step)} for name, step in steps.items()} | {"calibration": calibration}
    for name in recorder.cases("traces", list(cases)):
        path = recorder.path / "traces" / f"{name}.json.gz"
        for repeats in (8 if name == "calibration" else 3, 1):
            trace = recorder.device.trace(cases[name], repeats)
            trace.attrs |= {key: recorder.meta[key] for key in ("device", "evidence")}
            to_chrome_trace(trace, path)
            if path.stat().st_size <= MAX_TRACE_BYTES:
                break
        else:
            path.unlink()
            recorder.skip("traces", f"{name}, one step of which is more than {MAX_TRACE_BYTES} bytes")


def record_profile(recorder: Recorder, plan: Plan) -> None:
    for _ in recorder.cases("profile", [plan]):
        part = recorder.path / "profile.json.part"
        profile_of(recordings.load(recorder.path)).save(part)
        part.replace(recorder.path / "profile.json")


def profile_of(recording: Recording) -> DeviceProfile:
    """Fit a profile from the calibration trace, and what it can only assume there from the crossover table.

    The rate of a kernel is the median over single tensors of 64 KiB and more. It grows with size: a foreach
    kernel has a block for every 65,536 elements.
    """
    meta, one = recording.meta, recording.where("crossover", n=1)
    where = f"{meta['device']}, driver {meta['driver']}, torch {meta['torch']}"
    source = f"{meta['evidence']} by lib.record on {where}"
    profile = fit_profile(recording.trace("calibration"), recording.path.name, source, meta["date"])
    found: dict[str, tuple[pd.Series, str]] = {}
    for way in ("foreach", "elementwise"):
        us = one["device_us"].str[1][one["way"] == way]
        floor = us[one["bytes"] <= 2048].median()
        large = us[(one["bytes"] >= 2**16) & (us > floor)]
        found[f"{way}_floor_us"] = us[one["bytes"] <= 2048], "one tensor of at most 2 KiB"
        found[f"{way}_gb_per_s"] = one["bytes"] / (large - floor) / 1e3, "one tensor of 64 KiB and more"
    calls = recording.where("crossover", way="foreach")
    calls = calls[(calls["bytes"] <= 2048) & calls["counted"].map(lambda kinds: kinds == {"foreach": 1})]
    if calls["n"].nunique() > 1:
        slope, start = np.polyfit(calls["n"].to_numpy(float), calls["op_us"].to_numpy(float), 1)
        found["host_foreach_us"] = (
            calls["op_us"] - slope * calls["n"],
            "aten::_foreach_copy_ less its tensors",
        )
        found["host_foreach_tensor_us"] = (
            ((calls["op_us"] - start) / calls["n"])[calls["n"] > 1],
            "its slope over n",
        )
    figures = dict(profile.figures)
    for name, (values, what) in found.items():
        if len(values := values.dropna().clip(lower=0)):
            low, middle, high = (float(values.quantile(q)) for q in (0.25, 0.5, 0.75))
            figures[name] = Figure(middle, low, high, f"fitted: crossover table, {what}, n={len(values)}")
    unknown = tuple(name for name in profile.unknown if figures[name] == profile.figures[name])
    return replace(profile, figures=figures, unknown=unknown)


PARTS: dict[str, Callable[[Recorder, Plan], None]] = {
    "traces": record_traces,
    "steps": record_steps,
    "replays": record_replays,
    "crossover": record_crossover,
    "profile": record_profile,
}


def record(device: GpuDevice, out: Path, minutes: float = 6.0, plan: Plan | None = None) -> tuple[Path, int]:
    """Record what fits into the time; the folder made, and the exit status."""
    recorder = Recorder.start(device, out, minutes)
    try:
        for part, run in PARTS.items():
            began = time.monotonic()
            try:
                run(recorder, plan or Plan())
            except torch.OutOfMemoryError as error:
                recorder.skip(part, f"the rest, {_reason(error)}")
            except Exception as error:  # the other parts are worth having
                traceback.print_exc()
                recorder.problem(f"{part}: {_reason(error)}")
            recorder.meta["seconds"][part] = round(time.monotonic() - began, 1)
            recorder.save()
    except KeyboardInterrupt:
        return recorder.path, 130
    return recorder.path, int(bool(recorder.meta["problems"]))


def summary(recording: Recording) -> str:
    """One screen: a line a strategy for batch 8 of the first preset, the crossovers, what is missing."""
    meta, of = recording.meta, {"preset": Plan.presets[0], "layout": "int64_seq_lens"}
    padded = {row.strategy: row.counted for row in recording.where("steps", batch_size=5, **of).itertuples()}
    saved = recording.where("replays", batch_size=8, **of).set_index("strategy")["saved_us"]
    lines = [recording.label(), f"driver {meta['driver']}, host {meta['host']}, {of['preset']}, batch 8", ""]
    lines.append(f"{'':24}{'launches':>10}{'padded':>10}{'host us':>10}{'GPU us':>10}   saved us a step")
    for row in recording.where("steps", batch_size=8, **of).itertuples():
        counts = [sum(row.counted.values()), sum(padded.get(row.strategy, {}).values())]
        low, middle, high = saved.get(row.strategy, (math.nan,) * 3)
        times = "".join(f"{np.median(us):10.1f}" for us in (row.host_us, row.gpu_us))
        lines.append(
            f"{row.strategy:24}{counts[0]:10}{counts[1]:10}{times}{middle:8.1f} ({low:.1f} to {high:.1f})"
        )
    most = recording.where("crossover", n=65, way="foreach")["counted"]
    held = {1: "yes", 2: "no"}.get(min((sum(kinds.values()) for kinds in most), default=0), "not recorded")
    return "\n".join([
        *lines,
        f"reported by sglang pull request 28465, for a GPU and model not named: {REPORTED_SAVING_US} us",
        f"dma_bytes: {recording.dma_bytes() or 'no crossover recorded'}; 65 tensors in one launch: {held}",
        f"profile: {recording.profile.label() if recording.profile else 'none'}",
        *(f"missing: {what[:150]}" for what in recording.missing[:10]),
        *(f"PROBLEM: {text.splitlines()[0][:150]}" for text in meta["problems"][:5]),
        f"{len(meta['problems'])} problems; {sum(meta['seconds'].values()):.0f} s; {recording.path}",
    ])  # fmt: skip


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(float(value), 3) for value in values]


def _quartiles(samples: Sequence[float]) -> list[float]:
    low, high = quartiles(tuple(samples))
    return _rounded((low, float(np.median(samples)), high))


def _bits(tensors) -> list[Tensor]:
    return [t.contiguous().clone().view(-1).view(torch.uint8) for t in tensors]


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
