"""watch: every copy of any code, with its line; nothing changed, nothing kept alive; what to paste."""

import importlib.util
import random
import weakref
from collections import Counter

import pytest
import torch
from engine_sections import SECTIONS, SglangDraft
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.parameter import is_lazy

from lib.copies import ReplayCopies, StaticInput
from lib.engines import engines
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
UNSEEN = [
    "torch.stack([four, four])",
    "four.clone()",
    "ints[four] = four",
    "x = ints[:4] + 1",
    "torch.full((3,), 1)",
]
HEAD = """import torch


def helper(ints):
    ints[:4].copy_(ints[4:])


def run(ints, floats, table, four, box, by_name):
"""
LINE_OF_HELPER = 5


def generated(lines, folder):
    """A function of these lines, in a module of its own, and its arguments."""
    path = folder / "generated.py"
    path.write_text(HEAD + "".join(f"    {line}\n" for line in lines), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("generated", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.run


def arguments():
    ints, floats, table = torch.arange(8), torch.arange(8.0), torch.zeros(4, 4)
    box = type("Box", (), {})()
    box.ints = ints
    return ints, floats, table, torch.arange(4), box, {"ints": ints}


@pytest.mark.parametrize("seed", range(3))
def test_fifty_mixed_calls_are_all_seen_with_their_lines(seed, tmp_path):
    chosen = random.Random(seed).choices(list(LINES), k=50)
    code = []
    for line in chosen:
        code += [line, random.Random(seed).choice(UNSEEN)]
    run = generated(code, tmp_path)
    plain, watched = arguments(), arguments()
    run(*plain)
    with watch() as seen:
        run(*watched)
    first = HEAD.count("\n") + 1
    lines = [LINE_OF_HELPER if line == "helper(ints)" else first + 2 * i for i, line in enumerate(chosen)]
    by_call = {id(one.call): one for one in seen.sightings}.values()
    assert [one.line for one in by_call] == lines
    assert [one.call.op for one in by_call] == [LINES[line][0] for line in chosen]
    assert [launch.kind for launch in seen.launches()] == [LINES[line][1] for line in chosen]
    assert {one.file for one in by_call} == {run.__code__.co_filename}
    for before, after in zip(plain[:3], watched[:3]):
        assert torch.equal(before, after)


def signature(calls):
    described = []
    for call in calls:
        dsts = tuple((tuple(dst.shape), dst.dtype) for dst in call.dsts)
        described.append((call.op, dsts, tuple(src.dtype for src in call.srcs)))
    return Counter(described)


# On the CPU, nano-vllm's uploads are none.
PLACES = [(name, device) for name in SECTIONS for device in ("cpu", "meta")]
PLACES.remove(("nano-vllm", "cpu"))


@pytest.mark.parametrize("requests", [16, 13])
@pytest.mark.parametrize(("name", "device"), PLACES)
def test_sections_of_engines_make_the_calls_of_the_file(name, device, requests):
    section = SECTIONS[name](device)
    section.fill(requests, 16)
    with watch() as seen:
        section.fill(requests, 16)
    expected = engines()[name].calls(requests, 16)
    assert signature(seen.calls) == signature(expected)


def test_what_is_suggested_works_when_pasted():
    section, other = SglangDraft("cpu"), SglangDraft("cpu")
    with watch() as seen:
        section.fill(13, 16)
    before, after, lines = seen.suggest()
    assert (before, after) == (10, 4)
    scope = {"buffers": other.buffers, "ReplayCopies": ReplayCopies, "StaticInput": StaticInput}
    scope |= {"inputs": {}, "batch_size": 13, "captured": 16}
    batch = other.inputs(13)
    for i, source in enumerate(vars(batch).values()):
        source += i
    scope["inputs"] = vars(batch)
    exec(lines, scope)
    for name, source in vars(batch).items():
        filled = getattr(other.buffers, name)
        assert torch.equal(filled[: len(source)], source), name
    assert other.buffers.seq_lens[13:16].tolist() == [1] * 3


def test_fields_of_the_host_go_into_packed_inputs():
    section = SECTIONS["nano-vllm"]("meta")
    with watch() as seen:
        section.fill(3, 4)
    before, after, lines = seen.suggest()
    assert (before, after) == (12, 1)
    scope = {"torch": torch, "PackedInputs": PackedInputs, "device": "cpu"}
    exec(lines + "\n    pass", scope)
    assert list(scope["packed"].device) == list(section.graph_vars)
    report = seen.report()
    uploads = report[report.kind == "htod"]
    assert len(uploads) == 5
    assert uploads.reason.str.startswith("pageable").all()
    assert uploads.better.str.contains("PackedInputs").all()


def test_the_report_says_how_often_what_hinders_and_what_helps():
    a, b, c = torch.zeros(8, dtype=torch.int32), torch.zeros(8), torch.zeros(4, 4)
    four = torch.arange(4)
    with watch() as seen:
        for _ in range(3):
            a[:4] = four
        torch._foreach_copy_([a[:4], b[:4]], [four, four])
        c[:, :2].copy_(torch.ones(4, 2))
    report = seen.report()
    assert report.times.tolist() == [3, 1, 1, 1]
    assert report.code.iloc[0] == "a[:4] = four"
    assert report.name.tolist() == ["a", "a", "b", "c"]
    assert "converts torch.int64 to torch.int32" in report.reason[0]
    assert report.reason[1:3].str.startswith("slow path").all()
    assert "gaps" in report.reason[3]
    assert report.bytes.tolist() == [16, 16, 16, 32]


def test_errors_come_through_and_what_came_before_is_kept():
    buffer = torch.zeros(4)
    with pytest.raises(RuntimeError, match="must match"), watch() as seen:
        buffer.zero_()
        buffer[:2] = torch.ones(3)
    assert [call.op for call in seen.calls] == ["fill_"]


def test_no_device_memory_is_kept_alive():
    buffer, source = torch.zeros(4), torch.ones(4)
    alive = weakref.ref(source)
    with watch() as seen:
        buffer.copy_(source)
        del source
        assert alive() is None
    assert len(seen.launches()) == 1


@given(st.lists(st.sampled_from(["view", "other"]), min_size=1, max_size=5))
def test_a_copy_onto_itself_launches_nothing(targets):
    buffer = torch.zeros(4)
    with watch() as seen:
        for target in targets:
            buffer.copy_(buffer.view(4) if target == "view" else torch.ones(4))
    assert len(seen.launches()) == targets.count("other")


def test_sparse_and_lazy_tensors_pass():
    sparse, complex_ = torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.complex64)
    with watch() as seen:
        sparse.copy_(torch.eye(2).to_sparse())
        complex_.copy_(torch.ones(2, dtype=torch.complex64).conj())
    assert [launch.kind for launch in seen.launches()] == ["elementwise"]


class Proxy:
    """One that is bound to nothing yet."""

    @property
    def __class__(self):
        raise RuntimeError("unbound")


class Remote:
    __slots__ = ()

    def __getattr__(self, name):
        raise RuntimeError(f"remote call: {name}")


class Lazy(dict):
    def items(self):
        raise RuntimeError("loads everything")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make",
    [
        Proxy,
        Remote,
        lambda: Lazy(a=1),
        torch.nn.LazyLinear(2).parameters().__next__,
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
    ],
)
def test_whatever_else_the_code_holds_is_left_alone(make):
    buffer, other = torch.zeros(4), make()
    with watch() as seen:
        buffer.copy_(torch.ones(4))
        if issubclass(type(other), Tensor) and not is_lazy(other):
            other.clone().copy_(other)
    assert buffer.tolist() == [1] * 4 and len(seen.launches()) == 1
    assert seen.sightings[0].buffer == "buffer"


