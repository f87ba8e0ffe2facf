"""The helper that people take away: what it copies, what it refuses and how, and the calls it makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lib import grouped_copy
from lib.grouped_copy import check_pairs, grouped_foreach_copy_, overlaps_itself, same_dense_layout
from lib.routes import foreach_launches
from lib.strategies import STRATEGIES
from tests.tensors import (
    DTYPES,
    SHAPES,
    SRC_LAYOUTS,
    Pairs,
    assert_copies_or_refuses,
    byte_addresses,
    element_addresses,
    laid_out,
    must_refuse,
    pairs,
    properties,
)

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values", "ignore:ComplexHalf support")


@given(pairs())
@properties(2_000)
def test_helper_leaves_what_a_loop_of_copy_leaves_or_refuses(case: Pairs):
    assert_copies_or_refuses(grouped_foreach_copy_, *case)


@given(pairs(mutations=("", "interleaved", 3), max_pairs=10))
@properties(1_000)
def test_every_foreach_call_is_one_that_cuda_fuses(case: Pairs):
    """One dtype pair a call, none that the fused kernel refuses, none that takes the slow path."""
    calls: list[Pairs] = []
    original = grouped_copy._foreach_copy_
    grouped_copy._foreach_copy_ = lambda dsts, srcs: (calls.append((dsts, srcs)), original(dsts, srcs))
    try:
        grouped_foreach_copy_(*case)
    finally:
        grouped_copy._foreach_copy_ = original
    for dsts, srcs in calls:
        assert len({(d.dtype, s.dtype) for d, s in zip(dsts, srcs)}) == 1
        assert {launch.kind for launch in foreach_launches(dsts, srcs)} <= {"foreach"}
    assert len({(d[0].dtype, s[0].dtype, tuple(map(id, d))) for d, s in calls}) == len(calls)


@given(pairs())
@properties(300)
def test_a_torch_without_the_op_is_served_by_a_loop(case: Pairs):
    original, grouped_copy._foreach_copy_ = grouped_copy._foreach_copy_, None
    try:
        assert_copies_or_refuses(grouped_foreach_copy_, *case)
    finally:
        grouped_copy._foreach_copy_ = original


def test_groups_come_in_the_order_of_their_first_pair(monkeypatch):
    calls = []
    monkeypatch.setattr(grouped_copy, "_foreach_copy_", lambda dsts, srcs: calls.append((dsts, srcs)))
    i64, i32, f32 = (torch.zeros(4, dtype=dtype) for dtype in (torch.int64, torch.int32, torch.float32))
    dsts = [i64.clone(), i32.clone(), f32.clone(), i64.clone(), i32.clone()]
    grouped_foreach_copy_(dsts, [i64, i64, f32, i64, i32])
    assert [(len(d), d[0].dtype, s[0].dtype) for d, s in calls] == [
        (2, torch.int64, torch.int64),
        (1, torch.int32, torch.int64),
        (1, torch.float32, torch.float32),
        (1, torch.int32, torch.int32),
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_nan_payloads_travel_as_integers(dtype: torch.dtype, monkeypatch):
    """The fused kernel would pass these types through float32."""
    seen = []
    original = grouped_copy._foreach_copy_
    monkeypatch.setattr(
        grouped_copy, "_foreach_copy_", lambda d, s: (seen.append((d[0].dtype, s[0].dtype)), original(d, s))
    )
    every = torch.arange(2 ** (8 * dtype.itemsize)).to({1: torch.uint8, 2: torch.int16}[dtype.itemsize])
    srcs = [every.view(dtype), every.flip(0).view(dtype)]
    dsts = [torch.zeros_like(src) for src in srcs]
    grouped_foreach_copy_(dsts, srcs)
    assert all(torch.equal(d.view(every.dtype), s.view(every.dtype)) for d, s in zip(dsts, srcs))
    assert seen and not any(t.is_floating_point for pair in seen for t in pair)


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.float8_e8m0fnu]
)
def test_dtypes_the_fused_kernel_lacks_go_by_copy(dtype: torch.dtype, monkeypatch):
    monkeypatch.setattr(grouped_copy, "_foreach_copy_", lambda *_: pytest.fail("would raise on CUDA"))
    src = torch.arange(64, dtype=torch.uint8).view(dtype)
    dsts = [torch.zeros_like(src) for _ in range(2)]
    grouped_foreach_copy_(dsts, [src, src])
    assert all(torch.equal(d.view(torch.uint8), src.view(torch.uint8)) for d in dsts)


def test_empty_lists_do_nothing():
    grouped_foreach_copy_([], [])


I64 = torch.zeros(4, dtype=torch.int64)
NESTED = torch.nested.nested_tensor([I64], layout=torch.jagged)


@pytest.mark.parametrize(
    ("dsts", "srcs", "says"),
    [
        ([I64], [], r"one source a destination, got 0 for 1 destinations"),
        ([I64], [I64[:1]], r"seq_lens .*\(4,\).*\(1,\).*equal shapes"),
        ([I64[:1].expand(4)], [I64 + 1], r"seq_lens .*overlaps itself, strides \(0,\)"),
        ([I64], [I64.to("meta")], r"seq_lens .*one device, got cpu and meta"),
        (
            [I64],
            [(I64 + 1).to_sparse()],
            r"seq_lens .*expected strided, got torch.strided and torch.sparse_coo",
        ),
        ([I64], [NESTED], r"seq_lens .*source nested.*expected strided, got torch.strided and nested"),
        ([I64[1:]], [I64[:-1]], r"seq_lens .*shares its own source, in part"),
        ([torch.zeros(4, requires_grad=True)], [torch.zeros(4)], r"seq_lens .*requires grad"),
    ],
)
def test_refusals_name_the_field_and_what_was_expected(dsts, srcs, says):
    before = I64.clone()
    with pytest.raises(ValueError, match=says):
        grouped_foreach_copy_(dsts, srcs, np.array(["seq_lens"]))
    assert torch.equal(I64, before)


def test_refusals_name_both_pairs_that_share_memory():
    other = torch.ones(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"positions .*shares memory of seq_lens|seq_lens .*of positions"):
        check_pairs([I64, I64[2:]], [other, other[2:]], ["seq_lens", "positions"])
    with pytest.raises(ValueError, match=r"pair 0 .*shares memory of pair 1"):
        check_pairs([I64, other], [other + 1, I64])
    with pytest.raises(ValueError, match="one name a destination, got 1 for 2"):
        check_pairs([I64, other], [other, I64], ["seq_lens"])


def test_an_inference_tensor_is_written_in_inference_mode_only():
    with torch.inference_mode():
        dst = torch.zeros(4, dtype=torch.int64)
        grouped_foreach_copy_([dst], [I64 + 1])
    with pytest.raises(ValueError, match="inference tensor"):
        grouped_foreach_copy_([dst], [I64])
    assert dst.tolist() == [1, 1, 1, 1]


class Wrapper(Tensor):
    """A subclass that has no memory of its own, only that of the tensor it holds."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(x):
            return [unwrap(y) for y in x] if isinstance(x, (list, tuple)) else getattr(x, "held", x)

        return func(*map(unwrap, args), **(kwargs or {}))


