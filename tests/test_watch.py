"""watch: every copy of any code, with its line; nothing changed; what to paste."""

import random
import runpy
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from engine_sections import SECTIONS, SglangDraft

from lib.copies import ReplayCopies, StaticInput
from lib.engines import engines
from lib.launches import launches
from lib.packed import PackedInputs
from lib.watch import watch

LINES = {  # line of code -> the call that is seen, of one launch each
    "ints[:4] = four": ("copy_", "memcpy"),
    "ints[4:] = 0": ("fill_", "fill"),
    "ints[...] = 3": ("fill_", "fill"),
    "ints[:4].copy_(four)": ("copy_", "memcpy"),
    "ints[::2] = four": ("copy_", "elementwise"),
    "ints[:4] = floats[:4]": ("copy_", "elementwise"),
    "table[:2, :2] = torch.ones(2, 2)": ("copy_", "elementwise"),
    "table[:, 1] = 1.5": ("fill_", "fill"),
    "table[1] = table[0]": ("copy_", "memcpy"),
    "floats.zero_()": ("fill_", "fill"),
    "floats.fill_(2)": ("fill_", "fill"),
    "torch._foreach_copy_([ints[:4], ints[4:]], [four, four])": ("foreach", "foreach"),
    "box.ints[2:6].copy_(four)": ("copy_", "memcpy"),
    "by_name['ints'][:4] = four": ("copy_", "memcpy"),
    "converted = floats.to(torch.int64)": ("copy_", "elementwise"),
    "helper(ints)": ("copy_", "memcpy"),
}
UNSEEN = ["torch.stack([four, four])", "four.clone()", "ints[four] = four", "x = ints[:4] + 1"]
HEAD = """import torch


def helper(ints):
    ints[:4].copy_(ints[4:])


def run(ints, floats, table, four, box, by_name):
"""
LINE_OF_HELPER = 5


def arguments():
    ints = torch.arange(8)
    box = SimpleNamespace(ints=ints)
    return ints, torch.arange(8.0), torch.zeros(4, 4), torch.arange(4), box, {"ints": ints}


@pytest.mark.parametrize("seed", range(3))
def test_fifty_mixed_calls_are_all_seen_with_their_lines(seed, tmp_path):
    chosen = random.Random(seed).choices(list(LINES), k=50)
    code = "".join(f"    {line}\n    {UNSEEN[i % 4]}\n" for i, line in enumerate(chosen))
    path = tmp_path / "generated.py"
    path.write_text(HEAD + code, encoding="utf-8")
    run = runpy.run_path(str(path))["run"]
    plain, watched = arguments(), arguments()
    run(*plain)
    with watch() as seen:
        run(*watched)
    first = HEAD.count("\n") + 1
    lines = [LINE_OF_HELPER if line == "helper(ints)" else first + 2 * i for i, line in enumerate(chosen)]
    by_call = {id(one.call): one for one in seen.sightings}.values()
    assert [(one.where["file"], one.where["line"]) for one in by_call] == [(str(path), line) for line in lines]
    made = [(call.op, launch.kind) for call, launch in zip(seen.calls, seen.launches(), strict=True)]
    assert made == [LINES[line] for line in chosen]
    assert all(map(torch.equal, plain[:3], watched[:3]))


def signature(calls):
    described = []
    for call in calls:
        dsts = tuple((tuple(dst.shape), dst.dtype) for dst in call.dsts)
        described.append((call.op, dsts, tuple(src.dtype for src in call.srcs)))
    return Counter(described)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", SECTIONS)
def test_sections_of_engines_make_the_calls_of_the_file(name, device):
    if (name, device) == ("nano-vllm", "cpu"):
        pytest.skip("uploads from the CPU to the CPU are none")
    section = SECTIONS[name](device)
    for requests in (16, 13):
        with watch() as seen:
            section.fill(requests, 16)
        assert signature(seen.calls) == signature(engines()[name].calls(requests, 16))


def pasted(lines, **scope):
    """The `copies` of the suggested lines; their own names are looked up in `scope`."""
    definitions, call, _ = lines.partition("copies(inputs, batch_size, captured)")
    exec(definitions, scope | {"ReplayCopies": ReplayCopies, "StaticInput": StaticInput}, made := {})
    assert call
    return made["copies"]


