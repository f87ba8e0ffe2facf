"""The two runners: launches, padding, copies, errors, and outputs that do not depend on the strategy."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.eagle import (
    DraftBatch,
    DraftExtendBatch,
    EagleConfig,
    EagleDraftCudaGraphRunner,
    EagleDraftExtendCudaGraphRunner,
)
from lib.eagle.fields import PRESETS
from lib.eagle.graph import GraphBackend
from lib.eagle.model import DraftModel, DraftOutput
from lib.strategies import ANY_SOURCES
from tests.skipping import Skip

TINY = EagleConfig.tiny()
RUNNERS = {
    "draft": (EagleDraftCudaGraphRunner, DraftBatch),
    "draft_extend": (EagleDraftExtendCudaGraphRunner, DraftExtendBatch),
}
both_runners = pytest.mark.parametrize("table", RUNNERS)


pytestmark = pytest.mark.usefixtures("one_thread")


def make(table: str, config: EagleConfig = TINY, strategy="grouped_foreach_dma", model=None, **batch):
    runner, batch_type = RUNNERS[table]
    return runner(config, strategy, model=model), batch_type.random(config, **{"batch_size": 3, **batch})


def snapshot(runner):
    return {n: t.clone() for n, t in runner.buffers.tensors.items()}


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- launches: the table of facts.md section 1 -------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "layout", "batch_size", "expected"),
    [
        ("per_copy", "int64_seq_lens", 4, (7, 9)),
        ("grouped_foreach", "int64_seq_lens", 4, (3, 3)),
        ("grouped_foreach_dma", "int64_seq_lens", 4, (3, 3)),
        ("uint8_view", "int64_seq_lens", 4, (2, 2)),
        ("per_copy", "int64_seq_lens", 3, (14, 16)),
        ("grouped_foreach_dma", "int64_seq_lens", 3, (10, 10)),
        ("per_copy", "int32_seq_lens", 4, (7, 9)),
        ("grouped_foreach_dma", "int32_seq_lens", 4, (4, 4)),
        ("grouped_foreach_dma", "int32_seq_lens", 3, (11, 11)),
    ],
)
@pytest.mark.parametrize("preset", PRESETS)
def test_launches(preset, strategy, layout, batch_size, expected):
    config = EagleConfig.preset(preset, layout=layout)
    launches = [
        runner.launches(batch)
        for runner, batch in (make(t, config, strategy, batch_size=batch_size) for t in RUNNERS)
    ]
    assert tuple(map(len, launches)) == expected
    small = [launch for each in launches for launch in each]
    fills = 0 if batch_size in config.capture_batch_sizes else 14
    assert sum(launch.kind == "fill" for launch in small) == fills
    assert sum(launch.n_copies for launch in small if launch.kind != "fill") == 16


def test_the_converting_copy_is_an_elementwise_kernel():
    runner, batch = make("draft", EagleConfig.tiny(layout="int32_seq_lens"), "per_copy", batch_size=4)
    kinds = [launch.kind for launch in runner.launches(batch)]
    assert kinds == ["elementwise"] + ["memcpy"] * 6  # seq_lens comes first


def test_byte_view_refuses_the_converting_layout():
    runner, batch = make("draft", EagleConfig.tiny(layout="int32_seq_lens"), "uint8_view", batch_size=4)
    before = snapshot(runner)
    with pytest.raises(ValueError, match="seq_lens"):
        runner.copy_inputs(batch)
    assert same(before.values(), runner.buffers.tensors.values())


def test_optional_fields():
    runner, batch = make("draft_extend", strategy="per_copy", batch_size=4)
    bare = replace(batch, num_correct_drafts=None, num_accept_tokens=None)
    assert len(runner.launches(bare)) == 7
    bare.extend_seq_lens = None  # filled with w instead of copied
    assert [launch.kind for launch in runner.launches(bare)].count("fill") == 1
    runner.buffers.tensors["extend_seq_lens"].zero_()
    runner.copy_inputs(bare)
    w = TINY.num_draft_tokens
    assert runner.buffers.tensors["extend_seq_lens"].tolist() == [w] * 4 + [0] * 4
    padded = DraftExtendBatch.random(TINY, 3)
    padded.extend_seq_lens = None  # the fill of the padding has done it
    assert [launch.kind for launch in runner.launches(padded)].count("fill") == 7


def test_debug_ids_join_where_both_sides_have_them():
    with_ids = EagleConfig.tiny(debug_ids=True)
    runner, batch = make("draft", with_ids, "per_copy")
    assert len(runner.launches(batch)) == 9 + 9
    runner.copy_inputs(batch)
    assert runner.buffers.tensors["bootstrap_room_ids_int"].tolist() == [0, 1, 2] + [-1] * 5
    runner, _ = make("draft", TINY, "per_copy")  # has no buffers for them
    assert len(runner.launches(batch)) == 7 + 7


# ---- copies and padding ------------------------------------------------------------------------------------


@both_runners
@pytest.mark.parametrize("layout", ["int64_seq_lens", "int32_seq_lens"])
@pytest.mark.parametrize("strategy", ["per_copy", "uint8_view", "grouped_foreach", "grouped_foreach_dma"])
def test_buffers_hold_the_batch_and_the_padding(table, layout, strategy):
    if strategy == "uint8_view" and layout == "int32_seq_lens":
        pytest.skip("the byte view refuses conversions, tested above")
    config = EagleConfig.tiny(layout=layout)
    for bs in range(1, 9):
        runner, batch = make(table, config, strategy, batch_size=bs, seed=bs)
        for t in runner.buffers.tensors.values():
            t.fill_(77)
        runner.copy_inputs(batch)
        captured = runner.padded_batch_size(bs)
        for f in config.table(table):
            source, buffer = getattr(batch, f.name), runner.buffers.rows(f, captured)
            rows = len(source)
            assert torch.equal(buffer[:rows], source.to(buffer.dtype)), f.name
            if f.pad is not None and not f.large:  # no real row depends on a large field's padding
                assert (buffer[rows:] == config.pad_value(f)).all(), f.name


@both_runners
def test_real_rows_do_not_depend_on_padding(table):
    """Poison all that padding can bring: its rows of hidden_states, and slot 0, where its keys and values go
    and where a request's table points beyond its length."""
    config = EagleConfig.tiny(dtype=torch.float32)
    model = DraftModel.random(config)
    runner, batch = make(table, config, batch_size=5, model=model)
    for req, length in zip(batch.req_pool_indices, batch.seq_lens):
        model.req_to_token[req, length:] = 0
    clean = [t.clone() for t in runner.replay(batch)]
    for poison in (torch.nan, torch.inf, -torch.inf):
        model.kv.k[:, 0], model.kv.v[:, 0] = poison, poison
        runner.copy_inputs(batch)
        rows = config.shape(next(f for f in config.table(table) if f.large), 5)[0]
        runner.buffers.tensors["hidden_states"][rows:] = poison
        assert same(runner.replay_graph(5), clean)


