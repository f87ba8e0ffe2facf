"""The trace reader and the burst finder: every format, bad input, and a plain slow reference."""

import gzip
import json
import math
import sqlite3
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import traces
from lib.traces import (
    COLUMNS,
    DEVICE_KINDS,
    KINDS,
    burst_copies,
    find_copy_bursts,
    from_profiler,
    load_trace,
    to_chrome_trace,
)

SHARED = Path(__file__).resolve().parents[2] / "shared" / "traces"
COPY_KERNEL = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::X&)>"
FOREACH_COPY = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<..., Copy<float, float>>"


def shared(name: str) -> Path:
    path = SHARED / f"{name}.pt.trace.json.gz"
    if not path.is_file():
        pytest.skip(f"{path.name} is not there: the shared traces lie outside the project")
    return path


@cache
def shared_table(name: str) -> pd.DataFrame:
    return load_trace(shared(name))


def span(cat, name, ts, dur, pid=1, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def device(cat, name, ts, dur, correlation, stream=7, gpu=0, **args):
    return span(cat, name, ts, dur, gpu, stream, device=gpu, stream=stream, correlation=correlation, **args)


def copies_of_one_stream(n=5, spelling=("cpu_op", "cuda_runtime", "gpu_memcpy"), whole=False):
    """n copies: aten::copy_ at 10 i, its call 1 later, its work 5 later."""
    op, runtime, memcpy = spelling
    shift = 0 if whole else 0.125
    events = []
    for i in range(n):
        t = 4_458_676_456_000 + 10 * i
        events += [
            span(op, "aten::copy_", t + shift, 4),
            span(runtime, "cudaMemcpyAsync", t + 1, 2, correlation=i + 1),
            device(memcpy, "Memcpy DtoD (Device -> Device)", t + 5 + shift, 2, i + 1, bytes=512),
        ]
    return events


def write(path: Path, document) -> Path:
    text = document if isinstance(document, str) else json.dumps(document)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


# ------------------------------------------------------------------ formats


@pytest.mark.parametrize("msgspec", [True, False], ids=["msgspec", "json"])
@pytest.mark.parametrize("bare", [False, True], ids=["object", "list"])
@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "renamed.bin"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    "spelling",
    [
        ("cpu_op", "cuda_runtime", "gpu_memcpy"),
        ("Operator", "Runtime", "Memcpy"),
        ("cpu_op", "cuda_driver", "memcpy"),
    ],
)
def test_every_spelling_of_kineto(tmp_path, monkeypatch, msgspec, bare, name, whole, spelling):
    if not msgspec:
        monkeypatch.setattr(traces, "msgspec", None)
    events = copies_of_one_stream(spelling=spelling, whole=whole)
    gpu = {"id": 0, "name": "Tesla V100-SXM2-32GB"}
    document = events if bare else {"deviceProperties": [gpu], "traceEvents": events, "displayTimeUnit": "ms"}
    table = load_trace(write(tmp_path / name, document))
    assert tuple(table.columns) == COLUMNS
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


@pytest.mark.parametrize("block", [64, 300, 4096])
def test_blocks_end_between_events(tmp_path, monkeypatch, block):
    events = copies_of_one_stream(40)
    events[3]["name"] = 'odd "},{" name \\'
    events[4]["args"]["stack"] = [{"a": 1}, {"b": [{}, {"c": "}, {"}]}]
    document = {
        "traceEvents": events,
        "deviceProperties": [{"id": 0, "name": "GPU"}],
        "tail": [{}, {"x": [{}, {}]}, *copies_of_one_stream(90)],
    }
    path = write(tmp_path / "t.json", document)
    expected = load_trace(path)
    monkeypatch.setattr(traces, "_BLOCK", block)
    pd.testing.assert_frame_equal(load_trace(path), expected)
    assert load_trace(path).attrs == expected.attrs


def test_a_byte_order_mark_and_a_gpu_without_a_name(tmp_path):
    document = {"deviceProperties": [{"id": 0, "name": None}], "traceEvents": copies_of_one_stream()}
    table = load_trace(write(tmp_path / "t.json", "\ufeff" + json.dumps(document)))
    assert len(table) == 15 and table.attrs["device"] == ""


