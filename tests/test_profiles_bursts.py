"""Bursts of copies against a plain slow reference, their regimes, and what a trace shows in words."""

import math

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.profiles import DEVICE_KINDS, burst_copies, find_copy_bursts, findings, lanes, of_range
from tests.traces_of import DIRECT, DTOD, FUSED, call, device, memcpy, recorded, span, table_of


def reference_bursts(table: pd.DataFrame, min_copies: int, kinds) -> list[dict]:
    found, events = [], list(table.itertuples())
    for track in table["track"].unique():
        run, ready = [], -math.inf
        for row in [r for r in events if r.track == track and r.kind in DEVICE_KINDS] + [None]:
            if row and row.kind in kinds:
                run.append((row, ready))
            else:
                if len(run) >= min_copies:
                    found.append(reference_burst(events, run))
                run = []
            if row:
                ready = max(ready, row.start_us + row.dur_us)
    return sorted(found, key=lambda b: (b["start_us"], b["track"]))


def reference_burst(events: list, run: list) -> dict:
    (first, _), *_ = run
    reached, idle, waited, blocked, calls = first.start_us, 0.0, 0.0, 0.0, []
    gpu = first.track.split("stream")[0]
    ends = [e.start_us + e.dur_us for e in events if e.kind in DEVICE_KINDS and e.track.startswith(gpu)]
    for row, ready in run:
        mine = [c for c in events if c.kind == "runtime" and c.correlation == row.correlation >= 0]
        calls += mine
        gap = max(row.start_us - reached, 0)
        returned = mine[0].start_us + mine[0].dur_us if mine else -math.inf
        last = max(end for end in [*ends, -math.inf] if end <= row.start_us)
        is_first = ready == -math.inf
        wait = 0.0 if is_first or last - ready < 5 else min(max(last - max(ready, returned), 0), gap)
        idle, blocked = idle + gap, blocked + wait
        waited += (gap - wait) * (not is_first and returned > ready)
        reached = max(reached, row.start_us + row.dur_us)
    regime = "host-bound" if waited > idle / 2 else "queued"
    regime = regime if 2 * len(calls) > len(run) else "unknown"
    return {
        "track": first.track, "n_copies": len(run), "start_us": first.start_us,
        "span_us": reached - first.start_us, "busy_us": reached - first.start_us - idle,
        "bytes": sum(row.bytes for row, _ in run if row.bytes == row.bytes), "blocked_us": blocked,
        "host_us": sum(c.dur_us for c in {c.Index: c for c in calls}.values()),
        "regime": "blocked" if blocked > idle / 2 else regime,
    }  # fmt: skip


WORK = {
    "memcpy": ("gpu_memcpy", DTOD), "copy": ("kernel", DIRECT), "fused": ("kernel", FUSED),
    "kernel": ("kernel", "gemm"), "memset": ("gpu_memset", "Memset"), "htod": ("gpu_memcpy", "Memcpy HtoD"),
}  # fmt: skip


@st.composite
def generated_events(draw):
    events = []
    for correlation in range(1, draw(st.integers(2, 40))):
        cat, name = WORK[draw(st.sampled_from(["memcpy", "memcpy", *WORK]))]
        start, length = draw(st.integers(0, 400)) / 4, draw(st.integers(0, 40)) / 4
        args = {"bytes": draw(st.integers(0, 5000))} if "Mem" in name else {}
        stream, gpu = draw(st.integers(7, 8)), draw(st.integers(0, 1))
        events.append(device(cat, name, start, length, correlation, stream, gpu, **args))
        if draw(st.integers(0, 3)):
            earlier = max(start - draw(st.integers(0, 40)) / 4, 0)
            events.append(call(correlation, earlier, draw(st.integers(0, 12)) / 4))
    return events


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    events=generated_events(),
    min_copies=st.integers(1, 5),
    kinds=st.sampled_from([("memcpy",), ("memcpy", "copy_kernel"), ("copy_kernel",)]),
)
def test_bursts_agree_with_a_plain_reference(tmp_path_factory, events, min_copies, kinds):
    table = table_of(tmp_path_factory.mktemp("bursts"), events)
    bursts = find_copy_bursts(table, min_copies, kinds)
    expected = reference_bursts(table, min_copies, kinds)
    found = sorted(bursts.fillna({"bytes": 0}).to_dict("records"), key=lambda b: (b["start_us"], b["track"]))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        assert {key: ours[key] for key in theirs} == theirs
    assert bursts["start_us"].is_monotonic_increasing


def test_one_call_behind_several_kernels_counts_once(tmp_path):
    events = [span("cpu_op", "aten::_foreach_copy_", 0, 30), span("cpu_op", "aten::copy_", 50, 1)]
    events += [call(9, 5, 10, name="cudaGraphLaunch")]
    events += [device("kernel", FUSED, 20 + 5 * i, 4, 9) for i in range(4)]
    (burst,) = find_copy_bursts(table_of(tmp_path, events)).itertuples()
    assert (burst.host_us, burst.op_us, burst.kept_us) == (10.0, 30.0, 16.0)
    assert burst.op == "aten::_foreach_copy_" and len(burst.sizes) == 0 and math.isnan(burst.bytes)


