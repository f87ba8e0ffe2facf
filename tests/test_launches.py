"""The launches that CUDA would make, against PyTorch's rules re-stated by example and by counting."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.copies import Call
from lib.launches import KINDS, explain, launches, tables
from tests.tensors import properties

F32 = torch.zeros(4, 6)


def copy(dst, src):
    return Call("copy_", [dst], [src])


PAIRS = [  # of two tensors (4, 6) float32, and what copies the second into the first
    (lambda t, new: (t, new), "memcpy"),
    (lambda t, new: (t.t(), new.t()), "memcpy"),  # reordered, both are dense
    (lambda t, new: (t[:1, :3], new.view(3, 8)[:1, :3]), "memcpy"),  # the stride of a size-1 dimension
    (lambda t, new: (t[:, :3], new[:, :3]), "elementwise"),  # the row stride stays the buffer's
    (lambda t, new: (t.view(6, 4).t(), new), "elementwise"),
    (lambda t, new: (t, new[0].expand(4, 6)), "elementwise"),
    (lambda t, new: (t, new[:1]), "elementwise"),
    (lambda t, new: (t, new.double()), "elementwise"),
    (lambda t, new: (t, torch._neg_view(new)), "elementwise"),
    (lambda t, new: (torch._neg_view(t), torch._neg_view(new)), "memcpy"),
    (lambda t, new: (t[0, 0], new[1, 1]), "memcpy"),
    (lambda t, new: (t[:0], new[:0]), None),
    (lambda t, new: (t, t.view(4, 6)), None),  # a memcpy onto itself
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("pair", "kind"), PAIRS)
def test_a_copy_is_a_memcpy_where_one_dtype_lies_alike_and_dense(pair, kind, device):
    dst, src = pair(F32.to(device), torch.ones(4, 6, device=device))
    made = [(launch.kind, launch.n_copies, launch.bytes) for launch in launches([copy(dst, src)])]
    assert made == ([(kind, 1, dst.nbytes)] if kind else [])


META = F32.to("meta")


def test_fills_host_copies_and_uploads():
    for call, expected in (
        (Call("fill_", [F32], value=1), [("fill", 96)]),
        (Call("fill_", [F32[:0]]), []),
        (Call("host_copy_", [F32], [F32 + 1]), []),
        (Call("fused", [F32[:0]]), []),
        (copy(META, F32), [("htod", 96)]),
        (copy(META.t(), torch.zeros(6, 4)), [("htod", 96), ("elementwise", 96)]),
        (copy(META, F32.double()), [("htod", 96)]),  # converts on the host
    ):
        assert [(launch.kind, launch.bytes) for launch in launches([call])] == expected


def test_every_kind_has_a_label_and_a_colour_of_its_own():
    for column in ("label", "colour"):
        assert len({getattr(kind, column) for kind in KINDS.values()}) == len(KINDS)


some_sizes = st.lists(st.sampled_from([0, 1, 7, 8, 9, 16, 40, 90]), min_size=1, max_size=40)


@given(some_sizes, st.integers(1, 6), st.integers(1, 9))
@properties(200)
def test_launches_of_multi_tensor_apply(numels, tensors, chunks):
    """Against filling the table chunk by chunk, as MultiTensorApply.cuh's loop does."""
    todo = [(t, min(8, numel - start)) for t, numel in enumerate(numels) for start in range(0, numel, 8)]
    expected, held = [], []
    for i, (t, n) in enumerate(todo):
        held.append((t, n))
        in_table = {t for t, _ in held}
        is_last = i + 1 == len(todo)
        tensor_done = is_last or todo[i + 1][0] != t
        if len(held) == chunks or (tensor_done and len(in_table) == tensors) or is_last:
            expected.append((in_table, sum(n for _, n in held)))
            held = []
    made = tables(numels, tensors, chunks, chunk=8)
    assert [(set(table), table.total()) for table in made] == expected


