"""The two graph runners: pad to a captured batch size, copy the step's inputs into static buffers, replay.

They follow SGLang's `EAGLEDraftCudaGraphRunner` and `EAGLEDraftExtendCudaGraphRunner`; what differs between
them is their field table (lib/eagle/fields.py) and the forward pass they capture. How inputs are copied is
the runner's `strategy` (lib/strategies.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter
from typing import ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lib.copies import Call, ReplayCopies, StaticInput, grouped_dma, run
from lib.eagle.fields import Batch, DraftBatch, DraftExtendBatch, EagleConfig, Field
from lib.eagle.graph import CudaGraph, EagerGraph, GraphBackend
from lib.eagle.model import DraftExtendOutput, DraftModel, DraftOutput, draft_extend_forward, draft_forward
from lib.launches import Launch, launches
from lib.strategies import ROUTES, STRATEGIES, Step

SIGNATURE = attrgetter("shape", "dtype", "device")
ALIGNMENT = 16  # bytes, of each field in one allocation: the widest access of a thread
Named = dict[str, Tensor]
Strategy = str | Callable[[Step], list[Call]]


class InputBuffers:
    """The static inputs of a runner's graphs, one tensor a field, for the largest captured batch size."""

    @torch.inference_mode(False)  # what is made in inference mode could not be written outside of it
    def __init__(self, config: EagleConfig, fields: tuple[Field, ...], device: torch.device) -> None:
        self.config = config
        self.fields = fields
        self.names = [field.name for field in fields]
        self.values = attrgetter(*self.names)
        self.tensors: Named = {}
        self.host_pads: Named = {}
        self.expected: dict[tuple, list] = {}  # signatures, by batch size and the fields that come
        for field in fields:
            shape = config.shape(field, config.max_batch_size)
            pad = torch.tensor(config.pad_value(field), dtype=field.dtype or config.dtype)
            if field.host:
                self.host_pads[field.name] = pad
            self.tensors[field.name] = pad.to("cpu" if field.host else device).repeat(shape)

    def rows(self, field: Field, batch_size: int) -> Tensor:
        """The rows of a field that belong to the first `batch_size` requests."""
        return self.tensors[field.name].narrow(field.dim, 0, self.config.rows(field, batch_size))

    def inputs(self, batch_size: int) -> Named:
        """What a graph captured for `batch_size` requests reads."""
        return {field.name: self.rows(field, batch_size) for field in self.fields}

    def static_inputs(self) -> dict[str, StaticInput]:
        """The device fields for a `ReplayCopies`. Large ones need no padding: no real row depends on it."""
        static = {}
        for field in self.fields:
            if field.host:
                continue
            unread = field.pad is None or (field.large and not field.fill_if_missing)
            static[field.name] = StaticInput(
                self.tensors[field.name],
                rows=self.config.rows(field),
                pad=None if unread else self.config.pad_value(field),
                required=field.required,
                fill_if_missing=field.fill_if_missing,
                dim=field.dim,
                source_dtype=field.source_dtype,
            )
        return static

    def given(self, batch: Batch) -> Named:
        """The batch's tensors by name, compared with what the table expects.

        Raises ValueError, naming the field, what was expected and what came.
        """
        given = {}
        for name, tensor in zip(self.names, self.values(batch)):
            if tensor is not None:
                given[name] = tensor
        key = (batch.batch_size, *given)
        expected = self.expected.get(key)
        if expected is None:
            expected = self.expected[key] = self._signatures(batch.batch_size, given)
        try:
            as_expected = list(map(SIGNATURE, given.values())) == expected
        except AttributeError:  # of what is no tensor
            as_expected = False
        if not as_expected:
            self._refuse(given, expected)
        return given

    def _signatures(self, batch_size: int, given: Named) -> list[tuple]:
        signatures = []
        for field in self.fields:
            if field.name in given:
                shape = torch.Size(self.config.shape(field, batch_size))
                device = self.tensors[field.name].device
                signatures.append((shape, self.config.source_dtype(field), device))
            elif field.required:
                raise ValueError(f"{field.name}: required field is missing")
        return signatures

    def _refuse(self, given: Named, expected: list[tuple]) -> None:
        for (name, tensor), signature in zip(given.items(), expected):
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")
            got = SIGNATURE(tensor)
            if got != signature:
                raise ValueError("{}: expected {} {} on {}, got {} {} on {}".format(name, *signature, *got))

    def step(self, given: Named, batch_size: int, captured: int) -> Step:
        """The step as SGLang lays it out: views cut anew, whole buffers filled where the batch is padded."""
        step = Step()
        for field in self.fields:
            if field.host:
                continue
            rows = self.rows(field, batch_size)
            source = given.get(field.name)
            if source is not None:
                side = step.large if field.large else step.small
                side[field.name] = rows, source
            if field.pad is not None and captured > batch_size:
                step.fills.append((self.tensors[field.name], self.config.pad_value(field)))
            elif source is None and field.fill_if_missing:
                step.fills.append((rows, self.config.pad_value(field)))
        return step

    def host_calls(self, given: Named, batch_size: int, captured: int) -> list[Call]:
        """What fills the buffers in host memory with the fields that this takes out of `given`."""
        calls = []
        for name, pad in self.host_pads.items():
            buffer = self.tensors[name]
            if captured > batch_size:
                calls.append(Call("host_copy_", [buffer], [pad]))
            if name in given:
                calls.append(Call("host_copy_", [buffer[:batch_size]], [given.pop(name)]))
        return calls


