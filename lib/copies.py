"""Copy many small tensors into static buffers with few launches. One file, torch only: take it away.

Before a CUDA graph is replayed, a step's inputs are copied into its static buffers, one launch a field.
`grouped` makes one per dtype pair, `CopyPlan` keeps views and groups, `ReplayCopies` is an engine's whole
input section. All make lists of `Call`s, for `run`. A new field is a `StaticInput`, a new grouping a `route`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards  # in torch 2.6 as in 2.13

Tensors = Sequence[Tensor]
Pairs = Iterable[tuple[Tensor, Tensor]]  # destination, source

# What PyTorch's fused kernel is built for in every release since 2.6 (ForeachBinaryOpList.cu). For any other
# dtype, uint16/32/64, complex32 or float4, fp8 in older ones, it raises on CUDA where `copy_` would not.
NAMES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
FUSED_DTYPES = {getattr(torch, name) for name in NAMES.split()}

# A fused kernel's block copies 65,536 elements at tens of GB/s: 64 KiB take 2 to 3 us, as much as a memcpy.
DEFAULT_DMA_BYTES = 64 * 1024  # an estimate: the crossover recorded on a device replaces it


class Call(NamedTuple):
    """One call, not yet made. op: "copy_" (one pair), "foreach" (pairs), "fill_" (a destination, a value),
    "host_copy_" (a pair in host memory), "fused" (pairs, one Triton kernel: `kept` gets the sources)."""

    op: str
    dsts: Tensors
    srcs: Tensors = ()
    value: float = 0
    kept: Callable | None = None


def run(calls: Iterable[Call | tuple]) -> None:
    """Make the calls, in order. Autograd does not see them: static buffers belong to no step's graph."""
    guard = torch.no_grad if torch.compiler.is_dynamo_compiling() else torch._C._AutoDispatchBelowAutograd
    with guard():
        for op, dsts, srcs, value, kept in calls:
            if op == "foreach":
                torch._foreach_copy_(dsts, srcs)
            elif op == "fused":
                kept(srcs)
            elif op == "fill_":
                dsts[0].fill_(value)
            else:
                dsts[0].copy_(srcs[0])


def grouped_foreach_copy_(dsts: Tensors, srcs: Tensors, names: Sequence[str] | None = None) -> None:
    """Copy each source into its destination, of equal shape: a loop of `copy_` in few launches. A drop-in for
    SGLang's helper of June 2026 (pull request 28465), but that no pair drags others onto the slow path.
    Raises ValueError with the pair's name, as `check_pairs`, before it writes."""
    check_pairs(dsts, srcs, names)
    run(grouped(zip(dsts, srcs)))


def grouped(pairs: Pairs, dma_bytes: int | None = None) -> list[Call]:
    """One `_foreach_copy_` per dtype pair, and `copy_` for what its kernel refuses. By the *pair*: until
    January 2026 the fused kernel took equal source dtypes with mixed destination dtypes for one and wrote
    wrong values (pytorch issue 173383). From `dma_bytes` on a pair that does not convert goes by `copy_`, on
    CUDA a driver memcpy (pull request 28465), and so does one that is alone in its group. None: neither."""
    groups: dict[tuple, list] = {}
    alone = []
    for dst, src in pairs:
        large = dma_bytes is not None and dst.nbytes >= dma_bytes and dst.dtype == src.dtype
        if large or not can_fuse(dst, src):
            alone.append(Call("copy_", [dst], [src]))
        elif dst.numel() > 0:
            groups.setdefault((dst.device, dst.dtype, src.dtype), []).append((dst, src))
    calls = []
    for group in groups.values():
        op = "copy_" if dma_bytes is not None and len(group) == 1 else "foreach"
        calls.append(Call(op, *zip(*group)))
    return calls + alone


grouped_dma = partial(grouped, dma_bytes=DEFAULT_DMA_BYTES)


def can_fuse(dst: Tensor, src: Tensor) -> bool:
    """Whether the fused kernel takes the pair (ForeachUtils.h). A source on `meta` is one to come."""
    if not dst.is_contiguous() or not src.is_contiguous() or is_lazy(dst) or is_lazy(src):
        return False
    return {dst.dtype, src.dtype} <= FUSED_DTYPES and (src.is_meta or src.device == dst.device)


