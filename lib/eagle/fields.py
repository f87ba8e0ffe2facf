"""What a replay copies: sizes, the two field tables, and the batches they describe.

The tables are those of SGLang's `EAGLEDraftCudaGraphRunner` and `EAGLEDraftExtendCudaGraphRunner` in mid June
2026 (sglang pull request 28465). Every runner decision (buffer size, pad value, what is required, what is
large) is read from a table row; nothing about a field is written down twice. One departure: where the width
of hidden_states differs (EAGLE-3), SGLang leaves out the copy and the rows of an earlier step stay; here that
is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Field:
    """One input of a captured graph.

    A batch of `bs` requests brings `bs * prod(rows)` rows of shape `columns`; names stand for sizes:
    k top-k, s speculative steps, w draft tokens a request, H hidden size.
    """

    name: str
    dtype: torch.dtype | None  # of the static buffer; None is the model's dtype
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    pad: int | str | None = None  # value of the rows of padding; None leaves them as they are
    required: bool = True
    fill_if_missing: bool = False  # an absent optional field is filled with `pad` instead of left stale
    debug: bool = False  # has a buffer only with EagleConfig(debug_ids=True)
    host: bool = False  # lives in host memory and is copied there
    large: bool = False  # upstream keeps it out of the group
    source_dtype: torch.dtype | None = None  # of the batch's tensor, where it differs from the buffer's


# The attention back end's fill value: a padded request has one token, so that no softmax is over nothing.
SEQ_LEN_FILL_VALUE = 1

DRAFT_FIELDS = (
    Field("seq_lens", torch.int64, pad=SEQ_LEN_FILL_VALUE),
    Field("out_cache_loc", torch.int64, rows=("k", "s"), pad=0),
    Field("positions", torch.int64, rows=("k",), pad=0),
    Field("topk_p", torch.float32, columns=("k",), pad=0),
    Field("topk_index", torch.int64, columns=("k",), pad=0),
    Field("req_pool_indices", torch.int64, pad=0),
    Field("hidden_states", None, columns=("H",), pad=0, large=True),
    Field("seq_lens_cpu", torch.int64, pad=SEQ_LEN_FILL_VALUE, host=True),
    Field("rids_int", torch.int64, pad=0, required=False, debug=True),
    Field("bootstrap_room_ids_int", torch.int64, pad=-1, required=False, debug=True),
)

DRAFT_EXTEND_FIELDS = (
    Field("input_ids", torch.int64, rows=("w",)),
    Field("seq_lens", torch.int64, pad=SEQ_LEN_FILL_VALUE),
    Field("out_cache_loc", torch.int64, rows=("w",), pad=0),
    Field("positions", torch.int64, rows=("w",), pad=0),
    Field("req_pool_indices", torch.int64, pad=0),
    Field("extend_seq_lens", torch.int32, pad="w", required=False, fill_if_missing=True),
    Field("num_correct_drafts", torch.int32, pad="w", required=False),
    Field("num_accept_tokens", torch.int32, pad="w", required=False),
    Field("hidden_states", None, rows=("w",), columns=("H",), large=True),
    Field("seq_lens_cpu", torch.int64, pad=SEQ_LEN_FILL_VALUE, host=True),
)


def _int32_seq_lens(table: tuple[Field, ...]) -> tuple[Field, ...]:
    """The layout until sglang pull request 27840 (2026-06-11): int32 buffers, so this one copy converts."""
    return tuple(
        replace(f, dtype=torch.int32, source_dtype=torch.int64) if f.name.startswith("seq_lens") else f
        for f in table
    )


LAYOUTS: dict[str, dict[str, tuple[Field, ...]]] = {
    "int64_seq_lens": {"draft": DRAFT_FIELDS, "draft_extend": DRAFT_EXTEND_FIELDS},
    "int32_seq_lens": {
        "draft": _int32_seq_lens(DRAFT_FIELDS),
        "draft_extend": _int32_seq_lens(DRAFT_EXTEND_FIELDS),
    },
}


@dataclass(frozen=True)
class EagleConfig:
    """Sizes of target, draft head, tree and pools. Raises ValueError where they contradict each other."""

    hidden_size: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    num_target_layers: int = 3
    topk: int = 4  # k, speculative_eagle_topk
    num_steps: int = 3  # s, speculative_num_steps
    num_draft_tokens: int = 0  # w, speculative_num_draft_tokens, root included; 0: at most 16, all that exist
    capture_batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    max_context_len: int = 256  # tokens a request can have, drafted ones included
    kv_slots: int = (
        0  # of each KV pool, slot 0 (padding) included; 0: enough for every request at full length
    )
    dtype: torch.dtype = torch.bfloat16
    layout: str = "int64_seq_lens"  # or "int32_seq_lens", the converting layout before June 2026
    debug_ids: bool = False  # buffers for rids_int and bootstrap_room_ids_int

    def __post_init__(self) -> None:
        k, s, sizes = self.topk, self.num_steps, tuple(sorted(set(self.capture_batch_sizes)))
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {sorted(LAYOUTS)}, got {self.layout!r}")
        if not sizes or sizes[0] < 1:
            raise ValueError(f"capture_batch_sizes: expected sizes from 1 up, got {self.capture_batch_sizes}")
        if k < 1 or s < 2:
            raise ValueError(
                f"expected topk >= 1 and num_steps >= 2 (1 leaves nothing to capture), got {k}, {s}"
            )
        for name in ("hidden_size", "num_heads", "intermediate_size", "num_target_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.vocab_size < k:
            raise ValueError(f"vocab_size: expected at least topk, {k}, got {self.vocab_size}")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} does not split into {self.num_heads} even heads"
            )
        candidates = 1 + k + (s - 1) * k * k
        w = self.num_draft_tokens or min(16, candidates)
        if not s + 1 <= w <= candidates:
            raise ValueError(f"num_draft_tokens: expected {s + 1} to {candidates} for {k=}, {s=}, got {w}")
        if self.max_context_len <= max(w, s):
            raise ValueError(
                f"max_context_len: expected more than a step adds, {w}, got {self.max_context_len}"
            )
        slots = self.kv_slots or 1 + sizes[-1] * (self.max_context_len + k * s)
        for name, value in (("capture_batch_sizes", sizes), ("num_draft_tokens", w), ("kv_slots", slots)):
            object.__setattr__(self, name, value)

    @classmethod
    def tiny(cls, **overrides) -> EagleConfig:
        """The trained models of data/models: width 128, bytes as tokens, trees of 16, bfloat16."""
        return cls.preset("tiny", **overrides)

    @classmethod
    def preset(cls, name: str, **overrides) -> EagleConfig:
        """A named size; any field can be overridden. Raises ValueError for an unknown name."""
        if name not in PRESETS:
            raise ValueError(f"preset: expected one of {sorted(PRESETS)}, got {name!r}")
        return cls(**{**PRESETS[name], **overrides})

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def max_batch_size(self) -> int:
        return self.capture_batch_sizes[-1]

    def table(self, runner: str) -> tuple[Field, ...]:
        """The rows of "draft" or "draft_extend" that have a buffer here."""
        return tuple(f for f in LAYOUTS[self.layout][runner] if self.debug_ids or not f.debug)

    def shape(self, field: Field, batch_size: int) -> tuple[int, ...]:
        """Shape of a field's rows for `batch_size` requests."""
        sizes, rows = self.sizes, batch_size
        for name in field.rows:
            rows *= sizes[name]
        return (rows, *[sizes[name] for name in field.columns])

    def pad_value(self, field: Field) -> int:
        return self.sizes[field.pad] if isinstance(field.pad, str) else field.pad

    @cached_property
    def sizes(self) -> dict[str, int]:
        """What the names in a field's rows and columns stand for."""
        return {"k": self.topk, "s": self.num_steps, "w": self.num_draft_tokens, "H": self.hidden_size}


