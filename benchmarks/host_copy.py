"""What filling the draft graph's buffers costs the host: SGLang's replay section against CopyPlan.

    PYTHONPATH=. python benchmarks/host_copy.py [--device cpu] [--preset tiny] [--batch-size 8] [--json FILE]

On a CPU nothing is launched, so this is the cost of Python and the dispatcher around copies of a few hundred
bytes, which is what CopyPlan is about; on CUDA the launches come on top. Ways run interleaved, and every call
gets the next of 16 batches, as an engine's steps would. Figures are medians, ratios formed inside a round.
On a CPU it exits with 1 where a ratio is above its limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from lib import CopyPlan, grouped_foreach_copy_
from lib.eagle import DraftBatch, EagleConfig
from lib.eagle.fields import Field
from lib.evidence import device_name, label
from lib.timing import Timing, measure, ratio

Way = Callable[[DraftBatch], None]
LIMITS = {  # of SGLang's replay section
    "unpadded": {"plan": 0.45, "plan, unchecked": 0.33},
    "padded": {"plan": 0.50},
}


def grouped_foreach_copy_as_sglang(dsts: list[Tensor], srcs: list[Tensor]) -> None:
    """The helper that sglang's pull request 28465 applies, re-stated: group by dtype pair, one call each."""
    groups: dict[tuple, tuple[list[Tensor], list[Tensor]]] = {}
    for dst, src in zip(dsts, srcs):
        key = (dst.dtype, src.dtype)
        if key not in groups:
            groups[key] = ([], [])
        groups[key][0].append(dst)
        groups[key][1].append(src)
    for group_dsts, group_srcs in groups.values():
        torch._foreach_copy_(group_dsts, group_srcs)


class Buffers:
    """Static buffers of the draft graph for the largest captured batch size; SGLang's attribute names."""

    def __init__(self, config: EagleConfig, device: str) -> None:
        self.config = config
        self.k, self.s = config.topk, config.num_steps
        self.fields: list[Field] = [f for f in config.table("draft") if not f.host]
        for f in self.fields:
            shape = config.shape(f, config.max_batch_size)
            setattr(self, f.name, torch.zeros(shape, dtype=f.dtype or config.dtype, device=device))

    def rows(self, f: Field, start: int, stop: int) -> Tensor:
        first, end = (self.config.shape(f, n)[0] for n in (start, stop))
        return getattr(self, f.name)[first:end]


def per_copy(b: Buffers, padded_bs: int) -> Way:
    """SGLang's replay section before pull request 28465: fills when padded, one `copy_` a field."""

    def way(batch: DraftBatch) -> None:
        bs = batch.seq_lens.shape[0]
        if bs != padded_bs:
            _fill(b)
        b.seq_lens[:bs].copy_(batch.seq_lens)
        b.out_cache_loc[: bs * b.s * b.k].copy_(batch.out_cache_loc)
        b.positions[: bs * b.k].copy_(batch.positions)
        b.topk_p[:bs].copy_(batch.topk_p)
        b.topk_index[:bs].copy_(batch.topk_index)
        b.req_pool_indices[:bs].copy_(batch.req_pool_indices)
        b.hidden_states[:bs].copy_(batch.hidden_states)

    return way


def sglang(b: Buffers, padded_bs: int, grouped_copy: Callable = grouped_foreach_copy_as_sglang) -> Way:
    """SGLang's replay section since then: fills when padded, two lists, groups, hidden_states alone."""

    def way(batch: DraftBatch) -> None:
        bs = batch.seq_lens.shape[0]
        if bs != padded_bs:
            _fill(b)
        dsts = [
            b.seq_lens[:bs],
            b.out_cache_loc[: bs * b.s * b.k],
            b.positions[: bs * b.k],
            b.topk_p[:bs],
            b.topk_index[:bs],
            b.req_pool_indices[:bs],
        ]
        srcs = [
            batch.seq_lens,
            batch.out_cache_loc,
            batch.positions,
            batch.topk_p,
            batch.topk_index,
            batch.req_pool_indices,
        ]
        grouped_copy(dsts, srcs)
        b.hidden_states[:bs].copy_(batch.hidden_states)

    return way


