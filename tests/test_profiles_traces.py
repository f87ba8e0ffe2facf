"""The trace reader: every format, bad and hostile input, limits, the round trip."""

import gzip
import json
import math
import sqlite3
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.profiles import (
    DEVICE_KINDS,
    burst_copies,
    find_copy_bursts,
    from_profiler,
    load_trace,
    to_chrome_trace,
    traces,
)
from tests.traces_of import (
    COPY_KERNEL,
    DTOD,
    FOREACH_KERNEL,
    TRACES,
    call,
    copies,
    device,
    memcpy,
    nsys,
    recorded,
    span,
    table_of,
    write,
)

# ------------------------------------------------------------------ formats


@pytest.mark.parametrize("bare", [False, True], ids=["object", "list"])
@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "renamed.bin"])
@pytest.mark.parametrize(
    ("spelling", "whole"),
    [
        (("cpu_op", "cuda_runtime", "gpu_memcpy"), True),
        (("Operator", "Runtime", "Memcpy"), False),
        (("cpu_op", "cuda_driver", "memcpy"), False),
    ],
)
def test_every_spelling_of_kineto(tmp_path, bare, name, whole, spelling):
    events = copies(spelling=spelling, whole=whole)
    gpu = {"id": 0, "name": "Tesla V100-SXM2-32GB"}
    document = events if bare else {"deviceProperties": [gpu], "traceEvents": events, "displayTimeUnit": "ms"}
    table = load_trace(write(tmp_path / name, document))
    assert table["kind"].value_counts()[["host_op", "runtime", "memcpy"]].tolist() == [5, 5, 5]
    assert set(table["track"]) == {"host 1", "stream 7"}
    assert table["start_us"].min() == 0 and table["start_us"].is_monotonic_increasing
    assert table.attrs["resolution_us"] == (1.0 if whole else 0.001)
    assert table.attrs["left_out"] == []
    assert table.attrs["device"] == ("" if bare else gpu["name"])
    (burst,) = find_copy_bursts(table).itertuples()
    assert (burst.n_copies, burst.bytes, burst.span_us, burst.busy_us) == (5, 5 * 512, 42.0, 10.0)
    assert burst.idle_share == pytest.approx(1 - 10 / 42)
    assert (burst.host_us, burst.op_us, burst.host_span_us) == (10.0, 20.0, 42.0)
    assert (burst.call, burst.op, burst.regime) == ("cudaMemcpyAsync", "aten::copy_", "host-bound")


def test_nanoseconds_since_1970_are_kept(tmp_path):
    text = '[{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":1712195495519689.%s,"dur":0.5}%s'
    table = load_trace(write(tmp_path / "t.json", text % ("001", ",") + (text % ("126", "]"))[1:]))
    assert table["start_us"].tolist() == [0.0, 0.125]


def test_the_events_are_those_that_json_means(tmp_path):
    """Not the first text that looks like them, nor the first of two lists."""
    events = copies(40)
    events[3]["name"] = 'odd "},{" name \\ "traceEvents": ['
    events[4]["args"]["stack"] = [{"traceEvents": []}, {"b": [{}, {"c": "}, {"}]}]
    other = json.dumps({"first": {"traceEvents": copies(2)}, "traceEvents": copies(3)})
    text = f'{other[:-1]}, "traceEvents": {json.dumps(events)}, "tail": [{{}}, {json.dumps(copies(9))}]}}'
    assert len(load_trace(write(tmp_path / "t.json", "\ufeff" + text))) == 120


@pytest.mark.parametrize("ts", [0, -3.5, 1e14, "1e14"])
def test_a_time_far_from_the_others_does_not_blur_them(tmp_path, ts):
    text = '{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":1712195495519689.%s,"dur":1}'
    events = [json.dumps(span("cpu_op", "far", ts, 1)), *(text % ns for ns in ("001", "126", "127"))]
    table = load_trace(write(tmp_path / "t.json", f"[{','.join(events)}]"))
    assert table["start_us"].tolist() == [0.0, 0.125, 0.126] and table.attrs["resolution_us"] == 0.001
    assert table.attrs["left_out"][0] == "1 events with a time weeks away from the others left out"


