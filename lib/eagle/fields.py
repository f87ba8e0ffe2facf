"""What a replay copies: the field tables by date, sizes, and the batches they describe.

The tables are those of SGLang's `EAGLEDraftCudaGraphRunner` and `EAGLEDraftExtendCudaGraphRunner`; a new
field is a row. One departure: where the width of hidden_states differs (EAGLE-3), SGLang leaves out the copy
and the rows of an earlier step stay; here that is an error.
"""

from dataclasses import dataclass, make_dataclass, replace
from functools import partial
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.types import Device

int32, int64, float32 = torch.int32, torch.int64, torch.float32


@dataclass(frozen=True)
class Field:
    """One input of a captured graph."""

    name: str
    dtype: torch.dtype  # of the static buffer
    rows: int = 1  # of a request
    columns: tuple[int, ...] = ()  # shape of a row
    pad: int | None = None  # value of the rows of padding; None leaves them as they are
    required: bool = True
    fill_if_missing: bool = False  # an absent optional field is filled with `pad` instead of left stale
    october: bool = False  # in layout 2026-10 alone
    rare: bool = False  # has a buffer only with EagleConfig.rare_fields
    host: bool = False  # lives in host memory and is copied there
    large: bool = False  # SGLang keeps it out of the group
    source_dtype: torch.dtype | None = None  # of the batch's tensor, where it differs from the buffer's
    dim: int = 0  # the dimension that the rows lie in; the columns come before it

    def shape(self, batch_size: int) -> torch.Size:
        shape = list(self.columns)
        shape.insert(self.dim, batch_size * self.rows)
        return torch.Size(shape)


Optional = partial(Field, required=False)
Rare = partial(Optional, rare=True)
October = partial(Rare, october=True)


def tables(config: "EagleConfig") -> dict[str, tuple[Field, ...]]:
    """Mid June 2026, sglang pull request 28465, then what 0.5.23 (October 2026) has beyond, without the two
    fills of data parallelism, which no batch brings."""
    k, s, w = config.topk, config.num_steps, config.num_draft_tokens
    hidden = {"dtype": config.dtype, "columns": (config.hidden_size,), "large": True}
    # Padded with the attention back end's fill value: of one token, so that no softmax is over nothing.
    lengths = {"dtype": int64, "pad": 1}
    return {
        "draft": (
            Field("seq_lens", **lengths),
            Field("out_cache_loc", int64, rows=k * s, pad=0),
            Field("positions", int64, rows=k, pad=0),
            Field("topk_p", float32, columns=(k,), pad=0),
            Field("topk_index", int64, columns=(k,), pad=0),
            Field("req_pool_indices", int64, pad=0),
            Field("hidden_states", **hidden, pad=0),
            Field("seq_lens_cpu", **lengths, host=True),
            Rare("rids_int", int64, pad=0),
            Rare("bootstrap_room_ids_int", int64, pad=-1),
            October("mrope_positions", int64, rows=k, columns=(3,), pad=0, dim=1),
            October("draft_probs", float32, columns=(config.vocab_size,), pad=0, large=True),
            October("dsa_seed_topk", int32, columns=(2048,), pad=0, fill_if_missing=True, large=True),
            October("temperatures", float32, columns=(1,), large=True),
            October("sampling_seed", int64, large=True),
            October("top_ks", int32, large=True),
        ),
        "draft_extend": (
            Field("input_ids", int64, rows=w),
            Field("seq_lens", **lengths),
            Field("out_cache_loc", int64, rows=w, pad=0),
            Field("positions", int64, rows=w, pad=0),
            Field("req_pool_indices", int64, pad=0),
            Optional("extend_seq_lens", int32, pad=w, fill_if_missing=True),
            Optional("num_correct_drafts", int32, pad=w),
            Optional("num_accept_tokens", int32, pad=w),
            Field("hidden_states", **hidden, rows=w),
            Field("seq_lens_cpu", **lengths, host=True),
            # The row of each request to keep. Its buffer starts as 0 and is never padded: any row will do.
            Field("select_index", int64, october=True),
            October("mrope_positions", int64, rows=w, columns=(3,), pad=0, dim=1),
            October("mamba_track_indices", int64, pad=0),
        ),
    }


