"""The two runners: launches, padding, copies, errors; outputs do not depend on the way of copying."""

from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple

import pytest
import torch

from lib.eagle import DraftBatch, DraftExtendBatch, EagleConfig
from lib.eagle import EagleDraftCudaGraphRunner as DraftRunner
from lib.eagle import EagleDraftExtendCudaGraphRunner as ExtendRunner
from lib.eagle.fields import LAYOUTS
from lib.eagle.model import DraftModel
from lib.strategies import STRATEGIES
from lib.workbench.step import StepCopies
from tests.tensors import Watched, assert_runs_what_is_counted, same, snapshot

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*in cast")]
TINY = EagleConfig.tiny()
FLOAT32 = EagleConfig.tiny(dtype=torch.float32)
RUNNERS = {"draft": (DraftRunner, DraftBatch), "draft_extend": (ExtendRunner, DraftExtendBatch)}
both_runners = pytest.mark.parametrize("table", RUNNERS)
NEED_TRITON = ("small_copy", "fused")


class Way(NamedTuple):
    """A way to have a batch in the buffers: a strategy, or an option and batches written in place."""

    options: dict
    placed: bool = True

    def runner(self, table, config=TINY, **more):
        return RUNNERS[table][0](config, **self.options, **more)

    def lay(self, runner, batch):
        return runner.place(batch) if self.placed else batch


WAYS = {name: Way({"strategy": name}, placed=False) for name in STRATEGIES}
WAYS |= {option: Way({option: True}) for option in ("one_allocation", "copy_in_graph")}
WAYS["in place"] = Way({})


def ways_for(layout="2026-06"):
    without = () if find_spec("triton") else NEED_TRITON
    converts = layout == "int32_seq_lens"
    return [name for name in WAYS if name not in without and not (converts and name == "uint8_view")]


LAUNCHES = {  # of both replays, full and padded, by layout; no entry where the way refuses or adds nothing
    "per_copy": {"2026-06": (16, 30), "2026-10": (17, 31), "int32_seq_lens": (16, 30)},
    "uint8_view": {"2026-06": (4, 18)},
    "grouped_foreach": {"2026-06": (6, 20)},
    "grouped_foreach_dma": {"2026-06": (6, 20), "2026-10": (6, 20), "int32_seq_lens": (8, 22)},
    "small_copy": {"2026-06": (4, 18), "2026-10": (4, 18)},
    "copy_plan": {"2026-06": (6, 6), "2026-10": (6, 6), "int32_seq_lens": (8, 8)},
    "fused": {"2026-06": (2, 2), "2026-10": (2, 2), "int32_seq_lens": (2, 2)},
    "one_allocation": {"2026-06": (2, 2), "int32_seq_lens": (2, 2)},
    "copy_in_graph": {"2026-06": (0, 0)},
    "no_copy": {"2026-06": (0, 0)},
}


@pytest.mark.parametrize("preset", ["tiny", "llama3-8b", "deepseek-v3"])
def test_launches_of_both_replays(preset):
    device = "cpu" if preset == "tiny" else "meta"
    for way, layout in ((way, layout) for way, layouts in LAUNCHES.items() for layout in layouts):
        config = EagleConfig.preset(preset, layout=layout)
        for batch_size, expected in zip((8, 5), LAUNCHES[way][layout]):
            step = StepCopies.build(config, way, batch_size, device)
            if way == "fused":  # hidden_states of 64 KiB and more by a memcpy: 4 and 3 for llama3-8b
                rows = batch_size, batch_size * config.num_draft_tokens
                expected += sum(n * 2 * config.hidden_size >= 65_536 for n in rows)
            assert len(step.launches()) == expected, (way, layout, batch_size)
            assert step.draft.model is None  # gigabytes, for a large preset


