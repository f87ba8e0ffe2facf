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
from torch import Tensor

from lib.eagle import model as m
from lib.eagle.fields import Batch, DraftBatch, DraftExtendBatch, EagleConfig, first_level
from lib.eagle.runners import EagleDraftCudaGraphRunner, EagleDraftExtendCudaGraphRunner, GraphRunner
from lib.strategies import Strategy


class PoolExhausted(RuntimeError):
    """Fewer slots are free than a call needs. Nothing was taken or written."""


class SlotPool:
    """Hands out the slots 1 to size - 1; slot 0 is reserved for padding."""

    def __init__(self, size: int, what: str) -> None:
        self.what, self.size = what, size
        self.free_slots, self.used = list(range(size - 1, 0, -1)), set()

    def require(self, count: int) -> None:
        if count > len(self.free_slots):
            raise PoolExhausted(
                f"{self.what}: {count} needed, {len(self.free_slots)} of {self.size - 1} free"
            )

    def alloc(self, count: int) -> list[int]:
        """Raises PoolExhausted and takes nothing where `count` slots are not free."""
        self.require(count)
        at = len(self.free_slots) - count
        slots, self.free_slots = self.free_slots[at:], self.free_slots[:at]
        self.used.update(slots)
        return slots

    @contextmanager
    def lent(self, count: int) -> Iterator[list[int]]:
        """Slots for a while: they come back however it ends."""
        slots = self.alloc(count)
        try:
            yield slots
        finally:
            self.free(slots)

    def free(self, slots: Sequence[int]) -> None:
        """Raises ValueError and frees nothing where a slot is not in use or named twice."""
        if len(set(slots)) < len(slots) or not self.used.issuperset(slots):
            wrong = sorted({s for s in slots if s not in self.used or slots.count(s) > 1})
            raise ValueError(f"{self.what}: slots {wrong} are not in use, or freed twice")
        self.used.difference_update(slots)
        self.free_slots.extend(slots)


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

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.max_new_tokens or self.output[-1:] == [self.stop_token]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens up to the stop token or the limit, whichever comes first."""
        for token in tokens:
            if not self.finished:
                self.output.append(token)


class DraftInput(NamedTuple):
    """What draft-extend leaves for the next draft, one row a running request."""

    topk_p: Tensor  # (bs, k) float32
    topk_index: Tensor  # (bs, k)
    hidden_states: Tensor  # (bs, H)


class Committed(NamedTuple):
    """The running requests at the start of a step, one entry each."""

    reqs: Tensor  # request slots
    lens: Tensor  # committed tokens
    lens_cpu: Tensor  # the same on the host


class Tree(NamedTuple):
    """A request's candidates as w nodes, the root (its last token) first, parents before children."""

    tokens: Tensor  # (bs, w)
    parents: Tensor  # (bs, w), the root's is the root
    mask: Tensor  # (bs, w, w) bool, true where a column is the row's ancestor or the row itself


def build_tree(root: Tensor, draft: m.DraftOutput, topk: int, num_steps: int) -> Tree:
    """The draft graph's output as nodes under root (bs,): SGLang's `build_tree_kernel_efficient`."""
    chosen = draft.top_scores_index
    siblings = chosen // topk  # group 0 hangs on the root
    parents = torch.searchsorted(chosen, draft.parent_list.gather(1, siblings)) + 1
    parents = torch.cat((torch.zeros_like(root)[:, None], parents.masked_fill_(siblings == 0, 0)), dim=1)
    ancestor = torch.arange(parents.shape[1], device=root.device).expand_as(parents)
    mask = torch.eye(parents.shape[1], dtype=torch.bool, device=root.device).repeat(len(root), 1, 1)
    for _ in range(num_steps):
        ancestor = parents.gather(1, ancestor)
        mask.scatter_(2, ancestor[..., None], True)
    return Tree(torch.cat((root[:, None], draft.draft_tokens), dim=1), parents, mask)


