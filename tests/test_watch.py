"""watch: every copy of any code, with its line; nothing changed; what to paste. And the engines' table."""

import random
import re
import weakref
from collections import Counter
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from benchmarks.sglang import draft_fills, draft_lists, grouped_foreach
from lib.copies import ReplayCopies, StaticInput
from lib.engines import CSV, MAX_BATCH_SIZE, SIZES, engines, table
from lib.launches import launches
from lib.packed import PackedInputs
from lib.watch import watch

PAGES, USED, K, S = (SIZES[word] for word in ("blocks", "used", "k", "s"))
INT32, INT64 = torch.int32, torch.int64
LINES = {  # line of code -> the call that is seen, of one launch each
    "ints[:4] = four": ("copy_", "memcpy"),
    "ints[4:] = 0": ("fill_", "fill"),
    "ints[::2] = four": ("copy_", "elementwise"),
    "ints[:4] = floats[:4]": ("copy_", "elementwise"),
    "table[:2, :2] = torch.ones(2, 2)": ("copy_", "elementwise"),
    "table[:, 1] = 1.5": ("fill_", "fill"),
    "table[1] = table[0]": ("copy_", "memcpy"),
    "floats.zero_()": ("fill_", "fill"),
    "floats.fill_(2)": ("fill_", "fill"),
    "torch._foreach_copy_([ints[:4], ints[4:]], [four, four])": ("foreach", "foreach"),
    "box.ints[2:6].copy_(four)": ("copy_", "memcpy"),
    "converted = floats.to(torch.int64)": ("copy_", "elementwise"),
    "uploaded = four.to('meta')": ("copy_", "htod"),
    "helper(ints)": ("copy_", "memcpy"),
}
UNSEEN = ["torch.stack([four, four])", "four.copy_(four)", "ints[four] = four", "four.to(four.dtype)"]
HELPER = "def helper(ints):\n    ints[:4].copy_(ints[4:])\n"


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_fifty_mixed_calls_are_all_seen_with_their_lines(mode):
    chosen = random.Random(mode.__name__).choices(list(LINES), k=50)
    text = HELPER + "".join(f"{line}\n{UNSEEN[i % 4]}\n" for i, line in enumerate(chosen))
    code = compile(text, "engine.py", "exec")
    plain, watched = ({"torch": torch, "four": torch.arange(4), "ints": torch.arange(8)} for _ in range(2))
    for names in (plain, watched):
        names |= {"floats": torch.arange(8.0), "table": torch.zeros(4, 4)}
        names["box"] = SimpleNamespace(ints=names["ints"])
    exec(code, plain)
    with watch() as seen, mode():
        exec(code, watched)
    lines = [2 if line == "helper(ints)" else 3 + 2 * i for i, line in enumerate(chosen)]
    by_call = {id(one.call): one.where for one in seen.sightings}.values()
    assert [(where["file"], where["line"]) for where in by_call] == [("engine.py", line) for line in lines]
    made = [(call.op, launch.kind) for call, launch in zip(seen.calls, seen.launches(), strict=True)]
    assert made == [LINES[line] for line in chosen]
    assert all(torch.equal(plain[name], watched[name]) for name in ("ints", "floats", "table"))


class Section:
    """What an engine does between a batch and its graph's replay, re-stated.

    inputs(n): tensors by name for n requests, the static buffers among them.
    """

    def __init__(self, device):
        self.device = device
        self.buffers = SimpleNamespace(**self.inputs(MAX_BATCH_SIZE))

    def zeros(self, names, *shape, dtype=INT32):
        return {name: torch.zeros(shape, dtype=dtype, device=self.device) for name in names.split()}


class NanoVllm(Section):
    """nanovllm/engine/model_runner.py: small tensors made on the host, uploaded, and copied on."""

    def inputs(self, n):
        longs = self.zeros("input_ids positions", n, dtype=INT64)
        return longs | self.zeros("slot_mapping context_lens", n) | self.zeros("block_tables", n, PAGES)

    def fill(self, n, captured):
        graph_vars, new = vars(self.buffers), {}
        for name, buffer in graph_vars.items():
            values = [[5] * USED if name == "block_tables" else 5] * n
            new[name] = torch.tensor(values, dtype=buffer.dtype).to(self.device, non_blocking=True)
        graph_vars["input_ids"][:n] = new["input_ids"]
        graph_vars["positions"][:n] = new["positions"]
        graph_vars["slot_mapping"].fill_(-1)
        graph_vars["slot_mapping"][:n] = new["slot_mapping"]
        graph_vars["context_lens"].zero_()
        graph_vars["context_lens"][:n] = new["context_lens"]
        graph_vars["block_tables"][:n, :USED] = new["block_tables"]


