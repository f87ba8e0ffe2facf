"""The two graph runners: pad to a captured batch size, copy the step's inputs into static buffers, replay.

They follow SGLang's `EAGLEDraftCudaGraphRunner` and `EAGLEDraftExtendCudaGraphRunner`; what differs between
them is their field table and the forward pass they capture.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from operator import attrgetter
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lib.copies import Call, ReplayCopies, StaticInput, grouped_dma, run
from lib.eagle.fields import SEQ_LEN_FILL_VALUE, Batch, DraftBatch, DraftExtendBatch, EagleConfig, Field
from lib.eagle.graph import CudaGraph, EagerGraph, GraphBackend
from lib.eagle.model import DraftExtendOutput, DraftModel, DraftOutput, draft_extend_forward, draft_forward
from lib.launches import Launch, launches
from lib.strategies import ROUTES, STRATEGIES, Step

SIGNATURE = attrgetter("shape", "dtype", "device")
ALIGNMENT = 16  # bytes, of each field in one allocation: the widest access of a thread


class InputBuffers:
    """The static inputs of a runner's graphs, one tensor a field, for the largest captured batch size."""

    @torch.inference_mode(False)  # what is made in inference mode could not be written outside of it
    def __init__(self, config: EagleConfig, fields: tuple[Field, ...], device: torch.device) -> None:
        self.config, self.fields, self.device = config, fields, device
        self.names = [field.name for field in fields]
        self.values = attrgetter(*self.names)
        self.host_fields = [field for field in fields if field.host]
        self.host_pad = torch.tensor(SEQ_LEN_FILL_VALUE)
        self.tensors = {field.name: self._full(field, config.max_batch_size) for field in fields}
        self.expected: dict[tuple, list] = {}  # signatures, by batch size and the fields that come

    def _full(self, field: Field, batch_size: int) -> Tensor:
        dtype = field.dtype or self.config.dtype
        shape, value = self.config.shape(field, batch_size), self.config.pad_value(field)
        return torch.full(shape, value, dtype=dtype, device="cpu" if field.host else self.device)

    def rows(self, field: Field, batch_size: int) -> Tensor:
        """The rows of a field that belong to the first `batch_size` requests."""
        return self.tensors[field.name].narrow(field.dim, 0, self.config.rows(field, batch_size))

    def inputs(self, batch_size: int) -> dict[str, Tensor]:
        """What a graph captured for `batch_size` requests reads."""
        return {field.name: self.rows(field, batch_size) for field in self.fields}

    def static_inputs(self) -> dict[str, StaticInput]:
        """The device fields for a `ReplayCopies`. Large ones need no padding: no real row depends on it."""
        static = {}
        for field in self.fields:
            if not field.host:
                pad = None if field.pad is None or field.large else self.config.pad_value(field)
                buffer, rows = self.tensors[field.name], self.config.rows(field)
                static[field.name] = StaticInput(
                    buffer,
                    rows,
                    pad,
                    field.required,
                    field.fill_if_missing,
                    field.dim,
                    field.source_dtype,
                )
        return static

    def given(self, batch: Batch) -> dict[str, Tensor]:
        """The batch's tensors by name, compared with what the table expects.

        Raises ValueError, naming the field, what was expected and what came.
        """
        pairs = zip(self.names, self.values(batch))
        given = {name: tensor for name, tensor in pairs if tensor is not None}
        key = (batch.batch_size, *given)
        if key not in self.expected:
            self.expected[key] = self._signatures(batch.batch_size, given)
        expected = self.expected[key]
        if list(map(SIGNATURE, given.values())) != expected:
            self._refuse(given, expected)
        return given

    def _signatures(self, batch_size: int, given: dict[str, Tensor]) -> list[tuple]:
        signatures = []
        for field in self.fields:
            if field.name in given:
                shape = torch.Size(self.config.shape(field, batch_size))
                device = self.tensors[field.name].device
                signatures.append((shape, self.config.source_dtype(field), device))
            elif field.required:
                raise ValueError(f"{field.name}: required field is missing")
        return signatures

    def _refuse(self, given: dict[str, Tensor], expected: list[tuple]) -> None:
        for (name, tensor), signature in zip(given.items(), expected):
            if SIGNATURE(tensor) != signature:
                what, got = ("{} {} on {}".format(*s) for s in (signature, SIGNATURE(tensor)))
                raise ValueError(f"{name}: expected {what}, got {got}")

    def step(self, given: dict[str, Tensor], batch_size: int, captured: int) -> Step:
        """The step as SGLang lays it out: views cut anew, whole buffers filled where the batch is padded."""
        step = Step()
        for field in self.fields:
            if field.host:
                continue
            missing = field.name not in given
            rows = self.rows(field, batch_size)
            if not missing:
                side = step.large if field.large else step.small
                side[field.name] = (rows, given[field.name])
            if field.pad is not None and captured > batch_size:
                step.fills.append((self.tensors[field.name], self.config.pad_value(field)))
            elif missing and field.fill_if_missing:
                step.fills.append((rows, self.config.pad_value(field)))
        return step

    def host_calls(self, given: dict[str, Tensor], batch_size: int, captured: int) -> list[Call]:
        """What fills the buffers in host memory with the fields that this takes out of `given`."""
        calls = []
        for field in self.host_fields:
            buffer, source = self.tensors[field.name], given.pop(field.name, None)
            if captured > batch_size:
                calls.append(Call("host_copy_", [buffer], [self.host_pad]))
            if source is not None:
                calls.append(Call("host_copy_", [buffer[:batch_size]], [source]))
        return calls


