"""The input sections of four engines, re-stated: what each does between a batch and its graph's replay."""

import torch

from lib.engines import MAX_BATCH_SIZE, SIZES

PAGES, USED = SIZES["blocks"], SIZES["used"]


class Namespace:
    """Attributes by name, as engines keep their buffers and batches."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


def int32(*shape, device):
    return torch.zeros(shape, dtype=torch.int32, device=device)


def int64(*shape, device):
    return torch.zeros(shape, dtype=torch.int64, device=device)


class NanoVllm:
    """nanovllm/engine/model_runner.py: small tensors made on the host, uploaded, and copied on."""

    def __init__(self, device):
        self.device = device
        self.graph_vars = {
            "input_ids": int64(MAX_BATCH_SIZE, device=device),
            "positions": int64(MAX_BATCH_SIZE, device=device),
            "slot_mapping": int32(MAX_BATCH_SIZE, device=device),
            "context_lens": int32(MAX_BATCH_SIZE, device=device),
            "block_tables": int32(MAX_BATCH_SIZE, PAGES, device=device),
        }

    def fill(self, n, captured):
        ids, positions, slots, lengths = [1] * n, [2] * n, [3] * n, [4] * n
        ids = torch.tensor(ids, dtype=torch.int64).to(self.device, non_blocking=True)
        positions = torch.tensor(positions, dtype=torch.int64).to(self.device, non_blocking=True)
        slots = torch.tensor(slots, dtype=torch.int32).to(self.device, non_blocking=True)
        lengths = torch.tensor(lengths, dtype=torch.int32).to(self.device, non_blocking=True)
        tables = torch.tensor([[5] * USED] * n, dtype=torch.int32).to(self.device, non_blocking=True)
        graph_vars = self.graph_vars
        graph_vars["input_ids"][:n] = ids
        graph_vars["positions"][:n] = positions
        graph_vars["slot_mapping"].fill_(-1)
        graph_vars["slot_mapping"][:n] = slots
        graph_vars["context_lens"].zero_()
        graph_vars["context_lens"][:n] = lengths
        graph_vars["block_tables"][:n, : tables.size(1)] = tables


class MiniSglang:
    """python/minisgl/engine/graph.py and attention/fa.py: a batch that dummy requests pad."""

    def __init__(self, device):
        self.device = device
        self.input_ids = int32(MAX_BATCH_SIZE, device=device)
        self.out_loc = int32(MAX_BATCH_SIZE, device=device)
        self.positions = int32(MAX_BATCH_SIZE, device=device)
        self.capture = Namespace(
            cu_seqlens_k=int32(MAX_BATCH_SIZE + 1, device=device),
            seq_lens=int32(MAX_BATCH_SIZE, device=device),
            page_table=int32(MAX_BATCH_SIZE, PAGES, device=device),
        )

    def fill(self, n, captured):
        batch = Namespace(
            input_ids=int32(captured, device=self.device),
            out_loc=int32(captured, device=self.device),
            positions=int32(captured, device=self.device),
            cu_seqlens_k=int32(captured + 1, device=self.device),
            seq_lens=int32(captured, device=self.device),
            page_table=int32(captured, USED, device=self.device),
        )
        rows = slice(captured)
        self.input_ids[rows] = batch.input_ids
        self.out_loc[rows] = batch.out_loc
        self.positions[rows] = batch.positions
        self.capture.cu_seqlens_k[: captured + 1].copy_(batch.cu_seqlens_k)
        self.capture.seq_lens[rows].copy_(batch.seq_lens)
        self.capture.page_table[rows, :USED].copy_(batch.page_table)


class LightLlm:
    """lightllm/common/basemodel/infer_struct.py: every attribute that is a tensor; two are aliases."""

    def __init__(self, device):
        self.device = device
        self.graphs = {}

    def state(self, n):
        state = Namespace(input_ids=int64(n, device=self.device))
        for name in ("b_req_idx", "b_mtp_index", "b_position_delta", "b_seq_len", "mem_index", "b_q_seq_len"):
            setattr(state, name, int32(n, device=self.device))
        state.b1_cu_q_seq_len = int32(n + 1, device=self.device)
        state.b_kv_seq_len = state.b_seq_len
        state.b1_cu_kv_seq_len = int32(n + 1, device=self.device)
        state.position_ids = int32(n, device=self.device)
        state.b_kv_start_loc = state.b1_cu_kv_seq_len[0:-1]
        return state

    def fill(self, n, captured):
        graph_state = self.graphs.setdefault(captured, self.state(captured))
        for name, value in vars(self.state(captured)).items():
            mine = getattr(graph_state, name, None)
            if mine is not None and mine is not value:
                mine.copy_(value, non_blocking=True)


class SglangDraft:
    """srt/speculative/eagle_draft_cuda_graph_runner.py of 0.5.14, with its helper."""

    def __init__(self, device):
        self.device = device
        self.buffers = self.inputs(MAX_BATCH_SIZE)

    def inputs(self, n):
        k, s = SIZES["k"], SIZES["s"]
        return Namespace(
            seq_lens=int64(n, device=self.device),
            out_cache_loc=int64(n * k * s, device=self.device),
            positions=int64(n * k, device=self.device),
            topk_p=torch.zeros(n, k, device=self.device),
            topk_index=int64(n, k, device=self.device),
            req_pool_indices=int64(n, device=self.device),
            hidden_states=torch.zeros(n, SIZES["hidden"], dtype=torch.bfloat16, device=self.device),
        )

    def fill(self, n, captured):
        k, s = SIZES["k"], SIZES["s"]
        buffers, batch = self.buffers, self.inputs(n)
        if n != captured:
            buffers.seq_lens.fill_(1)
            buffers.out_cache_loc.zero_()
            buffers.positions.zero_()
            buffers.topk_p.zero_()
            buffers.topk_index.zero_()
            buffers.req_pool_indices.zero_()
            buffers.hidden_states.zero_()
        dsts = [
            buffers.seq_lens[:n],
            buffers.out_cache_loc[: n * k * s],
            buffers.positions[: n * k],
            buffers.topk_p[:n],
            buffers.topk_index[:n],
            buffers.req_pool_indices[:n],
        ]
        srcs = [getattr(batch, name) for name in list(vars(batch))[:-1]]
        grouped_foreach_copy_(dsts, srcs)
        buffers.hidden_states[:n].copy_(batch.hidden_states)


def grouped_foreach_copy_(dsts, srcs):
    groups = {}
    for dst, src in zip(dsts, srcs):
        group_dsts, group_srcs = groups.setdefault((dst.dtype, src.dtype), ([], []))
        group_dsts.append(dst)
        group_srcs.append(src)
    for group_dsts, group_srcs in groups.values():
        torch._foreach_copy_(group_dsts, group_srcs)


SECTIONS = {
    "nano-vllm": NanoVllm,
    "mini-sglang": MiniSglang,
    "LightLLM": LightLlm,
    "sglang-draft-0.5.14": SglangDraft,
}