def _fill(b: Buffers) -> None:
    b.seq_lens.fill_(1)
    b.out_cache_loc.zero_()
    b.positions.zero_()
    b.topk_p.zero_()
    b.topk_index.zero_()
    b.req_pool_indices.zero_()
    b.hidden_states.zero_()


def plan(b: Buffers, bs: int, padded_bs: int, check: bool = True, constants: bool = True) -> Way:
    """CopyPlan; `constants` copies the pad rows every step, else they are clean from the step before."""
    names = [f.name for f in b.fields]
    dsts = [b.rows(f, 0, bs) for f in b.fields]
    pads = [(b.rows(f, bs, padded_bs), f) for f in b.fields if padded_bs > bs and not f.large]
    pads = [(dst, torch.full_like(dst, b.config.pad_value(f))) for dst, f in pads]
    copy = CopyPlan(dsts, [dst.dtype for dst in dsts], names, pads)

    def way(t: DraftBatch) -> None:
        srcs = (
            t.seq_lens,
            t.out_cache_loc,
            t.positions,
            t.topk_p,
            t.topk_index,
            t.req_pool_indices,
            t.hidden_states,
        )
        copy(srcs, check, constants)

    copy([torch.zeros_like(dst) for dst in dsts])  # the pads are clean from here on
    return way


def compare(
    config: EagleConfig, bs: int, padded_bs: int, rounds: int, calls: int, device: str
) -> dict[str, Timing]:
    """Host time of the ways for `bs` requests in a graph captured for `padded_bs`, by name."""
    batches = [DraftBatch.random(config, bs, seed, device) for seed in range(16)]
    ways = {
        "per copy": per_copy(Buffers(config, device), padded_bs),
        "sglang": sglang(Buffers(config, device), padded_bs),
        "sglang, checked": sglang(Buffers(config, device), padded_bs, grouped_foreach_copy_),
        "plan": plan(Buffers(config, device), bs, padded_bs, constants=False),
        "plan, unchecked": plan(Buffers(config, device), bs, padded_bs, check=False, constants=False),
    }
    if padded_bs > bs:
        ways["plan, pads too"] = plan(Buffers(config, device), bs, padded_bs)

    def steps(way: Way) -> Callable[[], None]:
        following = itertools.cycle(batches)
        return lambda: way(next(following))

    return measure({name: steps(way) for name, way in ways.items()}, rounds, calls, device=device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--preset", default="tiny", help="sizes, as EagleConfig.preset names them")
    parser.add_argument("--batch-size", type=int, default=8, help="a captured one; one less is padded to it")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--calls", type=int, default=100, help="calls a round")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = EagleConfig.preset(args.preset)
    if args.batch_size not in config.capture_batch_sizes[1:]:
        parser.error(f"--batch-size: expected one of {config.capture_batch_sizes[1:]}, got {args.batch_size}")

    figures, met = [], True
    with torch.no_grad():  # SGLang's default: SGLANG_ENABLE_TORCH_INFERENCE_MODE is false
        for case, bs in (("unpadded", args.batch_size), ("padded", args.batch_size - 1)):
            results = compare(config, bs, args.batch_size, args.rounds, args.calls, args.device)
            print(f"\n{case}, {args.preset}, {bs} requests in a graph for {args.batch_size}")
            for name, timing in results.items():
                share, limit = ratio(timing, results["sglang"]), LIMITS[case].get(name)
                limit = limit if args.device == "cpu" else None
                low, high = timing.spread_us
                verdict = (
                    "" if limit is None else f"  limit {limit:.2f}  {'ok' if share <= limit else 'ABOVE'}"
                )
                print(
                    f"  {name:16} {timing.median_us:6.2f} us ({low:.2f} to {high:.2f})  {share:.2f}{verdict}"
                )
                met &= limit is None or share <= limit
                figures.append(
                    {"case": case, "way": name, "median_us": timing.median_us, "ratio": share, "limit": limit}
                )
    evidence = label("measured", device_name(args.device))
    print(f"\nhost time a replay, median (middle half), ratio to sglang · {evidence}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"evidence": evidence, "figures": figures}, file, indent=1)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