def accept_greedy(tree: Tree, predictions: Tensor) -> Tensor:
    """(bs, w) bool: nodes whose whole path is what the target predicts after each node, predictions (bs, w).

    They form one path: of siblings that carry the same token only the first counts.
    """
    match = tree.tokens == predictions.gather(1, tree.parents)
    twins = tree.parents[:, :, None] == tree.parents[:, None]
    twins &= tree.tokens[:, :, None] == tree.tokens[:, None]
    match &= ~twins.tril(-1)[:, :, 1:].any(-1)
    match[:, 0] = True
    return ~(tree.mask & ~match[:, None]).any(-1)


class EagleWorker:
    """Target, draft head, their pools and both graph runners; `submit` requests, then `step` or `run`.

    Args:
        config: its dtype is the models'; its largest capture batch size bounds the running batch.
        target, head: e.g. from `load_trained(config, device)`.
        strategy: how both runners copy their inputs.

    `spans` holds (name, start, end) of the last step's parts in seconds on the host clock: "prefill" of each
    new request, "draft copy", "draft replay", "verify", "extend copy" and "extend replay". What they leave of
    the step is the loop itself.
    """

    def __init__(
        self,
        config: EagleConfig,
        target: m.TargetModel,
        head: m.EagleHead,
        strategy: str | Strategy = "grouped_foreach_dma",
        device: str | torch.device = "cpu",
    ) -> None:
        self.config, self.target, self.device = config, target, torch.device(device)
        self.kv_slots = SlotPool(config.kv_slots, "KV slots")
        self.req_slots = SlotPool(1 + config.max_batch_size, "request slots")
        self.target_kv = m.KVPool(config, config.num_target_layers, device)
        table = torch.zeros(self.req_slots.size, config.max_context_len, dtype=torch.int64, device=device)
        self.req_to_token = table
        self.draft_model = m.DraftModel(config, head, m.KVPool(config, 1, device), table)
        self.draft = EagleDraftCudaGraphRunner(config, strategy, device, self.draft_model)
        self.extend = EagleDraftExtendCudaGraphRunner(config, strategy, device, self.draft_model)
        for runner in (self.draft, self.extend):
            runner.capture()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.draft_input: DraftInput | None = None
        self.spans: list[tuple[str, float, float]] = []

    def submit(self, prompt: Sequence[int], max_new_tokens: int, stop_token: int | None = None) -> Request:
        """Queue a request; the next `step` with room takes it up.

        Raises ValueError for an empty prompt, a token outside the vocabulary, no token wanted, or a request
        that could never fit.
        """
        c, prompt = self.config, list(prompt)
        if not prompt or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ValueError(
                f"expected a prompt and max_new_tokens >= 1, got {len(prompt)}, {max_new_tokens}"
            )
        for token in prompt:
            if not isinstance(token, int) or not 0 <= token < c.vocab_size:
                raise ValueError(f"prompt: expected tokens from 0 to {c.vocab_size - 1}, got {token!r}")
        length = len(prompt) + max_new_tokens
        room = min(c.max_context_len - c.num_draft_tokens, c.kv_slots - 1 - self._slots_per_step)
        if length > room:
            raise ValueError(f"prompt and new tokens: expected at most {room} together, got {length}")
        self.waiting.append(Request(prompt, max_new_tokens, stop_token))
        return self.waiting[-1]

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
        finished = self._admit()
        if not self.running:
            return finished
        bs, c = len(self.running), self.config
        self.kv_slots.require(bs * self._slots_per_step)
        lens_cpu = torch.tensor([len(r.slots) for r in self.running])
        at = Committed(
            self._tensor([r.req_pool_index for r in self.running]), lens_cpu.to(self.device), lens_cpu
        )
        tree = self._draft(at)
        nodes = self.kv_slots.alloc(bs * c.num_draft_tokens)
        try:
            node_slots = self._tensor(nodes).view(bs, -1)
            predictions, features = self._verify(at, tree, node_slots)
            rows = self._extend(at, accept_greedy(tree, predictions), predictions, features, node_slots)
        except BaseException:
            self.kv_slots.free(nodes)
            raise
        self._commit(rows)
        return finished + self._retire()

    @property
    def _slots_per_step(self) -> int:
        """KV slots a request needs for a moment: its draft branches, and after these the nodes to verify."""
        return max(self.config.topk * self.config.num_steps, self.config.num_draft_tokens)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.device)

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.spans.append((name, start, time.perf_counter()))

    def _admit(self) -> list[Request]:
        """Prefill waiting requests while there is room, and add them to the running batch."""
        finished = []
        while self.waiting and len(self.running) < self.config.max_batch_size:
            request = self.waiting[0]
            needed = len(request.prompt) + (len(self.running) + 1) * self._slots_per_step
            if needed > len(self.kv_slots.free_slots):
                break
            try:
                with self._span("prefill"):
                    fresh = self._prefill(request)
            except BaseException:
                self._release(request)
                raise
            self.waiting.popleft()
            if request.finished:
                self._release(request)
                finished.append(request)
                continue
            merged = zip(self.draft_input, fresh) if self.running else ((t,) for t in fresh)
            self.draft_input = DraftInput(*(torch.cat(rows) for rows in merged))
            self.running.append(request)
        return finished

    def _prefill(self, request: Request) -> DraftInput:
        """Target, then head, over the whole prompt; the head reads tokens shifted by one."""
        n = len(request.prompt)
        request.slots = self.kv_slots.alloc(n)
        (request.req_pool_index,) = self.req_slots.alloc(1)
        slots, tokens = self._tensor([request.slots]), self._tensor([request.prompt])
        self.req_to_token[request.req_pool_index, :n] = slots[0]
        positions = torch.arange(n, device=self.device)[None]
        mask = positions[..., None] >= positions[:, None]
        logits, features = self.target(tokens, positions, m.PoolAttention(self.target_kv, slots, slots, mask))
        first = logits[:, -1:].argmax(-1)
        request.extend(first[0].tolist())
        shifted = torch.cat((tokens[:, 1:], first), dim=1)
        attention = m.PoolAttention(self.draft_model.kv, slots, slots, mask)
        logits, hidden = self.draft_model.head(shifted, features, positions, attention)
        return DraftInput(*first_level(logits[:, -1], self.config.topk), hidden[:, -1])

    def _draft(self, at: Committed) -> Tree:
        """Grow a tree for every running request. The slots of its branches are needed for the draft only."""
        k, s, bs = self.config.topk, self.config.num_steps, len(self.running)
        with self.kv_slots.lent(bs * k * s) as slots:
            batch = DraftBatch(
                seq_lens=at.lens,
                out_cache_loc=self._tensor(slots),
                positions=at.lens.repeat_interleave(k),
                req_pool_indices=at.reqs,
                seq_lens_cpu=at.lens_cpu,
                **self.draft_input._asdict(),
            )
            out = self._replay("draft", self.draft, batch)
        return build_tree(self._tensor([r.output[-1] for r in self.running]), out, k, s)

    def _replay(self, name: str, runner: GraphRunner, batch: Batch) -> NamedTuple:
        if runner.fixed:  # of a strategy whose producer writes to fixed addresses, we are the producer
            batch = runner.place(batch)
        with self._span(f"{name} copy"):
            runner.copy_inputs(batch)
        with self._span(f"{name} replay"):
            return runner.replay_graph(batch.batch_size)

    def _verify(self, at: Committed, tree: Tree, node_slots: Tensor) -> tuple[Tensor, Tensor]:
        """Run the target over all nodes at once: predictions (bs, w) and features (bs, w, H)."""
        prefix, valid = m.prefix_slots(self.req_to_token, at.reqs, at.lens, int(at.lens_cpu.max()))
        mask = torch.cat((valid[:, None].expand(-1, tree.mask.shape[1], -1), tree.mask), dim=2)
        attention = m.PoolAttention(self.target_kv, node_slots, torch.cat((prefix, node_slots), dim=1), mask)
        depths = tree.mask.sum(-1) - 1
        with self._span("verify"):
            logits, features = self.target(tree.tokens, at.lens[:, None] + depths, attention)
        return logits.argmax(-1), features

    def _extend(
        self, at: Committed, accepted: Tensor, predictions: Tensor, features: Tensor, node_slots: Tensor
    ) -> list[list[int]]:
        """Refresh the head's cache over all w rows; a request's row: how many count, w tokens, w slots."""
        bs, w = accepted.shape
        # Accepted nodes first, in path order. Rejected ones follow, so that every row has a slot of its own.
        order = accepted.byte().argsort(dim=1, descending=True, stable=True)
        counts = accepted.sum(1, dtype=torch.int32)
        tokens, node_slots = predictions.gather(1, order), node_slots.gather(1, order)
        positions = at.lens[:, None] + torch.arange(w, device=self.device)
        self.req_to_token[at.reqs[:, None], positions] = node_slots
        batch = DraftExtendBatch(
            input_ids=tokens.flatten(),
            seq_lens=at.lens + w,
            out_cache_loc=node_slots.flatten(),
            positions=positions.flatten(),
            req_pool_indices=at.reqs,
            extend_seq_lens=torch.full_like(counts, w),
            num_correct_drafts=counts - 1,
            num_accept_tokens=counts,
            hidden_states=features.gather(1, order[..., None].expand_as(features)).flatten(0, 1),
            seq_lens_cpu=at.lens_cpu + w,
        )
        out = self._replay("extend", self.extend, batch)
        last = torch.arange(bs, device=self.device) * w + counts - 1
        self.draft_input = DraftInput(out.topk_p[last], out.topk_index[last], out.hidden_states[last])

        # The step's one synchronization with the device.
        return torch.cat((counts[:, None], tokens, node_slots), dim=1).tolist()

    def _commit(self, rows: list[list[int]]) -> None:
        """Keep the accepted path of every request, free what was rejected."""
        w = self.config.num_draft_tokens
        for request, row in zip(self.running, rows, strict=True):
            count, tokens, slots = row[0], row[1 : 1 + w], row[1 + w :]
            request.extend(tokens[:count])
            request.accept_lengths.append(count)
            request.slots += slots[:count]
            self.kv_slots.free(slots[count:])

    def _retire(self) -> list[Request]:
        """Let finished requests leave the running batch."""
        finished = [r for r in self.running if r.finished]
        if finished:
            keep = torch.tensor([not r.finished for r in self.running], device=self.device)
            self.draft_input = DraftInput(*(t[keep] for t in self.draft_input))
            self.running = [r for r in self.running if not r.finished]
            for request in finished:
                self._release(request)
        return finished

    def _release(self, request: Request) -> None:
        self.kv_slots.free(request.slots)
        self.req_slots.free([request.req_pool_index] if request.req_pool_index else [])
        request.slots, request.req_pool_index = [], 0


@torch.no_grad()
def greedy_decode(
    target: m.TargetModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Plain greedy decoding without any cache, the reference: new tokens, and by how much each leads.

    A lead within rounding means that another order of summing may choose the next best token instead.
    """
    device = target.embed.weight.device
    lens = torch.tensor([len(p) for p in prompts], device=device)
    rows, total = torch.arange(len(prompts), device=device), int(lens.max()) + max_new_tokens
    tokens = torch.zeros(len(prompts), total, dtype=torch.int64, device=device)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = torch.tensor(prompt)
    positions, outputs, leads = torch.arange(total, device=device).expand_as(tokens), [], []
    for _ in range(max_new_tokens):
        end = int(lens.max())
        logits, _ = target(tokens[:, :end], positions[:, :end], m.causal_attention)
        best = logits[rows, lens - 1].float().topk(2)
        tokens[rows, lens] = best.indices[:, 0]
        lens = lens + 1
        outputs.append(best.indices[:, 0])
        leads.append(best.values[:, 0] - best.values[:, 1])
    return torch.stack(outputs, 1).tolist(), torch.stack(leads, 1).tolist()
