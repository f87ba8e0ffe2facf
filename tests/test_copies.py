"""The file that people take away: what it copies, what it refuses and how, and the calls it makes."""

import gc
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lib import CopyPlan, ReplayCopies, StaticInput, grouped, grouped_foreach_copy_
from lib.copies import DEFAULT_DMA_BYTES, is_lazy
from lib.launches import launches
from tests import tensors
from tests.tensors import laid_out, pairs, properties, random_values, same, snapshot

pytestmark = pytest.mark.filterwarnings(
    "ignore:Casting complex values", "ignore:ComplexHalf support", "ignore:The PyTorch API of nested"
)


def dtypes(some):
    return [t.dtype for t in some]


@given(pairs(), st.integers(0, 2), st.sampled_from([None, 16, DEFAULT_DMA_BYTES]))
@properties(2_000)
def test_they_leave_what_a_loop_of_copy_leaves_or_refuse(case, n_constants, dma_bytes):
    """By foreach calls that CUDA fuses: one dtype pair a call, nothing on the slow path."""

    def planned(dsts, srcs):
        n_unlike = len(set(map(id, dsts)))
        n = min(n_constants, len(dsts), len(srcs)) if n_unlike == len(dsts) else 0
        types = dtypes(srcs[n:])[: len(dsts) - n] + [torch.int8] * (len(dsts) - len(srcs))
        plan = CopyPlan(dsts[n:], types, constants=list(zip(dsts[:n], srcs[:n])), check="full")
        plan(srcs[n:])
        plan(srcs[n:])  # as steps are
        assert sum(len(call.dsts) for call in plan.calls()) <= n_unlike  # the same pair twice is one copy
        calls = [*grouped(zip(dsts, srcs), dma_bytes), *plan.calls(), *plan.calls(srcs[n:])]
        made = launches([call for call in calls if call.op == "foreach"])
        assert {launch.kind for launch in made} <= {"foreach"}

    tensors.assert_copies_or_refuses(case, grouped_foreach_copy_, planned)


@given(pairs(mutations=("", "onto itself")), st.integers(0, 1000))
@properties(300)
def test_one_plan_serves_any_sources_of_its_shapes(case, seed):
    """Strided, lazy or of another dtype: copied right, and counted."""
    dsts, srcs = case
    plan = CopyPlan(dsts, dtypes(srcs))
    plain = [random_values(s.shape, s.dtype, seed + i) for i, s in enumerate(srcs)]
    other = [random_values(s.shape, torch.int16, seed + i) for i, s in enumerate(srcs)]
    can_negate = [{d.dtype, s.dtype} <= set(tensors.NEGATABLE) for d, s in zip(dsts, srcs)]
    lazy = [torch._neg_view(s) if can else s for s, can in zip(plain, can_negate)]
    for sources in (srcs, plain, other, lazy, plain):
        missed = plan.misses
        tensors.assert_copies_or_refuses((dsts, sources), lambda _, sources: plan(sources))
        plain_ones = all(s.is_contiguous() and not is_lazy(s) for s in sources)
        assert plan.misses - missed == (dtypes(sources) != dtypes(srcs) or not plain_ones)


NAMES = ["seq_lens", "topk_p", "hidden_states"]


def buffers():
    return [torch.zeros(8, dtype=torch.int64), torch.zeros(8), torch.zeros(8, 3, dtype=torch.bfloat16)]


def uses_of(dsts, **options):
    """Whatever copies into the first four rows: functions of the sources."""
    fours = [dst[:4] for dst in dsts]
    section = ReplayCopies({name: StaticInput(dst, pad=9) for name, dst in zip(NAMES, dsts)}, **options)
    plan = CopyPlan(fours, dtypes(dsts), NAMES, **options)
    return [
        plan,
        lambda srcs: section(dict(zip(NAMES, srcs, strict=True)), 4, 4),
        lambda srcs: grouped_foreach_copy_(fours, srcs, NAMES),
    ]


@pytest.mark.parametrize(
    ("position", "change", "says"),
    [
        (1, lambda src: None, "topk_p: (expected a tensor .*got .*NoneType|required field is missing)"),
        (0, Tensor.numpy, "seq_lens: expected a tensor .*got .*ndarray"),
        (0, lambda src: src[:1], r"seq_lens: expected .*shape \(4,\), got \(1,\)"),  # copy_ would broadcast
        (2, lambda src: src.to("meta"), "hidden_states: expected .*cpu, got meta"),
        (1, Tensor.to_sparse, "topk_p: expected a strided source"),
        (1, lambda src: torch.nested.nested_tensor([src]), "topk_p: expected a strided source"),
    ],
)
def test_a_source_that_does_not_fit_is_named_and_nothing_is_written(position, change, says):
    dsts = buffers()
    uses, srcs = uses_of(dsts), [torch.ones_like(dst[:4]) for dst in dsts]
    bad = list(srcs)
    bad[position] = change(bad[position])
    for _ in ("first use", "planned"):
        before = snapshot(dsts)
        for use in uses:
            with pytest.raises(ValueError, match=says):
                use(bad)
        assert same(dsts, before)
        for use in uses:
            use(srcs)
            assert all(torch.equal(dst[:4], src) for dst, src in zip(dsts, srcs))


