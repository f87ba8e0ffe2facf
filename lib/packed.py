"""Inputs of a replay that start on the host: one pinned block, one upload. Needs torch and numpy alone.

packed = PackedInputs({"input_ids": ((64,), torch.int64, 0), "slots": ((64,), torch.int32, -1)}, "cuda")
# Capture the graph on packed.device["input_ids"][:batch_size] and so on. Then, every step:
with packed.step() as host:
    host["input_ids"][:n] = tokens
graph.replay()  # on the stream that was current when the step ended
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import numpy as np
import torch

ALIGNMENT = 16  # bytes: the widest access of a CUDA thread
BLOCKS = 2  # a step waits for the upload so many steps back: more for a host that runs further ahead


class HostFields(dict):
    """Name -> numpy view of the block being written; empty once its step is over."""

    def __missing__(self, name: str) -> np.ndarray:
        expected = f"one of {', '.join(self)}" if self else "an open step, this one is over"
        raise LookupError(f"{name}: expected {expected}")

    def __setitem__(self, name: str, values) -> None:
        self[name][...] = values  # into the view: in its place they would never be uploaded

    update = __ior__ = None  # which go past __setitem__


class PackedInputs:
    """Static buffers in one block of device memory, filled from a ring of blocks on the host.

    `fields`: name -> (shape, dtype, pad); rows left unwritten hold the pad, or nothing defined if it is None.
    `device`: name -> view at a fixed address, all uploaded every step. After a step the host's views are
    read-only until lent again (slices that were kept are not: numpy gives each its own flag).
    """

    @torch.inference_mode(False)  # what is made in inference mode could not be written outside of it
    def __init__(self, fields: dict[str, tuple], device: torch.device | str) -> None:
        self._fields = {name: _field(name, *field) for name, field in fields.items()}
        self._pads = {name: pad for name, (_, _, pad) in fields.items() if pad is not None}
        self._rooms = [-(-field.nbytes // ALIGNMENT) * ALIGNMENT for field in self._fields.values()]
        self._memory = torch.zeros(sum(self._rooms), dtype=torch.uint8, device=device)
        self._streams = torch.get_device_module(self._memory.device)
        self.device = self._views(self._memory)
        self._ring = cycle([self._block() for _ in range(BLOCKS)])
        self._host = HostFields()

    def _views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        views = {}
        for room, (name, field) in zip(memory.split(self._rooms), self._fields.items()):
            views[name] = room[: field.nbytes].view(field.dtype).view(field.shape)
        return views

    def _block(self) -> tuple:
        pinned = self._memory.is_cuda
        memory = torch.zeros(len(self._memory), dtype=torch.uint8, pin_memory=pinned)
        views = {}
        for name, view in self._views(memory).items():
            views[name] = view.numpy()[...]  # numpy makes a view writeable again only if its base is
        return memory, views, self._streams.Event()  # of its last upload

    @contextmanager
    def step(self) -> Iterator[HostFields]:
        """Lends the views of a block that no upload reads, pads written. Uploads it unless an error came."""
        if self._host:
            raise RuntimeError("a step is open: leave it before the next one")
        memory, views, event = next(self._ring)
        event.synchronize()
        for view in views.values():
            view.setflags(True)
        for name, pad in self._pads.items():
            views[name].fill(pad)
        dict.update(self._host, views)
        try:
            yield self._host
        finally:
            self._host.clear()
            for view in views.values():
                view.setflags(False)
        self._memory.copy_(memory, non_blocking=True)
        stream = self._streams.current_stream(self._memory.device)
        event.record(stream)


def _field(name: str, shape: tuple, dtype: torch.dtype, pad: float | None) -> torch.Tensor:
    """A tensor like the field. ValueError if there can be none, on the host or of that pad."""
    pad = pad or 0
    try:
        field = torch.full(shape, pad, dtype=dtype)
        exact = {pad}.issuperset(field.numpy().flat) or dtype.is_floating_point
    except (TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name}: expected a shape, a dtype that numpy has and a pad: {error}") from error
    if not exact:
        raise ValueError(f"{name}: expected a pad that {dtype} can hold, got {pad}")
    return field
