"""The input sections of four engines, re-stated: what each does between a batch and its graph's replay."""

from types import SimpleNamespace

import torch

from benchmarks.sglang import draft_fills, draft_lists, grouped_foreach
from lib.engines import MAX_BATCH_SIZE, SIZES

PAGES, USED, K, S = (SIZES[word] for word in ("blocks", "used", "k", "s"))


class Section:
    """`inputs(n)`: tensors for n requests, the static buffers among them."""

    def __init__(self, device):
        self.device = device
        self.buffers = self.inputs(MAX_BATCH_SIZE)

    def zeros(self, *shape, dtype=torch.int32):
        return torch.zeros(shape, dtype=dtype, device=self.device)


class NanoVllm(Section):
    """nanovllm/engine/model_runner.py: small tensors made on the host, uploaded, and copied on."""

    def inputs(self, n):
        inputs = {name: self.zeros(n, dtype=torch.int64) for name in ("input_ids", "positions")}
        inputs |= {name: self.zeros(n) for name in ("slot_mapping", "context_lens")}
        return inputs | {"block_tables": self.zeros(n, PAGES)}

    def upload(self, values, dtype):
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)

    def fill(self, n, captured):
        ids, positions = self.upload([1] * n, torch.int64), self.upload([2] * n, torch.int64)
        slots, lengths = self.upload([3] * n, torch.int32), self.upload([4] * n, torch.int32)
        tables = self.upload([[5] * USED] * n, torch.int32)
        graph_vars = self.buffers
        graph_vars["input_ids"][:n] = ids
        graph_vars["positions"][:n] = positions
        graph_vars["slot_mapping"].fill_(-1)
        graph_vars["slot_mapping"][:n] = slots
        graph_vars["context_lens"].zero_()
        graph_vars["context_lens"][:n] = lengths
        graph_vars["block_tables"][:n, : tables.size(1)] = tables


class MiniSglang(Section):
    """python/minisgl/engine/graph.py and attention/fa.py: a batch that dummy requests pad."""

    def inputs(self, n, pages=PAGES):
        names = ("input_ids", "out_loc", "positions", "seq_lens")
        tensors = {name: self.zeros(n) for name in names}
        return SimpleNamespace(**tensors, cu_seqlens_k=self.zeros(n + 1), page_table=self.zeros(n, pages))

    def fill(self, n, captured):
        batch, capture, rows = self.inputs(captured, USED), self.buffers, slice(captured)
        capture.input_ids[rows] = batch.input_ids
        capture.out_loc[rows] = batch.out_loc
        capture.positions[rows] = batch.positions
        capture.cu_seqlens_k[: captured + 1].copy_(batch.cu_seqlens_k)
        capture.seq_lens[rows].copy_(batch.seq_lens)
        capture.page_table[rows, :USED].copy_(batch.page_table)


class LightLlm(Section):
    """lightllm/common/basemodel/infer_struct.py: every attribute that is a tensor; two are aliases."""

    def inputs(self, n):
        state = SimpleNamespace(input_ids=self.zeros(n, dtype=torch.int64))
        for name in ("b_req_idx", "b_mtp_index", "b_position_delta", "b_seq_len", "mem_index", "b_q_seq_len"):
            setattr(state, name, self.zeros(n))
        state.b1_cu_q_seq_len, state.b1_cu_kv_seq_len = self.zeros(n + 1), self.zeros(n + 1)
        state.b_kv_seq_len = state.b_seq_len
        state.position_ids = self.zeros(n)
        state.b_kv_start_loc = state.b1_cu_kv_seq_len[0:-1]
        return state

    def fill(self, n, captured):
        graph_state = self.inputs(captured)
        for name, value in vars(self.inputs(captured)).items():
            getattr(graph_state, name).copy_(value, non_blocking=True)


class SglangDraft(Section):
    """srt/speculative/eagle_draft_cuda_graph_runner.py of 0.5.14, with its helper."""

    def inputs(self, n):
        longs = {"seq_lens": n, "out_cache_loc": n * K * S, "positions": n * K, "req_pool_indices": n}
        return SimpleNamespace(
            **{name: self.zeros(rows, dtype=torch.int64) for name, rows in longs.items()},
            topk_p=self.zeros(n, K, dtype=torch.float32),
            topk_index=self.zeros(n, K, dtype=torch.int64),
            hidden_states=self.zeros(n, SIZES["hidden"], dtype=torch.bfloat16),
        )

    def fill(self, n, captured):
        batch = SimpleNamespace(**vars(self.inputs(n)), rids_int=None)
        if n != captured:
            draft_fills(self.buffers)
        grouped_foreach(*draft_lists(self.buffers, batch, n, K, S))
        self.buffers.hidden_states[:n].copy_(batch.hidden_states)


SECTIONS = {
    "nano-vllm": NanoVllm,
    "mini-sglang": MiniSglang,
    "LightLLM": LightLlm,
    "sglang-draft-0.5.14": SglangDraft,
}
