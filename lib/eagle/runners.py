"""The two graph runners: pad to a captured batch size, copy the step's inputs into static buffers, replay.

They follow SGLang's `EAGLEDraftCudaGraphRunner` and `EAGLEDraftExtendCudaGraphRunner`, and differ in field
table (lib/eagle/fields.py) and forward pass. `strategy` says how inputs are copied (lib/strategies.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.types import Device

from lib.copies import Call, Pairs, ReplayCopies, StaticInput, grouped_dma, run
from lib.eagle.fields import Batch, DraftBatch, DraftExtendBatch, EagleConfig, Field
from lib.eagle.graph import capturer
from lib.eagle.model import DraftModel, draft_extend_forward, draft_forward
from lib.launches import Launch, launches
from lib.packed import ALIGNMENT
from lib.strategies import ROUTES, STRATEGIES, Step

SIGNATURE = attrgetter("shape", "dtype", "device")
Named = dict[str, Tensor]


class InputBuffers:
    """The static inputs of a runner's graphs, one tensor a field, for the largest captured batch size."""

    @torch.inference_mode(False)  # what is made in inference mode could not be written outside of it
    def __init__(self, config: EagleConfig, fields: list[Field], device: torch.device) -> None:
        self.fields = fields
        self.inputs = {}  # by name a `StaticInput`
        self.of_storage = {}
        for field in fields:
            where = "cpu" if field.host else device
            shape = field.shape(config.max_batch_size)
            buffer = torch.full(shape, field.pad or 0, dtype=field.dtype, device=where)
            unpadded = field.large and not field.fill_if_missing  # no real row depends on the others
            self.inputs[field.name] = StaticInput(
                buffer,
                rows=field.rows,
                pad=None if unpadded else field.pad,
                required=field.required,
                fill_if_missing=field.fill_if_missing,
                dim=field.dim,
                source_dtype=field.source_dtype,
            )
            self.of_storage[buffer.untyped_storage()._cdata] = field
        self.tensors = {name: static.buffer for name, static in self.inputs.items()}
        self.values = attrgetter(*self.inputs)

    def rows(self, batch_size: int) -> Named:
        """The rows of every field that belong to the first `batch_size` requests."""
        return {name: static.between(0, batch_size) for name, static in self.inputs.items()}

    def static_inputs(self) -> dict[str, StaticInput]:
        """The device fields for a `ReplayCopies`."""
        return {field.name: self.inputs[field.name] for field in self.fields if not field.host}

    def route(self, route: Callable, pairs: Pairs) -> list[Call]:
        """The calls of a route of ROUTES for what lies on the device, and copies in host memory."""
        on_device = []
        on_host = []
        for dst, src in pairs:
            field = self.of_storage[dst.untyped_storage()._cdata]
            if src.dtype != field.source_dtype:
                raise ValueError(f"{field.name}: expected {field.source_dtype}, got {src.dtype}")
            side = on_host if field.host else on_device
            side.append((dst, src))
        return route(on_device) + host_copies(on_host)

    def step(self, batch: Batch, captured: int) -> tuple[Step, list[Call]]:
        """The step as SGLang lays it out, views cut anew and whole buffers filled where the batch is padded;
        and what fills buffers in host memory. ValueError names the field that is not as expected."""
        step, host = Step(), Step()
        batch_size = batch.batch_size
        padded = captured > batch_size
        for field, source in zip(self.fields, self.values(batch)):
            static = self.inputs[field.name]
            rows = static.between(0, batch_size)
            comes = source is not None
            if comes or field.required:
                expected = rows.shape, field.source_dtype, rows.device
                got = SIGNATURE(source) if isinstance(source, Tensor) else type(source)
                if got != expected:
                    raise ValueError(f"{field.name}: expected {expected}, got {got}")
            side = host if field.host else step
            if padded and field.pad is not None:
                side.fills.append((static.buffer, field.pad))
            elif field.fill_if_missing and not comes:
                side.fills.append((rows, field.pad))
            if comes:
                pairs = side.large if field.large else side.small
                pairs[field.name] = rows, source
        fills = [(buffer, torch.full_like(buffer, pad)) for buffer, pad in host.fills]
        return step, host_copies(fills + host.pairs)


