"""The file that people take away: what it copies, what it refuses and how, and the calls it makes."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lib import CopyPlan, ReplayCopies, StaticInput, grouped, grouped_foreach_copy_
from lib.copies import DEFAULT_DMA_BYTES
from lib.launches import launches
from tests.tensors import (
    NEGATABLE,
    Pairs,
    assert_copies_or_refuses,
    laid_out,
    pairs,
    properties,
    random_values,
    restore,
    same,
    snapshot,
    storages,
)

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values", "ignore:ComplexHalf support")


def dtypes(tensors: list[Tensor]) -> list[torch.dtype]:
    return [t.dtype for t in tensors]


# ---- any pairs --------------------------------------------------------------------------------------------


@given(pairs(), st.integers(0, 2), st.sampled_from([None, 16, DEFAULT_DMA_BYTES]))
@properties(2_000)
def test_they_leave_what_a_loop_of_copy_leaves_or_refuse(
    case: Pairs, n_constants: int, dma_bytes: int | None
):
    """By foreach calls that CUDA fuses: one dtype pair a call, nothing on the slow path."""

    def planned(dsts: list[Tensor], srcs: list[Tensor]) -> None:
        twice = len(set(map(id, dsts))) < len(dsts)
        n = 0 if twice else min(n_constants, len(dsts), len(srcs))
        constants = list(zip(dsts[:n], srcs[:n]))
        types = dtypes(srcs[n:])[: len(dsts) - n] + [torch.int8] * (len(dsts) - len(srcs))
        plan = CopyPlan(dsts[n:], types, constants=constants, check="full")
        plan(srcs[n:])
        plan(srcs[n:])  # as steps are
        calls = [*grouped(zip(dsts, srcs), dma_bytes), *plan.calls(), *plan.calls(srcs[n:])]
        made = launches([call for call in calls if call.op == "foreach"])
        assert {launch.kind for launch in made} <= {"foreach"}

    assert_copies_or_refuses(case, grouped_foreach_copy_, planned)


@given(pairs(mutations=(None, 3)), st.integers(0, 1000))
@properties(300)
def test_one_plan_serves_any_sources_of_its_shapes(case: Pairs, seed: int):
    """Strided, lazy or of another dtype: copied right, and counted."""
    dsts, srcs = case
    plan, memory = CopyPlan(dsts, dtypes(srcs)), storages(dsts)
    plain = [random_values(s.shape, s.dtype, seed + i) for i, s in enumerate(srcs)]
    other = [random_values(s.shape, torch.int16, seed + i) for i, s in enumerate(srcs)]
    may_be_negative = [{d.dtype, s.dtype} <= set(NEGATABLE) for d, s in zip(dsts, srcs)]
    lazy = [torch._neg_view(s) if negative else s for s, negative in zip(plain, may_be_negative)]
    for sources in (srcs, plain, other, lazy, plain):
        saved, missed = snapshot(memory), plan.misses
        for dst, src in zip(dsts, sources):
            dst.copy_(src)
        expected = snapshot(memory)
        restore(memory, saved)
        plan(sources)
        assert same(memory, expected)
        as_planned = dtypes(sources) == dtypes(srcs) and not any(s.is_conj() or s.is_neg() for s in sources)
        assert plan.misses - missed == (not as_planned or not all(s.is_contiguous() for s in sources))


# ---- a plan -----------------------------------------------------------------------------------------------

NAMES = ["seq_lens", "topk_p", "hidden_states"]


def buffers() -> list[Tensor]:
    return [torch.zeros(8, dtype=torch.int64), torch.zeros(8), torch.zeros(8, 3, dtype=torch.bfloat16)]


def plan_of(dsts: list[Tensor], **options) -> CopyPlan:
    return CopyPlan([dst[:4] for dst in dsts], dtypes(dsts), NAMES, **options)


def section_of(dsts: list[Tensor], **options) -> ReplayCopies:
    return ReplayCopies({name: StaticInput(dst, pad=9) for name, dst in zip(NAMES, dsts)}, **options)


class Wrapper(Tensor):
    """A subclass like DTensor: no memory of its own, and operators only among its like."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"mixed with plain tensors: {func}")


