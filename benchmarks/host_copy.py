"""What filling the buffers of both EAGLE graphs costs the host: SGLang's own lines against lib's.

    PYTHONPATH=. python benchmarks/host_copy.py [--presets tiny llama3-8b] [--device cpu] [--json FILE]

On a CPU nothing is launched, so this is the cost of Python and the dispatcher around copies of a few hundred
bytes; on CUDA the launches come on top. Rows run interleaved, each call gets the next of 16 batches, as an
engine's steps would. Figures are medians over rounds of one step, a draft and a draft-extend replay. Ratios
are formed inside a round and without the time that the bytes of hidden_states take, 1 MB of llama3-8b's:
moving them is the GPU's work. With --strict it exits with 1 where a ratio is above its limit, on a CPU.

A new row is a function of a `Section` that returns what a replay calls, and a line in ROWS.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks import sglang
from lib import Call, CopyPlan, ReplayCopies, run
from lib.eagle import (
    DraftBatch,
    DraftExtendBatch,
    EagleConfig,
    EagleDraftCudaGraphRunner,
    EagleDraftExtendCudaGraphRunner,
)
from lib.eagle.fields import Batch
from lib.eagle.runners import InputBuffers
from lib.strategies import ROUTES
from lib.workbench.evidence import device_name, label
from lib.workbench.timing import Timing, measure, spread

Replay = Callable[[Batch], object]
RUNNERS = {
    "draft": (EagleDraftCudaGraphRunner, DraftBatch),
    "draft_extend": (EagleDraftExtendCudaGraphRunner, DraftExtendBatch),
}


@dataclass
class Section:
    """What a row needs to know: one graph's inputs, `batch_size` requests in a graph for `captured`."""

    table: str
    config: EagleConfig
    batch_size: int
    captured: int
    device: str

    @cached_property
    def buffers(self) -> InputBuffers:
        return InputBuffers(self.config, self.config.table(self.table), torch.device(self.device))

    @property
    def copies(self) -> ReplayCopies:
        return ReplayCopies(self.buffers.static_inputs())

    def plan(self, **options) -> CopyPlan:
        """The `CopyPlan` of all fields, padding included, that a `ReplayCopies` makes."""
        copies = ReplayCopies(self.buffers.static_inputs(), **options)
        copies.prepare({self.batch_size: self.captured})
        return next(iter(copies.plans.values()))


# ---- rows --------------------------------------------------------------------------------------------------


def in_sglang(helper: Callable, section: Section) -> Replay:
    """Its section of the replay: fills when padded, two lists, a helper for these, hidden_states alone."""
    buffers = SimpleNamespace(**section.buffers.tensors)
    k, s, w = section.config.topk, section.config.num_steps, section.config.num_draft_tokens

    def draft(batch: DraftBatch) -> None:
        bs = batch.seq_lens.shape[0]
        if bs != section.captured:
            sglang.draft_fills(buffers)
        helper(*sglang.draft_lists(buffers, batch, bs, k, s))
        buffers.hidden_states[:bs].copy_(batch.hidden_states)

    def draft_extend(batch: DraftExtendBatch) -> None:
        bs = batch.seq_lens.shape[0]
        if bs != section.captured:
            sglang.draft_extend_fills(buffers, w)
        helper(*sglang.draft_extend_lists(buffers, batch, bs, w))
        buffers.hidden_states[: bs * w].copy_(batch.hidden_states)

    return draft if section.table == "draft" else draft_extend


def before_june(section: Section) -> Replay:
    return in_sglang(sglang.one_by_one, section)


def june(section: Section) -> Replay:
    return in_sglang(sglang.grouped_foreach, section)


def october_on_cuda(section: Section) -> Replay:
    return in_sglang(sglang.october_on_cuda, section)


