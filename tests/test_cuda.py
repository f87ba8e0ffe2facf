"""What only a GPU can show. On one: `python -m pytest -m cuda`."""

from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.copies import Call, run
from lib.eagle import EagleConfig
from lib.eagle.graph import CudaGraph
from lib.eagle.model import DraftModel
from lib.launches import foreach_limits, launches
from lib.strategies import STRATEGIES, Step
from tests.stand_in import record
from tests.tensors import assert_copies_or_refuses, one_nan, pairs, properties, same, snapshot
from tests.test_eagle_runners import RUNNERS, WAYS, both_runners
from tests.test_launches import PAIRS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA or ROCm device"),
    pytest.mark.filterwarnings("ignore:Casting complex values"),
]
DEVICE = "cuda"
INTEGERS = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64]
FIT = ("", "onto itself", "same pair twice")
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def assert_counted_as_predicted(calls):
    """The profiler finds the launches that `launches` predicts, by kind, for each list of calls."""
    ways = {name: (lambda made=made: run(made), launches(made)) for name, made in calls.items()}
    counted = record.count_launches(record.Gpu().trace(ways, repeats=3))
    predicted = {name: dict(Counter(launch.kind for launch in made)) for name, (_, made) in ways.items()}
    assert {name: counted.get(name, {}) for name in predicted} == predicted


@both_runners
@pytest.mark.parametrize("layout", ["2026-06", "2026-10"])
def test_graphs_replay_what_per_copy_and_eager_compute(table, layout):
    """Bit by bit, for padded and full batches, in any way; close to eager ones; launches as predicted."""
    config = EagleConfig.tiny(layout=layout)
    model = DraftModel.random(config, DEVICE)
    reference = WAYS["per_copy"].runner(table, config, device=DEVICE, model=model)
    calls = {}
    for name, way in WAYS.items():
        runner = way.runner(table, config, device=DEVICE, model=model)
        for seed, batch_size in enumerate((8, 5, 1, 8, 3, 2)):
            batch = RUNNERS[table][1].random(config, batch_size, seed, DEVICE)
            expected = snapshot(reference.replay(batch))
            outputs = runner.replay(laid := way.lay(runner, batch))
            calls[f"{name} {batch_size}"] = runner.calls(laid)
            assert all(isinstance(graph, CudaGraph) for graph in runner.graphs.values())
            assert same(outputs, expected), (name, batch_size)
            inputs = reference.producer(reference.padded_batch_size(batch_size)).inputs
            for a, b in zip(expected, type(reference).forward(model, inputs)):
                torch.testing.assert_close(a, b[: len(a)])
    assert_counted_as_predicted(calls)


@given(st.sampled_from([INTEGERS, FLOATS]).flatmap(partial(pairs, mutations=FIT, device=DEVICE)))
@properties(300)
def test_strategies_leave_on_the_device_the_bits_of_a_loop_of_copy(case):
    """Any strides and sharing, gaps included; where a float is converted a NaN may have another payload."""
    ways = [way for name, way in STRATEGIES.items() if name != "uint8_view"]
    copies = [lambda dsts, srcs, way=way: run(way(Step.of(dsts, srcs))) for way in ways]
    assert_copies_or_refuses(case, *copies, settle=one_nan)


def test_predicted_launches_of_single_calls_are_those_counted():
    i64, large = torch.zeros(64, dtype=torch.int64, device=DEVICE), torch.zeros(2**20, device=DEVICE)
    new = torch.arange(24.0, device=DEVICE).view(4, 6)
    cases = {str(n): pair(torch.zeros_like(new), new) for n, (pair, _) in enumerate(PAIRS)}
    cases |= {"converts": (i64.int(), i64), "large": (large, large + 1)}
    calls = {}
    for name, (dst, src) in cases.items():
        if not dst.is_neg():  # which foreach refuses to write
            calls[f"foreach {name}"] = [Call("foreach", [new.clone(), dst], [new, src])]
    cases |= {"pageable": (i64, i64.cpu()), "pinned": (i64, i64.cpu().pin_memory())}
    cases["download"] = i64.cpu(), i64
    calls |= {f"copy_ {name}": [Call("copy_", [dst], [src])] for name, (dst, src) in cases.items()}
    calls["fill"] = [Call("fill_", [i64], value=3)]
    for n in (64, foreach_limits()[0], foreach_limits()[0] + 1):  # what this build is inferred to hold
        tensors = [i64.clone() for _ in range(n)]
        calls[f"{n} tensors"] = [Call("foreach", tensors, [i64] * n)]
    assert_counted_as_predicted(calls)
