"""One Triton kernel for every small copy of a step, whatever the dtypes: a `CopyPlan` with one launch.

The foreach kernel takes one dtype pair a launch and falls back to a loop where strides differ. This one is
compiled for a list of dtypes: it converts, takes strided pairs, and moves dense pairs of one dtype with 16
bytes an access where both addresses allow. Triton is imported when a plan first copies; on CPU tensors its
interpreter runs the same kernel, to be right and not fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lib.grouped_copy import CopyPlan, is_lazy, same_dense_layout

if TYPE_CHECKING:
    from lib.routes import Launch

BLOCK = 4096  # bytes of a dense pair, or a quarter as many elements of another, per program
MAX_PAIRS = 32  # a launch: the kernel is unrolled over its pairs, and all arguments have to fit into 4 KB

_BITS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}
_INTEGERS = {"bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"}
_FLOATS = {"float16", "bfloat16", "float32", "float64"}


class Pair(NamedTuple):
    """What the kernel has to know of a pair: types by Triton's names, and `count` of bytes or elements.

    `dims` holds (size, destination stride, source stride) one after the other, innermost first, in elements;
    without any, the pair is dense and `count` is in bytes.
    """

    dst_type: str
    src_type: str
    count: int
    dims: tuple[int, ...]

    @property
    def programs(self) -> int:
        return -(-self.count // (BLOCK // 4 if self.dims else BLOCK))


def describe(dst: Tensor, src: Tensor) -> Pair | None:
    """The pair for the kernel, or None for what stays with `copy_`.

    That is lazy conj and neg bits, a subclass without memory of its own, and conversions whose result C++ or
    the device is free to choose: a float to an integer (out of range), to and from complex and fp8.
    """
    no_memory = dst.numel() > 0 and not dst.is_meta and 0 in (dst.data_ptr(), src.data_ptr())
    if no_memory or is_lazy(dst, src):
        return None
    itemsize = dst.element_size()
    if dst.dtype == src.dtype:
        bits = _BITS[min(itemsize, 8)]
        if same_dense_layout(dst, src):
            return Pair(bits, bits, dst.nbytes, ())
        wide = itemsize // 8 if itemsize > 8 else 1  # complex128 as two elements
        return Pair(bits, bits, dst.numel() * wide, _dims(dst, src, wide))
    dst_type, src_type = (str(t.dtype).removeprefix("torch.") for t in (dst, src))
    numbers = _INTEGERS | _FLOATS
    if not {dst_type, src_type} <= numbers or (src_type in _FLOATS and dst_type in _INTEGERS - {"bool"}):
        return None
    return Pair(dst_type, src_type, dst.numel(), _dims(dst, src) or (1, 1, 1))


def _dims(dst: Tensor, src: Tensor, wide: int = 1) -> tuple[int, ...]:
    """Sizes and strides, innermost first, dimensions that run on into each other merged."""
    dims = [(n, d * wide, s * wide) for n, d, s in zip(dst.shape, dst.stride(), src.stride()) if n != 1]
    dims += [(wide, 1, 1)] if wide > 1 else []
    merged: list[tuple[int, int, int]] = []
    for n, d, s in reversed(dims):
        if merged and (d, s) == (merged[-1][0] * merged[-1][1], merged[-1][0] * merged[-1][2]):
            merged[-1] = (merged[-1][0] * n, *merged[-1][1:])
        else:
            merged.append((n, d, s))
    return tuple(x for dim in merged for x in dim)


class FusedPlan(CopyPlan):
    """A `CopyPlan` that makes one launch for up to 32 pairs; arguments and errors are the same.

    What `describe` leaves out goes by `copy_`, and so does a dense pair of one dtype from `dma_bytes` on, for
    which the driver's memcpy is at least as good.

    Raises:
        ImportError: from the first copy on, where Triton is not installed. `launches` works without it.
    """

    _one_call_on_cpu: ClassVar[bool] = False

    def launches(self, srcs: Sequence[Tensor] | None = None, constants: bool = True) -> list[Launch]:
        from lib.routes import Launch, copy_launch

        srcs = self._checked(srcs, constants)
        pairs, singles = self._split(srcs)
        launches = []
        for chunk in _chunks(pairs):
            written = sum(self._dsts[i].nbytes for i in chunk)
            launches.append(Launch("fused", len(chunk), written, "one kernel for all dtypes", "triton"))
        copies = (copy_launch(self._dsts[i], srcs[i]) for i in singles)
        return launches + [copy for copy in copies if copy is not None]

    def _split(self, srcs: Sequence[Tensor]) -> tuple[dict[int, Pair], list[int]]:
        """Pairs for the kernel by index, and the ones for `copy_`."""
        pairs, singles = {}, []
        for i, (dst, src) in enumerate(zip(self._dsts, srcs)):
            pair = describe(dst, src)
            if (
                pair is None
                or dst.device != self._dsts[0].device
                or (pair.dims == () and dst.nbytes >= self._dma_bytes)
            ):
                singles.append(i)
            elif pair.count:
                pairs[i] = pair
        return pairs, singles

    def _route(self, srcs: Sequence[Tensor]) -> list[tuple]:
        """Arguments of each kernel launch, and the indices of the singles as a last entry."""
        pairs, singles = self._split(srcs)
        calls: list[tuple] = []
        for chunk in _chunks(pairs):
            counts, dims = _odd(pairs[i].count for i in chunk), tuple(_odd(pairs[i].dims) for i in chunk)
            types = tuple((pairs[i].dst_type, pairs[i].src_type) for i in chunk)
            addresses = _odd(self._dsts[i].data_ptr() for i in chunk)
            calls.append((chunk, sum(pairs[i].programs for i in chunk), addresses, counts, dims, types))
        return [*calls, singles]

    def _run(self, calls: list[Any], srcs: Sequence[Tensor]) -> None:
        *launches, singles = calls
        for chunk, programs, addresses, counts, dims, types in launches:
            launch(
                self._dsts[0].device,
                programs,
                addresses,
                _odd(srcs[i].data_ptr() for i in chunk),
                counts,
                dims,
                types,
            )
        for i in singles:
            self._dsts[i].copy_(srcs[i])


def _chunks(pairs: dict[int, Pair]) -> list[list[int]]:
    indices = list(pairs)
    return [indices[i : i + MAX_PAIRS] for i in range(0, len(indices), MAX_PAIRS)]


def _copy(dsts, srcs, counts, dims, TYPES: tl.constexpr, BLOCK: tl.constexpr):
    """The kernel: programs are dealt out to the pairs one after the other. TYPES: (to, of, bytes of `of`)."""
    program = tl.program_id(0)
    first = 0
    for i in tl.static_range(len(TYPES)):
        count = (counts[i] - 3) // 2  # as `_odd` packed it, like all the integers
        dst = (dsts[i] - 3) // 2
        src = (srcs[i] - 3) // 2
        if len(dims[i]) == 0:  # dense, of one dtype: bytes
            programs = (count + BLOCK - 1) // BLOCK
            if (program >= first) & (program < first + programs):
                start = (program - first).to(tl.int64) * BLOCK
                rest = count - start
                if (dst | src) % 16 == 0:  # two int64 side by side are one access of 16 bytes
                    lane = tl.arange(0, BLOCK // 8)
                    to = tl.multiple_of((dst + start).to(tl.pointer_type(tl.int64)), 16)
                    of = tl.multiple_of((src + start).to(tl.pointer_type(tl.int64)), 16)
                    whole = lane // 2 < rest // 16
                    tl.store(to + lane, tl.load(of + lane, mask=whole), mask=whole)
                    done = start + rest // 16 * 16
                    tail = tl.arange(0, 16 // TYPES[i][2])
                    left = (done + tail * TYPES[i][2] < count) & (rest < BLOCK)
                    value = tl.load((src + done).to(tl.pointer_type(TYPES[i][1])) + tail, mask=left)
                    tl.store((dst + done).to(tl.pointer_type(TYPES[i][0])) + tail, value, mask=left)
                else:
                    item = tl.arange(0, BLOCK // TYPES[i][2])
                    inside = item * TYPES[i][2] < rest
                    narrow = tl.load((src + start).to(tl.pointer_type(TYPES[i][1])) + item, mask=inside)
                    tl.store((dst + start).to(tl.pointer_type(TYPES[i][0])) + item, narrow, mask=inside)
        else:
            programs = (count + BLOCK // 4 - 1) // (BLOCK // 4)
            if (program >= first) & (program < first + programs):
                index = (program - first).to(tl.int64) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
                valid = index < count
                to_offset = index * 0
                of_offset = index * 0
                for j in tl.static_range(len(dims[i]) // 3):
                    size = (dims[i][3 * j] - 3) // 2
                    to_offset += index % size * ((dims[i][3 * j + 1] - 3) // 2)
                    of_offset += index % size * ((dims[i][3 * j + 2] - 3) // 2)
                    index = index // size
                number = tl.load(src.to(tl.pointer_type(TYPES[i][1])) + of_offset, mask=valid)
                if TYPES[i][0] == tl.int1:
                    number = number != 0
                elif TYPES[i][0] == tl.bfloat16:  # to nearest even, on every device and in the interpreter
                    bits = number.to(tl.float32).to(tl.int32, bitcast=True)
                    bits = tl.where(number != number, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
                    number = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
                elif TYPES[i][0] == tl.float16:  # by way of float32, as PyTorch
                    number = number.to(tl.float32).to(tl.float16)
                else:
                    number = number.to(TYPES[i][0])
                tl.store(dst.to(tl.pointer_type(TYPES[i][0])) + to_offset, number, mask=valid)
        first += programs


def _odd(numbers: Iterable[int]) -> tuple[int, ...]:
    """Numbers from 0 up as odd ones above 1.

    Triton compiles anew for an integer that becomes 1 or a multiple of 16, and inside a tuple
    `do_not_specialize` does not stop it: every batch size would wait for the compiler.
    """
    return tuple(2 * n + 3 for n in numbers)


@cache
def kernel(interpreted: bool) -> Any:
    """The compiled kernel, or the interpreted one. Raises ImportError, with what to do, without Triton."""
    global tl  # the name under which Triton looks for its language in the kernel's module
    try:
        import triton
        import triton.language as tl
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError as error:
        raise ImportError("fused_kernel needs Triton (pip install triton); CopyPlan does not") from error
    if interpreted:
        return InterpretedFunction(_copy)
    return triton.jit(_copy)


@cache
def triton_types(names: tuple[tuple[str, str], ...]) -> tuple:
    special = {"bool": ("int1", "uint8"), "float16": ("fp16",) * 2, "bfloat16": ("bf16",) * 2}
    special |= {"float32": ("fp32",) * 2, "float64": ("fp64",) * 2}
    types = [(tl.dtype(special.get(d, (d, d))[0]), tl.dtype(special.get(s, (s, s))[1])) for d, s in names]
    return tuple((d, s, s.primitive_bitwidth // 8) for d, s in types)


def launch(device: torch.device, programs: int, dsts, srcs, counts, dims, names) -> None:
    """Launch for pairs given by addresses, counts, dims (all `_odd`) and type names, one entry a pair."""
    run = kernel(device.type == "cpu")
    if device.type == "cpu":
        run[(programs,)](dsts, srcs, counts, dims, triton_types(names), BLOCK)
    else:
        with torch.cuda.device(device):
            run[(programs,)](dsts, srcs, counts, dims, triton_types(names), BLOCK, num_warps=4)
