"""The speculative loop as SGLang runs it: prefill, then draft, verify and draft-extend, again and again.

Greedy: the text is the target's own, whatever the draft proposes. Committed tokens are those whose keys and
values are in the pools; the last token of a text is not among them yet, it is the root of the next tree.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.types import Device

from lib.eagle.fields import DraftBatch, DraftExtendBatch, EagleConfig, first_level
from lib.eagle.model import (
    DraftExtendOutput,
    DraftModel,
    DraftOutput,
    EagleHead,
    PoolAttention,
    TargetModel,
    causal_attention,
    prefix_slots,
)
from lib.eagle.runners import EagleDraftCudaGraphRunner, EagleDraftExtendCudaGraphRunner


@dataclass(eq=False)
class Request:
    """A prompt and what became of it."""

    prompt: list[int]
    max_new_tokens: int
    output: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)  # tokens gained by each step, bonus included
    req_pool_index: int = 0
    draft_input: tuple[Tensor, ...] = ()  # where its next draft starts: DraftExtendOutput without logits

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.max_new_tokens


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
        mask = mask | mask.take_along_dim(nodes.unsqueeze(2), dim=1)
    tokens = torch.cat((root.unsqueeze(1), draft.draft_tokens), dim=1)
    return Tree(tokens, nodes, mask)


def accept_greedy(tree: Tree, predictions: Tensor) -> Tensor:
    """(bs, w) bool: nodes whose whole path is what the target predicts after each node, predictions (bs, w).
    They form one path, since siblings carry different tokens: the best of one distribution."""
    agrees = tree.tokens == predictions.gather(1, tree.parents)
    agrees[:, 0] = True  # the root
    whole = agrees.unsqueeze(1) | ~tree.mask
    return whole.all(2)


class EagleWorker:
    """Target, draft head, their pools and both graph runners; `submit` requests, then `step` or `run`.

    The config's dtype is the models', its largest capture batch size bounds the running batch. strategy and
    runner_options say how both runners copy their inputs; see `GraphRunner`.

    `spans` holds (name, start, end) of the last step's parts in seconds on the host clock: "prefill" of each
    new request, "draft copy", "draft replay", "verify", "extend copy" and "extend replay"; what they leave is
    the loop itself. `tree` and `accepted` are what that step drafted, and which nodes it kept.

    A request owns a row of `req_to_token`: slots of its committed tokens, then those to use. A step orders
    the latter anew, and commits with the text at its end: an error or interrupt leaves requests as they were.
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
        self.device = device
        self.free_requests = list(range(1, 1 + config.max_batch_size))
        self.req_to_token = config.request_table(device)
        self.target_kv = config.kv_pool(config.num_target_layers, device)
        self.model = DraftModel(
            config,
            target,
            head,
            kv=config.kv_pool(1, device),
            req_to_token=self.req_to_token,
        )
        shared = (config, strategy, device, self.model)
        self.draft = EagleDraftCudaGraphRunner(*shared, **runner_options)
        self.extend = EagleDraftExtendCudaGraphRunner(*shared, **runner_options)
        self.draft.capture()
        self.extend.capture()
        self.waiting = []
        self.running = []
        self.spans = []
        self.tree = None
        self.accepted = None

    def submit(self, prompt: Sequence[int], max_new_tokens: int) -> Request:
        """Queue a request; the next `step` with room takes it up. Raises ValueError for an empty prompt, a
        token outside the vocabulary, and for no new token or more than fit behind the prompt."""
        vocab = range(self.config.vocab_size)
        if not prompt or not set(prompt) <= set(vocab):
            raise ValueError(f"prompt: expected tokens from 0 to {vocab[-1]}, got {prompt!r}")
        longest = self.config.max_context_len - self.config.num_draft_tokens
        room = longest - len(prompt)
        if not 1 <= max_new_tokens <= room:
            raise ValueError(f"max_new_tokens: expected 1 to {room}, got {max_new_tokens}")
        request = Request(list(prompt), max_new_tokens)
        self.waiting.append(request)
        return request

    def run(self) -> None:
        """Step until every request is finished."""
        while self.waiting or self.running:
            self.step()

    @torch.no_grad()
    def step(self) -> None:
        """Take up waiting requests, then draft, verify and draft-extend once."""
        self.spans = []
        while self.waiting and self.free_requests:
            self._timed("prefill", self._prefill, self.waiting[0])
            self.running.append(self.waiting.pop(0))
        self._retire()
        if self.running:
            self._speculate()
            self._retire()

    def _timed(self, name, work, *args):
        start = time.perf_counter()
        done = work(*args)
        self.spans.append((name, start, time.perf_counter()))
        return done

    def _run_target(self, tokens, positions, write_slots, read_slots, mask):
        attention = PoolAttention(self.target_kv, write_slots, read_slots, mask)
        return self.target(tokens, positions, attention)

    def _prefill(self, request):
        """Target, then head, over the whole prompt; the head reads tokens shifted by one."""
        length = len(request.prompt)
        slots = self.req_to_token[self.free_requests[:1], :length]
        tokens = torch.tensor([request.prompt], device=self.device)
        positions = torch.arange(length, device=self.device)[None]
        mask = positions.unsqueeze(2) >= positions
        features = self._run_target(tokens, positions, slots, slots, mask)
        logits = self.target.lm_head(features[:, -1:])
        first = logits.argmax(2)
        tokens = torch.cat((tokens[:, 1:], first), dim=1)
        hidden = self.model.features(tokens, features, positions, slots, slots, mask)
        hidden = hidden[:, -1]
        logits = self.target.lm_head(hidden)
        request.draft_input = (hidden, *first_level(logits, self.config.topk))
        request.output = first[0].tolist()
        request.req_pool_index = self.free_requests.pop(0)

    def _speculate(self):
        """Draft, verify and draft-extend once; every request keeps its accepted path."""
        config = self.config
        facts = []
        for request in self.running:
            committed = len(request.prompt) + len(request.output) - 1
            facts.append((request.req_pool_index, request.output[-1], committed))
        requests, root, lens = map(torch.tensor, zip(*facts))
        requests = requests.to(self.device)
        root = root.to(self.device)
        # A request's branches, and after the draft its nodes, take the slots behind its committed tokens.
        behind = lens.unsqueeze(1) + torch.arange(config.slots_per_step)
        behind = behind.to(self.device)
        slots = self.req_to_token[requests.unsqueeze(1), behind]
        starts = zip(*(request.draft_input for request in self.running))
        start = dict(zip(DraftExtendOutput._fields[1:], map(torch.cat, starts)))
        batch = DraftBatch.of(config, requests, lens, slots, **start)
        out = self._replay("draft", self.draft, batch)
        self.tree = build_tree(root, out, config.topk, config.num_steps)
        node_slots = slots[:, : config.num_draft_tokens]
        predictions, features = self._timed("verify", self._verify, batch, node_slots)
        self.accepted = accept_greedy(self.tree, predictions)
        # Accepted nodes first, in path order. Rejected ones follow, so that every row has a slot of its own.
        order = self.accepted.byte().argsort(dim=1, descending=True, stable=True)
        tokens = predictions.gather(1, order)
        node_slots = node_slots.gather(1, order)
        by_row = order.unsqueeze(2)
        hidden = features.take_along_dim(by_row, dim=1)
        counts = self.accepted.sum(1, dtype=torch.int32)
        batch = DraftExtendBatch.of(
            config,
            requests,
            lens,
            node_slots,
            counts,
            input_ids=tokens.flatten(),
            hidden_states=hidden.flatten(0, 1),
        )
        positions = batch.positions.view_as(tokens)
        self.req_to_token[requests.unsqueeze(1), positions] = node_slots
        out = self._replay("extend", self.extend, batch)
        last = batch.select_index
        if len(out.logits) == len(last):  # the graph itself has picked the rows
            last = torch.arange(len(last), device=self.device)
        starts = zip(*(rows[last].split(1) for rows in out[1:]))
        # The step's one synchronization with the device, then no more than lists.
        kept = zip(self.running, starts, counts.tolist(), tokens.tolist())
        for request, start, length, tokens in kept:
            request.draft_input = start
            request.accept_lengths.append(length)
            text = request.output + tokens[:length]
            request.output = text[: request.max_new_tokens]

    def _replay(self, name, runner, batch):
        if runner.placed:  # sources have to lie at fixed addresses; their producer is this loop
            batch = runner.place(batch)
        self._timed(f"{name} copy", runner.copy_inputs, batch)
        return self._timed(f"{name} replay", runner.replay_graph, batch.batch_size)

    def _verify(self, batch, node_slots):
        """Run the target over all nodes at once: predictions (bs, w) and features (bs, w, H)."""
        longest = batch.seq_lens_cpu.max()
        lens = batch.seq_lens.unsqueeze(1).expand_as(node_slots)
        prefix, seen = prefix_slots(self.req_to_token[:, :longest], batch.req_pool_indices, lens)
        read_slots = torch.cat((prefix, node_slots), dim=1)
        mask = torch.cat((seen, self.tree.mask), dim=2)
        positions = lens + self.tree.mask.sum(2) - 1
        features = self._run_target(self.tree.tokens, positions, node_slots, read_slots, mask)
        logits = self.target.lm_head(features)
        return logits.argmax(2), features

    def _retire(self):
        """Let finished requests leave the running batch."""
        for request in [request for request in self.running if request.finished]:
            self.running.remove(request)
            self.free_requests.append(request.req_pool_index)


@torch.no_grad()
def greedy_decode(target: TargetModel, prompt: Sequence[int], max_new_tokens: int):
    """Plain greedy decoding without any cache, the reference: new tokens, and by how much each leads. Where a
    lead is within rounding, another order of summing may choose the next best token instead."""
    device = target.embed.weight.device
    text = list(prompt)
    leads = []
    for _ in range(max_new_tokens):
        tokens = torch.tensor([text], device=device)
        positions = torch.arange(len(text), device=device)
        features = target(tokens, positions[None], causal_attention)
        logits = target.lm_head(features[0, -1])
        (best, second), (token, _) = logits.float().topk(2)
        leads.append(float(best - second))
        text.append(int(token))
    return text[len(prompt) :], leads
