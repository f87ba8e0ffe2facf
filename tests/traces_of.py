"""Events as profilers write them, made by hand, and the traces of data/traces."""

import gzip
import json
import sqlite3
from functools import cache
from pathlib import Path

import pandas as pd

from lib.profiles import load_trace

TRACES = Path(__file__).resolve().parents[1] / "data" / "traces"
DIRECT = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::X&)>"
FUSED = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<..., Copy<float, float>>"
DTOD = "Memcpy DtoD (Device -> Device)"


@cache
def recorded(name: str, python: bool = False) -> pd.DataFrame:
    (path,) = TRACES.glob(f"{name}.*")
    return load_trace(path, python)


def span(cat, name, ts, dur, pid=1, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def device(cat, name, ts, dur, correlation, stream=7, gpu=0, **args):
    return span(cat, name, ts, dur, gpu, stream, device=gpu, stream=stream, correlation=correlation, **args)


def call(correlation, ts, dur=3, pid=1, tid=1, name="cudaMemcpyAsync"):
    return span("cuda_runtime", name, ts, dur, pid, tid, correlation=correlation)


def memcpy(correlation, ts, dur=1.5, size=256, **args):
    return device("gpu_memcpy", DTOD, ts, dur, correlation, bytes=size, **args)


def copies(n=5, spelling=("cpu_op", "cuda_runtime", "gpu_memcpy"), shift=0.125):
    """n copies: aten::copy_ at 10 i + shift, its call 1 later, its work 5 later."""
    op, runtime, work = spelling
    events = []
    for i in range(n):
        t = 4_458_676_456_000 + 10 * i
        events.append(span(op, "aten::copy_", t + shift, 4))
        events.append(span(runtime, "cudaMemcpyAsync", t + 1, 2, correlation=i + 1))
        events.append(device(work, DTOD, t + 5 + shift, 2, i + 1, bytes=512))
    return events


def write(path: Path, document) -> Path:
    data = json.dumps(document).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def table_of(folder: Path, events: list, **about) -> pd.DataFrame:
    return load_trace(write(folder / "t.json", about | {"traceEvents": events}))


NSYS = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
INSERT INTO StringIds VALUES (1, 'cudaMemcpyAsync'), (2, 'kernel<int>'), (3, 's'), (5, 'registered range');
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT, correlationId INT, nameId INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, end INT, deviceId INT, streamId INT, correlationId INT,
    globalPid INT, bytes INT, copyKind INT);
CREATE TABLE TARGET_INFO_GPU (id INT, name TEXT);
INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H200');
"""


def nsys(path: Path, processes=(77,), script: str = "") -> Path:
    """Four memcpys for each process, 1 us apart, and what `script` adds."""
    with sqlite3.connect(path) as db:
        db.executescript(NSYS)
        for task in (pid << 24 for pid in processes):
            for t in range(0, 4000, 1000):
                runtime = (t, t + 500, task | 5, t // 1000 + 1, 1)
                db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?)", runtime)
                work = (t + 700, t + 900, 0, 7, t // 1000 + 1, task, 256, 8)
                db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,?,?,?,?,?,?)", work)
        db.executescript(script)
    db.close()
    return path
