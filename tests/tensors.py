"""Pairs of tensors for property tests, what a copy must leave in memory, and when it must be refused.

The oracles here are brute force and share no code with lib: byte addresses instead of strides, and what a
dispatch mode sees instead of what was meant to run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lib.copies import Call, run

NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
DTYPES = [getattr(torch, name) for name in NAMES if hasattr(torch, name)]
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
SRC_LAYOUTS = list(LAYOUTS)
DST_LAYOUTS = SRC_LAYOUTS[:-2]
LIKELY = ["contiguous"] * 6

Pairs = tuple[list[Tensor], list[Tensor]]


def properties(max_examples: int) -> settings:
    """Settings of the property tests: the same cases every time, no clock."""
    return settings(
        max_examples=max_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def random_values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits at all, NaN payloads and infinities included; of bool the two that are valid."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    n_bytes = math.prod(shape) * dtype.itemsize
    bits = torch.randint(0, high, (n_bytes,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(tuple(shape))


def laid_out(layout: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """A tensor of this shape whose memory lies as the layout says; plain where the layout does not apply."""
    needs_rows = layout in ("wider", "stepped", "expanded") and not shape
    not_lazy = (layout == "conj" and not dtype.is_complex) or (layout == "neg" and dtype not in NEGATABLE)
    make = LAYOUTS["contiguous" if needs_rows or not_lazy else layout]
    return make(lambda *sizes: random_values(sizes, dtype, seed), shape)


@st.composite
def pairs(
    draw: st.DrawFn,
    dtypes: Sequence[torch.dtype] = DTYPES,
    mutations: Sequence[int | None] = (*[None] * 6, *range(10)),
    max_pairs: int = 6,
) -> Pairs:
    """Destinations and sources, mostly fit to be copied; how many, and what is wrong with them, shrinks.

    Mutations are what an engine gets wrong, or does and gets away with; see `_mutate`. None leaves them fit.
    """
    seed = draw(st.integers(0, 2**31))  # of most: drawing each choice by itself takes most of the time
    n_pairs = draw(st.integers(1, max_pairs)) if seed % 50 else 0
    choose = Random(seed).choice
    dsts, srcs = [], []
    for i in range(n_pairs):
        shape, dtype, src_dtype = choose(SHAPES), choose(dtypes), choose([None, None, *dtypes])
        dst_layout, src_layout = choose(LIKELY + DST_LAYOUTS), choose(LIKELY + SRC_LAYOUTS)
        if src_layout == "neg" and dtype not in NEGATABLE:  # copy_ itself cannot
            src_layout = "contiguous"
        dsts.append(laid_out(dst_layout, shape, dtype, seed + 2 * i))
        srcs.append(laid_out(src_layout, shape, src_dtype or dtype, seed + 2 * i + 1))
    _mutate(draw(st.sampled_from(mutations)), dsts, srcs, seed)
    return dsts, srcs


def _mutate(mutation: int | None, dsts: list[Tensor], srcs: list[Tensor], seed: int) -> None:
    if not dsts:
        return
    dst, src = dsts[0], srcs[0]
    match mutation:
        case 0:  # zip would drop the rest
            srcs.pop()
        case 1:  # copy_ would broadcast
            dsts[0] = random_values((2, *dst.shape), dst.dtype, seed)
        case 2:  # every row lies on every other
            dsts[0] = random_values((1, *dst.shape), dst.dtype, seed).expand(2, *dst.shape)
            srcs[0] = random_values((2, *src.shape), src.dtype, seed)
        case 3:  # onto itself
            srcs[0] = dst
        case 4:  # one destination twice, its groups in either order
            dsts.append(dst)
            srcs.append(random_values(dst.shape, srcs[-1].dtype, seed))
        case 5:  # a source that another pair overwrites
            dsts.append(random_values(dst.shape, dst.dtype, seed))
            srcs.append(dst)
        case 6:  # shifted by one element within one buffer
            buffer = random_values((9,), torch.int32, seed)
            dsts.append(buffer[1:])
            srcs.append(buffer[:-1])
        case 7:  # another device
            srcs[0] = src.to("meta")
        case 8:  # the same pair twice
            dsts.append(dst)
            srcs.append(src)
        case 9:  # two columns of one matrix, which interleave, into two of another
            dsts += random_values((5, 2), torch.int64, seed).unbind(1)
            srcs += random_values((5, 2), torch.int64, seed + 1).unbind(1)


def storages(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Every byte of every storage that the tensors live in, gaps included, as views."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if not t.is_meta}
    return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in found.values()]


def snapshot(memory: Sequence[Tensor]) -> list[Tensor]:
    return [t.clone() for t in memory]


def restore(memory: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    for t, bits in zip(memory, saved, strict=True):
        t.copy_(bits)


def same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def without_denormals(tensors: Sequence[Tensor]) -> None:
    """Triton's interpreter misreads those of bfloat16."""
    for t in tensors:
        if t.dtype == torch.bfloat16:
            bits = torch.empty(0, dtype=torch.int16, device=t.device).set_(t.untyped_storage())
            bits[(bits & 0x7F80) == 0] = 0


def one_nan(converted: Sequence[Tensor]) -> None:
    """The payload of a NaN that is converted is the device's own."""
    for dst in converted:
        if dst.is_floating_point() and dst.element_size() > 1:
            dst.masked_fill_(dst.isnan(), torch.nan)


