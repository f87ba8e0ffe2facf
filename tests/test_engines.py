"""The engines of data/engines.csv: what they copy today, and with what is here."""

import pandas as pd
import pytest

from lib.engines import CSV, engines, table

ENGINES = engines()
TODAY = {  # launches of a step: padded no, yes; test_watch runs four more
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
    assert list(whole.index) == list(padded.index) == list(ENGINES)
    assert {name: (whole.today[name], padded.today[name]) for name in TODAY} == TODAY
    assert padded.fused["sglang-draft-0.5.23"] < padded.today["sglang-draft-0.5.23"]
    for counts, batch_size in ((whole, 16), (padded, 13)):
        assert counts[["fused", "PackedInputs"]].le(counts.ReplayCopies, axis=0).all(axis=None)
        assert counts.PackedInputs["nano-vllm"] == 1 and counts.ReplayCopies["LightLLM"] == 2
        for name, most in counts.max(axis=1).items():
            step = ENGINES[name].step(batch_size, 16)
            assert most <= len(step.fills) + len(step.pairs)
            assert all(rest.storage_offset() for rest, _ in step.pads)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 3), (65, 65)])
def test_batches_that_no_buffer_holds_are_refused(sizes):
    with pytest.raises(ValueError, match=f"expected 1 to 64 requests, got {sizes[0]} of {sizes[1]}"):
        ENGINES["nano-vllm"].calls(*sizes)


def test_every_row_says_where_it_was_read():
    rows = pd.read_csv(CSV)
    assert rows[["checked", "place", "when"]].notna().all(axis=None)
    assert not rows.duplicated(["engine", "field"]).any()