@pytest.mark.parametrize(
    ("position", "change", "says"),
    [
        (1, lambda src: None, "topk_p: expected a tensor .*got .*NoneType"),
        (0, Tensor.tolist, "seq_lens: expected a tensor .*got .*list"),
        (0, Tensor.numpy, "seq_lens: expected a tensor .*got .*ndarray"),
        (2, lambda src: src[:3], r"hidden_states: expected .*shape \(4, 3\), got \(3, 3\)"),
        (0, lambda src: src[:1], r"seq_lens: expected .*shape \(4,\), got \(1,\)"),  # copy_ would broadcast
        (2, lambda src: src.to("meta"), "hidden_states: expected .*cpu, got meta"),
        (1, Tensor.to_sparse, "topk_p: expected a strided source"),
        (1, Wrapper, "topk_p: expected a source of .*Tensor.*, got .*Wrapper"),
    ],
)
def test_a_source_that_does_not_fit_is_named_and_nothing_is_written(position: int, change, says: str):
    dsts = buffers()
    plan, section, srcs = plan_of(dsts), section_of(dsts), [torch.ones_like(dst[:4]) for dst in dsts]
    bad = list(srcs)
    bad[position] = change(bad[position])
    uses = [lambda: grouped_foreach_copy_([dst[:4] for dst in dsts], bad, NAMES), lambda: plan(bad)]
    if bad[position] is not None:  # in a section it is a field that does not come
        uses.append(lambda: section(dict(zip(NAMES, bad)), 4, 8))
    for _ in ("first use", "planned"):
        before = snapshot(dsts)
        for use in uses:
            with pytest.raises(ValueError, match=says):
                use()
        assert same(dsts, before)
        plan(srcs)
        section(dict(zip(NAMES, srcs)), 4, 8)
        assert all(torch.equal(dst[:4], src) for dst, src in zip(dsts, srcs))


def test_wrong_lists_destinations_constants_and_options_are_refused():
    ids, probs, _ = dsts = buffers()
    with pytest.raises(ValueError, match=r"sources and names, got \(3, 2, 3\)"):
        plan_of(dsts)([ids[:4], probs[:4]])
    for wrong, constants in (
        ([ids, ids[1:]], []),
        ([ids[:1].expand(4)], []),
        ([ids], [(probs, probs[:2])]),
        ([ids], [(ids[4:], ids[:4] + 1)]),
    ):
        with pytest.raises(ValueError, match=r"shape|shares memory|overlap itself"):
            CopyPlan(wrong, dtypes(wrong), constants=constants)
    for types, options in (
        ([torch.int64], {}),
        (dtypes(dsts), {"names": ["a"]}),
        (dtypes(dsts), {"check": "ful"}),
    ):
        with pytest.raises(ValueError):
            CopyPlan(dsts, types, **options)
    with pytest.raises(ValueError):
        ReplayCopies({}, pad_to="bufer")


def test_a_full_check_finds_a_source_that_lies_in_a_destination():
    dsts = buffers()
    srcs = [dst[4:] for dst in dsts]  # in rows that no destination covers
    plan_of(dsts, check="full")(srcs)
    srcs[0] = dsts[0][2:6]
    plan, section = plan_of(dsts, check="full"), section_of(dsts, check="full")
    before = snapshot(dsts)
    for use in (lambda: plan(srcs), lambda: section(dict(zip(NAMES, srcs)), 4, 4)):
        with pytest.raises(ValueError, match=r"seq_lens: .*shares memory"):
            use()
    assert same(dsts, before)


