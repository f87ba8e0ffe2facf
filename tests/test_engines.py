"""The engines of data/engines.csv: what they copy today, and with what is here."""

import pandas as pd
import pytest

from lib.engines import CSV, engines, table

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


def test_the_table_has_every_engine_by_way_and_kind():
    """Launches of a step: what their sources say, and nothing here makes more than field by field."""
    counted = table()
    kinds = counted.columns.difference(["engine", "way", "padded", "launches"])
    assert (counted[kinds].sum(axis=1) == counted.launches).all()
    counts = counted.set_index(["way", "engine", "padded"]).launches.sort_index()
    assert {name: tuple(counts["today", name]) for name in TODAY} == TODAY
    ours, packed, fused = counts["ReplayCopies"], counts["PackedInputs"], counts["fused"]
    assert (fused <= ours).all() and (packed <= ours).all() and len(ours) == 2 * len(ENGINES)
    for (name, padded), most in counts.groupby(["engine", "padded"]).max().items():
        step = ENGINES[name].step(13 if padded else 16, 16)
        assert most <= len(step.fills) + len(step.pairs)
    assert packed["nano-vllm"].sum() == 2 and ours["LightLLM"].sum() == 4
    assert counts["fused", "sglang-draft-0.5.23"].sum() < counts["today", "sglang-draft-0.5.23"].sum()


@pytest.mark.parametrize("sizes", [(0, 4), (4, 3), (65, 65)])
def test_batches_that_no_buffer_holds_are_refused(sizes):
    with pytest.raises(ValueError, match=f"expected 1 to 64 requests, got {sizes[0]} of {sizes[1]}"):
        ENGINES["nano-vllm"].calls(*sizes)


def test_every_row_says_where_it_was_read():
    rows = pd.read_csv(CSV)
    assert rows[["checked", "place", "when"]].notna().all(axis=None)
    assert not rows.duplicated(["engine", "field"]).any()
