"""The two graph runners: pad to a captured batch size, copy the step's inputs into static buffers, replay.

They follow SGLang's `EAGLEDraftCudaGraphRunner` and `EAGLEDraftExtendCudaGraphRunner`; what differs between
them is their field table and the forward pass they capture.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lib.eagle.fields import Batch, EagleConfig, Field
from lib.eagle.graph import CudaGraph, EagerGraph, GraphBackend
from lib.eagle.model import DraftExtendOutput, DraftModel, DraftOutput, draft_extend_forward, draft_forward
from lib.grouped_copy import CopyPlan
from lib.routes import Launch, copy_launch, fill_launch
from lib.strategies import STRATEGIES, FixedPlan, Strategy


class InputBuffers:
    """The static inputs of a runner's graphs, one tensor a field, for the largest captured batch size."""

    @torch.inference_mode(False)  # what is made in inference mode could not be written outside of it
    def __init__(self, config: EagleConfig, fields: tuple[Field, ...], device: torch.device) -> None:
        self.config, self.fields, self.device = config, fields, device
        self.device_fields = [f for f in fields if not f.host]
        self.tensors = {f.name: self._allocate(f) for f in fields}

    def _allocate(self, field: Field) -> Tensor:
        return torch.full(
            self.config.shape(field, self.config.max_batch_size),
            0 if field.pad is None else self.config.pad_value(field),
            dtype=field.dtype or self.config.dtype,
            device="cpu" if field.host else self.device,
        )

    def rows(self, field: Field, batch_size: int) -> Tensor:
        """The rows of a field that belong to the first `batch_size` requests."""
        return self.tensors[field.name][: self.config.shape(field, batch_size)[0]]

    def inputs(self, batch_size: int) -> dict[str, Tensor]:
        """What a graph captured for `batch_size` requests reads."""
        return {f.name: self.rows(f, batch_size) for f in self.fields}

    def check(self, batch: Batch) -> None:
        """Raises ValueError, naming the field, what was expected and what came."""
        bs, c = batch.batch_size, self.config
        if not 1 <= bs <= c.max_batch_size:
            raise ValueError(f"batch size: expected 1 to {c.max_batch_size}, the largest captured, got {bs}")
        for f in self.fields:
            t = getattr(batch, f.name)
            if t is None:
                if f.required:
                    raise ValueError(f"{f.name}: required field is missing")
                continue
            shape, dtype = c.shape(f, bs), f.source_dtype or f.dtype or c.dtype
            device = self.tensors[f.name].device
            if t.shape != shape or t.dtype is not dtype or t.device != device:
                raise ValueError(
                    f"{f.name}: expected {shape} {dtype} on {device} for {bs} requests, "
                    f"got {tuple(t.shape)} {t.dtype} on {t.device}"
                )
        if (longest := int(batch.seq_lens_cpu.max())) > c.max_context_len:
            raise ValueError(f"seq_lens_cpu: expected at most {c.max_context_len} tokens, got {longest}")

    def fills(self, batch: Batch, padded: bool) -> list[tuple[Tensor, int]]:
        """(tensor, value) to fill before the copies: whole buffers for padding, rows of missing optionals."""
        whole = [
            (self.tensors[f.name], f) for f in self.fields if padded and f.pad is not None and not f.host
        ]
        missing = [
            (self.rows(f, batch.batch_size), f)
            for f in self.fields
            if not padded and f.fill_if_missing and getattr(batch, f.name) is None
        ]
        return [(t, self.config.pad_value(f)) for t, f in whole + missing]

    def pairs(self, batch: Batch, large: bool | None = None) -> tuple[list[Tensor], list[Tensor], list[str]]:
        """(dsts, srcs, names) of the batch's device fields; `large` picks the large or the small ones."""
        bs = batch.batch_size
        chosen = [
            f
            for f in self.fields
            if not f.host and large in (None, f.large) and getattr(batch, f.name) is not None
        ]
        return (
            [self.rows(f, bs) for f in chosen],
            [getattr(batch, f.name) for f in chosen],
            [f.name for f in chosen],
        )

    @cached_property
    def pad_rows(self) -> dict[str, Tensor]:
        """Rows of padding to copy from, made once, in the dtype of the field's sources to share their group.

        Large fields need none: no real row depends on padding.
        """
        return {
            f.name: torch.full_like(self.tensors[f.name], self.config.pad_value(f), dtype=f.source_dtype)
            for f in self.fields
            if f.pad is not None and not f.host and not f.large
        }

    def pads(self, batch: Batch, captured: int) -> list[tuple[Tensor, Tensor]]:
        """(dst, src) of the rows of padding, and of missing optional fields that need their value."""
        found = []
        for f in self.fields:
            missing, padded = getattr(batch, f.name) is None, captured > batch.batch_size
            if f.name in self.pad_rows and (padded or (missing and f.fill_if_missing)):
                rows = slice(0 if missing else self.config.shape(f, batch.batch_size)[0], None)
                dst = self.rows(f, captured)[rows]
                found.append((dst, self.pad_rows[f.name][: len(dst)]))
        return found

    def copy_host_fields(self, batch: Batch, padded: bool) -> None:
        for f in self.fields:
            if f.host:
                if padded:
                    self.tensors[f.name].fill_(self.config.pad_value(f))
                self.rows(f, batch.batch_size).copy_(getattr(batch, f.name))


