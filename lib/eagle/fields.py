"""What a replay copies: sizes, the field tables by date, and the batches they describe.

The tables are those of SGLang's `EAGLEDraftCudaGraphRunner` and `EAGLEDraftExtendCudaGraphRunner`; runners
read there how large a buffer is, what pads it, what is required and what is large. A new field is a row in a
table, an attribute of the batch and a value in its `draw` (one with an option gets that by itself). One
departure: where the width of hidden_states differs (EAGLE-3), SGLang leaves out the copy and the rows of an
earlier step stay; here that is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import ClassVar, Self

import torch
from torch import Tensor

int32, int64, float32 = torch.int32, torch.int64, torch.float32


@dataclass(frozen=True)
class Field:
    """One input of a captured graph.

    A batch of `bs` requests brings `bs * prod(rows)` rows of shape `columns`, names of `EagleConfig.sizes`:
    k top-k, s speculative steps, w draft tokens a request, H hidden size, V vocabulary.
    """

    name: str
    dtype: torch.dtype | None  # of the static buffer; None is the model's dtype
    rows: str = ""
    columns: str = ""
    pad: int | str | None = None  # value of the rows of padding; None leaves them as they are
    required: bool = True
    fill_if_missing: bool = False  # an absent optional field is filled with `pad` instead of left stale
    option: str = ""  # has a buffer only where EagleConfig.options names it
    host: bool = False  # lives in host memory and is copied there
    large: bool = False  # SGLang keeps it out of the group
    source_dtype: torch.dtype | None = None  # of the batch's tensor, where it differs from the buffer's
    dim: int = 0  # the dimension that the rows lie in; the columns come before it


Table = tuple[Field, ...]
Given = Tensor | None  # of a batch: None where a field does not come
Optional = partial(Field, required=False)

# The attention back end's fill value: a padded request has one token, so that no softmax is over nothing.
SEQ_LEN_FILL_VALUE = 1

# Mid June 2026, sglang pull request 28465.
DRAFT_FIELDS = (
    Field("seq_lens", int64, pad=SEQ_LEN_FILL_VALUE),
    Field("out_cache_loc", int64, rows="k s", pad=0),
    Field("positions", int64, rows="k", pad=0),
    Field("topk_p", float32, columns="k", pad=0),
    Field("topk_index", int64, columns="k", pad=0),
    Field("req_pool_indices", int64, pad=0),
    Field("hidden_states", None, columns="H", pad=0, large=True),
    Field("seq_lens_cpu", int64, pad=SEQ_LEN_FILL_VALUE, host=True),
    Optional("rids_int", int64, pad=0, option="ids"),
    Optional("bootstrap_room_ids_int", int64, pad=-1, option="ids"),
)
DRAFT_EXTEND_FIELDS = (
    Field("input_ids", int64, rows="w"),
    Field("seq_lens", int64, pad=SEQ_LEN_FILL_VALUE),
    Field("out_cache_loc", int64, rows="w", pad=0),
    Field("positions", int64, rows="w", pad=0),
    Field("req_pool_indices", int64, pad=0),
    Optional("extend_seq_lens", int32, pad="w", fill_if_missing=True),
    Optional("num_correct_drafts", int32, pad="w"),
    Optional("num_accept_tokens", int32, pad="w"),
    Field("hidden_states", None, rows="w", columns="H", large=True),
    Field("seq_lens_cpu", int64, pad=SEQ_LEN_FILL_VALUE, host=True),
)

# What 0.5.23 (October 2026) has beyond, without the two fills of data parallelism, which no batch brings.
Sampling = partial(Optional, option="sampling", large=True)
NEW_DRAFT_FIELDS = (
    Optional("mrope_positions", int64, rows="k", columns="mrope", pad=0, option="mrope", dim=1),
    Sampling("draft_probs", float32, columns="V", pad=0),
    Optional("dsa_seed_topk", int32, columns="dsa", pad=0, fill_if_missing=True, option="dsa", large=True),
    Sampling("temperatures", float32, columns="one"),
    Sampling("sampling_seed", int64),
    Sampling("top_ks", int32),
)
NEW_DRAFT_EXTEND_FIELDS = (
    # The row of each request to keep. Its buffer starts as 0 and is never padded: any row will do.
    Field("select_index", int64),
    Optional("mrope_positions", int64, rows="w", columns="mrope", pad=0, option="mrope", dim=1),
    Optional("mamba_track_indices", int64, pad=0, option="mamba"),
)
OPTIONS = ("ids", "mrope", "sampling", "dsa", "mamba")


def with_int32_seq_lens(table: Table) -> Table:
    """Until sglang pull request 27840 (2026-06-11): int32 buffers, so that this one copy converts."""
    changes = {"dtype": int32, "source_dtype": int64}
    return tuple(replace(f, **changes) if f.name.startswith("seq_lens") else f for f in table)


def with_new_fields(table: Table, new: Table) -> Table:
    """0.5.23: hidden_states and seq_lens_cpu are optional, too."""
    now_optional = ("hidden_states", "seq_lens_cpu")
    return tuple(replace(f, required=False) if f.name in now_optional else f for f in table) + new


JUNE = {"draft": DRAFT_FIELDS, "draft_extend": DRAFT_EXTEND_FIELDS}
NEW = {"draft": NEW_DRAFT_FIELDS, "draft_extend": NEW_DRAFT_EXTEND_FIELDS}
LAYOUTS: dict[str, dict[str, Table]] = {
    "2026-06": JUNE,
    "2026-10": {runner: with_new_fields(table, NEW[runner]) for runner, table in JUNE.items()},
    "int32_seq_lens": {runner: with_int32_seq_lens(table) for runner, table in JUNE.items()},
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
    kv_slots: int = 0  # of each KV pool, slot 0 (padding) included; 0: enough for all requests at full length
    dtype: torch.dtype = torch.bfloat16
    layout: str = "2026-06"  # of LAYOUTS
    options: tuple[str, ...] = ()  # of OPTIONS: fields that have buffers, and come with random batches

    def __post_init__(self) -> None:
        candidates = 1 + self.topk + (self.num_steps - 1) * self.topk**2
        sizes = tuple(sorted(set(self.capture_batch_sizes)))
        object.__setattr__(self, "capture_batch_sizes", sizes)
        if self.num_draft_tokens == 0:
            object.__setattr__(self, "num_draft_tokens", min(16, candidates))
        if self.kv_slots == 0 and sizes:
            each = self.max_context_len + self.topk * self.num_steps
            object.__setattr__(self, "kv_slots", 1 + sizes[-1] * each)
        deepest = self.num_steps + 1
        adds = max(self.num_draft_tokens, self.num_steps)
        width = 2 * self.num_heads or 1  # of heads with an even size
        tree_fits = deepest <= self.num_draft_tokens <= candidates
        positive = ("hidden_size", "num_heads", "intermediate_size", "num_target_layers", "topk")
        for name, holds, expected in (
            ("layout", self.layout in LAYOUTS, f"one of {sorted(LAYOUTS)}"),
            ("options", set(self.options) <= set(OPTIONS), f"some of {OPTIONS}"),
            ("capture_batch_sizes", sizes and sizes[0] >= 1, "sizes from 1 up"),
            *((name, getattr(self, name) >= 1, "at least 1") for name in positive),
            ("num_steps", self.num_steps >= 2, "at least 2 (1 leaves nothing to capture)"),
            ("vocab_size", self.vocab_size >= self.topk, f"at least topk, {self.topk}"),
            ("hidden_size", self.hidden_size % width == 0, f"a multiple of {width}"),
            ("num_draft_tokens", tree_fits, f"{deepest} to {candidates}"),
            ("max_context_len", self.max_context_len > adds, f"more than a step adds, {adds}"),
        ):
            if not holds:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

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

    def table(self, runner: str) -> Table:
        """The rows of "draft" or "draft_extend" that have a buffer here."""
        return tuple(f for f in LAYOUTS[self.layout][runner] if f.option in ("", *self.options))

    def rows(self, field: Field, batch_size: int = 1) -> int:
        return batch_size * prod(self.sizes[name] for name in field.rows.split())

    def shape(self, field: Field, batch_size: int) -> tuple[int, ...]:
        """Shape of a field for `batch_size` requests."""
        columns = tuple(self.sizes[name] for name in field.columns.split())
        rows = (self.rows(field, batch_size),)
        return columns + rows if field.dim else rows + columns

    def source_dtype(self, field: Field) -> torch.dtype:
        return field.source_dtype or field.dtype or self.dtype

    def pad_value(self, field: Field) -> int:
        return self.sizes[field.pad] if isinstance(field.pad, str) else field.pad or 0

    @cached_property
    def sizes(self) -> dict[str, int]:
        """What the names in a field's rows and columns stand for."""
        sizes = {"k": self.topk, "s": self.num_steps, "w": self.num_draft_tokens, "H": self.hidden_size}
        return sizes | {"V": self.vocab_size, "mrope": 3, "dsa": 2048, "one": 1}


