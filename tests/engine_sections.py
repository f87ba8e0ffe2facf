"""The input sections of four engines, re-stated: what each does between a batch and its graph's replay."""

from types import SimpleNamespace

import torch

from benchmarks.sglang import draft_fills, draft_lists, grouped_foreach
from lib.engines import MAX_BATCH_SIZE, SIZES

PAGES, USED = SIZES["blocks"], SIZES["used"]
K, S = SIZES["k"], SIZES["s"]


class Section:
    def __init__(self, device):
        self.device = device
        self.prepare()

    def int32(self, *shape):
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def int64(self, *shape):
        return torch.zeros(shape, dtype=torch.int64, device=self.device)


class NanoVllm(Section):
    """nanovllm/engine/model_runner.py: small tensors made on the host, uploaded, and copied on."""

    def prepare(self):
        self.graph_vars = {
            "input_ids": self.int64(MAX_BATCH_SIZE),
            "positions": self.int64(MAX_BATCH_SIZE),
            "slot_mapping": self.int32(MAX_BATCH_SIZE),
            "context_lens": self.int32(MAX_BATCH_SIZE),
            "block_tables": self.int32(MAX_BATCH_SIZE, PAGES),
        }

    def fill(self, n, captured):
        ids = torch.tensor([1] * n, dtype=torch.int64).to(self.device, non_blocking=True)
        positions = torch.tensor([2] * n, dtype=torch.int64).to(self.device, non_blocking=True)
        slots = torch.tensor([3] * n, dtype=torch.int32).to(self.device, non_blocking=True)
        lengths = torch.tensor([4] * n, dtype=torch.int32).to(self.device, non_blocking=True)
        tables = torch.tensor([[5] * USED] * n, dtype=torch.int32).to(self.device, non_blocking=True)
        graph_vars = self.graph_vars
        graph_vars["input_ids"][:n] = ids
        graph_vars["positions"][:n] = positions
        graph_vars["slot_mapping"].fill_(-1)
        graph_vars["slot_mapping"][:n] = slots
        graph_vars["context_lens"].zero_()
        graph_vars["context_lens"][:n] = lengths
        graph_vars["block_tables"][:n, : tables.size(1)] = tables


class MiniSglang(Section):
    """python/minisgl/engine/graph.py and attention/fa.py: a batch that dummy requests pad."""

    def inputs(self, n, pages):
        names = ("input_ids", "out_loc", "positions", "seq_lens")
        inputs = SimpleNamespace(**{name: self.int32(n) for name in names})
        inputs.cu_seqlens_k = self.int32(n + 1)
        inputs.page_table = self.int32(n, pages)
        return inputs

    def prepare(self):
        self.capture = self.inputs(MAX_BATCH_SIZE, PAGES)

    def fill(self, n, captured):
        batch = self.inputs(captured, USED)
        rows = slice(captured)
        self.capture.input_ids[rows] = batch.input_ids
        self.capture.out_loc[rows] = batch.out_loc
        self.capture.positions[rows] = batch.positions
        self.capture.cu_seqlens_k[: captured + 1].copy_(batch.cu_seqlens_k)
        self.capture.seq_lens[rows].copy_(batch.seq_lens)
        self.capture.page_table[rows, :USED].copy_(batch.page_table)


class LightLlm(Section):
    """lightllm/common/basemodel/infer_struct.py: every attribute that is a tensor; two are aliases."""

    def prepare(self):
        self.graphs = {}

    def state(self, n):
        state = SimpleNamespace(input_ids=self.int64(n))
        for name in ("b_req_idx", "b_mtp_index", "b_position_delta", "b_seq_len", "mem_index", "b_q_seq_len"):
            setattr(state, name, self.int32(n))
        state.b1_cu_q_seq_len = self.int32(n + 1)
        state.b_kv_seq_len = state.b_seq_len
        state.b1_cu_kv_seq_len = self.int32(n + 1)
        state.position_ids = self.int32(n)
        state.b_kv_start_loc = state.b1_cu_kv_seq_len[0:-1]
        return state

    def fill(self, n, captured):
        graph_state = self.graphs.setdefault(captured, self.state(captured))
        for name, value in vars(self.state(captured)).items():
            mine = getattr(graph_state, name, None)
            if mine is not None and mine is not value:
                mine.copy_(value, non_blocking=True)


class SglangDraft(Section):
    """srt/speculative/eagle_draft_cuda_graph_runner.py of 0.5.14, with its helper."""

    def inputs(self, n):
        return SimpleNamespace(
            seq_lens=self.int64(n),
            out_cache_loc=self.int64(n * K * S),
            positions=self.int64(n * K),
            topk_p=torch.zeros(n, K, device=self.device),
            topk_index=self.int64(n, K),
            req_pool_indices=self.int64(n),
            hidden_states=torch.zeros(n, SIZES["hidden"], dtype=torch.bfloat16, device=self.device),
        )

    def prepare(self):
        self.buffers = self.inputs(MAX_BATCH_SIZE)

    def fill(self, n, captured):
        batch = self.inputs(n)
        if n != captured:
            draft_fills(self.buffers)
        batch.rids_int = None
        grouped_foreach(*draft_lists(self.buffers, batch, n, K, S))
        self.buffers.hidden_states[:n].copy_(batch.hidden_states)


SECTIONS = {
    "nano-vllm": NanoVllm,
    "mini-sglang": MiniSglang,
    "LightLLM": LightLlm,
    "sglang-draft-0.5.14": SglangDraft,
}