def test_wrong_lists_destinations_constants_and_options_are_refused():
    ids, probs, _ = dsts = buffers()
    for says, make in (
        (r"sources and names, got \(3, 2, 3\)", lambda: uses_of(dsts)[0]([ids[:4], probs[:4]])),
        ("shares memory", lambda: CopyPlan([ids, ids[1:]], dtypes([ids] * 2))),
        ("shape", lambda: CopyPlan([ids], [ids.dtype], constants=[(probs, probs[:2])])),
        ("shares memory", lambda: CopyPlan([ids], [ids.dtype], constants=[(ids[4:], ids[:4] + 1)])),
        ("shorter", lambda: CopyPlan(dsts, [ids.dtype])),
        (r"got \(3, 3, 1\)", lambda: CopyPlan(dsts, dtypes(dsts), names=["a"])),
        ("not in tuple", lambda: CopyPlan(dsts, dtypes(dsts), check="ful")),
        ("not in tuple", lambda: ReplayCopies({}, pad_to="bufer")),
    ):
        with pytest.raises(ValueError, match=says):
            make()


@pytest.mark.parametrize("move", [Tensor.cpu, Tensor.share_memory_, lambda buffer: buffer.resize_(1 << 20)])
def test_a_full_check_finds_a_source_that_lies_in_a_destination_wherever_that_moves(move):
    dsts = buffers()
    uses = uses_of(dsts, check="full")
    move(dsts[0])  # or, by cpu, not
    srcs = [dst[4:8].fill_(3) for dst in dsts]  # in rows that no destination covers
    for use in uses:
        use(srcs)
        with pytest.raises(ValueError, match=r"seq_lens: .*shares memory"):
            use([dsts[0][2:6], *srcs[1:]])
        assert same([dst[:4] for dst in dsts], srcs)
        dsts[0][:4] = 0


def test_autograd_records_nothing_and_inference_mode_is_kept_apart():
    dst, src = torch.zeros(4), torch.ones(4, requires_grad=True)
    for copy in (CopyPlan([dst], [torch.float32]), partial(grouped_foreach_copy_, [dst])):
        needs_dst = torch.ones(4, requires_grad=True) * dst.zero_()
        copy([src * 2])
        assert not dst.requires_grad and dst.tolist() == [2.0] * 4 and torch.is_grad_enabled()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # it sees that much
            needs_dst.sum().backward()
    with torch.inference_mode():
        dst = torch.zeros(4)
        CopyPlan([dst], [torch.float32])([torch.ones(4)])
        grouped_foreach_copy_([dst], [dst + 1])
    with pytest.raises(ValueError, match="inference"):
        grouped_foreach_copy_([dst], [torch.zeros(4)])
    assert dst.tolist() == [2.0] * 4


def test_a_plan_holds_nothing_of_its_steps():
    """100,000 steps at new addresses, some of them not as planned."""
    plan = CopyPlan([torch.zeros(1)], [torch.float32])
    section = ReplayCopies({"positions": StaticInput(torch.zeros(1, dtype=torch.int64), pad=0)})
    assert all(src.is_meta for call in plan.calls() for src in call.srcs)  # nor memory for what is to come
    floats, numbers = torch.arange(100_000.0), torch.arange(100_000)

    def steps(first, end):
        for i in range(first, end):
            plan([(numbers if i % 9 == 0 else floats)[i : i + 1]])
            if i % 9 == 1:
                section({"positions": numbers[i : i + 1]}, 1, 1)
        gc.collect()
        return sys.getallocatedblocks()

    before = steps(0, 2_000)
    assert steps(2_000, 100_000) - before < 500


