"""The models: a small Llama-like target and its EAGLE head, reading and writing token-level KV pools.

The head is EAGLE's: `fc(concat(embed(token), hidden))`, one decoder layer, then the target's own LM head;
embedding and LM head are the target's. Position p of the head combines token p+1 with the feature (the last
hidden state) of position p and predicts the feature of p+1, hence the token p+2.

In shapes: B rows of T tokens, H hidden size, V vocabulary; bs requests, k top-k, s steps, w draft tokens.
What has no type is a tensor, or `attention`: of (layer, q, k, v), (B, heads, T, head_dim) each, mixed values.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from lib.eagle.fields import DraftBatch, DraftExtendBatch, EagleConfig, first_level

TRAINED = Path(__file__).parents[2] / "data/models"

Linear = partial(nn.Linear, bias=False)
RMSNorm = partial(nn.RMSNorm, eps=1e-5)


def causal_attention(layer, q, k, v):
    """Every row sees itself and the rows before it; nothing is cached. For training and as a reference."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@dataclass
class PoolAttention:
    """Writes the new rows' keys and values to the pool, then attends over what it holds.

    A column that no row may see must still name a slot of the request itself: a masked weight of 0 times a
    NaN is a NaN, and slot 0 holds what padding left there.
    """

    pool: Tensor  # of `EagleConfig.kv_pool`
    write_slots: Tensor  # (B, T)
    read_slots: Tensor  # (B, C)
    mask: Tensor  # (B, T, C), true where a row sees a column

    def __call__(self, layer, q, k, v):
        slots = self.pool[layer]
        written = torch.cat((k, v), dim=1).transpose(1, 2)
        slots[self.write_slots] = written.flatten(2)
        read = F.embedding(self.read_slots, slots).unflatten(2, written.shape[2:])
        k, v = read.transpose(1, 2).chunk(2, dim=1)
        mask = self.mask.unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def prefix_slots(req_to_token, requests, lens):
    """Slots (B, C) of requests (B,), and a mask (B, T, C): a row sees the first `lens` (B, T).

    No row may see more than the last. Columns that it does not see repeat the request's first slot.
    """
    slots = req_to_token[requests]
    columns = torch.arange(slots.shape[1], device=slots.device)
    mask = columns < lens.unsqueeze(2)
    slots = torch.where(mask[:, -1], slots, slots[:, :1])
    return slots, mask


def rotate(x, positions):
    """Rotary embedding of x (B, heads, T, head_dim) at positions (B, T): halves of a head are pairs."""
    first, second = x.chunk(2, dim=3)
    half = first.shape[3]
    steps = torch.arange(half, device=x.device)
    frequencies = 10000.0 ** (-steps / half)
    angles = positions[:, None, :, None] * frequencies
    cos = angles.cos().to(x.dtype)
    sin = angles.sin().to(x.dtype)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat(turned, dim=3)


class DecoderLayer(nn.Module):
    """RMSNorm, rotary attention, RMSNorm, SwiGLU."""

    def __init__(self, config: EagleConfig, index: int):
        super().__init__()
        hidden = config.hidden_size
        inner = config.intermediate_size
        self.index = index
        self.heads = config.num_heads
        self.attn_norm = RMSNorm(hidden)
        self.qkv = Linear(hidden, 3 * hidden)
        self.out = Linear(hidden, hidden)
        self.mlp_norm = RMSNorm(hidden)
        self.gate_up = Linear(hidden, 2 * inner)
        self.down = Linear(inner, hidden)

    def forward(self, x, positions, attention):
        normed = self.attn_norm(x)
        qkv = self.qkv(normed).unflatten(2, (3 * self.heads, -1))
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)
        q = rotate(q, positions)
        k = rotate(k, positions)
        mixed = attention(self.index, q, k, v)
        mixed = mixed.transpose(1, 2)
        x = x + self.out(mixed.flatten(2))
        normed = self.mlp_norm(x)
        gate, up = self.gate_up(normed).chunk(2, dim=2)
        return x + self.down(F.silu(gate) * up)