@pytest.mark.parametrize("ts", [0, -3.5, 1e30, -1e300, "1e99999"])
@pytest.mark.parametrize("category", ["cpu_op", "foreign"])
def test_a_time_far_from_the_others_does_not_blur_them(tmp_path, ts, category):
    text = '{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":1712195495519689.%s,"dur":1}'
    events = [json.dumps(span(category, "far", ts, 1)), *(text % ns for ns in ("001", "126", "127"))]
    table = load_trace(write(tmp_path / "t.json", f"[{','.join(events)}]"))
    assert table["start_us"].tolist() == [0.0, 0.125, 0.126] and table.attrs["resolution_us"] == 0.001
    why = {"cpu_op": "with a time weeks away from the others", "foreign": "of category 'foreign'"}[category]
    assert table.attrs["left_out"][0] == f"1 events {why} left out"


def test_kernels_that_copy_are_told_apart(tmp_path):
    names = [
        COPY_KERNEL,
        FOREACH_COPY,
        "void multi_tensor_apply_kernel<AdamFunctor<float>>",
        "CatArrayBatchedCopy<int>",
    ]
    names += [
        "Memcpy HtoD (Pinned -> Device)",
        "Memcpy DtoH (Device -> Pinned)",
        "Memcpy PtoP",
        "Memset (Device)",
    ]
    cats = ["kernel"] * 4 + ["gpu_memcpy"] * 3 + ["gpu_memset"]
    events = [device(cat, name, 10 * i, 1, i) for i, (cat, name) in enumerate(zip(cats, names))]
    table = load_trace(write(tmp_path / "t.json", events))
    memory = ["memcpy_htod", "memcpy_dtoh", "memcpy_other", "memset"]
    assert table["kind"].tolist() == ["copy_kernel", "copy_kernel", "kernel", "kernel", *memory]


def test_several_gpus_and_processes(tmp_path):
    events = [
        span("cuda_runtime", "cudaMemcpyAsync", 0, 1, pid=10, tid=100, correlation=1),
        span("cuda_runtime", "cudaMemcpyAsync", 0, 1, pid=20, tid=100, correlation=2),
        span("cuda_runtime", "cudaMemcpyAsync", 1, 1, pid=10, tid=100, correlation=3),
        span("cuda_runtime", "cudaMemcpyAsync", 1, 1, pid=20, tid=100, correlation=3),
        device("gpu_memcpy", "Memcpy DtoD", 5, 1, 1, gpu=0, bytes=8),
        device("gpu_memcpy", "Memcpy DtoD", 5, 1, 2, gpu=1, bytes=8),
        device("gpu_memcpy", "Memcpy DtoD", 7, 1, 3, gpu=1, bytes=8),
    ]
    table = load_trace(write(tmp_path / "t.json", events))
    streams = {"gpu 0 stream 7 of 10", "gpu 1 stream 7 of 20"}
    assert set(table["track"]) == {"host 10:100", "host 20:100", *streams}
    assert "3 events not joined: several host calls have their correlation" in table.attrs["left_out"]
    copies = burst_copies(table, min_copies=1)
    assert copies["call"].fillna("").tolist() == ["cudaMemcpyAsync", "cudaMemcpyAsync", ""]


@pytest.mark.parametrize("owners", [(10,), (10, 20)])
def test_work_without_its_call_lies_where_all_other_work_of_its_stream_does(tmp_path, owners):
    events = [span("cpu_op", "another process", 0, 1, pid=30)]
    for i in range(6):
        pid = owners[i % len(owners)]
        events += [span("cuda_runtime", "cudaMemcpyAsync", 10 * i, 1, pid=pid, correlation=i + 1)]
        events += [device("gpu_memcpy", "Memcpy DtoD", 10 * i + 5, 1, i + 1, bytes=8)]
    events += [device("kernel", "k", 27, 1, 99)]
    table = load_trace(write(tmp_path / "t.json", events))
    unknown = "1 device events of which several processes may be the owner: on tracks of their own"
    assert table.attrs["left_out"] == ([unknown] if len(owners) > 1 else [])
    if len(owners) == 1:
        assert find_copy_bursts(table, min_copies=1)["n_copies"].tolist() == [3, 3]


