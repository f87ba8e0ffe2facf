"""Beyond the pull request: fused kernel, arena, copies in the graph, no copy; alone and in both runners."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lib import fused_copy
from lib.eagle import (
    DraftBatch,
    DraftExtendBatch,
    EagleConfig,
    EagleDraftCudaGraphRunner,
    EagleDraftExtendCudaGraphRunner,
)
from lib.eagle.graph import GraphBackend
from lib.eagle.model import DraftModel
from lib.fused_copy import MAX_PAIRS, FusedPlan, describe
from lib.strategies import ALIGNMENT, BEYOND, arena
from tests.tensors import (
    DTYPES,
    SHAPES,
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

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values", "ignore:ComplexHalf support")

# ---- alone: 2,000 cases each, the interpreted kernel too --------------------------------------------------

fields = st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), max_size=7)


@given(fields, st.integers(0, 1000), st.booleans())
@properties(2_000)
def test_an_arena_is_copied_in_one_piece(specs, seed: int, planned: bool):
    shapes, dtypes = [shape for shape, _ in specs], [dtype for _, dtype in specs]
    values = [random_values(shape, dtype, seed + i) for i, (shape, dtype) in enumerate(specs)]
    dsts = arena(shapes, dtypes)
    strategy = BEYOND["arena"]
    srcs = strategy.plan(dsts, dtypes).outputs if planned and dsts else arena(shapes, dtypes)
    for src, value in zip(srcs, values):
        src.copy_(value)
    strategy(dsts, srcs)
    for dst, value in zip(dsts, values):
        assert dst.shape == value.shape and same(storages([value]), [dst.reshape(-1).view(torch.uint8)])
    payload = sum(value.nbytes for value in values)
    launches = strategy.launches(dsts, srcs)
    assert len(launches) == bool(payload)
    if payload:
        assert launches[0].kind == "memcpy"
        assert payload <= launches[0].bytes <= payload + (ALIGNMENT - 1) * len(dsts)
        assert all(dst.data_ptr() % ALIGNMENT == 0 for dst in dsts if dst.numel())


def _is_arena(tensors: list[Tensor]) -> bool:
    """Whether tensors lie in one allocation, in order, each on the first 16 bytes after the one before."""
    if len({t.untyped_storage().data_ptr() for t in tensors}) != 1:
        return False
    end = tensors[0].storage_offset() * tensors[0].element_size()
    base = end
    for t in tensors:
        start = t.storage_offset() * t.element_size()
        if not t.is_contiguous() or t.is_conj() or t.is_neg():
            return False
        if t.numel() and (start != base + -(-(end - base) // 16) * 16):
            return False
        end = base + -(-(end - base) // 16) * 16 + t.nbytes
    return True


@given(pairs(), st.booleans())
@properties(2_000)
def test_strategies_at_fixed_addresses_copy_or_refuse(case: Pairs, in_place: bool):
    """The arena what lies in two; no_copy the destinations themselves; in_graph anything."""
    dsts, srcs = case
    if in_place and not must_refuse(dsts, srcs):
        srcs = list(dsts)
    alike = len(dsts) == len(srcs) and all(d.dtype == s.dtype for d, s in zip(dsts, srcs))
    arenas = alike and (not dsts or (_is_arena(dsts) and _is_arena(srcs)))
    assert_copies_or_refuses(BEYOND["arena"], dsts, srcs, None if arenas else ValueError)
    there = alike and all((d is s or d.numel() == 0) and d.is_neg() == s.is_neg() for d, s in zip(dsts, srcs))
    assert_copies_or_refuses(BEYOND["no_copy"], dsts, srcs, None if there else ValueError)
    assert_copies_or_refuses(BEYOND["in_graph"], dsts, srcs)


@given(pairs(mutations=("", "interleaved")))
@properties(2_000)
def test_a_recorded_plan_copies_what_lies_at_its_addresses(case: Pairs):
    dsts, srcs = case
    plan = BEYOND["in_graph"].plan(dsts, [src.dtype for src in srcs])
    for output, src in zip(plan.outputs, srcs):
        output.copy_(src)
    memory = storages(dsts)
    before = snapshot(memory)
    plan(plan.outputs)
    assert same(memory, before) and plan.launches() == []  # nothing to do before the replay
    if any(src.numel() for src in srcs):
        with pytest.raises(ValueError, match="expected at 0x"):
            plan(srcs)
    for dst, output in zip(dsts, plan.outputs):
        dst.copy_(output)
    expected = snapshot(memory)
    restore(memory, before)
    plan.record()
    assert same(memory, expected)


# ---- the fused kernel, in Triton's interpreter -------------------------------------------------

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
HALVES_AND_SINGLES = (torch.float16, torch.bfloat16, torch.float32)


@needs_triton
@pytest.mark.filterwarnings("ignore:.*encountered in cast")
@given(pairs(max_pairs=5))
@properties(2_000)
def test_the_fused_kernel_leaves_what_a_loop_of_copy_leaves(case: Pairs):
    """All bits of all dtypes, but the payload of a NaN that is converted: each device has its own."""
    dsts, srcs = case
    converted = [d for d, s in zip(dsts, srcs) if d.dtype != s.dtype and d.dtype in HALVES_AND_SINGLES]

    def settle() -> None:
        for dst in converted:
            dst.masked_fill_(dst.isnan(), torch.nan)

    assert_copies_or_refuses(BEYOND["fused_kernel"], dsts, srcs, settle=settle)


@needs_triton
def test_the_fused_kernel_at_its_edges():
    """Lengths around 16 bytes and around a block, aligned and not; more pairs than a launch holds."""
    dsts, srcs = [], []
    for dtype in (torch.uint8, torch.int16, torch.int64):
        for numel in (1, 7, 8, 15, 16, 17, 512, 513, 4095, 4096, 4097, 8192 + 5):
            for offset in (0, 1):
                srcs.append(random_values((numel + offset,), dtype, numel)[offset:])
                dsts.append(torch.zeros(numel + 2, dtype=dtype)[offset:-1][:numel])
    strided = random_values((70, 60), torch.int32, 0)
    dsts.append(torch.zeros(60, 70))
    srcs.append(strided.t())
    plan = FusedPlan(dsts, [src.dtype for src in srcs], dma_bytes=1 << 30)
    assert len(plan.launches()) == -(-len(dsts) // MAX_PAIRS) == 3
    plan(srcs)
    assert all(torch.equal(dst, src.to(dst.dtype)) for dst, src in zip(dsts, srcs))
    for dst in dsts[:-1]:  # what lies around it is untouched
        around = torch.empty(0, dtype=dst.dtype).set_(dst.untyped_storage())
        around[dst.storage_offset() : dst.storage_offset() + dst.numel()] = 0
        assert around.eq(0).all()


def test_what_the_fused_kernel_leaves_to_copy():
    one = torch.ones(4)
    refused = {
        "float to integer": (one.long(), one),
        "complex to float": (one.clone(), one.to(torch.complex64)),
        "to fp8": (one.to(torch.float8_e4m3fn), one),
        "a conjugate bit": (one.to(torch.complex64), one.to(torch.complex64).conj()),
    }
    assert {name for name, pair in refused.items() if describe(*pair) is not None} == set()
    taken = [
        (one.int(), one.long()),
        (one.bfloat16(), one.long()),
        (one.bool(), one),
        (one.double(), one.half()),
        (one.bfloat16(), one.double()),
        (one.to(torch.float8_e4m3fn), one.to(torch.float8_e4m3fn)),
        (one.to(torch.complex128), one.to(torch.complex128)),
        (one.clone(), torch.ones(4, 2)[:, 0]),
        (one.clone(), torch.ones(1).expand(4)),
    ]
    assert all(describe(*pair) is not None for pair in taken)
    dsts, srcs = zip(*taken, *refused.values())
    kinds = [x.kind for x in FusedPlan(dsts, [src.dtype for src in srcs]).launches(srcs)]
    assert kinds[0] == "fused" and len(kinds) == 1 + len(refused) and "fused" not in kinds[1:]


@needs_triton
@pytest.mark.parametrize("target", [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)])
def test_the_fused_kernel_compiles_with_16_byte_accesses(target, tmp_path, monkeypatch):
    """For NVIDIA and AMD, without either; on NVIDIA the code is read, on AMD it only has to compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    dst, src = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 2, dtype=torch.int32)
    described = [
        describe(dst, dst.clone()),
        describe(dst, src[:, 0]),
        describe(dst.bool(), src[:, 0].float()),
    ]
    signature = {"dsts": ("i64",) * 3, "srcs": ("i64",) * 3, "counts": ("i32",) * 3}
    signature["dims"] = tuple(("i32",) * len(pair.dims) for pair in described)
    types = fused_copy.triton_types(tuple((pair.dst_type, pair.src_type) for pair in described))
    source = ASTSource(
        fused_copy.kernel(interpreted=False),
        {**signature, "TYPES": "constexpr", "BLOCK": "constexpr"},
        {"TYPES": types, "BLOCK": fused_copy.BLOCK},
    )
    compiled = triton.compile(source, target=GPUTarget(*target))
    if target[0] == "cuda":
        ptx = compiled.asm["ptx"]
        assert "ld.global.v2.b64" in ptx and "st.global.v2.b64" in ptx