def test_optional_and_converting_fields_cost_what_they_cost_in_sglang():
    def kinds(table, layout="2026-06", batch_size=4, rare=False, **fields):
        config = EagleConfig.tiny(layout=layout, rare_fields=rare)
        batch = RUNNERS[table][1].random(config, batch_size)
        made = WAYS["per_copy"].runner(table, config).launches(replace(batch, **fields))
        return [launch.kind for launch in made]

    assert kinds("draft", "int32_seq_lens") == ["elementwise"] + ["memcpy"] * 6  # seq_lens first
    bare = {"num_correct_drafts": None, "num_accept_tokens": None}
    assert len(kinds("draft_extend", **bare)) == 7
    assert kinds("draft_extend", extend_seq_lens=None).count("fill") == 1  # with w instead of copied
    padded = kinds("draft_extend", batch_size=3, extend_seq_lens=None)
    assert padded.count("fill") == 7  # the padding's fill does it
    for table, copies, fills in (("draft", 7 + 8, 7 + 5), ("draft_extend", 10 + 2, 7 + 2)):
        assert len(kinds(table, "2026-10", rare=True)) == copies
        assert len(kinds(table, "2026-10", 3, rare=True)) == copies + fills


def ragged(table, config):
    """Batches padded and not, up and down, the same again; optional fields come and go."""
    for seed, batch_size in enumerate([3, 8, 1, 7, 2, 5, 4, 6, 5, 3, 3, 8]):
        batch = RUNNERS[table][1].random(config, batch_size, seed)
        for i, field in enumerate(config.table(table)):
            if not field.required and field.name != "hidden_states" and (seed + i) % 3 == 0:
                setattr(batch, field.name, None)
        yield batch


def assert_rows(runner, batch):
    """Real rows hold the batch; rows of padding, up to what the graph reads, their value."""
    buffers = runner.buffers.rows(runner.padded_batch_size(batch.batch_size))
    for field in runner.buffers.fields:
        source = getattr(batch, field.name)
        rows = buffers[field.name].movedim(field.dim, 0)
        n = field.rows * batch.batch_size
        if source is not None:
            assert torch.equal(rows[:n], source.movedim(field.dim, 0).to(rows.dtype)), field.name
        elif field.fill_if_missing:
            assert rows[:n].eq(field.pad).all(), field.name
        if field.pad is not None and not field.large:  # no real row depends on a large field's padding
            assert rows[n:].eq(field.pad).all(), field.name


@both_runners
@pytest.mark.parametrize(("layout", "topk"), [*((layout, 4) for layout in LAYOUTS), ("2026-06", 1)])
def test_every_way_leaves_the_same_rows_and_outputs(table, layout, topk):
    """Bit by bit those of per_copy, over ragged batches, whatever the buffers held before. A dispatch mode
    sees the launches that are counted."""
    config = EagleConfig.tiny(layout=layout, topk=topk, rare_fields=layout == "2026-10")
    batches = list(ragged(table, config))
    reference = WAYS["per_copy"].runner(table, config)
    expected = [snapshot(reference.replay(batch)) for batch in batches]
    for name in ways_for(layout):
        way = WAYS[name]
        runner = way.runner(table, config)  # with a model and a pool of its own
        runner.capture()
        for buffer in runner.buffers.tensors.values():
            buffer.fill_(7)  # a row, slot and token that there is
        interpreted = name in NEED_TRITON  # and slow
        for batch, outputs in list(zip(batches, expected))[: 4 if interpreted else None]:
            laid = way.lay(runner, batch)
            assert same(runner.replay(laid), outputs), (name, batch.batch_size)
            if name != "one_allocation":  # which has buffers for each captured size
                assert_rows(runner, batch)
            assert_runs_what_is_counted(runner.calls(laid), host=[runner.buffers.tensors["seq_lens_cpu"]])
            if not way.placed:  # a new strategy takes effect at once
                reference.strategy = name
                assert reference.launches(batch) == runner.launches(batch)


@both_runners
@pytest.mark.parametrize("name", ["per_copy", "copy_plan", "in place"])
def test_a_copy_that_is_interrupted_leaves_nothing_for_later_batches(table, name):
    """No rows of the broken batch: a replay would write another request's KV slots."""
    batch_class, runner = RUNNERS[table][1], WAYS[name].runner(table)
    batch, larger = batch_class.random(TINY, 3, seed=1), batch_class.random(TINY, 7, seed=2)
    for stop_at in range(4):
        with pytest.raises(KeyboardInterrupt), Watched(stop_at=stop_at):
            runner.copy_inputs(WAYS[name].lay(runner, larger))
        runner.copy_inputs(WAYS[name].lay(runner, batch))
        assert_rows(runner, batch)


