"""CopyPlan: what it copies and refuses, that its check sees everything, and the launches it makes."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lib import CopyPlan, grouped_copy
from lib.routes import foreach_launches
from tests.tensors import (
    Pairs,
    assert_copies_or_refuses,
    must_refuse,
    pairs,
    properties,
    random_values,
    restore,
    same,
    snapshot,
    storages,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Casting complex values", "ignore:ComplexHalf support", "ignore:The PyTorch API of nested"
)


class AsOnCuda(CopyPlan):
    """A plan whose CPU tensors go the way of a GPU's: groups by dtype pair, singles, integer views."""

    _one_call_on_cpu = False


def planned(plan: type[CopyPlan], constants: int = 0):
    """A plan as a strategy: the first `constants` pairs never change. Run twice, as steps are."""

    def copy(dsts: list[Tensor], srcs: list[Tensor]) -> None:
        if len(dsts) != len(srcs):
            plan(dsts, [dst.dtype for dst in dsts])(srcs)
        n = min(constants, len(dsts))
        p = plan(dsts[n:], [src.dtype for src in srcs[n:]], constants=list(zip(dsts[:n], srcs[:n])))
        p(srcs[n:])
        p(srcs[n:])

    return copy


@given(pairs(), st.integers(0, 2))
@properties(2_000)
def test_plans_leave_what_a_loop_of_copy_leaves_or_refuse(case: Pairs, constants: int):
    assert_copies_or_refuses(planned(CopyPlan, constants), *case)
    assert_copies_or_refuses(planned(AsOnCuda, constants), *case)


@given(pairs(mutations=("", "interleaved")), st.integers(0, 1000))
@properties(500)
def test_one_plan_serves_any_sources_of_its_shapes_and_dtypes(case: Pairs, seed: int):
    """Contiguous, strided and lazy sources in turn, checked and unchecked, leave the same."""
    dsts, srcs = case
    memory = storages(dsts)
    for kind in (CopyPlan, AsOnCuda):
        plan = kind(dsts, [src.dtype for src in srcs])
        for sources in (srcs, [random_values(s.shape, s.dtype, seed + i) for i, s in enumerate(srcs)]):
            saved = snapshot(memory)
            for dst, src in zip(dsts, sources):
                dst.copy_(src)
            expected = snapshot(memory)
            restore(memory, saved)
            plan(sources)
            assert same(memory, expected)
            if sources is not srcs:
                restore(memory, saved)
                plan(sources, check=False)
                assert same(memory, expected)


@given(pairs(mutations=("", "interleaved")))
@properties(500)
def test_every_foreach_call_off_the_cpu_is_one_that_cuda_fuses(case: Pairs):
    """Whatever the sources look like in this step: none raises on CUDA, none takes the slow path."""
    dsts, srcs = case
    plan = AsOnCuda(dsts, [src.dtype for src in srcs])
    calls: list[Pairs] = []
    original = grouped_copy._foreach_copy_
    grouped_copy._foreach_copy_ = lambda dsts, srcs: (calls.append((dsts, srcs)), original(dsts, srcs))
    try:
        plan(srcs)
    finally:
        grouped_copy._foreach_copy_ = original
    for call in calls:
        assert {launch.kind for launch in foreach_launches(*call)} <= {"foreach"}
        assert not any(t.is_conj() or t.is_neg() for side in call for t in side)


@pytest.mark.parametrize("plan", [CopyPlan, AsOnCuda])
def test_a_negative_bit_is_resolved_after_the_conversion(plan: type[CopyPlan]):
    """As by `copy_`: the imaginary part of what was 1 becomes -0. A list would resolve it before: 0."""
    dsts = [torch.zeros(2, dtype=torch.complex64), torch.zeros(2)]
    srcs = [torch._neg_view(torch.ones(2, dtype=torch.float16)), torch.ones(2)]
    plan(dsts, [src.dtype for src in srcs])(srcs)
    expected = torch.zeros(2, dtype=torch.complex64).copy_(srcs[0])
    assert torch.equal(torch.view_as_real(dsts[0]).signbit(), torch.view_as_real(expected).signbit())
    assert torch.view_as_real(expected).signbit().all()


@given(pairs(mutations=range(8), max_pairs=4))
@properties(500)
def test_the_check_of_every_step_sees_what_check_pairs_sees(case: Pairs):
    """The plan is built for fitting sources; the unfit ones come later."""
    dsts, srcs = case
    if must_refuse(dsts, dsts):
        return
    plan = CopyPlan(dsts, [src.dtype for src in srcs[: len(dsts)]] + [torch.int8] * (len(dsts) - len(srcs)))
    memory = storages([*dsts, *srcs])
    before = snapshot(memory)
    if must_refuse(dsts, srcs):
        with pytest.raises(ValueError):
            plan(srcs)
        assert same(memory, before)
    else:
        plan(srcs)