WIDE = {"capture_batch_sizes": (1, 2, 4, 8, 16, 32, 64), "max_context_len": 2048}
# Published sizes of the model classes. Attention is plain multi-head here (Llama and Qwen group their key
# heads, DeepSeek compresses them); what a replay copies does not depend on it.
SIZES = ("hidden_size", "num_heads", "intermediate_size", "vocab_size")
PRESETS: dict[str, dict] = {
    "tiny": dict(zip(SIZES, (128, 4, 256, 128))),
    "llama3-8b": dict(zip(SIZES, (4096, 32, 14336, 128256))) | WIDE,
    "qwen3-8b": dict(zip(SIZES, (4096, 32, 12288, 151936))) | WIDE,
    "deepseek-v3": dict(zip(SIZES, (7168, 56, 18432, 129280))) | WIDE | {"topk": 1},
}


@dataclass
class Batch:
    """A step's inputs. Fields carry SGLang's names; shapes and dtypes are those of the config's table."""

    seq_lens: Given = None
    out_cache_loc: Given = None
    positions: Given = None
    req_pool_indices: Given = None
    hidden_states: Given = None
    seq_lens_cpu: Given = None
    mrope_positions: Given = None
    table: ClassVar[str]

    @classmethod
    def random(cls, config: EagleConfig, batch_size: int, seed: int = 0, device: str = "cpu") -> Self:
        """Valid inputs for a runner with its own random model: distinct requests, slots of their own.

        Fields with an option, which no model here reads, get random values where the config has it.
        """
        generator = torch.Generator().manual_seed(seed)
        most = max(config.max_batch_size, batch_size)
        requests = torch.randperm(most, generator=generator)[:batch_size] + 1  # slot 0 is for padding
        batch = cls.draw(config, requests, generator)
        for field in config.table(cls.table):
            if field.option:
                values = torch.randint(0, 99, config.shape(field, batch_size), generator=generator)
                setattr(batch, field.name, values.to(config.source_dtype(field)))
        return batch.to(device)

    @property
    def batch_size(self) -> int:
        if not isinstance(self.seq_lens, Tensor) or self.seq_lens.dim() != 1:
            raise ValueError(f"seq_lens: expected a tensor of one length a request, got {self.seq_lens!r}")
        return len(self.seq_lens)

    def to(self, device: str | torch.device) -> Self:
        """The same batch with its device fields on `device`; seq_lens_cpu stays on the host."""
        moved = dict(vars(self))
        for name, tensor in moved.items():
            if tensor is not None and name != "seq_lens_cpu":
                moved[name] = tensor.to(device)
        return type(self)(**moved)


