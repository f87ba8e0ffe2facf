"""The fused kernel: what it takes, the bytes it leaves, what is compiled when, and that it works alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from torch import Tensor

from lib import fused
from lib.fused import BLOCK, MAX_PAIRS, FusedLaunch, describe
from tests.tensors import DTYPES, Pairs, assert_copies_or_refuses, pairs, properties, random_values

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
CASES = int(os.environ.get("FUSED_CASES", "200"))  # the interpreter is slow; 2,000 by hand
INT8, INT32, INT64 = torch.int8, torch.int32, torch.int64


def copy(dsts: list[Tensor], srcs: list[Tensor]) -> None:
    """All pairs, those that `describe` takes by one launch."""
    taken = []
    for dst, src in zip(dsts, srcs):
        if describe(dst, src) is None:
            dst.copy_(src)
        else:
            taken.append((dst, src))
    if taken:
        launch_dsts, launch_srcs = zip(*taken)
        FusedLaunch(launch_dsts, launch_srcs)(launch_srcs)


# ---- bytes, in Triton's interpreter ------------------------------------------------------------------------


def _without_denormals(bfloats: Tensor) -> None:
    """Triton's interpreter misreads them."""
    bits = torch.empty(0, dtype=torch.int16).set_(bfloats.untyped_storage())
    bits[(bits & 0x7F80) == 0] = 0


@needs_triton
@pytest.mark.filterwarnings("ignore:Casting complex values", "ignore:ComplexHalf", "ignore:.*in cast")
@given(pairs(mutations=(None, None, None, 9), max_pairs=5))
@properties(CASES)
def test_bytes_are_those_of_a_loop_of_copy(case: Pairs):
    """All bits of all dtypes, but the payload of a NaN that is converted: each device has its own."""
    dsts, srcs = case
    for src in srcs:
        if src.dtype == torch.bfloat16:
            _without_denormals(src)
    settle = partial(_settle, [dst for dst, src in zip(dsts, srcs) if dst.dtype != src.dtype])
    assert_copies_or_refuses((dsts, srcs), copy, settle=settle)


def _settle(converted: list[Tensor]) -> None:
    for dst in converted:
        if dst.is_floating_point() and dst.element_size() > 1:
            dst.masked_fill_(dst.isnan(), torch.nan)


