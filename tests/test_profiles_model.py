"""The device model: what it predicts of real traces, its timelines by hand, and what it must not promise."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.kinds import KINDS, Launch
from lib.profiles.bursts import burst_copies, find_copy_bursts
from lib.profiles.device import FIGURES, DeviceProfile, Figure, fit_profile, validate
from lib.profiles.simulate import AHEAD, WAITS, device_us, simulate, what_if_grouped
from lib.profiles.traces import DEVICE_KINDS
from tests.traces_of import DIRECT, call, device, memcpy, recorded, span, table_of

STORED = {
    "v100": ["v100_ddp_training"],
    "a100": ["a100_ddp_training"],
    "a100_sxm4_80gb": ["a100_graph_launches"],
    "h100": ["nsys_h100_2gpu"],
    "b300": ["sglang_decode_b300_qwen3_30b"],
    "mi300x": ["sglang_decode_mi300x_deepseek_r1", "sglang_decode_mi300x_qwen3_8b", "resnet_ddp_mi300x"],
}
ROUND = dict.fromkeys(FIGURES, 1.0) | {
    "host_launch_us": 4.0, "host_memcpy_us": 4.0, "host_copy_us": 6.0, "host_foreach_us": 8.0,
    "host_foreach_tensor_us": 0.5, "host_fill_us": 5.0, "host_graph_us": 10.0, "host_between_us": 2.0,
    "launch_latency_us": 5.0, "gap_us": 1.0, "memcpy_floor_us": 2.0,
}  # fmt: skip


def round_profile() -> DeviceProfile:
    """Round figures: calls of 4 us in copies of 6, latency 5, gap 1, memcpys of 2 us and 1 GB/s."""
    figures = {name: Figure(value, 0.5 * value, 2 * value, "by hand") for name, value in ROUND.items()}
    errors = {"queued": 0.1, "host-bound": 0.05}
    return DeviceProfile("round", "a device", "the test", "2026-01-01", figures, errors)


def memcpys(n: int, size: int = 0) -> list[Launch]:
    return [Launch("memcpy", 1, size, "same dtype, both contiguous")] * n


@cache
def fitted(*names: str) -> DeviceProfile:
    return fit_profile([recorded(name) for name in names])


HELD_OUT = {  # trace -> shortest burst, regimes
    "v100_ddp_training": (4, {"host-bound", "queued"}),
    "a100_ddp_training": (4, {"host-bound"}),
    "a100_graph_launches": (4, {"queued"}),
    "resnet_ddp_mi300x": (4, {"blocked", "queued", "unknown"}),
    "nsys_h100_2gpu": (1, {"queued", "unknown"}),  # no burst of four, 450 copies
}


@pytest.mark.parametrize("name", HELD_OUT)
def test_spans_of_held_out_bursts_within_10_percent(name):
    min_copies, regimes = HELD_OUT[name]
    checked = validate(recorded(name), min_copies)
    by_regime = checked["error"].abs().groupby(checked["regime"]).median()
    assert set(by_regime.index) == regimes
    assert (by_regime <= 0.10).all(), by_regime
    assert checked["error"].notna().all()


FOREACH = {  # trace -> (tensors, host us, device us) of SGLang's two calls, as recorded
    "sglang_decode_b300_qwen3_30b": [(4, 23.749, 1.536), (1, 8.96, 1.536)],
    "sglang_decode_mi300x_deepseek_r1": [(4, 20.34, 3.039), (1, 9.4, 2.079)],
    "sglang_decode_mi300x_qwen3_8b": [(4, 22.174, 5.568), (1, 12.078, 6.528)],
}


@pytest.mark.parametrize("name", FOREACH)
def test_foreach_calls_lie_in_the_range_that_the_other_traces_give(name):
    """By ratios to a call and an elementwise kernel, widened 1.5 times for the host, 2.5 for the kernel."""
    own = fitted(name)
    others = [fitted(other) for other in FOREACH if other != name]
    ends = []
    for figure, wider in (("host_foreach_us", 1.5), ("foreach_floor_us", 2.5)):
        base = FIGURES[figure]["base"]
        low = min(other.figures[figure].low / other[base] for other in others) / wider
        high = max(other.figures[figure].high / other[base] for other in others) * wider
        ends.append((own[base] * low, own[base] * high))
    (host_low, host_high), (device_low, device_high) = ends
    for tensors, host_us, device_time in FOREACH[name]:
        assert host_low <= host_us - tensors * own["host_foreach_tensor_us"] <= host_high
        assert device_low <= device_time <= device_high


@pytest.mark.parametrize("name", STORED)
def test_stored_profiles_are_what_the_traces_give(name):
    stored = DeviceProfile.load(name)
    again = fitted(*STORED[name])
    for figure, f in again.figures.items():
        g = stored.figures[figure]
        assert (g.value, g.low, g.high) == pytest.approx((f.value, f.low, f.high), rel=2e-3), figure
        assert g.source == f.source
    if name != "h100":  # of which the single copies were predicted
        assert stored.error == pytest.approx(again.error, abs=2e-3)
    assert stored.date and all(trace in stored.source for trace in STORED[name])


def test_a_prediction_uses_no_device_time_of_its_bursts():
    trace = recorded("v100_ddp_training").copy()
    before = validate(trace)
    copies = burst_copies(trace, kinds=("memcpy",))
    trace.loc[copies.index[copies["burst"] >= 5], "dur_us"] *= 0.25  # shorter, not to run into what follows
    later = before["half"] == "later"
    after = validate(trace)[later]
    assert after["span_us"].lt(before["span_us"][later]).all()
    assert np.allclose(after["predicted_us"], before["predicted_us"][later], rtol=1e-12)


@pytest.mark.parametrize("name", ["flux_foreach_slow_mi300x", "vllm_decode_mi300x", *STORED["b300"]])
def test_a_trace_without_bursts_carries_no_error_and_says_so(name):
    assert fitted(name).error == {} and "single copies unknown" in fitted(name).label()


def test_profile_round_trip_ends_and_what_it_lacks(tmp_path):
    profile = round_profile()
    profile.save(tmp_path / "p.json")
    assert DeviceProfile.load(tmp_path / "p.json") == profile
    assert [profile.at(end)["gap_us"] for end in ("fast", "middle", "slow")] == [0.5, 1.0, 2.0]
    assert [profile.at(end)["memcpy_gb_per_s"] for end in ("fast", "slow")] == [2.0, 0.5]
    figures = profile.figures | {"elementwise_floor_us": Figure(3, 3, 3, "fitted")}
    del figures["htod_floor_us"], figures["fill_floor_us"]
    lacking = replace(profile, figures=figures)
    assert lacking.unknown == ("fill_floor_us", "htod_floor_us") and lacking["fill_floor_us"] == 3
    assert lacking.figures["fill_floor_us"].source.startswith("assumed: 1 times")


SPOILED = {
    "got `null` - at `$.device`": lambda raw: raw.update(device=None),
    "gap_us: expected 0": lambda raw: raw["figures"]["gap_us"].update(low=3),
    "fill_gb_per_s: expected 1e-09 <=": lambda raw: raw["figures"]["fill_gb_per_s"].update(low=0),
}


@pytest.mark.parametrize("why", SPOILED)
def test_a_bad_profile_is_refused(tmp_path, why):
    path = tmp_path / "bad.json"
    round_profile().save(path)
    raw = json.loads(path.read_text())
    SPOILED[why](raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"bad\.json") as caught:
        DeviceProfile.load(path)
    assert why in str(caught.value)


def test_fit_recovers_the_profile_behind_a_modelled_trace():
    truth = replace(DeviceProfile.load("v100"), error={})
    host_bound = [Launch("memcpy", 1, size, "") for size in (8, 1024, 2048, 512) * 5]
    queued = [*memcpys(1, 2**27), *[Launch("memcpy", 1, size, "") for size in (512, 2**20, 2**22) * 10]]
    found = fit_profile(simulate([*host_bound, *queued, Launch("graph", 0, 0, "")], truth, graph_us=9))
    for figure in ("host_copy_us", "host_memcpy_us", "host_between_us", "host_graph_us", "launch_latency_us",
                   "gap_us", "memcpy_floor_us", "memcpy_gb_per_s"):  # fmt: skip
        assert found[figure] == pytest.approx(truth[figure], rel=0.01), figure
        assert found.figures[figure].source.startswith("fitted: ")
    assert "host_foreach_us" in found.unknown and "host_copy_us" not in found.unknown


def test_a_figure_is_fitted_only_from_what_it_is(tmp_path):
    """Fills on the CPU, kernels inside a graph, large copies, and a rate that no memory has."""
    events = [span("cpu_op", "aten::fill_", 10 * i, 900) for i in range(9)]
    events += [call(500, 1000, 5, name="cudaGraphLaunch")]
    events += [device("kernel", "gemm", 1100 + 3 * i, 1, 500) for i in range(50)]
    for i in range(20):
        events += [call(i + 1, 2000 + 10 * i, 3), memcpy(i + 1, 2005 + 10 * i, 7.4, 5 << 20)]
    profile = fit_profile(table_of(tmp_path, events))
    assert {"host_fill_us", "gap_us", "memcpy_floor_us"} <= set(profile.unknown)
    assert profile["launch_latency_us"] == 5.0  # of the copies; the graph's kernels come 100 us after theirs
    fast = [memcpy(i + 1, 10 * i, 5, 64 << 20) for i in range(9)]  # 13 TB/s
    profile = fit_profile(table_of(tmp_path, [*fast, memcpy(99, 500, 1.5, 64)]))
    assert "memcpy_gb_per_s" in profile.unknown


def test_calls_of_every_kind_by_hand():
    work = [
        Launch("fill", 1, 0, "one fill"),  # 0 to 5
        Launch("foreach", 4, 0, "to int64"),  # 7 to 17: 8 us and 4 tensors
        Launch("foreach", 2, 0, "to int64"),  # 17 to 22: the next chunk of that call
        Launch("elementwise", 1, 0, "slow path: pair 1"),  # 24 to 30
        Launch("elementwise", 1, 0, "slow path: pair 1"),  # 30 to 36: the loop inside that call
        Launch("fused", 9, 0, ""),  # 38 to 42: at least as long as its runtime call
        Launch("graph", 0, 0, "verify"),  # 44 to 54
    ]
    table = simulate(work, round_profile(), graph_us={"verify": 40})
    assert table.attrs["evidence"] == "modelled" and "host-bound 5.0%" in table.attrs["label"]
    assert table.query("kind == 'host_op'")["start_us"].tolist() == [0, 7, 17, 24, 30]
    calls, works = table.query("kind == 'runtime'"), table.query("kind in @DEVICE_KINDS")
    assert calls.eval("start_us + dur_us").tolist() == [5.0, 17.0, 22.0, 30.0, 36.0, 42.0, 54.0]
    assert works["start_us"].tolist() == [6, 18, 23, 31, 37, 43, 49]  # 5 us after its call began
    assert works["correlation"].tolist() == calls["correlation"].tolist()
    assert works["kind"].tolist() == ["kernel"] + ["copy_kernel"] * 5 + ["graph"]
    assert works[["name", "dur_us"]].iloc[-1].tolist() == ["verify", 40]
    with pytest.raises(ValueError, match="graph_us: expected how long graph 'verify' runs"):
        simulate(work, round_profile(), graph_us={"draft": 40})


def test_a_step_in_both_regimes():
    """7 copies | draft | verify, whose result the host waits for | 9 copies | draft-extend."""
    graph_us = {"draft": 100.0, "verify": 1000.0, "draft-extend": 50.0}
    draft, verify, extend = (Launch("graph", 0, 0, name) for name in graph_us)
    step = [*memcpys(7), draft, verify, Launch("dtoh", 1, 64, "accepted"), *memcpys(9), extend]
    waits, ahead = (simulate(step, round_profile(), graph_us, regime == AHEAD) for regime in (WAITS, AHEAD))
    assert find_copy_bursts(waits)["regime"].tolist() == ["host-bound"] * 2
    assert find_copy_bursts(ahead)["regime"].tolist() == ["queued"] * 2
    read_us = waits.query("kind == 'memcpy_dtoh'").eval("start_us + dur_us").item()
    assert (waits.query("kind == 'host_op'")["start_us"] > read_us - 1e-9).sum() == 9
    queue = ahead.query("kind in @DEVICE_KINDS")
    assert np.allclose((queue["start_us"].diff() - queue["dur_us"].shift()).dropna(), 1.0)  # the gap
    assert ahead.query("kind == 'runtime'").eval("start_us + dur_us").max() <= queue["start_us"].min()


launch = st.builds(Launch, st.sampled_from([*KINDS]), st.integers(1, 64), st.integers(0, 2**24), st.just(""))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(launch, min_size=1, max_size=15), st.sampled_from([*STORED]), st.booleans())
def test_no_modelled_timeline_breaks_the_rules(work, name, ahead):
    ends = []
    for end in ("fast", "middle", "slow"):
        figures = DeviceProfile.load(name).at(end)
        table = simulate(work, figures, 30, ahead).set_index("correlation").sort_index()
        ends.append((table["start_us"] + table["dur_us"]).max())
        calls, done = table[table["kind"] == "runtime"], table[table["kind"].isin(DEVICE_KINDS)]
        assert len(done) == len(calls) == len(work)
        assert (done["start_us"] >= calls["start_us"] + figures["launch_latency_us"] - 1e-9).all()
        after = done["start_us"] + done["dur_us"] + figures["gap_us"]
        assert (done["start_us"].iloc[1:].to_numpy() >= after.iloc[:-1].to_numpy() - 1e-9).all()
        assert done["bytes"].tolist() == [launch.bytes for launch in work]
        assert done["dur_us"].tolist() == pytest.approx([device_us(launch, figures, 30) for launch in work])
    assert ends == sorted(ends)


def test_what_if_by_hand():
    """12 small copies every 8 us: 72 us of operators become 3 calls of 8 us and 4 tensors."""
    profile = replace(round_profile(), error={"host-bound": 0.0})
    bursts = find_copy_bursts(simulate(memcpys(12), profile))
    (row,) = what_if_grouped(bursts, profile).itertuples()
    assert (row.n_copies, row.launches, row.regime, row.span_us) == (12, 3, "host-bound", 90.0)
    assert row.saved_us == 90 - row.grouped_us == 12 * 6 - (3 * (8 + 4 * 0.5) + 2 * 2) == 38
    assert row.saved_low_us < row.saved_us < row.saved_high_us <= row.span_us - 24 + 9 * 2
    assert row.waiting_us == 12 * 6 + 11 * 2 - 34
    assert row.ahead_us == pytest.approx(12 * 3 - 3 * (1 + 1), abs=0.1)
    (more,) = what_if_grouped(bursts, profile, groups=8).itertuples()
    assert more.launches == 8 and more.grouped_us > row.grouped_us
    with pytest.raises(ValueError, match="groups: expected at least 1, got 0"):
        what_if_grouped(bursts, profile, groups=0)
    unfit = what_if_grouped(bursts, replace(profile, error={"host-bound": 3.0}))  # its error widens the range
    assert (unfit["saved_low_us"] < 0).all() and "host-bound 300.0%" in unfit.attrs["label"]


def test_what_if_leaves_large_and_fused_copies_alone():
    for work in (memcpys(1, 2**30) + memcpys(5, 2**20), [Launch("foreach", 9, 99, str(i)) for i in range(6)]):
        bursts = find_copy_bursts(simulate(work, round_profile()))
        (row,) = what_if_grouped(bursts, round_profile()).itertuples()
        assert row.launches == 6 and row.saved_us == pytest.approx(0)


def copies_of(n, dur, period, first, start=1000.0, kernel=""):
    events = []
    for i in range(n):
        t = start + period * i
        work = device("kernel", kernel, t + 20, dur, first + i) if kernel else memcpy(first + i, t + 20, dur)
        events += [span("cpu_op", "aten::copy_", t, 20), call(first + i, t + 14, 5), work]
    return events


def test_what_if_saves_at_most_the_idle_time_and_the_floors_that_go(tmp_path):
    """100 copy kernels of 50 us every 60 us, of unknown size; and copies of which one lasts 3.4 s."""
    gemms = [device("kernel", "gemm", t, 30.0, i) for i, t in enumerate((50_000.0, 250_000.0), 20_000)]
    to_fit = gemms + copies_of(40, 1.5, 500, 5000, 100_000.0)
    broken = copies_of(8, 1.5, 30, 9000, 300_000.0)
    broken[11]["dur"] = 3_400_000.0
    busy = table_of(tmp_path, copies_of(100, 50.0, 60.0, 1, kernel=DIRECT) + to_fit)
    for trace in (recorded("v100_ddp_training"), table_of(tmp_path, to_fit + broken), busy):
        profile = fit_profile(trace)
        table = what_if_grouped(find_copy_bursts(trace), profile)
        gone_us = (table["n_copies"] - table["launches"]) * profile["memcpy_floor_us"]
        assert (table["saved_high_us"] <= table.eval("idle_us - blocked_us") + gone_us + 1e-6).all()
        assert (table["saved_high_us"] <= table["span_us"]).all()
    assert table[["saved_us", "launches"]].iloc[0].tolist() == [0, 100]  # of unknown size


def test_waiting_for_another_stream_is_no_saving():
    profile = fitted("resnet_ddp_mi300x")
    table = what_if_grouped(find_copy_bursts(recorded("resnet_ddp_mi300x")), profile)
    assert 0 <= table["saved_us"].sum() < table["saved_high_us"].sum() < 3000  # of 47.2 ms
    assert profile["gap_us"] < 1 and profile["launch_latency_us"] < 20