KERNELS = {
    COPY_KERNEL: "copy_kernel",
    FOREACH_KERNEL: "copy_kernel",
    "at::native::copy_device_to_device(at::TensorIterator&, bool)": "copy_kernel",  # PyTorch 1.8
    "_small_copy_kernel": "copy_kernel",  # SGLang 0.5.21
    "void multi_tensor_apply_kernel<AdamFunctor<float>>": "kernel",
    "CatArrayBatchedCopy<int>": "kernel",
    "__amd_rocclr_copyBuffer": "memcpy",
}
MEMCPYS = {
    "Memcpy HtoD (Pinned -> Device)": "memcpy_htod",
    "Memcpy DtoH (Device -> Pinned)": "memcpy_dtoh",
    "CopyDeviceToDevice": "memcpy",  # roctracer
    "CopyHostToDevice": "memcpy_htod",
    "Memcpy PtoP": "memcpy_other",
}


def test_work_that_copies_is_told_apart(tmp_path):
    events = [device("kernel", name, 10 * i, 1, i + 1) for i, name in enumerate(KERNELS)]
    events += [device("gpu_memcpy", name, 500 + 10 * i, 1, 50 + i) for i, name in enumerate(MEMCPYS)]
    table = table_of(tmp_path, events)
    assert dict(zip(table["name"], table["kind"])) == KERNELS | MEMCPYS
    assert table["bytes"].isna().all()  # what is not told is unknown, not 0


