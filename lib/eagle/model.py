"""The models: a small Llama-like target and its EAGLE head, reading and writing token-level KV pools.

The head is EAGLE's: `fc(concat(embed(token), hidden))`, one decoder layer, then the target's own LM head;
embedding and LM head are the target's. Position p of the head combines token p+1 with the feature (the last
hidden state) of position p and predicts the feature of p+1, hence the token p+2.

In shapes: B rows of T tokens, H hidden size, V vocabulary; bs requests, k top-k, s steps, w draft tokens.
What has no type is a tensor, or `attention`: how a layer reaches keys and values, a function of (layer, q, k,
v), all (B, heads, T, head_dim), that returns mixed values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

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


def pool_attention(pool, write_slots, read_slots, mask, layer, q, k, v):
    """Writes the new rows' keys and values to slots (B, T) of the pool, then attends over others, (B, C).

    mask (B, T, C) is true where a row sees a column. A column that no row may see must still name a slot of
    the request itself: a masked weight of 0 times a NaN is a NaN, and slot 0 holds what padding left there.
    """
    slots = pool[layer]
    written = torch.cat((k, v), dim=1)
    rows = join_heads(written)
    slots[write_slots] = rows
    read = F.embedding(read_slots, slots)
    read = split_heads(read, written.shape[1])
    k, v = read.chunk(2, dim=1)
    mask = mask.unsqueeze(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def prefix_slots(slots, lens):
    """Of each request's slots (B, C) a row sees the first `lens` (B, T): slots again, and mask (B, T, C).

    No row may see more than the last. Columns that it does not see repeat the request's first slot.
    """
    columns = torch.arange(slots.shape[1], device=slots.device)
    lens = lens.unsqueeze(2)
    mask = columns < lens
    own = slots[:, :1]
    slots = torch.where(mask[:, -1], slots, own)
    return slots, mask


def split_heads(x, heads):
    """(B, T, H) -> (B, heads, T, head_dim)."""
    x = x.unflatten(2, (heads, -1))
    return x.transpose(1, 2)


def join_heads(x):
    """(B, heads, T, head_dim) -> (B, T, H)."""
    x = x.transpose(1, 2)
    return x.flatten(2)


def rotate(x, positions):
    """Rotary embedding of x (B, heads, T, head_dim) at positions (B, T): halves of a head are pairs."""
    first, second = x.chunk(2, dim=3)
    half = first.shape[3]
    steps = torch.arange(half, device=x.device)
    frequencies = 10000.0 ** (-steps / half)
    positions = positions[:, None, :, None]
    angles = positions * frequencies
    angles = torch.cat((angles, angles), dim=3)
    turned = torch.cat((-second, first), dim=3)
    cos = angles.cos().to(x.dtype)
    sin = angles.sin().to(x.dtype)
    return x * cos + turned * sin


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
        qkv = self.qkv(normed)
        qkv = split_heads(qkv, 3 * self.heads)
        q, k, v = qkv.chunk(3, dim=1)
        q = rotate(q, positions)
        k = rotate(k, positions)
        mixed = attention(self.index, q, k, v)
        mixed = join_heads(mixed)
        x = x + self.out(mixed)
        normed = self.mlp_norm(x)
        gate_up = self.gate_up(normed)
        gate, up = gate_up.chunk(2, dim=2)
        inner = F.silu(gate) * up
        return x + self.down(inner)


class TargetModel(nn.Module):
    """The model whose text is wanted. Its last hidden state, normed, is the feature that EAGLE predicts."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        hidden = config.hidden_size
        vocab = config.vocab_size
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList()
        for index in range(config.num_target_layers):
            self.layers.append(DecoderLayer(config, index))
        self.norm = RMSNorm(hidden)
        self.lm_head = Linear(hidden, vocab)

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
        hidden = config.hidden_size
        self.fc = Linear(2 * hidden, hidden)
        self.layer = DecoderLayer(config, 0)

    def forward(self, embedded, hidden, positions, attention):
        """Embedded tokens and hidden (B, T, H), positions (B, T) -> features (B, T, H)."""
        pair = torch.cat((embedded, hidden), dim=2)
        x = self.fc(pair)
        return self.layer(x, positions, attention)


def both_models(config: EagleConfig) -> nn.ModuleDict:
    """Target and head in the config's dtype."""
    models = nn.ModuleDict()
    models["target"] = TargetModel(config)
    models["head"] = EagleHead(config)
    models.to(config.dtype)
    return models.requires_grad_(False)


