"""The speculative loop as SGLang runs it: prefill, then draft, verify and draft-extend, again and again.

Greedy: the text is the target's own, whatever the draft proposes. Committed tokens are those whose keys and
values are in the pools; the last token of a text is not among them yet, it is the root of the next tree.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.types import Device

from lib.eagle.fields import Batch, DraftBatch, DraftExtendBatch, EagleConfig, first_level
from lib.eagle.model import (
    DraftModel,
    DraftOutput,
    EagleHead,
    PoolAttention,
    TargetModel,
    causal_attention,
    kv_pool,
    prefix_slots,
)
from lib.eagle.runners import EagleDraftCudaGraphRunner, EagleDraftExtendCudaGraphRunner, GraphRunner


class PoolExhausted(RuntimeError):
    """Fewer slots are free than a call needs. Nothing was taken or written."""


class SlotPool:
    """Hands out the slots 1 to size - 1; slot 0 is reserved for padding."""

    def __init__(self, size: int, what: str) -> None:
        self.size = size
        self.what = what
        self.free_slots = list(range(size - 1, 0, -1))
        self.used: set[int] = set()

    def alloc(self, count: int) -> list[int]:
        """Raises PoolExhausted and takes nothing where `count` slots are not free."""
        free = len(self.free_slots)
        if count > free:
            raise PoolExhausted(f"{self.what}: {count} needed, {free} of {self.size - 1} free")
        slots = [self.free_slots.pop() for _ in range(count)]
        self.used.update(slots)
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Raises ValueError and frees nothing where a slot is not in use or named twice."""
        returned = set(slots)
        wrong = returned - self.used
        if wrong or len(returned) < len(slots):
            raise ValueError(f"{self.what}: {sorted(wrong)} of {slots} are not in use, or freed twice")
        self.used -= returned
        self.free_slots += slots


class DraftInput(NamedTuple):
    """What a draft starts from, left by draft-extend or by the prefill; a row a request."""

    topk_p: Tensor  # (bs, k) float32
    topk_index: Tensor  # (bs, k)
    hidden_states: Tensor  # (bs, H)


@dataclass(eq=False)
class Request:
    """A prompt and what became of it."""

    prompt: list[int]
    max_new_tokens: int
    stop_token: int | None = None  # generation ends after this token
    output: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)  # tokens gained by each step, bonus included
    req_pool_index: int = 0
    slots: list[int] = field(default_factory=list)  # of its committed tokens, in order
    draft_input: DraftInput | None = None  # its row

    @property
    def finished(self) -> bool:
        stopped = self.output[-1:] == [self.stop_token]
        return stopped or len(self.output) >= self.max_new_tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens up to the stop token or the limit, whichever comes first."""
        for token in tokens:
            if not self.finished:
                self.output.append(token)


class Tree(NamedTuple):
    """A request's candidates as w nodes, the root (its last token) first, parents before children."""

    tokens: Tensor  # (bs, w)
    parents: Tensor  # (bs, w), the root's is the root
    mask: Tensor  # (bs, w, w) bool, true where a column is the row's ancestor or the row itself