def is_lazy(t: Tensor) -> bool:
    return t.is_conj() or t.is_neg()


def place(t: Tensor) -> tuple:
    """The memory of a tensor; on `meta`, too, where there are no addresses."""
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype


class CopyPlan:
    """The same copies step after step: `plan(srcs)`. Views and groups are worked out once.

    A source of another dtype or layout is copied right: the step is grouped anew, and `misses` counts it.
    constants: (destination, source) pairs that go along, padding say; names go on to them. route: makes calls
    of pairs (lib.strategies.ROUTES). check="full" asks on every step, not on the first alone, where sources
    lie. The same pair twice is one copy. Raises as `check_pairs`."""

    def __init__(self, dsts, src_dtypes, names=None, constants=(), route=grouped_dma, check="step") -> None:
        self.route = route
        self.misses = 0
        self.check_memory = ("step", "full").index(check)
        self.stand_ins, self.constants = [], [src for _, src in constants]
        for dst, dtype in zip(dsts, src_dtypes, strict=True):
            torch.empty(1, dtype=dst.dtype).copy_(torch.empty(1, dtype=dtype))  # raises now
            self.stand_ins.append(torch.empty(dst.shape, dtype=dtype, device="meta"))
        self.dsts = [dst.detach() for dst in (*dsts, *(dst for dst, _ in constants))]
        self.names = list(names or map(str, range(len(self.dsts))))
        check_pairs(self.dsts, [*self.dsts[: len(dsts)], *self.constants], self.names)
        self.once = [*{place(dst): i for i, dst in enumerate(self.dsts)}.values()]
        self.are_alike = lambda *srcs: False
        index = {id(src): i for i, src in enumerate(self.stand_ins + self.constants)}
        self.kept = []
        for call in route(self._pairs(self.stand_ins)):
            first, *others = picks = [index[id(src)] for src in call.srcs]
            pick = itemgetter(*picks) if others else itemgetter(slice(first, first + 1))
            self.kept.append((call.op, call.dsts, call.kept, pick))

    def __call__(self, srcs: Tensors) -> None:
        """Raises ValueError for no tensor, another shape or device; nothing has been written then."""
        run(self._checked(srcs))

    def calls(self, srcs: Tensors | None = None) -> list[Call]:
        """What `plan(srcs)` does; without `srcs`, for sources as planned."""
        calls = self.bound(self.stand_ins) if srcs is None else self._checked(srcs)
        return [Call(*parts) for parts in calls]

    def bound(self, srcs: Tensors) -> list[tuple]:
        """The parts of the planned calls with these sources, for `run`: unchecked."""
        every = [*srcs, *self.constants]
        return [(op, dsts, pick(every), 0, kept) for op, dsts, kept, pick in self.kept]

    def _checked(self, srcs: Tensors) -> Sequence[tuple]:
        if self._as_before(srcs):
            return self.bound(srcs)
        check_pairs(self.dsts, [*srcs, *self.constants], self.names)
        for src, planned in zip(srcs, self.stand_ins):
            if src.dtype != planned.dtype or not src.is_contiguous() or is_lazy(src):
                self.misses += 1
                return self.route(self._pairs(srcs))
        if len(srcs) and not self.check_memory:  # the next step's are compared with these, in C
            self.are_alike = TensorGuards(*srcs, dynamic_dims_sizes=[], dynamic_dims_strides=[]).check
        return self.bound(srcs)

    def _pairs(self, srcs: Tensors) -> list[tuple]:
        every = [*srcs, *self.constants]
        return [(self.dsts[i], every[i]) for i in self.once]

    def _as_before(self, srcs: Tensors) -> bool:
        """Whether these, none twice, are like the last ones in all but addresses (dynamo/guards.cpp)."""
        try:
            for src in srcs:
                if src.is_nested:  # where the guards would abort the process
                    return False
            return self.are_alike(*srcs)
        except (AttributeError, TypeError):  # no tensors, or another number of them
            return False