def element_addresses(t: Tensor) -> list[int]:
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride())) if t.numel() else -1
    offsets = torch.arange(last + 1).as_strided(t.shape, t.stride()).flatten().tolist()
    return [t.data_ptr() + offset * t.element_size() for offset in offsets]


def bytes_touched(t: Tensor) -> set[int]:
    return {a + byte for a in element_addresses(t) for byte in range(t.element_size())}


def bytes_reached(t: Tensor) -> set[int]:
    """From the first to the last, gaps included."""
    touched = bytes_touched(t)
    return set(range(min(touched), max(touched) + 1)) if touched else touched


def must_refuse(dsts: Sequence[Tensor], srcs: Sequence[Tensor], touched=bytes_touched) -> bool:
    """Whether these pairs have to raise: they do not fit, or a byte that is written is another's, too."""
    if len(dsts) != len(srcs) or any(d.shape != s.shape or d.device != s.device for d, s in zip(dsts, srcs)):
        return True
    once = {}  # a pair may stand twice, a tensor be its own source
    for dst, src in zip(dsts, srcs):
        once[view_of(dst), view_of(src)] = touched(dst), touched(src)
    for (dst, src), (written, read) in once.items():
        others = [part for pair, parts in once.items() if pair != (dst, src) for part in parts]
        others += [read] if src != dst else []
        if len(set(dst[0])) != len(dst[0]) or any(written & other for other in others):
            return True
    return False


def view_of(t: Tensor) -> tuple:
    """Equal for the same elements, seen alike."""
    return tuple(element_addresses(t)), t.dtype, t.is_conj(), t.is_neg()


def assert_copies_or_refuses(case: Pairs, *copies: Callable, refuses=(), settle=lambda: None) -> None:
    """Every `copy(dsts, srcs)` leaves in memory what a loop of `copy_` does, bit by bit, gaps included.

    Where the pairs must be refused it raises ValueError, or one of `refuses` where given, and leaves every
    byte as it was. Memory is as before afterwards. `settle` evens out what may differ.
    """
    dsts, srcs = case
    memory = storages([*dsts, *srcs])
    before = snapshot(memory)
    must = bool(refuses) or must_refuse(dsts, srcs)
    errors = refuses or (ValueError,)
    if not must:
        for dst, src in zip(dsts, srcs):
            dst.copy_(src)
        settle()
    looped = snapshot(memory)
    for copy in copies:
        restore(memory, before)
        try:
            copy(dsts, srcs)
        except errors:
            assert must or must_refuse(dsts, srcs, bytes_reached), "refused without need"  # see check_pairs
            assert same(memory, before), "refused, but something was written"
            continue
        assert not must, "expected a refusal, nothing was raised"
        settle()
        assert same(memory, looped), "differs from a loop of copy_"
    restore(memory, before)


Work = tuple[str, int, int]  # the operator as PyTorch names it, or "fused"; pairs; bytes


class Watched(TorchDispatchMode):
    """Notes the work of every operator that runs inside, as it would be on CUDA; `stop_at` interrupts it."""

    def __init__(self, stop_at: int | None = None, host: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.work: list[Work] = []
        self.n_operators, self.stop_at = 0, stop_at
        self.host = {t.untyped_storage().data_ptr() for t in host}  # copies there are none of the device's

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        dsts = args[0] if name == "_foreach_copy_" else args[:1]
        if name in ("copy_", "fill_", "_foreach_copy_"):
            if self.n_operators == self.stop_at:
                raise KeyboardInterrupt
            self.n_operators += 1
            srcs = args[1] if name == "_foreach_copy_" else args[1:2]
            if dsts[0].untyped_storage().data_ptr() not in self.host:
                self.work += self._work(name, dsts, srcs)
        return result

    def _work(self, name: str, dsts: Sequence[Tensor], srcs: Sequence) -> list[Work]:
        pairs = [(d, s) for d, s in zip(dsts, srcs) if d.numel() and d is not s]
        if name == "_foreach_copy_" and _fusable(dsts, srcs):
            pairs = [(d, s) for d, s in zip(dsts, srcs) if d.numel()]
            return [(f"aten::{name}", len(pairs), sum(d.nbytes for d, _ in pairs))] if pairs else []
        op = "aten::fill_" if name == "fill_" else "aten::copy_"
        return [(op, 1, d.nbytes) for d, _ in pairs]


def _fusable(dsts: Sequence[Tensor], srcs: Sequence[Tensor]) -> bool:
    """One dtype pair, strides equal and without gaps: PyTorch's own answer."""
    strides = [[n for n, size in zip(t.stride(), t.shape) if size != 1] for t in (*dsts, *srcs)]
    dense = all(map(torch.ops.aten.is_non_overlapping_and_dense, (*dsts, *srcs)))
    one_type = len({(dst.dtype, src.dtype) for dst, src in zip(dsts, srcs)}) == 1
    return dense and one_type and strides[: len(dsts)] == strides[len(dsts) :]


def run_watched(calls: Sequence[Call], host: Sequence[Tensor] = ()) -> list[Work]:
    """Run the calls; what ran, Triton kernels included, which no dispatcher sees."""
    with Watched(host=host) as watched:

        def hooked(call: Call) -> Call:
            def launch(srcs: Sequence[Tensor]) -> None:
                call.kept(srcs)
                watched.work.append(("", len(call.dsts), sum(d.nbytes for d in call.dsts)))

            return call._replace(kept=launch) if call.kept else call

        run(map(hooked, calls))
    return watched.work