def test_large_presets_copy_without_building_a_model():
    for preset in ("llama3-8b", "deepseek-v3"):
        config = EagleConfig.preset(preset)
        for table in RUNNERS:
            runner, batch = make(table, config, batch_size=64)
            runner.copy_inputs(batch)
            assert torch.equal(runner.buffers.tensors["hidden_states"], batch.hidden_states)
            assert runner.model is None
            assert sum(launch.bytes for launch in runner.launches(batch)) > 64 * 2 * config.hidden_size


# ---- outputs -----------------------------------------------------------------------------------------------


@both_runners
@pytest.mark.parametrize("layout", ["int64_seq_lens", "int32_seq_lens"])
@pytest.mark.parametrize("topk", [1, 4])
def test_outputs_are_bitwise_equal_for_every_strategy(table, layout, topk):
    config = EagleConfig.tiny(layout=layout, topk=topk)
    names = [s for s in ANY_SOURCES if s != "uint8_view" or layout == "int64_seq_lens"]
    runners = {
        name: make(table, config, name)[0] for name in names
    }  # each with a model and a pool of its own
    for seed, bs in enumerate([3, 8, 1, 7, 2, 5, 4, 6, 1, 8]):
        batch = RUNNERS[table][1].random(config, bs, seed=seed)
        expected, *others = [runner.replay(batch) for runner in runners.values()]
        assert all(same(expected, other) for other in others), (bs, seed)