class MiniSglang(Section):
    """python/minisgl/engine/graph.py and attention/fa.py: a batch that dummy requests pad."""

    def inputs(self, n, pages=PAGES):
        rows = self.zeros("input_ids out_loc positions seq_lens", n)
        return rows | self.zeros("cu_seqlens_k", n + 1) | self.zeros("page_table", n, pages)

    def fill(self, n, captured):
        batch, capture, rows = SimpleNamespace(**self.inputs(captured, USED)), self.buffers, slice(captured)
        capture.input_ids[rows] = batch.input_ids
        capture.out_loc[rows] = batch.out_loc
        capture.positions[rows] = batch.positions
        capture.cu_seqlens_k[: captured + 1].copy_(batch.cu_seqlens_k)
        capture.seq_lens[rows].copy_(batch.seq_lens)
        capture.page_table[rows, :USED].copy_(batch.page_table)


class LightLlm(Section):
    """lightllm/common/basemodel/infer_struct.py: every attribute that is a tensor; two are aliases."""

    def inputs(self, n):
        rows = "b_req_idx b_mtp_index b_position_delta b_seq_len mem_index b_q_seq_len position_ids"
        state = self.zeros("input_ids", n, dtype=INT64) | self.zeros(rows, n)
        state |= self.zeros("b1_cu_q_seq_len b1_cu_kv_seq_len", n + 1)
        return state | {"b_kv_seq_len": state["b_seq_len"], "b_kv_start_loc": state["b1_cu_kv_seq_len"][:-1]}

    def fill(self, n, captured):
        graph_state = SimpleNamespace(**self.inputs(captured))
        for name, value in self.inputs(captured).items():
            getattr(graph_state, name).copy_(value, non_blocking=True)


class SglangDraft(Section):
    """srt/speculative/eagle_draft_cuda_graph_runner.py of 0.5.14, with its helper."""

    def inputs(self, n):
        longs = self.zeros("seq_lens req_pool_indices", n, dtype=INT64)
        longs |= self.zeros("out_cache_loc", n * K * S, dtype=INT64)
        longs |= self.zeros("positions", n * K, dtype=INT64) | self.zeros("topk_index", n, K, dtype=INT64)
        floats = self.zeros("topk_p", n, K, dtype=torch.float32)
        return longs | floats | self.zeros("hidden_states", n, SIZES["hidden"], dtype=torch.bfloat16)

    def fill(self, n, captured):
        batch = SimpleNamespace(**self.inputs(n), rids_int=None)
        if n != captured:
            draft_fills(self.buffers)
        grouped_foreach(*draft_lists(self.buffers, batch, n, K, S))
        self.buffers.hidden_states[:n].copy_(batch.hidden_states)


SECTIONS = {"nano-vllm": NanoVllm, "mini-sglang": MiniSglang, "LightLLM": LightLlm}
SECTIONS["sglang-draft-0.5.14"] = SglangDraft


def signature(calls):
    described = []
    for call in calls:
        dsts = [(dst.shape, dst.dtype) for dst in call.dsts]
        described.append((call.op, *dsts, *((src.dtype, src.device) for src in call.srcs)))
    return Counter(described)


@pytest.mark.parametrize("name", SECTIONS)
def test_sections_of_engines_make_the_calls_of_the_file(name):
    section = SECTIONS[name]("meta")
    for requests in (16, 13):
        with watch() as seen:
            section.fill(requests, 16)
        assert signature(seen.calls) == signature(engines()[name].calls(requests, 16))


def test_what_is_suggested_works_when_pasted():
    section, other = SglangDraft("cpu"), SglangDraft("cpu")
    with watch() as seen:
        section.fill(13, 16)
    before, after, lines = seen.suggest()
    inputs = {name: source + i for i, (name, source) in enumerate(other.inputs(13).items())}
    scope = {"section": other, "inputs": inputs, "batch_size": 13, "captured": 16}
    exec(lines, scope | {"ReplayCopies": ReplayCopies, "StaticInput": StaticInput}, made := {})
    for name, source in inputs.items():
        assert torch.equal(getattr(other.buffers, name)[: len(source)], source), name
    assert other.buffers.seq_lens[13:16].tolist() == [1] * 3
    assert (before, after) == (10, len(launches(made["copies"].calls(inputs, 13, 16))))


def test_fields_of_the_host_go_into_packed_inputs():
    section = NanoVllm("meta")
    with watch() as seen:
        section.fill(3, 4)
    before, after, lines = seen.suggest()
    assert (before, after) == (12, 1)
    exec(lines + "\n    pass", scope := {"torch": torch, "PackedInputs": PackedInputs, "device": "cpu"})
    packed = scope["packed"].device
    assert list(packed) == list(vars(section.buffers)) and packed["slot_mapping"].tolist() == [-1] * 64
    report = seen.report()
    uploads = report[report.kind == "htod"]
    assert uploads.times.sum() == 5 and uploads.better.str.contains("PackedInputs").all()
    assert uploads.reason.str.startswith("pageable").all()


