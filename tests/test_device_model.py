"""The device model: what it predicts of real traces, its timelines by hand, and what it must not use."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import device_model
from lib.device_model import (
    CALLS,
    FIGURES,
    WORK,
    DeviceProfile,
    Figure,
    fit_profile,
    simulate,
    validate,
    what_if_grouped,
)
from lib.routes import Launch
from lib.strategies import ANY_SOURCES
from lib.traces import COLUMNS, DEVICE_KINDS, burst_copies, find_copy_bursts, load_trace, to_chrome_trace

SHARED = Path(__file__).resolve().parents[2] / "shared" / "traces"
STORED = {
    "v100": "v100_ddp_training",
    "a100": "a100_ddp_training",
    "a100_sxm4_80gb": "a100_graph_launches",
}


@cache
def shared(name: str) -> pd.DataFrame:
    path = SHARED / f"{name}.pt.trace.json.gz"
    if not path.is_file():
        pytest.skip(f"{path.name} is not there: the shared traces lie outside the project")
    return load_trace(path)


def profile_of(**figures: float) -> DeviceProfile:
    """Round figures: calls of 4 us in copies of 6, latency 5, gap 1, memcpys of 2 us and 1 GB/s."""
    base = dict.fromkeys(FIGURES, 1.0) | {
        "host_launch_us": 4.0, "host_memcpy_us": 4.0, "host_copy_us": 6.0, "host_foreach_us": 8.0,
        "host_foreach_tensor_us": 0.5, "host_fill_us": 5.0, "host_graph_us": 10.0, "host_between_us": 2.0,
        "launch_latency_us": 5.0, "gap_us": 1.0, "memcpy_floor_us": 2.0,
    }  # fmt: skip
    made = {name: Figure(x, 0.5 * x, 2 * x, "set by the test") for name, x in (base | figures).items()}
    errors = {"queued": 0.1, "host-bound": 0.05}
    return DeviceProfile("round", "a device", "the test", "2026-01-01", made, error=errors)


def memcpys(n: int, size: int = 0) -> list[Launch]:
    return [Launch("memcpy", 1, size, "same dtype, both contiguous")] * n


GRAPH = Launch("graph", 0, 0, "", "graph")


# ------------------------------------------------------------------ against real traces


@pytest.mark.parametrize("name", STORED.values())
def test_spans_of_held_out_bursts_within_10_percent(name):
    checked = validate(shared(name))
    by_regime = checked["error"].abs().groupby(checked["regime"]).median()
    expected = {"v100_ddp_training": {"host-bound", "queued"}, "a100_ddp_training": {"host-bound"},
                "a100_graph_launches": {"queued"}}  # fmt: skip
    assert set(by_regime.index) == expected[name]
    assert (by_regime <= 0.10).all(), by_regime
    assert checked["error"].notna().all()
    assert checked["half"].value_counts().max() - checked["half"].value_counts().min() <= 1


def test_a_prediction_uses_no_device_time_of_its_bursts():
    trace = shared("v100_ddp_training").copy()
    before = validate(trace)
    copies = burst_copies(trace, kinds=("memcpy",))
    later = copies.index[copies["burst"] >= 5]
    trace.loc[later, "dur_us"] *= 0.25  # shorter, so that they do not run into what follows
    after = validate(trace)
    same = before["half"] == "later"
    assert after["span_us"][same].lt(before["span_us"][same]).all()
    assert np.allclose(after["predicted_us"][same], before["predicted_us"][same], rtol=1e-12)


@pytest.mark.parametrize("name", STORED)
def test_stored_profiles_are_what_the_traces_give(name):
    stored = DeviceProfile.load(name)
    fitted = fit_profile(shared(STORED[name]), name=name, source="", date=stored.date)
    for figure, f in fitted.figures.items():
        g = stored.figures[figure]
        assert (g.value, g.low, g.high) == pytest.approx((f.value, f.low, f.high), rel=2e-3), figure
        assert g.source == f.source
    assert stored.error == pytest.approx(fitted.error, abs=2e-3)
    assert (stored.unknown, stored.device) == (fitted.unknown, fitted.device)
    assert "HolisticTraceAnalysis" in stored.source and stored.date


# ------------------------------------------------------------------ profiles


@pytest.mark.parametrize("name", STORED)
def test_stored_profiles_say_what_they_do_not_know(name):
    profile = DeviceProfile.load(name)
    assert name in DeviceProfile.available()
    for figure, f in profile.figures.items():
        assert f.source.startswith("assumed: " if figure in profile.unknown else "fitted: ")
        assert f.low < f.high or figure not in profile.unknown
    assert {"host_foreach_us", "host_foreach_tensor_us", "foreach_floor_us"} <= set(profile.unknown)
    assert profile.label().startswith("modelled · ") and profile.device in profile.label()


def test_profile_round_trip(tmp_path):
    profile = replace(profile_of(), unknown=("gap_us",))
    profile.save(tmp_path / "p.json")
    assert DeviceProfile.load(tmp_path / "p.json") == profile


def test_profile_ends():
    profile = profile_of()
    assert profile.at("fast")["gap_us"] == 0.5 and profile.at("slow")["gap_us"] == 2.0
    assert profile.at("fast")["memcpy_gb_per_s"] == 2.0 and profile.at("slow")["memcpy_gb_per_s"] == 0.5


def spoil(change):
    def spoiled(path: Path) -> None:
        profile_of().save(path)
        raw = json.loads(path.read_text())
        change(raw)
        path.write_text(json.dumps(raw))

    return spoiled


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "expected one of"),
        (lambda path: path.write_text("{"), "not a device profile"),
        (lambda path: path.write_text("[]"), "not a device profile"),
        (spoil(lambda raw: raw["figures"].pop("gap_us")), "gap_us"),
        (spoil(lambda raw: raw["figures"]["gap_us"].update(low=3)), "gap_us: expected 0 <= low"),
        (spoil(lambda raw: raw["figures"]["gap_us"].update(value=math.nan)), "gap_us: expected 0 <= low"),
        (spoil(lambda raw: raw["figures"]["fill_gb_per_s"].update(low=0)), "a rate above 0"),
        (spoil(lambda raw: raw.update(more=1)), "more"),
        (lambda path: path.write_text("[" * 200_000), "RecursionError"),
        (spoil(lambda raw: raw.update(device=None)), "device, source, date: expected texts"),
        (spoil(lambda raw: raw.update(name=3)), "device, source, date: expected texts"),
        (spoil(lambda raw: raw.update(unknown="gap_us")), "unknown: expected a list of figures"),
        (spoil(lambda raw: raw.update(unknown=["gap"])), "unknown: expected a list of figures"),
        (spoil(lambda raw: raw.update(unknown=[["gap_us"]])), "unknown: expected a list of figures"),
        (spoil(lambda raw: raw.update(error=[0.1])), "error: expected a number from 0 on"),
        (spoil(lambda raw: raw.update(error=0.1)), "error: expected a number from 0 on"),
        (spoil(lambda raw: raw.update(error={"queued": "0.1"})), "error: expected a number from 0 on"),
        (spoil(lambda raw: raw.update(error={"queued": -0.1})), "error: expected a number from 0 on"),
        (spoil(lambda raw: raw.update(error={"queued": math.nan})), "error: expected a number from 0 on"),
        (spoil(lambda raw: raw.update(error={"queued": math.inf})), "error: expected a number from 0 on"),
    ],
)
def test_a_bad_profile_is_refused(tmp_path, make, why):
    make(tmp_path / "bad.json")
    with pytest.raises(ValueError, match=r"bad\.json") as caught:
        DeviceProfile.load(tmp_path / "bad.json")
    assert why in str(caught.value)


def test_fit_recovers_the_profile_behind_a_modelled_trace():
    truth = replace(DeviceProfile.load("v100"), error=None)
    host_bound = [Launch("memcpy", 1, size, "") for size in (8, 1024, 2048, 512) * 5]
    queued = [*memcpys(1, 2**27), *[Launch("memcpy", 1, size, "") for size in (512, 2**20, 2**22) * 10]]
    found = fit_profile(simulate(host_bound + queued + [GRAPH], truth, graph_us=9))
    for figure in ("host_copy_us", "host_memcpy_us", "host_between_us", "host_graph_us", "launch_latency_us",
                   "gap_us", "memcpy_floor_us", "memcpy_gb_per_s"):  # fmt: skip
        assert found[figure] == pytest.approx(truth[figure], rel=0.01), figure
        assert found.figures[figure].source.startswith("fitted: ")
    assert "host_foreach_us" in found.unknown and "host_copy_us" not in found.unknown


def test_fit_refuses_a_trace_without_device_copies():
    trace = simulate([Launch("fill", 1, 64, "", "fill_")], profile_of())
    with pytest.raises(ValueError, match="round: no device-to-device memcpy of known size"):
        fit_profile(trace)


def test_one_burst_cannot_be_checked():
    profile = fit_profile(simulate(memcpys(6, 512), profile_of()))
    assert profile.error == {} and "single copies unknown" in profile.label()


# ------------------------------------------------------------------ simulate


def test_a_host_bound_timeline_by_hand():
    """A copy every 8 us (6 and 2 between); its call begins 2 us into it, its work 5 us later, for 2 us."""
    table = simulate(memcpys(3), profile_of())
    assert tuple(table.columns) == COLUMNS and table["start_us"].is_monotonic_increasing
    rows = dict(iter(table.groupby("kind", observed=True)))
    assert rows["host_op"]["start_us"].tolist() == [0.0, 8.0, 16.0] and set(rows["host_op"]["dur_us"]) == {
        6.0
    }
    assert rows["runtime"]["start_us"].tolist() == [2.0, 10.0, 18.0]
    assert rows["memcpy"]["start_us"].tolist() == [7.0, 15.0, 23.0] and set(rows["memcpy"]["dur_us"]) == {2.0}
    assert rows["memcpy"]["correlation"].tolist() == rows["runtime"]["correlation"].tolist()
    (burst,) = find_copy_bursts(table, min_copies=3).itertuples()
    assert (burst.regime, burst.span_us, burst.busy_us) == ("host-bound", 18.0, 6.0)
    assert table.attrs["evidence"] == "modelled" and "host-bound 5.0%" in table.attrs["label"]


def test_a_queued_timeline_by_hand():
    """100 KB at 1 GB/s keep the stream for 102 us; what follows waits for it, one gap apart."""
    table = simulate(memcpys(1, 100_000) + memcpys(2), profile_of())
    work = table[table["kind"] == "memcpy"]
    assert work["start_us"].tolist() == [7.0, 110.0, 113.0] and work["dur_us"].tolist() == [102.0, 2.0, 2.0]


def test_calls_of_every_kind_by_hand():
    launches = [
        Launch("fill", 1, 0, "", "fill_"),  # 0 to 5
        Launch("foreach", 4, 0, "int64", "foreach"),  # 7 to 17: 8 us and 4 tensors
        Launch("foreach", 2, 0, "int64", "foreach"),  # 17 to 22: the next chunk of that call
        Launch("foreach", 2, 0, "int32", "foreach"),  # 24 to 33: another call
        Launch("elementwise", 1, 0, "slow path", "foreach_slow"),  # 35 to 41
        Launch("elementwise", 1, 0, "slow path", "foreach_slow"),  # 41 to 47: the loop inside that call
        Launch("fused", 9, 0, "", "triton"),  # 49 to 53: at least as long as its runtime call
        GRAPH,  # 55 to 65
    ]
    table = simulate(launches, profile_of(), graph_us=40)
    calls = table[table["kind"] == "runtime"].sort_values("correlation")
    assert (calls["start_us"] + calls["dur_us"]).tolist() == [5.0, 17.0, 22.0, 33.0, 41.0, 47.0, 53.0, 65.0]
    names = table[table["kind"] == "host_op"]["name"].tolist()
    assert names == ["aten::fill_", *["aten::_foreach_copy_"] * 3, *["aten::copy_"] * 2]
    kinds = table[table["kind"].isin(DEVICE_KINDS)]["kind"].tolist()
    assert kinds == ["kernel"] + ["copy_kernel"] * 6 + ["graph"]
    assert table["start_us"].add(table["dur_us"]).max() == 60 + 40


@pytest.mark.parametrize(
    ("launches", "graph_us", "why"),
    [
        ([Launch("dma", 1, 0, "")], None, "launch 1: expected kind in"),
        ([Launch("memcpy", 1, 0, "", "copy")], None, "launch 1: expected kind in"),
        ([GRAPH], None, "graph_us: expected how long"),
        ([GRAPH], math.nan, "graph_us: expected how long"),
        ([GRAPH], -1, "graph_us: expected how long"),
        (memcpys(1, -1), None, "launch 1: expected n_copies and bytes"),
        (memcpys(1, math.nan), None, "launch 1: expected n_copies and bytes"),
        (memcpys(1, math.inf), None, "launch 1: expected n_copies and bytes"),
        (memcpys(1, 1.5), None, "launch 1: expected n_copies and bytes"),
        ([Launch("foreach", -4, 0, "", "foreach")], None, "launch 1: expected n_copies and bytes"),
    ],
)
def test_simulate_refuses(launches, graph_us, why):
    with pytest.raises(ValueError, match=why):
        simulate(launches, profile_of(), graph_us)


def test_no_launch_is_an_empty_table():
    table = simulate([], profile_of())
    assert tuple(table.columns) == COLUMNS and table.empty and find_copy_bursts(table).empty


def test_a_modelled_timeline_reads_back(tmp_path):
    table = simulate(
        [*memcpys(2, 8), Launch("foreach", 3, 24, "x", "foreach"), GRAPH], DeviceProfile.load("v100"), 5
    )
    to_chrome_trace(table, tmp_path / "t.json.gz")
    again = load_trace(tmp_path / "t.json.gz")
    assert again["kind"].tolist() == table["kind"].tolist()
    assert np.allclose(again["start_us"], table["start_us"], atol=1e-3)
    assert again.attrs["evidence"] == "modelled"  # and never "recorded" for having been written to a file


kinds_of_call = {
    "copy_": ("memcpy", "elementwise"), "foreach": ("foreach",), "foreach_slow": ("memcpy", "elementwise"),
    "fill_": ("fill",), "triton": ("fused",), "graph": ("graph",),
}  # fmt: skip
launch_lists = st.lists(
    st.sampled_from([(call, kind) for call, kinds in kinds_of_call.items() for kind in kinds]).flatmap(
        lambda pair: st.builds(
            Launch, st.just(pair[1]), st.integers(1, 64), st.integers(0, 2**24), st.just(""), st.just(pair[0])
        )
    ),
    min_size=1,
    max_size=15,
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(launches=launch_lists, name=st.sampled_from(list(STORED)))
def test_no_modelled_timeline_breaks_the_rules(launches, name):
    profile = DeviceProfile.load(name)
    tables = {end: simulate(launches, profile.at(end), graph_us=30) for end in ("fast", "slow")}
    tables["middle"] = simulate(launches, profile, graph_us=30)
    table = tables["middle"]
    calls = table[table["kind"] == "runtime"].set_index("correlation")
    work = table[table["kind"].isin(DEVICE_KINDS)].set_index("correlation").sort_index()
    assert len(work) == len(calls) == len(launches) and work.index.is_monotonic_increasing
    assert (work["start_us"] >= calls["start_us"] + profile["launch_latency_us"] - 1e-9).all()
    assert (
        work["start_us"].iloc[1:].to_numpy() >= (work["start_us"] + work["dur_us"]).iloc[:-1].to_numpy()
    ).all()
    assert (calls["start_us"].diff().dropna() > 0).all() and work["bytes"].tolist() == [
        x.bytes for x in launches
    ]
    ends = {end: (t["start_us"] + t["dur_us"]).max() for end, t in tables.items()}
    assert ends["fast"] <= ends["middle"] <= ends["slow"]


def test_every_strategy_can_be_played():
    dsts = [
        torch.empty(n, dtype=dtype, device="meta") for n in (4, 8, 64) for dtype in (torch.int64, torch.int32)
    ]
    for strategy in ANY_SOURCES.values():
        launches = strategy.launches(dsts, [torch.empty_like(d) for d in dsts])
        assert {x.call for x in launches} <= set(CALLS) and {x.kind for x in launches} <= set(WORK)
        assert len(simulate(launches, DeviceProfile.load("a100"))) >= 2 * len(launches)


# ------------------------------------------------------------------ the recurrence behind validate


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from("ab"), st.integers(0, 50), st.integers(0, 9), st.none() | st.integers(0, 40)
        ),
        min_size=1,
        max_size=25,
    )
)
def test_play_is_the_plain_recurrence(rows):
    rows.sort(key=lambda row: row[:2])
    device = pd.DataFrame(rows, columns=["track", "start_us", "dur_us", "call_start_us"]).astype(
        {"track": "category", "start_us": float, "dur_us": float, "call_start_us": float}
    )
    device["bytes"] = 1000.0 * device.index
    profile, modelled = profile_of(), device.index[::2]
    start, end = device_model._play(device, modelled, profile)
    free: dict[str, float] = {}
    for row in device.itertuples():
        duration = 2 + row.bytes / 1000 if row.Index in modelled else row.dur_us
        launched = -math.inf if math.isnan(row.call_start_us) else row.call_start_us + 5
        expected = max(launched, free[row.track] + 1) if row.track in free else row.start_us
        free[row.track] = expected + duration
        assert start[row.Index] == pytest.approx(expected) and end[row.Index] == pytest.approx(
            expected + duration
        )


# ------------------------------------------------------------------ what if


def test_what_if_by_hand():
    """12 small copies every 8 us; 3 calls of 4 tensors take 10 us each, 2 between: 34 us, latency, work."""
    profile = replace(profile_of(host_between_us=2.0), error={"host-bound": 0.0})
    bursts = find_copy_bursts(simulate(memcpys(12), profile))
    table = what_if_grouped(bursts, profile)
    (row,) = table.itertuples()
    assert (row.n_copies, row.launches, row.regime, row.span_us) == (12, 3, "host-bound", 90.0)
    end = 34 - 4 + 5 + 1  # the last call begins 4 us before the host is done; its kernel takes 1 us
    lead = 2 + 5  # of today's first copy
    kept = 12 * 8 - 2 - 2 - 12 * 6  # 22 us between today's calls, less the start of the first operator
    assert kept == bursts["host_span_us"].item() - bursts["op_us"].item()
    between = 2 * 2  # of the three calls, which counts once
    assert row.grouped_us == pytest.approx(end - lead + kept - between, abs=0.01)
    assert row.saved_us == pytest.approx(90 - row.grouped_us)
    assert row.grouped_low_us < row.grouped_us < row.grouped_high_us
    assert row.saved_low_us < row.saved_us < row.saved_high_us
    assert table.attrs["groups"] == 3 and table.attrs["evidence"] == "modelled"


@pytest.mark.parametrize("name", STORED)
def test_what_if_on_stored_profiles(name):
    profile = DeviceProfile.load(name)
    head = [Launch("memcpy", 1, 2**30, "")]  # keeps the stream busy, so that the others queue up
    for launches, regime in ((memcpys(40, 512), "host-bound"), (head + memcpys(40, 512), "queued")):
        bursts = find_copy_bursts(simulate(launches, profile))
        (row,) = what_if_grouped(bursts, profile).itertuples()
        assert row.regime == regime and row.launches == len(launches) - 40 + 3
        assert 0 < row.saved_low_us <= row.saved_us <= row.saved_high_us < row.span_us
        more = what_if_grouped(bursts, profile, groups=8)
        assert more["grouped_us"].item() > row.grouped_us and more["launches"].item() == row.launches + 5


def test_what_if_leaves_alone_what_grouping_does_not_touch():
    profile = profile_of()
    large = find_copy_bursts(simulate(memcpys(1, 2**30) + memcpys(5, 2**20), profile))
    (row,) = what_if_grouped(large, profile).itertuples()
    assert row.launches == 6 and row.saved_us == pytest.approx(0)
    fused = find_copy_bursts(
        simulate([Launch("foreach", 9, 99, str(i), "foreach") for i in range(5)], profile)
    )
    (row,) = what_if_grouped(fused, profile).itertuples()
    assert row.launches == 5
    empty = what_if_grouped(find_copy_bursts(simulate([], profile)), profile)
    assert empty.empty and "saved_us" in empty
    with pytest.raises(ValueError, match="groups: expected at least 1, got 0"):
        what_if_grouped(large, profile, groups=0)


def test_what_if_stays_physical_where_the_model_is_bad():
    """An error of more than all, and fused kernels that overlap for longer than the burst lasts."""
    profile = replace(profile_of(), error={"queued": 3.0, "host-bound": 3.0})
    head = memcpys(1, 2**30)
    for launches in (memcpys(12), head + memcpys(12)):
        bursts = find_copy_bursts(simulate(launches, profile))
        for changed in (bursts, bursts.assign(fused_us=bursts["span_us"] * 2, n_fused=1)):
            (row,) = what_if_grouped(changed, profile).itertuples()
            assert 0 <= row.grouped_low_us <= row.grouped_us <= row.grouped_high_us


def test_a_burst_without_a_span_is_no_error(tmp_path):
    """Times in whole us round short copies down to nothing."""
    trace = simulate([*memcpys(5), GRAPH] * 4, profile_of(), graph_us=9)
    of_burst = burst_copies(trace)["burst"]
    for burst in (0, 1):
        rows = of_burst.index[of_burst == burst]
        trace.loc[rows, ["start_us", "dur_us"]] = [trace["start_us"][rows[0]], 0.0]
    checked = validate(trace)
    assert checked["span_us"].eq(0).sum() == 2 and checked["predicted_us"].gt(0).all()
    assert checked["error"].isna().tolist() == [True, True, False, False]
    profile = fit_profile(trace)
    profile.save(tmp_path / "p.json")
    assert DeviceProfile.load(tmp_path / "p.json").error == profile.error
    assert what_if_grouped(find_copy_bursts(trace), profile)["saved_us"].notna().all()


def test_what_if_splits_large_groups_as_the_kernel_does(monkeypatch):
    profile = profile_of()
    bursts = find_copy_bursts(simulate(memcpys(300, 8), profile))
    limits = device_model.foreach_launches(
        [torch.empty(1, device="meta")] * 300, [torch.empty(1, device="meta")] * 300
    )
    assert what_if_grouped(bursts, profile, groups=1)["launches"].item() == len(limits)


# ------------------------------------------------------------------ notebook 07, which shows all of it


NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "07_your_trace.ipynb"


def run_notebook(monkeypatch, **parameters) -> dict:
    """Its cells but the exercises, here and without figures."""
    from lib import plots

    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setattr(plots, "show", lambda *figure: plots.plt.close("all"))
    namespace = {"display": lambda table: None}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        tags = cell["metadata"].get("tags", ())
        if cell["cell_type"] == "code" and "exercise" not in tags:
            exec("".join(cell["source"]), namespace)
        if "parameters" in tags:
            namespace |= {"device": "cpu", "quick": True} | parameters
    return namespace


@pytest.mark.parametrize(
    "parameters",
    [{"min_copies": 8}, {"min_copies": 10}, {"min_copies": 1, "groups": 100}, {"profile": "a100"}],
)
def test_notebook_07_takes_other_parameters(monkeypatch, parameters):
    n_copies = run_notebook(monkeypatch, **parameters)["bursts"]["n_copies"].tolist()
    assert n_copies == [n for n in (7, 9) if n >= parameters.get("min_copies", 4)] * 3


@pytest.mark.parametrize(
    "parameters",
    [
        {"min_copies": 0},
        {"min_copies": "4"},
        {"groups": 2.0},
        {"groups": 0},
        {"trace_path": None},
        {"profile": 3},
        {"perfetto_path": "of/no/folder.json"},
    ],
)
def test_notebook_07_names_a_wrong_parameter_before_it_starts(monkeypatch, parameters):
    (name,) = parameters
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        run_notebook(monkeypatch, **parameters)


@pytest.mark.parametrize("name", ["zero", "no_bytes", "a100_ddp_training_of_mine"])
def test_notebook_07_takes_traces_that_tell_little(monkeypatch, tmp_path, name):
    """Copies of no duration at one time, copies of unknown size, and a file called almost as one of ours."""
    copies = [
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 5 if name == "zero" else 5 + 9 * i,
         "dur": 0 if name == "zero" else 2, "pid": 0, "tid": 7,
         "args": {"device": 0, "stream": 7, "correlation": i + 1}
         | ({} if name == "no_bytes" else {"bytes": 8})}
        for i in range(6)
    ]  # fmt: skip
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({"traceEvents": copies}))
    found = run_notebook(monkeypatch, trace_path=str(path))
    assert found["bursts"]["n_copies"].tolist() == [6] and found["saving"]["saved_us"].notna().all()
    assert found["device_profile"].name == ("v100" if name == "no_bytes" else "fitted")


def test_notebook_07_takes_our_trace_with_another_profile(monkeypatch):
    shared("a100_ddp_training")
    path = SHARED / "a100_ddp_training.pt.trace.json.gz"
    assert len(run_notebook(monkeypatch, trace_path=str(path), profile="v100")["bursts"]) == 6
