"""Small copies of any dtypes in one Triton kernel. Torch and Triton (3.4 to 3.7) only: take it away.

`torch._foreach_copy_` takes one dtype pair a launch, and runs as a loop where strides differ. This kernel is
compiled for a list of dtypes, once for all sizes; it converts, takes strides, and moves dense pairs of one
dtype by 16 bytes where both addresses allow. On CPU tensors Triton's interpreter runs it: right, and slow.

    launch = FusedLaunch(dsts, srcs)  # once a batch size, pads among them; pairs that `describe` takes
    if launch.fits(srcs):  # every step
        launch(srcs)  # else copy one by one
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_PAIRS = 32  # a launch: the kernel is unrolled over its pairs
MAX_DIMS = 4  # of a strided pair: the arguments of 32 pairs have to fit into 4 KB
BLOCK = 4096  # bytes of a destination that one program writes

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
    """What the kernel has to know of a pair."""

    types: tuple  # Triton's names: of the destination's, of one to convert by way of, of the source's
    count: int  # of elements
    programs: int
    dims: tuple  # size and both strides of each, innermost first; none for a contiguous pair


def describe(dst: Tensor, src: Tensor) -> Description | None:
    """Describe a pair for the kernel; None for what stays with `copy_`.

    That is: unequal shapes; empty pairs and 2 GiB; partners on two devices; strides in more than four
    dimensions; a conj or neg bit; no memory of its own; conversions to bool, from and to complex and fp8, and
    of a float to an integer, whose result C++ or the device is free to choose. A source on `meta` stands for
    one of its dtype and strides.
    """
    types = _types(dst.dtype, src.dtype)
    if types is None or not _is_plain(dst) or not _is_plain(src):
        return None
    if src.shape != dst.shape or (src.device != dst.device and not src.is_meta):
        return None
    dims = ()
    if not dst.is_contiguous() or not src.is_contiguous():
        for dim in zip(dst.shape, dst.stride(), src.stride()):
            dims = dim + dims
    if len(dims) > 3 * MAX_DIMS:
        return None
    return Description(types, dst.numel(), dst.nbytes // BLOCK + 1, dims)


def _types(dst: torch.dtype, src: torch.dtype) -> tuple | None:
    if dst == src:
        same = f"int{8 * dst.itemsize}"
        return (same, same, same) if dst.itemsize <= 8 else None
    if dst not in _TYPES or src not in _TYPES:
        return None
    if not torch.can_cast(src, dst):
        return None
    to = _TYPES[dst]
    return to, _VIA.get(to, to), _TYPES[src]


def _is_plain(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_quantized:
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False
    if not 0 < tensor.nbytes < 2**31:
        return False
    return tensor.is_meta or tensor.data_ptr() != 0


def fused_copy_kernel(TYPES: tl.constexpr, BLOCK: tl.constexpr, counts, dims, dsts, srcs):
    """The kernel: programs are dealt out to the pairs one after the other."""
    block = tl.program_id(0)
    for i in tl.static_range(len(TYPES)):
        to_type = TYPES[i][0]
        to_pointer = tl.pointer_type(to_type)
        of_pointer = tl.pointer_type(TYPES[i][2])
        lanes = tl.arange(0, BLOCK * 8 // to_type.primitive_bitwidth)
        items = lanes.shape[0]
        dst = dsts[i]
        src = srcs[i]
        count = counts[i]
        layout = dims[i]
        programs = count // items + 1
        if (block >= 0) & (block < programs):
            index = block * items + lanes
            inside = index < count
            to = dst.to(to_pointer)
            of = src.to(of_pointer)
            if len(layout) > 0:
                for j in tl.static_range(0, len(layout), 3):
                    size = layout[j].to(tl.int32)
                    place = index % size
                    index = index // size
                    to += place * layout[j + 1]
                    of += place * layout[j + 2]
            else:
                if to_pointer == of_pointer:
                    # 16 bytes at once is what Triton makes of addresses and a count that are multiples.
                    part = items * 16 // BLOCK
                    aligned = (dst | src) % 16 == 0
                    parts = tl.where(aligned, count // part, 0)
                    whole = parts * part
                    first = index < whole
                    part_to = tl.multiple_of(dst.to(to_pointer), 16)
                    part_of = tl.multiple_of(src.to(of_pointer), 16)
                    number = tl.load(part_of + index, mask=first)
                    tl.store(part_to + index, number, mask=first)
                    inside &= index >= whole
                to += index
                of += index
            number = tl.load(of, mask=inside)
            number = number.to(TYPES[i][1])
            if to_type == tl.bfloat16:
                # To nearest even by hand, for the interpreter cuts off.
                bits = number.to(tl.int32, bitcast=True)
                odd = bits >> 16 & 1
                bits = (bits + odd + 0x7FFF) >> 16
                bits = tl.where(number == number, bits, 0x7FC0)
                number = bits.to(tl.int16).to(to_type, bitcast=True)
            tl.store(to, number.to(to_type), mask=inside)
        block -= programs


@cache
def kernel(types: tuple, n_dims: tuple, device: torch.device, target: Any = None) -> tuple:
    """(The kernel compiled for the current GPU or a Triton `GPUTarget`, on a CPU interpreted; its constants).

    Launched in the usual way, it would be compiled anew for every integer that becomes 1 or a multiple of 16:
    `do_not_specialize` does not reach into tuples. Raises ImportError without Triton.
    """
    global tl  # the name under which Triton looks for its language in the kernel's module
    try:
        import triton
        import triton.language as tl
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError as error:
        raise ImportError("FusedLaunch needs Triton: pip install triton") from error
    constants = {
        "TYPES": tuple(tuple(map(tl.dtype, names)) for names in types),
        "BLOCK": BLOCK,
    }
    if device.type == "cpu":
        return InterpretedFunction(fused_copy_kernel), constants
    signature = {
        "TYPES": "constexpr",
        "BLOCK": "constexpr",
        "counts": ("i32",) * len(types),
        "dims": tuple(("i64",) * n for n in n_dims),
        "dsts": ("i64",) * len(types),
        "srcs": ("i64",) * len(types),
    }
    source = triton.compiler.ASTSource(triton.JITFunction(fused_copy_kernel), signature, constants)
    compiled = triton.compile(source, target=target, options={"num_warps": 4})
    return compiled, constants


class FusedLaunch:
    """One launch for up to 32 pairs that `describe` takes; what stays from step to step is kept.

    Sources are of one step, or on `meta`. Destinations may move. Raises ValueError for other pairs.
    """

    def __init__(self, dsts: Sequence[Tensor], srcs: Sequence[Tensor]) -> None:
        pairs = [describe(dst, src) for dst, src in zip(dsts, srcs, strict=True)]
        if None in pairs:
            raise ValueError(f"pair {pairs.index(None)}: expected one that `describe` takes")
        self.dsts = list(dsts)
        self.types, self.counts, programs, self.dims = zip(*pairs)
        self.grid = (sum(programs), 1, 1)
        self.planned = [(dst.shape, src.dtype, dst.device) for dst, src in zip(dsts, srcs)]
        self.strides = [src.stride() for src in srcs]

    @cached_property
    def start(self) -> partial:
        """The kernel with all arguments but addresses; compiled or loaded here."""
        device = self.dsts[0].device
        n_dims = tuple(map(len, self.dims))
        compiled, constants = kernel(self.types, n_dims, device)
        return partial(compiled[self.grid], *constants.values(), self.counts, self.dims)

    def fits(self, srcs: Sequence[Tensor]) -> bool:
        """Whether these are tensors of the shapes, dtypes, devices and strides planned for."""
        try:  # loops in C: those of Python would cost more than the launch
            if list(map(_signature, srcs)) != self.planned:
                return False
            if any(map(Tensor.is_conj, srcs)) or any(map(Tensor.is_neg, srcs)):
                return False
            return list(map(Tensor.stride, srcs)) == self.strides
        except (AttributeError, RuntimeError, TypeError):  # of None, a nested tensor, an array
            return False

    def __call__(self, srcs: Sequence[Tensor]) -> None:
        """Launch for sources that fit; that is not checked. Raises ValueError for one without memory."""
        to = tuple(map(Tensor.data_ptr, self.dsts))
        of = tuple(map(Tensor.data_ptr, srcs))
        if 0 in of:
            raise ValueError(f"source {of.index(0)}: expected memory of its own, got a null address")
        with torch.cuda.device_of(self.dsts[0]):
            self.start(to, of)