def build_tree(root: Tensor, draft: DraftOutput, topk: int, num_steps: int) -> Tree:
    """The draft graph's output as nodes under root (bs,): SGLang's `build_tree_kernel_efficient`."""
    chosen = draft.top_scores_index
    parents = draft.parent_list.gather(1, chosen // topk)
    # Node i + 1 is the i-th candidate chosen; children of the root have the parent -1, smaller than any.
    nodes = torch.searchsorted(chosen, parents, right=True)
    nodes = F.pad(nodes, (1, 0))
    bs, w = nodes.shape
    mask = torch.eye(w, dtype=torch.bool, device=root.device)
    mask = mask.expand(bs, w, w)
    for _ in range(num_steps):
        mask = mask | mask.take_along_dim(nodes[..., None], dim=1)
    tokens = torch.cat((root[:, None], draft.draft_tokens), dim=1)
    return Tree(tokens, nodes, mask)


def accept_greedy(tree: Tree, predictions: Tensor) -> Tensor:
    """(bs, w) bool: nodes whose whole path is what the target predicts after each node, predictions (bs, w).

    They form one path: of siblings that carry the same token only the first counts.
    """
    agrees = tree.tokens == predictions.gather(1, tree.parents)
    edges = (tree.parents << 32) + tree.tokens  # both in one number
    twins = edges[:, None] == edges[..., None]
    seconds = twins.tril(-1)[..., 1:].any(-1)
    agrees &= ~seconds
    agrees[:, 0] = True  # the root
    return (agrees[:, None] | ~tree.mask).all(-1)


class EagleWorker:
    """Target, draft head, their pools and both graph runners; `submit` requests, then `step` or `run`.

    Args:
        config: its dtype is the models'; its largest capture batch size bounds the running batch.
        target, head: e.g. from `load_trained(config, device)`.
        strategy, runner_options: how both runners copy their inputs; see `GraphRunner`.

    `spans` holds (name, start, end) of the last step's parts in seconds on the host clock: "prefill" of each
    new request, "draft copy", "draft replay", "verify", "extend copy" and "extend replay". What they leave of
    the step is the loop itself. `tree` and `accepted` are what that step drafted, and which nodes it kept.
    """

    def __init__(
        self,
        config: EagleConfig,
        target: TargetModel,
        head: EagleHead,
        strategy: str = "grouped_foreach_dma",
        device: Device = "cpu",
        **runner_options: bool,
    ) -> None:
        self.config = config
        self.target = target
        self.device = torch.device(device)
        self.kv_slots = SlotPool(config.kv_slots, "KV slots")
        self.req_slots = SlotPool(1 + config.max_batch_size, "request slots")
        self.slots_per_step = max(config.topk * config.num_steps, config.num_draft_tokens)
        self.target_kv = kv_pool(config, config.num_target_layers, device)
        self.req_to_token = torch.zeros(
            self.req_slots.size, config.max_context_len, dtype=torch.int64, device=device
        )
        draft_kv = kv_pool(config, 1, device)
        self.draft_model = DraftModel(config, target, head, draft_kv, self.req_to_token)
        shared = (config, strategy, device, self.draft_model)
        self.draft = EagleDraftCudaGraphRunner(*shared, **runner_options)
        self.extend = EagleDraftExtendCudaGraphRunner(*shared, **runner_options)
        self.draft.capture()
        self.extend.capture()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.spans = []
        self.tree: Tree | None = None
        self.accepted: Tensor | None = None

    def submit(self, prompt: Sequence[int], max_new_tokens: int, stop_token: int | None = None) -> Request:
        """Queue a request; the next `step` with room takes it up.

        Raises ValueError for an empty prompt, a token outside the vocabulary, no token wanted, or a request
        that could never fit.
        """
        wanted = isinstance(max_new_tokens, int) and max_new_tokens >= 1
        if not prompt or not wanted:
            raise ValueError(
                f"expected a prompt and max_new_tokens >= 1, got {len(prompt)}, {max_new_tokens}"
            )
        vocab = range(self.config.vocab_size)
        for token in prompt:
            if not isinstance(token, int) or token not in vocab:
                raise ValueError(f"prompt: expected tokens from 0 to {vocab[-1]}, got {token!r}")
        length = len(prompt) + max_new_tokens
        room = min(
            self.config.max_context_len - self.config.num_draft_tokens,
            self.config.kv_slots - 1 - self.slots_per_step,
        )
        if length > room:
            raise ValueError(f"prompt and new tokens: expected at most {room} together, got {length}")
        request = Request(list(prompt), max_new_tokens, stop_token)
        self.waiting.append(request)
        return request

    def run(self) -> None:
        """Step until every request is finished."""
        while self.waiting or self.running:
            self.step()

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Take up waiting requests, then draft, verify and draft-extend once; returns the finished requests.

        Raises PoolExhausted where the running requests need more KV slots than are free; nothing is written.
        After any other exception, e.g. a strategy's refusal, every slot is where it was.
        """
        self.spans = []
        self._admit()
        finished = self._retire()
        if self.running:
            slots = self.kv_slots.alloc(len(self.running) * self.slots_per_step)
            try:
                rows, draft_input = self._speculate(slots)
                rows = rows.tolist()  # the step's one synchronization with the device
            except BaseException:
                self.kv_slots.free(slots)
                raise
            self._commit(slots, rows, draft_input)
            finished += self._retire()
        return finished

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.device)

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.spans.append((name, start, time.perf_counter()))

    def _admit(self) -> None:
        """Prefill waiting requests while there is room, and add them to the running batch."""
        while self.waiting and len(self.running) < self.config.max_batch_size:
            request = self.waiting[0]
            for_steps = (len(self.running) + 1) * self.slots_per_step
            needed = len(request.prompt) + for_steps
            if needed > len(self.kv_slots.free_slots):
                break
            try:
                with self._span("prefill"):
                    self._prefill(request)
            except BaseException:
                self._release(request)
                raise
            self.running.append(self.waiting.popleft())

    def _prefill(self, request: Request) -> None:
        """Target, then head, over the whole prompt; the head reads tokens shifted by one."""
        length = len(request.prompt)
        request.slots = self.kv_slots.alloc(length)
        (request.req_pool_index,) = self.req_slots.alloc(1)
        slots = self._tensor([request.slots])
        self.req_to_token[request.req_pool_index, :length] = slots
        tokens = self._tensor([request.prompt])
        positions = torch.arange(length, device=self.device)[None]
        mask = positions[..., None] >= positions
        attention = PoolAttention(self.target_kv, slots, slots, mask)
        features = self.target(tokens, positions, attention)
        first = self.target.lm_head(features[:, -1:]).argmax(-1)
        shifted = self.target.embed(torch.cat((tokens[:, 1:], first), dim=1))
        attention = PoolAttention(self.draft_model.kv, slots, slots, mask)
        hidden = self.draft_model.head(shifted, features, positions, attention)
        hidden = hidden[:, -1]
        logits = self.target.lm_head(hidden)
        request.draft_input = DraftInput(*first_level(logits, self.config.topk), hidden)
        request.output = first[0].tolist()

    def _speculate(self, slots: list[int]) -> tuple[Tensor, DraftInput]:
        """Draft, verify and draft-extend with these slots; returns what `_extend` does."""
        topk = self.config.topk
        num_steps = self.config.num_steps
        # A request's branches, and after the draft its nodes, take the first of its slots.
        step_slots = self._tensor(slots).view(len(self.running), -1)
        node_slots = step_slots[:, : self.config.num_draft_tokens]
        batch = self._draft_batch(step_slots[:, : topk * num_steps])
        out = self._replay("draft", self.draft, batch)
        root = self._tensor([request.output[-1] for request in self.running])
        self.tree = build_tree(root, out, topk, num_steps)
        predictions, features = self._verify(batch, self.tree, node_slots)
        self.accepted = accept_greedy(self.tree, predictions)
        return self._extend(batch, self.accepted, predictions, features, node_slots)

    def _draft_batch(self, slots: Tensor) -> DraftBatch:
        """The running requests, the keys and values of their branches in slots (bs, k * s)."""
        lens_cpu = torch.tensor([len(request.slots) for request in self.running])
        lens = lens_cpu.to(self.device)
        inputs = zip(*(request.draft_input for request in self.running))
        topk_p, topk_index, hidden_states = map(torch.cat, inputs)
        return DraftBatch(
            seq_lens=lens,
            out_cache_loc=slots.flatten(),
            positions=lens.repeat_interleave(self.config.topk),
            req_pool_indices=self._tensor([request.req_pool_index for request in self.running]),
            hidden_states=hidden_states,
            seq_lens_cpu=lens_cpu,
            topk_p=topk_p,
            topk_index=topk_index,
        )

    def _replay(self, name: str, runner: GraphRunner, batch: Batch) -> NamedTuple:
        if runner.placed:  # sources have to lie at fixed addresses; their producer is this loop
            batch = runner.place(batch)
        with self._span(f"{name} copy"):
            runner.copy_inputs(batch)
        with self._span(f"{name} replay"):
            return runner.replay_graph(batch.batch_size)

    def _verify(self, batch: DraftBatch, tree: Tree, node_slots: Tensor) -> tuple[Tensor, Tensor]:
        """Run the target over all nodes at once: predictions (bs, w) and features (bs, w, H)."""
        table = self.req_to_token[:, : batch.seq_lens_cpu.max()]
        w = node_slots.shape[1]
        prefix, seen = prefix_slots(table, batch.req_pool_indices, batch.seq_lens, w)
        attention = PoolAttention(
            self.target_kv,
            write_slots=node_slots,
            read_slots=torch.cat((prefix, node_slots), dim=1),
            mask=torch.cat((seen, tree.mask), dim=2),
        )
        positions = batch.seq_lens[:, None] + tree.mask.sum(-1) - 1
        with self._span("verify"):
            features = self.target(tree.tokens, positions, attention)
            predictions = self.target.lm_head(features).argmax(-1)
        return predictions, features

    def _extend(
        self,
        drafted: DraftBatch,
        accepted: Tensor,
        predictions: Tensor,
        features: Tensor,
        node_slots: Tensor,
    ) -> tuple[Tensor, DraftInput]:
        """Refresh the head's cache over all w rows. Returns (bs, 1 + 2 * w): how many of a request's rows
        count, its w tokens, their w slots; and what the next draft starts from."""
        bs, w = accepted.shape
        # Accepted nodes first, in path order. Rejected ones follow, so that every row has a slot of its own.
        order = accepted.byte().argsort(dim=1, descending=True, stable=True)
        tokens = predictions.gather(1, order)
        slots = node_slots.gather(1, order)
        hidden_states = features.take_along_dim(order[..., None], dim=1)
        positions = drafted.seq_lens[:, None] + torch.arange(w, device=self.device)
        self.req_to_token[drafted.req_pool_indices[:, None], positions] = slots
        counts = accepted.sum(1, dtype=torch.int32)
        last = torch.arange(-1, bs * w - 1, w, device=self.device) + counts
        batch = DraftExtendBatch(
            input_ids=tokens.flatten(),
            seq_lens=drafted.seq_lens + w,
            out_cache_loc=slots.flatten(),
            positions=positions.flatten(),
            req_pool_indices=drafted.req_pool_indices,
            extend_seq_lens=torch.full_like(counts, w),
            num_correct_drafts=counts - 1,
            num_accept_tokens=counts,
            hidden_states=hidden_states.flatten(0, 1),
            seq_lens_cpu=drafted.seq_lens_cpu + w,
            select_index=last,
        )
        out = self._replay("extend", self.extend, batch)
        if "select_index" in self.extend.buffers.names:  # the graph itself has picked the rows
            last = torch.arange(bs, device=self.device)
        draft_input = DraftInput(
            out.topk_p[last],
            out.topk_index[last],
            out.hidden_states[last],
        )
        rows = torch.cat((counts[:, None], tokens, slots), dim=1)
        return rows, draft_input

    def _commit(self, slots: list[int], rows: list[list[int]], draft_input: DraftInput) -> None:
        """Keep the accepted path of every request, free the other slots of the step."""
        rejected = set(slots)
        draft_inputs = zip(*(field.split(1) for field in draft_input))
        for request, row, own in zip(self.running, rows, draft_inputs, strict=True):
            count = row.pop(0)
            kept = row[self.config.num_draft_tokens :][:count]
            rejected.difference_update(kept)
            request.slots += kept
            request.extend(row[:count])
            request.accept_lengths.append(count)
            request.draft_input = own
        self.kv_slots.free(list(rejected))

    def _retire(self) -> list[Request]:
        """Let finished requests leave the running batch."""
        finished = [request for request in self.running if request.finished]
        self.running = [request for request in self.running if not request.finished]
        for request in finished:
            self._release(request)
        return finished

    def _release(self, request: Request) -> None:
        self.kv_slots.free(request.slots)
        request.slots = []
        if request.req_pool_index:
            self.req_slots.free([request.req_pool_index])
        request.req_pool_index = 0


@torch.no_grad()
def greedy_decode(
    target: TargetModel,
    prompt: Sequence[int],
    max_new_tokens: int,
) -> tuple[list[int], list[float]]:
    """Plain greedy decoding without any cache, the reference: new tokens, and by how much each leads.

    A lead within rounding means that another order of summing may choose the next best token instead.
    """
    device = target.embed.weight.device
    text = torch.tensor([prompt], device=device)
    leads = []
    for _ in range(max_new_tokens):
        positions = torch.arange(text.shape[1], device=device)[None]
        features = target(text, positions, causal_attention)
        logits = target.lm_head(features[:, -1]).float()
        best, second = logits.topk(2).values[0]
        leads.append(best - second)
        text = torch.cat((text, logits.argmax(-1, keepdim=True)), dim=1)
    return text[0, len(prompt) :].tolist(), torch.stack(leads).tolist()