class GraphRunner:
    """What both runners share. Subclasses name their field table and the forward pass to capture.

    Args:
        config: sizes, capture batch sizes and layout.
        strategy: a name in `STRATEGIES`, or a strategy object. Those that write from fixed
            addresses take batches from `place` only.
        device: where buffers, model and graphs live.
        model: head, KV pool and request table. None builds one with seeded random weights at the first
            capture, so that buffers, copies and launch counts of a large preset need no gigabytes.
    """

    table: ClassVar[str]

    def __init__(
        self,
        config: EagleConfig,
        strategy: str | Strategy = "grouped_foreach_dma",
        device: str | torch.device = "cpu",
        model: DraftModel | None = None,
    ) -> None:
        self.config, self.model = config, model
        if isinstance(strategy, str) and strategy not in STRATEGIES:
            raise ValueError(f"strategy: expected one of {list(STRATEGIES)}, got {strategy!r}")
        self.strategy = STRATEGIES[strategy] if isinstance(strategy, str) else strategy
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0", as on tensors
        self.buffers = InputBuffers(config, config.table(self.table), self.device)
        self.graphs: dict[int, CudaGraph | EagerGraph] = {}
        self.fixed = getattr(self.strategy, "fixed_addresses", False)
        self.plans: dict[tuple, CopyPlan] = {}  # by batch size and the fields that come
        self.fixed_plans: dict[int, FixedPlan] = {}  # by captured batch size
        # The padding of the plan that ran last is clean: only its own rows were written since. Another plan
        # and a graph for another size share the buffers; whoever else writes to them sets this to None.
        self.last_plan: CopyPlan | FixedPlan | None = None

    def forward(self, inputs: dict[str, Tensor]) -> NamedTuple:
        raise NotImplementedError

    @torch.inference_mode(False)
    @torch.no_grad()
    def capture(self) -> None:
        """Capture a graph for every batch size. The first replay does it where it was not done before."""
        self.model = self.model or DraftModel.random(self.config, self.device)
        backend = GraphBackend(self.device)
        for bs in reversed(self.config.capture_batch_sizes):
            inputs, record = self.buffers.inputs(bs), None
            if self.fixed:
                plan = self._fixed_plan(bs)
                inputs |= zip((f.name for f in self.buffers.device_fields), plan.dsts)
                record = plan.record

            def compute(inputs=inputs, record=record) -> NamedTuple:
                if record is not None:
                    record()
                return self.forward(inputs)

            self.graphs[bs] = backend.capture(compute)

    @torch.no_grad()
    def place(self, batch: Batch) -> Batch:
        """Play the producer: the batch, written to where the strategy wants it, padding included.

        Of a strategy that takes sources anywhere, the batch itself. Else valid until the next call. Raises
        ValueError as `copy_inputs` does, and where the strategy cannot convert what the layout converts.
        """
        self.buffers.check(batch)
        if not self.fixed:
            return batch
        placed = {}
        outputs = self._fixed_plan(self.padded_batch_size(batch.batch_size)).outputs
        for f, output in zip(self.buffers.device_fields, outputs):
            source = getattr(batch, f.name)
            rows = 0 if source is None else len(source)
            if f.pad is not None:
                output[rows:].fill_(self.config.pad_value(f))
            if source is not None:
                placed[f.name] = output[:rows].copy_(source)
        return replace(batch, **placed)

    @torch.inference_mode(False)
    def _fixed_plan(self, captured: int) -> FixedPlan:
        if captured not in self.fixed_plans:
            c, fields = self.config, self.buffers.device_fields
            dsts = [self.buffers.rows(f, captured) for f in fields]
            if hasattr(self.strategy, "allocate"):
                shapes, dtypes = [dst.shape for dst in dsts], [dst.dtype for dst in dsts]
                dsts = self.strategy.allocate(shapes, dtypes, self.device)
            src_dtypes = [f.source_dtype or f.dtype or c.dtype for f in fields]
            plan = self.strategy.plan(dsts, src_dtypes, [f.name for f in fields])
            for f, *tensors in zip(fields, plan.dsts, plan.outputs):
                for t in tensors:  # as the buffers are from the start: a graph is captured on valid inputs
                    if t.data_ptr() != self.buffers.tensors[f.name].data_ptr():
                        t.fill_(0 if f.pad is None else c.pad_value(f))
            self.fixed_plans[captured] = plan
        return self.fixed_plans[captured]

    def _plan(self, batch: Batch) -> tuple[CopyPlan | FixedPlan, list[Tensor]]:
        """The plan that serves a batch, made for the first of its kind, and the batch's tensors in order."""
        captured = self.padded_batch_size(batch.batch_size)
        if self.fixed:
            plan = self._fixed_plan(captured)
            srcs = [getattr(batch, f.name) for f in self.buffers.device_fields]
            return plan, [output if src is None else src for src, output in zip(srcs, plan.outputs)]
        fields = [(f.name, getattr(batch, f.name)) for f in self.buffers.device_fields]
        srcs = [t for _, t in fields if t is not None]
        key = (batch.batch_size, *(name for name, t in fields if t is not None))
        if key not in self.plans:
            dsts, _, names = self.buffers.pairs(batch)
            pads = self.buffers.pads(batch, captured)
            self.plans[key] = self.strategy.plan(dsts, [src.dtype for src in srcs], names, pads)
        return self.plans[key], srcs

    def padded_batch_size(self, batch_size: int) -> int:
        """The smallest captured batch size that holds the batch. Raises ValueError where none does."""
        sizes = self.config.capture_batch_sizes
        if not 1 <= batch_size <= sizes[-1]:
            raise ValueError(f"batch size: expected 1 to {sizes[-1]}, the largest captured, got {batch_size}")
        return sizes[bisect_left(sizes, batch_size)]

    def copy_inputs(self, batch: Batch) -> None:
        """Fill the padding and copy the batch into the static buffers, large fields and host fields included.

        Raises:
            ValueError: a batch larger than the largest captured, a missing required field, a wrong shape,
                dtype or device (`InputBuffers.check`); nothing is written then.
            Exception: a strategy's own refusal; of the batch nothing is written then. Padding may be, which
                SGLang fills first, too; a plan writes nothing.
        """
        self.buffers.check(batch)
        padded = self.padded_batch_size(batch.batch_size) > batch.batch_size
        if hasattr(self.strategy, "plan"):
            plan, srcs = self._plan(batch)
            plan(srcs, constants=plan is not self.last_plan)
            self.last_plan = plan
            self.buffers.copy_host_fields(batch, padded)
            return
        outside = self.strategy.large_outside
        with torch.no_grad():  # a source that autograd follows must not make it follow a static buffer
            for tensor, value in self.buffers.fills(batch, padded):
                tensor.fill_(value)
            self.strategy(*self.buffers.pairs(batch, large=False if outside else None))
            if outside:
                for dst, src in zip(*self.buffers.pairs(batch, large=True)[:2]):
                    dst.copy_(src)
        self.buffers.copy_host_fields(batch, padded)

    def replay_graph(self, batch_size: int) -> NamedTuple:
        """Replay on what the buffers hold and cut the outputs to `batch_size` requests."""
        if not self.graphs:
            self.capture()
        self.graphs[self.padded_batch_size(batch_size)].replay()
        return self.outputs(batch_size)

    def outputs(self, batch_size: int) -> NamedTuple:
        """What the last replay of a batch of this size left, cut to its requests."""
        padded = self.padded_batch_size(batch_size)
        outputs = self.graphs[padded].outputs
        return type(outputs)(*(t[: t.shape[0] // padded * batch_size] for t in outputs))

    def replay(self, batch: Batch) -> NamedTuple:
        """Copy the inputs and replay. The outputs are views of static tensors, valid until the next replay.

        Raises ValueError as `copy_inputs` does.
        """
        self.copy_inputs(batch)
        return self.replay_graph(batch.batch_size)

    def launches(self, batch: Batch) -> list[Launch]:
        """What CUDA would be asked to do by `copy_inputs` now, padding that is due included."""
        self.buffers.check(batch)
        if hasattr(self.strategy, "plan"):
            plan, srcs = self._plan(batch)
            return plan.launches(srcs, constants=plan is not self.last_plan)
        padded = self.padded_batch_size(batch.batch_size) > batch.batch_size
        outside = self.strategy.large_outside
        launches = [fill_launch(tensor) for tensor, _ in self.buffers.fills(batch, padded)]
        launches += self.strategy.launches(*self.buffers.pairs(batch, large=False if outside else None))
        if outside:
            launches += [copy_launch(*pair) for pair in zip(*self.buffers.pairs(batch, large=True)[:2])]
        return [launch for launch in launches if launch is not None]


class EagleDraftCudaGraphRunner(GraphRunner):
    """The draft tree of a step. `replay(DraftBatch)` returns a `DraftOutput` for the batch's requests."""

    table = "draft"

    def forward(self, inputs: dict[str, Tensor]) -> DraftOutput:
        return draft_forward(self.model, inputs)


class EagleDraftExtendCudaGraphRunner(GraphRunner):
    """The head over a step's w rows a request. `replay(DraftExtendBatch)` returns a `DraftExtendOutput`."""

    table = "draft_extend"

    def forward(self, inputs: dict[str, Tensor]) -> DraftExtendOutput:
        return draft_extend_forward(self.model, inputs)