def host_copies(pairs: Pairs) -> list[Call]:
    return [Call("host_copy_", [dst], [src]) for dst, src in pairs]


class Producer(NamedTuple):
    """Where the sources of one captured size lie for good, and what is left to do with them."""

    inputs: Batch  # what the graph reads
    outputs: Named  # where the producer writes
    before: list[Call]  # before a replay
    inside: list[Call]  # in the graph


@dataclass(eq=False, repr=False)
class GraphRunner:
    """What both runners share. Subclasses have a `batch_class` and a `forward` pass to capture."""

    config: EagleConfig
    strategy: str | Callable = "grouped_foreach_dma"  # of STRATEGIES, or such a function; may be set anew
    device: Device = "cpu"
    # Head, KV pool and request table. None: of seeded random weights, made at the first capture, so that
    # copies and launch counts of a large preset need no gigabytes.
    model: DraftModel | None = None
    # With either of these, batches have to come from `place` or `inputs`.
    one_allocation: bool = False  # all inputs of a size in one block, copied from another by one memcpy
    copy_in_graph: bool = False  # the captured graph copies, from fixed addresses

    def __post_init__(self) -> None:
        if not callable(STRATEGIES.get(self.strategy, self.strategy)):
            raise ValueError(f"strategy: expected one of {list(STRATEGIES)}, got {self.strategy!r}")
        self.device = torch.empty(0, device=self.device).device  # "cuda" becomes "cuda:0", as on tensors
        fields = self.config.table(self.batch_class.table)
        self.buffers = InputBuffers(self.config, fields, self.device)
        self.kept = {}  # the copies of the strategies whose calls can be kept
        for name, route in ROUTES.items():
            route = partial(self.buffers.route, route)
            self.kept[name] = ReplayCopies(self.buffers.inputs, route=route)
        self.placed = self.one_allocation or self.copy_in_graph
        self.graphs = {}  # by captured size
        self.producer = cache(self._producer)
        self.placed_batch = None
        self.lent = WeakSet()  # all that `inputs` and `place` gave

    @torch.inference_mode(False)
    @torch.no_grad()
    def capture(self) -> None:
        """Capture a graph for every batch size; the first replay does where nobody did. Capturing computes:
        with padding in all buffers it writes no KV slot but 0, and what they held comes back."""
        if self.model is None:
            self.model = DraftModel.random(self.config, self.device)
        capture = capturer(self.device)
        graphs = {}
        for captured in reversed(self.config.capture_batch_sizes):
            producer = self.producer(captured)
            memory = [*producer.inputs.tensors().values(), *producer.outputs.values()]
            held = [tensor.clone() for tensor in memory]
            for name, buffer in producer.outputs.items():
                buffer.fill_(self.buffers.inputs[name].pad or 0)
            run(producer.before)

            def compute(producer=producer):
                run(producer.inside)
                return type(self).forward(self.model, producer.inputs)

            try:
                graphs[captured] = capture(compute)
            finally:
                torch._foreach_copy_(memory, held)
        self.graphs = graphs

    @torch.inference_mode(False)
    def _producer(self, captured: int) -> Producer:
        rows = self.buffers.rows(captured)
        inputs = outputs = {name: rows[name] for name in self.buffers.static_inputs()}
        calls = []
        if self.placed:
            staged, outputs = in_one_block(inputs, self.device)
            calls = grouped_dma(zip(inputs.values(), outputs.values()))
        if self.one_allocation:
            static, inputs = in_one_block(inputs, self.device)
            calls = [Call("copy_", [static], [staged])]
        return Producer(
            inputs=self.batch_class(**rows | inputs),
            outputs=rows | outputs,
            before=[] if self.copy_in_graph else calls,
            inside=calls if self.copy_in_graph else [],
        )

    @torch.no_grad()
    def inputs(self, batch_size: int) -> Batch:
        """A batch to write in place: views of where the graph's sources lie, full of padding if they have it.
        Valid until the next such call or `copy_inputs` of another; its own makes one_allocation's call."""
        producer = self.producer(self.padded_batch_size(batch_size))
        batch = self.batch_class()
        for name, buffer in producer.outputs.items():
            field = replace(self.buffers.inputs[name], buffer=buffer)
            setattr(batch, name, field.between(0, batch_size))
            if field.pad is not None:
                buffer.fill_(field.pad)
        self.placed_batch = batch
        self.lent.add(batch)
        return batch

    @torch.no_grad()
    def place(self, batch: Batch) -> Batch:
        """Write the batch where this runner's sources have to lie: as `inputs`. Raises as `copy_inputs`."""
        batch_size = batch.batch_size
        self.buffers.step(batch, self.padded_batch_size(batch_size))  # for its errors
        placed = self.inputs(batch_size)
        for name, rows in placed.tensors().items():
            source = getattr(batch, name)
            if source is None:
                setattr(placed, name, None)
            else:
                rows.copy_(source)
        return placed

    def padded_batch_size(self, batch_size: int) -> int:
        """The smallest captured batch size that holds the batch. Raises ValueError where none does."""
        for captured in self.config.capture_batch_sizes:
            if 1 <= batch_size <= captured:
                return captured
        raise ValueError(f"batch size: expected 1 to {self.config.max_batch_size}, got {batch_size}")

    def calls(self, batch: Batch) -> list[Call]:
        """What fills the buffers with this batch, padding and host fields included. ValueError: it is larger
        than the largest captured, lacks a required field, has a wrong shape, dtype or device, or does not lie
        where it has to. Raises as the strategy, too."""
        batch_size = batch.batch_size
        captured = self.padded_batch_size(batch_size)
        if batch is self.placed_batch:
            return self.producer(captured).before
        if self.placed or batch in self.lent:
            raise ValueError("batch: expected what `place` or `inputs` returned last, got another one")
        if self.strategy in self.kept:
            inputs = dict(zip(self.buffers.inputs, self.buffers.values(batch)))
            return self.kept[self.strategy].calls(inputs, batch_size, captured)
        step, on_host = self.buffers.step(batch, captured)
        strategy = STRATEGIES.get(self.strategy, self.strategy)
        return strategy(step) + on_host

    def copy_inputs(self, batch: Batch) -> None:
        """Fill the static buffers, large and host fields included. Raises as `calls`, before it writes."""
        calls = self.calls(batch)
        if batch is not self.placed_batch:
            self.placed_batch = None  # another batch lies there from here on
        run(calls)

    def launches(self, batch: Batch) -> list[Launch]:
        """What CUDA would be asked to do by `copy_inputs`."""
        return launches(self.calls(batch))

    def replay_graph(self, batch_size: int) -> NamedTuple:
        """Replay on what the buffers hold. The outputs are views of static tensors, cut to the requests."""
        captured = self.padded_batch_size(batch_size)
        if not self.graphs:
            self.capture()
        outputs = self.graphs[captured].replay()
        return outputs._make(rows[: len(rows) // captured * batch_size] for rows in outputs)

    def replay(self, batch: Batch) -> NamedTuple:
        """Copy the inputs and replay; outputs are valid until the next replay. Raises as `copy_inputs`."""
        self.copy_inputs(batch)
        return self.replay_graph(batch.batch_size)


def in_one_block(tensors: Named, device: torch.device) -> tuple[Tensor, Named]:
    """Bytes for all tensors, and views of them of their shapes and dtypes, each aligned. Starts as 0."""
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
    block = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    views = {}
    for (name, tensor), part in zip(tensors.items(), block.split(sizes)):
        views[name] = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return block, views


class EagleDraftCudaGraphRunner(GraphRunner):
    """The draft tree of a step. `replay(DraftBatch)` returns a `DraftOutput` for the batch's requests."""

    batch_class = DraftBatch
    forward = draft_forward


class EagleDraftExtendCudaGraphRunner(GraphRunner):
    """The head over a step's w rows a request. `replay(DraftExtendBatch)` returns a `DraftExtendOutput`."""

    batch_class = DraftExtendBatch
    forward = draft_extend_forward