@dataclass
class DraftBatch(Batch):
    """Inputs of the draft graph: `seq_lens` committed tokens; the first level in topk_p, topk_index."""

    topk_p: Given = None
    topk_index: Given = None
    rids_int: Given = None
    bootstrap_room_ids_int: Given = None
    draft_probs: Given = None
    dsa_seed_topk: Given = None
    temperatures: Given = None
    sampling_seed: Given = None
    top_ks: Given = None
    table = "draft"

    @classmethod
    def draw(cls, config: EagleConfig, requests: Tensor, generator: torch.Generator) -> Self:
        bs = len(requests)
        longest = config.max_context_len - config.num_steps
        seq_lens = torch.randint(1, longest, (bs,), generator=generator)
        branches = torch.arange(config.topk * config.num_steps) + config.max_context_len
        logits = torch.randn(bs, config.vocab_size, generator=generator)
        topk_p, topk_index = first_level(logits, config.topk)
        hidden_states = torch.randn(bs, config.hidden_size, generator=generator)
        return cls(
            seq_lens=seq_lens,
            out_cache_loc=(first_slot(config, requests)[:, None] + branches).flatten(),
            positions=seq_lens.repeat_interleave(config.topk),
            req_pool_indices=requests,
            hidden_states=hidden_states.to(config.dtype),
            seq_lens_cpu=seq_lens.clone(),
            topk_p=topk_p,
            topk_index=topk_index,
        )


@dataclass
class DraftExtendBatch(Batch):
    """Inputs of the draft-extend graph: w rows a request, of which the first `num_accept_tokens` count.

    `seq_lens` includes the w rows, so the prefix a row sees is `seq_lens - extend_seq_lens`. `select_index`
    is the last row that counts, for layouts whose graph picks it.
    """

    input_ids: Given = None
    extend_seq_lens: Given = None
    num_correct_drafts: Given = None
    num_accept_tokens: Given = None
    select_index: Given = None
    mamba_track_indices: Given = None
    table = "draft_extend"

    @classmethod
    def draw(cls, config: EagleConfig, requests: Tensor, generator: torch.Generator) -> Self:
        bs = len(requests)
        w = config.num_draft_tokens
        prefix = torch.randint(1, config.max_context_len - w, (bs,), generator=generator)
        positions = prefix[:, None] + torch.arange(w)
        deepest = config.num_steps + 1
        accepted = torch.randint(1, deepest + 1, (bs,), generator=generator, dtype=int32)
        input_ids = torch.randint(0, config.vocab_size, (bs * w,), generator=generator)
        hidden_states = torch.randn(bs * w, config.hidden_size, generator=generator)
        return cls(
            input_ids=input_ids,
            seq_lens=prefix + w,
            out_cache_loc=(first_slot(config, requests)[:, None] + positions).flatten(),
            positions=positions.flatten(),
            req_pool_indices=requests,
            extend_seq_lens=torch.full((bs,), w, dtype=int32),
            num_correct_drafts=accepted - 1,
            num_accept_tokens=accepted,
            hidden_states=hidden_states.to(config.dtype),
            seq_lens_cpu=prefix + w,
            select_index=torch.arange(bs) * w + accepted - 1,
        )


def first_level(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Probabilities (float32) and indices of the k best tokens, (..., k); all ones for k = 1 (SGLang)."""
    probs, index = torch.softmax(logits.float(), dim=-1).topk(k, dim=-1)
    return (torch.ones_like(probs) if k == 1 else probs), index


def first_slot(config: EagleConfig, requests: Tensor) -> Tensor:
    """Where the KV slots of a request start in the contiguous layout of `DraftModel.random`."""
    return 1 + (requests - 1) * (config.max_context_len + config.topk * config.num_steps)
