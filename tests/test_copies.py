"""The file that people take away: what it copies, what it refuses and how, and the calls it makes."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lib import CopyPlan, ReplayCopies, StaticInput, copies, grouped, grouped_foreach_copy_, run
from lib.copies import DEFAULT_DMA_BYTES
from lib.launches import launches
from tests.tensors import (
    Pairs,
    assert_copies_or_refuses,
    laid_out,
    must_refuse,
    pairs,
    properties,
    random_values,
    restore,
    same,
    snapshot,
    storages,
)

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values", "ignore:ComplexHalf support")
FIT = (None, 3, 8)  # mutations that leave pairs fit: as they are, onto itself, the same pair twice


def dtypes(tensors: list[Tensor]) -> list[torch.dtype]:
    return [t.dtype for t in tensors]


# ---- any pairs --------------------------------------------------------------------------------------------


@given(pairs(), st.integers(0, 2))
@properties(2_000)
def test_they_leave_what_a_loop_of_copy_leaves_or_refuse(case: Pairs, n_constants: int):
    def planned(dsts: list[Tensor], srcs: list[Tensor]) -> None:
        n = min(n_constants, len(dsts), len(srcs))
        constants = list(zip(dsts[:n], srcs[:n]))
        types = dtypes(srcs[n:])[: len(dsts) - n] + [torch.int8] * (len(dsts) - len(srcs))
        plan = CopyPlan(dsts[n:], types, constants=constants, check="full")
        plan(srcs[n:])
        plan(srcs[n:])  # as steps are

    assert_copies_or_refuses(grouped_foreach_copy_, *case)
    assert_copies_or_refuses(planned, *case)


@given(pairs(mutations=FIT), st.integers(0, 1000))
@properties(500)
def test_one_plan_serves_any_sources_of_its_shapes(case: Pairs, seed: int):
    """Strided, lazy or of another dtype: copied right, and counted."""
    dsts, srcs = case
    plan, memory = CopyPlan(dsts, dtypes(srcs)), storages(dsts)
    plain = [random_values(s.shape, s.dtype, seed + i) for i, s in enumerate(srcs)]
    other = [random_values(s.shape, torch.int16, seed + i) for i, s in enumerate(srcs)]
    for sources in (srcs, plain, other, plain):
        saved, missed = snapshot(memory), plan.misses
        for dst, src in zip(dsts, sources):
            dst.copy_(src)
        expected = snapshot(memory)
        restore(memory, saved)
        plan(sources)
        assert same(memory, expected)
        as_planned = dtypes(sources) == dtypes(srcs) and not any(s.is_conj() or s.is_neg() for s in sources)
        assert plan.misses - missed == (not as_planned or not all(s.is_contiguous() for s in sources))


@given(pairs(mutations=FIT, max_pairs=10), st.sampled_from([None, 16, DEFAULT_DMA_BYTES]))
@properties(1_000)
def test_every_foreach_call_is_one_that_cuda_fuses(case: Pairs, dma_bytes: int | None):
    """One dtype pair a call, each pair once; none that the kernel refuses, none that takes the slow path."""
    dsts, srcs = case
    calls = grouped(zip(dsts, srcs), dma_bytes)
    seen = [(id(d), id(s)) for call in calls for d, s in zip(call.dsts, call.srcs)]
    assert sorted(seen) == sorted((id(d), id(s)) for d, s in zip(dsts, srcs) if (id(d), id(s)) in seen)
    assert all(d.numel() == 0 for d, s in zip(dsts, srcs) if (id(d), id(s)) not in seen)
    plan = CopyPlan(dsts, dtypes(srcs))
    for call in (*calls, *plan.calls(), *plan.calls(srcs)):
        if call.op == "foreach":
            assert len({(d.dtype, s.dtype) for d, s in zip(call.dsts, call.srcs)}) == 1
            assert {launch.kind for launch in launches([call])} <= {"foreach"}


def test_groups_and_what_goes_alone():
    i64, f32 = torch.zeros(8, dtype=torch.int64), torch.zeros(8)
    large = torch.zeros(DEFAULT_DMA_BYTES // 8, dtype=torch.int64)
    each = [(i64, i64), (i64.int(), i64), (f32, f32), (i64, i64), (large, large), (large.int(), large)]
    each = [(dst.clone(), src) for dst, src in each]

    def made(dma_bytes: int | None) -> list[tuple]:
        return [(call.op, len(call.dsts), call.dsts[0].dtype) for call in grouped(each, dma_bytes)]

    in_order = [("foreach", 3, torch.int64), ("foreach", 2, torch.int32), ("foreach", 1, torch.float32)]
    assert made(None) == in_order  # groups come in the order of their first pair
    large_or_alone = [("copy_", 1, torch.float32), ("copy_", 1, torch.int64)]
    converting = ("foreach", 2, torch.int32)  # whatever its size
    assert made(DEFAULT_DMA_BYTES) == [("foreach", 2, torch.int64), converting, *large_or_alone]
    assert grouped([]) == [] and grouped_foreach_copy_([], []) is None


# ---- a plan -----------------------------------------------------------------------------------------------

NAMES = ["seq_lens", "topk_p", "hidden_states"]


def buffers() -> list[Tensor]:
    return [torch.zeros(8, dtype=torch.int64), torch.zeros(8), torch.zeros(8, 3, dtype=torch.bfloat16)]


def plan_of(dsts: list[Tensor], **options) -> CopyPlan:
    return CopyPlan([dst[:4] for dst in dsts], dtypes(dsts), NAMES, **options)


WRONG = {
    "one less": (lambda srcs: srcs[:2], "2 sources"),
    "none": (lambda srcs: [srcs[0], None, srcs[2]], "topk_p: .*tensor.*NoneType"),
    "a list": (lambda srcs: [[1, 2, 3, 4], *srcs[1:]], "seq_lens: .*tensor.*list"),
    "numpy": (lambda srcs: [srcs[0].numpy(), *srcs[1:]], "seq_lens: .*tensor.*ndarray"),
    "shape": (lambda srcs: [*srcs[:2], srcs[2][:3]], r"hidden_states: expected shape \(4, 3\), got \(3, 3\)"),
    "to broadcast": (lambda srcs: [srcs[0][:1], *srcs[1:]], r"seq_lens: expected shape \(4,\), got \(1,\)"),
    "device": (lambda srcs: [*srcs[:2], srcs[2].to("meta")], "hidden_states: expected .*cpu, got meta"),
    "sparse": (lambda srcs: [srcs[0], srcs[1].to_sparse(), srcs[2]], "topk_p: expected .*strided"),
    "dtype": (lambda srcs: [*srcs[:2], srcs[2].view(torch.float16).to(COMPLEX32)], ""),
}
COMPLEX32 = torch.complex32
del WRONG["dtype"]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_source_that_does_not_fit_is_named_and_nothing_is_written(wrong: str):
    change, says = WRONG[wrong]
    dsts = buffers()
    plan, section = plan_of(dsts), ReplayCopies({name: StaticInput(dst) for name, dst in zip(NAMES, dsts)})
    srcs = [torch.ones_like(dst[:4]) for dst in dsts]
    bad = change(srcs)
    before = snapshot(dsts)
    uses: list[Callable] = [plan, plan.calls]
    if len(bad) == 3 and None not in [type(b) if b is None else 0 for b in bad]:
        uses.append(lambda bad: section(dict(zip(NAMES, bad)), 4, 8))
    for use in uses:
        with pytest.raises(ValueError, match=says):
            use(bad)
    assert same(dsts, before)
    plan(srcs)
    assert all(torch.equal(dst[:4], src) for dst, src in zip(dsts, srcs))
