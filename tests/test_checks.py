"""What `check_pairs` refuses, against addresses counted one by one, and how it says so."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from lib.checks import check_pairs
from tests.tensors import bytes_reached, must_refuse, properties

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values", "ignore:ComplexHalf support")
I64, FLOAT4 = torch.arange(4), torch.float4_e2m1fn_x2


def test_a_refusal_names_the_field_what_was_expected_and_what_came():
    for dst, src, says in (
        (I64, I64[:1], r"expected .*shape \(4,\), got \(1,\)"),
        (I64[:1].expand(4), I64 + 1, r"overlap itself, got strides \(0,\)"),
        (I64, I64.to("meta"), "expected .* on cpu, got meta"),
        (I64, (I64 + 1).to_sparse(), "expected a strided source, .*got torch.sparse_coo"),
        (I64, torch.nested.nested_tensor([I64], layout=torch.jagged), "strided source, .*got torch.jagged"),
        (I64, FakeTensorMode().from_tensor(I64), "expected a source of .*Tensor'>, got .*FakeTensor"),
        (I64, torch.empty(4, dtype=FLOAT4), "expected a source that converts to torch.int64, got .*float4"),
        (I64.bool(), torch._neg_view(torch.ones(4)), "expected a source that converts to torch.bool"),
        (torch.empty(4, dtype=FLOAT4), I64, "expected a source that converts to .*float4.*, got torch.int64"),
        (I64, I64.view(torch.float64), "shares memory with"),
        (torch.zeros(4, requires_grad=True), torch.zeros(4), "expected .*without grad"),
        (I64, None, "expected a tensor as source, got .*NoneType"),
        ([1, 2], I64, "expected a tensor as destination, got .*list"),
    ):
        lists = [torch.zeros(2), dst], [torch.ones(2), src]
        for name, names in (("seq_lens", np.array(["topk_p", "seq_lens"])), ("pair 1", None)):
            with pytest.raises(ValueError, match=f"^{name}: .*{says}"):
                check_pairs(*lists, names)
    with pytest.raises(ValueError, match=r"destinations, sources and names, got \(2, 1, 2\)"):
        check_pairs([I64, I64], [I64])


VIEWS = st.tuples(
    st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.complex64]),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3),  # size, stride
    st.integers(0, 40),  # offset, in elements
)


@given(VIEWS, VIEWS)
@properties(600)
def test_shared_bytes_against_counted_addresses(one, other):
    """Any strides in any order, widths and offsets over one buffer, most of them interleaved."""
    memory = torch.zeros(1024, dtype=torch.uint8)
    a, b = (
        memory.view(dtype).as_strided([n for n, _ in dims], [stride for _, stride in dims], offset)
        for dtype, dims, offset in (one, other)
    )
    case = [a, torch.zeros_like(b)], [torch.zeros_like(a), b]
    try:
        check_pairs(*case)
    except ValueError as error:
        if "overlap itself" in str(error):  # an upper bound, too: strides that smaller ones reach over
            assert a.dim() > 1 or must_refuse([a], [torch.zeros_like(a)])
        else:
            assert must_refuse(*case, bytes_reached)
    else:
        assert not must_refuse(*case)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_shares_memory_and_what_does_not(device):
    a, b = torch.zeros(3, 16, device=device), torch.zeros(3, 16, device=device)
    check_pairs([a[:, :6], a[:, 6:]], [b[:, :6], b[:, 4:14]])  # slices of wider rows; sources may share
    check_pairs([a, a], [b, b])  # the same pair twice
    check_pairs([a], [a.view(3, 16)])
    check_pairs([a[:0], a[:0]], [a[:0], b[:0]])
    for dsts, srcs in (
        ([a, a], [b, b + 1]),
        ([a[:, :7], a[:, 6:]], [b[:, :7], b[:, 6:]]),
        ([a, b], [b + 1, a]),
        ([a[:, 0], a[:, 1]], [b[:, 0], b[:, 1]]),  # columns, no byte in common: stated, and safe
    ):
        with pytest.raises(ValueError, match=r"(one|other): .* shares memory with (one|other)"):
            check_pairs(dsts, srcs, ["other", "one"])
