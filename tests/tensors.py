"""Pairs of tensors for property tests, what a copy must leave in memory, and when it must be refused.

The oracles are brute force and share no code with lib: byte addresses, and what a dispatch mode sees.
"""

import math
from collections import Counter
from functools import partial
from itertools import count, product
from operator import mul
from random import Random

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lib.copies import run
from lib.launches import KINDS, launches

NAMES = """bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64
    complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"""
DTYPES = [getattr(torch, name) for name in NAMES.split() if hasattr(torch, name)]
NEGATABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
SHAPES = [(), (0,), (1,), (3,), (8,), (17,), (2, 3), (4, 1), (1, 5), (5, 0), (2, 3, 4), (1, 2, 1)]
LAYOUTS = {  # of a tensor of the shape in memory that `new(*sizes)` makes
    "contiguous": lambda new, shape: new(*shape),
    "offset": lambda new, shape: new(math.prod(shape) + 1)[1:].view(shape),
    "transposed": lambda new, shape: new(*shape[::-1]).permute(tuple(range(len(shape)))[::-1]),
    "wider": lambda new, shape: new(*shape[:-1], shape[-1] + 2)[..., : shape[-1]],
    "stepped": lambda new, shape: new(*shape[:-1], 2 * shape[-1])[..., ::2],
    "column": lambda new, shape: new(*shape, 3)[..., 1],
    "conj": lambda new, shape: new(*shape).conj(),
    "neg": lambda new, shape: torch._neg_view(new(*shape)),
    "expanded": lambda new, shape: new(1, *shape[1:]).expand(shape),  # these two: sources only
    "broadcast": lambda new, shape: new(*[1] * len(shape)).expand(shape),
}
LIKELY = ["contiguous"] * 6
SRC_LAYOUTS = LIKELY + list(LAYOUTS)
DST_LAYOUTS = SRC_LAYOUTS[:-2]
MUTATIONS = {  # what engines get wrong, or do and get away with: what stands in place of the first pair
    "zip would drop": lambda dst, src, new: [(dst, src), (dst,)],
    "broadcast": lambda dst, src, new: [(new((2, *dst.shape), dst.dtype), src)],
    "row on row": lambda dst, src, new: [
        (new((1, *dst.shape), dst.dtype).expand(2, *dst.shape), new((2, *src.shape), src.dtype))
    ],
    "onto itself": lambda dst, src, new: [(dst, dst)],
    "twice": lambda dst, src, new: [(dst, src), (dst, new(dst.shape, dst.dtype))],
    "overwritten source": lambda dst, src, new: [(dst, src), (new(dst.shape, dst.dtype), dst)],
    "shifted": lambda dst, src, new: [(dst, src), tuple(new((9,), torch.int32).unfold(0, 8, 1))],
    "elsewhere": lambda dst, src, new: [(dst, src.to("meta"))],
    "same pair twice": lambda dst, src, new: [(dst, src), (dst, src)],
    "columns": lambda dst, src, new: [
        (dst, src),
        *zip(new((5, 2), torch.int64).unbind(1), new((5, 2), torch.int16).unbind(1)),
    ],
}


def properties(max_examples):
    """Settings of the property tests: the same cases every time, no clock."""
    slow = [HealthCheck.too_slow]
    return settings(max_examples=max_examples, derandomize=True, deadline=None, suppress_health_check=slow)


def random_values(shape, dtype, seed, device="cpu"):
    """Any bits at all, NaN payloads and infinities included; of bool the two that are valid."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    n_bytes = math.prod(shape) * dtype.itemsize
    bits = torch.randint(0, high, (n_bytes,), dtype=torch.uint8, generator=generator)
    return bits.to(device).view(dtype).view(tuple(shape))


def laid_out(layout, shape, dtype, seed, device="cpu"):
    """A tensor of this shape whose memory lies as the layout says; plain where the layout does not apply."""
    needs_rows = layout in ("wider", "stepped", "expanded") and not shape
    not_lazy = (layout == "conj" and not dtype.is_complex) or (layout == "neg" and dtype not in NEGATABLE)
    make = LAYOUTS["contiguous" if needs_rows or not_lazy else layout]
    return make(lambda *sizes: random_values(sizes, dtype, seed, device), shape)


@st.composite
def pairs(draw, dtypes=DTYPES, mutations=(*[""] * 6, *MUTATIONS), max_pairs=6, device="cpu"):
    """Destinations and sources, mostly fit to be copied; how many, and what is wrong with them, shrinks."""
    seed = draw(st.integers(0, 2**31))  # of most: drawing each choice by itself takes most of the time
    n_pairs = draw(st.integers(1, max_pairs)) if seed % 50 else 0
    choose = Random(seed).choice
    made = []
    for i in range(n_pairs):
        shape, dtype, src_dtype = choose(SHAPES), choose(dtypes), choose([None, None, *dtypes])
        dst_layout, src_layout = choose(DST_LAYOUTS), choose(SRC_LAYOUTS)
        if src_layout == "neg" and dtype not in NEGATABLE:  # copy_ itself cannot
            src_layout = "contiguous"
        dst = laid_out(dst_layout, shape, dtype, seed + 2 * i, device)
        made.append((dst, laid_out(src_layout, shape, src_dtype or dtype, seed + 2 * i + 1, device)))
    mutation = draw(st.sampled_from(mutations))
    if mutation and made:
        made[:1] = MUTATIONS[mutation](*made[0], partial(random_values, seed=seed, device=device))
    return [pair[0] for pair in made], [pair[1] for pair in made if len(pair) == 2]


def storages(tensors):
    """Every byte of every storage that the tensors live in, gaps included, as views."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if not t.is_meta}
    return [torch.empty(0, dtype=torch.uint8, device=each.device).set_(each) for each in found.values()]


