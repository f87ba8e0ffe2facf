"""What only a GPU can show. On one: `python -m pytest -m cuda`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lib import record
from lib.eagle import (
    DraftBatch,
    DraftExtendBatch,
    EagleConfig,
    EagleDraftCudaGraphRunner,
    EagleDraftExtendCudaGraphRunner,
)
from lib.eagle.graph import CudaGraph
from lib.eagle.model import DraftModel
from lib.grouped_copy import grouped_foreach_copy_
from lib.routes import Launch, foreach_limits
from lib.strategies import ANY_SOURCES, STRATEGIES
from tests.tensors import Pairs, must_refuse, pairs, properties

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA or ROCm device"),
    pytest.mark.filterwarnings("ignore:Casting complex values"),
]
RUNNERS = [(EagleDraftCudaGraphRunner, DraftBatch), (EagleDraftExtendCudaGraphRunner, DraftExtendBatch)]
INTEGERS = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture(scope="module")
def model() -> DraftModel:
    return DraftModel.random(EagleConfig.tiny(), "cuda")


@pytest.fixture
def recorder(tmp_path) -> record.Recorder:
    return record.Recorder(record.GpuDevice(), tmp_path, minutes=5)


def or_skip(strategy: str, act):
    """What `act` returns; skips where the machine lacks what a strategy needs, a compiler say."""
    try:
        return act()
    except (ImportError, NotImplementedError) as error:
        pytest.skip(f"{strategy}: {error}")


@pytest.mark.parametrize("classes", RUNNERS, ids=("draft", "draft_extend"))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_graphs_are_captured_and_replay_what_per_copy_and_eager_compute(strategy, classes, model):
    """Bit by bit per_copy's outputs, for every batch size, twice with other inputs; close to eager ones."""
    runner_class, batch_class = classes
    config = model.config
    runner, reference = (runner_class(config, name, "cuda", model) for name in (strategy, "per_copy"))
    for seed, batch_size in enumerate((8, 5, 1, 8, 3, 2)):
        batch = batch_class.random(config, batch_size, seed, "cuda")
        expected = [t.clone() for t in reference.replay(batch)]
        outputs = or_skip(strategy, lambda batch=batch: runner.replay(runner.place(batch)))
        assert all(isinstance(graph, CudaGraph) for graph in runner.graphs.values())
        for name, a, b in zip(outputs._fields, outputs, expected):
            assert torch.equal(a, b), f"{name}, batch {batch_size}"
        padded = reference.padded_batch_size(batch_size)
        for a, b in zip(expected, reference.forward(reference.buffers.inputs(padded))):
            torch.testing.assert_close(a, b[: len(a)])


def on_gpu(tensors: list[Tensor], storages: dict) -> list[Tensor]:
    """The same tensors, strides, sharing and lazy bits included, over storages moved to the GPU."""
    moved = []
    for t in tensors:
        key = t.untyped_storage().data_ptr()
        if key not in storages:
            storages[key] = t.untyped_storage().cuda()
        if t.is_meta:
            moved.append(t)
            continue
        there = torch.empty(0, dtype=t.dtype, device="cuda")
        there = there.set_(storages[key], t.storage_offset(), t.shape, t.stride())
        there = there.conj() if t.is_conj() else there
        moved.append(torch._neg_view(there) if t.is_neg() else there)
    return moved


def all_bytes(storages: dict) -> list[Tensor]:
    return [torch.empty(0, dtype=torch.uint8, device="cuda").set_(s) for s in storages.values()]


@given(
    st.sampled_from([INTEGERS, FLOATS]).flatmap(lambda dtypes: pairs(dtypes, mutations=("", "interleaved")))
)
@properties(400)
def test_strategies_leave_on_the_device_the_bits_of_a_loop_of_copy(case: Pairs):
    """Any strides and sharing, gaps included; where a float is converted a NaN may have another payload."""
    storages: dict = {}
    dsts, srcs = (on_gpu(side, storages) for side in case)
    if must_refuse(dsts, srcs):
        return
    memory = all_bytes(storages)
    before = [t.clone() for t in memory]

    def after(copy) -> list[Tensor]:
        for t, bits in zip(memory, before):
            t.copy_(bits)
        copy()
        for dst, src in zip(dsts, srcs):
            if dst.dtype != src.dtype and dst.is_floating_point():
                dst.nan_to_num_(nan=0.0, posinf=float("inf"), neginf=-float("inf"))
        return [t.clone() for t in memory]

    expected = after(lambda: [dst.copy_(src) for dst, src in zip(dsts, srcs)])
    for name, strategy in ANY_SOURCES.items():
        try:
            found = after(lambda strategy=strategy: strategy(dsts, srcs))
        except (ImportError, ValueError, RuntimeError) as error:
            assert name not in ("per_copy", "grouped_foreach", "grouped_foreach_dma"), error
            continue
        assert all(map(torch.equal, found, expected)), name


@pytest.mark.parametrize("layout", ["int64_seq_lens", "int32_seq_lens"])
@pytest.mark.parametrize("batch_size", [8, 5])
def test_predicted_launches_of_a_step_are_those_counted(layout, batch_size, recorder):
    config = EagleConfig.preset("llama3-8b", layout=layout)
    steps = record.steps_of(recorder, "steps", config, batch_size)
    assert set(steps) >= {"per_copy", "grouped_foreach", "grouped_foreach_dma"}
    counts = recorder.count({name: record.step_way(step) for name, step in steps.items()}, "step")
    assert recorder.meta["problems"] == []
    assert sum(counts["per_copy"]["counted"].values()) == (16 if batch_size == 8 else 30)


