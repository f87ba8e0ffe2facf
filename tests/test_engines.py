"""The engines of data/engines.csv: what they copy today, and with what is here."""

import csv
from dataclasses import replace

import pytest
import torch

from lib.copies import ReplayCopies
from lib.engines import CSV, TABLE, engines, table
from lib.launches import launches

ENGINES = engines()
TODAY = {  # launches of a step: padded no, yes
    "sglang-draft-0.5.13": (7, 14),
    "sglang-draft-0.5.14": (3, 10),
    "sglang-draft-0.5.23": (2, 9),
    "sglang-draft-extend-0.5.13": (9, 16),
    "sglang-draft-extend-0.5.14": (3, 10),
    "sglang-draft-extend-0.5.23": (2, 9),
    "sglang-multi-layer-eagle-0.5.23": (1, 1),
    "mini-sglang": (6, 6),
    "nano-vllm": (12, 12),
    "LightLLM": (12, 12),
    "TGI": (9, 9),
    "deepspeed-fastgen": (5, 5),
}


@pytest.mark.parametrize("name", TODAY)
def test_engines_launch_what_their_sources_say(name):
    counts = [len(launches(ENGINES[name].calls(n, 16))) for n in (16, 13)]
    assert tuple(counts) == TODAY[name]


@pytest.mark.parametrize("name", ENGINES)
def test_nothing_here_makes_more_launches_than_field_by_field(name):
    engine = ENGINES[name]
    for n in (16, 13):
        step = engine.step(n, 16)
        staged = sum(field.way == "upload, copy_" for field in engine.fields.values())
        counts = {way: len(launches(engine.calls(n, 16, route))) for way, route in TABLE.items()}
        assert max(counts.values()) <= len(step.fills) + len(step.pairs) + staged
        assert counts["fused"] <= counts["ReplayCopies"]
        assert counts["PackedInputs"] <= counts["ReplayCopies"]


@pytest.mark.parametrize("name", ["sglang-draft-0.5.23", "mini-sglang", "LightLLM", "TGI"])
def test_static_inputs_are_what_replay_copies_needs(name):
    engine = ENGINES[name]
    static_inputs = {}
    for field, static in engine.static_inputs().items():
        real = torch.empty_strided(static.buffer.shape, static.buffer.stride(), dtype=static.buffer.dtype)
        static_inputs[field] = replace(static, buffer=real)
    copies = ReplayCopies(static_inputs)
    n = 16 if engine.comes_padded else 13
    inputs = {field: static.between(0, n).clone() for field, static in copies.fields.items()}
    made, counted = copies.calls(inputs, n, 16), engine.calls(13, 16, "copy_plan")
    assert [launch.kind for launch in launches(made)] == [launch.kind for launch in launches(counted)]


@pytest.mark.parametrize("sizes", [(0, 4), (4, 3), (65, 65)])
def test_batches_that_no_buffer_holds_are_refused(sizes):
    for make in (ENGINES["nano-vllm"].calls, ENGINES["nano-vllm"].step):
        with pytest.raises(ValueError, match=f"expected 1 to 64 requests, got {sizes[0]} of {sizes[1]}"):
            make(*sizes)


def test_the_table_has_every_engine_by_kind():
    counted = table()
    assert set(counted.engine) == set(ENGINES)
    kinds = counted.columns.difference(["engine", "way", "padded", "launches"])
    assert (counted[kinds].sum(axis=1) == counted.launches).all()
    least = counted.pivot_table(index="engine", columns="way", values="launches", aggfunc="sum")
    assert least.loc["nano-vllm", "PackedInputs"] == 2
    assert least.loc["LightLLM", "ReplayCopies"] == 4
    assert least.loc["sglang-draft-0.5.23", "fused"] < least.loc["sglang-draft-0.5.23", "today"]


def test_every_row_says_where_it_was_read():
    with open(CSV, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert all(row["checked"] and row["place"] and row["when"] for row in rows)
    assert len({(row["engine"], row["field"]) for row in rows}) == len(rows)
