"""Every strategy: bitwise what a loop of `copy_` leaves, or the documented refusal; and its launches."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.copies import DEFAULT_DMA_BYTES, grouped_dma
from lib.launches import launches
from lib.strategies import STRATEGIES, Step, grouped_foreach_dma
from tests.tensors import DTYPES, must_refuse, one_nan, pairs, properties, without_denormals
from tests.tensors import assert_copies_or_refuses as check
from tests.tensors import assert_runs_what_is_counted as check_launches

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex", "ignore:ComplexHalf", "ignore:.*in cast")
TRITON = ("small_copy", "fused")
WAYS = {**STRATEGIES, "everything alone": partial(grouped_foreach_dma, dma_bytes=0)}


def no_byte_view(t):
    """Not where the last stride is not 1, of 0-dim and of lazy views; one-byte types always have one."""
    lazy = t.is_conj() or t.is_neg()
    return lazy or (t.element_size() > 1 and (t.dim() == 0 or t.stride(-1) != 1))


def watched(name, dsts, srcs):
    check_launches(WAYS[name](Step.of(dsts, srcs)))


@given(pairs())
@properties(300)
def test_strategies_leave_what_a_loop_of_copy_leaves_and_launch_what_they_count(case):
    dsts, srcs = case
    check(case, *(partial(watched, name) for name in WAYS if name not in (*TRITON, "uint8_view")))
    converts = any(d.dtype != s.dtype for d, s in zip(dsts, srcs))
    must = converts or any(map(no_byte_view, (*dsts, *srcs)))
    check(case, partial(watched, "uint8_view"), must=must, refuses=(ValueError, RuntimeError))


some_dtypes = st.sampled_from([DTYPES, DTYPES, [torch.int32, torch.int64]])


@given(some_dtypes.flatmap(lambda dtypes: pairs(dtypes, max_pairs=5)))
@properties(2_000)
def test_so_do_those_with_a_kernel_of_triton_in_its_interpreter(case):
    """All bits of all dtypes, but the payload of a NaN that is converted: each device has its own."""
    pytest.importorskip("triton")
    without_denormals(case[1])
    check(case, *(partial(watched, name) for name in TRITON), settle=one_nan)


def test_uint8_view_names_the_field():
    dst, src = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"positions: .*stride"):
        STRATEGIES["uint8_view"](Step.of([dst], [src[:, 0]], ["positions"]))
    with pytest.raises(ValueError, match=r"seq_lens: .*convert torch.int64 to torch.int32"):
        STRATEGIES["uint8_view"](Step.of([dst.int()], [dst], ["seq_lens"]))


def test_what_is_large_alone_or_empty():
    small = [torch.zeros(8, dtype=torch.int64) for _ in range(4)]
    dsts = [*small, torch.zeros(8), torch.zeros(0), torch.zeros(DEFAULT_DMA_BYTES // 8, dtype=torch.int64)]
    step = Step.of(dsts, [t.clone() for t in dsts])
    large = ("memcpy", 1, DEFAULT_DMA_BYTES)
    for name, expected in {
        "per_copy": [("memcpy", 1, 64)] * 4 + [("memcpy", 1, 32), large],
        "grouped_foreach": [("foreach", 5, 256 + DEFAULT_DMA_BYTES), ("foreach", 1, 32)],
        "grouped_foreach_dma": [("foreach", 4, 256), ("memcpy", 1, 32), large],
        "copy_plan": [("foreach", 4, 256), large, ("memcpy", 1, 32)],
        "uint8_view": [("foreach", 5, 288), large],
        "fused": [("fused", 5, 288), large],
    }.items():
        calls = STRATEGIES[name](step)
        made = [(x.kind, x.n_copies, x.bytes) for x in launches(calls)]
        assert sorted(made) == sorted(expected), name
        if name in ("copy_plan", "fused"):  # which are kept: an empty pair costs no call
            assert len(calls) == len(made)
    converting = [torch.zeros(DEFAULT_DMA_BYTES, dtype=torch.int32) for _ in range(2)]
    (group,) = grouped_dma(zip(converting, [t.long() for t in converting]))  # whatever their size
    assert group.op == "foreach"


def test_one_kernel_takes_32_pairs_and_small_copy_any_number():
    step = Step.of([torch.zeros(3) for _ in range(40)], [torch.ones(3)] * 40)
    one = Step.of([torch.zeros(3)], [torch.ones(3)])
    for name, of, expected in (
        ("small_copy", step, [("fused", 40)]),
        ("fused", step, [("fused", 32), ("fused", 8)]),
        ("small_copy", one, [("foreach", 1)]),  # from two pairs on
        ("fused", one, [("fused", 1)]),
    ):
        assert [(call.op, len(call.dsts)) for call in STRATEGIES[name](of)] == expected


def test_property_tests_meet_what_they_are_for():
    """Every dtype comes up, and refusals are neither rare nor the rule."""
    dtypes, refused = set(), []

    @given(pairs())
    @properties(100)
    def survey(case):
        refused.append(must_refuse(*case))
        dtypes.update(t.dtype for side in case for t in side)

    survey()
    assert dtypes == set(DTYPES) and 0.1 < sum(refused) / len(refused) < 0.7