@pytest.mark.parametrize("lost", ["DELETE FROM", "DROP TABLE"])
def test_nsys_tells_the_process_of_work_without_a_call(tmp_path, lost):
    table = load_trace(nsys(tmp_path / "r.sqlite", (77, 78), f"{lost} CUPTI_ACTIVITY_KIND_RUNTIME;"))
    assert set(table["track"]) == {"stream 7 of 77", "stream 7 of 78"}
    assert find_copy_bursts(table)["n_copies"].tolist() == [4, 4] and table.attrs["left_out"] == []


def test_overlaps_on_a_stream_count_once_and_are_told(tmp_path):
    events = [device("gpu_memcpy", "Memcpy DtoD", ts, 10, i) for i, ts in enumerate([0, 3, 20, 25])]
    table = load_trace(write(tmp_path / "t.json", events))
    assert any("2 device events overlap" in why for why in table.attrs["left_out"])
    (burst,) = find_copy_bursts(table).itertuples()
    assert (burst.span_us, burst.busy_us) == (35.0, 28.0)


NSYS = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
INSERT INTO StringIds VALUES (1, 'cudaMemcpyAsync'), (2, 'kernel<int>'), (3, 'short'), (4, 'cudaGraphLaunch'),
    (5, 'registered range');
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT, correlationId INT, nameId INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, end INT, deviceId INT, streamId INT, correlationId INT,
    globalPid INT, bytes INT, copyKind INT);