@needs_triton
def test_no_batch_size_makes_triton_compile_anew():
    """Integers that are 1 or a multiple of 16 are compiled in, even in tuples; `_odd` keeps them apart."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    kernel = fused_copy.kernel(interpreted=False)
    bind = create_function_from_signature(
        kernel.signature, kernel.params, CUDABackend(GPUTarget("cuda", 90, 32))
    )
    seen = set()
    for n in (0, 1, 2, 7, 16, 48, 4096):
        numbers = fused_copy._odd((n, 1))
        addresses = fused_copy._odd((0x7F0000000000 + n, 0x7F0000000010))
        seen.add(str(bind(addresses, addresses, numbers, (numbers, ()), (), 1)[1]))
    assert len(seen) == 1


def test_without_triton_a_plan_is_built_counted_and_refuses_to_copy(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    fused_copy.kernel.cache_clear()
    try:
        dst = torch.zeros(4)
        plan = FusedPlan([dst], [torch.float32])
        assert len(plan.launches()) == 1
        with pytest.raises(ImportError, match="fused_kernel needs Triton"):
            plan([torch.ones(4)])
        assert dst.eq(0).all()
    finally:
        fused_copy.kernel.cache_clear()


# ---- in both runners --------------------------------------------------------------------------------------

TINY = EagleConfig.tiny()
RUNNERS = {
    "draft": (EagleDraftCudaGraphRunner, DraftBatch),
    "draft_extend": (EagleDraftExtendCudaGraphRunner, DraftExtendBatch),
}
both_runners = pytest.mark.parametrize("table", RUNNERS)
ALL = ["copy_plan", *BEYOND]
SIZES = [3, 8, 1, 7, 2, 5, 4, 6, 5, 3, 3, 8]  # ragged, padded and not, up and down, the same again


def launches(strategy: str, batch_size: int, config: EagleConfig = TINY) -> list[int]:
    counts = []
    for make, batches in RUNNERS.values():
        runner = make(config, strategy)
        counts.append(len(runner.launches(runner.place(batches.random(config, batch_size)))))
    return counts


@pytest.mark.parametrize(
    ("strategy", "preset", "batch_size", "expected"),
    [
        ("per_copy", "tiny", 7, [14, 16]),
        ("grouped_foreach_dma", "tiny", 7, [10, 10]),
        *(("copy_plan", preset, bs, [3, 3]) for preset in ("tiny", "llama3-8b") for bs in (1, 7, 8)),
        *(("arena", preset, bs, [1, 1]) for preset in ("tiny", "llama3-8b") for bs in (1, 7, 8)),
        *(("fused_kernel", "tiny", bs, [1, 1]) for bs in (1, 7, 8)),
        ("fused_kernel", "llama3-8b", 8, [2, 2]),
        ("fused_kernel", "llama3-8b", 15, [2, 2]),
        *((name, "tiny", bs, [0, 0]) for name in ("in_graph", "no_copy") for bs in (1, 7, 8)),
    ],
)
def test_launches_of_a_replay(strategy: str, preset: str, batch_size: int, expected: list[int]):
    assert launches(strategy, batch_size, EagleConfig.preset(preset)) == expected


def test_the_converting_layout_costs_the_plan_a_launch_and_the_fused_kernel_none():
    config = EagleConfig.tiny(layout="int32_seq_lens")
    assert launches("copy_plan", 7, config) == [4, 4]
    assert launches("fused_kernel", 7, config) == [1, 1]
    for name in ("arena", "no_copy"):
        runner = EagleDraftCudaGraphRunner(config, name)
        with pytest.raises(ValueError, match=f"seq_lens: {name} cannot convert, expected torch.int32"):
            runner.launches(DraftBatch.random(config, 2))


@both_runners
@pytest.mark.parametrize("layout", ["int64_seq_lens", "int32_seq_lens"])
@pytest.mark.parametrize("strategy", ALL)
def test_outputs_are_bitwise_those_of_per_copy(table: str, layout: str, strategy: str):
    if layout == "int32_seq_lens" and strategy in ("arena", "no_copy"):
        pytest.skip("refuses to convert, tested above")
    if strategy == "fused_kernel" and find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    config = EagleConfig.tiny(layout=layout)
    make, batches = RUNNERS[table]
    reference, runner = make(config, "per_copy"), make(config, strategy)
    sizes = SIZES[:4] if strategy == "fused_kernel" else SIZES
    for seed, bs in enumerate(sizes):
        batch = batches.random(config, bs, seed=seed)
        expected = reference.replay(batch)
        got = runner.replay(runner.place(batch))
        assert all(map(torch.equal, expected, got)), (bs, seed)


@both_runners
@pytest.mark.parametrize("strategy", ["copy_plan", "in_graph"])
def test_rows_of_real_requests_and_of_padding_hold_what_they_should(table: str, strategy: str):
    """Whatever ran before; rows beyond the captured size and hidden_states' padding are nobody's."""
    config = TINY
    make, batches = RUNNERS[table]
    runner = make(config, strategy)
    runner.capture()
    for t in runner.buffers.tensors.values():
        t.fill_(77)
    for seed, bs in enumerate(SIZES):
        batch = batches.random(config, bs, seed=seed)
        runner.replay(runner.place(batch))
        captured = runner.padded_batch_size(bs)
        for f in config.table(table):
            rows, source = runner.buffers.rows(f, captured), getattr(batch, f.name)
            assert torch.equal(rows[: len(source)], source.to(rows.dtype)), f.name
            if f.pad is not None and not f.large:
                assert rows[len(source) :].eq(config.pad_value(f)).all(), (f.name, bs)


@both_runners
def test_clean_padding_is_not_written_again_and_dirty_padding_is(table: str):
    make, batches = RUNNERS[table]
    runner = make(TINY, "copy_plan")
    seq_lens = runner.buffers.tensors["seq_lens"]

    def pads_written(bs: int) -> bool:
        captured = runner.padded_batch_size(bs)
        was, seq_lens[bs:captured] = seq_lens[bs:captured].clone(), 99
        runner.copy_inputs(batches.random(TINY, bs, seed=bs))
        written = not seq_lens[bs:captured].eq(99).any()
        seq_lens[bs:captured] = was
        return written

    assert pads_written(5)  # the first time
    assert not pads_written(5)  # the same rows as in the step before
    assert pads_written(6)  # other rows
    assert pads_written(5)  # row 5 held a request in between
    runner.copy_inputs(batches.random(TINY, 8))
    assert pads_written(5)  # so did rows 5 to 7
    runner.last_plan = None  # as who else writes to the buffers has to say
    assert pads_written(5)


@both_runners
def test_a_graph_leaves_its_inputs_as_they_are(table: str):
    """Else padding would be dirty after every replay."""
    make, batches = RUNNERS[table]
    runner = make(TINY, "copy_plan")
    runner.copy_inputs(batches.random(TINY, 5))
    runner.replay_graph(5)
    before = {name: t.clone() for name, t in runner.buffers.tensors.items()}
    runner.replay_graph(5)
    assert all(torch.equal(t, before[name]) for name, t in runner.buffers.tensors.items())


@both_runners
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("strategy", ["copy_plan", "no_copy"])
def test_no_real_row_depends_on_padding_of_hidden(table: str, poison: float, strategy: str):
    """So it needs no launch; nor on what padding leaves in slot 0 of the KV pool, which it writes to."""
    make, batches = RUNNERS[table]
    runner = make(TINY, strategy)
    for bs in (1, 3, 5, 6, 7):
        placed = runner.place(batches.random(TINY, bs, seed=bs))
        clean = [t.clone() for t in runner.replay(placed)]
        field = next(f for f in TINY.table(table) if f.large)
        captured = runner.padded_batch_size(bs)
        i = runner.buffers.device_fields.index(field)
        buffer = (
            runner.buffers.rows(field, captured) if not runner.fixed else runner.fixed_plans[captured].dsts[i]
        )
        buffer[TINY.shape(field, bs)[0] :] = poison
        runner.model.kv.k[:, 0] = runner.model.kv.v[:, 0] = poison
        poisoned = runner.replay(placed)
        assert all(map(torch.equal, clean, poisoned)), bs
        assert not any(t.is_floating_point() and t.isnan().any() for t in poisoned)


@both_runners
@pytest.mark.parametrize("strategy", ["arena", "in_graph", "no_copy"])
def test_a_batch_elsewhere_is_refused_by_name_and_nothing_is_written(table: str, strategy: str):
    make, batches = RUNNERS[table]
    runner = make(TINY, strategy)
    batch = batches.random(TINY, 3)
    placed = runner.place(batch)
    plan = runner.fixed_plans[4]
    before = [dst.clone() for dst in plan.dsts]
    with pytest.raises(ValueError, match=r"seq_lens: expected at 0x.*as planned, got 0x"):
        runner.replay(replace(placed, seq_lens=batch.seq_lens))
    assert all(map(torch.equal, plan.dsts, before))
    runner.replay(placed)


@pytest.mark.parametrize("strategy", ALL)
def test_missing_optional_fields_are_filled_as_with_per_copy(strategy: str):
    if strategy == "fused_kernel" and find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    reference = EagleDraftExtendCudaGraphRunner(TINY, "per_copy")
    runner = EagleDraftExtendCudaGraphRunner(TINY, strategy)
    absent = dict.fromkeys(("extend_seq_lens", "num_correct_drafts", "num_accept_tokens"))
    for bs in (4, 3, 4):
        batch = DraftExtendBatch.random(TINY, bs, seed=bs)
        short = replace(batch, extend_seq_lens=batch.extend_seq_lens - 3)
        for b in (short, replace(batch, **absent)):
            assert all(map(torch.equal, reference.replay(b), runner.replay(runner.place(b))))


def test_a_source_at_the_right_address_with_other_strides_or_dtype_is_refused():
    plan = BEYOND["no_copy"].plan([torch.zeros(8, dtype=torch.int64)], [torch.int64], ["seq_lens"])
    plan([plan.outputs[0][:5]])
    for wrong in (plan.outputs[0][::2], plan.outputs[0].view(torch.float64), plan.outputs[0].to_sparse()):
        for use in (plan, plan.launches):
            with pytest.raises(ValueError, match="seq_lens: expected at 0x"):
                use([wrong])
    buffer = torch.zeros(8, 3)
    plan = BEYOND["no_copy"].plan([buffer[:4]], [torch.float32], ["topk_p"])
    plan([buffer[:4]])
    for wrong in (buffer[:4, :2], buffer, torch._neg_view(buffer[:4])):
        with pytest.raises(ValueError, match=r"topk_p: expected at 0x.*at most \(4, 3\)"):
            plan([wrong])
    with pytest.raises(ValueError, match="expected one source a destination, got 0 for 1"):
        plan([])


@pytest.mark.parametrize("strategy", ["copy_plan", "fused_kernel"])
def test_strided_sources_of_a_step_are_copied_right_and_counted(strategy: str):
    if strategy == "fused_kernel" and find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    reference = EagleDraftExtendCudaGraphRunner(TINY, "per_copy")
    runner = EagleDraftExtendCudaGraphRunner(TINY, strategy)
    for seed, bs in enumerate((3, 4, 4)):
        batch = DraftExtendBatch.random(TINY, bs, seed=seed)
        column = torch.stack((batch.seq_lens, -batch.seq_lens), 1)[:, 0]
        strided = replace(batch, seq_lens=column, extend_seq_lens=batch.extend_seq_lens[:1].expand(bs))
        for b in (batch, strided):
            assert all(map(torch.equal, reference.replay(b), runner.replay(b)))
        more = len(runner.launches(strided)) - len(runner.launches(batch))
        assert more == (2 if strategy == "copy_plan" else 0)


@pytest.mark.parametrize("strategy", ["arena", "in_graph", "no_copy"])
def test_a_plan_at_fixed_addresses_checks_its_lists_when_it_is_built(strategy: str):
    two = arena([(4,), (4,)], [torch.float32] * 2)
    make = BEYOND[strategy].plan
    for arguments, says in (
        ((two, [torch.float32] * 2, ["a"]), "one name a destination, got 1 for 2"),
        ((two, []), "one dtype a destination, got 0 for 2"),
        (([two[0], two[0]], [torch.float32] * 2), "shares memory of|16 bytes after"),
    ):
        with pytest.raises(ValueError, match=says):
            make(*arguments)
    nothing = make([], [])
    nothing([])
    assert nothing.outputs == nothing.launches() == []


class Doubled(NamedTuple):
    value: Tensor


def test_a_captured_copy_of_a_temporary_goes_on_reading_it():
    """The hazard, without the crash: the temporary is kept alive here, a graph on CUDA would not."""
    buffer, temporary = torch.zeros(4), torch.ones(4)
    graph = GraphBackend(torch.device("cpu")).capture(lambda: Doubled(buffer.copy_(temporary) * 2))
    fresh = torch.full((4,), 5.0)
    assert graph.replay().value.tolist() == [2.0] * 4  # not 10: it never saw the fresh one
    plan = BEYOND["in_graph"].plan([buffer], [torch.float32], ["seq_lens"])
    with pytest.raises(ValueError, match="seq_lens: expected at 0x"):
        plan([fresh])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@both_runners
@pytest.mark.parametrize("strategy", ALL)
def test_on_cuda(table: str, strategy: str):
    make, batches = RUNNERS[table]
    model = DraftModel.random(TINY, "cuda")
    reference, runner = (make(TINY, name, "cuda", model) for name in ("per_copy", strategy))
    for seed, bs in enumerate(SIZES):
        batch = batches.random(TINY, bs, seed=seed, device="cuda")
        expected = [t.clone() for t in reference.replay(batch)]
        got = runner.replay(runner.place(batch))
        assert all(map(torch.equal, expected, got)), (bs, seed)