@both_runners
@pytest.mark.parametrize("name", ["per_copy", "one_allocation", "copy_in_graph"])
def test_a_capture_depends_on_nothing_and_writes_nothing(table, name):
    """Not on what the buffers hold, which it leaves; nor into KV slots that are in use."""
    config, way = EagleConfig.tiny(capture_batch_sizes=(1, 8)), WAYS[name]
    batch_class = RUNNERS[table][1]
    first, large = batch_class.random(config, 1, seed=2), batch_class.random(config, 8, seed=1)
    captured, lazy, other = (way.runner(table, config, model=DraftModel.random(config)) for _ in range(3))
    captured.capture()
    for runner in (lazy, other):
        runner.copy_inputs(way.lay(runner, large))  # not replayed
    held, kv = snapshot(lazy.buffers.tensors.values()), lazy.model.kv[:, 1:].clone()
    lazy.capture()
    assert same(lazy.buffers.tensors.values(), held) and torch.equal(lazy.model.kv[:, 1:], kv)
    assert same(captured.replay(way.lay(captured, first)), other.replay(way.lay(other, first)))


@both_runners
@pytest.mark.parametrize("name", ["in place", "one_allocation", "copy_in_graph"])
def test_a_batch_written_where_sources_lie_serves_until_another_comes(table, name):
    """In place it needs no copy. Where sources have to lie there, others are refused."""
    way = WAYS[name]
    runner, batch = way.runner(table), RUNNERS[table][1].random(TINY, 5)
    other = RUNNERS[table][1].random(TINY, 6, seed=4)
    expected = snapshot(WAYS["per_copy"].runner(table).replay(batch))
    for _ in range(2):
        inside = runner.inputs(5)
        for field, buffer in inside.tensors().items():
            buffer.copy_(getattr(batch, field))
        assert len(runner.calls(inside)) == (name == "one_allocation")
        assert same(runner.replay(inside), expected)
        runner.copy_inputs(other if name == "in place" else runner.place(other))
        for wrong in (inside,) if name == "in place" else (inside, batch):
            with pytest.raises(ValueError, match="batch: expected what `place` or `inputs` returned last"):
                runner.copy_inputs(wrong)


@both_runners
def test_real_rows_do_not_depend_on_padding(table):
    """Poison all that padding can bring: its rows of hidden_states, and slot 0, where its keys and values go
    and where a request's table points beyond its length."""
    model = DraftModel.random(FLOAT32)
    batch = RUNNERS[table][1].random(FLOAT32, 5)
    runner = WAYS["per_copy"].runner(table, FLOAT32, model=model)
    for request, length in zip(batch.req_pool_indices, batch.seq_lens):
        model.req_to_token[request, length:] = 0
    clean = snapshot(runner.replay(batch))
    for poison in (torch.nan, torch.inf, -torch.inf):
        model.kv[:, 0] = poison
        runner.copy_inputs(batch)
        runner.buffers.tensors["hidden_states"][len(batch.hidden_states) :] = poison
        assert same(runner.replay_graph(5), clean)


@both_runners
def test_leaving_a_field_out_changes_the_outputs(table):
    make, batch_class = RUNNERS[table]
    runner, batch = make(FLOAT32), batch_class.random(FLOAT32, 4, seed=1)
    expected = snapshot(runner.replay(batch))
    unseen = set()
    for field in FLOAT32.table(table):

        def without(step, name=field.name):
            step.small.pop(name, step.large.pop(name, None))
            return STRATEGIES["grouped_foreach_dma"](step)

        leaving_out = make(FLOAT32, without)  # its random model is the same
        if not field.host and same(leaving_out.replay(batch), expected):
            unseen.add(field.name)
    # Attention metadata: the computation reads nothing (num_*), or what the buffer holds already (always w).
    metadata = {"extend_seq_lens", "num_correct_drafts", "num_accept_tokens"}
    assert unseen == (metadata if table == "draft_extend" else set())
    if table == "draft_extend":
        fewer = replace(batch, extend_seq_lens=batch.extend_seq_lens - 3)
        assert not same(runner.replay(fewer), expected)


