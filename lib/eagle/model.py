"""The models: a small Llama-like target and its EAGLE head, reading and writing token-level KV pools.

The head is EAGLE's: `fc(concat(embed(token), hidden))`, one decoder layer, then the target's own LM head;
embedding and LM head are the target's. Position p of the head combines token p+1 with the feature (the last
hidden state) of position p and predicts the feature of p+1, hence the token p+2.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.eagle.fields import EagleConfig, first_level

TRAINED = Path(__file__).resolve().parents[2] / "data" / "models"


class Attention(Protocol):
    """How layers reach keys and values: (layer, q, k, v), all (B, T, heads, head_dim), to mixed values."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


def causal_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every row sees itself and the rows before it; nothing is cached. For training and as a reference."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class KVPool:
    """Keys and values by slot, (layers, slots, heads, head_dim). Slot 0 takes the writes of padding."""

    def __init__(self, config: EagleConfig, layers: int, device: str | torch.device) -> None:
        shape = (layers, config.kv_slots, config.num_heads, config.head_dim)
        self.k = torch.zeros(shape, dtype=config.dtype, device=device)
        self.v = torch.zeros_like(self.k)


class PoolAttention:
    """Writes the new rows' keys and values into `pool`, then attends over `read_slots`.

    write_slots (B, T), read_slots (B, C) int64; mask (B, T, C) bool, true where a row sees a column. A column
    that no row may see must still name a slot of the request itself: a masked weight of 0 times a NaN is a
    NaN, and slot 0 holds whatever padding left there.
    """

    def __init__(self, pool: KVPool, write_slots: Tensor, read_slots: Tensor, mask: Tensor) -> None:
        self.pool, self.mask = pool, mask.unsqueeze(1)
        self.write_slots, self.read_slots = write_slots.reshape(-1), read_slots

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.pool.k[layer], self.pool.v[layer]
        keys[self.write_slots] = k.flatten(0, 1)
        values[self.write_slots] = v.flatten(0, 1)
        k, v = (F.embedding(self.read_slots, t.flatten(1)).unflatten(-1, t.shape[1:]) for t in (keys, values))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).transpose(1, 2)


def prefix_slots(
    req_to_token: Tensor, req_pool_indices: Tensor, lens: Tensor, columns: int
) -> tuple[Tensor, Tensor]:
    """Slots (B, columns) of each request's first tokens, and which columns hold one (lens, (B,)).

    Columns past the end repeat the first slot, so that masked columns read the request's own values.
    """
    slots = req_to_token[req_pool_indices, :columns]
    valid = torch.arange(columns, device=slots.device) < lens[:, None]
    return torch.where(valid, slots, slots[:, :1]), valid