def test_a_copy_kernel_has_the_bytes_of_its_operator(tmp_path):
    events = []
    for i in range(4):
        shapes = {"Input Dims": [[16], [16]], "Input type": ["int", "long int"]} if i else {}
        events += [span("cpu_op", "aten::copy_", 10 * i, 4, **shapes), call(i + 1, 10 * i + 1, 2)]
        events += [device("kernel", DIRECT, 10 * i + 5, 1, i + 1)]
    table = table_of(tmp_path, events)
    assert burst_copies(table)["bytes"].fillna(-1).tolist() == [-1, 64, 64, 64]
    (burst,) = find_copy_bursts(table).itertuples()
    assert burst.sizes.tolist() == [64, 64, 64] and (burst.bytes, burst.kept_us) == (192, 1.0)


def test_a_wait_for_another_stream_is_blocked(tmp_path):
    """62 copies queued by a host far ahead; the 31st waits 9 ms for an all-reduce on another stream."""
    events = [device("kernel", "gemm", 500, 500, 999)]
    events += [device("kernel", "ncclDevKernel_AllReduce", 1010, 9000, 888, stream=20)]
    for i in range(62):
        events += [call(i + 1, 100 + 6 * i), memcpy(i + 1, 1002 + 2 * i + 8955 * (i >= 31), 1.3)]
    bursts = find_copy_bursts(table_of(tmp_path, events), kinds=("memcpy",))
    (burst,) = bursts.itertuples()
    assert burst.regime == "blocked" and burst.blocked_us == pytest.approx(8946.7, abs=1)
    alone = [event for event in events if event["tid"] != 20]
    assert find_copy_bursts(table_of(tmp_path, alone), kinds=("memcpy",))["regime"].tolist() == ["queued"]


FINDINGS = [
    ("v100_ddp_training", "queued: 9 of 10 bursts, of 159 to 161 copies: the host is ahead"),
    ("v100_ddp_training", "of another GPU (NVIDIA B300) than the trace (Tesla V100-SXM2-32GB)"),
    ("resnet_ddp_mi300x", "blocked: 5 of 9 bursts, of 62 copies: the stream waits for another one"),
    ("flux_foreach_slow_mi300x", "already one foreach call, on the slow route because dtypes mix"),
    ("sglang_decode_b300_qwen3_30b", "host-bound: 1 of 1 bursts, of 15 copies: the GPU waits for the host"),
    ("sglang_decode_b300_qwen3_30b", "already one foreach call, fused: 2 times, 16 µs of host"),
    ("sglang_decode_mi300x_qwen3_8b", "the median of all copies begins 8,252 µs after its call"),
    ("nsys_h100_2gpu", "450 copies come from the host: 172 of at most 64 KiB"),
    ("nsys_h100_2gpu", "446 pinned"),
    ("vllm_decode_mi300x", "some of which may come from pinned host memory"),
]


@pytest.mark.parametrize(("name", "sentence"), FINDINGS)
def test_findings_say_what_a_trace_shows(name, sentence):
    trace = recorded(name)
    told = findings(trace, find_copy_bursts(trace), "NVIDIA B300")
    assert any(sentence in line for line in told), told


def test_one_dtype_pair_is_no_mixture_whatever_was_not_recorded(tmp_path):
    shapes = {"Input Dims": [[4], [4]], "Input type": ["float", "float"]}
    events = [span("cpu_op", "aten::_foreach_copy_", 0, 40)]
    for i in range(4):
        events.append(span("cpu_op", "aten::copy_", 10 * i, 8, **shapes if i % 2 else {}))
        events += [call(i + 1, 10 * i + 1), memcpy(i + 1, 50 + 2 * i)]
    trace = table_of(tmp_path, events)
    bursts = find_copy_bursts(trace)
    told = " ".join(findings(trace, bursts))
    assert "already one foreach call, on the slow route: 1 times, 40 µs" in told
    shuffled = trace.sample(frac=1, random_state=0)
    pd.testing.assert_frame_equal(find_copy_bursts(shuffled), bursts)


def test_findings_hold_nothing_that_a_terminal_obeys(tmp_path):
    gpus = [{"name": "\x1b]0;GPU\u202e"}]
    trace = table_of(tmp_path, [span("a\x07b", "x", 0, 1), memcpy(1, 5)], deviceProperties=gpus)
    trace.attrs["left_out"] += ["x\ny"]
    told = " ".join(findings(trace, find_copy_bursts(trace), "NVIDIA H200"))
    assert told.isprintable() and "]0;GPU" in told


SGLANG = ("sglang_decode_b300_qwen3_30b", "sglang_decode_mi300x_deepseek_r1", "sglang_decode_mi300x_qwen3_8b")


@pytest.mark.parametrize("name", SGLANG)
def test_one_recorded_step_of_sglang(name):
    step = of_range(recorded(name), "step[DECODE")
    assert burst_copies(step, 1, DEVICE_KINDS)["foreach_start_us"].nunique() == 2
    assert step["start_us"].min() == 0 and (step["name"] == "aten::_foreach_copy_").sum() == 2
    assert step["name"].str.endswith("GraphLaunch").sum() == 1 and (step["kind"] == "kernel").sum() > 300
    host, stream = lanes(step)
    assert host == "host · recorded" and stream.endswith(" · recorded")
    helper = of_range(recorded(name, python=True), "_grouped_foreach_copy_")
    assert (helper["name"] == "aten::_foreach_copy_").sum() == 2
    assert helper["dur_us"].max() == pytest.approx(66, abs=6)
