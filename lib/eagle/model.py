"""The models: a small Llama-like target and its EAGLE head, reading and writing token-level KV pools.

The head is EAGLE's: `fc(concat(embed(token), hidden))`, one decoder layer, then the target's own LM head;
embedding and LM head are the target's. Position p of the head combines token p+1 with the feature (the last
hidden state) of position p and predicts the feature of p+1, hence the token p+2.

In shapes: B rows of T tokens, H hidden size, V vocabulary; bs requests, k top-k, s steps, w draft tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from lib.eagle.fields import EagleConfig, first_level

TRAINED = Path(__file__).parents[2] / "data/models"


# How a layer reaches keys and values: (layer, q, k, v), all (B, heads, T, head_dim), to mixed values.
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def causal_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every row sees itself and the rows before it; nothing is cached. For training and as a reference."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def kv_pool(config: EagleConfig, layers: int, device: Device) -> Tensor:
    """Keys, then values, of every slot: (layers, slots, 2 * H)."""
    shape = (layers, config.kv_slots, 2 * config.hidden_size)
    return torch.zeros(shape, dtype=config.dtype, device=device)


@dataclass
class PoolAttention:
    """Writes the new rows' keys and values into `pool`, then attends over `read_slots`.

    A column that no row may see must still name a slot of the request itself: a masked weight of 0 times a
    NaN is a NaN, and slot 0 holds whatever padding left there.
    """

    pool: Tensor
    write_slots: Tensor  # (B, T) int64
    read_slots: Tensor  # (B, C) int64
    mask: Tensor  # (B, T, C) bool, true where a row sees a column

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slots = self.pool[layer]
        slots[self.write_slots] = join_heads(torch.cat((k, v), dim=1))
        read = F.embedding(self.read_slots, slots)
        k, v = split_heads(read, 2 * q.shape[1]).chunk(2, dim=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:, None])


def prefix_slots(table: Tensor, requests: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """Slots (B, C) of requests' tokens by a table (requests, C); mask (B, T, C) of the first `lens` (B, T).

    No row may see more than the last. Columns that it does not see repeat the request's first slot.
    """
    slots = table[requests]
    mask = torch.arange(slots.shape[1], device=slots.device) < lens[..., None]
    return torch.where(mask[:, -1], slots, slots[:, :1]), mask


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, H) -> (B, heads, T, head_dim)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(B, heads, T, head_dim) -> (B, T, H)."""
    return x.transpose(1, 2).flatten(2)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of x (B, heads, T, head_dim) at positions (B, T): halves of a head are pairs."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None, :, None] * frequencies
    cos = angles.cos().to(x.dtype)
    sin = angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class DecoderLayer(nn.Module):
    """RMSNorm, rotary attention, RMSNorm, SwiGLU."""

    def __init__(self, config: EagleConfig, index: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        inner = config.intermediate_size
        self.index = index
        self.heads = config.num_heads
        self.attn_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        qkv = split_heads(self.qkv(self.attn_norm(x)), 3 * self.heads)
        q, k, v = qkv.chunk(3, dim=1)
        mixed = attention(self.index, rotate(q, positions), rotate(k, positions), v)
        x = x + self.out(join_heads(mixed))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class TargetModel(nn.Module):
    """The model whose text is wanted. Its last hidden state, normed, is the feature that EAGLE predicts."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_target_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """input_ids, positions (B, T) -> features (B, T, H). `lm_head` makes logits of them."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, positions, attention)
        return self.norm(x)


class EagleHead(nn.Module):
    """The draft model, between the target's embedding and the target's LM head."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = DecoderLayer(config, 0)

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Embedded tokens and hidden (B, T, H), positions (B, T) -> features (B, T, H)."""
        pair = torch.cat((embedded, hidden), dim=-1)
        return self.layer(self.fc(pair), positions, attention)


@dataclass
class DraftModel:
    """What both graphs compute with: the head, its KV pool, the table from request and position to slot."""

    config: EagleConfig
    target: TargetModel  # for its embedding and LM head
    head: EagleHead
    kv: Tensor  # (1, slots, 2 * H), see `kv_pool`
    req_to_token: Tensor  # (1 + max_batch_size, max_context_len) int64; row 0 belongs to padding

    @classmethod
    def random(cls, config: EagleConfig, device: Device = "cpu", seed: int = 0) -> DraftModel:
        """Seeded random weights, every pool slot in use: a wrongly copied field changes the output."""
        generator = torch.Generator(device).manual_seed(seed)
        with torch.device("meta"):  # no time for initial values that are thrown away
            target = TargetModel(config)
            head = EagleHead(config)
        for module in (target.embed, target.lm_head, head):
            module.to(config.dtype).to_empty(device=device).requires_grad_(False)
            for weight in module.parameters():
                around = 2 - weight.dim()  # 1 for those of a norm
                weight.normal_(around, weight.shape[-1] ** -0.5, generator=generator)
        # A request owns one stretch of slots: for its tokens, then for its draft branches.
        slots = torch.arange(1, config.kv_slots, device=device).view(config.max_batch_size, -1)
        req_to_token = F.pad(slots[:, : config.max_context_len], (0, 0, 1, 0))
        kv = kv_pool(config, 1, device).normal_(generator=generator)
        return cls(config, target, head, kv, req_to_token)


class DraftOutput(NamedTuple):
    """The tree, as SGLang's `organize_draft_results` leaves it; candidates are numbered level by level."""

    parent_list: Tensor  # (bs, 1 + k + (s - 2) * k), the candidate that each group of k children hangs on
    top_scores_index: Tensor  # (bs, w - 1), the chosen candidates, ascending
    draft_tokens: Tensor  # (bs, w - 1), their tokens
    scores: Tensor  # (bs, k + (s - 1) * k * k) float32, the probability of the path to every candidate


@torch.no_grad()
def draft_forward(model: DraftModel, inputs: dict[str, Tensor]) -> DraftOutput:
    """Grow the tree over s levels: the first is given, the head runs s - 1 times, k branches at a time.

    A branch sees the committed prefix and its true ancestors, wherever their lanes were (SGLang's lanes keep
    their own history instead).
    """
    tokens = inputs["topk_index"]  # of all candidates so far
    scores = inputs["topk_p"]
    bs, k = tokens.shape
    lane_slots = inputs["out_cache_loc"].view(bs, k, -1)
    positions = inputs["positions"].view(bs, k)
    itself = torch.eye(k, dtype=torch.bool, device=tokens.device).expand(bs, k, k)
    # At first the committed text is the only lane. Slots (bs, C) are what lanes read, seen what each sees.
    parents = torch.full_like(tokens[:, :1], -1)
    hidden = inputs["hidden_states"][:, None]
    lens = inputs["seq_lens"][:, None]
    slots, seen = prefix_slots(model.req_to_token, inputs["req_pool_indices"], lens)
    first = 0  # of the candidates of the last level
    for level in range(model.config.num_steps - 1):
        # The k best of them take over the lanes, and see what their parents saw and themselves.
        lane_scores, best = scores[:, first:].topk(k)
        lane_tokens = tokens[:, first:].gather(1, best)
        parents = torch.cat((parents, first + best), dim=1)
        lane = best[..., None] // k
        hidden = hidden.take_along_dim(lane, dim=1)
        seen = torch.cat((seen.take_along_dim(lane, dim=1), itself), dim=2)
        write_slots = lane_slots[..., level]
        slots = torch.cat((slots, write_slots), dim=1)
        attention = PoolAttention(model.kv, write_slots, slots, seen)
        embedded = model.target.embed(lane_tokens)
        hidden = model.head(embedded, hidden, positions + level, attention)
        logits = model.target.lm_head(hidden)
        probabilities, children = first_level(logits, k)
        path_scores = lane_scores[..., None] * probabilities
        first = tokens.shape[1]
        tokens = torch.cat((tokens, children.flatten(1)), dim=1)
        scores = torch.cat((scores, path_scores.flatten(1)), dim=1)

    # A stable sort: at equal scores the parent comes first, so that no chosen node lacks its parent.
    ranked = scores.argsort(dim=1, descending=True, stable=True)
    best = ranked[:, : model.config.num_draft_tokens - 1]
    chosen, _ = best.sort()
    return DraftOutput(parents, chosen, tokens.gather(1, chosen), scores)


class DraftExtendOutput(NamedTuple):
    """One row for each input row, or for each request where the graph itself picks it (`select_index`)."""

    logits: Tensor  # (rows, V)
    hidden_states: Tensor  # (rows, H)
    topk_p: Tensor  # (rows, k) float32
    topk_index: Tensor  # (rows, k)


@torch.no_grad()
def draft_extend_forward(model: DraftModel, inputs: dict[str, Tensor]) -> DraftExtendOutput:
    """The head over w rows a request; row r sees the prefix (seq_lens - extend_seq_lens) and rows 0 to r.

    The next draft starts from row i * w + accepted - 1 of request i. With the input `select_index` (bs,), the
    LM head computes these rows only, as in SGLang of October 2026; without it, all bs * w.
    """
    w = model.config.num_draft_tokens
    prefix = inputs["seq_lens"] - inputs["extend_seq_lens"]
    lens = prefix[:, None] + torch.arange(1, w + 1, device=prefix.device)
    lens = lens.clamp(min=1)  # a request of padding is shorter than w; its rows see one column
    slots, mask = prefix_slots(model.req_to_token, inputs["req_pool_indices"], lens)
    hidden = model.head(
        model.target.embed(inputs["input_ids"].view(-1, w)),
        inputs["hidden_states"].unflatten(0, (-1, w)),
        inputs["positions"].view(-1, w),
        PoolAttention(model.kv, inputs["out_cache_loc"].view(-1, w), slots, mask),
    ).flatten(0, 1)
    if "select_index" in inputs:
        hidden = hidden[inputs["select_index"]]
    logits = model.target.lm_head(hidden)
    return DraftExtendOutput(logits, hidden, *first_level(logits, model.config.topk))


def load_trained(
    config: EagleConfig, device: Device = "cpu", directory: Path = TRAINED
) -> tuple[TargetModel, EagleHead]:
    """Target and head of data/models in the config's dtype.

    Raises ValueError where the weights are not those of the checksum beside them, RuntimeError where the
    config's sizes are not theirs.
    """
    # Here, since scripts/record.py does without it, on a GPU machine with little more than torch.
    from safetensors.torch import load

    path = directory / "tiny.safetensors"
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() not in path.with_suffix(".sha256").read_text():
        raise ValueError(f"{path}: truncated or altered, its SHA-256 is not the one in tiny.sha256")
    models = nn.ModuleDict({"target": TargetModel(config), "head": EagleHead(config)})
    models.load_state_dict(load(data))
    models.to(device, config.dtype).requires_grad_(False).eval()
    return models["target"], models["head"]


def load_prompts() -> list[list[int]]:
    """The held-out prompts of data/models: starts of lines, cut at ragged lengths, as bytes."""
    lines = (TRAINED / "prompts.txt").read_bytes().splitlines()
    return [list(b"\n" + line) for line in lines]