def test_what_is_no_field_is_left_as_it_is_and_said():
    ids, other = torch.zeros(8), {"ids": torch.zeros(8)}
    one = SimpleNamespace(head=ids[:4], ids=ids)
    parts, lens, columns, block = torch.zeros(8), torch.zeros(9), torch.zeros(8, 4), torch.zeros(16)
    sixes, spread, middle = torch.zeros(9), torch.zeros(8), torch.zeros(8, 4, device="meta")
    anonymous, summed = [torch.zeros(4, device="meta")], torch.zeros(4, device="meta")
    views = SimpleNamespace(raw=block.view(torch.uint8), first=block[:8], second=block[8:])
    four = torch.arange(4.0)
    with watch() as seen:
        for buffer in (one.ids, other["ids"], parts, views.first, views.second):
            buffer[:4] = four
        parts[4:] = four
        lens[1:5].copy_(four)
        columns[:, :2].copy_(columns[:, 2:])
        sixes[:6].copy_(torch.ones(6))  # of requests that fill four rows of most
        spread[:4].copy_(four[:1])
        for row in (torch.zeros(8), torch.zeros(8)):
            row[:4].copy_(four)
        torch.zeros(4)[:2].copy_(torch.ones(2))
        torch.zeros(4).fill_(1)
        middle[:4, 1:3].copy_(torch.ones(4, 2))  # from the host, but PackedInputs would fill all four columns
        anonymous[0].copy_(four)
        summed.copy_(anonymous[0].add_(1))  # no upload, whatever was there before
    lines = seen.suggest().lines
    assert lines.splitlines()[0].partition(": ")[2] == "parts, lens, columns, sixes, spread, row, middle"
    assert re.findall(r'"(\w+)": StaticInput', lines) == ["ids", "other_ids", "first", "second", "summed"]


def test_the_report_says_how_often_what_hinders_and_what_helps():
    a, b, c = torch.zeros(8, dtype=INT32), torch.zeros(8), torch.zeros(4, 4)
    four = torch.arange(4)
    with watch() as seen:
        for _ in range(3):
            a[:4] = four
        torch._foreach_copy_([a[:4], b[:4]], [four, four])
        c[:, :2].copy_(torch.ones(4, 2))
    report = seen.report()
    assert report.code.iloc[0] == "a[:4] = four"
    found = list(zip(report.name, report.times, report.bytes))
    assert found == [("a", 3, 16), ("a", 1, 16), ("b", 1, 16), ("c", 1, 32)]
    assert "converts torch.int64 to torch.int32" in report.reason[0] and "gaps" in report.reason[3]
    assert report.reason[1:3].str.startswith("slow path").all()


def test_errors_come_through_and_code_may_copy_nothing():
    buffer = torch.zeros(4, device="meta")
    with watch() as nothing:
        torch.zeros(4)
    assert len(nothing.report()) == 0 and nothing.suggest() == (0, 0, "")
    with pytest.raises(RuntimeError, match="must match"), watch() as seen:
        buffer[2:] = 0
        buffer[:2] = torch.ones(3, device="meta")
    assert [call.op for call in seen.calls] == ["fill_"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_whatever_else_the_code_holds_is_left_alone():
    buffer, dead, lazy = torch.zeros(4), weakref.proxy(set()), torch.nn.LazyLinear(2)
    others = [torch.eye(2).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]
    with watch() as seen:
        for other in others:
            other.clone().copy_(other)
            buffer.copy_(torch.ones(4))
        torch.vmap(lambda row: torch.empty_like(row).copy_(row))(torch.ones(3, 4))
    assert dead is not lazy and buffer.tolist() == [1] * 4
    assert [one.buffer for one in seen.sightings][:2] == ["buffer"] * 2


TODAY = {  # launches of a step: padded no, yes; more above
    "sglang-draft-0.5.13": (7, 14),
    "sglang-draft-0.5.23": (2, 9),
    "sglang-draft-extend-0.5.13": (9, 16),
    "sglang-draft-extend-0.5.14": (3, 10),
    "sglang-draft-extend-0.5.23": (2, 9),
    "sglang-multi-layer-eagle-0.5.23": (1, 1),
    "TGI": (9, 9),
    "deepspeed-fastgen": (5, 5),
}


def test_the_table_has_every_engine_by_way():
    """Launches of a step: what their sources say, and nothing here makes more than field by field."""
    whole, padded = table(16, 16), table(13, 16)
    assert list(whole.index) == list(padded.index) == list(engines())
    assert {name: (whole.today[name], padded.today[name]) for name in TODAY} == TODAY
    assert padded.fused["sglang-draft-0.5.23"] < padded.today["sglang-draft-0.5.23"]
    for counts, batch_size in ((whole, 16), (padded, 13)):
        assert counts[["fused", "PackedInputs"]].le(counts.ReplayCopies, axis=0).all(axis=None)
        assert counts.PackedInputs["nano-vllm"] == 1 and counts.ReplayCopies["LightLLM"] == 2
        for name, most in counts.max(axis=1).items():
            step = engines()[name].step(batch_size, 16)
            assert most <= len(step.fills) + len(step.pairs)
            assert all(rest.storage_offset() for rest, _ in step.pads)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 3), (65, 65)])
def test_batches_that_no_buffer_holds_are_refused(sizes):
    with pytest.raises(ValueError, match=f"expected 1 to 64 requests, got {sizes[0]} of {sizes[1]}"):
        engines()["nano-vllm"].calls(*sizes)


def test_every_row_says_where_it_was_read():
    rows = pd.read_csv(CSV)
    assert rows[["checked", "place", "when"]].notna().all(axis=None)
    assert not rows.duplicated(["engine", "field"]).any()