def test_copies_under_vmap_pass():
    def filled(row):
        return torch.empty_like(row).copy_(row)

    with watch():
        assert torch.vmap(filled)(torch.ones(3, 4)).eq(1).all()


def test_variables_that_the_code_asked_for_stay():
    def code():
        buffer, scope = torch.zeros(4), locals()
        buffer.copy_(torch.ones(4))
        return scope["buffer"]

    with watch():
        assert code().tolist() == [1] * 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_uploads_and_conversions_are_seen_in_inference_mode_too(mode):
    source = torch.arange(4)
    with watch() as seen, mode():
        converted = source.to(torch.int32)
        uploaded = source.to("meta")
        assert source.to(torch.int64) is source
    assert converted.dtype == torch.int32 and uploaded.is_meta
    assert [launch.kind for launch in seen.launches()] == ["elementwise", "htod"]


def test_buffers_whose_names_end_alike_are_all_suggested():
    one, other = SglangDraft("cpu").buffers, SglangDraft("cpu").buffers
    rows = [torch.zeros(8), torch.zeros(8)]
    with watch() as seen:
        one.seq_lens[:4] = torch.arange(4)
        other.seq_lens[:4] = torch.arange(4)
        for row in rows:
            row[:4].copy_(torch.ones(4))
    lines = seen.suggest().lines
    scope = {"one": one, "other": other, "row": row, "ReplayCopies": ReplayCopies, "StaticInput": StaticInput}
    exec(lines.splitlines()[0] + "".join(lines.splitlines()[1:-1]), scope)
    assert list(scope["copies"].fields) == ["seq_lens", "other_seq_lens", "row", "row_3"]


def test_what_has_no_name_is_counted_and_not_suggested():
    with watch() as seen:
        torch.zeros(4)[:2].copy_(torch.ones(2))
        torch.zeros(4).fill_(1)
    assert seen.suggest() == (2, 2, "")