def test_the_same_pair_twice_is_one_copy_and_a_destination_with_two_sources_is_refused():
    i64, i32 = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    one, other = i64 + 1, i64 + 2
    plan = CopyPlan([i64, i64, i32], [torch.int64] * 3)
    assert [len(call.dsts) for call in plan.calls()] == [1, 1]
    for copy in (plan, lambda srcs: grouped_foreach_copy_([i64, i64, i32], srcs)):
        with pytest.raises(ValueError, match="shares memory"):  # a group knows no order
            copy([one, other, one])
        assert i64.eq(0).all()
        copy([one, one, other])
        assert i64.tolist() == [1] * 4 and i32.tolist() == [2] * 4
        i64.zero_()


@pytest.mark.parametrize(
    "move",
    [Tensor.share_memory_, lambda b: b.resize_(1 << 20), lambda b: b.untyped_storage().resize_(1 << 20)],
)
def test_a_destination_whose_storage_moves_is_still_written(move):
    """The ranges of when the plan was built prove nothing then."""
    buffer = torch.zeros(64)
    plan = CopyPlan([buffer[:4], buffer[4:8]], [torch.float32] * 2, check="full")
    move(buffer)
    buffer[:8] = torch.arange(8.0)
    plan([torch.full((4,), -1.0), torch.full((4,), -2.0)])
    assert buffer[:8].tolist() == [-1.0] * 4 + [-2.0] * 4
    with pytest.raises(ValueError, match="shares memory"):
        plan([torch.full((4,), -1.0), buffer[:4]])


def test_autograd_records_nothing_and_inference_mode_is_kept_apart():
    dst, src = torch.zeros(4), torch.ones(4, requires_grad=True)
    plan = CopyPlan([dst, dst.int()], [torch.float32] * 2)
    for copy in (plan, lambda srcs: grouped_foreach_copy_([dst, dst.int()], srcs)):
        copy([src * 2, src])
        assert not dst.requires_grad and dst.tolist() == [2.0] * 4
        assert torch.is_grad_enabled()
        dst.zero_()
    with torch.inference_mode():
        dst = torch.zeros(4)
        plan = CopyPlan([dst], [torch.float32])
        plan([torch.ones(4)])
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

    def steps(first: int, end: int) -> int:
        for i in range(first, end):
            plan([(numbers if i % 9 == 0 else floats)[i : i + 1]])
            if i % 9 == 1:
                section({"positions": numbers[i : i + 1]}, 1, 1)
        gc.collect()
        return sys.getallocatedblocks()

    before = steps(0, 2_000)
    assert steps(2_000, 100_000) - before < 500


# ---- an engine's section ----------------------------------------------------------------------------------


SECTION = {  # name: shape for 8 requests, dtype, and the rest of a StaticInput
    "seq_lens": ((8,), torch.int64, {"pad": 1}),
    "out_cache_loc": ((24,), torch.int64, {"rows": 3, "pad": 0}),
    "topk_p": ((8, 4), torch.float32, {"pad": 0.5}),
    "mrope_positions": ((3, 16), torch.int64, {"rows": 2, "pad": 7, "dim": 1, "required": False}),
    "extend_seq_lens": ((8,), torch.int32, {"pad": 5, "required": False, "fill_if_missing": True}),
    "rids": ((8,), torch.int64, {"required": False}),
}
OPTIONAL = [name for name, (_, _, options) in SECTION.items() if not options.get("required", True)]


def section() -> dict[str, StaticInput]:
    fields = {}
    for name, (shape, dtype, options) in SECTION.items():
        fields[name] = StaticInput(torch.full(shape, 77, dtype=dtype), **options)
    return fields


def by_hand(field: StaticInput, src: Tensor | None, batch_size: int, padded_to: int) -> None:
    """What an engine would write: pads first, then the field."""
    rows = field.buffer.movedim(field.dim, 0)
    if field.pad is not None:
        filled_from = 0 if src is None and field.fill_if_missing else batch_size
        rows[filled_from * field.rows : padded_to * field.rows] = field.pad
    if src is not None:
        rows[: batch_size * field.rows] = src.movedim(field.dim, 0)