def test_what_is_suggested_works_when_pasted():
    section, other = SglangDraft("cpu"), SglangDraft("cpu")
    with watch() as seen:
        section.fill(13, 16)
    before, after, lines = seen.suggest()
    copies = pasted(lines, section=other)
    inputs = vars(other.inputs(13))
    for i, source in enumerate(inputs.values()):
        source += i
    copies(inputs, 13, 16)
    for name, source in inputs.items():
        assert torch.equal(getattr(other.buffers, name)[: len(source)], source), name
    assert other.buffers.seq_lens[13:16].tolist() == [1] * 3
    assert (before, after) == (10, len(launches(copies.calls(inputs, 13, 16))))


def test_fields_of_the_host_go_into_packed_inputs():
    section = SECTIONS["nano-vllm"]("meta")
    with watch() as seen:
        section.fill(3, 4)
    before, after, lines = seen.suggest()
    assert (before, after) == (12, 1)
    scope = {"torch": torch, "PackedInputs": PackedInputs, "device": "cpu"}
    exec(lines + "\n    pass", scope)
    packed = scope["packed"].device
    assert list(packed) == list(section.buffers) and packed["slot_mapping"].tolist() == [-1] * 64
    report = seen.report()
    uploads = report[report.kind == "htod"]
    assert uploads.times.sum() == 5 and uploads.better.str.contains("PackedInputs").all()
    assert uploads.reason.str.startswith("pageable").all()


def test_what_is_no_field_is_left_as_it_is_and_said():
    one, other = SimpleNamespace(ids=torch.zeros(8)), SimpleNamespace(ids=torch.zeros(8))
    parts, lens, columns, block = torch.zeros(8), torch.zeros(9), torch.zeros(8, 4), torch.zeros(16)
    sixes = torch.zeros(9)
    views = SimpleNamespace(first=block[:8], second=block[8:])
    four = torch.arange(4.0)
    with watch() as seen:
        for buffer in (one.ids, other.ids, parts, views.first, views.second):
            buffer[:4] = four
        parts[4:] = four
        lens[1:5].copy_(four)
        columns[:, :2].copy_(columns[:, 2:])
        sixes[:6].copy_(torch.ones(6))  # of requests that fill four rows of most
        for row in (torch.zeros(8), torch.zeros(8)):
            row[:4].copy_(four)
        torch.zeros(4)[:2].copy_(torch.ones(2))
        torch.zeros(4).fill_(1)
    lines = seen.suggest().lines
    assert lines.splitlines()[0].partition(": ")[2] == "parts, lens, columns, sixes, row"
    copies = pasted(lines, one=one, other=other, views=views)
    assert list(copies.fields) == ["ids", "other_ids", "first", "second"]


def test_the_report_says_how_often_what_hinders_and_what_helps():
    a, b, c = torch.zeros(8, dtype=torch.int32), torch.zeros(8), torch.zeros(4, 4)
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
    buffer = torch.zeros(4)
    with watch() as nothing:
        torch.zeros(4)
    assert len(nothing.report()) == 0 and nothing.suggest() == (0, 0, "")
    with pytest.raises(RuntimeError, match="must match"), watch() as seen:
        buffer.zero_()
        buffer[:2] = torch.ones(3)
    assert [call.op for call in seen.calls] == ["fill_"]


class Proxy:
    """One that is bound to nothing yet."""

    @property
    def __class__(self):
        raise RuntimeError("unbound")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_whatever_else_the_code_holds_is_left_alone():
    buffer, unbound, lazy = torch.zeros(4), Proxy(), torch.nn.LazyLinear(2)
    others = [torch.eye(2).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]
    with watch() as seen:
        for other in others:
            other.clone().copy_(other)
            buffer.copy_(torch.ones(4))
        torch.vmap(lambda row: torch.empty_like(row).copy_(row))(torch.ones(3, 4))
    assert unbound is not lazy and buffer.tolist() == [1] * 4
    assert [one.buffer for one in seen.sightings][:2] == ["buffer"] * 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_uploads_and_conversions_are_seen_in_inference_mode_too(mode):
    source = torch.arange(4)
    with watch() as seen, mode():
        converted, uploaded = source.to(torch.int32), source.to("meta")
        assert source.to(torch.int64) is source
    assert converted.dtype == torch.int32 and uploaded.is_meta
    assert [launch.kind for launch in seen.launches()] == ["elementwise", "htod"]