# By layout, what is otherwise than in June. Until sglang pull request 27840 (2026-06-11) the buffers of
# lengths were int32, so that one copy converts.
LAYOUTS: dict[str, dict[str, dict]] = {
    "2026-06": {},
    "2026-10": {"hidden_states": {"required": False}, "seq_lens_cpu": {"required": False}},
    "int32_seq_lens": {"seq_lens": {"dtype": int32}, "seq_lens_cpu": {"dtype": int32}},
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
    dtype: torch.dtype = torch.bfloat16
    layout: str = "2026-06"  # of LAYOUTS
    rare_fields: bool = False  # fields that few deployments have get buffers, and come with random batches

    def __post_init__(self) -> None:
        sizes = tuple(sorted(set(self.capture_batch_sizes)))
        least = self.num_steps + 1
        candidates = 1 + self.topk + (self.num_steps - 1) * self.topk**2
        budget = self.num_draft_tokens or min(16, candidates)
        vars(self).update(capture_batch_sizes=sizes, num_draft_tokens=budget)
        for name, holds, expected in (
            ("layout", self.layout in LAYOUTS, f"one of {list(LAYOUTS)}"),
            ("capture_batch_sizes", min(sizes, default=0) >= 1, "sizes from 1 up"),
            ("topk", 1 <= self.topk <= self.vocab_size, "1 to vocab_size"),
            ("num_steps", self.num_steps >= 2, "at least 2 (1 leaves nothing to capture)"),
            ("num_draft_tokens", least <= budget <= candidates, f"{least} to {candidates}"),
            ("hidden_size", self.hidden_size % (2 * self.num_heads) == 0, "a multiple of 2 * num_heads"),
            ("max_context_len", self.max_context_len > budget, "more than a step adds"),
        ):
            if not holds:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

    @classmethod
    def tiny(cls, **overrides) -> Self:
        """The trained models of data/models: width 128, bytes as tokens, trees of 16, bfloat16."""
        return cls.preset("tiny", **overrides)

    @classmethod
    def preset(cls, name: str, **overrides) -> Self:
        """A named size; any field can be overridden. Raises ValueError for an unknown name."""
        if name not in PRESETS:
            raise ValueError(f"preset: expected one of {list(PRESETS)}, got {name!r}")
        sizes, more = PRESETS[name]
        return cls(**dict(zip(SIZES, sizes)) | more | overrides)

    @property
    def max_batch_size(self) -> int:
        return self.capture_batch_sizes[-1]

    @property
    def slots_per_step(self) -> int:
        """KV slots that a request's draft branches need, and after them its w rows."""
        return max(self.topk * self.num_steps, self.num_draft_tokens)

    @property
    def kv_slots(self) -> int:
        """Of a KV pool for all requests at full length; slot 0 takes the writes of padding."""
        return 1 + self.max_batch_size * (self.max_context_len + self.slots_per_step)

    def request_table(self, device: Device) -> Tensor:
        """The KV slots of every request, a row each, (1 + max_batch_size, n) int64; row 0 is padding's."""
        slots = torch.arange(1, self.kv_slots, device=device).view(self.max_batch_size, -1)
        return F.pad(slots, (0, 0, 1, 0))

    def kv_pool(self, layers: int, device: Device) -> Tensor:
        """Keys, then values, of every slot: (layers, slots, 2 * H)."""
        shape = layers, self.kv_slots, 2 * self.hidden_size
        return torch.zeros(shape, dtype=self.dtype, device=device)

    def table(self, runner: str) -> list[Field]:
        """The rows of "draft" or "draft_extend" that have a buffer here."""
        table = []
        for field in tables(self)[runner]:
            absent = (field.october and self.layout != "2026-10") or (field.rare and not self.rare_fields)
            if not absent:
                otherwise = LAYOUTS[self.layout].get(field.name, {})
                table.append(replace(field, source_dtype=field.dtype, **otherwise))
        return table


WIDE = {"capture_batch_sizes": (1, 2, 4, 8, 16, 32, 64), "max_context_len": 2048}
# Published sizes of the model classes. Attention is plain multi-head here (Llama and Qwen group their key
# heads, DeepSeek compresses them); what a replay copies does not depend on it.
SIZES = ("hidden_size", "num_heads", "intermediate_size", "vocab_size")
PRESETS = {
    "tiny": ((128, 4, 256, 128), {}),
    "llama3-8b": ((4096, 32, 14336, 128256), WIDE),
    "qwen3-8b": ((4096, 32, 12288, 151936), WIDE),
    "deepseek-v3": ((7168, 56, 18432, 129280), WIDE | {"topk": 1}),
}


def attributes(table: str) -> type:
    """A class with an attribute for every field of a table, None where it does not come."""
    names = [(field.name, Tensor | None, None) for field in tables(EagleConfig.tiny())[table]]
    return make_dataclass(table, names, eq=False, namespace={"table": table})


class Batch:
    """A step's inputs. Fields carry SGLang's names; shapes and dtypes are those of the config's table."""

    @classmethod
    def random(cls, config: EagleConfig, batch_size: int, seed: int = 0, device: str = "cpu") -> Self:
        """Valid inputs for a runner with its own random model: distinct requests, slots of their own."""
        generator = torch.Generator().manual_seed(seed)
        requests = 1 + torch.randperm(config.max_batch_size, generator=generator)[:batch_size]
        longest = config.max_context_len - config.num_draft_tokens
        lens = torch.randint(1, longest + 1, (batch_size,), generator=generator)
        accepted = torch.randint(1, config.num_steps + 2, (batch_size,), generator=generator, dtype=int32)
        behind = lens.unsqueeze(1) + torch.arange(config.slots_per_step)
        slots = config.request_table("cpu")[requests.unsqueeze(1), behind]
        batch = cls.of(config, requests, lens, slots, accepted)
        for field in config.table(cls.table):
            if getattr(batch, field.name) is None:
                below = 1 if field.source_dtype.is_floating_point else config.vocab_size
                values = below * torch.rand(field.shape(batch_size), generator=generator)
                setattr(batch, field.name, values.to(field.source_dtype))
        return batch.to(device)

    @property
    def batch_size(self) -> int:
        try:
            return self.seq_lens.shape[0]
        except (AttributeError, IndexError):
            raise ValueError(f"seq_lens: expected one length a request, got {self.seq_lens!r}") from None

    def tensors(self) -> dict[str, Tensor]:
        """The fields that come, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def to(self, device: Device) -> Self:
        """The same batch with its device fields on `device`; seq_lens_cpu stays on the host."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved | {"seq_lens_cpu": self.seq_lens_cpu})


class DraftBatch(attributes("draft"), Batch):
    """Inputs of the draft graph: `seq_lens` committed tokens; the first level in topk_p, topk_index."""

    @classmethod
    def of(cls, config, requests, lens, slots, accepted=None, **fields: Tensor) -> Self:
        """Requests (bs,) with so many committed tokens, lens on the host; slots (bs, n) to write to."""
        seq_lens = lens.to(requests.device, copy=True)
        return cls(
            seq_lens=seq_lens,
            out_cache_loc=slots[:, : config.topk * config.num_steps].flatten(),
            positions=seq_lens.repeat_interleave(config.topk),
            req_pool_indices=requests,
            seq_lens_cpu=lens,
            **fields,
        )


class DraftExtendBatch(attributes("draft_extend"), Batch):
    """Inputs of the draft-extend graph: w rows a request, of which the first `num_accept_tokens` count, up to
    `select_index`. `seq_lens` includes all w, so the prefix they see is `seq_lens - extend_seq_lens`."""

    @classmethod
    def of(cls, config, requests, lens, slots, accepted, **fields: Tensor) -> Self:
        """As a draft's. The w rows follow the committed tokens; of them so many are accepted, (bs,) int32."""
        w = config.num_draft_tokens
        prefix = lens.to(requests.device)
        rows = torch.arange(len(lens) * w, device=requests.device).view(-1, w)
        return cls(
            seq_lens=prefix + w,
            out_cache_loc=slots[:, :w].flatten(),
            positions=(prefix[:, None] + rows[0]).flatten(),
            req_pool_indices=requests,
            seq_lens_cpu=lens + w,
            extend_seq_lens=torch.full_like(accepted, w),
            num_correct_drafts=accepted - 1,
            num_accept_tokens=accepted,
            select_index=rows[:, 0] + accepted - 1,
            **fields,
        )


def first_level(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Probabilities (float32) and indices of the k best tokens, (..., k); all ones for k = 1 (SGLang)."""
    probs, index = torch.softmax(logits.float(), dim=-1).topk(k, dim=-1)
    return (torch.ones_like(probs) if k == 1 else probs), index