a_step = st.tuples(st.integers(1, 8), st.sampled_from([1, 2, 4, 8]), st.sets(st.sampled_from(OPTIONAL)))


@given(
    st.lists(a_step, min_size=1, max_size=8),
    st.sampled_from([{}, {"pad_to": "buffer"}, {"pads_stay": True}]),
    st.integers(0, 1000),
)
@properties(60)
def test_a_section_leaves_what_the_engines_own_lines_leave(steps, options: dict, seed: int):
    """Ragged batches, padded and not; optional fields come and go, as do other dtypes and strides."""
    ours, theirs = section(), section()
    copy = ReplayCopies(ours, **options)
    for step, (batch_size, captured, missing) in enumerate(steps):
        captured = max(batch_size, captured)
        padded_to = {"pad_to": 8, "pads_stay": batch_size}.get(next(iter(options), ""), captured)
        inputs: dict[str, Tensor | None] = {}
        for i, (name, (shape, dtype, _)) in enumerate(SECTION.items()):
            field = ours[name]
            shape = tuple(batch_size * field.rows if d == field.dim else n for d, n in enumerate(shape))
            layout = ["contiguous", "column", "wider"][(seed + step + i) % 3]
            given_dtype = torch.int16 if (seed + step + i) % 5 == 0 else dtype
            inputs[name] = None if name in missing else laid_out(layout, shape, given_dtype, seed + i)
            by_hand(theirs[name], inputs[name], batch_size, padded_to)
        copy(inputs, batch_size, captured)
        written, expected = (storages([field.buffer for field in each.values()]) for each in (ours, theirs))
        assert same(written, expected), step


def inputs_of(fields: dict[str, StaticInput], batch_size: int) -> dict[str, Tensor]:
    return {name: torch.ones_like(field.between(0, batch_size)) for name, field in fields.items()}


def test_what_a_section_refuses_is_named_and_nothing_is_written():
    fields = section()
    copy, inputs = ReplayCopies(fields), inputs_of(fields, 3)
    copy(inputs, 3, 4)
    before = snapshot([field.buffer for field in fields.values()])
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
    assert same([field.buffer for field in fields.values()], before)


def test_rows_between_other_dimensions_are_padded():
    """As of embeddings by layer: (2, tokens, 3)."""
    for check in ("step", "full"):
        field, src = StaticInput(torch.zeros(2, 8, 3), pad=9, dim=1), torch.rand(2, 5, 3)
        ReplayCopies({"embeds": field}, check=check)({"embeds": src}, 5, 7)
        assert torch.equal(field.buffer[:, :5], src)
        assert field.buffer[:, 5:7].eq(9).all() and field.buffer[:, 7:].eq(0).all()


def test_a_section_prepares_its_plans_and_keeps_no_more_than_a_thousand():
    fields = section()
    fields["seq_lens"] = StaticInput(torch.zeros(8, dtype=torch.int32), pad=1, source_dtype=torch.int64)
    copy = ReplayCopies(fields)
    copy.prepare({3: 4, 8: 8})
    prepared = dict(copy.plans)
    inputs = inputs_of(fields, 3)
    copy(inputs | {"seq_lens": torch.ones(3, dtype=torch.int64)}, 3, 4)
    assert copy.plans == prepared and len(prepared) == 2
    assert [plan.misses for plan in prepared.values()] == [0, 0]
    many = ReplayCopies({"rids": StaticInput(torch.zeros(1_100, dtype=torch.int64))})
    for batch_size in range(1, 1_101):
        many({"rids": torch.ones(batch_size, dtype=torch.int64)}, batch_size, 1_100)
    assert len(many.plans) <= 1_024
