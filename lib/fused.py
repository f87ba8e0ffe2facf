"""The small copies of a step in one Triton kernel, whatever their dtypes. Torch and Triton only: take it away.

`torch._foreach_copy_` takes one dtype pair a launch, and runs as a loop where strides differ. This kernel is
compiled for a list of dtypes, once for all sizes: it converts, takes strided pairs, and moves dense pairs of
one dtype with 16 bytes an access where addresses and length allow. Triton is imported at the first launch. On
CPU tensors its interpreter runs the same kernel, to be right and not fast.

    plan = FusedPlan([buffer[:n] for buffer in buffers], [torch.int64] * len(buffers), names)
    plan(srcs)  # every step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_PAIRS = 32  # a launch: the kernel is unrolled over its pairs
MAX_DIMS = 4  # of a strided pair: the arguments of 32 pairs have to fit into 4 KB
BLOCK = 4096  # bytes of a destination that one program writes
DMA_BYTES = 64 * 1024  # from here on what can be a driver memcpy is one; an estimate, as in copies.py

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_TYPES = {getattr(torch, name): name for name in _INTEGERS} | {
    torch.bool: "uint8",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
_VIA = {"fp16": "fp32", "bf16": "fp32"}  # PyTorch converts to halves by way of float32
_signature = attrgetter("shape", "dtype", "device")


class Description(NamedTuple):
    """What the kernel has to know of a pair.

    types: Triton's names of the destination's type, one to convert by way of, and the source's. dims: (size,
    destination stride, source stride), innermost first, one after the other; none for a contiguous pair.
    """

    types: tuple[str, str, str]
    programs: int
    count: int
    dims: tuple[int, ...]


def describe(dst: Tensor, src: Tensor) -> Description | None:
    """The pair, of equal shapes, for the kernel; or None for what stays with `copy_`.

    Left to `copy_`: empty pairs and those of 2 GiB; partners on different devices; strided pairs of more than
    four dimensions; lazy conj and neg bits; tensors without memory of their own; conversions to bool, to and
    from complex and fp8, and of a float to an integer, whose result C++ or the device is free to choose.
    A source on `meta` stands for one of its dtype and strides.
    """
    types = _types(dst.dtype, src.dtype)
    if types is None or not _has_memory(dst) or not _has_memory(src):
        return None
    if src.device != dst.device and not src.is_meta:
        return None
    dims: tuple[int, ...] = ()
    if not dst.is_contiguous() or not src.is_contiguous():
        for dim in zip(dst.shape, dst.stride(), src.stride()):
            dims = dim + dims
    if len(dims) > 3 * MAX_DIMS:
        return None
    return Description(types, -(-dst.nbytes // BLOCK), dst.numel(), dims)


def _types(dst: torch.dtype, src: torch.dtype) -> tuple[str, str, str] | None:
    if dst == src:
        return (f"int{8 * dst.itemsize}",) * 3 if dst.itemsize <= 8 else None
    if dst not in _TYPES or src not in _TYPES or not torch.can_cast(src, dst):
        return None
    to = _TYPES[dst]
    return to, _VIA.get(to, to), _TYPES[src]


def _has_memory(tensor: Tensor) -> bool:
    """Whether its values lie where it says, as they are."""
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    return 0 < tensor.nbytes < 2**31 and (tensor.is_meta or tensor.data_ptr() != 0)


def _copy(TYPES: tl.constexpr, BLOCK: tl.constexpr, counts, dims, dsts, srcs):
    """The kernel: programs are dealt out to the pairs one after the other."""
    block = tl.program_id(0)
    for i in tl.static_range(len(TYPES)):
        to_type = TYPES[i][0]
        to_pointer = tl.pointer_type(to_type)
        of_pointer = tl.pointer_type(TYPES[i][2])
        width: tl.constexpr = to_type.primitive_bitwidth // 8
        items: tl.constexpr = BLOCK // width
        dst = dsts[i]
        src = srcs[i]
        count = counts[i]
        programs = (count + items - 1) // items
        if (block >= 0) & (block < programs):
            index = block * items + tl.arange(0, items)
            inside = index < count
            to = dst.to(to_pointer)
            of = src.to(of_pointer)
            if len(dims[i]) > 0:
                for j in tl.static_range(0, len(dims[i]), 3):
                    size = dims[i][j].to(tl.int32)
                    to += index % size * dims[i][j + 1]
                    of += index % size * dims[i][j + 2]
                    index = index // size
            else:
                if to_type == TYPES[i][2]:
                    # By 16 bytes, which Triton does where it knows address and count for multiples of them.
                    part: tl.constexpr = 16 // width
                    whole = tl.where((dst | src) % 16 == 0, count // part, 0) * part
                    first = index < whole
                    part_to = tl.multiple_of(dst.to(to_pointer), 16) + index
                    part_of = tl.multiple_of(src.to(of_pointer), 16) + index
                    tl.store(part_to, tl.load(part_of, mask=first), mask=first)
                    inside &= index >= whole
                to += index
                of += index
            number = tl.load(of, mask=inside).to(TYPES[i][1])
            if to_type == tl.bfloat16:  # to nearest even by hand: the interpreter cuts off
                bits = number.to(tl.int32, bitcast=True)
                bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
                bits = tl.where(number == number, bits, 0x7FC0)
                number = bits.to(tl.int16).to(to_type, bitcast=True)
            tl.store(to, number.to(to_type), mask=inside)
        block -= programs


@cache
def kernel(types: tuple, n_dims: tuple, device: torch.device | None, target: Any = None) -> tuple:
    """(the kernel compiled for a device or, without one, for a Triton `GPUTarget`; its two constants).

    Launched in the usual way, it would be compiled anew for every integer that becomes 1 or a multiple of 16:
    `do_not_specialize` does not reach into tuples. For a CPU it is interpreted. Raises ImportError.
    """
    global tl  # the name under which Triton looks for its language in the kernel's module
    try:
        import triton
        import triton.language as tl
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError as error:
        raise ImportError("FusedLaunch needs Triton: pip install triton") from error
    triton_types = tuple(tuple(map(tl.dtype, names)) for names in types)
    if device is not None and device.type == "cpu":
        return InterpretedFunction(_copy), (triton_types, BLOCK)
    numbers = ("i64",) * len(types)
    signature = {
        "TYPES": "constexpr",
        "BLOCK": "constexpr",
        "counts": numbers,
        "dims": tuple(("i64",) * n for n in n_dims),
        "dsts": numbers,
        "srcs": numbers,
    }
    constants = {"TYPES": triton_types, "BLOCK": BLOCK}
    source = triton.compiler.ASTSource(triton.JITFunction(_copy), signature, constants)
    return triton.compile(source, target=target, options={"num_warps": 4}), (triton_types, BLOCK)


class FusedLaunch:
    """One launch for up to 32 pairs that `describe` takes; what does not change from step to step is kept.

    `launch(srcs)` copies sources of the same dtypes, shapes and strides as those given here. Nothing of that
    is checked, only that all have memory; where destinations lie is asked every time.
    """

    def __init__(self, dsts: Sequence[Tensor], srcs: Sequence[Tensor]) -> None:
        pairs = list(map(describe, dsts, srcs))
        if None in pairs or len(pairs) > MAX_PAIRS:
            raise ValueError(f"expected at most {MAX_PAIRS} pairs that `describe` takes, got {pairs}")
        self.dsts = list(dsts)
        self.types, programs, self.counts, self.dims = zip(*pairs)
        self.grid = (sum(programs), 1, 1)

    @cached_property
    def start(self) -> Callable[[tuple, tuple], None]:
        n_dims = tuple(map(len, self.dims))
        compiled, constants = kernel(self.types, n_dims, self.dsts[0].device)
        return partial(compiled[self.grid], *constants, self.counts, self.dims)

    def __call__(self, srcs: Sequence[Tensor]) -> None:
        to = tuple(map(Tensor.data_ptr, self.dsts))
        of = tuple(map(Tensor.data_ptr, srcs))
        if 0 in to or 0 in of:
            raise ValueError(f"expected tensors with memory, got addresses {to} and {of}")
        with torch.cuda.device_of(self.dsts[0]):
            self.start(to, of)


class FusedPlan:
    """The same copies step after step in one launch; autograd does not record them.

    `copy_` copies what `describe` leaves, destinations of 64 KiB or more, and a whole step whose sources are
    not contiguous or of other dtypes than planned, which `misses` counts. Whether a source overlaps a
    destination is not looked at.

    Args: dsts, the destinations; src_dtypes, one for each; names of the pairs, for errors; constants, (dst,
    src) pairs copied along whose sources never change, e.g. pad rows.
    Raises: ValueError, that names the pair, for a source that is no tensor, or of another shape or device.
    """

    def __init__(
        self,
        dsts: Sequence[Tensor],
        src_dtypes: Sequence[torch.dtype],
        names: Sequence[str] | None = None,
        constants: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self.names = names or [f"pair {i}" for i in range(len(dsts))]
        self.misses = 0
        self.expected = [(dst.shape, dtype, dst.device) for dst, dtype in zip(dsts, src_dtypes, strict=True)]
        self.constants = [src for _, src in constants]
        self.dsts = [dst.detach() for dst in (*dsts, *(dst for dst, _ in constants))]
        stand_ins = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype, _ in self.expected]
        pairs = list(zip(self.dsts, [*stand_ins, *self.constants]))
        self.fused = [dst.nbytes < DMA_BYTES and describe(dst, src) is not None for dst, src in pairs]
        self.single = [not fused for fused in self.fused]
        self.launch = FusedLaunch(*zip(*compress(pairs, self.fused))) if any(self.fused) else None

    def __call__(self, srcs: Sequence[Tensor]) -> None:
        planned = self._as_planned(srcs)
        srcs = [*srcs, *self.constants]
        singles = zip(self.dsts, srcs)
        if planned:
            singles = compress(singles, self.single)
            if self.launch is not None:
                self.launch(compress(srcs, self.fused))
        else:
            self.misses += 1
        with torch.no_grad():
            for dst, src in singles:
                dst.copy_(src)

    def _as_planned(self, srcs: Sequence[Tensor]) -> bool:
        """Whether to launch. Loops are in C: those of Python would cost more than the launch."""
        try:
            if list(map(_signature, srcs)) == self.expected and all(map(Tensor.is_contiguous, srcs)):
                return not any(map(Tensor.is_conj, srcs)) and not any(map(Tensor.is_neg, srcs))
        except (AttributeError, RuntimeError, TypeError):  # of None, a nested tensor, an array
            pass
        for name, src, (shape, _, device) in zip(self.names, srcs, self.expected, strict=True):
            if not isinstance(src, Tensor) or src.shape != shape or src.device != device:
                raise ValueError(f"{name}: expected a tensor of {tuple(shape)} on {device}, got {src}")
        return False