@both_runners
def test_skipping_the_copy_of_a_field_changes_the_outputs(table):
    config = EagleConfig.tiny(dtype=torch.float32)
    runner, batch = make(table, config, batch_size=4, seed=1)
    expected = [t.clone() for t in runner.replay(batch)]
    assert same(runner.replay(batch), expected)  # a replay may be repeated
    unseen = set()
    for f in (f for f in config.table(table) if not f.host):
        skipping, _ = make(table, config, Skip(f.name))  # its random model is the same
        if same(skipping.replay(batch), expected):
            unseen.add(f.name)
    # Attention metadata: the computation reads nothing (num_*), or what the buffer holds already (always w).
    metadata = {"extend_seq_lens", "num_correct_drafts", "num_accept_tokens"}
    assert unseen == (metadata if table == "draft_extend" else set())


def test_extend_seq_lens_decides_what_a_row_sees():
    runner, batch = make("draft_extend", EagleConfig.tiny(dtype=torch.float32), batch_size=4)
    expected = [t.clone() for t in runner.replay(batch)]
    fewer = replace(batch, extend_seq_lens=batch.extend_seq_lens - 3)
    assert not same(runner.replay(fewer), expected)


@both_runners
def test_outputs_are_cut_to_the_batch_and_stay_in_place(table):
    runner, batch = make(table, batch_size=3)
    first = runner.replay(batch)
    rows = 3 if table == "draft" else 3 * TINY.num_draft_tokens
    assert all(len(t) == rows for t in first)
    again = runner.replay(type(batch).random(TINY, 4, seed=9))
    assert [t.data_ptr() for t in first] == [t.data_ptr() for t in again]


def test_eager_graph_keeps_the_contract():
    x = torch.ones(2)
    graph = GraphBackend(torch.device("cpu")).capture(lambda: DraftOutput(x + 1, x * 2, -x, x))
    held = graph.outputs
    x.fill_(5.0)
    assert held[0].tolist() == [2, 2]  # nothing changes before a replay
    assert graph.replay() is held
    assert [t[0].item() for t in held] == [6, 10, -5, 5]
    assert held.scores.data_ptr() != x.data_ptr()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@both_runners
def test_cuda_graphs(table):
    """Every strategy bitwise equal in captured graphs; and they compute what the plain forward pass does."""
    config = EagleConfig.tiny()
    model = DraftModel.random(config, "cuda")
    runners = [RUNNERS[table][0](config, s, "cuda", model) for s in ANY_SOURCES]
    for seed, bs in enumerate([3, 8, 1, 7, 2, 5, 4, 6]):
        batch = RUNNERS[table][1].random(config, bs, seed=seed, device="cuda")
        expected, *others = [[t.clone() for t in r.replay(batch)] for r in runners]
        assert all(same(expected, other) for other in others), bs
        padded = runners[0].padded_batch_size(bs)
        plain = runners[0].forward(runners[0].buffers.inputs(padded))
        for got, want in zip(expected, plain, strict=True):
            torch.testing.assert_close(got, want[: len(got)])


# ---- errors ------------------------------------------------------------------------------------------------


def wrong_fields(table):
    """(name, wrong value, what the message must say) for every field of a batch of 3."""
    batch = RUNNERS[table][1].random(TINY, 3)
    for f in TINY.table(table):
        t = getattr(batch, f.name)
        if f.required:
            yield f.name, None, "missing"
        yield f.name, t[:-1], str(tuple(t.shape))
        yield f.name, torch.cat((t, t)), str(tuple(t.shape))
        yield f.name, t[..., None], str(tuple(t.shape))
        yield f.name, t.to(torch.float16), str(f.dtype or TINY.dtype)
        yield f.name, t.to("meta"), "cpu"
        if t.dim() == 2:
            yield f.name, torch.cat((t, t), dim=1), str(tuple(t.shape))