class TargetModel(nn.Module):
    """The model whose text is wanted. Its last hidden state, normed, is the feature that EAGLE predicts."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        hidden = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, hidden)
        self.layers = nn.ModuleList()
        for index in range(config.num_target_layers):
            self.layers.append(DecoderLayer(config, index))
        self.norm = RMSNorm(hidden)
        self.lm_head = Linear(hidden, config.vocab_size)

    def forward(self, input_ids, positions, attention):
        """input_ids, positions (B, T) -> features (B, T, H). `lm_head` makes logits of them."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, positions, attention)
        return self.norm(x)


class EagleHead(nn.Module):
    """The draft model, between the target's embedding and the target's LM head."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.fc = Linear(2 * config.hidden_size, config.hidden_size)
        self.layer = DecoderLayer(config, 0)

    def forward(self, embedded, hidden, positions, attention):
        """Embedded tokens and hidden (B, T, H), positions (B, T) -> features (B, T, H)."""
        pair = torch.cat((embedded, hidden), dim=2)
        x = self.fc(pair)
        return self.layer(x, positions, attention)


def both_models(config: EagleConfig) -> nn.ModuleDict:
    """Target and head in the config's dtype."""
    models = nn.ModuleDict({"target": TargetModel(config), "head": EagleHead(config)})
    return models.to(config.dtype).requires_grad_(False)


@dataclass
class DraftModel:
    """What both graphs compute with: the head, its KV pool, the table from request and position to slot."""

    config: EagleConfig
    target: TargetModel  # for its embedding and LM head
    head: EagleHead
    kv: Tensor  # of `EagleConfig.kv_pool`, one layer
    req_to_token: Tensor  # of `EagleConfig.request_table`

    @classmethod
    def random(cls, config: EagleConfig, device: Device = "cpu", seed: int = 0) -> Self:
        """Seeded random weights, every pool slot in use: a wrongly copied field changes the output."""
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(seed)
            models = both_models(replace(config, num_target_layers=0))
            kv = config.kv_pool(1, device).normal_()
        return cls(
            config,
            target=models["target"],
            head=models["head"],
            kv=kv,
            req_to_token=config.request_table(device),
        )

    def features(self, tokens, hidden, positions, write_slots, read_slots, mask):
        """The head over tokens and hidden, written to and read from the pool: (B, T, H)."""
        attention = PoolAttention(self.kv, write_slots, read_slots, mask)
        embedded = self.target.embed(tokens)
        return self.head(embedded, hidden, positions, attention)


class DraftOutput(NamedTuple):
    """The tree, as SGLang's `organize_draft_results` leaves it; candidates are numbered level by level."""

    parent_list: Tensor  # (bs, 1 + k + (s - 2) * k), the candidate that each group of k children hangs on
    top_scores_index: Tensor  # (bs, w - 1), the chosen candidates, ascending
    draft_tokens: Tensor  # (bs, w - 1), their tokens
    scores: Tensor  # (bs, k + (s - 1) * k * k) float32, the probability of the path to every candidate


