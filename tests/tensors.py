"""Pairs of tensors for property tests, what a copy must leave in memory, and when it must be refused.

The oracles here are brute force and share no code with lib: sets of byte addresses instead of strides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

DTYPES = [
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
]
NEGATABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
SHAPES = [(), (0,), (1,), (3,), (8,), (17,), (2, 3), (4, 1), (1, 5), (5, 0), (2, 3, 4), (1, 2, 1)]
DST_LAYOUTS = ["contiguous", "offset", "transposed", "wider", "stepped", "column", "conj", "neg"]
SRC_LAYOUTS = [*DST_LAYOUTS, "expanded", "broadcast"]

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
    n = math.prod(shape)
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    bits = torch.randint(0, high, (n * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(tuple(shape))


def laid_out(layout: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """A tensor of this shape whose memory lies as the layout says; plain where the layout does not apply."""
    if layout == "offset":
        return random_values((math.prod(shape) + 1,), dtype, seed)[1:].view(shape)
    if layout == "transposed":
        return random_values(shape[::-1], dtype, seed).permute(tuple(reversed(range(len(shape)))))
    if layout == "wider" and shape:
        return random_values((*shape[:-1], shape[-1] + 2), dtype, seed)[..., : shape[-1]]
    if layout == "stepped" and shape:
        return random_values((*shape[:-1], 2 * shape[-1]), dtype, seed)[..., ::2]
    if layout == "column":
        return random_values((*shape, 3), dtype, seed)[..., 1]
    if layout == "expanded" and shape:
        return random_values((1, *shape[1:]), dtype, seed).expand(shape)
    if layout == "broadcast":
        return random_values((1,) * len(shape), dtype, seed).expand(shape)
    plain = random_values(shape, dtype, seed)
    if layout == "conj" and dtype.is_complex:
        return plain.conj()
    if layout == "neg" and dtype in NEGATABLE:
        return torch._neg_view(plain)
    return plain


@st.composite
def pairs(
    draw: st.DrawFn,
    dtypes: Sequence[torch.dtype] = DTYPES,
    mutations: Sequence[str] = ("", "", "", "", "", "", "interleaved", *range(8)),
    max_pairs: int = 6,
) -> Pairs:
    """Destinations and sources, mostly fit to be copied.

    Mutations are what an engine gets wrong, or does and gets away with; see `_mutate`.
    """
    specs = draw(
        st.lists(
            st.tuples(
                st.sampled_from(SHAPES),
                st.sampled_from(dtypes),
                st.sampled_from([None, None, *dtypes]),  # of the source, where it differs
                st.sampled_from(["contiguous"] * 6 + DST_LAYOUTS),
                st.sampled_from(["contiguous"] * 6 + SRC_LAYOUTS),
            ),
            max_size=max_pairs,
        )
    )
    seed = draw(st.integers(0, 1000))
    dsts, srcs = [], []
    for i, (shape, dtype, src_dtype, dst_layout, src_layout) in enumerate(specs):
        if src_layout == "neg" and dtype not in NEGATABLE:  # copy_ itself cannot
            src_layout = "contiguous"
        dsts.append(laid_out(dst_layout, shape, dtype, seed + 2 * i))
        srcs.append(laid_out(src_layout, shape, src_dtype or dtype, seed + 2 * i + 1))
    _mutate(draw(st.sampled_from(mutations)), dsts, srcs, seed)
    return dsts, srcs


def _mutate(mutation: str | int, dsts: list[Tensor], srcs: list[Tensor], seed: int) -> None:
    if mutation == "interleaved":  # two columns of one matrix, into two columns of another
        into, out_of = (random_values((5, 2), torch.int64, seed + i) for i in range(2))
        dsts += into.unbind(1)
        srcs += out_of.unbind(1)
    if not dsts or mutation in ("", "interleaved"):
        return
    d, s = dsts[0], srcs[0]
    match mutation:
        case 0:  # zip would drop the rest
            srcs.pop()
        case 1:  # copy_ would broadcast
            dsts[0] = random_values((2, *d.shape), d.dtype, seed)
        case 2:  # every row lies on every other
            dsts[0] = random_values((1, *d.shape), d.dtype, seed).expand(2, *d.shape)
            srcs[0] = random_values((2, *s.shape), s.dtype, seed)
        case 3:  # onto itself
            srcs[0] = d
        case 4:  # one destination twice
            dsts.append(d)
            srcs.append(random_values(d.shape, s.dtype, seed))
        case 5:  # a source that another pair overwrites
            dsts.append(random_values(d.shape, d.dtype, seed))
            srcs.append(d)
        case 6:  # shifted by one element within one buffer
            buffer = random_values((9,), torch.int32, seed)
            dsts.append(buffer[1:])
            srcs.append(buffer[:-1])
        case 7:  # another device
            srcs[0] = s.to("meta")


def storages(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Every byte of every storage that the tensors live in, gaps included, as views."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if not t.is_meta}
    return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in found.values()]


def snapshot(memory: Sequence[Tensor]) -> list[Tensor]:
    return [t.clone() for t in memory]


def restore(memory: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    for t, bits in zip(memory, saved, strict=True):
        t.copy_(bits)


def same(memory: Sequence[Tensor], saved: Sequence[Tensor]) -> bool:
    return all(torch.equal(t, bits) for t, bits in zip(memory, saved, strict=True))


def must_refuse(dsts: Sequence[Tensor], srcs: Sequence[Tensor]) -> bool:
    """Whether these pairs have to raise: by counting addresses."""
    if len(dsts) != len(srcs):
        return True
    if any(d.shape != s.shape or d.device != s.device for d, s in zip(dsts, srcs)):
        return True
    written: set[int] = set()
    for i, (dst, src) in enumerate(zip(dsts, srcs)):
        elements = element_addresses(dst)
        if len(set(elements)) != len(elements):
            return True
        own = {a + byte for a in elements for byte in range(dst.element_size())}
        onto_itself = elements == element_addresses(src) and dst.element_size() == src.element_size()
        if own & written or (not onto_itself and own & byte_addresses(src)):
            return True
        if any(own & byte_addresses(other) for j, other in enumerate(srcs) if j != i):
            return True
        written |= own
    return False


def element_addresses(t: Tensor) -> list[int]:
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride())) if t.numel() else -1
    offsets = torch.arange(last + 1).as_strided(t.shape, t.stride()).flatten().tolist()
    return [t.data_ptr() + offset * t.element_size() for offset in offsets]


def byte_addresses(t: Tensor) -> set[int]:
    return {a + byte for a in element_addresses(t) for byte in range(t.element_size())}


def assert_copies_or_refuses(
    copy: Callable[[list[Tensor], list[Tensor]], None],
    dsts: list[Tensor],
    srcs: list[Tensor],
    refuses: type[Exception] | None = None,
    settle: Callable[[], None] = lambda: None,
) -> None:
    """`copy(dsts, srcs)` leaves in memory what a loop of `copy_` does, bit by bit, gaps included.

    Where the pairs must be refused it raises ValueError, where `refuses` is given that error, and then leaves
    every byte as it was. Memory is as before afterwards. `settle` evens out what may differ.
    """
    memory = storages([*dsts, *srcs])
    before = snapshot(memory)
    refuses = ValueError if must_refuse(dsts, srcs) else refuses
    if refuses is not None:
        try:
            copy(dsts, srcs)
        except refuses:
            assert same(memory, before), "refused, but something was written"
            return
        raise AssertionError(f"expected {refuses}, nothing was raised")
    for dst, src in zip(dsts, srcs):
        dst.copy_(src)
    settle()
    expected = snapshot(memory)
    restore(memory, before)
    copy(dsts, srcs)
    settle()
    assert same(memory, expected), "differs from a loop of copy_"
    restore(memory, before)
