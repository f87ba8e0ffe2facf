"""The fused kernel: what it takes, the bytes it leaves, what is compiled when. See test_strategies, too."""

from importlib.util import find_spec

import pytest
import torch

from lib import fused
from lib.copies import run
from lib.fused import BLOCK, FusedLaunch, describe
from lib.strategies import STRATEGIES, Step
from tests.tensors import DTYPES, assert_copies_or_refuses, one_nan, random_values, same, without_denormals

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
INT8, INT32, INT64 = torch.int8, torch.int32, torch.int64


def halfway(half):
    """Where random bits hardly lead: numbers half-way between two neighbours of a dtype, or a little more, as
    float32 cannot tell; the largest, infinities, the NaN of all bits."""
    largest = torch.tensor(torch.finfo(half).max, dtype=half)
    bits = torch.arange(largest.view(torch.int16), 0, -397, dtype=torch.int16)  # of both parities
    number, next_lower = bits.view(half).double(), (bits - 1).view(half).double()
    beyond = number + (number - next_lower) / 2
    more = torch.nextafter(beyond, beyond + 1)
    ends = torch.tensor([largest, torch.inf, -torch.inf])
    return torch.cat([beyond, -beyond, more, -more, ends, torch.tensor([-1]).view(torch.float64)])


def fused_copies(*case):
    run(STRATEGIES["fused"](Step.of(*case)))


@needs_triton
@pytest.mark.filterwarnings("ignore:.*in cast", "ignore:Casting complex", "ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bits_of_a_dtype_convert_as_copy_does(dtype):
    ties = [halfway(half).to(dtype) for half in (torch.bfloat16, torch.float16)]
    src = torch.cat([random_values((300,), dtype, 0), *ties])
    without_denormals([src])
    dsts = [torch.zeros(src.shape, dtype=other) for other in DTYPES]
    assert_copies_or_refuses((dsts, [src] * len(dsts)), fused_copies, settle=one_nan)


@needs_triton
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[needs_gpu, pytest.mark.cuda])])
def test_lengths_around_16_bytes_and_around_a_block_aligned_and_not_and_four_strides(device):
    dsts, srcs = [], []
    for dtype in (INT8, torch.float16, INT64):
        width = dtype.itemsize
        for nbytes in (width, 8, 16 - width, 16, 16 + width, BLOCK - width, BLOCK, BLOCK + 16 + width):
            numel = max(1, nbytes // width)
            for offset in (0, 1):
                rows = random_values((2, 2 * BLOCK // width), dtype, nbytes, device)
                dst, src = rows[:, offset : offset + numel]
                dsts.append(dst)
                srcs.append(src)
    dsts.append(random_values((5, 7, 6, 4), INT64, 0, device))
    srcs.append(random_values((7, 6, 5, 8), INT32, 0, device)[..., ::2].permute(2, 0, 1, 3))
    assert_copies_or_refuses((dsts, srcs), fused_copies)


ONE, MATRIX, I64 = torch.ones(4), torch.ones(2, 8), torch.ones(8, dtype=INT64)
COMPLEX, FP8, FIVE = ONE.to(torch.complex64), ONE.to(torch.float8_e5m2), torch.ones(2, 2, 2, 2, 2)
BOTH = [  # what both take, the fused strategy and SGLang's `try_small_copy` (0.5.23)
    (I64.int(), I64),
    (I64, I64.int()),
    (torch.zeros(8_192), torch.ones(8_192)),
    (torch.ones(3, 9)[:, :4], torch.ones(3, 4)),  # rows of a wider buffer
    (MATRIX[:, ::2], torch.ones(4, 2).t()),  # a source may lie as it likes
    (MATRIX[:, 1], torch.ones(1).expand(2)),
    (ONE, torch.empty(4, device="meta")),  # a source to come
]
FUSED_ALONE = [
    (torch.zeros(8_193), torch.ones(8_193)),
    (MATRIX.t(), torch.ones(8, 2)),
    (torch.tensor(1), torch.tensor(2)),
    (MATRIX.view(2, 2, 4), torch.ones(2, 2, 4)),
    (MATRIX, torch.ones(2, 8, requires_grad=True)),
    (I64.int(), I64.short()),
    (ONE.bfloat16(), ONE),
    (ONE.double(), ONE.bool()),
    (FP8, FP8.clone()),
    (COMPLEX.clone(), COMPLEX),
]
NEITHER = [
    (ONE[:0], ONE[:0]),
    (ONE.long(), ONE),  # a float to an integer
    (ONE.bool(), ONE.byte()),
    (ONE, COMPLEX),
    (FP8, ONE),
    (COMPLEX, COMPLEX.conj()),
    (ONE, torch._neg_view(ONE)),
    (torch.empty(4, device="meta"), ONE),  # from the host
    (torch.eye(2), torch.eye(2).to_sparse()),
    (FIVE, FIVE.permute(4, 3, 2, 1, 0)),
    (ONE, ONE[:2]),
    (torch.empty(2**31, dtype=INT8, device="meta"),) * 2,
]


def test_what_is_taken_and_what_is_left_to_copy():
    """A pair that SGLang's kernel does not take sends all small ones to groups."""
    for pair in BOTH + FUSED_ALONE:
        assert describe(*pair) is not None, pair
    for dst, src in NEITHER:
        assert describe(dst, src) is None, (dst, src)
        with pytest.raises(ValueError, match="pair 1: expected one that `describe` takes"):
            FusedLaunch([ONE.clone(), dst], [ONE, src])
    for pairs, is_taken in ((BOTH, True), (FUSED_ALONE + NEITHER, False)):
        for pair in pairs:
            calls = STRATEGIES["small_copy"](Step({"seq_lens": (I64, I64 + 1), "other": pair}))
            assert ([call.op for call in calls] == ["fused"]) == is_taken, pair


@needs_triton
def test_a_launch_for_sources_to_come_serves_every_step_wherever_its_destinations_move():
    dsts, pad = [torch.zeros(3, 9, dtype=INT32)[:, :4], torch.zeros(2)], torch.ones(2, requires_grad=True)
    launch = FusedLaunch(dsts, [torch.empty(3, 4, dtype=INT64, device="meta"), pad])
    for step in range(1, 4):
        srcs = [torch.full((3, 4), step), pad]
        assert launch.fits(srcs)
        launch(srcs)
        assert same(dsts, [srcs[0].int(), pad]) and not dsts[1].requires_grad
        for dst in dsts:
            dst.zero_().share_memory_()
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