@torch.no_grad()
def draft_forward(model: DraftModel, batch: DraftBatch) -> DraftOutput:
    """Grow the tree over s levels: the first is given, the head runs s - 1 times, k branches at a time.

    A branch sees the committed prefix and its true ancestors (SGLang's lanes keep their own history).
    """
    tokens = batch.topk_index  # of all candidates so far, as their scores
    scores = batch.topk_p
    bs, k = tokens.shape
    lane_slots = batch.out_cache_loc.view(bs, k, -1)
    positions = batch.positions.view(bs, k)
    itself = torch.eye(k, dtype=torch.bool, device=tokens.device)
    itself = itself.expand(bs, k, k)
    # At first the committed text is the only lane. Slots (bs, C) are what lanes read, seen what each sees.
    parents = torch.full_like(tokens[:, :1], -1)
    hidden = batch.hidden_states.unsqueeze(1)
    lens = batch.seq_lens.unsqueeze(1)
    slots, seen = prefix_slots(model.req_to_token, batch.req_pool_indices, lens)
    first = 0  # of the candidates of the last level
    for level in range(model.config.num_steps - 1):
        # The k best of them take over the lanes, and see what their parents saw and themselves.
        lane_scores, best = scores[:, first:].topk(k)
        lanes = first + best
        lane_tokens = tokens.gather(1, lanes)
        parents = torch.cat((parents, lanes), dim=1)
        parent = (best // k).unsqueeze(2)  # its lane
        hidden = hidden.take_along_dim(parent, dim=1)
        seen = seen.take_along_dim(parent, dim=1)
        seen = torch.cat((seen, itself), dim=2)
        write_slots = lane_slots[..., level]
        slots = torch.cat((slots, write_slots), dim=1)
        hidden = model.features(lane_tokens, hidden, positions + level, write_slots, slots, seen)
        logits = model.target.lm_head(hidden)
        probabilities, children = first_level(logits, k)
        path_scores = lane_scores.unsqueeze(2) * probabilities
        first = tokens.shape[1]
        children = children.flatten(1)
        tokens = torch.cat((tokens, children), dim=1)
        scores = torch.cat((scores, path_scores.flatten(1)), dim=1)

    # A stable sort: at equal scores the parent comes first, so that no chosen node lacks its parent.
    ranked = scores.argsort(dim=1, descending=True, stable=True)
    budget = model.config.num_draft_tokens - 1  # the root is given
    chosen, _ = ranked[:, :budget].sort()
    return DraftOutput(
        parent_list=parents,
        top_scores_index=chosen,
        draft_tokens=tokens.gather(1, chosen),
        scores=scores,
    )


class DraftExtendOutput(NamedTuple):
    """One row for each input row, or for each request where the graph itself picks it (`select_index`)."""

    logits: Tensor  # (rows, V)
    hidden_states: Tensor  # (rows, H)
    topk_p: Tensor  # (rows, k) float32
    topk_index: Tensor  # (rows, k)


@torch.no_grad()
def draft_extend_forward(model: DraftModel, batch: DraftExtendBatch) -> DraftExtendOutput:
    """The head over w rows a request; row r sees the prefix (seq_lens - extend_seq_lens) and rows 0 to r.

    The next draft starts from row i * w + accepted - 1 of request i. With `select_index` the LM head computes
    these alone, as in SGLang of October 2026.
    """
    w = model.config.num_draft_tokens
    prefix = batch.seq_lens - batch.extend_seq_lens
    lens = prefix.unsqueeze(1) + torch.arange(1, w + 1, device=prefix.device)
    lens = lens.clamp(min=1)  # a request of padding is shorter than w; its rows see one column
    slots, mask = prefix_slots(model.req_to_token, batch.req_pool_indices, lens)
    hidden = model.features(
        batch.input_ids.view(-1, w),
        batch.hidden_states.unflatten(0, (-1, w)),
        batch.positions.view(-1, w),
        batch.out_cache_loc.view(-1, w),
        slots,
        mask,
    )
    hidden = hidden.flatten(0, 1)
    if batch.select_index is not None:
        hidden = hidden[batch.select_index]
    logits = model.target.lm_head(hidden)
    topk_p, topk_index = first_level(logits, model.config.topk)
    return DraftExtendOutput(logits, hidden, topk_p, topk_index)


def load_trained(config: EagleConfig, device: Device = "cpu"):
    """Target and head of data/models in the config's dtype. RuntimeError where its sizes are not theirs."""
    # Here, since scripts/record.py runs where there is little more than torch.
    from safetensors.torch import load_file

    models = both_models(config)
    weights = load_file(TRAINED / "tiny.safetensors")
    models.load_state_dict(weights)
    return models["target"].to(device), models["head"].to(device)


def load_prompts() -> list[list]:
    """The held-out prompts of data/models: starts of lines, cut at ragged lengths, as bytes."""
    text = (TRAINED / "prompts.txt").read_bytes()
    return [list(b"\n" + line) for line in text.splitlines()]