PLANS = [STRATEGIES["copy_plan"], STRATEGIES["fused_kernel"]]


@pytest.mark.parametrize("copy", [grouped_foreach_copy_, *PLANS])
def test_subclasses_without_memory_share_none(copy):
    dsts = [torch.zeros(3), torch.zeros(3)]
    copy(dsts, [Wrapper(torch.ones(3)), Wrapper(torch.full((3,), 2.0))])
    assert [dst.tolist() for dst in dsts] == [[1.0] * 3, [2.0] * 3]
    if copy is grouped_foreach_copy_:  # a plan detaches its destinations, which this subclass cannot
        copy([Wrapper(dst) for dst in dsts], [torch.full((3,), 5.0), torch.full((3,), 6.0)])
        assert [dst.tolist() for dst in dsts] == [[5.0] * 3, [6.0] * 3]


VIEWS = st.tuples(
    st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.complex64]),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3),  # size, stride
    st.integers(0, 40),  # offset, in elements
)


@given(VIEWS, VIEWS)
@properties(3_000)
def test_shared_bytes_against_counted_addresses(one, other):
    """Any strides in any order, widths and offsets over one buffer, most of them interleaved."""
    memory = torch.zeros(1024, dtype=torch.uint8)
    a, b = (
        memory.view(dtype).as_strided([n for n, _ in dims], [s for _, s in dims], offset)
        for dtype, dims, offset in (one, other)
    )
    assert overlaps_itself(a) == (len(set(element_addresses(a))) < a.numel())
    if not overlaps_itself(a):
        shared = byte_addresses(a) & byte_addresses(b)
        try:
            check_pairs([a, torch.zeros_like(b)], [torch.zeros_like(a), b])
            assert not shared
        except ValueError:
            assert shared


def test_columns_and_blocks_of_one_matrix_are_told_apart_by_arithmetic(monkeypatch):
    """Counting addresses took 6 and 9 s. No more equations than distances, whatever the sizes."""
    equations = []
    solvable = grouped_copy._solvable
    monkeypatch.setattr(grouped_copy, "_solvable", lambda *of: (equations.append(of), solvable(*of))[1])
    grouped_copy._share.cache_clear()
    check_pairs(list(torch.zeros(64, 256).unbind(1)), [torch.ones(64)] * 256)
    matrix, block = torch.zeros(3000, 3000), torch.ones(1500, 1500)
    check_pairs([matrix[:1500, :1500], matrix[:1500, 1500:]], [block] * 2)
    assert len(equations) <= 256
    with pytest.raises(ValueError, match="shares memory"):
        check_pairs([matrix[:1500, :1500], matrix[1400:2900, 1499:2999]], [block] * 2)


@given(
    st.sampled_from(SHAPES),
    st.sampled_from([*SRC_LAYOUTS, "windows"]),
    st.sampled_from([*SRC_LAYOUTS, "windows"]),
)
@properties(800)
def test_layout_questions_against_counted_addresses(shape, layout, other):
    def make(layout: str) -> Tensor:
        if layout == "windows":  # every row starts one element after the row before
            return torch.arange(30).as_strided(shape, (1,) * len(shape))
        return laid_out(layout, shape, torch.int64, 0)

    a, b = make(layout), make(other)
    offsets = [[(x - t.data_ptr()) // 8 for x in element_addresses(t)] for t in (a, b)]
    assert overlaps_itself(a) == (len(set(offsets[0])) < a.numel())
    dense = all(sorted(o) == list(range(a.numel())) for o in offsets)
    assert same_dense_layout(a, b) == (dense and offsets[0] == offsets[1])


def test_property_tests_meet_what_they_are_for():
    """Every dtype and layout comes up, and refusals are neither rare nor the rule."""
    dtypes, refused, cases = set(), 0, 0

    @given(pairs())
    @properties(400)
    def survey(case: Pairs) -> None:
        nonlocal refused, cases
        cases += 1
        refused += must_refuse(*case)
        dtypes.update(t.dtype for side in case for t in side)

    survey()
    assert dtypes == set(DTYPES)
    assert 0.1 < refused / cases < 0.7