CREATE TABLE TARGET_INFO_GPU (id INT, name TEXT);
INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H200');
"""


def nsys(path: Path, processes=(77,), script: str = "") -> Path:
    with sqlite3.connect(path) as db:
        db.executescript(NSYS)
        for pid in processes:
            task = pid << 24
            for i in range(4):
                call = (1000 * i, 1000 * i + 500, task | 5, i + 1, 1)
                db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?)", call)
                work = (1000 * i + 700, 1000 * i + 900, 0, 7, i + 1, task, 256, 8)
                db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,?,?,?,?,?,?)", work)
        db.executescript(script)
    db.close()
    return path


def test_nsys_with_the_least_tables(tmp_path):
    table = load_trace(nsys(tmp_path / "r.sqlite"))
    assert table["kind"].value_counts()[["runtime", "memcpy"]].tolist() == [4, 4]
    assert set(table["track"]) == {"host 5", "stream 7"} and table.attrs["device"] == "NVIDIA H200"
    (burst,) = find_copy_bursts(table).itertuples()
    assert (burst.n_copies, burst.bytes, burst.call) == (4, 1024, "cudaMemcpyAsync")
    assert burst.span_us == pytest.approx(3.2) and burst.busy_us == pytest.approx(0.8)


def test_nsys_with_every_table_and_two_processes(tmp_path):
    script = f"""
    CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, streamId INT,
        correlationId INT, globalPid INT, shortName INT, demangledName INT);
    INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (9000, 9500, 0, 7, 50, {77 << 24}, 3, 2);
    CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INT, end INT, deviceId INT, streamId INT,
        correlationId INT, globalPid INT, bytes INT);
    INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (9600, 9700, 0, 7, 51, {77 << 24}, 64);
    CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INT, end INT, deviceId INT, streamId INT,
        correlationId INT, globalPid INT);
    INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (10000, 12000, 0, 7, 52, {77 << 24});
    CREATE TABLE NVTX_EVENTS (start INT, end INT, text TEXT, textId INT, globalTid INT);
    INSERT INTO NVTX_EVENTS VALUES (0, 4000, 'copy inputs', NULL, {77 << 24 | 5}),
        (0, 9, NULL, 5, {77 << 24 | 5}), (1, NULL, 'a mark', NULL, {77 << 24 | 5});
    """
    table = load_trace(nsys(tmp_path / "r.sqlite", (77, 78), script))
    assert set(table["track"]) >= {"host 77:5", "host 78:5", "stream 7 of 77", "stream 7 of 78"}
    assert table.attrs["left_out"][0] == "1 events with no finite ts and dur left out"
    assert {"kernel<int>", "registered range", "copy inputs"} <= set(table["name"])
    assert (table["kind"] == "graph").sum() == (table["kind"] == "memset").sum() == 1
    bursts = find_copy_bursts(table).set_index("track")
    assert bursts.loc["stream 7 of 77", "op"] == "copy inputs" and bursts.loc["stream 7 of 77", "op_us"] == 0
    assert bursts["host_us"].tolist() == [2.0, 2.0]  # equal correlations of two processes stay apart


def test_from_profiler_reads_a_run_of_this_machine():
    destinations, source = [torch.zeros(8) for _ in range(6)], torch.ones(8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        for destination in destinations:
            destination.copy_(source)
    table = from_profiler(prof)
    assert (table["name"] == "aten::copy_").sum() == 6 and table.attrs["evidence"] == "measured"
    assert any("no GPU event" in why for why in table.attrs["left_out"])
    assert find_copy_bursts(table).empty
    with pytest.raises(ValueError, match="exported before"):
        from_profiler(prof)
    with pytest.raises(ValueError, match="unfinished"):
        from_profiler(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]))


# ------------------------------------------------------------------ writing


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_chrome_trace_round_trip(tmp_path, name):
    t = 4_458_676_456_000
    events = [
        *copies_of_one_stream(4),
        span("user_annotation", "a range", t, 30),
        device("kernel", COPY_KERNEL, t + 50, 1, 50, stream=8),
        device("gpu_memcpy", "Memcpy HtoD", t + 60, 1, 51, gpu=1, bytes=4),
        span("cuda_runtime", "cudaMemcpyAsync", t + 1, 1, pid=2, correlation=51),
        device("gpu_memset", "Memset", t + 61, 1, 52, gpu=1),
    ]
    gpus = [{"id": 0, "name": "A"}, {"id": 1, "name": "B"}]
    table = load_trace(write(tmp_path / "in.json", {"deviceProperties": gpus, "traceEvents": events}))
    to_chrome_trace(table, tmp_path / name)
    again = load_trace(tmp_path / name)
    for column in ("name", "kind", "stream", "thread", "start_us", "dur_us", "bytes", "correlation"):
        a, b = (np.asarray(t[column].astype(object)) for t in (table, again))
        assert pd.Series(a).equals(pd.Series(b)), column
    assert len(set(again["track"])) == len(set(table["track"]))
    assert again.attrs["device"] == "A, B"


def test_nothing_half_written(tmp_path):
    table = load_trace(write(tmp_path / "in.json", copies_of_one_stream()))
    (tmp_path / "out.json").write_text("before")
    table.loc[3, "dur_us"] = np.nan
    with pytest.raises(ValueError):
        to_chrome_trace(table, tmp_path / "out.json")
    assert (tmp_path / "out.json").read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"in.json", "out.json"}


# ------------------------------------------------------------------ bad input


def truncated_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(json.dumps(copies_of_one_stream(50)).encode())[:-200])


BAD_FILES = {
    "empty": (lambda p: p.write_bytes(b""), "the file is empty"),
    "truncated gzip": (truncated_gzip, "gzip is truncated or damaged"),
    "damaged gzip": (lambda p: p.write_bytes(b"\x1f\x8b\x08\x00" + bytes(30)), "truncated or damaged"),
    "gzip of nothing": (lambda p: p.write_bytes(gzip.compress(b"")), "expected a JSON list"),
    "no JSON": (lambda p: p.write_text("hello"), "expected a JSON list"),
    "bytes": (lambda p: p.write_bytes(bytes(range(128, 256)) * 9), "expected a JSON list"),
    "cut short": (lambda p: p.write_text(json.dumps(copies_of_one_stream())[:-30]), "cut short"),
    "cut in an object": (lambda p: p.write_text('{"traceEvents": [{"ph": "X"'), "invalid JSON, or cut short"),
    "nested deep": (lambda p: p.write_text('{"traceEvents": ' + "[" * 100_000), "invalid JSON, or cut short"),
    "no list": (lambda p: p.write_text('{"traceEvents": 3}'), "expected a JSON list"),
    "not the trace's list": (lambda p: p.write_text('{"a": {"traceEvents": []}}'), "invalid JSON"),
    "no events": (lambda p: p.write_text('{"traceEvents": []}'), "no complete event"),
    "no spans": (lambda p: p.write_text('[{"ph": "M", "name": "process_name"}]'), "no complete event"),
    "no readable event": (lambda p: p.write_text('[{"ph": "X", "cat": "cpu_op"}, 7]'), "no event could"),
    "a database": (lambda p: sqlite3.connect(p).execute("CREATE TABLE a (b)").connection.close(), "no Ns"),
    "a damaged database": (lambda p: p.write_bytes(b"SQLite format 3\0" + b"x" * 4096), "Nsight Systems"),
    "an nsys file of another schema": (
        lambda p: nsys(p, script="DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME;"
                       "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (a)"), "no such column"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
@pytest.mark.parametrize("msgspec", [True, False], ids=["msgspec", "json"])
def test_bad_files_name_the_file_and_what_is_wrong(tmp_path, monkeypatch, case, msgspec):
    if not msgspec:
        monkeypatch.setattr(traces, "msgspec", None)
    make, why = BAD_FILES[case]
    make(tmp_path / "bad.trace")
    with pytest.raises(ValueError) as caught:
        load_trace(tmp_path / "bad.trace")
    assert "bad.trace" in str(caught.value) and why in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_trace(tmp_path / "nowhere.json")


@pytest.mark.parametrize("msgspec", [True, False], ids=["msgspec", "json"])
def test_what_cannot_be_placed_is_left_out_and_counted(tmp_path, monkeypatch, msgspec):
    if not msgspec:
        monkeypatch.setattr(traces, "msgspec", None)
    good = copies_of_one_stream()
    base = good[0]["ts"]
    bad = [
        {"ph": "X", "cat": "cpu_op", "name": "no dur", "ts": base, "pid": 1, "tid": 1},
        span("cpu_op", "NaN", base, math.nan),
        span("cpu_op", "infinite", math.inf, 1),
        span("cpu_op", "text", "soon", 1),
        span("cpu_op", "negative", base, -3),
        span("cpu_op", "signalling", base, "sNaN"),
        span("cpu_op", "signalling", "sNaN", 1),
        {"ph": "X", "cat": "kernel", "name": "no args, no ids", "ts": base, "dur": 1},
        span("cpu_op", "thread by name", base, 1, tid="main"),
        span("python_function", "a frame", base, 1),
        span("python_function", "a frame", base, 1),
        "no event",
    ]
    table = load_trace(write(tmp_path / "t.json", {"traceEvents": bad[:7] + good + bad[7:]}))
    assert table.attrs["left_out"] == [
        "2 events of category 'python_function' left out",
        "1 events of category '' left out",
        "6 events with no finite ts and dur left out",
        "1 events with a negative duration left out",
        "1 events with no stream left out",
        "1 events with no thread left out",
    ]
    expected = load_trace(write(tmp_path / "good.json", good))
    assert len(table) == len(expected) == 15
    assert (
        find_copy_bursts(table).drop(columns="sizes").equals(find_copy_bursts(expected).drop(columns="sizes"))
    )


@pytest.mark.parametrize(
    "spelling", [float, str, lambda number: float(number) if number % 2 else str(number)]
)
def test_integers_in_another_spelling_keep_their_value(tmp_path, spelling):
    events = copies_of_one_stream()
    expected = load_trace(write(tmp_path / "t.json", events))
    for event in events:
        event["args"] = {key: spelling(value) for key, value in event["args"].items()}
    # a null anywhere: then json reads the file in the place of msgspec
    for more in ([], [{"ph": "M", "name": None}]):
        table = load_trace(write(tmp_path / "t.json", events + more))
        pd.testing.assert_frame_equal(table, expected)
        assert table.attrs["left_out"] == []


def test_what_is_no_integer_is_absent_and_counted(tmp_path):
    odd = [512.9, True, "many", 2**70, math.nan, [512], -(2**63), None, 512]
    events = [device("gpu_memcpy", "Memcpy DtoD", i, 1, bytes, bytes=bytes) for i, bytes in enumerate(odd)]
    table = load_trace(write(tmp_path / "t.json", events))
    assert table["bytes"].tolist()[-1] == 512 and table["bytes"].isna().tolist() == [True] * 8 + [False]
    assert table["correlation"].tolist() == [-1] * 8 + [512]
    assert table.attrs["left_out"] == [
        "7 events of which correlation is no integer: read as absent",
        "7 events of which bytes is no integer: read as absent",
    ]


def test_lone_surrogates_are_replaced(tmp_path):
    events = [{**event, "pid": "\udc01", "name": "\ud800 x"} for event in copies_of_one_stream()]
    gpus = [{"id": 0, "name": "\ud800 GPU"}]
    table = load_trace(write(tmp_path / "t.json", {"deviceProperties": gpus, "traceEvents": events}))
    assert set(table["name"]) == {"? x"} and table.attrs["device"] == "? GPU"
    to_chrome_trace(table, tmp_path / "again.json")
    assert len(load_trace(tmp_path / "again.json")) == 15


def test_copies_of_no_length_are_not_idle(tmp_path):
    events = [device("gpu_memcpy", "Memcpy DtoD", 5, 0, i) for i in range(4)]
    (burst,) = find_copy_bursts(load_trace(write(tmp_path / "t.json", events))).itertuples()
    assert (burst.n_copies, burst.span_us, burst.idle_share) == (4, 0.0, 0.0)


def test_tables_put_together(tmp_path):
    table = load_trace(write(tmp_path / "t.json", copies_of_one_stream()))
    other = table.assign(track=table["track"].cat.rename_categories(str.upper), correlation=-1)
    with pytest.raises(ValueError, match="trace: expected an index without duplicates"):
        find_copy_bursts(pd.concat([table, other]))
    bursts = find_copy_bursts(pd.concat([table, other], ignore_index=True))
    assert bursts["track"].tolist() == ["STREAM 7", "stream 7"] and bursts["n_copies"].tolist() == [5, 5]


def test_arguments_are_checked(tmp_path):
    table = load_trace(write(tmp_path / "t.json", copies_of_one_stream()))
    with pytest.raises(ValueError, match="min_copies: expected at least 1, got 0"):
        find_copy_bursts(table, min_copies=0)
    with pytest.raises(ValueError, match=r"kinds: expected some of .* got \['aten'\]"):
        find_copy_bursts(table, kinds=("aten",))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
FIELDS = {
    "ph": st.just("X"),
    "cat": st.sampled_from(["cpu_op", "kernel", "gpu_memcpy", "cuda_runtime", "Trace"]) | JSON_VALUES,
    "name": st.sampled_from(["Memcpy DtoD", "aten::copy_"]) | JSON_VALUES,
    "ts": st.integers(0, 99) | st.floats(0, 99) | JSON_VALUES,
    "dur": st.integers(0, 9) | JSON_VALUES,
    "pid": st.integers(0, 2) | JSON_VALUES,
    "tid": st.integers(0, 2) | JSON_VALUES,
    "args": st.fixed_dictionaries(
        {},
        optional={f: st.integers(0, 3) | JSON_VALUES for f in ("device", "stream", "correlation", "bytes")},
    )
    | JSON_VALUES,
}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    events=st.lists(st.fixed_dictionaries({}, optional=FIELDS) | JSON_VALUES, max_size=12),
    properties=st.none() | st.lists(JSON_VALUES, max_size=2) | JSON_VALUES,
)
def test_any_json_gives_a_table_or_a_value_error(tmp_path_factory, events, properties):
    path = tmp_path_factory.mktemp("fuzz") / "t.json"
    write(path, {"deviceProperties": properties, "traceEvents": events})
    try:
        table = load_trace(path)
    except ValueError as error:
        assert "t.json" in str(error)
        return
    assert len(table) and np.isfinite(table[["start_us", "dur_us"]]).all(axis=None)
    assert (table["dur_us"] >= 0).all() and not (table["bytes"] < 0).any()
    find_copy_bursts(table, min_copies=1)


# ------------------------------------------------------------------ bursts against a plain reference


def reference_bursts(table: pd.DataFrame, min_copies: int, kinds) -> list[dict]:
    found, events = [], list(table.itertuples())
    for track in table["track"].unique():
        run, ready, waiting = [], None, []
        rows = [r for r in events if r.track == track and r.kind in DEVICE_KINDS]
        for row in [*rows, None]:
            if row is not None and row.kind in kinds:
                run.append(row)
                waiting.append(ready)
            else:
                if len(run) >= min_copies:
                    found.append(reference_burst(events, run, waiting))
                run, waiting = [], []
            if row is not None:
                end = row.start_us + row.dur_us
                ready = end if ready is None else max(ready, end)
    return sorted(found, key=lambda b: (b["start_us"], b["track"]))


def reference_burst(events: list, run: list, ready: list) -> dict:
    covered, reached, idle, waited, calls = 0.0, -math.inf, 0.0, 0.0, []
    for row, free in zip(run, ready):
        end = row.start_us + row.dur_us
        call = [
            c for c in events
            if c.kind == "runtime" and c.correlation == row.correlation and c.correlation >= 0
        ]  # fmt: skip
        calls += call
        gap = max(row.start_us - reached, 0) if reached > -math.inf else 0
        idle += gap
        if call and free is not None and call[0].start_us + call[0].dur_us > free:
            waited += gap
        covered += max(end - max(row.start_us, reached), 0)
        reached = max(reached, end)
    regime = "host-bound" if waited > idle / 2 else "queued"
    return {
        "track": run[0].track, "n_copies": len(run), "start_us": run[0].start_us,
        "span_us": reached - run[0].start_us, "busy_us": covered,
        "bytes": sum(r.bytes for r in run if r.bytes == r.bytes),
        "host_us": sum(c.dur_us for c in {c.Index: c for c in calls}.values()),
        "regime": regime if 2 * len(calls) > len(run) else "unknown",
    }  # fmt: skip


@st.composite
def generated_events(draw):
    events = []
    for correlation in range(1, draw(st.integers(2, 40))):
        kind = draw(
            st.sampled_from(["memcpy", "memcpy", "memcpy", "copy", "fused", "kernel", "memset", "htod"])
        )
        cat, name = {
            "memcpy": ("gpu_memcpy", "Memcpy DtoD (Device -> Device)"), "copy": ("kernel", COPY_KERNEL),
            "fused": ("kernel", FOREACH_COPY), "kernel": ("kernel", "gemm"),
            "memset": ("gpu_memset", "Memset"), "htod": ("gpu_memcpy", "Memcpy HtoD"),
        }[kind]  # fmt: skip
        start = draw(st.integers(0, 400)) / 4
        args = {"bytes": draw(st.integers(0, 5000))} if "Mem" in name else {}
        stream, gpu = draw(st.integers(7, 8)), draw(st.integers(0, 1))
        events.append(
            device(cat, name, start, draw(st.integers(0, 20)) / 4, correlation, stream, gpu, **args)
        )
        if draw(st.integers(0, 3)):
            call = max(start - draw(st.integers(0, 40)) / 4, 0)
            events.append(
                span("cuda_runtime", "call", call, draw(st.integers(0, 12)) / 4, correlation=correlation)
            )
    return events


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    events=generated_events(),
    min_copies=st.integers(1, 5),
    kinds=st.sampled_from([("memcpy",), ("memcpy", "copy_kernel"), ("copy_kernel",)]),
)
def test_bursts_agree_with_a_plain_reference(tmp_path_factory, events, min_copies, kinds):
    table = load_trace(write(tmp_path_factory.mktemp("bursts") / "t.json", events))
    bursts = find_copy_bursts(table, min_copies, kinds)
    expected = reference_bursts(table, min_copies, kinds)
    found = sorted(bursts.to_dict("records"), key=lambda b: (b["start_us"], b["track"]))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        assert {key: ours[key] for key in theirs} == theirs
        assert len(ours["sizes"]) == ours["n_copies"] - ours["n_fused"]
    assert bursts["start_us"].is_monotonic_increasing


def test_one_call_behind_several_kernels_counts_once(tmp_path):
    events = [span("cpu_op", "aten::_foreach_copy_", 0, 30), span("cpu_op", "aten::copy_", 50, 1)]
    events += [span("cuda_runtime", "cudaGraphLaunch", 5, 10, correlation=9)]
    events += [device("kernel", FOREACH_COPY, 20 + 5 * i, 4, 9) for i in range(4)]
    (burst,) = find_copy_bursts(load_trace(write(tmp_path / "t.json", events))).itertuples()
    assert (burst.host_us, burst.op_us, burst.n_fused, burst.fused_us) == (10.0, 30.0, 4, 16.0)
    assert burst.op == "aten::_foreach_copy_" and len(burst.sizes) == 0


# ------------------------------------------------------------------ the real traces


@pytest.mark.parametrize(
    ("name", "events", "dtod", "bursts", "copies"),
    [
        ("v100_ddp_training", 45_420, 1600, 10, 1600),
        ("a100_ddp_training", 26_933, 960, 6, 960),
        ("a100_graph_launches", 67_217, 1280, 25, 320),
    ],
)
def test_shared_traces_hold_what_their_readme_says(name, events, dtod, bursts, copies):
    table = shared_table(name)
    left_out = sum(int(why.split()[0]) for why in table.attrs["left_out"] if why.endswith("left out"))
    assert len(table) + left_out == events
    assert (table["kind"] == "memcpy").sum() == dtod
    found = find_copy_bursts(table, kinds=("memcpy",))
    assert (len(found), found["n_copies"].sum()) == (bursts, copies)
    assert table.attrs["resolution_us"] == (1.0 if name == "a100_graph_launches" else 0.001)
    assert set(found["op"]) == {"aten::copy_"} and set(found["call"]) == {"cudaMemcpyAsync"}


def test_v100_figures():
    table = shared_table("v100_ddp_training")
    host = table.groupby("name", observed=True)["dur_us"].median()
    assert host["cudaMemcpyAsync"] == pytest.approx(4.6, abs=0.05)
    assert host["aten::copy_"] == pytest.approx(7.3, abs=0.05)
    bursts = find_copy_bursts(table)
    assert bursts["regime"].tolist() == ["host-bound"] + ["queued"] * 9
    assert bursts["span_us"][0] == pytest.approx(1473, abs=0.5) and bursts["busy_us"][0] == pytest.approx(
        222, abs=0.5
    )
    assert bursts["span_us"][2] == pytest.approx(316, abs=0.5) and bursts["busy_us"][2] == pytest.approx(
        205, abs=0.5
    )
    assert table.attrs["device"] == "Tesla V100-SXM2-32GB"


def test_a100_training_copies_for_1_6_to_3_1_percent_of_its_bursts():
    bursts = find_copy_bursts(shared_table("a100_ddp_training"))
    assert len(bursts) == 6 and bursts["n_copies"].between(159, 161).all()
    busy = (1 - bursts["idle_share"]).round(3)
    assert (busy.min(), busy.max()) == (0.016, 0.031)
    assert set(bursts["regime"]) == {"host-bound"}


def test_graph_trace_joins_all_but_140_copies():
    copies = shared_table("a100_graph_launches")
    copies = burst_copies(copies, min_copies=1, kinds=("memcpy",))
    assert copies["call_us"].isna().sum() == 140


def test_kinds_are_documented_once():
    assert set(DEVICE_KINDS) < set(KINDS)
    assert set(traces.CATEGORIES.values()) <= set(KINDS)


@pytest.mark.notebook
def test_notebook_07_finds_the_bursts_of_the_a100_training(tmp_path, monkeypatch):
    path = shared("a100_ddp_training")
    root = Path(__file__).resolve().parents[1]
    monkeypatch.syspath_prepend(root / "scripts")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    import execute_notebook

    notebook = root / "notebooks" / "07_your_trace.ipynb"
    parameters = {"trace_path": str(path), "perfetto_path": str(tmp_path / "again.json.gz"), "device": "cpu"}
    record = execute_notebook.execute(notebook, tmp_path / notebook.name, parameters, False)
    assert record["status"] == "ok", record["error"]
    assert "six bursts of about 160 copies" in record["claims"]
    assert len(record["figures"]) == 3
    assert len(find_copy_bursts(load_trace(tmp_path / "again.json.gz"))) == 6