class Producer(NamedTuple):
    """Where the sources of one captured size lie for good, and what is left to do with them.

    inputs: what the graph reads. outputs: where the producer writes. before: calls before a replay. inside:
    calls in the graph.
    """

    inputs: Named
    outputs: Named
    before: list[Call]
    inside: list[Call]


class GraphRunner:
    """What both runners share. Subclasses name their field table and the forward pass to capture.

    Args:
        strategy: a name in `STRATEGIES`, or such a function; may be set anew at any time.
        model: head, KV pool and request table. None builds one with seeded random weights at the first
            capture, so that buffers, copies and launch counts of a large preset need no gigabytes.
        one_allocation: all inputs of a size in one block, copied from another by one memcpy.
        copy_in_graph: the copies are part of the captured graph, from fixed addresses.
            Both take batches from `place` and `inputs` only.
    """

    batch_class: ClassVar[type[Batch]]
    table: ClassVar[str]  # its name in a layout

    def __init__(
        self,
        config: EagleConfig,
        strategy: Strategy = "grouped_foreach_dma",
        device: str | torch.device = "cpu",
        model: DraftModel | None = None,
        one_allocation: bool = False,
        copy_in_graph: bool = False,
    ) -> None:
        if one_allocation and copy_in_graph:
            raise ValueError("one_allocation: expected False with copy_in_graph, got both")
        self.config = config
        self.model = model
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0", as on tensors
        self.buffers = InputBuffers(config, config.table(self.table), self.device)
        self.strategy = strategy
        self.one_allocation = one_allocation
        self.copy_in_graph = copy_in_graph
        self.graphs: dict[int, CudaGraph | EagerGraph] = {}
        self.producers: dict[int, Producer] = {}
        self.placed_batch: Batch | None = None
        self.lent: WeakValueDictionary[int, Batch] = WeakValueDictionary()  # all that `inputs`, `place` gave

    @property
    def strategy(self) -> Strategy:
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: Strategy) -> None:
        if not callable(strategy) and strategy not in STRATEGIES:
            raise ValueError(f"strategy: expected one of {list(STRATEGIES)}, got {strategy!r}")
        self._strategy = strategy
        self.step_calls = STRATEGIES.get(strategy, strategy)
        self.kept = None
        if strategy in ROUTES:
            self.kept = ReplayCopies(self.buffers.static_inputs(), route=ROUTES[strategy])

    @property
    def placed(self) -> bool:
        """Whether batches have to come from `place`."""
        return self.one_allocation or self.copy_in_graph

    def forward(self, inputs: Named) -> NamedTuple:
        raise NotImplementedError

    @torch.inference_mode(False)
    @torch.no_grad()
    def capture(self) -> None:
        """Capture a graph for every batch size. The first replay does it where it was not done before.

        Capturing computes. With padding in all buffers it writes no KV slot but 0; what they held comes back.
        """
        self.model = self.model or DraftModel.random(self.config, self.device)
        backend = GraphBackend(self.device)
        graphs = {}
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
            inside = grouped_dma(zip(device.values(), outputs.values()))
            return Producer(inputs, outputs | host, [], inside)
        return Producer(inputs, inputs, [], [])

    @torch.no_grad()
    def inputs(self, batch_size: int) -> Batch:
        """A batch to write in place: views of where the graph's sources lie, padding written behind them.

        Valid until the next such call, or `copy_inputs` of another batch. `copy_inputs` of it makes no call
        but the one of one_allocation.
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
        self.lent[id(self.placed_batch)] = self.placed_batch
        return self.placed_batch

    def padded_batch_size(self, batch_size: int) -> int:
        """The smallest captured batch size that holds the batch. Raises ValueError where none does."""
        sizes = self.config.capture_batch_sizes
        if not 1 <= batch_size <= sizes[-1]:
            raise ValueError(f"batch size: expected 1 to {sizes[-1]}, the largest captured, got {batch_size}")
        return sizes[bisect_left(sizes, batch_size)]

    def calls(self, batch: Batch) -> list[Call]:
        """What fills the buffers with this batch, padding and host fields included.

        Raises ValueError for a batch larger than the largest captured, a missing required field, a wrong
        shape, dtype or device, one that `place` did not return where it has to; and as the strategy does.
        """
        batch_size = batch.batch_size
        captured = self.padded_batch_size(batch_size)
        if batch is self.placed_batch:
            return self._producer(captured).before
        if self.placed or id(batch) in self.lent:
            raise ValueError("batch: expected what `place` or `inputs` returned last, got another one")
        given = self.buffers.given(batch)
        on_host = self.buffers.host_calls(given, batch_size, captured)
        if self.kept is not None:
            return self.kept.calls(given, batch_size, captured) + on_host
        return self.step_calls(self.buffers.step(given, batch_size, captured)) + on_host

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
        if not self.graphs:
            self.capture()
        captured = self.padded_batch_size(batch_size)
        outputs = self.graphs[captured].replay()
        cut = []
        for tensor in outputs:
            rows = len(tensor) // captured * batch_size
            cut.append(tensor[:rows])
        return outputs._make(cut)

    def replay(self, batch: Batch) -> NamedTuple:
        """Copy the inputs and replay; outputs are valid until the next replay. Raises as `copy_inputs`."""
        self.copy_inputs(batch)
        return self.replay_graph(batch.batch_size)


def in_one_block(tensors: Named) -> tuple[Tensor, Named]:
    """Bytes for all tensors, and views of them of their shapes and dtypes, each aligned. Starts as 0."""
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
    device = next(iter(tensors.values())).device
    block = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    views = {}
    for (name, tensor), part in zip(tensors.items(), block.split(sizes)):
        views[name] = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return block, views


class EagleDraftCudaGraphRunner(GraphRunner):
    """The draft tree of a step. `replay(DraftBatch)` returns a `DraftOutput` for the batch's requests."""

    batch_class = DraftBatch
    table = DraftBatch.table

    def forward(self, inputs: Named) -> DraftOutput:
        return draft_forward(self.model, inputs)


class EagleDraftExtendCudaGraphRunner(GraphRunner):
    """The head over a step's w rows a request. `replay(DraftExtendBatch)` returns a `DraftExtendOutput`."""

    batch_class = DraftExtendBatch
    table = DraftExtendBatch.table

    def forward(self, inputs: Named) -> DraftExtendOutput:
        return draft_extend_forward(self.model, inputs)
