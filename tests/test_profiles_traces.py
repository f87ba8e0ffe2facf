"""The trace reader: every format, bad and hostile input, limits, the round trip."""

import gzip
import json
import sqlite3

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.profiles import burst_copies, find_copy_bursts, from_profiler, load_trace, to_chrome_trace
from lib.profiles.traces import DEVICE_KINDS
from tests.traces_of import DIRECT, FUSED, call, copies, device, memcpy, nsys, recorded, span, table_of, write

SPELLINGS = [("cpu_op", "cuda_runtime", "gpu_memcpy"), ("Operator", "cuda_driver", "Memcpy")]


@pytest.mark.parametrize("name", ["object.json", "object.json.gz", "bare.list"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_kineto(tmp_path, name, spelling):
    document = {"deviceProperties": [{"id": 0, "name": "Tesla"}], "traceEvents": copies(spelling=spelling)}
    bare = name == "bare.list"
    table = load_trace(write(tmp_path / name, document["traceEvents"] if bare else document))
    assert table["kind"].value_counts()[["host_op", "runtime", "memcpy"]].tolist() == [5, 5, 5]
    assert set(table["track"]) == {"host 1", "stream 7"}
    assert table["start_us"].min() == 0 and table["start_us"].is_monotonic_increasing
    assert (table.attrs["left_out"], table.attrs["device"]) == ([], "" if bare else "Tesla")
    (burst,) = find_copy_bursts(table).itertuples()
    assert (burst.n_copies, burst.bytes, burst.span_us, burst.busy_us) == (5, 5 * 512, 42.0, 10.0)
    assert (burst.host_us, burst.op_us, burst.host_span_us) == (10.0, 20.0, 42.0)
    assert (burst.call, burst.op, burst.regime) == ("cudaMemcpyAsync", "aten::copy_", "host-bound")


def test_nanoseconds_since_1970_are_kept(tmp_path):
    event = '{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":1712195495519689.%s,"dur":0.5}'
    (tmp_path / "t.json").write_text(f"[{event % '001'},{event % '126'}]")
    assert load_trace(tmp_path / "t.json")["start_us"].tolist() == [0.0, 0.125]


KINDS = {
    DIRECT: "copy_kernel",
    FUSED: "copy_kernel",
    "at::native::copy_device_to_device(at::TensorIterator&, bool)": "copy_kernel",  # PyTorch 1.8
    "_small_copy_kernel": "copy_kernel",  # SGLang 0.5.21
    "void multi_tensor_apply_kernel<AdamFunctor<float>>": "kernel",
    "CatArrayBatchedCopy<int>": "kernel",
    "__amd_rocclr_copyBuffer": "memcpy",
    "Memcpy HtoD (Pinned -> Device)": "memcpy_htod",
    "Memcpy DtoH (Device -> Pinned)": "memcpy_dtoh",
    "CopyDeviceToDevice": "memcpy",  # roctracer
    "CopyHostToDevice": "memcpy_htod",
    "Memcpy PtoP": "memcpy_other",
}


def test_work_that_copies_is_told_apart(tmp_path):
    categories = ["kernel"] * 7 + ["gpu_memcpy"] * 5
    works = enumerate(zip(categories, KINDS))
    table = table_of(tmp_path, [device(category, name, 10 * i, 1, i + 1) for i, (category, name) in works])
    assert dict(zip(table["name"], table["kind"])) == KINDS
    assert table["bytes"].isna().all()  # what is not told is unknown, not 0


def test_several_gpus_and_processes(tmp_path):
    events = [call(i + 1, i // 2, pid=pid, tid=100) for i, pid in enumerate((10, 20, 10))]
    events.append(call(3, 1, pid=20, tid=100))
    table = table_of(tmp_path, events + [memcpy(i + 1, 5 + i, 1, gpu=gpu) for i, gpu in enumerate((0, 1, 1))])
    assert set(table["track"]) == {"host 100 of 10", "host 100 of 20", "gpu 0 stream 7", "gpu 1 stream 7"}
    assert "3 events not joined: several processes" in table.attrs["left_out"][0]
    joined = burst_copies(table, min_copies=1)
    assert joined["call"].fillna("").tolist() == ["cudaMemcpyAsync", "cudaMemcpyAsync", ""]


def test_rocm_warns_that_a_copy_may_come_from_the_host(tmp_path):
    hip = table_of(tmp_path, [call(1, 0, name="hipMemcpyAsync"), memcpy(1, 5)])
    assert hip.attrs["rocm"] is True and recorded("v100_ddp_training").attrs["rocm"] is False
    assert "DtoD copies, some of which may come from pinned host memory" in hip.attrs["left_out"][-1]


SHAPES = [
    ("aten::copy_", [[16, 2], [2], []], ["int", "long int", "Scalar"], "int <- long int", 128),
    ("aten::_foreach_copy_", [[[16], [4], [2]], [[16], [4], [2]]], ["TensorList"] * 2, "3 tensors", -1),
    ("aten::copy_", "odd", None, "", -1),
    ("aten::copy_", [["x"]], ["int"], "", -1),
    ("aten::add", [[16]], ["int"], "", -1),
]


def test_shapes_of_copying_operators(tmp_path):
    events = []
    for name, dims, types, *_ in SHAPES:
        events.append(span("cpu_op", name, 1, 1, **{"Input Dims": dims, "Input type": types}))
    table = table_of(tmp_path, events)
    assert [*zip(table["inputs"], table["bytes"].fillna(-1))] == [row[3:] for row in SHAPES]


def test_overlaps_and_impossible_durations_are_told(tmp_path):
    table = table_of(tmp_path, [memcpy(i + 1, ts, 10) for i, ts in enumerate([0, 3, 20, 25])])
    assert "2 device events overlap on their stream: launched ahead" in table.attrs["left_out"][0]
    (burst,) = find_copy_bursts(table).itertuples()
    assert (burst.span_us, burst.busy_us) == (35.0, 28.0)
    broken = table_of(tmp_path, [memcpy(1, 0, 3.4e6), memcpy(2, 500), memcpy(3, 600)])
    assert broken["dur_us"].tolist() == [500.0, 1.5, 1.5]
    assert "1 device events end 1 ms and more after the next" in broken.attrs["left_out"][0]


WORK = f"0 AS deviceId, 7 AS streamId, {77 << 24} AS globalPid"
EVERY_TABLE = f"""
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL AS SELECT 9000 AS start, 9500 AS end, 50 AS correlationId,
    3 AS shortName, 2 AS demangledName, {WORK};
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET AS SELECT 9600 AS start, 9700 AS end, 64 AS bytes, {WORK};
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE AS SELECT 10000 AS start, 12000 AS end, {WORK};
CREATE TABLE NVTX_EVENTS (start INT, end INT, category INT, text TEXT, textId INT, globalTid INT);
INSERT INTO NVTX_EVENTS VALUES (0, 4000, NULL, 'copy inputs', NULL, {77 << 24 | 5}),
    (0, 9, 3, NULL, 5, {77 << 24 | 5}), (1, NULL, NULL, 'a mark', NULL, {77 << 24 | 5}),
    (20, 900, NULL, 'aten::copy_, seq = 45395, op_id = 990883', NULL, {77 << 24 | 5}),
    (950, 999, NULL, 'aten::view, op_id = 7', NULL, {77 << 24 | 5});
CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT);
CREATE VIEW CUPTI_ACTIVITY_KIND_ENDLESS AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)
    SELECT x AS start FROM n;
"""


def test_nsys_with_every_table_and_two_processes(tmp_path):
    path = nsys(tmp_path / "r.sqlite", (77, 78), EVERY_TABLE)
    packed = tmp_path / "r.sqlite.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    table = load_trace(path)
    pd.testing.assert_frame_equal(load_trace(packed), table)
    assert table.attrs["device"] == "NVIDIA H200"
    assert set(table["track"]) >= {"host 5 of 77", "host 5 of 78", "stream 7 of 77", "stream 7 of 78"}
    (why,) = table.attrs["left_out"]
    assert why == "the file holds the recorder's environment, secrets included: mind who gets it"
    kinds = dict(zip(table["name"], table["kind"]))
    assert [kinds[name] for name in ("kernel<int>", "memset", "graph")] == ["kernel", "memset", "graph"]
    assert kinds["registered range"] == kinds["copy inputs"] == "annotation"
    assert kinds["aten::copy_"] == kinds["aten::view"] == "host_op"  # PyTorch's operators, by emit_nvtx
    bursts = find_copy_bursts(table).set_index("track")
    assert bursts.loc["stream 7 of 77", "op"] == "copy inputs"
    assert bursts["host_us"].tolist() == [2.0, 2.0]  # equal correlations of two processes stay apart


def test_nsys_of_2022_nests_calls_and_one_id_twice_doubles_nothing(tmp_path):
    script = f"""
    INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME SELECT start + 100, end - 100, globalTid, correlationId, 1
        FROM CUPTI_ACTIVITY_KIND_RUNTIME;
    ALTER TABLE StringIds RENAME TO Old;
    CREATE TABLE StringIds AS SELECT * FROM Old UNION ALL SELECT * FROM Old;
    UPDATE StringIds SET value = x'6162' WHERE id = 1;  -- bytes, where text is expected
    CREATE VIEW NVTX_EVENTS AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)
        SELECT x AS start, x + 1 AS end, 'x' AS text, {77 << 24 | 5} AS globalTid FROM n;
    """
    table = load_trace(nsys(tmp_path / "r.sqlite", (77,), script))
    assert set(table["name"][table["kind"] == "runtime"]) == {"ab"}
    assert len(table) == 12 and table.attrs["left_out"] == []
    assert burst_copies(table)["call_us"].tolist() == pytest.approx([0.5] * 4)  # the outer call's


def test_the_nsys_export_of_a_h100():
    table = recorded("nsys_h100_2gpu")
    ranges = table[table["kind"].isin(("host_op", "annotation"))]
    assert len(table) == 26_946 and len(ranges) == 16_782
    assert (ranges["name"] == "aten::copy_").sum() > 900 and not ranges["name"].str.contains("op_id").any()


def test_from_profiler_reads_a_run_of_this_machine():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        for _ in range(6):
            torch.zeros(8).copy_(torch.ones(8))
    table = from_profiler(prof)
    assert (table["name"] == "aten::copy_").sum() == 6 and table.attrs["evidence"] == "measured"
    assert "no GPU event in the file: only the host side can be shown" in table.attrs["left_out"]


@pytest.mark.parametrize("file", ["out.json", "out.json.gz"])
@pytest.mark.parametrize("name", ["nsys_h100_2gpu", "sglang_decode_b300_qwen3_30b"])
def test_chrome_trace_round_trip(tmp_path, name, file):
    table = recorded(name)
    to_chrome_trace(table, tmp_path / file)
    again = load_trace(tmp_path / file)
    pd.testing.assert_frame_equal(again, table, check_categorical=False)
    changed = dict.fromkeys(("source", "path"))
    assert again.attrs | changed == table.attrs | changed


def test_nothing_half_written(tmp_path):
    table = load_trace(write(tmp_path / "in.json", copies()))
    before = (tmp_path / "in.json").read_bytes()
    with pytest.raises(ValueError, match=r"in\.json: the table was read from this file"):
        to_chrome_trace(table, tmp_path / "in.json")
    table.attrs["path"] = None
    table.loc[3, "dur_us"] = np.nan
    with pytest.raises(ValueError):
        to_chrome_trace(table, tmp_path / "in.json")
    assert (tmp_path / "in.json").read_bytes() == before


LATE = json.dumps(copies()).replace("4458676456000.125", "1e999990")
BAD_FILES = {
    "empty": (lambda p: p.write_bytes(b""), "empty file"),
    "truncated gzip": (lambda p: p.write_bytes(gzip.compress(bytes(9999))[:-9]), "end-of-stream marker"),
    "damaged gzip": (lambda p: p.write_bytes(b"\x1f\x8b\x08\x00" + bytes(30)), "invalid stored block"),
    "not JSON at a place": (lambda p: p.write_text('{"traceEvents": [1, 2, }'), "byte 23"),
    "rocprofv3": (lambda p: p.write_text('{"rocprofiler-sdk-tool": []}'), "rocprofv3"),
    "no spans": (lambda p: p.write_text('[{"ph": "M", "name": "process_name"}]'), "no event that lasts"),
    "a folder": (lambda p: p.mkdir(), "is a folder: give a file"),
    "no readable event": (lambda p: p.write_text('[{"ph": "X", "cat": "cpu_op"}, 7]'), "could be read"),
    "a time without end": (lambda p: p.write_text(LATE), "cannot convert Infinity"),
    "a database": (lambda p: sqlite3.connect(p).execute("CREATE TABLE rocpd (b)").close(), "rocprofv3"),
    "a damaged database": (lambda p: p.write_bytes(b"SQLite format 3\0" + b"x" * 4096), "not a database"),
    "another schema": (lambda p: nsys(p, script="ALTER TABLE StringIds DROP COLUMN value"), "no such column"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_name_the_file_and_what_is_wrong(tmp_path, case):
    make, why = BAD_FILES[case]
    make(tmp_path / "bad.trace")
    with pytest.raises(ValueError) as caught:
        load_trace(tmp_path / "bad.trace")
    assert "bad.trace" in str(caught.value) and why in str(caught.value)


def test_what_cannot_be_placed_is_left_out_and_counted(tmp_path):
    good = copies()
    base = good[0]["ts"]
    bad = [
        {"ph": "X", "cat": "cpu_op", "name": "no dur", "ts": base, "pid": 1, "tid": 1},
        span("cpu_op", "weeks away", 5, 1),
        span("cpu_op", "negative", base, -3),
        {"ph": "X", "cat": "kernel", "name": "no args, no ids", "ts": base, "dur": 1},
        span("cpu_op", "thread by name", base, 1, tid="main"),
        span("python_function", "a frame", base, 1),
        memcpy("many", 5),
    ]
    table = table_of(tmp_path, bad + good + ["no event"])
    assert sorted(table.attrs["left_out"]) == [
        "1 events of category 'python_function' left out",
        "2 events of category 'of no readable type' left out",
        "5 events without a usable time, duration, thread or stream left out",
    ]
    pd.testing.assert_frame_equal(table, table_of(tmp_path, good), check_categorical=False)


JSON_VALUES = st.integers(0, 3) | st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
ARGS = ("device", "stream", "correlation", "bytes", "Input Dims", "Input type", "track")
FIELDS = {
    "ph": st.just("X"),
    "cat": st.sampled_from(["cpu_op", "kernel", "gpu_memcpy", "cuda_runtime", "Trace"]) | JSON_VALUES,
    "name": st.sampled_from(["Memcpy DtoD", "aten::copy_", "aten::_foreach_copy_"]) | JSON_VALUES,
    "ts": st.floats(0, 99) | JSON_VALUES,
    **dict.fromkeys(("dur", "pid", "tid"), st.integers(0, 9) | JSON_VALUES),
    "args": st.fixed_dictionaries({}, optional=dict.fromkeys(ARGS, JSON_VALUES)) | JSON_VALUES,
}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    events=st.lists(st.fixed_dictionaries({}, optional=FIELDS) | JSON_VALUES, max_size=12),
    about=st.fixed_dictionaries({}, optional=dict.fromkeys(("deviceProperties", "table"), JSON_VALUES)),
)
def test_any_json_gives_a_table_or_a_value_error(tmp_path_factory, events, about):
    try:
        table = table_of(tmp_path_factory.mktemp("fuzz"), events, **about)
    except ValueError as error:
        assert "t.json" in str(error)
        return
    assert len(table) and np.isfinite(table[["start_us", "dur_us"]]).all(axis=None)
    assert (table["dur_us"] >= 0).all() and not (table["bytes"] < 0).any()
    assert set(table["kind"]) <= {*DEVICE_KINDS, "host_op", "runtime", "annotation"}
    find_copy_bursts(table, min_copies=1)


COUNTS = {  # trace -> events, device-to-device memcpys, bursts of these, memcpys in them
    "v100_ddp_training": (45_420, 1600, 10, 1600),
    "a100_ddp_training": (26_933, 960, 6, 960),
    "a100_graph_launches": (67_217, 1280, 25, 320),
    "resnet_ddp_mi300x": (49_208, 550, 9, 550),
    "flux_foreach_slow_mi300x": (1_020, 7, 1, 7),
    "vllm_decode_mi300x": (1_539, 9, 1, 9),
}


@pytest.mark.parametrize("name", COUNTS)
def test_traces_hold_what_their_readme_says(name):
    table = recorded(name)
    left_out = sum(int(why.split()[0]) for why in table.attrs["left_out"] if why.endswith("left out"))
    bursts = find_copy_bursts(table, kinds=("memcpy",))
    n_dtod = (table["kind"] == "memcpy").sum()
    assert (len(table) + left_out, n_dtod, len(bursts), bursts["n_copies"].sum()) == COUNTS[name]