@dataclass
class DraftModel:
    """What both graphs compute with: the head, its KV pool, the table from request and position to slot."""

    config: EagleConfig
    target: TargetModel  # for its embedding and LM head
    head: EagleHead
    kv: Tensor  # (1, slots, 2 * H), see `EagleConfig.kv_pool`
    req_to_token: Tensor  # see `EagleConfig.request_table`

    @classmethod
    def random(cls, config: EagleConfig, device: Device = "cpu", seed: int = 0) -> DraftModel:
        """Seeded random weights, every pool slot in use: a wrongly copied field changes the output."""
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(seed)
            models = both_models(replace(config, num_target_layers=0))
            kv = config.kv_pool(1, device).normal_()
        return cls(config, models["target"], models["head"], kv, config.request_table(device))

    def features(self, tokens, hidden, positions, write_slots, read_slots, mask):
        """The head over tokens and hidden, written to and read from the pool: (B, T, H)."""
        attention = partial(pool_attention, self.kv, write_slots, read_slots, mask)
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

    A branch sees the committed prefix and its true ancestors, wherever their lanes were (SGLang's lanes keep
    their own history instead).
    """
    tokens = batch.topk_index  # of all candidates so far
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
    slots = model.req_to_token[batch.req_pool_indices]
    slots, seen = prefix_slots(slots, lens)
    first = 0  # of the candidates of the last level
    more_levels = model.config.num_steps - 1
    for level in range(more_levels):
        # The k best of them take over the lanes, and see what their parents saw and themselves.
        level_scores = scores[:, first:]
        lane_scores, best = level_scores.topk(k)
        lanes = first + best
        lane_tokens = tokens.gather(1, lanes)
        parents = torch.cat((parents, lanes), dim=1)
        lane = best // k
        lane = lane.unsqueeze(2)
        hidden = hidden.take_along_dim(lane, dim=1)
        seen = seen.take_along_dim(lane, dim=1)
        seen = torch.cat((seen, itself), dim=2)
        write_slots = lane_slots[..., level]
        slots = torch.cat((slots, write_slots), dim=1)
        hidden = model.features(lane_tokens, hidden, positions + level, write_slots, slots, seen)
        logits = model.target.lm_head(hidden)
        probabilities, children = first_level(logits, k)
        path_scores = lane_scores.unsqueeze(2) * probabilities
        path_scores = path_scores.flatten(1)
        children = children.flatten(1)
        first = tokens.shape[1]
        tokens = torch.cat((tokens, children), dim=1)
        scores = torch.cat((scores, path_scores), dim=1)

    # A stable sort: at equal scores the parent comes first, so that no chosen node lacks its parent.
    ranked = scores.argsort(dim=1, descending=True, stable=True)
    budget = model.config.num_draft_tokens - 1  # the root is given
    best = ranked[:, :budget]
    chosen, _ = best.sort()
    tokens = tokens.gather(1, chosen)
    return DraftOutput(parents, chosen, tokens, scores)


class DraftExtendOutput(NamedTuple):
    """One row for each input row, or for each request where the graph itself picks it (`select_index`)."""

    logits: Tensor  # (rows, V)
    hidden_states: Tensor  # (rows, H)
    topk_p: Tensor  # (rows, k) float32
    topk_index: Tensor  # (rows, k)


@torch.no_grad()
def draft_extend_forward(model: DraftModel, batch: DraftExtendBatch) -> DraftExtendOutput:
    """The head over w rows a request; row r sees the prefix (seq_lens - extend_seq_lens) and rows 0 to r.

    The next draft starts from row i * w + accepted - 1 of request i. With `select_index` (bs,), the
    LM head computes these rows only, as in SGLang of October 2026; without it, all bs * w.
    """
    w = model.config.num_draft_tokens
    prefix = batch.seq_lens - batch.extend_seq_lens
    rows = torch.arange(1, w + 1, device=prefix.device)
    lens = prefix.unsqueeze(1) + rows
    lens = lens.clamp(min=1)  # a request of padding is shorter than w; its rows see one column
    slots = model.req_to_token[batch.req_pool_indices]
    slots, mask = prefix_slots(slots, lens)
    input_ids = batch.input_ids.view(-1, w)
    hidden = batch.hidden_states.unflatten(0, (-1, w))
    positions = batch.positions.view(-1, w)
    write_slots = batch.out_cache_loc.view(-1, w)
    hidden = model.features(input_ids, hidden, positions, write_slots, slots, mask)
    hidden = hidden.flatten(0, 1)
    if batch.select_index is not None:
        hidden = hidden[batch.select_index]
    logits = model.target.lm_head(hidden)
    topk_p, topk_index = first_level(logits, model.config.topk)
    return DraftExtendOutput(logits, hidden, topk_p, topk_index)


def load_trained(config: EagleConfig, device: Device = "cpu"):
    """Target and head of data/models in the config's dtype. RuntimeError where its sizes are not theirs."""
    # Here, since scripts/record.py does without it, on a GPU machine with little more than torch.
    from safetensors.torch import load_file

    models = both_models(config)
    weights = load_file(TRAINED / "tiny.safetensors")
    models.load_state_dict(weights)
    models.to(device)
    return models["target"], models["head"]


def load_prompts() -> list[list[int]]:
    """The held-out prompts of data/models: starts of lines, cut at ragged lengths, as bytes."""
    text = (TRAINED / "prompts.txt").read_bytes()
    lines = text.splitlines()
    return [list(b"\n" + line) for line in lines]
