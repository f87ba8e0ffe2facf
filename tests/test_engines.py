"""The engines of data/engines.csv: what they copy today, and with what is here."""

import csv
from collections import Counter

import pytest

from lib.copies import CopyPlan
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
    for n in (16, 13):
        step = ENGINES[name].step(n, 16)
        counts = {way: len(launches(ENGINES[name].calls(n, 16, route))) for way, route in TABLE.items()}
        assert max(counts.values()) <= len(step.fills) + len(step.pairs)
        assert counts["fused"] <= counts["ReplayCopies"]
        assert counts["PackedInputs"] <= counts["ReplayCopies"]


@pytest.mark.parametrize("name", ["sglang-draft-0.5.23", "mini-sglang", "LightLLM", "TGI"])
def test_a_plan_makes_the_calls_that_are_counted(name):
    step = ENGINES[name].step(13, 16)
    dsts, srcs = zip(*step.pairs)
    plan = CopyPlan(dsts, [src.dtype for src in srcs], constants=step.pads)
    counted = ENGINES[name].calls(13, 16, "copy_plan")
    kinds = [Counter(launch.kind for launch in launches(calls)) for calls in (plan.calls(), counted)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("sizes", [(0, 4), (4, 3), (65, 65)])
def test_batches_that_no_buffer_holds_are_refused(sizes):
    with pytest.raises(ValueError, match=f"expected 1 to 64 requests, got {sizes[0]} of {sizes[1]}"):
        ENGINES["nano-vllm"].calls(*sizes)


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