class Producer(NamedTuple):
    """Where the sources of one captured size lie for good, and what is left to do with them.

    inputs: what the graph reads. outputs: where the producer writes. before: calls before a replay. inside:
    calls in the graph.
    """

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    before: list[Call]
    inside: list[Call]


class GraphRunner:
    """What both runners share. Subclasses name their field table and the forward pass to capture.

    Args:
        strategy: a name in `STRATEGIES`, or such a function; may be set anew at any time.
        model: head, KV pool and request table. None builds one with seeded random weights at the first capture,
            so that buffers, copies and launch counts of a large preset need no gigabytes.
        one_allocation: all inputs of a size in one block, copied from another by one memcpy, whatever the dtypes.
        copy_in_graph: the copies are part of the captured graph, from fixed addresses.
            Both take batches from `place` only.
    """

    table: ClassVar[str]
    batch_class: ClassVar[type[Batch]]

    def __init__(
        self,
        config: EagleConfig,
        strategy: str | Callable[[Step], list[Call]] = "grouped_foreach_dma",
        device: str | torch.device = "cpu",
        model: DraftModel | None = None,
        one_allocation: bool = False,
        copy_in_graph: bool = False,
    ) -> None:
        if one_allocation and copy_in_graph:
            raise ValueError("one_allocation: expected False with copy_in_graph, got both")
        self.config, self.model = config, model
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0", as on tensors
        self.buffers = InputBuffers(config, config.table(self.table), self.device)
        self.strategy = strategy
        self.one_allocation, self.copy_in_graph = one_allocation, copy_in_graph
        self.graphs: dict[int, CudaGraph | EagerGraph] = {}
        self.producers: dict[int, Producer] = {}
        self.placed_batch: Batch | None = None

    @property
    def strategy(self) -> str | Callable[[Step], list[Call]]:
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: str | Callable[[Step], list[Call]]) -> None:
        if not callable(strategy) and strategy not in STRATEGIES:
            raise ValueError(f"strategy: expected one of {list(STRATEGIES)}, got {strategy!r}")
        self._strategy = strategy
        self.step_calls = strategy if callable(strategy) else STRATEGIES[strategy]
        self.kept = None
        if strategy in ROUTES:
            self.kept = ReplayCopies(self.buffers.static_inputs(), route=ROUTES[strategy])

    @property
    def placed(self) -> bool:
        """Whether batches have to come from `place`."""
        return self.one_allocation or self.copy_in_graph

    def forward(self, inputs: dict[str, Tensor]) -> NamedTuple:
        raise NotImplementedError

    @torch.inference_mode(False)
    @torch.no_grad()
    def capture(self) -> None:
        """Capture a graph for every batch size. The first replay does it where it was not done before.

        Capturing computes: with padding in all buffers, which a capture may find full, no KV slot but 0 is written.
        """
        self.model = self.model or DraftModel.random(self.config, self.device)
        backend, graphs = GraphBackend(self.device), {}
        for captured in reversed(self.config.capture_batch_sizes):
            producer = self._producer(captured)
            held = [(t, t.clone()) for t in (*producer.inputs.values(), *producer.outputs.values())]
            for field in self.buffers.fields:
                producer.inputs[field.name].fill_(self.config.pad_value(field))
                producer.outputs[field.name].fill_(self.config.pad_value(field))

            def compute(producer=producer) -> NamedTuple:
                run(producer.inside)
                return self.forward(producer.inputs)

            try:
                graphs[captured] = backend.capture(compute)
            finally:
                for tensor, value in held:
                    tensor.copy_(value)
        self.graphs = graphs

    def _producer(self, captured: int) -> Producer:
        if captured not in self.producers:
            self.producers[captured] = self._new_producer(captured)
        return self.producers[captured]

    @torch.inference_mode(False)
    def _new_producer(self, captured: int) -> Producer:
        inputs = self.buffers.inputs(captured)
        host = {field.name: inputs[field.name] for field in self.buffers.fields if field.host}
        device = {name: tensor for name, tensor in inputs.items() if name not in host}
        if self.one_allocation:
            static, inputs = in_one_block(device)
            staged, outputs = in_one_block(device)
            return Producer(inputs | host, outputs | host, [Call("copy_", [static], [staged])], [])
        if self.copy_in_graph:
            outputs = {}
            for field in self.buffers.fields:
                if field.name in device:
                    dtype = self.config.source_dtype(field)
                    outputs[field.name] = torch.zeros_like(device[field.name], dtype=dtype)
            inside = grouped_dma((tensor, outputs[name]) for name, tensor in device.items())
            return Producer(inputs, outputs | host, [], inside)
        return Producer(inputs, inputs, [], [])

    @torch.no_grad()
    def inputs(self, batch_size: int) -> Batch:
        """A batch to write in place: views of where the graph's sources lie, padding written behind them.

        Valid until the next call, `place` or `copy_inputs` of another batch. `copy_inputs` of it makes no call,
        or what one_allocation needs.
        """
        return self._views(batch_size, dict.fromkeys(self.buffers.names))

    @torch.no_grad()
    def place(self, batch: Batch) -> Batch:
        """Play the producer: write the batch, padding included, where this runner's sources have to lie.

        Raises ValueError as `copy_inputs`. Valid as what `inputs` returns.
        """
        given = self.buffers.given(batch)
        placed = self._views(batch.batch_size, given)
        for name, source in given.items():
            getattr(placed, name).copy_(source)
        return placed

    def _views(self, batch_size: int, names: dict) -> Batch:
        captured = self.padded_batch_size(batch_size)
        outputs = self._producer(captured).outputs
        views = {}
        for field in self.buffers.fields:
            rows = self.config.rows(field, batch_size) if field.name in names else 0
            output = outputs[field.name]
            if field.pad is not None:
                padding = output.narrow(field.dim, rows, output.shape[field.dim] - rows)
                padding.fill_(self.config.pad_value(field))
            if field.name in names:
                views[field.name] = output.narrow(field.dim, 0, rows)
        self.placed_batch = self.batch_class(**views)
        return self.placed_batch

    def padded_batch_size(self, batch_size: int) -> int:
        """The smallest captured batch size that holds the batch. Raises ValueError where none does."""
        sizes = self.config.capture_batch_sizes
        if not 1 <= batch_size <= sizes[-1]:
            raise ValueError(f"batch size: expected 1 to {sizes[-1]}, the largest captured, got {batch_size}")
        return sizes[bisect_left(sizes, batch_size)]

    def calls(self, batch: Batch) -> list[Call]:
        """What fills the buffers with this batch, padding and host fields included.

        Raises ValueError for a batch larger than the largest captured, a missing required field, a wrong shape,
        dtype or device, and for one that `place` did not return where it has to; and a strategy's own refusal.
        """
        captured = self.padded_batch_size(batch.batch_size)
        if batch is self.placed_batch:
            return self._producer(captured).before
        if self.placed:
            raise ValueError("batch: expected what `place` returned last, got one with sources elsewhere")
        given = self.buffers.given(batch)
        on_host = self.buffers.host_calls(given, batch.batch_size, captured)
        if self.kept is not None:
            return self.kept.calls(given, batch.batch_size, captured) + on_host
        return self.step_calls(self.buffers.step(given, batch.batch_size, captured)) + on_host

    def copy_inputs(self, batch: Batch) -> None:
        """Fill the static buffers, large and host fields included. Raises as `calls`; nothing is written then."""
        calls = self.calls(batch)
        if batch is not self.placed_batch:
            self.placed_batch = None  # another batch lies there from here on
        run(calls)

    def launches(self, batch: Batch) -> list[Launch]:
        """What CUDA would be asked to do by `copy_inputs`."""
        return launches(self.calls(batch))

    def replay_graph(self, batch_size: int) -> NamedTuple:
        """Replay on what the buffers hold. The outputs are views of static tensors, cut to the requests."""
        if not self.graphs:
            self.capture()
        captured = self.padded_batch_size(batch_size)
        outputs = self.graphs[captured].replay()
        return type(outputs)(*(t[: t.shape[0] // captured * batch_size] for t in outputs))

    def replay(self, batch: Batch) -> NamedTuple:
        """Copy the inputs and replay; outputs are valid until the next replay. Raises as `copy_inputs`."""
        self.copy_inputs(batch)
        return self.replay_graph(batch.batch_size)


def in_one_block(tensors: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Bytes for all tensors, and views of them of their shapes and dtypes, each aligned. Starts as 0."""
    ends = list(accumulate(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in tensors.values()))
    block = torch.zeros(ends[-1], dtype=torch.uint8, device=next(iter(tensors.values())).device)
    views = {}
    for (name, t), end in zip(tensors.items(), ends):
        start = end - -(-t.nbytes // ALIGNMENT) * ALIGNMENT
        views[name] = block[start : start + t.nbytes].view(t.dtype).view(t.shape)
    return block, views


class EagleDraftCudaGraphRunner(GraphRunner):
    """The draft tree of a step. `replay(DraftBatch)` returns a `DraftOutput` for the batch's requests."""

    table = "draft"
    batch_class = DraftBatch

    def forward(self, inputs: dict[str, Tensor]) -> DraftOutput:
        return draft_forward(self.model, inputs)


class EagleDraftExtendCudaGraphRunner(GraphRunner):
    """The head over a step's w rows a request. `replay(DraftExtendBatch)` returns a `DraftExtendOutput`."""

    table = "draft_extend"
    batch_class = DraftExtendBatch

    def forward(self, inputs: dict[str, Tensor]) -> DraftExtendOutput:
        return draft_extend_forward(self.model, inputs)
