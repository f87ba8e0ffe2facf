"""The fused kernel: what it takes, the bytes it leaves, what is compiled when. See test_strategies, too."""

from importlib.util import find_spec

import pytest
import torch

from lib import fused
from lib.fused import BLOCK, MAX_PAIRS, FusedLaunch, describe
from tests.tensors import DTYPES, one_nan, random_values, same, without_denormals

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
INT8, INT32, INT64 = torch.int8, torch.int32, torch.int64


@needs_triton
@pytest.mark.filterwarnings("ignore:.*in cast", "ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if not dtype.is_complex and dtype.itemsize > 1])
def test_any_bits_of_a_dtype_convert_as_copy_does(dtype):
    source = random_values((700, 3), dtype, 0)
    without_denormals([source])
    for src in (source, source[:, 1]):
        dsts = [torch.zeros(src.shape, dtype=other) for other in DTYPES]
        dsts = [dst for dst in dsts if describe(dst, src) is not None]
        assert len(dsts) >= 3
        srcs = [src] * len(dsts)
        FusedLaunch(dsts, srcs)(srcs)
        expected = [torch.zeros_like(dst).copy_(src) for dst in dsts]
        one_nan(dsts + expected, srcs + srcs)
        for dst, right in zip(dsts, expected):
            assert torch.equal(dst.view(torch.uint8), right.view(torch.uint8)), dst.dtype


@needs_triton
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[needs_gpu, pytest.mark.cuda])])
def test_lengths_around_16_bytes_and_around_a_block_aligned_and_not_and_four_strides(device):
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
    for start in range(0, len(dsts), MAX_PAIRS):
        chunk = slice(start, start + MAX_PAIRS)
        FusedLaunch(dsts[chunk], srcs[chunk])(srcs[chunk])
    for dst, src in zip(dsts, srcs):
        assert torch.equal(dst.view(INT8), src.to(dst.dtype).contiguous().view(INT8))
        around = torch.empty(0, dtype=dst.dtype, device=device).set_(dst.untyped_storage())
        around[dst.storage_offset() : dst.storage_offset() + dst.numel()] = 0
        assert around.eq(0).all()  # nothing else was written


ONE = torch.ones(4)
COMPLEX = ONE.to(torch.complex64)
FIVE = torch.ones(2, 2, 2, 2, 2)
REFUSED = [
    (ONE[:0], ONE[:0]),
    (ONE.long(), ONE),  # a float to an integer
    (ONE.bool(), ONE.byte()),
    (ONE, COMPLEX),
    (ONE.to(torch.float8_e4m3fn), ONE),
    (COMPLEX, COMPLEX.conj()),
    (ONE, torch._neg_view(ONE)),
    (torch.empty(4, device="meta"), ONE),  # from the host
    (torch.eye(2), torch.eye(2).to_sparse()),
    (FIVE, FIVE.permute(4, 3, 2, 1, 0)),
    (ONE, ONE[:2]),
    (torch.empty(2**31, dtype=INT8, device="meta"),) * 2,
]
TAKEN = [
    (ONE.int(), ONE.long()),
    (ONE.bfloat16(), ONE),
    (ONE.double(), ONE.bool()),
    (ONE.to(torch.float8_e5m2), ONE.to(torch.float8_e5m2)),
    (COMPLEX.clone(), COMPLEX),
    (ONE.clone(), torch.ones(1).expand(4)),
    (torch.ones(3, 9)[:, :4], torch.ones(3, 4)),  # rows of a wider buffer
    (torch.tensor(1), torch.tensor(2)),
    (ONE, torch.empty(4, device="meta")),  # a source to come
]


def test_what_is_taken_and_what_is_left_to_copy():
    assert all(describe(*pair) is not None for pair in TAKEN)
    for dst, src in REFUSED:
        assert describe(dst, src) is None, (dst, src)
        with pytest.raises(ValueError, match="pair 1: expected one that `describe` takes"):
            FusedLaunch([ONE.clone(), dst], [ONE, src])


@needs_triton
def test_a_launch_for_sources_to_come_serves_every_step_wherever_its_destinations_move():
    memory, pad = torch.zeros(2), torch.ones(2, requires_grad=True)
    dsts = [torch.zeros(5, dtype=INT64), torch.zeros(3, 9, dtype=INT32)[:, :4], memory[1:]]
    stand_ins = [torch.empty(dst.shape, dtype=INT64, device="meta") for dst in dsts[:2]]
    launch = FusedLaunch(dsts, [*stand_ins, pad[1:]])
    for step in range(3):
        srcs = [torch.full((5,), step), torch.full((3, 4), 2 * step), pad[1:]]
        memory.zero_()
        assert launch.fits(srcs)
        launch(srcs)
        assert same(dsts, [srcs[0], srcs[1].int(), pad[1:]]) and memory[0] == 0
        assert not memory.requires_grad
        memory.share_memory_()
    srcs[0].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="source 0: expected memory of its own"):
        launch(srcs)


def test_only_sources_as_planned_fit():
    dst, planned = torch.zeros(4, 2), torch.ones(4, 2)
    launch = FusedLaunch([dst, torch.zeros(2)], [planned, torch.ones(2)])
    assert launch.fits([planned.clone(), torch.ones(2)]) and not launch.fits([planned])
    for other in (
        *(planned.double(), torch.ones(4, 3), torch.ones(1, 2), torch.ones(2, 4).t(), planned.to("meta")),
        *(torch._neg_view(planned), None, 1.0, planned.numpy(), planned.to_sparse()),
    ):
        assert not launch.fits([other, torch.ones(2)]), other
    strided = FusedLaunch([torch.zeros(3)], [torch.ones(3, 2)[:, 0]])
    assert strided.fits([torch.zeros(3, 2)[:, 1]]) and not strided.fits([torch.zeros(3)])


def fields(batch_size):
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
TARGETS = {("cuda", capability, 32): NVIDIA for capability in (80, 90, 100)}
TARGETS["hip", "gfx942", 64] = ("global_load_dwordx4", "global_store_dwordx4")


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_without_a_gpu_and_moves_16_bytes_at_once(target, tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    dsts, srcs = fields(8)
    launch = FusedLaunch([*dsts, torch.zeros(8).bfloat16()], [*srcs, torch.ones(8)])
    n_dims = tuple(map(len, launch.dims))
    compiled, _ = fused.kernel(launch.types, n_dims, torch.device("cuda"), GPUTarget(*target))
    code = compiled.asm["ptx" if target[0] == "cuda" else "amdgcn"]
    assert [access for access in TARGETS[target] if access not in code] == []