@dataclass(frozen=True)
class StaticInput:
    """A static buffer: `rows` a request along `dim`; `pad` in rows of padding, None if nobody reads them."""

    buffer: Tensor
    rows: int = 1
    pad: float | None = None
    required: bool = True
    fill_if_missing: bool = False  # `pad` in its rows, too, where the field does not come
    dim: int = 0
    source_dtype: torch.dtype | None = None  # where not the buffer's, so that padding shares the group

    def between(self, first: int, end: int) -> Tensor:
        """The rows of requests `first` up to `end`."""
        return self.buffer.narrow(self.dim, first * self.rows, (end - first) * self.rows)

    def constant(self, rows: Tensor) -> Tensor:
        """What fills rows of padding, of the source's dtype where that holds the pad."""
        pad, dtype = torch.tensor(self.pad, dtype=rows.dtype), self.source_dtype or rows.dtype
        return torch.full_like(rows, self.pad, dtype=dtype if pad.to(dtype).to(rows.dtype) == pad else None)


class ReplayCopies:
    """All input copies of a graph runner: a plan for each batch size and set of fields, made on first use.

    Padding is written every step, in the groups, as far as the graph reads or, pad_to="buffer", as SGLang:
    buffers are shared, graphs write into inputs. pads_stay leaves it out. options: a plan's."""

    def __init__(self, fields, pad_to="captured", pads_stay=False, **options) -> None:
        self.fields = dict(fields)
        self.pads_stay, self.options = pads_stay, options
        self.whole_buffers = ("captured", "buffer").index(pad_to)
        self.plans: dict[tuple, CopyPlan] = {}

    def __call__(self, inputs: Mapping, batch_size: int, captured: int) -> None:
        """Fill the buffers of a graph for `captured` requests from tensors by name, None for one that does
        not come. ValueError names a field that is unknown, missing or does not fit, before it writes."""
        plan, srcs = self._plan(inputs, batch_size, captured)
        plan(srcs)

    def calls(self, inputs: Mapping, batch_size: int, captured: int) -> list[Call]:
        plan, srcs = self._plan(inputs, batch_size, captured)
        return plan.calls(srcs)

    def prepare(self, batch_sizes: Mapping[int, int]) -> None:
        """Make the plans for all fields ahead: batch size -> the captured size that holds it."""
        for batch_size, captured in batch_sizes.items():
            self._make({name: field.buffer for name, field in self.fields.items()}, batch_size, captured)

    def _plan(self, inputs: Mapping, batch_size: int, captured: int) -> tuple[CopyPlan, list[Tensor]]:
        given = {name: src for name, src in inputs.items() if src is not None}
        plan = self.plans.get((batch_size, captured, *given)) or self._make(given, batch_size, captured)
        return plan, list(given.values())

    def _make(self, given: Mapping, batch_size: int, captured: int) -> CopyPlan:
        for name, src in given.items():
            if name not in self.fields or not isinstance(src, Tensor):
                raise ValueError(f"{name}: expected a tensor for one of {list(self.fields)}, got {type(src)}")
        pads = {}
        for name, field in self.fields.items():
            if field.required and name not in given:
                raise ValueError(f"{name}: required field is missing")
            capacity = field.buffer.shape[field.dim] // field.rows
            if not 0 < batch_size <= captured <= capacity:
                raise ValueError(f"{name}: expected 1 to {capacity} requests, got {batch_size} of {captured}")
            first = 0 if field.fill_if_missing and name not in given else batch_size
            end = capacity if self.whole_buffers else captured
            rows = field.between(first, batch_size if self.pads_stay else end)
            if field.pad is not None and rows.numel() > 0:
                pads[f"padding of {name}"] = rows, field.constant(rows)
        dsts = [self.fields[name].between(0, batch_size) for name in given]
        dtypes = [self.fields[name].source_dtype or src.dtype for name, src in given.items()]
        if len(self.plans) >= 1024:
            self.plans.clear()
        plan = CopyPlan(dsts, dtypes, [*given, *pads], list(pads.values()), **self.options)
        return self.plans.setdefault((batch_size, captured, *given), plan)


try:
    from lib.checks import check_pairs
except ImportError:  # this file was taken away alone

    def check_pairs(dsts: Tensors, srcs: Tensors, names: Iterable | None = None) -> None:
        """Raise ValueError for no tensor and other shapes or devices; lib/checks.py sees more."""
        for name, dst, src in zip(names or range(len(dsts)), dsts, srcs, strict=True):
            if not isinstance(src, Tensor) or (src.shape, src.device) != (dst.shape, dst.device):
                raise ValueError(f"{name}: expected {dst.shape} on {dst.device}, got {src!r}")