@needs_triton
@pytest.mark.filterwarnings("ignore:.*in cast", "ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if not dtype.is_complex and dtype.itemsize > 1])
def test_any_bits_of_a_dtype_convert_as_copy_does(dtype: torch.dtype):
    source = random_values((700, 3), dtype, 0)
    if dtype == torch.bfloat16:
        _without_denormals(source)
    for src in (source, source[:, 1]):
        dsts = [torch.zeros(src.shape, dtype=other) for other in DTYPES]
        dsts = [dst for dst in dsts if describe(dst, src) is not None]
        assert len(dsts) >= 3
        FusedLaunch(dsts, [src] * len(dsts))([src] * len(dsts))
        expected = [torch.zeros_like(dst).copy_(src) for dst in dsts]
        _settle([dst for dst in [*dsts, *expected] if dst.dtype != dtype])
        for dst, right in zip(dsts, expected):
            assert torch.equal(dst.view(torch.uint8), right.view(torch.uint8)), dst.dtype


def edges(device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Lengths around 16 bytes and around a program's block, aligned and not; strides in four dimensions."""
    dsts, srcs = [], []
    for dtype in (INT8, torch.float16, INT64):
        width = dtype.itemsize
        for nbytes in (width, 8, 16 - width, 16, 16 + width, BLOCK - width, BLOCK, BLOCK + 16 + width):
            for offset in (0, 1):
                numel = max(1, nbytes // width)
                source = random_values((numel + offset,), dtype, nbytes).to(device)
                dsts.append(torch.zeros(numel + 2, dtype=dtype, device=device)[offset:][:numel])
                srcs.append(source[offset:])
    wide = random_values((7, 6, 5, 8), INT32, 0).to(device)
    dsts.append(torch.zeros(5, 7, 6, 4, device=device, dtype=INT64))
    srcs.append(wide[..., ::2].permute(2, 0, 1, 3))
    return dsts, srcs


def assert_edges(device: str) -> None:
    dsts, srcs = edges(device)
    for start in range(0, len(dsts), MAX_PAIRS):
        chunk = slice(start, start + MAX_PAIRS)
        FusedLaunch(dsts[chunk], srcs[chunk])(srcs[chunk])
    for dst, src in zip(dsts, srcs):
        assert torch.equal(dst.view(INT8), src.to(dst.dtype).contiguous().view(INT8))
        around = torch.empty(0, dtype=dst.dtype, device=device).set_(dst.untyped_storage())
        around[dst.storage_offset() : dst.storage_offset() + dst.numel()] = 0
        assert around.eq(0).all()  # nothing else was written


@needs_triton
def test_edges():
    assert_edges("cpu")


@needs_triton
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_edges_on_a_gpu():
    assert_edges("cuda")


# ---- what is taken -----------------------------------------------------------------------------------------

ONE = torch.ones(4)
COMPLEX = ONE.to(torch.complex64)
REFUSED = {
    "empty": (ONE[:0], ONE[:0]),
    "float to integer": (ONE.long(), ONE),
    "to bool": (ONE.bool(), ONE.byte()),
    "complex to float": (ONE, COMPLEX),
    "to fp8": (ONE.to(torch.float8_e4m3fn), ONE),
    "a conjugate bit": (COMPLEX, COMPLEX.conj()),
    "a negative bit": (ONE, torch._neg_view(ONE)),
    "from the host": (torch.empty(4, device="meta"), ONE),
    "sparse": (torch.eye(2), torch.eye(2).to_sparse()),
    "five dimensions": (torch.ones(2, 2, 2, 2, 2), torch.ones(2, 2, 2, 2, 2).permute(4, 3, 2, 1, 0)),
    "fewer elements": (ONE, ONE[:2]),
    "two GiB": (torch.empty(2**31, dtype=INT8, device="meta"),) * 2,
}
TAKEN = {
    "int32 from int64": (ONE.int(), ONE.long()),
    "uint8 from bool": (ONE.byte(), ONE.bool()),
    "bfloat16 from float32": (ONE.bfloat16(), ONE),
    "float64 from bool": (ONE.double(), ONE.bool()),
    "fp8": (ONE.to(torch.float8_e5m2), ONE.to(torch.float8_e5m2)),
    "complex": (COMPLEX.clone(), COMPLEX),
    "a column": (ONE.clone(), torch.ones(4, 2)[:, 0]),
    "broadcast": (ONE.clone(), torch.ones(1).expand(4)),
    "a wider buffer": (torch.ones(3, 9)[:, :4], torch.ones(3, 4)),
    "0-dim": (torch.tensor(1), torch.tensor(2)),
    "a source to come": (ONE, torch.empty(4, device="meta")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_left_to_copy(name: str):
    assert describe(*REFUSED[name]) is None
    with pytest.raises(ValueError, match="pair 1: expected one that `describe` takes"):
        FusedLaunch([ONE.clone(), REFUSED[name][0]], [ONE, REFUSED[name][1]])


def test_a_destination_without_a_source_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        FusedLaunch([ONE.clone(), ONE.clone()], [ONE])


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str):
    assert describe(*TAKEN[name]) is not None


# ---- step after step ---------------------------------------------------------------------------------------


@needs_triton
def test_a_launch_for_sources_to_come_serves_every_step():
    dsts = [torch.zeros(5, dtype=INT64), torch.zeros(3, 9, dtype=INT32)[:, :4], torch.zeros(2)]
    stand_ins = [torch.empty(dst.shape, dtype=dtype, device="meta") for dst, dtype in zip(dsts, [INT64] * 2)]
    pad = torch.ones(2)
    launch = FusedLaunch(dsts, [*stand_ins, pad])
    for step in range(3):
        srcs = [torch.full((5,), step), torch.full((3, 4), 2 * step), pad]
        assert launch.fits(srcs)
        launch(srcs)
        assert all(map(torch.equal, dsts, [srcs[0], srcs[1].int(), pad]))


PLANNED = torch.ones(4, 2)
MISFITS = {
    "dtype": PLANNED.double(),
    "shape": torch.ones(4, 3),
    "broadcast": torch.ones(1, 2),
    "strides": torch.ones(2, 4).t(),
    "device": PLANNED.to("meta"),
    "a negative bit": torch._neg_view(PLANNED),
    "none": None,
    "a number": 1.0,
    "an array": PLANNED.numpy(),
    "sparse": PLANNED.to_sparse(),
}


@pytest.mark.parametrize("name", MISFITS)
def test_other_sources_do_not_fit(name: str):
    launch = FusedLaunch([torch.zeros(4, 2), torch.zeros(2)], [PLANNED, torch.ones(2)])
    assert launch.fits([PLANNED.clone(), torch.ones(2)])
    assert not launch.fits([MISFITS[name], torch.ones(2)])
    assert not launch.fits([PLANNED])


@needs_triton
def test_strided_sources_fit_where_they_were_planned():
    launch = FusedLaunch([torch.zeros(3)], [torch.ones(3, 2)[:, 0]])
    assert launch.fits([torch.zeros(3, 2)[:, 1]]) and not launch.fits([torch.zeros(3)])


@needs_triton
def test_destinations_may_move():
    dst = torch.zeros(4)
    launch = FusedLaunch([dst[1:]], [torch.ones(3)])
    launch([torch.ones(3)])
    address = dst.data_ptr()
    dst.share_memory_()
    launch([torch.full((3,), 2.0)])
    assert dst.data_ptr() != address and dst.tolist() == [0, 2, 2, 2]


@needs_triton
def test_a_source_without_memory_is_refused():
    dst, source = torch.zeros(3), torch.ones(3)
    launch = FusedLaunch([dst], [source])
    source.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="source 0: expected memory of its own"):
        launch([source])
    assert dst.eq(0).all()


@needs_triton
def test_autograd_is_not_involved():
    dst = torch.zeros(3)
    source = torch.ones(3, requires_grad=True)
    launch = FusedLaunch([dst], [source])
    launch([source])
    assert dst.eq(1).all() and not dst.requires_grad


# ---- compiling ---------------------------------------------------------------------------------------------


def fields(batch_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Some of SGLang's draft fields, one of them converting, for topk 4 and 5 steps."""
    tables = (((), INT32, INT64), ((20,), INT64, INT64), ((4,), torch.float32, torch.float32))
    dsts = [torch.zeros(512, *row, dtype=dtype)[:batch_size] for row, dtype, _ in tables]
    srcs = [torch.empty(batch_size, *row, dtype=dtype, device="meta") for row, _, dtype in tables]
    dsts.append(torch.zeros(3, 2048, dtype=INT64)[:, : 4 * batch_size])
    srcs.append(torch.empty(3, 4 * batch_size, dtype=INT64, device="meta"))
    return dsts, srcs


@needs_triton
def test_one_kernel_serves_38_batch_sizes():
    """Triton by itself compiles anew for integers that are 1 or multiples of 16, in tuples always."""
    sizes = [1, 2, 4, *range(8, 257, 8), 300, 400, 511]
    assert len(sizes) == 38
    fused.kernel.cache_clear()
    for batch_size in sizes:
        FusedLaunch(*fields(batch_size)).start  # noqa: B018
    assert fused.kernel.cache_info().misses == 1


NVIDIA = ("ld.global.v2.b64", "st.global.v2.b64", "ld.global.v4.b32", "st.global.v4.b32")
TARGETS = {
    ("cuda", 80, 32): NVIDIA,
    ("cuda", 90, 32): NVIDIA,
    ("cuda", 100, 32): NVIDIA,
    ("hip", "gfx942", 64): ("global_load_dwordx4", "global_store_dwordx4"),
}


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_without_a_gpu_and_moves_16_bytes_at_once(target: tuple, tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    dsts, srcs = fields(8)
    launch = FusedLaunch([*dsts, torch.zeros(8).bfloat16()], [*srcs, torch.ones(8)])
    n_dims = tuple(map(len, launch.dims))
    compiled, _ = fused.kernel(launch.types, n_dims, torch.device("cuda"), GPUTarget(*target))
    code = compiled.asm["ptx" if target[0] == "cuda" else "amdgcn"]
    assert [access for access in TARGETS[target] if access not in code] == []


# ---- alone -------------------------------------------------------------------------------------------------

ALONE = """
import sys
if "without" in sys.argv:
    sys.modules["triton"] = None
import torch
from fused import FusedLaunch, describe

dst, src = torch.zeros(4, dtype=torch.int32), torch.arange(4)
assert describe(dst, src) is not None
launch = FusedLaunch([dst], [src])
assert launch.fits([src])
try:
    launch([src])
except ImportError as error:
    print(error)
print(dst.tolist())
"""


@pytest.mark.parametrize(
    ("triton", "printed"),
    [
        pytest.param("with", "[0, 1, 2, 3]", marks=needs_triton),
        ("without", "FusedLaunch needs Triton: pip install triton\n[0, 0, 0, 0]"),
    ],
)
def test_the_file_works_alone_in_an_empty_folder(triton: str, printed: str, tmp_path):
    shutil.copy(fused.__file__, tmp_path)
    command = [sys.executable, "-c", ALONE, triton]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=_clean())
    assert result.stdout.strip() == printed


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