@both_runners
def test_a_wrong_field_is_named_and_nothing_is_written(table):
    batch = RUNNERS[table][1].random(TINY, 3)
    runners = [WAYS[name].runner(table) for name in ways_for()]
    for i, field in enumerate(TINY.table(table)):
        t = getattr(batch, field.name)
        wrong = [t.to(torch.float16), t.to("meta"), t.tolist(), *([None] if field.required else [])]
        if field.name != "seq_lens":  # which says how large the batch is: the others look wrong
            wrong += [t[:-1], torch.cat((t, t)), t[..., None]]
        for j, value in enumerate(wrong):
            runner = runners[(i + j) % len(runners)]
            before = snapshot(runner.buffers.tensors.values())
            bad = replace(batch, **{field.name: value})
            for use in (runner.place, runner.copy_inputs, runner.launches):
                with pytest.raises(ValueError, match=f"^(batch|{field.name}): (expected|required)"):
                    use(bad)
            assert same(runner.buffers.tensors.values(), before)


def test_what_fits_nothing_is_refused_by_name():
    runner, batch = DraftRunner(TINY), DraftBatch.random(TINY, 3)
    larger = DraftBatch.random(EagleConfig.tiny(capture_batch_sizes=(9,)), 9)
    for attempt, says in (
        (lambda: runner.replay(larger), "batch size: expected 1 to 8, got 9"),
        (lambda: runner.replay_graph(0), "batch size: expected 1 to 8, got 0"),
        (lambda: runner.copy_inputs(replace(batch, seq_lens=torch.tensor(3))), "seq_lens: expected one len"),
        (lambda: DraftRunner(TINY, "per-copy"), "strategy: expected one of"),
        (lambda: EagleConfig.preset("llama3-9b"), "preset: expected .*llama3-8b"),
        (lambda: EagleConfig.tiny(num_heads=3), "hidden_size: expected a multiple of 2"),
        (lambda: EagleConfig.tiny(topk=1, num_draft_tokens=9), "num_draft_tokens: expected 4 to 4, got 9"),
    ):
        with pytest.raises(ValueError, match=f"^{says}"):
            attempt()
    sizes = {"num_steps": 1, "topk": 0, "num_draft_tokens": 3, "max_context_len": 2}
    for name, wrong in (sizes | {"capture_batch_sizes": (), "layout": "int16"}).items():
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            EagleConfig.tiny(**{name: wrong})


def test_a_field_that_does_not_come_is_none_of_a_placed_batch():
    config = EagleConfig.tiny(rare_fields=True)
    runner, batch = WAYS["copy_in_graph"].runner("draft", config), DraftBatch.random(config, 3)
    assert runner.place(batch).rids_int is not None
    assert runner.place(replace(batch, rids_int=None)).rids_int is None


@pytest.mark.parametrize("name", ways_for())
def test_autograd_and_inference_mode_leave_the_static_buffers_alone(name):
    """With requires_grad on a buffer later batches would be refused, or a graph would grow step by step."""
    way = WAYS[name]
    runner, batch = way.runner("draft"), DraftBatch.random(TINY, 3)
    followed = replace(batch, topk_p=batch.topk_p.clone().requires_grad_())
    for each in (followed, batch, followed):
        runner.copy_inputs(way.lay(runner, each))
    assert not any(t.requires_grad for t in runner.buffers.tensors.values())
    with torch.inference_mode():  # first used there it serves outside, too
        runner, inside = way.runner("draft"), DraftBatch.random(TINY, 3)
        first = snapshot(runner.replay(way.lay(runner, inside)))
    outside = replace(inside, **{field: t.clone() for field, t in inside.tensors().items()})
    assert same(runner.replay(way.lay(runner, outside)), first)