SECTION = {  # for 8 requests
    "seq_lens": StaticInput(torch.zeros(8, dtype=torch.int64), pad=1),
    "out_cache_loc": StaticInput(torch.zeros(24, dtype=torch.int64), rows=3, pad=0),
    "topk_p": StaticInput(torch.zeros(8, 4), pad=0.5),
    "mrope": StaticInput(torch.zeros(3, 16, 2, dtype=torch.int64), rows=2, pad=7, dim=1, required=False),
    "extend_seq_lens": StaticInput(torch.zeros(8).int(), pad=5, required=False, fill_if_missing=True),
    "rids": StaticInput(torch.zeros(8, dtype=torch.int64), required=False),
    "ids": StaticInput(torch.zeros(8).int(), pad=-1, source_dtype=torch.uint8),  # which cannot hold the pad
    "scale": StaticInput(torch.zeros(8), pad=70_000, source_dtype=torch.float16),  # nor this
}
OPTIONAL = [name for name, field in SECTION.items() if not field.required]


def section():
    return {name: replace(field, buffer=torch.full_like(field.buffer, 77)) for name, field in SECTION.items()}


def buffers_of(fields):
    return [field.buffer for field in fields.values()]


def by_hand(field, src, batch_size, padded_to):
    """What an engine would write: pads first, then the field."""
    rows = field.buffer.movedim(field.dim, 0)
    if field.pad is not None:
        filled_from = 0 if src is None and field.fill_if_missing else batch_size
        rows[filled_from * field.rows : padded_to * field.rows] = field.pad
    if src is not None:
        rows[: batch_size * field.rows] = src.movedim(field.dim, 0)


a_step = st.tuples(
    st.sampled_from([1, 2, 3, 5, 7, 8]), st.sampled_from([1, 2, 4, 8]), st.sets(st.sampled_from(OPTIONAL))
)
some_options = st.sampled_from([{}, {"pad_to": "buffer"}, {"pads_stay": True}, {"check": "full"}])


@given(st.lists(a_step, min_size=1, max_size=8), some_options, st.integers(0, 1000))
@properties(200)
def test_a_section_leaves_what_the_engines_own_lines_leave(steps, options, seed):
    """Ragged batches, padded and not; optional fields come and go, as do other dtypes and strides."""
    ours, theirs = section(), section()
    copy = ReplayCopies(ours, **options)
    for step, (batch_size, captured, missing) in enumerate(steps):
        captured = max(batch_size, captured)
        padded_to = {"pad_to": 8, "pads_stay": batch_size}.get(next(iter(options), ""), captured)
        inputs = {}
        for i, (name, field) in enumerate(ours.items(), seed + step):
            shape = field.between(0, batch_size).shape
            layout = ["contiguous", "column", "wider"][i % 3]
            dtype = torch.int16 if i % 5 == 0 else field.source_dtype or field.buffer.dtype
            inputs[name] = None if name in missing else laid_out(layout, shape, dtype, i)
            by_hand(theirs[name], inputs[name], batch_size, padded_to)
        copy(inputs, batch_size, captured)
        assert same(*(tensors.storages(buffers_of(fields)) for fields in (ours, theirs))), step


def inputs_of(fields, batch_size):
    rows = {name: field.between(0, batch_size) for name, field in fields.items()}
    return {name: torch.ones_like(rows[name], dtype=field.source_dtype) for name, field in fields.items()}


def test_what_a_section_refuses_is_named_and_nothing_is_written():
    fields = section()
    copy, inputs = ReplayCopies(fields), inputs_of(fields, 3)
    copy(inputs, 3, 4)
    before = snapshot(buffers_of(fields))
    for change, sizes, says in (
        ({"seq_lens": None}, (3, 4), "seq_lens: required field is missing"),
        ({"positions": inputs["seq_lens"]}, (3, 4), "positions: expected .*one of"),
        ({"rids": [1, 2, 3]}, (3, 4), "rids: expected a tensor"),
        ({}, (2, 4), "expected .*shape"),
        ({}, (0, 4), "expected 1 to 8 requests, got 0"),
        ({}, (5, 4), "expected 1 to 8 requests, got 5 of 4"),
        ({}, (3, 9), "expected 1 to 8 requests, got 3 of 9"),
    ):
        with pytest.raises(ValueError, match=says):
            copy(inputs | change, *sizes)
    assert same(buffers_of(fields), before)


def test_a_section_prepares_its_plans_and_keeps_no_more_than_a_thousand():
    copy = ReplayCopies(SECTION)
    copy.prepare({3: 4, 8: 8})
    prepared = dict(copy.plans)
    copy(inputs_of(SECTION, 3), 3, 4)
    assert copy.plans == prepared and [plan.misses for plan in prepared.values()] == [0, 0]
    many = ReplayCopies({"rids": StaticInput(torch.zeros(1_100))})
    for batch_size in range(1, 1_101):
        many({"rids": torch.ones(batch_size)}, batch_size, 1_100)
    assert len(many.plans) <= 1_024