_WIDE = {"capture_batch_sizes": (1, 2, 4, 8, 16, 32, 64), "max_context_len": 2048}
# Published sizes of the model classes. Attention is plain multi-head here (Llama and Qwen group their key
# heads, DeepSeek compresses them); what a replay copies does not depend on it.
PRESETS: dict[str, dict] = {
    "tiny": {"hidden_size": 128, "num_heads": 4, "intermediate_size": 256, "vocab_size": 128},
    "llama3-8b": {
        "hidden_size": 4096, "num_heads": 32, "intermediate_size": 14336, "vocab_size": 128256, **_WIDE,
    },
    "qwen3-8b": {
        "hidden_size": 4096, "num_heads": 32, "intermediate_size": 12288, "vocab_size": 151936, **_WIDE,
    },
    "deepseek-v3": {
        "hidden_size": 7168, "num_heads": 56, "intermediate_size": 18432, "vocab_size": 129280, "topk": 1,
        **_WIDE,
    },
}  # fmt: skip


@dataclass
class Batch:
    """A step's inputs. Fields carry SGLang's names; shapes and dtypes are those of the config's table."""

    seq_lens: Tensor | None = None
    out_cache_loc: Tensor | None = None
    positions: Tensor | None = None
    req_pool_indices: Tensor | None = None
    hidden_states: Tensor | None = None
    seq_lens_cpu: Tensor | None = None

    @property
    def batch_size(self) -> int:
        if self.seq_lens is None:
            raise ValueError("seq_lens: required field is missing")
        if not isinstance(self.seq_lens, Tensor) or self.seq_lens.dim() != 1:
            raise ValueError(f"seq_lens: expected a tensor of one length a request, got {self.seq_lens!r}")
        return len(self.seq_lens)

    def to(self, device: str | torch.device):
        """The same batch with its device fields on `device`; seq_lens_cpu stays on the host."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(
            **{n: t if t is None or n == "seq_lens_cpu" else t.to(device) for n, t in tensors.items()}
        )


@dataclass
class DraftBatch(Batch):
    """Inputs of the draft graph: `seq_lens` committed tokens; the first level in topk_p, topk_index."""

    topk_p: Tensor | None = None
    topk_index: Tensor | None = None
    rids_int: Tensor | None = None
    bootstrap_room_ids_int: Tensor | None = None

    @classmethod
    def random(cls, config: EagleConfig, batch_size: int, seed: int = 0, device: str = "cpu") -> DraftBatch:
        """Valid inputs for a runner with its own random model: distinct requests, slots of their own."""
        c, k, s = config, config.topk, config.num_steps
        g = torch.Generator().manual_seed(seed)
        reqs = _random_requests(c, batch_size, g)
        seq_lens = torch.randint(1, c.max_context_len - s, (batch_size,), generator=g)
        draft_slots = torch.arange(c.max_context_len, c.max_context_len + k * s)
        logits = torch.randn(batch_size, c.vocab_size, generator=g)
        topk_p, topk_index = first_level(logits, k)
        return cls(
            seq_lens=seq_lens,
            out_cache_loc=(_first_slot(c, reqs)[:, None] + draft_slots).flatten(),
            positions=seq_lens.repeat_interleave(k),
            req_pool_indices=reqs,
            hidden_states=torch.randn(batch_size, c.hidden_size, generator=g).to(c.dtype),
            seq_lens_cpu=seq_lens.clone(),
            topk_p=topk_p,
            topk_index=topk_index,
            rids_int=torch.arange(batch_size) if c.debug_ids else None,
            bootstrap_room_ids_int=torch.arange(batch_size) if c.debug_ids else None,
        ).to(device)


@dataclass
class DraftExtendBatch(Batch):
    """Inputs of the draft-extend graph: w rows a request, of which the first `num_accept_tokens` count.

    `seq_lens` includes the w rows, so the prefix a row sees is `seq_lens - extend_seq_lens`.
    """

    input_ids: Tensor | None = None
    extend_seq_lens: Tensor | None = None
    num_correct_drafts: Tensor | None = None
    num_accept_tokens: Tensor | None = None

    @classmethod
    def random(
        cls, config: EagleConfig, batch_size: int, seed: int = 0, device: str = "cpu"
    ) -> DraftExtendBatch:
        """Valid inputs for a runner with its own random model: distinct requests, slots of their own."""
        c, w = config, config.num_draft_tokens
        g = torch.Generator().manual_seed(seed)
        reqs = _random_requests(c, batch_size, g)
        prefix = torch.randint(1, c.max_context_len - w, (batch_size,), generator=g)
        positions = prefix[:, None] + torch.arange(w)
        accepted = torch.randint(1, c.num_steps + 2, (batch_size,), generator=g, dtype=torch.int32)
        return cls(
            input_ids=torch.randint(0, c.vocab_size, (batch_size * w,), generator=g),
            seq_lens=prefix + w,
            out_cache_loc=(_first_slot(c, reqs)[:, None] + positions).flatten(),
            positions=positions.flatten(),
            req_pool_indices=reqs,
            extend_seq_lens=torch.full((batch_size,), w, dtype=torch.int32),
            num_correct_drafts=accepted - 1,
            num_accept_tokens=accepted,
            hidden_states=torch.randn(batch_size * w, c.hidden_size, generator=g).to(c.dtype),
            seq_lens_cpu=prefix + w,
        ).to(device)


def first_level(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Probabilities (float32) and indices of the k best tokens, (..., k); all ones for k = 1 (SGLang)."""
    probs, index = torch.softmax(logits.float(), dim=-1).topk(k, dim=-1)
    return (torch.ones_like(probs) if k == 1 else probs), index


def _random_requests(config: EagleConfig, batch_size: int, g: torch.Generator) -> Tensor:
    """Distinct request slots from 1 up; slot 0 is reserved for padding."""
    return torch.randperm(max(config.max_batch_size, batch_size), generator=g)[:batch_size] + 1


def _first_slot(config: EagleConfig, reqs: Tensor) -> Tensor:
    """Where the KV slots of a request start in the contiguous layout of `DraftModel.random`."""
    return 1 + (reqs - 1) * (config.max_context_len + config.topk * config.num_steps)