class DecoderLayer(nn.Module):
    """RMSNorm, rotary attention, RMSNorm, SwiGLU."""

    def __init__(self, config: EagleConfig, index: int) -> None:
        super().__init__()
        h, self.index, self.heads = config.hidden_size, index, config.num_heads
        self.attn_norm, self.mlp_norm = nn.RMSNorm(h, eps=1e-5), nn.RMSNorm(h, eps=1e-5)
        self.qkv, self.out = nn.Linear(h, 3 * h, bias=False), nn.Linear(h, h, bias=False)
        self.gate_up = nn.Linear(h, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, h, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        qkv = self.qkv(self.attn_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k = rotate(qkv[:, :, :2], *rotary).unbind(2)
        x = x + self.out(attention(self.index, q, k, qkv[:, :, 2]).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotary_tables(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, (B, T, 1, 1, head_dim / 2), of positions (B, T)."""
    freqs = 10000.0 ** (-torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
    angles = (positions[..., None] * freqs)[:, :, None, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class TargetModel(nn.Module):
    """The model whose text is wanted. Its last hidden state, normed, is the feature that EAGLE predicts."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_target_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> tuple[Tensor, Tensor]:
        """input_ids, positions (B, T) -> logits (B, T, V), features (B, T, H)."""
        x = self.embed(input_ids)
        rotary = rotary_tables(positions, self.config.head_dim, x.dtype)
        for layer in self.layers:
            x = layer(x, rotary, attention)
        x = self.norm(x)
        return self.lm_head(x), x


class EagleHead(nn.Module):
    """The draft model. `embed` and `lm_head` are the target's, neither trained nor stored with it."""

    def __init__(self, config: EagleConfig, embed: nn.Embedding, lm_head: nn.Linear) -> None:
        super().__init__()
        self.config = config
        self.shared = (embed, lm_head)  # a tuple keeps them out of the head's own parameters
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = DecoderLayer(config, 0)

    def forward(
        self, input_ids: Tensor, hidden_states: Tensor, positions: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """input_ids, positions (B, T), hidden_states (B, T, H) -> logits (B, T, V), features (B, T, H)."""
        embed, lm_head = self.shared
        x = self.fc(torch.cat((embed(input_ids), hidden_states), dim=-1))
        x = self.layer(x, rotary_tables(positions, self.config.head_dim, x.dtype), attention)
        return lm_head(x), x


@dataclass
class DraftModel:
    """What both graphs compute with: the head, its KV pool, the table from request and position to slot."""

    config: EagleConfig
    head: EagleHead
    kv: KVPool
    req_to_token: Tensor  # (1 + max_batch_size, max_context_len) int64; row 0 belongs to padding

    @classmethod
    def random(cls, config: EagleConfig, device: str | torch.device = "cpu", seed: int = 0) -> DraftModel:
        """Seeded random weights, every pool slot in use: a wrongly copied field changes the output.

        Raises ValueError where `kv_slots` does not hold every request at full length.
        """
        c, g = config, torch.Generator(device).manual_seed(seed)
        stride = c.max_context_len + c.topk * c.num_steps
        if (needed := 1 + stride * c.max_batch_size) > c.kv_slots:
            raise ValueError(f"kv_slots: expected at least {needed} for a random model, got {c.kv_slots}")
        with torch.device("meta"):
            embed = nn.Embedding(c.vocab_size, c.hidden_size)
            lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
            head = EagleHead(c, embed, lm_head)
        for module in (embed, lm_head, head):
            for p in module.to(c.dtype).to_empty(device=device).requires_grad_(False).parameters():
                if p.dim() == 2:
                    p.normal_(std=p.shape[1] ** -0.5, generator=g)
                else:
                    p.fill_(1)  # norms
        kv = KVPool(c, layers=1, device=device)
        kv.k[:, 1:].normal_(generator=g)
        kv.v[:, 1:].normal_(generator=g)
        req_to_token = torch.zeros(1 + c.max_batch_size, c.max_context_len, dtype=torch.int64, device=device)
        starts = 1 + stride * torch.arange(c.max_batch_size, device=device)
        req_to_token[1:] = starts[:, None] + torch.arange(c.max_context_len, device=device)
        return cls(c, head, kv, req_to_token)


class DraftOutput(NamedTuple):
    """The tree, as SGLang's `organize_draft_results` leaves it; candidates are numbered level by level."""

    parent_list: Tensor  # (bs, 1 + k + (s - 2) * k), the candidate that each group of k children hangs on
    top_scores_index: Tensor  # (bs, w - 1), the chosen candidates, ascending
    draft_tokens: Tensor  # (bs, w - 1), their tokens
    scores: Tensor  # (bs, k + (s - 1) * k * k) float32, the probability of the path to every candidate


@torch.no_grad()
def draft_forward(
    model: DraftModel, inputs: dict[str, Tensor], level_logits: list[Tensor] | None = None
) -> DraftOutput:
    """Grow the tree over s levels: the first is given, the head runs s - 1 times, k branches at a time.

    A branch sees the committed prefix and its true ancestors, wherever their lanes were (SGLang's lanes keep
    their own history instead). `level_logits`, where given, receives each run's logits, (bs, k, V).
    """
    c, (bs, k) = model.config, inputs["topk_index"].shape
    device = model.req_to_token.device
    out_cache_loc = inputs["out_cache_loc"].view(bs, k, c.num_steps)
    positions = inputs["positions"].view(bs, k)
    slots, valid = prefix_slots(
        model.req_to_token, inputs["req_pool_indices"], inputs["seq_lens"], c.max_context_len
    )
    valid = valid[:, None].expand(-1, k, -1)
    lanes = torch.arange(k, device=device)

    # Level 1: one lane for each candidate that draft-extend left.
    tokens, scores = inputs["topk_index"], inputs["topk_p"]
    hidden = inputs["hidden_states"][:, None].expand(-1, k, -1)
    ancestors = lanes.expand(bs, k)[..., None]  # (bs, lanes, levels): the lane of each ancestor, itself last
    score_list, token_list = [scores], [tokens]
    parent_list = [torch.arange(-1, k, device=device).expand(bs, -1)]
    for level in range(c.num_steps - 1):
        seen = (ancestors[..., None, :] == lanes[:, None]).flatten(2)  # columns: lane-major, as out_cache_loc
        attention = PoolAttention(
            model.kv,
            write_slots=out_cache_loc[:, :, level],
            read_slots=torch.cat((slots, out_cache_loc[:, :, : level + 1].flatten(1)), dim=1),
            mask=torch.cat((valid, seen), dim=2),
        )
        logits, hidden = model.head(tokens, hidden, positions + level, attention)
        if level_logits is not None:
            level_logits.append(logits)
        probs, index = first_level(logits, k)
        paths = (scores[..., None] * probs).flatten(1)  # k * k children
        index = index.flatten(1)
        score_list.append(paths)
        token_list.append(index)
        if level == c.num_steps - 2:
            break
        scores, best = paths.topk(k, dim=-1)
        parent_list.append(best + k + level * k * k)
        tokens, parent = index.gather(1, best), best // k
        hidden = hidden.gather(1, parent[..., None].expand_as(hidden))
        ancestors = ancestors.gather(1, parent[..., None].expand_as(ancestors))
        ancestors = torch.cat((ancestors, lanes.expand(bs, k)[..., None]), dim=2)

    scores = torch.cat(score_list, dim=1)
    # A stable sort: at equal scores the parent comes first, so that no chosen node lacks its parent.
    chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, : c.num_draft_tokens - 1]
    chosen = chosen.sort(dim=1).values
    return DraftOutput(
        torch.cat(parent_list, dim=1), chosen, torch.cat(token_list, dim=1).gather(1, chosen), scores
    )


class DraftExtendOutput(NamedTuple):
    """One row for each input row; the worker picks row i * w + accepted - 1 of request i."""

    logits: Tensor  # (bs * w, V)
    hidden_states: Tensor  # (bs * w, H)
    topk_p: Tensor  # (bs * w, k) float32
    topk_index: Tensor  # (bs * w, k)


@torch.no_grad()
def draft_extend_forward(model: DraftModel, inputs: dict[str, Tensor]) -> DraftExtendOutput:
    """The head over w rows a request; row r sees the prefix (seq_lens - extend_seq_lens) and rows 0 to r."""
    c, bs = model.config, inputs["seq_lens"].shape[0]
    rows = (bs, c.num_draft_tokens)
    slots, valid = prefix_slots(
        model.req_to_token, inputs["req_pool_indices"], inputs["seq_lens"], c.max_context_len
    )
    prefix = (inputs["seq_lens"] - inputs["extend_seq_lens"])[:, None]
    last_seen = (prefix + torch.arange(c.num_draft_tokens, device=slots.device)).clamp(
        min=0
    )  # padding sees one
    columns = torch.arange(c.max_context_len, device=slots.device)
    mask = valid[:, None] & (columns <= last_seen[..., None])
    logits, hidden = model.head(
        inputs["input_ids"].view(rows),
        inputs["hidden_states"].view(*rows, -1),
        inputs["positions"].view(rows),
        PoolAttention(model.kv, inputs["out_cache_loc"].view(rows), slots, mask),
    )
    logits = logits.flatten(0, 1)
    return DraftExtendOutput(logits, hidden.flatten(0, 1), *first_level(logits, c.topk))


def load_trained(
    config: EagleConfig, device: str | torch.device = "cpu", directory: Path = TRAINED
) -> tuple[TargetModel, EagleHead]:
    """Target and head of data/models in the config's dtype. Raises RuntimeError where sizes do not fit."""
    from safetensors.torch import load_file

    weights = load_file(directory / "tiny.safetensors")
    target = TargetModel(config)
    head = EagleHead(config, target.embed, target.lm_head)
    for name, module in (("target.", target), ("head.", head)):
        module.load_state_dict({n.removeprefix(name): t for n, t in weights.items() if n.startswith(name)})
        module.to(device, config.dtype).requires_grad_(False).eval()
    return target, head


def load_prompts(directory: Path = TRAINED) -> list[list[int]]:
    """The held-out prompts of data/models: starts of lines, cut at ragged lengths, as bytes."""
    lines = (directory / "prompts.txt").read_text(encoding="ascii").splitlines()
    return [list(f"\n{line}".encode("ascii")) for line in lines]
