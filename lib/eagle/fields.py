"""What a replay copies: sizes, the field tables by date, and the batches they describe.

The tables are those of SGLang's `EAGLEDraftCudaGraphRunner` and `EAGLEDraftExtendCudaGraphRunner`. Every runner
decision (buffer size, pad value, what is required, what is large) is read from a table row. One departure: where
the width of hidden_states differs (EAGLE-3), SGLang leaves out the copy and the rows of an earlier step stay; here
that is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Field:
    """One input of a captured graph.

    A batch of `bs` requests brings `bs * prod(rows)` rows of shape `columns`; names stand for sizes: k top-k,
    s speculative steps, w draft tokens a request, H hidden size, V vocabulary.
    """

    name: str
    dtype: torch.dtype | None  # of the static buffer; None is the model's dtype
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    pad: int | str | None = None  # value of the rows of padding; None leaves them as they are
    required: bool = True
    fill_if_missing: bool = False  # an absent optional field is filled with `pad` instead of left stale
    option: str = ""  # has a buffer only where EagleConfig.options names it
    host: bool = False  # lives in host memory and is copied there
    large: bool = False  # SGLang keeps it out of the group
    source_dtype: torch.dtype | None = None  # of the batch's tensor, where it differs from the buffer's
    dim: int = 0  # the dimension that the rows lie in; the columns come before it


# The attention back end's fill value: a padded request has one token, so that no softmax is over nothing.
SEQ_LEN_FILL_VALUE = 1

# Mid June 2026, sglang pull request 28465.
DRAFT_FIELDS = (
    Field("seq_lens", torch.int64, pad=SEQ_LEN_FILL_VALUE),
    Field("out_cache_loc", torch.int64, rows=("k", "s"), pad=0),
    Field("positions", torch.int64, rows=("k",), pad=0),
    Field("topk_p", torch.float32, columns=("k",), pad=0),
    Field("topk_index", torch.int64, columns=("k",), pad=0),
    Field("req_pool_indices", torch.int64, pad=0),
    Field("hidden_states", None, columns=("H",), pad=0, large=True),
    Field("seq_lens_cpu", torch.int64, pad=SEQ_LEN_FILL_VALUE, host=True),
    Field("rids_int", torch.int64, pad=0, required=False, option="ids"),
    Field("bootstrap_room_ids_int", torch.int64, pad=-1, required=False, option="ids"),
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

# What 0.5.23 (October 2026) has beyond; the two fills of data parallelism, which no batch brings, are left out.
# select_index: the row of each request to keep. Its buffer starts as 0 and is never padded: any row will do.
NEW_DRAFT_FIELDS = (
    Field(
        "mrope_positions",
        torch.int64,
        rows=("k",),
        columns=("mrope",),
        pad=0,
        required=False,
        option="mrope",
        dim=1,
    ),
    Field("draft_probs", torch.float32, columns=("V",), pad=0, required=False, option="sampling", large=True),
    Field(
        "dsa_seed_topk",
        torch.int32,
        columns=("dsa",),
        pad=0,
        required=False,
        fill_if_missing=True,
        option="dsa",
        large=True,
    ),
    Field("temperatures", torch.float32, columns=("one",), required=False, option="sampling", large=True),
    Field("sampling_seed", torch.int64, required=False, option="sampling", large=True),
    Field("top_ks", torch.int32, required=False, option="sampling", large=True),
)
NEW_DRAFT_EXTEND_FIELDS = (
    Field("select_index", torch.int64),
    Field(
        "mrope_positions",
        torch.int64,
        rows=("w",),
        columns=("mrope",),
        pad=0,
        required=False,
        option="mrope",
        dim=1,
    ),
    Field("mamba_track_indices", torch.int64, pad=0, required=False, option="mamba"),
)
OPTIONS = ("ids", "mrope", "sampling", "dsa", "mamba")


def with_int32_seq_lens(table: tuple[Field, ...]) -> tuple[Field, ...]:
    """Until sglang pull request 27840 (2026-06-11): int32 buffers, so that this one copy converts."""
    int32 = {"dtype": torch.int32, "source_dtype": torch.int64}
    return tuple(replace(f, **int32) if f.name.startswith("seq_lens") else f for f in table)


def with_new_fields(table: tuple[Field, ...], new: tuple[Field, ...]) -> tuple[Field, ...]:
    """0.5.23: hidden_states and seq_lens_cpu are optional, too."""
    now_optional = ("hidden_states", "seq_lens_cpu")
    return tuple(replace(f, required=False) if f.name in now_optional else f for f in table) + new


LAYOUTS: dict[str, dict[str, tuple[Field, ...]]] = {
    "2026-06": {"draft": DRAFT_FIELDS, "draft_extend": DRAFT_EXTEND_FIELDS},
    "2026-10": {
        "draft": with_new_fields(DRAFT_FIELDS, NEW_DRAFT_FIELDS),
        "draft_extend": with_new_fields(DRAFT_EXTEND_FIELDS, NEW_DRAFT_EXTEND_FIELDS),
    },
    "int32_seq_lens": {
        "draft": with_int32_seq_lens(DRAFT_FIELDS),
        "draft_extend": with_int32_seq_lens(DRAFT_EXTEND_FIELDS),
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
    kv_slots: int = 0  # of each KV pool, slot 0 (padding) included; 0: enough for all requests at full length
    dtype: torch.dtype = torch.bfloat16
    layout: str = "2026-06"  # of LAYOUTS
    options: tuple[
        str, ...
    ] = ()  # of OPTIONS: what optional fields have buffers, and come with random batches

    def __post_init__(self) -> None:
        def expect(holds: bool, name: str, what: str) -> None:
            if not holds:
                raise ValueError(f"{name}: expected {what}, got {getattr(self, name)!r}")

        sizes = tuple(sorted(set(self.capture_batch_sizes)))
        expect(self.layout in LAYOUTS, "layout", f"one of {sorted(LAYOUTS)}")
        expect(set(self.options) <= set(OPTIONS), "options", f"some of {OPTIONS}")
        expect(bool(sizes) and sizes[0] >= 1, "capture_batch_sizes", "sizes from 1 up")
        for name in ("hidden_size", "num_heads", "intermediate_size", "num_target_layers", "topk"):
            expect(getattr(self, name) >= 1, name, "at least 1")
        expect(self.num_steps >= 2, "num_steps", "at least 2 (1 leaves nothing to capture)")
        expect(self.vocab_size >= self.topk, "vocab_size", f"at least topk, {self.topk}")
        heads_fit = self.hidden_size % (2 * self.num_heads) == 0
        expect(heads_fit, "hidden_size", f"a multiple of {self.num_heads} even heads")
        candidates = 1 + self.topk + (self.num_steps - 1) * self.topk**2
        if self.num_draft_tokens == 0:
            object.__setattr__(self, "num_draft_tokens", min(16, candidates))
        w, deepest = self.num_draft_tokens, self.num_steps + 1
        expect(deepest <= w <= candidates, "num_draft_tokens", f"{deepest} to {candidates}")
        adds = max(w, self.num_steps)
        expect(self.max_context_len > adds, "max_context_len", f"more than a step adds, {adds}")
        if self.kv_slots == 0:
            each = self.max_context_len + self.topk * self.num_steps
            object.__setattr__(self, "kv_slots", 1 + sizes[-1] * each)
        object.__setattr__(self, "capture_batch_sizes", sizes)

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
        return tuple(f for f in LAYOUTS[self.layout][runner] if f.option in ("", *self.options))

    def rows(self, field: Field, batch_size: int = 1) -> int:
        return batch_size * prod(self.sizes[name] for name in field.rows)

    def shape(self, field: Field, batch_size: int) -> tuple[int, ...]:
        """Shape of a field for `batch_size` requests."""
        columns = tuple(self.sizes[name] for name in field.columns)
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

    seq_lens: Tensor | None = None
    out_cache_loc: Tensor | None = None
    positions: Tensor | None = None
    req_pool_indices: Tensor | None = None
    hidden_states: Tensor | None = None
    seq_lens_cpu: Tensor | None = None
    mrope_positions: Tensor | None = None

    @property
    def batch_size(self) -> int:
        if not isinstance(self.seq_lens, Tensor) or self.seq_lens.dim() != 1:
            raise ValueError(f"seq_lens: expected a tensor of one length a request, got {self.seq_lens!r}")
        return len(self.seq_lens)

    def to(self, device: str | torch.device):
        """The same batch with its device fields on `device`; seq_lens_cpu stays on the host."""
        moved = dict(vars(self))
        for name, tensor in moved.items():
            if tensor is not None and name != "seq_lens_cpu":
                moved[name] = tensor.to(device)
        return type(self)(**moved)


@dataclass
class DraftBatch(Batch):
    """Inputs of the draft graph: `seq_lens` committed tokens; the first level in topk_p, topk_index."""

    topk_p: Tensor | None = None
    topk_index: Tensor | None = None
    rids_int: Tensor | None = None
    bootstrap_room_ids_int: Tensor | None = None
    draft_probs: Tensor | None = None
    dsa_seed_topk: Tensor | None = None
    temperatures: Tensor | None = None
    sampling_seed: Tensor | None = None
    top_ks: Tensor | None = None

    @classmethod
    def random(cls, config: EagleConfig, batch_size: int, seed: int = 0, device: str = "cpu") -> DraftBatch:
        """Valid inputs for a runner with its own random model: distinct requests, slots of their own."""
        draw = torch.Generator().manual_seed(seed)
        requests = _random_requests(config, batch_size, draw)
        seq_lens = torch.randint(1, config.max_context_len - config.num_steps, (batch_size,), generator=draw)
        branches = torch.arange(config.topk * config.num_steps) + config.max_context_len
        logits = torch.randn(batch_size, config.vocab_size, generator=draw)
        topk_p, topk_index = first_level(logits, config.topk)
        batch = cls(
            seq_lens=seq_lens,
            out_cache_loc=(_first_slot(config, requests)[:, None] + branches).flatten(),
            positions=seq_lens.repeat_interleave(config.topk),
            req_pool_indices=requests,
            hidden_states=torch.randn(batch_size, config.hidden_size, generator=draw).to(config.dtype),
            seq_lens_cpu=seq_lens.clone(),
            topk_p=topk_p,
            topk_index=topk_index,
        )
        return _with_options(batch, config, "draft", batch_size, draw).to(device)


@dataclass
class DraftExtendBatch(Batch):
    """Inputs of the draft-extend graph: w rows a request, of which the first `num_accept_tokens` count.

    `seq_lens` includes the w rows, so the prefix a row sees is `seq_lens - extend_seq_lens`. `select_index` is
    the last row that counts, for layouts whose graph picks it.
    """

    input_ids: Tensor | None = None
    extend_seq_lens: Tensor | None = None
    num_correct_drafts: Tensor | None = None
    num_accept_tokens: Tensor | None = None
    select_index: Tensor | None = None
    mamba_track_indices: Tensor | None = None

    @classmethod
    def random(
        cls, config: EagleConfig, batch_size: int, seed: int = 0, device: str = "cpu"
    ) -> DraftExtendBatch:
        """Valid inputs for a runner with its own random model: distinct requests, slots of their own."""
        w, draw = config.num_draft_tokens, torch.Generator().manual_seed(seed)
        requests = _random_requests(config, batch_size, draw)
        prefix = torch.randint(1, config.max_context_len - w, (batch_size,), generator=draw)
        positions = prefix[:, None] + torch.arange(w)
        accepted = torch.randint(1, config.num_steps + 2, (batch_size,), generator=draw, dtype=torch.int32)
        rows = batch_size * w
        batch = cls(
            input_ids=torch.randint(0, config.vocab_size, (rows,), generator=draw),
            seq_lens=prefix + w,
            out_cache_loc=(_first_slot(config, requests)[:, None] + positions).flatten(),
            positions=positions.flatten(),
            req_pool_indices=requests,
            extend_seq_lens=torch.full((batch_size,), w, dtype=torch.int32),
            num_correct_drafts=accepted - 1,
            num_accept_tokens=accepted,
            hidden_states=torch.randn(rows, config.hidden_size, generator=draw).to(config.dtype),
            seq_lens_cpu=prefix + w,
            select_index=torch.arange(batch_size) * w + accepted - 1,
        )
        return _with_options(batch, config, "draft_extend", batch_size, draw).to(device)


def first_level(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Probabilities (float32) and indices of the k best tokens, (..., k); all ones for k = 1 (SGLang)."""
    probs, index = torch.softmax(logits.float(), dim=-1).topk(k, dim=-1)
    return (torch.ones_like(probs) if k == 1 else probs), index


def _random_requests(config: EagleConfig, batch_size: int, draw: torch.Generator) -> Tensor:
    """Distinct request slots from 1 up; slot 0 is reserved for padding."""
    return torch.randperm(max(config.max_batch_size, batch_size), generator=draw)[:batch_size] + 1


def _first_slot(config: EagleConfig, requests: Tensor) -> Tensor:
    """Where the KV slots of a request start in the contiguous layout of `DraftModel.random`."""
    return 1 + (requests - 1) * (config.max_context_len + config.topk * config.num_steps)


def _with_options(batch: Batch, config: EagleConfig, runner: str, bs: int, draw: torch.Generator) -> Batch:
    """Values for the optional fields that the config's options ask for; no model here reads them."""
    for field in config.table(runner):
        if field.option:
            values = torch.randint(0, 99, config.shape(field, bs), generator=draw)
            setattr(batch, field.name, values.to(config.source_dtype(field)))
    return batch