N = 4


def buffers() -> tuple[list[Tensor], list[Tensor]]:
    dsts = [torch.zeros(8, dtype=torch.int64), torch.zeros(8), torch.zeros(8, 3, dtype=torch.bfloat16)]
    return dsts, [torch.ones_like(dst[:N]) for dst in dsts]


NAMES = ["seq_lens", "topk_p", "hidden_states"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d, s: s[:2], "expected one source a destination, got 2 for 3"),
        (lambda d, s: [s[0].int(), *s[1:]], r"seq_lens .*expected a source of torch.int64, got torch.int32"),
        (lambda d, s: [s[0], s[1][:3], s[2]], r"topk_p \(destination \(4,\).*source \(3,\).*equal shapes"),
        (lambda d, s: [s[0], s[1][:1], s[2]], r"topk_p .*equal shapes"),
        (lambda d, s: [s[0].to("meta"), *s[1:]], r"seq_lens .*one device, got cpu and meta"),
        (lambda d, s: [d[0][2:6], *s[1:]], r"seq_lens .*its own source, in part"),
        (lambda d, s: [s[0], d[0].view(torch.float32)[2:6], s[2]], r"seq_lens .*shares memory of topk_p"),
        (lambda d, s: [s[0], s[1].to_sparse(), s[2]], r"topk_p .*expected strided"),
        (lambda d, s: [torch.from_numpy(d[0].numpy()[1:5]), *s[1:]], r"seq_lens .*its own source, in part"),
        (lambda d, s: [torch.from_numpy(d[0].numpy()[::2]), *s[1:]], r"seq_lens .*its own source, in part"),
        (lambda d, s: [torch.nested.nested_tensor([s[0]]), *s[1:]], r"seq_lens .*expected strided.*nested"),
    ],
)
def test_a_source_that_does_not_fit_raises_before_anything_is_written(change, says: str):
    dsts, srcs = buffers()
    plan = CopyPlan([dst[:N] for dst in dsts], [dst.dtype for dst in dsts], NAMES)
    plan([torch.zeros_like(src) for src in srcs])
    before = [dst.clone() for dst in dsts]
    for use in (plan, plan.launches):
        with pytest.raises(ValueError, match=says):
            use(change(dsts, srcs))
    assert all(torch.equal(dst, old) for dst, old in zip(dsts, before))
    plan(srcs)
    assert all(torch.equal(dst[:N], src) for dst, src in zip(dsts, srcs))


def test_sources_in_rows_that_no_destination_covers_are_let_through():
    """They live in a destination's storage, so the quick check sends them to the exact one."""
    dsts, _ = buffers()
    CopyPlan([dsts[0][:N]], [torch.int64])([dsts[0][N:].add_(7)])
    assert dsts[0].tolist() == [7] * 8


def test_memory_of_numpy_is_seen_through_strides_whatever_came_before():
    """A strided source over it has a storage of its own, at an address found fit for a contiguous one."""
    array = np.arange(100)
    dst = torch.from_numpy(array[50:58])
    plan = CopyPlan([dst], [torch.int64])
    plan([torch.from_numpy(array[0:8])])
    with pytest.raises(ValueError, match="its own source, in part"):
        plan([torch.from_numpy(array)[0:80:10]])
    assert dst.tolist() == list(range(8))


@pytest.mark.parametrize("kind", [CopyPlan, AsOnCuda])
def test_sources_in_a_destinations_storage_are_checked_once_and_strided_ones_always(kind, monkeypatch):
    storage = torch.arange(64)
    plan = kind([storage[32:40], storage[48:56]], [torch.int64] * 2)
    srcs = [storage[8:16], storage[56:64]]
    plan(srcs)
    with monkeypatch.context() as patch:
        patch.setattr(plan, "check", lambda srcs: pytest.fail("checked again"))
        plan(srcs)
    assert storage[48:56].tolist() == list(range(56, 64))
    with pytest.raises(ValueError, match="shares"):
        plan([torch.as_strided(storage, (8,), (4,), 8), srcs[1]])  # where the contiguous one started


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda d: CopyPlan(d, [torch.int64]), "one dtype a destination, got 1 for 3 destinations"),
        (
            lambda d: CopyPlan(d, [t.dtype for t in d], ["a"]),
            "one name a destination, got 1 for 3 destinations",
        ),
        (lambda d: CopyPlan([d[0], d[0][1:]], [torch.int64] * 2, ["a", "b"]), "shares memory of"),
        (lambda d: CopyPlan([d[0][:1].expand(4)], [torch.int64], ["a"]), r"a .*overlaps itself"),
        (
            lambda d: CopyPlan(d[:1], [torch.int64], constants=[(d[1], d[1][:2])]),
            r"constant 0 .*equal shapes",
        ),
        (
            lambda d: CopyPlan(d[:1], [torch.int64], constants=[(d[1], torch.zeros(8).to("meta"))]),
            "one device",
        ),
        (lambda d: CopyPlan(d[:1], [torch.int64], constants=[(d[0][4:], d[0][:4])]), "shares memory of"),
    ],
)
def test_what_is_wrong_with_destinations_and_constants_raises_when_built(build, says: str):
    with pytest.raises(ValueError, match=says):
        build(buffers()[0])