def replay_copies(section: Section) -> Replay:
    """All of an engine's own work: names, None for a field that does not come, the look-up of the plan."""
    copies, captured = section.copies, section.captured

    def draft(batch: DraftBatch) -> None:
        inputs = {
            "seq_lens": batch.seq_lens,
            "out_cache_loc": batch.out_cache_loc,
            "positions": batch.positions,
            "topk_p": batch.topk_p,
            "topk_index": batch.topk_index,
            "req_pool_indices": batch.req_pool_indices,
            "rids_int": batch.rids_int,
            "hidden_states": batch.hidden_states,
        }
        copies(inputs, batch.seq_lens.shape[0], captured)

    def draft_extend(batch: DraftExtendBatch) -> None:
        inputs = {
            "input_ids": batch.input_ids,
            "seq_lens": batch.seq_lens,
            "out_cache_loc": batch.out_cache_loc,
            "positions": batch.positions,
            "req_pool_indices": batch.req_pool_indices,
            "extend_seq_lens": batch.extend_seq_lens,
            "num_correct_drafts": batch.num_correct_drafts,
            "num_accept_tokens": batch.num_accept_tokens,
            "hidden_states": batch.hidden_states,
        }
        copies(inputs, batch.seq_lens.shape[0], captured)

    return draft if section.table == "draft" else draft_extend


def sources(section: Section) -> Callable[[Batch], tuple[Tensor, ...]]:
    return attrgetter(*(name for name in section.buffers.tensors if name != "seq_lens_cpu"))


def bare_plan(section: Section, **options) -> Replay:
    plan, sources_of = section.plan(**options), sources(section)
    return lambda batch: plan(sources_of(batch))


def unchecked_plan(section: Section) -> Replay:
    plan, sources_of = section.plan(), sources(section)
    return lambda batch: run(plan.bound(sources_of(batch)))


def one_call(pairs) -> list[Call]:
    """On a CPU the best route: there a foreach call is a loop, and grouping by dtype buys nothing."""
    return [Call("foreach", *map(list, zip(*pairs)))]


def plan_for_a_cpu(section: Section) -> Replay:
    return bare_plan(section, route=one_call)


def fused_plan(section: Section) -> Replay:
    """The Python of a plan with one Triton kernel, which is not launched."""

    def route(pairs) -> list[Call]:
        calls = ROUTES["fused"](pairs)
        for call in calls:
            if call.op == "fused":
                call.kept.start = lambda dsts, srcs: None
        return calls

    return bare_plan(section, route=route)


def runner_of(section: Section):
    make, _ = RUNNERS[section.table]
    return make(section.config, "copy_plan", section.device)


def runner_with_a_plan(section: Section) -> Replay:
    return runner_of(section).copy_inputs


def runner_in_place(section: Section) -> Replay:
    """The producer has written the batch where the graph reads it; the runner's own checks are left."""
    runner = runner_of(section)
    batch = runner.inputs(section.batch_size)
    return lambda other: runner.copy_inputs(batch)


def hidden_states_alone(section: Section) -> Replay:
    dst = section.buffers.rows(section.batch_size)["hidden_states"]
    return lambda batch: dst.copy_(batch.hidden_states)


def eight_numbers_alone(section: Section) -> Replay:
    dst, src = (torch.zeros(8, dtype=section.config.dtype, device=section.device) for _ in range(2))
    return lambda batch: dst.copy_(src)


JUNE = "SGLang June; October on a CPU"
OCTOBER = "SGLang October on CUDA, no launch"
LARGE, SMALL = "hidden_states alone", "eight numbers of it"
ROWS: dict[str, Callable[[Section], Replay]] = {
    "SGLang before June, one by one": before_june,
    JUNE: june,
    OCTOBER: october_on_cuda,
    "ReplayCopies": replay_copies,
    "CopyPlan": bare_plan,
    "CopyPlan, unchecked": unchecked_plan,
    "CopyPlan, one call, best on a CPU": plan_for_a_cpu,
    "fused plan, no launch": fused_plan,
    "runner, copy_plan": runner_with_a_plan,
    "runner, in place": runner_in_place,
    LARGE: hidden_states_alone,
    SMALL: eight_numbers_alone,
}
LIMITS = [  # row, base, largest ratio in a full graph and in a padded one: what this project set itself
    ("ReplayCopies", JUNE, 0.60, 0.75),
    ("CopyPlan", JUNE, 0.45, None),
    ("CopyPlan, unchecked", JUNE, 0.27, None),
    ("ReplayCopies", OCTOBER, 0.33, None),
    ("fused plan, no launch", OCTOBER, 0.40, None),
    ("runner, copy_plan", "CopyPlan", 2.0, 2.0),
    ("runner, in place", "CopyPlan", 0.5, 0.5),
]
GRAD_MODE_MORE = 0.1  # that a ratio may be larger in grad mode, where `run` has to leave it


