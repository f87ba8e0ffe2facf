"""The four strategies: bitwise what a loop of `copy_` leaves, or the documented refusal; their launches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor

from lib.grouped_copy import DEFAULT_DMA_BYTES
from lib.routes import explain
from lib.strategies import ANY_SOURCES, STRATEGIES, with_dma_bytes
from tests.tensors import (
    Pairs,
    assert_copies_or_refuses,
    must_refuse,
    pairs,
    properties,
    same,
    snapshot,
    storages,
)

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values", "ignore:ComplexHalf support")
ROUTED = ("per_copy", "grouped_foreach", "grouped_foreach_dma")


def _no_byte_view(t: Tensor) -> bool:
    """Not where the last stride is not 1, of 0-dim and of lazy views; one-byte types always have one."""
    if t.is_conj() or t.is_neg():
        return True
    return t.element_size() > 1 and (t.dim() == 0 or t.stride(-1) != 1)


@given(pairs())
@properties(2_500)
def test_strategies_leave_what_a_loop_of_copy_leaves_or_refuse(case: Pairs):
    """uint8_view refuses to convert, and raises PyTorch's error where there is no view as bytes."""
    dsts, srcs = case
    for name in ROUTED:
        assert_copies_or_refuses(STRATEGIES[name], dsts, srcs)
    assert_copies_or_refuses(with_dma_bytes(16), dsts, srcs)
    refuses = None
    if any(d.dtype != s.dtype for d, s in zip(dsts, srcs)):
        refuses = ValueError
    elif any(map(_no_byte_view, (*dsts, *srcs))):
        refuses = RuntimeError
    assert_copies_or_refuses(STRATEGIES["uint8_view"], dsts, srcs, refuses)


@given(pairs())
@properties(500)
def test_launches_write_nothing_serve_every_pair_and_count_its_bytes(case: Pairs):
    dsts, srcs = case
    memory = storages([*dsts, *srcs])
    before = snapshot(memory)
    for name in ROUTED:
        strategy = STRATEGIES[name]
        if must_refuse(dsts, srcs):
            with pytest.raises(ValueError):
                strategy.launches(dsts, srcs)
            continue
        moved = [d for d, s in zip(dsts, srcs) if d.numel() and d.data_ptr() != s.data_ptr()]
        onto_itself = sum(1 for d, s in zip(dsts, srcs) if d.numel() and d.data_ptr() == s.data_ptr())
        launches = strategy.launches(dsts, srcs)
        served = sum(launch.n_copies for launch in launches)
        assert len(moved) <= served <= len(moved) + onto_itself
        if not onto_itself:
            assert sum(launch.bytes for launch in launches) == sum(d.nbytes for d in moved)
    assert same(memory, before)


def test_uint8_view_names_the_field():
    dst, src = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"positions: .*stride"):
        STRATEGIES["uint8_view"]([dst], [src[:, 0]], ["positions"])
    with pytest.raises(
        ValueError, match=r"seq_lens: bytes cannot convert, expected torch.int32, got torch.int64"
    ):
        STRATEGIES["uint8_view"]([dst.int()], [dst], ["seq_lens"])


@pytest.mark.parametrize("name", [*ANY_SOURCES, "in_graph"])
def test_autograd_records_nothing_and_the_next_step_is_served_too(name: str):
    if name == "fused_kernel":
        pytest.importorskip("triton")
    dsts, weight = [torch.zeros(3), torch.zeros(3), torch.zeros(3)], torch.ones(3, requires_grad=True)
    for factor in (2.0, 3.0):
        STRATEGIES[name](dsts, [weight * factor, weight, weight.detach()])
        assert not any(dst.requires_grad for dst in dsts) and dsts[0].eq(factor).all()


def test_an_empty_pair_is_no_company():
    dsts, srcs = [torch.zeros(3), torch.zeros(0)], [torch.ones(3), torch.ones(0)]
    assert [x.kind for x in STRATEGIES["grouped_foreach_dma"].launches(dsts, srcs)] == ["memcpy"]
    assert [(row.route, row.shares) for row in explain(dsts, srcs)] == [("memcpy", 1), ("none", 0)]


def test_dma_sends_what_is_large_or_alone_by_copy():
    small = [torch.zeros(8, dtype=torch.int64) for _ in range(4)]
    alone = torch.zeros(8)
    large = torch.zeros(DEFAULT_DMA_BYTES // 8, dtype=torch.int64)
    dsts = [*small, alone, large]
    srcs = [t.clone() for t in dsts]
    kinds = [(x.kind, x.n_copies, x.bytes) for x in STRATEGIES["grouped_foreach_dma"].launches(dsts, srcs)]
    assert kinds == [("foreach", 4, 256), ("memcpy", 1, 32), ("memcpy", 1, DEFAULT_DMA_BYTES)]
    grouped = [(x.kind, x.n_copies) for x in STRATEGIES["grouped_foreach"].launches(dsts, srcs)]
    assert grouped == [("foreach", 5), ("foreach", 1)]
    assert [x.kind for x in with_dma_bytes(2**30).launches(dsts, srcs)] == ["foreach", "memcpy"]


def test_a_large_pair_that_converts_stays_in_its_group():
    dsts = [torch.zeros(DEFAULT_DMA_BYTES, dtype=torch.int32) for _ in range(2)]
    srcs = [t.long() for t in dsts]
    assert [x.kind for x in STRATEGIES["grouped_foreach_dma"].launches(dsts, srcs)] == ["foreach"]


def test_the_names_notebooks_use():
    assert list(STRATEGIES)[:4] == ["per_copy", "uint8_view", "grouped_foreach", "grouped_foreach_dma"]
    assert all(strategy.name == name for name, strategy in STRATEGIES.items())