def snapshot(memory):
    return [t.clone() for t in memory]


def same(some, others):
    return len(some) == len(others) and all(map(torch.equal, some, others))


def without_denormals(tensors):
    """Triton's interpreter misreads those of bfloat16."""
    for t in tensors:
        if t.dtype == torch.bfloat16:
            bits = torch.empty(0, dtype=torch.int16, device=t.device).set_(t.untyped_storage())
            bits[(bits & 0x7F80) == 0] = 0


def one_nan(dsts, srcs):
    """The payload of a NaN that is converted is the device's own."""
    for dst, src in zip(dsts, srcs):
        if dst.dtype != src.dtype and dst.is_floating_point() and dst.element_size() > 1:
            dst.masked_fill_(dst.isnan(), torch.nan)


def bytes_touched(t):
    """The address of each byte of each element, again where elements lie upon each other."""
    size = t.element_size()
    firsts = [size * sum(map(mul, index, t.stride())) for index in product(*map(range, t.shape))]
    return [t.data_ptr() + first + byte for first in firsts for byte in range(size)]


def bytes_reached(t):  # gaps included
    touched = bytes_touched(t)
    return range(min(touched), max(touched) + 1) if touched else touched


def must_refuse(dsts, srcs, bytes_of=bytes_touched):
    """Whether these pairs have to raise: they do not fit, or a byte that is written is another's, too."""
    if len(dsts) != len(srcs) or any(d.shape != s.shape or d.device != s.device for d, s in zip(dsts, srcs)):
        return True
    touched, written = Counter(), set()
    once = {(view_of(dst), view_of(src)): (dst, src) for dst, src in zip(dsts, srcs)}
    for (dst_view, src_view), (dst, src) in once.items():
        written.update(bytes_of(dst))
        touched.update(bytes_of(dst))
        if src_view != dst_view:
            touched.update(bytes_of(src))
    return any(touched[byte] > 1 for byte in written)


def view_of(t):
    """Equal for the same elements, seen alike."""
    return tuple(bytes_touched(t)), t.dtype, t.is_conj(), t.is_neg()


def assert_copies_or_refuses(case, *copies, refuses=ValueError, must=False, settle=lambda *case: None):
    """Every `copy(dsts, srcs)` leaves in memory what a loop of `copy_` does, bit by bit, gaps included.

    Where the pairs must be refused, or `must` says so, it raises one of `refuses` and leaves every byte as it
    was. Memory is as before afterwards. `settle` evens out what may differ."""
    memory = storages(case[0] + case[1])
    before = snapshot(memory)
    must = must or must_refuse(*case)
    if not must:
        for dst, src in zip(*case):
            dst.copy_(src)
        settle(*case)
    looped = snapshot(memory)
    for copy in copies:
        for t, bits in zip(memory, before):
            t.copy_(bits)
        try:
            copy(*case)
        except refuses:
            assert must or must_refuse(*case, bytes_reached), "refused without need"  # see check_pairs
            assert same(memory, before), "refused, but something was written"
            continue
        assert not must, "expected a refusal, nothing was raised"
        settle(*case)
        assert same(memory, looped), "differs from a loop of copy_"
    for t, bits in zip(memory, before):
        t.copy_(bits)


class Watched(TorchDispatchMode):
    """Notes the work of every operator inside, as it would be on CUDA: the operator as PyTorch names it, or
    "" for a Triton kernel, pairs, bytes. `stop_at` interrupts it; copies into `host` are none of CUDA's."""

    def __init__(self, stop_at=None, host=()):
        super().__init__()
        self.work, self.numbers, self.stop_at = [], count(), stop_at
        self.host = {t.untyped_storage().data_ptr() for t in host}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        op = f"aten::{func.overloadpacket.__name__}"
        if op in ("aten::copy_", "aten::fill_", "aten::_foreach_copy_"):
            if next(self.numbers) == self.stop_at:
                raise KeyboardInterrupt
            dsts, srcs = args[:2] if op == "aten::_foreach_copy_" else (args[:1], args[1:2])
            together = [[dst] for dst, src in zip(dsts, srcs) if dst is not src]
            if op == "aten::_foreach_copy_":
                op, together = (op, [dsts]) if fusable(dsts, srcs) else ("aten::copy_", together)
            if dsts[0].untyped_storage().data_ptr() not in self.host:
                for written in together:
                    self.launch(op, written)
        return result

    def launch(self, op, dsts):
        sizes = [dst.nbytes for dst in dsts if dst.numel()]
        self.work += [(op, len(sizes), sum(sizes))] if sizes else []


def fusable(dsts, srcs):
    """One dtype pair, strides equal and without gaps: PyTorch's own answer."""
    dense = all(map(torch.ops.aten.is_non_overlapping_and_dense, (*dsts, *srcs)))
    one_type = len({(dst.dtype, src.dtype) for dst, src in zip(dsts, srcs)}) == 1
    strides = [[n for n, size in zip(t.stride(), t.shape) if size != 1] for t in (*dsts, *srcs)]
    return dense and one_type and strides[: len(dsts)] == strides[len(dsts) :]


def assert_runs_what_is_counted(calls, host=()):
    """`launches(calls)` has exactly what runs; no dispatcher sees the kernels of Triton, so they are hooked.
    Counting writes nothing."""
    memory = storages(dst for call in calls for dst in call.dsts)
    before = snapshot(memory)
    counted = [(KINDS[launch.kind].op, launch.n_copies, launch.bytes) for launch in launches(calls)]
    assert same(memory, before)
    with Watched(host=host) as watched:

        def hooked(call, srcs):
            call.kept(srcs)
            watched.launch("", call.dsts)

        run(call._replace(kept=partial(hooked, call)) for call in calls)
    assert watched.work == counted