def compare(
    config: EagleConfig, batch_size: int, captured: int, args: argparse.Namespace
) -> dict[str, Timing]:
    """Host time of a step by row, in the grad mode that is set."""
    steps = {name: step(name, config, batch_size, captured, args.device) for name in ROWS}
    return measure(steps, args.rounds, args.calls, device=args.device)


def step(row: str, config: EagleConfig, batch_size: int, captured: int, device: str) -> Callable[[], None]:
    """Both replays of a row of ROWS; each call takes the next of 16 batches."""
    replays, batches = [], []
    for table, (_, batch_class) in RUNNERS.items():
        replays.append(ROWS[row](Section(table, config, batch_size, captured, device)))
        batches.append([batch_class.random(config, batch_size, seed, device) for seed in range(16)])
    draft, draft_extend = replays
    each = itertools.cycle(zip(*batches))

    def run_step() -> None:
        draft_batch, draft_extend_batch = next(each)
        draft(draft_batch)
        draft_extend(draft_extend_batch)

    return run_step


def host_ratio(timings: dict[str, Timing], name: str, base: str) -> float:
    """Median over the rounds; what the bytes of hidden_states take in a round is no work of the host's."""
    columns = (timings[row].host_us for row in (name, base, LARGE, SMALL))
    shares = []
    for own, other, large, small in zip(*columns):
        moving = max(large - small, 0.0)
        shares.append((own - moving * (name != "runner, in place")) / (other - moving))
    return statistics.median(shares)


def verdicts(timings: dict[str, Timing], padded: bool, grad: bool) -> list[dict]:
    found = []
    for name, base, *limits in LIMITS:
        limit = limits[padded]
        if limit is not None:
            share = host_ratio(timings, name, base)
            limit += GRAD_MODE_MORE if grad else 0
            found.append({"row": name, "of": base, "ratio": share, "limit": limit, "met": share <= limit})
    return found


def report(timings: dict[str, Timing], found: list[dict]) -> None:
    for name, timing in timings.items():
        middle = spread(timing.host_us)
        share = "" if name in (LARGE, SMALL) else f"{host_ratio(timings, name, JUNE):.2f}"
        print(f"  {name:34} {timing.median_us:7.2f} us ({middle.low:.2f} to {middle.high:.2f})  {share}")
    for each in found:
        said = "ok" if each["met"] else "ABOVE"
        print(f"    {each['row']} / {each['of']}: {each['ratio']:.2f}, limit {each['limit']:.2f} {said}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--presets", nargs="+", default=["tiny", "llama3-8b"], help="as EagleConfig.preset names them"
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[8, 5])
    parser.add_argument(
        "--captured", type=int, default=8, help="the batch size that the graph was captured for"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument(
        "--calls", type=int, default=4, help="calls a round: few, so that not every sample is interrupted"
    )
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a limit is not met")
    args = parser.parse_args()
    torch.set_num_threads(1)
    evidence = label("measured", device_name(args.device))
    print(f"host time a step, median (middle half), ratio to {JUNE} · {evidence}")

    cases = []
    for preset, batch_size, grad in itertools.product(args.presets, args.batch_sizes, (False, True)):
        config = EagleConfig.preset(preset, capture_batch_sizes=(args.captured,))
        with torch.set_grad_enabled(grad):
            timings = compare(config, batch_size, args.captured, args)
        found = verdicts(timings, batch_size < args.captured, grad)
        mode = "grad mode" if grad else "no_grad"
        print(f"\n{preset}, {batch_size} requests in a graph for {args.captured}, {mode}")
        report(timings, found)
        rows = {}
        for name, timing in timings.items():
            middle = spread(timing.host_us)
            rows[name] = {"median_us": middle.middle, "middle_half_us": (middle.low, middle.high)}
        case = {"preset": preset, "batch_size": batch_size, "captured": args.captured, "grad": grad}
        cases.append(case | {"rows": rows, "limits": found})
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"evidence": evidence, "cases": cases}, file, indent=1)
    met = all(each["met"] for case in cases for each in case["limits"])
    return 1 if args.strict and args.device == "cpu" and not met else 0


if __name__ == "__main__":
    sys.exit(main())