def test_a_foreach_call_is_one_kernel_or_one_for_each_64_tensors_or_320_chunks():
    """Of 4 KB of arguments; 448 and 2,240 where this build is inferred to have 32 KB."""
    small = [torch.empty(2, device="meta")] * 449
    made = launches([Call("foreach", small, small)])
    assert [x.n_copies for x in made] in ([64] * 7 + [1], [448, 1]) and {x.kind for x in made} == {"foreach"}
    large = [torch.empty(65_536 * 2_241, dtype=torch.uint8, device="meta")]
    made = [launch.bytes // 65_536 for launch in launches([Call("foreach", large, large)])]
    assert made in ([320] * 7 + [1], [2_240, 1])


def test_one_odd_pair_sends_the_whole_call_down_the_slow_path():
    for dst, src, why in (
        (F32, F32.double(), "torch.float64 .*to torch.float32"),
        (F32.double(), F32, "torch.float32 .*to torch.float64"),
        (F32[:, :3], torch.zeros(4, 3), r"gaps: strides \(6, 1\) and \(3, 1\)"),
        (F32, torch.zeros(1, 6), r"\(1, 6\) to \(4, 6\)"),
        (META, META.clone(), "on cpu to .* on meta"),
    ):
        made = launches([Call("foreach", [F32, dst], [F32.clone(), src])])
        assert len(made) == 2 and {launch.kind for launch in made} <= {"memcpy", "elementwise"}
        assert all(re.search(f"slow path: pair 1: .*{why}", launch.reason) for launch in made)


def test_calls_that_pytorch_refuses():
    unsigned = [torch.zeros(4, dtype=torch.uint16)]
    with pytest.raises(NotImplementedError, match="uint16"):
        launches([Call("foreach", unsigned, [unsigned[0].clone()])])
    with pytest.raises(ValueError, match="op: expected one of a Call, got 'copy'"):
        launches([Call("copy", [F32], [F32 + 1])])
    with pytest.raises(ValueError, match="shorter"):
        launches([Call("foreach", [F32, F32], [F32])])


def test_explain_names_kind_reason_and_remedy():
    i64, wide = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 16, dtype=torch.int64)
    negative = torch._neg_view(torch.ones(8).double())
    cases = {  # name: destination, source, kind, in the reason, in the remedy
        "seq_lens": (i64.clone(), i64, "foreach", "one kernel for all pairs", "one fused kernel"),
        "positions": (i64.clone(), i64, "foreach", "one kernel for all pairs", "one fused kernel"),
        "topk_p": (torch.zeros(8), torch.zeros(8), "memcpy", "same dtype, both contiguous", "alone"),
        "accepted": (i64.clone(), wide[:, 1], "elementwise", "source lies otherwise", "contiguous at"),
        "block_tables": (wide[:, :4], wide[:, :4] + 1, "elementwise", "has gaps", "captured size"),
        "lens": (torch.zeros(8).int(), i64, "elementwise", "converts torch.int64", "write torch.int32"),
        "both": (torch.zeros(8), negative, "elementwise", "converts .*; .*negative", "float32; .*resolve"),
        "nothing": (i64[:0], i64[:0].clone(), "none", "no elements", "nothing to gain by grouping"),
        "prompt": (i64.to("meta"), i64, "htod", "pageable", "PackedInputs"),
    }
    dsts, srcs, kinds, reasons, remedies = zip(*cases.values())
    rows = explain([Call("foreach", dsts[:2], srcs[:2]), *map(copy, dsts[2:], srcs[2:])], list(cases))
    made = [(row.name, row.kind, row.bytes) for row in rows]
    assert made == list(zip(cases, kinds, [dst.nbytes for dst in dsts]))
    for row, reason, remedy in zip(rows, reasons, remedies):
        assert re.search(reason, row.reason) and re.search(remedy, row.better), row
    assert [row.shares for row in rows[:3]] == [2, 2, 1] and rows[3].dst == "(8,) torch.int64"
    (fill,) = explain([Call("fill_", [i64], value=1)])
    assert fill.kind == "fill" and "ride along" in fill.better


def test_explain_counts_the_copies_that_one_call_would_hold_and_those_of_a_slow_one():
    dsts, srcs = [torch.zeros(8) for _ in range(3)], [torch.ones(8) for _ in range(3)]
    assert {row.better for row in explain(map(copy, dsts, srcs))} == {"one foreach call for 3 fields"}
    mixed = explain([Call("foreach", dsts, [dsts[0], srcs[1].long(), srcs[2]])])
    assert [row.kind for row in mixed] == ["none", "elementwise", "memcpy"]  # the first is onto itself
    assert mixed[1].better == "group by dtype pair and layout"
