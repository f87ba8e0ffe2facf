"""Copy many small tensors into static buffers with few launches. One file, torch only: take it away.

An engine that replays a CUDA graph first copies the step's inputs into the graph's static buffers. One
`copy_()` a field is one launch a field, each several microseconds of host work for a few hundred bytes.
`grouped_foreach_copy_` does the same with one launch per (destination dtype, source dtype) pair, and
`CopyPlan` keeps views and groups from step to step, so that the host stops paying for them.

The function is a drop-in for SGLang's `_grouped_foreach_copy_` (pull request 28465), with three differences:
its inputs are checked before the first byte is written; pairs that the fused kernel cannot take no longer
drag their whole group onto the slow path; and bits arrive as they were, NaN payloads of half types included.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from math import gcd
from operator import attrgetter, contains
from typing import TYPE_CHECKING

import torch
from torch import Tensor, UntypedStorage

if TYPE_CHECKING:
    from lib.routes import Launch

_foreach_copy_ = getattr(torch, "_foreach_copy_", None)

# What PyTorch's fused kernel is built for in every release since 2.6 (ForeachBinaryOpList.cu). For any other
# dtype, uint16/32/64, complex32, float8_e8m0fnu or float4, it raises on CUDA where `copy_` would not.
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
FUSED_DTYPES = _INTEGERS | _FLOATS | {torch.complex64, torch.complex128}

# The fused kernel passes these through float32, which may change a NaN's payload, and older releases lack the
# fp8 ones altogether. A pair that does not convert is copied as integers of the same width: exact everywhere.
SAME_WIDTH_INT = {torch.float16: torch.int16, torch.bfloat16: torch.int16} | {
    getattr(torch, name): torch.uint8
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
}

# A fused kernel copies a chunk of 65,536 elements with one block, at about the rate of one multiprocessor:
# tens of GB/s, so 2 to 3 us for 64 KiB, which is what a memcpy of its own costs (4.6 us of host time on a
# V100, 1.3 us on the device). A first estimate: the crossover recorded on a device replaces it.
DEFAULT_DMA_BYTES = 64 * 1024


def grouped_foreach_copy_(
    dsts: Sequence[Tensor], srcs: Sequence[Tensor], names: Sequence[str] | None = None
) -> None:
    """Copy `srcs[i]` into `dsts[i]` for every i: the effect of a loop of `copy_`, in few launches.

    One `torch._foreach_copy_` per (dst dtype, src dtype) pair, in the order in which the pairs first appear.
    Grouping by the *pair* is a matter of correctness: until January 2026 the fused kernel took equal source
    dtypes with mixed destination dtypes for one dtype and wrote wrong values (pytorch issue 173383). What the
    kernel cannot take (see `group_pairs`) goes to `copy_`, as does everything where torch lacks the op.
    Autograd does not record the copies: static buffers belong to no step's graph.

    Args:
        dsts: tensors of any shape and dtype; non-contiguous, 0-dim and empty ones are fine.
        srcs: as many tensors, each of exactly its destination's shape, on its device; dtypes may differ.
        names: what to call the pairs in errors, e.g. field names.

    Raises:
        ValueError: as `check_pairs`; nothing has been written then.
    """
    check_pairs(dsts, srcs, names)
    copy_groups(dsts, srcs, *group_pairs(dsts, srcs))


def copy_groups(
    dsts: Sequence[Tensor], srcs: Sequence[Tensor], groups: Sequence[Sequence[int]], singles: Sequence[int]
) -> None:
    """Copy each group by one `_foreach_copy_` and each single by `copy_`; nothing is checked nor recorded."""
    with unrecorded():
        for group in groups:
            group_dsts, group_srcs = [dsts[i] for i in group], [srcs[i] for i in group]
            dtype = SAME_WIDTH_INT.get(group_dsts[0].dtype)
            if dtype is not None and group_srcs[0].dtype == group_dsts[0].dtype:
                group_dsts = [t.view(dtype) for t in group_dsts]
                group_srcs = [t.view(dtype) for t in group_srcs]
            _foreach_copy_(group_dsts, group_srcs)
        for i in singles:
            dsts[i].copy_(srcs[i])


def unrecorded() -> AbstractContextManager:
    """`no_grad()` where autograd would record, else nothing, for it costs as much as a small copy."""
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


def group_pairs(dsts: Sequence[Tensor], srcs: Sequence[Tensor]) -> tuple[list[list[int]], list[int]]:
    """Split pairs into groups for one `_foreach_copy_` each, and the ones left to `copy_`, as indices.

    A group shares device, destination dtype and source dtype. Left to `copy_` are pairs that would make the
    fused kernel raise (`FUSED_DTYPES`) or, silently, run the whole call as a loop of `copy_`: other strides
    than the partner's, gaps, a conjugate or negative bit (`can_use_fast_route` in ForeachUtils.h).
    """
    groups: dict[tuple, list[int]] = {}
    singles: list[int] = []
    for i, (dst, src) in enumerate(zip(dsts, srcs)):
        dst_dtype, src_dtype = dst.dtype, src.dtype
        fusable = dst_dtype in FUSED_DTYPES and src_dtype in FUSED_DTYPES
        if not fusable:
            fusable = dst_dtype == src_dtype and dst_dtype in SAME_WIDTH_INT
        if fusable and _foreach_copy_ is not None and same_dense_layout(dst, src) and not is_lazy(dst, src):
            groups.setdefault((dst.device, dst_dtype, src_dtype), []).append(i)
        else:
            singles.append(i)
    return list(groups.values()), singles


def split_large(
    dsts: Sequence[Tensor],
    srcs: Sequence[Tensor],
    groups: Sequence[Sequence[int]],
    singles: Sequence[int],
    dma_bytes: int = DEFAULT_DMA_BYTES,
) -> tuple[list[list[int]], list[int]]:
    """Take out of `group_pairs`' groups what `copy_` moves as well: the design of pull request 28465.

    That is a pair of equal dtypes (on CUDA a driver memcpy) from `dma_bytes` bytes on, and a pair that is
    alone in its group, for which a fused kernel would save nothing.
    """
    kept, singles = [], list(singles)
    for group in groups:
        small = [i for i in group if dsts[i].nbytes < dma_bytes or dsts[i].dtype != srcs[i].dtype]
        if sum(dsts[i].numel() > 0 for i in small) > 1:  # empty ones launch nothing to share
            kept.append(small)
            singles += [i for i in group if i not in small]
        else:
            singles += group
    return kept, sorted(singles)


def is_lazy(dst: Tensor, src: Tensor) -> bool:
    """Whether a conj or neg bit is set, which integers never carry."""
    return (dst.dtype not in _INTEGERS and (dst.is_conj() or dst.is_neg())) or (
        src.dtype not in _INTEGERS and (src.is_conj() or src.is_neg())
    )


def same_dense_layout(dst: Tensor, src: Tensor) -> bool:
    """Whether both of a pair of equal shapes lie in memory alike, without gaps or repeats.

    Strides of size-1 dimensions do not count (PyTorch since 2.5).
    """
    if dst.is_contiguous() and src.is_contiguous():
        return True
    dims = [(d, s, n) for n, d, s in zip(dst.shape, dst.stride(), src.stride()) if n != 1]
    if any(d != s for d, s, _ in dims):
        return False
    expected = 1
    for stride, _, size in sorted(dims):
        if stride != expected:
            return False
        expected *= size
    return True


def check_pairs(dsts: Sequence[Tensor], srcs: Sequence[Tensor], names: Sequence[str] | None = None) -> None:
    """Raise ValueError for what a loop of `copy_` would do wrong, refuse half-way or do in some order only.

    That is: lists of different length (a `zip` drops the rest); shapes that are not equal (`copy_`
    broadcasts); partners on different devices (`copy_` synchronises); a layout other than strided; a
    destination that overlaps itself, its own source in part, or any tensor of another pair; a destination
    that autograd or inference mode forbids to write. Sources may share memory with each other.
    """
    check_count(dsts, "source", srcs)
    check_count(dsts, "name", names)
    strided = torch.strided
    forbids_grad, forbids_inference = torch.is_grad_enabled(), not torch.is_inference_mode_enabled()
    spans: list[tuple[int, int, int, bool]] = []  # first byte, end, pair, whether a destination
    for i, (dst, src) in enumerate(zip(dsts, srcs)):
        fault = None
        if dst.layout != strided or src.layout != strided or dst.is_nested or src.is_nested:
            layouts = ("nested" if t.is_nested else str(t.layout) for t in (dst, src))
            fault = f"expected strided, got {' and '.join(layouts)}"
        elif dst.shape != src.shape:
            fault = "expected equal shapes"
        elif dst.device != src.device:
            fault = f"expected one device, got {dst.device} and {src.device}"
        elif forbids_grad and dst.requires_grad:
            fault = "destination requires grad; copy under no_grad()"
        elif forbids_inference and dst.is_inference():
            fault = "destination is an inference tensor"
        elif not dst.is_contiguous() and overlaps_itself(dst):
            fault = f"destination overlaps itself, strides {dst.stride()}"
        if fault is not None:
            raise ValueError(f"{_pair(i, names, dst, src)}: {fault}")
        for t, written in ((dst, True), (src, False)):
            if start := t.data_ptr():  # 0: empty, meta, or a subclass without memory of its own
                spans.append((start, start + _span(t), i, written))

    spans.sort()
    reach = 0
    for span in spans:
        if span[0] < reach:
            return _check_overlaps(spans, dsts, srcs, names)
        reach = span[1]
    return None


def _check_overlaps(spans: list[tuple], dsts, srcs, names) -> None:
    """The exact check, for spans of bytes of which some cross: sources may, columns of one matrix do."""
    active: list[tuple] = []  # spans that reach past the start of the current one, with layouts
    for start, end, i, written in spans:
        layout = _layout((dsts if written else srcs)[i])
        active = [other for other in active if other[1] > start]
        for first, _, j, other_written, other in active:
            onto_itself = i == j and first == start and other == layout
            if onto_itself or not (written or other_written) or not _share(start - first, other, layout):
                continue
            dst, partner = (i, j) if written else (j, i)
            what = "its own source, in part" if i == j else f"memory of {_name(partner, names)}"
            raise ValueError(f"{_pair(dst, names, dsts[dst], srcs[dst])}: destination shares {what}")
        active.append((start, end, i, written, layout))


def overlaps_itself(t: Tensor) -> bool:
    """Whether two elements of a strided tensor lie at one address (an expanded dimension, say)."""
    if t.numel() == 0:
        return False
    dims = sorted((stride, size) for size, stride in zip(t.shape, t.stride()) if size != 1)
    reach = 0
    for i, (stride, size) in enumerate(dims):
        if stride == 0:
            return True
        if stride <= reach:  # interleaved with smaller strides: some steps along this one, back along those
            back = [(smaller, 1 - n, n - 1) for smaller, n in dims[:i]]
            if _solvable(stride, [(stride, 2 - size, 0), *back]):
                return True
        reach += stride * (size - 1)
    return False


def _span(t: Tensor) -> int:
    """Bytes from the first of a tensor to the end of its last."""
    if t.is_contiguous():
        return t.nbytes
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
    return (last + 1) * t.element_size()


def _layout(t: Tensor) -> tuple:
    """Bytes an element, and (stride in bytes, size) of every dimension with more than one."""
    itemsize = t.element_size()
    return itemsize, *((stride * itemsize, n) for n, stride in zip(t.shape, t.stride()) if n != 1)


@lru_cache(4096)
def _share(distance: int, a: tuple, b: tuple) -> bool:
    """Whether a tensor laid out as `a` shares a byte with one as `b` that starts `distance` bytes later."""
    unit = gcd(distance, a[0], b[0])  # all addresses are multiples of it, and elements are whole units
    bounds: dict[int, tuple[int, int]] = {}  # steps of each stride, those of b counted backwards
    for (itemsize, *dims), backwards in ((a, False), (b, True)):
        for stride, size in ((unit, itemsize // unit), *dims):
            low, high = bounds.get(stride, (0, 0))
            bounds[stride] = (low - size + 1, high) if backwards else (low, high + size - 1)
    return _solvable(distance, [(stride, *steps) for stride, steps in bounds.items() if stride])


def _solvable(total: int, terms: list[tuple[int, int, int]]) -> bool:
    """Whether integers low <= x <= high exist with sum(stride * x) == total; terms are (stride, low, high).

    Largest stride first, it keeps every amount that the smaller ones could still make up for: a few where
    strides are nested, as those of one matrix are.
    """
    terms, amounts = sorted(terms, reverse=True), {total}
    for i, (stride, low, high) in enumerate(terms, 1):
        least, most = (sum(term[0] * term[side] for term in terms[i:]) for side in (1, 2))
        divisor = gcd(*(term[0] for term in terms[i:])) or 1
        amounts = {
            amount - stride * x
            for amount in amounts
            for x in range(max(low, -((most - amount) // stride)), min(high, (amount - least) // stride) + 1)
            if (amount - stride * x) % divisor == 0
        }
    return 0 in amounts


def check_count(dsts: Sequence[Tensor], what: str, items: Sequence | None) -> None:
    """Raise ValueError where there are items (sources, dtypes, names) but not one a destination."""
    if items is not None and len(items) != len(dsts):
        raise ValueError(f"expected one {what} a destination, got {len(items)} for {len(dsts)} destinations")


def pair_names(dsts: Sequence[Tensor], names: Sequence[str] | None) -> list[str]:
    """The names, or "pair 0" and so on. Raises ValueError as `check_count`."""
    check_count(dsts, "name", names)
    return [f"pair {i}" for i in range(len(dsts))] if names is None else list(names)


def _name(i: int, names: Sequence[str] | None) -> str:
    return f"pair {i}" if names is None else names[i]


def _pair(i: int, names: Sequence[str] | None, dst: Tensor, src: Tensor) -> str:
    shapes = ("nested" if t.is_nested else tuple(t.shape) for t in (dst, src))
    return f"{_name(i, names)} (destination {next(shapes)} {dst.dtype}, source {next(shapes)} {src.dtype})"


class CopyPlan:
    """The same copies step after step; views, groups and what the check has to know are worked out once.

    On the CPU one foreach call takes every pair, since grouping buys nothing there. Elsewhere there is one
    per dtype pair, and a `copy_` for each pair that `split_large` takes out. A plan holds views, no data.

        plan = CopyPlan([buf[:n] for buf in buffers], [torch.int64] * len(buffers), names)
        plan(srcs)                    # every step

    Args:
        dsts: destination views, as for `grouped_foreach_copy_`; autograd does not record the copies.
        src_dtypes: the dtype of each source to come.
        names: what to call the pairs in errors.
        constants: (dst, src) pairs that are copied along and whose sources never change, e.g. pad rows.
        dma_bytes: from this size on a pair that can be a driver memcpy is one.

    Raises:
        ValueError: for destinations and constants, as `check_pairs`.
    """

    _one_call_on_cpu = True

    def __init__(
        self,
        dsts: Sequence[Tensor],
        src_dtypes: Sequence[torch.dtype],
        names: Sequence[str] | None = None,
        constants: Sequence[tuple[Tensor, Tensor]] = (),
        dma_bytes: int = DEFAULT_DMA_BYTES,
    ) -> None:
        check_count(dsts, "dtype", src_dtypes)
        self._names = [*pair_names(dsts, names), *(f"constant {i}" for i in range(len(constants)))]
        self._constants = [src for _, src in constants]
        dsts = [*dsts, *(dst for dst, _ in constants)]
        # A pair with equal sides is let through, so this finds what is wrong with the destinations.
        check_pairs(dsts, [*dsts[: len(src_dtypes)], *self._constants], self._names)
        self._dsts = [dst.detach() for dst in dsts]
        self._on_cpu = self._one_call_on_cpu and all(dst.is_cpu for dst in dsts)
        self._dma_bytes = dma_bytes

        self._src_dtypes = list(src_dtypes)
        self._needs_inference_mode = any(dst.is_inference() for dst in self._dsts)
        # Where no accelerator could hold it, a source with an address is on the CPU (`_find_clear`).
        where = () if self._on_cpu and not torch.accelerator.is_available() else ("device",)
        self._signature = attrgetter("shape", "dtype", *where)
        self._signatures = [
            (dst.shape, dtype, *(getattr(dst, name) for name in where))
            for dst, dtype in zip(self._dsts, src_dtypes)
        ]
        storages = [dst.untyped_storage() for dst in self._dsts if dst.data_ptr()]
        pairs = zip(self._dsts, src_dtypes)
        self._keep_clear = [_keep_clear(storages, dst.numel() * dtype.itemsize) for dst, dtype in pairs]
        # A strided source is known by its address alone only where memory is its storage's own: not numpy's.
        self._contiguous_only = not (self._on_cpu and all(storage.resizable() for storage in storages))
        # Addresses found fit; allocators reuse them.
        self._clear: list[set[int]] = [set() for _ in src_dtypes]
        # A list on the CPU resolves a conj or neg bit first: it shows only where the pair converts as well.
        self._maybe_lazy = [
            i
            for i, dtype in enumerate(src_dtypes)
            if dtype not in _INTEGERS and not (self._on_cpu and dtype == dsts[i].dtype)
        ]
        srcs = self._stand_ins()
        self._calls = self._route([*srcs, *self._constants])
        self._calls_without_constants = self._route(srcs)

    def __call__(self, srcs: Sequence[Tensor], check: bool = True, constants: bool = True) -> None:
        """Copy `srcs[i]` into destination i, and every constant.

        Args:
            srcs: one tensor a destination, of its shape, on its device, of the dtype planned for. A strided
                one is copied right, at the cost of routing this step anew.
            check: False leaves out every check, for a caller whose sources are contiguous and known to fit.
            constants: False leaves the constants' destinations as they are, for a caller who knows that
                nobody has written there since the last call with True.

        Raises:
            ValueError: as `check_pairs`, and for another dtype than planned; nothing has been written then.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self(srcs, check, constants)
        calls = self._calls if constants else self._calls_without_constants
        if check and not self._as_planned(srcs):
            self.check(srcs)
            self._contiguous_only = True  # an address may now lie in a destination's storage
            self._remember(srcs)
            calls = self._route([*srcs, *self._constants] if constants else srcs)
        if constants and self._constants:
            srcs = [*srcs, *self._constants]
        self._run(calls, srcs)

    def check(self, srcs: Sequence[Tensor]) -> None:
        """Raise the ValueError that calling the plan with these sources would raise, if any."""
        check_count(self._src_dtypes, "source", srcs)
        for i, (src, dtype) in enumerate(zip(srcs, self._src_dtypes)):
            if src.dtype != dtype:
                what = _pair(i, self._names, self._dsts[i], src)
                raise ValueError(f"{what}: expected a source of {dtype}, got {src.dtype}")
        check_pairs(self._dsts, [*srcs, *self._constants], self._names)

    def launches(self, srcs: Sequence[Tensor] | None = None, constants: bool = True) -> list[Launch]:
        """What CUDA would be asked to do for `plan(srcs, constants=constants)`; needs `lib.routes`.

        Without `srcs`, for contiguous ones. Raises ValueError as `check`.
        """
        from lib.routes import routed_launches  # the only need of it: this file works alone otherwise

        srcs = self._checked(srcs, constants)
        return routed_launches(self._dsts, srcs, *self._groups(srcs))

    def _checked(self, srcs: Sequence[Tensor] | None, constants: bool) -> list[Tensor]:
        if srcs is not None:
            self.check(srcs)
        return [*(self._stand_ins() if srcs is None else srcs), *(self._constants if constants else ())]

    def _as_planned(self, srcs: Sequence[Tensor]) -> bool:
        """The check of every step: whether the sources are what the calls were laid out for."""
        if self._needs_inference_mode and not torch.is_inference_mode_enabled():
            return False
        try:  # every loop in C: Python's would cost more than the copies
            return (
                list(map(self._signature, srcs)) == self._signatures
                and (not self._contiguous_only or all(map(Tensor.is_contiguous, srcs)))
                and (all(map(contains, self._clear, map(Tensor.data_ptr, srcs))) or self._keep_off(srcs))
                and not (
                    self._maybe_lazy and any(srcs[i].is_conj() or srcs[i].is_neg() for i in self._maybe_lazy)
                )
            )
        except RuntimeError:  # a sparse tensor has no address to ask for, a nested one no shape
            return False

    def _keep_off(self, srcs: Sequence[Tensor]) -> bool:
        """Whether all sources, some at new addresses, keep off the destinations for sure."""
        for src, keep_clear, clear in zip(srcs, self._keep_clear, self._clear):
            address = src.data_ptr()  # 0 of an empty tensor, on meta, of a subclass without memory
            if address not in clear and bisect(keep_clear, address) & 1:
                return False
            if not address and (src.is_meta or src.numel()):
                return False
        self._remember(srcs)
        return True

    def _remember(self, srcs: Sequence[Tensor]) -> None:
        for src, clear in zip(srcs, self._clear):
            if (address := src.data_ptr()) and (src.is_contiguous() or not self._contiguous_only):
                if len(clear) >= 1024:
                    clear.clear()
                clear.add(address)

    def _stand_ins(self) -> list[Tensor]:
        pairs = zip(self._dsts, self._src_dtypes)
        return [torch.empty(dst.shape, dtype=dtype, device=dst.device) for dst, dtype in pairs]

    def _groups(self, srcs: Sequence[Tensor]) -> tuple[list[list[int]], list[int]]:
        return split_large(self._dsts, srcs, *group_pairs(self._dsts, srcs), self._dma_bytes)

    def _route(self, srcs: Sequence[Tensor]) -> list[tuple]:
        """(destinations, which sources, the integer type to see both as) for each call to make."""
        groups, singles = self._groups(srcs)
        if self._on_cpu and _foreach_copy_ is not None:
            singles = [i for i, (dst, src) in enumerate(zip(self._dsts, srcs)) if is_lazy(dst, src)]
            groups = [[i for i in range(len(srcs)) if i not in singles]]
        calls = []
        for group in (*groups, *([i] for i in singles)):
            dsts = [self._dsts[i] for i in group]
            dtype = None
            if len(group) > 1 and not self._on_cpu and dsts[0].dtype == srcs[group[0]].dtype:
                dtype = SAME_WIDTH_INT.get(dsts[0].dtype)
            if dsts:
                views = dsts if dtype is None else [dst.view(dtype) for dst in dsts]
                calls.append((views, None if len(group) == len(srcs) else group, dtype))
        return calls

    def _run(self, calls: list[tuple], srcs: Sequence[Tensor]) -> None:
        for dsts, pick, dtype in calls:
            picked = srcs if pick is None else [srcs[i] for i in pick]
            if dtype is not None:
                picked = [src.view(dtype) for src in picked]
            if len(dsts) > 1:
                _foreach_copy_(dsts, picked)
            else:
                dsts[0].copy_(picked[0])


def _keep_clear(storages: Sequence[UntypedStorage], nbytes: int) -> list[int]:
    """Addresses at which no source of `nbytes` bytes may start without a closer look.

    That is anywhere in a destination's storage, where all its views start, whatever their strides, and so
    close before it that a contiguous source reaches into it, as one over the same memory with a storage of
    its own may (from numpy, say). As sorted bounds of disjoint ranges: `bisect` of an address is odd inside.
    """
    bounds: list[int] = []
    for start, size in sorted({(s.data_ptr(), s.nbytes()) for s in storages}):
        first, end = start - nbytes + 1, start + size
        if bounds and first <= bounds[-1]:
            bounds[-1] = max(end, bounds[-1])
        else:
            bounds += first, end
    return bounds