def test_constants_are_copied_along_or_left():
    dsts, srcs = buffers()
    pads = [(dst[N:], torch.full_like(dst[N:], 9)) for dst in dsts]
    plan = CopyPlan([dst[:N] for dst in dsts], [dst.dtype for dst in dsts], NAMES, pads)
    plan(srcs, constants=False)
    assert dsts[0].tolist() == [1] * 4 + [0] * 4
    plan(srcs)
    assert dsts[0].tolist() == [1] * 4 + [9] * 4 and dsts[2][N:].eq(9).all()


def test_launches_with_and_without_constants():
    dsts, _ = buffers()
    dsts.append(torch.zeros(8, dtype=torch.int64))
    pads = [(dst[N:], torch.zeros_like(dst[N:])) for dst in (dsts[0], dsts[1], dsts[3])]
    plan = CopyPlan([dst[:N] for dst in dsts], [dst.dtype for dst in dsts], constants=pads)
    assert [(x.kind, x.n_copies, x.bytes) for x in plan.launches(constants=False)] == [
        ("foreach", 2, 64),
        ("memcpy", 1, 16),
        ("memcpy", 1, 24),
    ]
    assert [(x.kind, x.n_copies, x.bytes) for x in plan.launches()] == [
        ("foreach", 4, 128),
        ("foreach", 2, 32),
        ("memcpy", 1, 24),
    ]


def test_launches_of_the_sources_at_hand():
    plan = CopyPlan([torch.zeros(8, dtype=torch.int64) for _ in range(3)], [torch.int64] * 3)
    column = torch.zeros(8, 4, dtype=torch.int64)[:, 1]
    plain = torch.zeros(8, dtype=torch.int64)
    assert [x.kind for x in plan.launches()] == ["foreach"]
    assert [x.kind for x in plan.launches([plain, column, plain])] == ["foreach", "elementwise"]


def test_the_calls_of_each_device(monkeypatch):
    """One call on the CPU; elsewhere one a dtype pair, half types as integers, alone or large by copy_."""
    calls = []
    original = grouped_copy._foreach_copy_
    monkeypatch.setattr(
        grouped_copy, "_foreach_copy_", lambda d, s: (calls.append([t.dtype for t in d]), original(d, s))
    )
    dtypes = [torch.int64, torch.bfloat16, torch.float32, torch.int64, torch.bfloat16, torch.bfloat16]
    dsts = [torch.zeros(40 * 1024 if i == 5 else 8, dtype=dtype) for i, dtype in enumerate(dtypes)]
    srcs = [torch.ones_like(dst) for dst in dsts]
    CopyPlan(dsts, dtypes)(srcs)
    assert calls == [dtypes]
    calls.clear()
    AsOnCuda(dsts, dtypes)([2 * src for src in srcs])
    assert calls == [[torch.int64] * 2, [torch.int16] * 2]
    assert all(dst.eq(2).all() for dst in dsts)


def test_autograd_records_nothing():
    dst, src = torch.zeros(4), torch.ones(4, requires_grad=True)
    plan = CopyPlan([dst], [torch.float32])
    plan([src])
    assert not dst.requires_grad and dst.eq(1).all()


def test_buffers_of_inference_mode_are_written_in_it_only():
    with torch.inference_mode():
        dst = torch.zeros(4)
        plan = CopyPlan([dst], [torch.float32])
        plan([torch.ones(4)])
    with pytest.raises(ValueError, match="inference tensor"):
        plan([torch.zeros(4)])
    assert dst.eq(1).all()


def test_a_plan_holds_no_copy_of_the_data():
    dsts = [torch.zeros(1 << 16), torch.zeros(1 << 16, dtype=torch.int64)]

    def live() -> set[int]:
        gc.collect()
        tensors = (t for t in gc.get_objects() if type(t) is Tensor and t.layout == torch.strided)
        return {t.untyped_storage().data_ptr() for t in tensors}

    known = live()
    plan = CopyPlan(dsts, [torch.float64, torch.int64])
    plan([torch.ones(1 << 16, dtype=torch.float64), torch.ones(1 << 16, dtype=torch.int64)])
    assert live() <= known


def test_remembered_addresses_stay_few():
    plan = CopyPlan([torch.zeros(1)], [torch.float32])
    sources = torch.arange(10_000.0)
    for i in range(5_000):
        plan([sources[i : i + 1]])
    assert len(plan._clear[0]) <= 1024