@both_runners
@settings(max_examples=60, derandomize=True, deadline=None)
@given(data=st.data())
def test_a_wrong_field_is_named_and_nothing_is_written(table, data):
    runner, batch = make(table, strategy=data.draw(st.sampled_from(list(ANY_SOURCES))))
    name, wrong, says = data.draw(st.sampled_from(list(wrong_fields(table))))
    before = snapshot(runner)
    bad = replace(batch, **{name: wrong})
    for call in (runner.copy_inputs, runner.replay, runner.launches):
        with pytest.raises(ValueError) as error:
            call(bad)
        if name != "seq_lens" or wrong is None:  # seq_lens says how large the batch is: the others look wrong
            assert name in str(error.value) and says in str(error.value)
    assert same(before.values(), runner.buffers.tensors.values())


@both_runners
def test_batches_that_do_not_fit(table):
    runner, _ = make(table)
    before = snapshot(runner)
    with pytest.raises(ValueError, match=r"1 to 8.*got 9"):
        runner.replay(RUNNERS[table][1].random(TINY, 9))
    batch = RUNNERS[table][1].random(TINY, 3)
    with pytest.raises(ValueError, match=r"seq_lens_cpu: expected at most 256 tokens, got 300"):
        runner.replay(replace(batch, seq_lens_cpu=torch.tensor([4, 300, 5])))
    assert same(before.values(), runner.buffers.tensors.values())


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"layout": "int16"}, "layout"),
        ({"capture_batch_sizes": ()}, "capture_batch_sizes"),
        ({"num_steps": 1}, "num_steps"),
        ({"topk": 0}, "topk"),
        ({"topk": 1, "num_draft_tokens": 9}, "num_draft_tokens"),
        ({"num_draft_tokens": 3}, "num_draft_tokens"),
        ({"num_heads": 3}, "hidden_size"),
    ],
)
def test_contradicting_sizes(overrides, says):
    with pytest.raises(ValueError, match=says):
        EagleConfig.tiny(**overrides)


def test_unknown_preset():
    with pytest.raises(ValueError, match="llama3-8b"):
        EagleConfig.preset("llama3-9b")


def test_a_source_that_autograd_follows_leaves_the_static_buffers_alone():
    """With requires_grad on a buffer later batches would be refused, or a graph would grow step by step."""
    for strategy in ANY_SOURCES:
        runner, batch = make("draft", strategy=strategy)
        followed = replace(batch, topk_p=batch.topk_p.clone().requires_grad_())
        for each in (followed, batch, followed):
            runner.copy_inputs(each)
        assert not any(t.requires_grad for t in runner.buffers.tensors.values()), strategy


@pytest.mark.parametrize("strategy", ANY_SOURCES)
def test_first_used_in_inference_mode_it_serves_outside_too(strategy):
    with torch.inference_mode():
        runner, batch = make("draft", strategy=strategy)
        first = [t.clone() for t in runner.replay(batch)]
    copies = {f.name: getattr(batch, f.name) for f in fields(batch)}
    batch = replace(batch, **{name: t.clone() for name, t in copies.items() if t is not None})
    assert all(torch.equal(a, b) for a, b in zip(first, runner.replay(batch)))


@pytest.mark.parametrize("bad", [torch.tensor(3), [1, 2, 3]])
def test_seq_lens_that_are_no_vector_are_named(bad):
    runner, batch = make("draft")
    with pytest.raises(ValueError, match=r"seq_lens: expected a tensor of one length"):
        runner.copy_inputs(replace(batch, seq_lens=bad))


def test_batch_sizes_that_were_never_captured_and_unknown_strategies_are_refused():
    runner, _ = make("draft")
    for size in (0, -1, runner.config.max_batch_size + 1):
        with pytest.raises(ValueError, match="batch size: expected 1 to"):
            runner.replay_graph(size)
    with pytest.raises(ValueError, match="strategy: expected one of"):
        EagleDraftCudaGraphRunner(EagleConfig.tiny(), "per-copy")


@pytest.mark.parametrize(
    "sizes", [{"num_heads": 0}, {"hidden_size": -128}, {"vocab_size": 2}, {"max_context_len": 2}]
)
def test_sizes_that_contradict_each_other_are_refused(sizes):
    (name,) = sizes
    with pytest.raises(ValueError, match=name):
        EagleConfig.tiny(**sizes)
