"""PackedInputs: pads, the ring of blocks, and everything that is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.packed import BLOCKS, PackedInputs

FIELDS = {
    "input_ids": ((8,), torch.int64, 0),
    "slots": ((8,), torch.int32, -1),
    "tables": ((8, 3), torch.int32, None),
    "weights": ((3,), torch.float16, 0.5),
    "masks": ((5,), torch.bool, True),
}


@given(st.lists(st.integers(0, 8), min_size=1, max_size=6), st.randoms())
def test_a_step_leaves_what_was_written_and_pads(rows, random):
    with torch.inference_mode(random.random() < 0.5):  # what is made in it serves outside
        packed = PackedInputs(FIELDS, "cpu")
    device = packed.device
    assert {name: (tuple(view.shape), view.dtype, FIELDS[name][2]) for name, view in device.items()} == FIELDS
    assert len({view.untyped_storage().data_ptr() for view in device.values()}) == 1
    assert all(view.storage_offset() * view.itemsize % 16 == 0 for view in device.values())
    addresses = [view.data_ptr() for view in device.values()]
    for n in rows:
        tokens = [random.randrange(2**62) for _ in range(n)]
        with packed.step() as host:
            host["input_ids"][:n] = tokens
            host["slots"][:n] = n
            host["tables"][:n, :2] = [n, -n]
        assert device["input_ids"].tolist() == tokens + [0] * (8 - n)
        assert device["slots"].tolist() == [n] * n + [-1] * (8 - n)
        assert device["tables"][:n, :2].tolist() == [[n, -n]] * n
        assert device["weights"].tolist() == [0.5] * 3 and device["masks"].all()
    assert addresses == [view.data_ptr() for view in device.values()]


def test_a_block_in_flight_is_never_overwritten_nor_lent(monkeypatch):
    """With an event whose upload is over only when somebody waits for it, as on a busy GPU."""
    in_flight, lent = {}, {}

    def check():
        for upload in in_flight.values():
            for name, (view, sent) in upload.items():
                assert np.array_equal(view, sent) and not np.shares_memory(view, lent.get(name, sent))

    class LateEvent:
        def record(self, stream):
            in_flight[self] = {name: (view, view.copy()) for name, view in lent.items()}
            lent.clear()

        def synchronize(self):
            check()
            in_flight.pop(self, None)

    monkeypatch.setattr(torch.cpu, "Event", LateEvent)
    packed = PackedInputs(FIELDS, "cpu")
    for step in range(9):
        with packed.step() as host:
            lent.update(host)
            check()
            # Nobody waited for the upload of the step just before: that is what a ring is for.
            assert len(in_flight) == min(step, BLOCKS - 1)
            for view in host.values():
                view.fill(step)
            check()


def test_writing_outside_a_step_or_a_field_is_refused_and_an_error_uploads_nothing():
    packed = PackedInputs(FIELDS, "cpu")
    with packed.step() as host:
        first = host["slots"]
        host["slots"] = np.arange(8)
        host["weights"] += 1
    with pytest.raises(LookupError, match=r"slots: .*over"):
        host["slots"]
    with pytest.raises(ZeroDivisionError), packed.step() as host:
        with pytest.raises(ValueError, match="read-only"):
            first[0] = 1
        with pytest.raises(LookupError, match="slot: expected one of input_ids, slots"):
            host["slot"] = np.arange(8)
        with pytest.raises(ValueError, match="broadcast"):
            host["input_ids"] = [1, 2, 3]
        with pytest.raises(TypeError):  # it would go past the views
            host.update(slots=np.arange(8))
        host["slots"][:] = 7
        raise ZeroDivisionError
    for _ in range(3):
        with pytest.raises(RuntimeError, match="a step is open"), packed.step(), packed.step():
            pass
    assert packed.device["slots"].tolist() == list(range(8))
    assert packed.device["weights"].tolist() == [1.5] * 3
    with packed.step() as host:
        host["slots"][:2] = 6
    assert packed.device["slots"].tolist() == [6, 6] + [-1] * 6


NO_NUMPY_DTYPE = [((4,), torch.bfloat16, 0), ((4,), "int64", 0)]
NO_SHAPE = [((-4,), torch.int64, 0), ((2.5,), torch.int64, 0), (4, torch.int64, 0)]
NO_PAD = [(torch.int64, pad) for pad in (1.5, float("nan"), 2**70, "zero")]
NO_PAD = [((4,), *pad) for pad in (*NO_PAD, (torch.uint8, -1), (torch.bool, 2))]


@pytest.mark.parametrize("field", NO_NUMPY_DTYPE + NO_SHAPE + NO_PAD, ids=str)
def test_a_field_that_cannot_be_is_refused_by_name(field):
    with pytest.raises(ValueError, match=r"^positions: expected"):
        PackedInputs({"input_ids": ((4,), torch.int64, 0), "positions": field}, "cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_every_step_reaches_its_own_replay():
    packed = PackedInputs(FIELDS, "cuda")
    seen = torch.zeros(200, dtype=torch.int64, device="cuda")
    for step in range(200):
        torch.cuda._sleep(200_000)  # the host runs ahead
        with packed.step() as host:
            host["input_ids"][0] = step
        seen[step] = packed.device["input_ids"][0]
    assert seen.tolist() == list(range(200))