def test_several_gpus_and_processes(tmp_path):
    events = [
        *(call(i + 1, i // 2, pid=pid) for i, pid in enumerate((10, 20, 10))),
        call(3, 1, pid=20),
        *(memcpy(i + 1, 5 + i, 1, gpu=gpu) for i, gpu in enumerate((0, 1, 1))),
    ]
    for event in events[:4]:
        event["tid"] = 100
    table = table_of(tmp_path, events)
    streams = {"gpu 0 stream 7 of 10", "gpu 1 stream 7 of 20"}
    assert set(table["track"]) == {"host 10:100", "host 20:100", *streams}
    assert "3 events not joined: several host calls have their correlation" in table.attrs["left_out"]
    joined = burst_copies(table, min_copies=1)
    assert joined["call"].fillna("").tolist() == ["cudaMemcpyAsync", "cudaMemcpyAsync", ""]


@pytest.mark.parametrize("owners", [(10,), (10, 20)])
def test_work_without_its_call_lies_where_all_other_work_of_its_stream_does(tmp_path, owners):
    events = [span("cpu_op", "another process", 0, 1, pid=30), device("kernel", "k", 27, 1, 99)]
    for i in range(6):
        events += [call(i + 1, 10 * i, 1, pid=owners[i % len(owners)]), memcpy(i + 1, 10 * i + 5, 1)]
    table = table_of(tmp_path, events)
    unknown = "1 device events of which several processes may be the owner: on tracks of their own"
    assert table.attrs["left_out"] == ([unknown] if len(owners) > 1 else [])
    if len(owners) == 1:
        assert find_copy_bursts(table, min_copies=1)["n_copies"].tolist() == [3, 3]


def test_the_gpus_name_where_ids_do_not_match(tmp_path):
    """ROCm counts devices otherwise in events than in deviceProperties."""
    for names, expected in ((["MI300X"] * 2, "MI300X"), (["MI300X", "MI250"], ""), ([None], ""), ([7], "7")):
        gpus = [{"id": i, "name": name} for i, name in enumerate(names)]
        events = [memcpy(1, 5, gpu=5)]
        table = load_trace(write(tmp_path / "t.json", {"deviceProperties": gpus, "traceEvents": events}))
        assert table.attrs["device"] == expected


def test_rocm_warns_that_a_copy_may_come_from_the_host(tmp_path):
    hip = table_of(tmp_path, [call(1, 0, name="hipMemcpyAsync"), memcpy(1, 5)])
    tracer = write(tmp_path / "r.json", {"roctracer_version": 4.1, "traceEvents": [memcpy(1, 5)]})
    for table in (hip, load_trace(tracer), recorded("vllm_decode_mi300x")):
        assert "DtoD copies, some of which may come from pinned host memory" in table.attrs["left_out"][-1]
    assert recorded("v100_ddp_training").attrs["rocm"] is False


def test_shapes_of_copying_operators(tmp_path):
    def op(name, dims, types):
        return span("cpu_op", name, 1, 1, **{"Input Dims": dims, "Input type": types})

    events = [
        op("aten::copy_", [[16, 2], [2], []], ["int", "long int", "Scalar"]),
        op("aten::_foreach_copy_", [[[16], [4], [2]], [[16], [4], [2]]], ["TensorList", "TensorList"]),
        op("aten::copy_", "odd", None),
        op("aten::copy_", [["x"]], ["int"]),
        op("aten::add", [[16]], ["int"]),
    ]
    table = table_of(tmp_path, events)
    assert table["inputs"].tolist() == ["int <- long int", "3 tensors", "", "", ""]
    assert table["bytes"].fillna(-1).tolist() == [128, -1, -1, -1, -1]


def test_python_frames_are_read_on_request():
    name = "sglang_decode_b300_qwen3_30b"
    assert "2142 events of category 'python_function' left out" in recorded(name).attrs["left_out"]
    frames = recorded(name, python=True).query("kind == 'python'")
    (helper,) = frames[frames["name"].str.endswith(": _grouped_foreach_copy_")].itertuples()
    assert len(frames) == 2142 and helper.dur_us == pytest.approx(62.169)  # around 33 us of operators


def test_overlaps_and_impossible_durations_are_told(tmp_path):
    close = [memcpy(i + 1, ts, 10) for i, ts in enumerate([0, 3, 20, 25])]
    table = table_of(tmp_path, close)
    assert (
        "2 device events overlap on their stream: launched ahead, most likely" in table.attrs["left_out"][0]
    )
    (burst,) = find_copy_bursts(table).itertuples()
    assert (burst.span_us, burst.busy_us) == (35.0, 28.0)
    other = [*close, span("cpu_op", "a", 0, 1, pid=5), span("cpu_op", "a", 0, 1, pid=6)]
    assert any("several processes or devices" in why for why in table_of(tmp_path, other).attrs["left_out"])
    broken = table_of(tmp_path, [memcpy(1, 0, 3.4e6), memcpy(2, 500), memcpy(3, 600)])
    assert broken["dur_us"].tolist() == [500.0, 1.5, 1.5]
    assert "1 device events end 1 ms and more after the next" in broken.attrs["left_out"][0]
    assert "3400 ms" in broken.attrs["left_out"][0]


# ------------------------------------------------------------------ nsys


@pytest.mark.parametrize("packed", [False, True])
def test_nsys_with_the_least_tables(tmp_path, packed):
    path = nsys(tmp_path / "r.sqlite")
    if packed:
        path.with_suffix(".gz").write_bytes(gzip.compress(path.read_bytes()))
        path = path.with_suffix(".gz")
    table = load_trace(path)
    assert table["kind"].value_counts()[["runtime", "memcpy"]].tolist() == [4, 4]
    assert set(table["track"]) == {"host 5", "stream 7"} and table.attrs["device"] == "NVIDIA H200"
    (burst,) = find_copy_bursts(table).itertuples()
    assert (burst.n_copies, burst.bytes, burst.call) == (4, 1024, "cudaMemcpyAsync")
    assert burst.span_us == pytest.approx(3.2) and burst.busy_us == pytest.approx(0.8)


EVERY_TABLE = f"""
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, streamId INT,
    correlationId INT, globalPid INT, shortName INT, demangledName INT);
INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (9000, 9500, 0, 7, 50, {77 << 24}, 3, 2);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INT, end INT, deviceId INT, streamId INT,
    correlationId INT, globalPid INT, bytes INT);
INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (9600, 9700, 0, 7, 51, {77 << 24}, 64);
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INT, end INT, deviceId INT, streamId INT,
    correlationId INT, globalPid INT);
INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (10000, 12000, 0, 7, 52, {77 << 24});
CREATE TABLE NVTX_EVENTS (start INT, end INT, category INT, text TEXT, textId INT, globalTid INT);
INSERT INTO NVTX_EVENTS VALUES (0, 4000, NULL, 'copy inputs', NULL, {77 << 24 | 5}),
    (0, 9, 3, NULL, 5, {77 << 24 | 5}), (1, NULL, NULL, 'a mark', NULL, {77 << 24 | 5}),
    (20, 900, NULL, 'aten::copy_, seq = 45395, op_id = 990883', NULL, {77 << 24 | 5}),
    (950, 999, NULL, 'aten::view, op_id = 7', NULL, {77 << 24 | 5});
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL_V2 (start INT);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT);
CREATE VIEW CUPTI_ACTIVITY_KIND_ENDLESS AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)
    SELECT x AS start FROM n;
"""


def test_nsys_with_every_table_and_two_processes(tmp_path):
    table = load_trace(nsys(tmp_path / "r.sqlite", (77, 78), EVERY_TABLE))
    assert set(table["track"]) >= {"host 77:5", "host 78:5", "stream 7 of 77", "stream 7 of 78"}
    assert table.attrs["left_out"] == [
        "table CUPTI_ACTIVITY_KIND_KERNEL_V2 left out: of a version that is not known here",
        "the file holds the recorder's environment, secrets included: mind who gets it",
        "1 events with no finite ts and dur left out",
    ]
    kinds = dict(zip(table["name"], table["kind"]))
    assert (
        kinds["kernel<int>"] == "kernel" and kinds["registered range"] == kinds["copy inputs"] == "annotation"
    )
    assert kinds["aten::copy_"] == kinds["aten::view"] == "host_op"  # PyTorch's operators, by emit_nvtx
    assert (table["kind"] == "graph").sum() == (table["kind"] == "memset").sum() == 1
    bursts = find_copy_bursts(table).set_index("track")
    assert bursts.loc["stream 7 of 77", "op"] == "copy inputs"
    assert bursts["host_us"].tolist() == [2.0, 2.0]  # equal correlations of two processes stay apart


@pytest.mark.parametrize("lost", ["DELETE FROM", "DROP TABLE"])
def test_nsys_tells_the_process_of_work_without_a_call(tmp_path, lost):
    table = load_trace(nsys(tmp_path / "r.sqlite", (77, 78), f"{lost} CUPTI_ACTIVITY_KIND_RUNTIME;"))
    assert set(table["track"]) == {"stream 7 of 77", "stream 7 of 78"}
    assert find_copy_bursts(table)["n_copies"].tolist() == [4, 4] and table.attrs["left_out"] == []


def test_nsys_of_2022_nests_calls_and_one_id_twice_doubles_nothing(tmp_path):
    script = f"""
    INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME SELECT start + 100, end - 100, globalTid, correlationId, 1
        FROM CUPTI_ACTIVITY_KIND_RUNTIME;
    ALTER TABLE StringIds RENAME TO Old;
    CREATE TABLE StringIds (id INT, value TEXT);
    INSERT INTO StringIds SELECT * FROM Old UNION ALL SELECT * FROM Old;
    CREATE VIEW NVTX_EVENTS AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)
        SELECT x AS start, x + 1 AS end, 'x' AS text, {77 << 24 | 5} AS globalTid FROM n;
    """
    script += "UPDATE StringIds SET value = x'6162' WHERE id = 1;"  # bytes, where text is expected
    table = load_trace(nsys(tmp_path / "r.sqlite", (77,), script))
    assert set(table["name"][table["kind"] == "runtime"]) == {"ab"}
    assert len(table) == 12 and table.attrs["left_out"] == []
    joined = burst_copies(table)
    assert joined["call_us"].tolist() == pytest.approx([0.5] * 4)  # the outer call's, and none is lost


def test_the_nsys_export_of_a_h100():
    table = recorded("nsys_h100_2gpu")
    ranges = table[table["kind"].isin(("host_op", "annotation"))]
    assert len(table) == 26_946 and len(ranges) == 16_782
    assert (ranges["name"] == "aten::copy_").sum() > 900 and not ranges["name"].str.contains("op_id").any()
    uploads = table[table["kind"] == "memcpy_htod"]
    assert uploads["name"].str.contains("Pinned").sum() == 446


# ------------------------------------------------------------------ written again


def test_from_profiler_reads_a_run_of_this_machine():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        for _ in range(6):
            torch.zeros(8).copy_(torch.ones(8))
    table = from_profiler(prof)
    assert (table["name"] == "aten::copy_").sum() == 6 and table.attrs["evidence"] == "measured"
    assert "no GPU event in the file: only the host side can be shown" in table.attrs["left_out"]
    with pytest.raises(ValueError, match="profiler: unfinished, or exported before"):
        from_profiler(prof)


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_chrome_trace_round_trip(tmp_path, name):
    t = 4_458_676_456_000
    events = [
        *copies(4),
        span("user_annotation", "a range", t, 30),
        span("cpu_op", "aten::copy_", t, 3, **{"Input Dims": [[2]], "Input type": ["int", "int"]}),
        device("kernel", COPY_KERNEL, t + 50, 1, 50, stream=8),
        device("gpu_memcpy", "Memcpy HtoD", t + 60, 1, 51, gpu=1, bytes=4),
        call(51, t + 1, 1, pid=2),
        device("gpu_memset", "Memset", t + 61, 1, 52, gpu=1),
        span("mtia_ccp_events", "not known", t, 1),
    ]
    gpus = [{"id": 0, "name": "A"}, {"id": 1, "name": "B"}]
    table = load_trace(write(tmp_path / "in.json", {"deviceProperties": gpus, "traceEvents": events}))
    assert "1 events of category 'mtia_ccp_events' left out" in table.attrs["left_out"]
    to_chrome_trace(table, tmp_path / name)
    again = load_trace(tmp_path / name)
    pd.testing.assert_frame_equal(again, table, check_categorical=False)
    changed = {"source", "path"}
    assert {k: again.attrs[k] for k in again.attrs if k not in changed} == {
        k: table.attrs[k] for k in table.attrs if k not in changed
    }


def test_nothing_half_written(tmp_path):
    table = load_trace(write(tmp_path / "in.json", copies()))
    with pytest.raises(ValueError, match=r"in\.json: the table was read from this file"):
        to_chrome_trace(table, tmp_path / "in.json")
    (tmp_path / "out.json").write_text("before")
    table.loc[3, "dur_us"] = np.nan
    with pytest.raises(ValueError):
        to_chrome_trace(table, tmp_path / "out.json")
    assert (tmp_path / "out.json").read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"in.json", "out.json"}


# ------------------------------------------------------------------ bad and hostile input


BAD_FILES = {
    "empty": (lambda p: p.write_bytes(b""), "the file is empty"),
    "truncated gzip": (lambda p: p.write_bytes(gzip.compress(bytes(9999))[:-9]), "gzip is truncated"),
    "damaged gzip": (lambda p: p.write_bytes(b"\x1f\x8b\x08\x00" + bytes(30)), "truncated or damaged"),
    "gzip of nothing": (lambda p: p.write_bytes(gzip.compress(b"")), "the file is empty"),
    "no JSON": (lambda p: p.write_text("hello"), "expected a JSON list"),
    "bytes": (lambda p: p.write_bytes(bytes(range(128, 256)) * 9), "expected a JSON list"),
    "cut short": (lambda p: p.write_text(json.dumps(copies())[:-30]), "cut short"),
    "not JSON at a place": (lambda p: p.write_text('{"traceEvents": [1, 2, }'), "char 23"),
    "nested deep": (lambda p: p.write_text('{"traceEvents": ' + "[" * 100_000), "invalid JSON, or cut short"),
    "no list": (lambda p: p.write_text('{"traceEvents": 3}'), "expected a JSON list"),
    "not the trace's list": (lambda p: p.write_text('{"a": {"traceEvents": []}}'), "expected a JSON list"),
    "rocprofv3": (lambda p: p.write_text('{"rocprofiler-sdk-tool": []}'), "rocprofv3"),
    "no events": (lambda p: p.write_text('{"traceEvents": []}'), "no complete event"),
    "no spans": (lambda p: p.write_text('[{"ph": "M", "name": "process_name"}]'), "no complete event"),
    "no readable event": (lambda p: p.write_text('[{"ph": "X", "cat": "cpu_op"}, 7]'), "no event could"),
    "a database": (lambda p: sqlite3.connect(p).execute("CREATE TABLE rocpd (b)").close(), "rocpd"),
    "a damaged database": (lambda p: p.write_bytes(b"SQLite format 3\0" + b"x" * 4096), "Nsight Systems"),
    "an nsys file of another schema": (
        lambda p: nsys(p, script="DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME;"
                       "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (a)"), "no such column"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_name_the_file_and_what_is_wrong(tmp_path, case):
    make, why = BAD_FILES[case]
    make(tmp_path / "bad.trace")
    with pytest.raises(ValueError) as caught:
        load_trace(tmp_path / "bad.trace")
    assert "bad.trace" in str(caught.value) and why in str(caught.value)


def test_files_that_are_not_there_or_of_another_kind(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_trace(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match="a folder"):
        load_trace(tmp_path)
    for suffix, advice in {
        ".nsys-rep": "nsys export --type sqlite",
        ".zip": "unpack it",
        ".zst": "zstd -d",
    }.items():
        (tmp_path / f"t{suffix}").write_bytes(b"PK\x03\x04")
        with pytest.raises(ValueError, match=advice):
            load_trace(tmp_path / f"t{suffix}")


def test_what_cannot_be_placed_is_left_out_and_counted(tmp_path):
    good = copies()
    base = good[0]["ts"]
    bad = [
        {"ph": "X", "cat": "cpu_op", "name": "no dur", "ts": base, "pid": 1, "tid": 1},
        span("cpu_op", "text", "soon", 1),
        span("cpu_op", "negative", base, -3),
        span("cpu_op", "signalling", base, "sNaN"),
        span("cpu_op", "signalling", "sNaN", 1),
        span("cpu_op", "huge", "1e999990", 1),
        span("cpu_op", "negative huge", "-1e999999", 1),
        {"ph": "X", "cat": "kernel", "name": "no args, no ids", "ts": base, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": "no thread", "ts": base, "dur": 1},
        span("cpu_op", "thread by name", base, 1, tid="main"),
        span("python_function", "a frame", base, 1),
        span("python_function", "a frame", base, 1),
        "no event",
    ]
    told = [
        "3 events of category 'of no readable type' left out",
        "2 events of category 'python_function' left out",
        "1 events with a negative duration left out",
        "1 events with no stream left out",
        "2 events with no thread left out",
    ]
    table = load_trace(write(tmp_path / "t.json", {"traceEvents": bad[:6] + good + bad[6:]}))
    told.append("4 events with no finite ts and dur left out")
    assert sorted(table.attrs["left_out"]) == sorted(told)
    expected = load_trace(write(tmp_path / "good.json", good))
    pd.testing.assert_frame_equal(table, expected, check_categorical=False)
    # with what only Python's json takes: the rest of the file is read all the same
    odd = [
        span("cpu_op", "NaN", base, math.nan),
        span("cpu_op", "infinite", math.inf, 1),
        span("cpu_op", "a", base, 1, x="\ud800"),
    ]
    again = load_trace(write(tmp_path / "t.json", {"traceEvents": odd + good}))
    assert len(again) == 16 and len(again.attrs["left_out"]) == 1


@pytest.mark.parametrize("spelling", [str, lambda n: n if n % 2 else str(n)])
def test_integers_in_another_spelling_keep_their_value(tmp_path, spelling):
    events = copies()
    expected = load_trace(write(tmp_path / "t.json", events))
    for event in events:
        event["args"] = {key: spelling(value) for key, value in event["args"].items()}
    pd.testing.assert_frame_equal(load_trace(write(tmp_path / "t.json", events)), expected)
    assert expected.attrs["left_out"] == []


@pytest.mark.parametrize("odd", [512.9, "many", 2**70, [512], -(2**63), None, {}])
def test_an_event_with_a_field_that_cannot_be_read_is_left_out(tmp_path, odd):
    events = [memcpy(1, 0), memcpy(odd, 5), memcpy(2, 10, size=odd), {**memcpy(3, 15), "name": odd}]
    table = table_of(tmp_path, events)
    left_out = [why for why in table.attrs["left_out"] if "no readable type" in why]
    assert len(table) + int(left_out[0].split()[0]) == 4 and table["bytes"].max() == 256


def test_names_are_text_and_nothing_else(tmp_path):
    """What a terminal would obey or UTF-8 cannot hold is replaced; markup stays, as the text that it is."""
    events = [{**event, "name": "\u0085<b>$x$\x1b[31m\n\u202ey"} for event in copies()]
    gpus = [{"id": 0, "name": "\x1b]0;GPU"}]
    events += [span("an\x07other", "a", 4_458_676_456_000, 1)]
    table = load_trace(write(tmp_path / "t.json", {"deviceProperties": gpus, "traceEvents": events}))
    assert set(table["name"]) == {"\ufffd<b>$x$\ufffd[31m\ufffd\ufffdy"}
    assert table.attrs["device"] == "\ufffd]0;GPU"
    assert table.attrs["left_out"][0] == "1 events of category 'an\ufffdother' left out"
    to_chrome_trace(table, tmp_path / "again.json")
    assert len(load_trace(tmp_path / "again.json")) == 15


EVENT = json.dumps(span("cpu_op", "a", 5, 1)).replace(": 5,", ": %s,")
SLOW = {
    "a ts of a million digits": lambda p: p.write_text(
        f"[{EVENT % '1'}, {EVENT % '1e999990'}, {EVENT % ('9' * 10**6)}]"),
    "a name of 2 MB": lambda p: write(p, [device("kernel", "multi_tensor_apply_kernel" * 80_000, 1, 1, 1)]),
    "20 MB before the events": lambda p: write(p, {"x": "a" * (20 << 20), "traceEvents": copies()}),
}  # fmt: skip


@pytest.mark.parametrize("case", SLOW)
def test_small_files_that_took_minutes(tmp_path, case):
    SLOW[case](tmp_path / "t.json")
    before = time.process_time()
    assert len(load_trace(tmp_path / "t.json"))
    assert time.process_time() - before < 10  # of minutes, and of this process alone


def test_a_gzip_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "LARGEST_UNPACKED", 1 << 22)
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b"[" + b" " * (1 << 24)))
    with pytest.raises(ValueError, match="unpacks to more than"):
        load_trace(path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
FIELDS = {
    "ph": st.just("X"),
    "cat": st.sampled_from(["cpu_op", "kernel", "gpu_memcpy", "cuda_runtime", "Trace"]) | JSON_VALUES,
    "name": st.sampled_from([DTOD, "aten::copy_", "aten::_foreach_copy_"]) | JSON_VALUES,
    "ts": st.integers(0, 99) | st.floats(0, 99) | JSON_VALUES,
    "dur": st.integers(0, 9) | JSON_VALUES,
    "pid": st.integers(0, 2) | JSON_VALUES,
    "tid": st.integers(0, 2) | JSON_VALUES,
    "args": st.fixed_dictionaries(
        {},
        optional={f: st.integers(0, 3) | JSON_VALUES for f in ("device", "stream", "correlation", "bytes",
                                                               "Input Dims", "Input type", "track")},
    )
    | JSON_VALUES,
}  # fmt: skip


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    events=st.lists(st.fixed_dictionaries({}, optional=FIELDS) | JSON_VALUES, max_size=12),
    about=st.fixed_dictionaries({}, optional=dict.fromkeys(("deviceProperties", "table"), JSON_VALUES)),
)
def test_any_json_gives_a_table_or_a_value_error(tmp_path_factory, events, about):
    path = tmp_path_factory.mktemp("fuzz") / "t.json"
    write(path, about | {"traceEvents": events})
    try:
        table = load_trace(path)
    except ValueError as error:
        assert "t.json" in str(error)
        return
    assert len(table) and np.isfinite(table[["start_us", "dur_us"]]).all(axis=None)
    assert (table["dur_us"] >= 0).all() and not (table["bytes"] < 0).any()
    assert set(table["kind"]) <= {*DEVICE_KINDS, "host_op", "runtime", "annotation"}
    find_copy_bursts(table, min_copies=1)


@pytest.mark.parametrize("name", ["sglang_decode_b300_qwen3_30b", "nsys_h100_2gpu"])
def test_damaged_copies_of_a_real_file(tmp_path, name):
    """60 of them; 3,000 of each of three files were tried by hand."""
    (path,) = TRACES.glob(f"{name}.*")
    whole = bytearray(gzip.decompress(path.read_bytes())[: 1 << 20])
    random = np.random.default_rng(1)
    for _ in range(30):
        damaged = whole.copy()
        for place in random.integers(0, len(damaged), 3):
            damaged[place] = random.integers(0, 256)
        (tmp_path / "t.json").write_bytes(damaged[: random.integers(len(damaged) // 2, len(damaged))])
        try:
            assert len(load_trace(tmp_path / "t.json"))
        except ValueError as error:
            assert "t.json" in str(error)


# ------------------------------------------------------------------ the real traces


@pytest.mark.parametrize(
    ("name", "events", "dtod", "bursts", "in_bursts"),
    [
        ("v100_ddp_training", 45_420, 1600, 10, 1600),
        ("a100_ddp_training", 26_933, 960, 6, 960),
        ("a100_graph_launches", 67_217, 1280, 25, 320),
        ("resnet_ddp_mi300x", 49_208, 550, 9, 550),
        ("flux_foreach_slow_mi300x", 1_020, 7, 1, 7),
        ("vllm_decode_mi300x", 1_539, 9, 1, 9),
    ],
)
def test_traces_hold_what_their_readme_says(name, events, dtod, bursts, in_bursts):
    table = recorded(name)
    left_out = sum(int(why.split()[0]) for why in table.attrs["left_out"] if why.endswith("left out"))
    assert len(table) + left_out == events
    assert (table["kind"] == "memcpy").sum() == dtod
    found = find_copy_bursts(table, kinds=("memcpy",))
    assert (len(found), found["n_copies"].sum()) == (bursts, in_bursts)


def test_v100_figures():
    table = recorded("v100_ddp_training")
    host = table.groupby("name", observed=True)["dur_us"].median()
    assert host["cudaMemcpyAsync"] == pytest.approx(4.6, abs=0.05)
    assert host["aten::copy_"] == pytest.approx(7.3, abs=0.05)
    bursts = find_copy_bursts(table)
    assert bursts["regime"].tolist() == ["host-bound"] + ["queued"] * 9
    assert bursts["span_us"][[0, 2]].tolist() == pytest.approx([1473, 316], abs=0.5)
    assert bursts["busy_us"][[0, 2]].tolist() == pytest.approx([222, 205], abs=0.5)
    assert table.attrs["device"] == "Tesla V100-SXM2-32GB"


def test_graph_trace_joins_all_but_140_copies():
    joined = burst_copies(recorded("a100_graph_launches"), min_copies=1, kinds=("memcpy",))
    assert joined["call_us"].isna().sum() == 140


def test_traces_take_at_most_4_mb():
    assert sum(path.stat().st_size for path in Path(TRACES).iterdir()) < 4e6
