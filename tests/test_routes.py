"""The launches that CUDA would make, against PyTorch's rules re-stated by example and by counting."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lib.routes import (
    LARGE_ARGUMENTS,
    SMALL_ARGUMENTS,
    ForeachLimits,
    copy_launch,
    explain,
    fill_launch,
    foreach_launches,
    memcpy_eligible,
)
from lib.strategies import STRATEGIES
from tests.tensors import Pairs, must_refuse, pairs, properties

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

F32 = torch.zeros(4, 6)
NESTED = torch.nested.nested_tensor([torch.zeros(8, dtype=torch.int64)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("dst", "src", "eligible"),
    [
        (F32, F32.clone(), True),
        (F32.t(), F32.clone().t(), True),  # reordered, both are dense
        (F32[:1], F32.clone()[1:2], True),
        (F32[:, :1], torch.zeros(4, 1), False),
        (F32[:, :3], torch.zeros(4, 3), False),  # the row stride stays the buffer's
        (F32.t(), torch.zeros(6, 4), False),
        (F32, torch.zeros(6).expand(4, 6), False),
        (F32, F32.double(), False),
        (F32, torch.zeros(1, 6), False),
        (torch.zeros(3, 1), torch.zeros(2, 3).t()[:, :1], True),  # a size-1 dimension's stride does not count
        (F32, torch._neg_view(F32.clone()), False),
        (torch._neg_view(F32), torch._neg_view(F32.clone()), True),
        (torch.tensor(1.0), torch.tensor(2.0), True),
    ],
)
def test_memcpy_eligible(dst: Tensor, src: Tensor, eligible: bool):
    assert memcpy_eligible(dst, src) is eligible
    assert copy_launch(dst, src).kind == ("memcpy" if eligible else "elementwise")


def test_no_launch_for_nothing_and_for_a_memcpy_onto_itself():
    assert copy_launch(F32[:0], F32[:0].clone()) is None
    assert copy_launch(F32, F32.view(4, 6)) is None
    assert fill_launch(F32[:0]) is None and fill_launch(F32).bytes == 96


def _many(n: int, numel: int = 1, dtype: torch.dtype = torch.uint8) -> list[Tensor]:
    return [torch.empty(numel, dtype=dtype, device="meta") for _ in range(n)]


@pytest.mark.parametrize(
    ("limits", "tensors", "chunks"), [(SMALL_ARGUMENTS, 64, 320), (LARGE_ARGUMENTS, 448, 2_240)]
)
def test_one_launch_holds_so_many_tensors_and_chunks(limits: ForeachLimits, tensors: int, chunks: int):
    def count(dsts: list[Tensor]) -> list[int]:
        return [launch.n_copies for launch in foreach_launches(dsts, dsts, limits)]

    assert count(_many(tensors)) == [tensors]
    assert count(_many(tensors + 1)) == [tensors, 1]
    chunk = limits.chunk_elements
    assert count(_many(1, chunks * chunk)) == [1]
    assert count(_many(1, chunks * chunk + 1)) == [1, 1]  # the tensor goes on in the second launch
    assert count(_many(chunks // 10, 10 * chunk)) == [chunks // 10]
    assert count([*_many(chunks // 10, 10 * chunk), *_many(1)]) == [chunks // 10, 1]


@given(
    st.lists(st.sampled_from([0, 1, 7, 8, 9, 16, 40, 90]), max_size=40),
    st.integers(1, 6),
    st.integers(1, 9),
)
@properties(500)
def test_launches_of_multi_tensor_apply(numels: list[int], tensors: int, chunks: int):
    """Against filling the table chunk by chunk, as MultiTensorApply.cuh's loop does."""
    todo = [(t, n) for t, numel in enumerate(numels) for n in _chunks_of(numel, 8)]
    last = [t for t, _ in todo]
    expected, held = [], []
    for i, (t, n) in enumerate(todo):
        held.append((t, n))
        tensor_done = i + 1 == len(todo) or last[i + 1] != t
        in_table = {t for t, _ in held}
        if len(held) == chunks or (tensor_done and len(in_table) == tensors) or i + 1 == len(todo):
            expected.append((len(in_table), sum(n for _, n in held)))
            held = []
    dsts = [torch.empty(n, dtype=torch.uint8, device="meta") for n in numels]
    if not dsts:
        return
    launches = foreach_launches(dsts, dsts, ForeachLimits(tensors, chunks, chunk_elements=8))
    assert [(launch.n_copies, launch.bytes) for launch in launches] == expected


def _chunks_of(numel: int, size: int) -> list[int]:
    return [min(size, numel - start) for start in range(0, numel, size)]