def test_predicted_launches_of_a_replay_are_those_counted(model, recorder):
    steps = record.steps_of(recorder, "replays", model.config, 5, model)
    ways = {name: record.step_way(step, replay=True) for name, step in steps.items()}
    counts = recorder.count(ways, "replay")
    assert recorder.meta["problems"] == []
    assert all(found["counted"]["graph"] == 2 for found in counts.values())


def odd_pairs() -> dict[str, tuple[Tensor, Tensor]]:
    """Sources that engines have at hand, and what the rules of Copy.cu are about."""
    wide = torch.arange(64 * 64, device="cuda").view(64, 64)
    new = lambda *shape, dtype=torch.int64: torch.zeros(shape, dtype=dtype, device="cuda")  # noqa: E731
    lazy = torch.arange(8, device="cuda").to(torch.complex64)
    same = new(8)
    return {
        "contiguous": (new(64), wide[0]),
        "column": (new(64), wide[:, 1]),
        "slice of wider rows": (new(64, 8), wide[:, :8]),
        "into a slice of wider rows": (wide.clone()[:, :8], new(64, 8)),
        "whole rows": (new(2, 64), wide[:2]),
        "transposed": (new(64, 64), wide.t()),
        "transposed both": (new(64, 64).t(), wide.t()),
        "a size of 1 with another stride": (new(4, 1), wide[:4, :1]),
        "broadcast length": (new(64), wide[0, :1].expand(64)),
        "0-dim": (new(), wide[3, 3]),
        "empty": (new(0), new(0)),
        "onto itself": (same, same),
        "int64 to int32": (new(64, dtype=torch.int32), wide[0]),
        "conjugate": (new(8, dtype=torch.complex64), lazy.conj()),
        "conjugate both": (new(8, dtype=torch.complex64).conj(), lazy.conj()),
        "uint16": (new(64, dtype=torch.uint16), new(64, dtype=torch.uint16)),
        "large": (new(2**20), new(2**20)),
    }


def test_predicted_routes_of_single_copies_are_those_counted(recorder):
    cases = odd_pairs()
    ways = {f"copy_ {name}": record.copies([dst], [src]) for name, (dst, src) in cases.items()}
    fusable = [name for name in cases if name not in ("empty", "uint16")]
    ways |= {f"foreach {name}": record.copies(*([t] for t in cases[name]), fused=1) for name in fusable}
    together = {"broken by one slice": ["contiguous", "large", "slice of wider rows"],
                "whole": ["contiguous", "large", "whole rows"]}  # fmt: skip
    for what, names in together.items():
        ways[what] = record.copies(*zip(*(cases[name] for name in names)), fused=len(names))
    counts = recorder.count(ways, "single")
    assert recorder.meta["problems"] == []
    assert counts["whole"]["counted"] == {"foreach": 1}


def test_one_launch_holds_64_tensors_or_what_this_build_is_inferred_to_hold(recorder):
    """A difference here tells that lib.routes.foreach_limits infers the limits of this build wrong."""
    ways = {}
    for n in (64, 65):
        tensors = [torch.zeros(8, dtype=torch.int64, device="cuda") for _ in range(n)]
        ways[str(n)] = record.copies(tensors, [t.clone() for t in tensors], fused=n)
    counts = recorder.count(ways, "limit")
    assert counts["64"]["counted"] == {"foreach": 1}
    assert counts["65"]["counted"] == {"foreach": 1 if foreach_limits().tensors >= 65 else 2}


def test_mixed_destinations_of_one_source_dtype_by_release():
    """pytorch issue 173383: the fused kernel of the first destination's dtype wrote every destination.

    Fixed by pull request 173531, of January 2026: wrong up to 2.9, right from 2.11 on, 2.10 not known here.
    Grouped by the pair of dtypes the copy is right on every release.
    """
    srcs = [torch.arange(1, 9, device="cuda") for _ in range(2)]
    dsts = [torch.zeros(8, dtype=dtype, device="cuda") for dtype in (torch.int32, torch.int64)]
    torch._foreach_copy_(dsts, srcs)
    right = all(map(torch.equal, dsts, (srcs[0].int(), srcs[1])))
    if RELEASE <= (2, 9):
        assert not right, "expected the fault of pytorch issue 173383"
    elif RELEASE >= (2, 11):
        assert right, "expected the fault of pytorch issue 173383 to be fixed"
    for dst in dsts:
        dst.zero_()
    grouped_foreach_copy_(dsts, srcs)
    assert torch.equal(dsts[0], srcs[0].int()) and torch.equal(dsts[1], srcs[1])


def test_fills_are_one_kernel_each(recorder):
    t = torch.ones(64, device="cuda")
    fill = Launch("fill", 1, t.nbytes, "one fill", "fill_")
    ways = {
        "fill_": record.Way(lambda: t.fill_(3), [fill], []),
        "zero_": record.Way(lambda: t.zero_(), [fill], []),
    }
    recorder.count(ways, "fills")
    assert recorder.meta["problems"] == []