@pytest.mark.parametrize(
    ("dsts", "srcs", "why"),
    [
        ([F32, F32], [F32.clone(), F32.double()], "source is torch.float64, the first torch.float32"),
        ([F32, F32.double()], [F32.clone(), F32.clone()], "destination is torch.float64"),
        ([F32, F32[:, :3]], [F32.clone(), torch.zeros(4, 3)], r"strides \(6, 1\) and \(3, 1\)"),
        ([F32, F32], [F32.clone(), torch.zeros(1, 6)], r"shapes \(4, 6\) and \(1, 6\)"),
        ([F32, F32], [F32.clone(), F32.to("meta")], "source on meta"),
    ],
)
def test_one_odd_pair_sends_the_whole_call_down_the_slow_path(dsts, srcs, why: str):
    launches = foreach_launches(dsts, srcs)
    assert [launch.call for launch in launches] == ["foreach_slow"] * 2
    assert all(re.search(why, launch.reason) for launch in launches)


def test_calls_that_pytorch_refuses():
    with pytest.raises(RuntimeError, match="above 0, got 0 and 0"):
        foreach_launches([], [])
    unsigned = [torch.zeros(4, dtype=torch.uint16)]
    with pytest.raises(NotImplementedError, match="uint16"):
        foreach_launches(unsigned, unsigned)


def test_explain_names_route_reason_and_remedy():
    i64, matrix = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 3, dtype=torch.int64)
    wide, large = torch.zeros(8, 16, dtype=torch.int32), torch.zeros(64 * 1024, dtype=torch.bfloat16)
    cases = {  # name: destination, source, route, in the reason, in the remedy
        "seq_lens": (i64.clone(), i64, "foreach", "others of its dtype", "byte arena"),
        "positions": (i64.clone(), i64, "foreach", "others of its dtype", "byte arena"),
        "topk_p": (torch.zeros(8), torch.zeros(8), "memcpy", "alone with its dtypes", "fused Triton kernel"),
        "accepted": (i64.clone(), matrix[:, 1], "elementwise", "source lies otherwise", "contiguous at"),
        "block_tables": (wide[:, :4], torch.zeros(8, 4).int(), "elementwise", "has gaps", "captured size"),
        "hidden_states": (torch.zeros_like(large), large, "memcpy", "at least 65,536 bytes", "in place"),
        "lens": (torch.zeros(8).int(), i64, "elementwise", "converts torch.int64", "write torch.int32"),
        "ids": (i64.to(torch.uint64), i64.to(torch.uint64), "memcpy", "not built for", "as integers"),
        "neg": (torch.zeros(8), torch._neg_view(torch.ones(8)), "elementwise", "negative", "resolve_neg"),
        "both": (
            torch.zeros(8),
            torch._neg_view(torch.ones(8).double()),
            "elementwise",
            "converts torch.float64 to torch.float32; .*negative",
            "write torch.float32; have the producer resolve_conj() and resolve_neg()",
        ),
        "nothing": (i64[:0], i64[:0].clone(), "none", "no elements", "leave it out"),
        "nested": (i64.clone(), NESTED, "refused", "nested .*expected strided", "change what is named"),
        "short": (i64.clone(), i64[:1], "refused", "short .*equal shapes", "broadcast"),
    }
    dsts, srcs, *_ = zip(*cases.values())
    rows = explain(dsts, srcs, list(cases))
    for row, (name, (dst, _, route, reason, better)) in zip(rows, cases.items(), strict=True):
        assert (row.name, row.route, row.bytes) == (name, route, dst.nbytes)
        assert re.search(reason, row.reason) and better in row.better, row
    assert [row.shares for row in rows[:3]] == [2, 2, 1]
    assert rows[3].dst == "(8,) int64"


def test_explain_tells_a_destination_that_serves_two_pairs():
    buffer = torch.zeros(8)
    first, second = explain([buffer, buffer[4:]], [torch.ones(8), torch.ones(4)])
    assert (first.route, second.route) == ("memcpy", "refused")
    assert "shares memory" in second.reason
    with pytest.raises(ValueError, match="one source a destination, got 1 for 2"):
        explain([buffer, buffer], [buffer])


@given(pairs())
@properties(300)
def test_explain_agrees_with_the_launches_of_the_strategy(case: Pairs):
    dsts, srcs = case
    if must_refuse(dsts, srcs):
        if len(dsts) == len(srcs):
            assert "refused" in {row.route for row in explain(dsts, srcs)}
        return
    launches = STRATEGIES["grouped_foreach_dma"].launches(dsts, srcs)
    rows = explain(dsts, srcs)
    assert [row.name for row in rows] == [f"pair {i}" for i in range(len(dsts))]
    singles = Counter(row.route for row in rows if row.route in ("memcpy", "elementwise"))
    assert singles == Counter(launch.kind for launch in launches if launch.kind != "foreach")
    served = sum(launch.n_copies for launch in launches if launch.kind == "foreach")
    assert served == sum(row.route == "foreach" and row.bytes > 0 for row in rows)
