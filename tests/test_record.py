"""The recorder end to end with a stand-in for the GPU, cut short and failing; and what reads recordings."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from lib.launches import KINDS
from lib.profiles import DeviceProfile, load_trace
from lib.strategies import STRATEGIES
from lib.workbench import recordings
from lib.workbench.step import OPTIONS
from tests.stand_in import ROOT, V100, StandIn, record

BYTES = (256, 2**16, 2**22)
WAYS = ("per_copy", "grouped_foreach")


@pytest.fixture(autouse=True, scope="module")
def short(one_thread):
    """Few runs of the smallest model, so that the tests record a whole recording in seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "REPLAYS", (("tiny", "2026-06", (3,)),))
        patch.setattr(record, "STEPS", (("tiny", "2026-06", (5,)), ("tiny", "int32_seq_lens", (8,))))
        patch.setattr(record, "TRACED", "tiny")
        patch.setattr(record, "TENSORS", (1, 9))
        patch.setattr(record, "BYTES", [size for size in BYTES for _ in range(6)])  # a sixth in a quick run
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A whole short run on a modelled V100."""
    path, status = record.record(StandIn(), tmp_path_factory.mktemp("whole"), quick=True)
    recording = recordings.load(path)
    assert status == 0, recording.meta["problems"]
    return recording


def test_a_full_run_has_every_way_and_says_what_cannot_be_done(whole):
    skipped = whole.meta["skipped"]
    cannot = {text.split(",")[0] for text in skipped}
    assert all("convert" in text for text in skipped if "riton" not in text), skipped
    assert "uint8_view" in cannot and "per_copy" not in cannot
    steps, replays = whole.tables["steps"], whole.tables["replays"]
    for rows in (steps[steps.layout == "2026-06"], replays):
        assert {*STRATEGIES, *OPTIONS} - cannot <= set(rows.way)
        assert (rows.predicted == rows.counted).all()
    assert replays.equal.all()
    assert replays[replays.way == "grouped_foreach"].counted.iloc[0]["graph"] == 2
    per_copy = steps[steps.way == "per_copy"].counted
    assert [*per_copy] == [{"memcpy": 16, "fill": 14}, {"memcpy": 14, "elementwise": 2}]
    predicted = whole.tables["crossover"].drop_duplicates("way").set_index("way").predicted
    assert all(predicted[kind] == {kind: 1} for kind in ("memcpy", "foreach", "elementwise"))
    assert whole.dma_bytes() in BYTES


def test_the_fitted_profile_is_that_of_the_device_and_modelled_is_said_everywhere(whole):
    fitted = DeviceProfile.load(whole.path / "profile.json")
    for figure in ("memcpy_floor_us", "memcpy_gb_per_s", "host_copy_us", "host_memcpy_us"):
        assert figure not in fitted.unknown
        assert fitted[figure] == pytest.approx(V100[figure], rel=0.03, abs=0.02), figure
    assert whole.path.name.startswith("modelled-")
    assert record.summary(whole.path).startswith("modelled · modelled Tesla V100")
    assert all({*rows.evidence} == {"modelled"} for rows in whole.tables.values())
    assert load_trace(whole.path / "traces" / "per_copy.json.gz").attrs["evidence"] == "modelled"


def test_notebooks_find_the_newest_recording_that_is_not_modelled(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(recordings, "RECORDINGS", tmp_path)
    shutil.copytree(whole.path, tmp_path / "modelled")
    assert recordings.choose("auto") is recordings.choose("none") is None
    assert recordings.choose("modelled").path == tmp_path / "modelled"  # asked for by name
    for date in ("2026-01-01", "2026-03-01", "2026-02-01"):
        (tmp_path / date).mkdir()
        meta = whole.meta | {"evidence": "recorded", "device": "a", "date": date}
        (tmp_path / date / "meta.json").write_text(json.dumps(meta))
    found = recordings.choose("auto")
    assert found.path.name == "2026-03-01" and found.label().startswith("recorded · a · ")


@pytest.mark.parametrize("text", ["", "[", '{"format": 1}', '{"format": 2, "evidence": "recorded"}'])
def test_what_is_no_recording_is_refused_and_named(tmp_path, text):
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path}: not a recording of format 2"):
        recordings.load(tmp_path)


def test_a_line_cut_short_is_left_out_and_the_rest_stays(whole, tmp_path):
    copy = Path(shutil.copytree(whole.path, tmp_path / "copy"))
    text = (copy / "crossover.jsonl").read_bytes()
    for end in (0, len(text) // 3, len(text) - 1):
        (copy / "crossover.jsonl").write_bytes(text[:end])
        recording = recordings.load(copy)
        assert len(recording.tables["crossover"]) == text[:end].count(b"\n")
        assert recording.dma_bytes() in (None, *BYTES) and len(recording.tables["steps"])


def test_whatever_fails_or_ends_a_run_what_was_measured_stays(tmp_path, capsys, monkeypatch):
    """The first traces fail, then the profiler at the first steps; Ctrl-C in the crossover; out of time."""
    monkeypatch.setattr(record, "WAYS", WAYS)
    fails = {1: OSError("disk"), 2: RuntimeError("CUPTI is taken"), 6: KeyboardInterrupt()}
    first, status = record.record(StandIn(fails=fails), tmp_path, quick=True)
    assert status == 130 and "CUPTI is taken" in capsys.readouterr().err
    recording = recordings.load(first)
    assert "OSError: disk" in recording.meta["problems"][0]
    assert "stopped by Ctrl-C" in recording.meta["skipped"][-1]
    steps = recording.tables["steps"]
    assert [*steps.counted.isna()] == [True, True, False, False] and {*map(len, steps.host_us)} == {5}
    assert [len(recording.tables[name]) for name in ("replays", "crossover")] == [2, 5]
    assert "CUPTI" in record.summary(first)
    second, _ = record.record(StandIn(), tmp_path, minutes=0)
    assert second.name == f"{first.name}-2"
    assert all("time was up" in text for text in recordings.load(second).meta["skipped"])


def test_a_count_or_an_output_that_differs_is_a_problem_and_printed(tmp_path, capsys, monkeypatch):
    """A device that copies anything from 64 KiB on with a kernel, and a strategy that forgets a field."""

    def quirk(launch):
        large = launch.kind == "memcpy" and launch.bytes >= 2**16
        return replace(launch, kind="elementwise") if large else launch

    def forgets(step):
        step.small.pop("topk_index", None)
        return STRATEGIES["per_copy"](step)

    monkeypatch.setattr(record, "WAYS", WAYS)
    monkeypatch.setitem(STRATEGIES, "grouped_foreach", forgets)
    _, status = record.record(StandIn(quirk), tmp_path, quick=True)
    said = capsys.readouterr().err
    assert status == 1 and "problems: replays tiny 3: other outputs than per_copy by grouped_foreach" in said
    counted = "predicted {'memcpy': 1}, counted {'elementwise': 1}"
    assert f"problems: crossover int16 1 65536 memcpy: {counted}" in said


def test_launches_are_counted_by_the_kernel_names_of_real_devices():
    """Names as Kineto writes them; work that runs after its annotation is found by its correlation."""
    foreach = "void multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<long, long, 2, 1, 1>>"
    work = [  # name, kind, call, launch
        (foreach, "copy_kernel", "cudaLaunchKernel", "foreach"),
        ("void vectorized_elementwise_kernel<2, FillFunctor<long>>", "kernel", "cudaLaunchKernel", "fill"),
        ("void direct_copy_kernel_cuda>", "copy_kernel", "cudaLaunchKernel", "elementwise"),
        ("Memcpy DtoD (Device -> Device)", "memcpy", "cudaMemcpyAsync", "memcpy"),
        ("Memcpy HtoD (Pinned -> Device)", "memcpy_htod", "cudaMemcpyAsync", "htod"),
        ("__amd_rocclr_copyBuffer", "kernel", "hipMemcpyWithStream", "memcpy"),
        (KINDS["fused"].work, "copy_kernel", "cuLaunchKernelEx", "fused"),
        ("Memset (Device)", "memset", "cudaMemsetAsync", "memset Memset (Device)"),
        ("ampere_bf16_gemm", "kernel", "cudaGraphLaunch", "graph"),
    ]
    rows = [("cudaLaunchKernel", "runtime", 500, 2, 999), ("outside", "kernel", 510, 2, 999)]
    rows += [("none", "annotation", 3000, 9, -1)]
    for start in (0, 1000):
        rows.append(("step", "annotation", start, 100, -1))
        for j, (name, kind, call, _) in enumerate(work):
            rows.append((call, "runtime", start + 5 * j, 2, start + j))
            rows.append((name, kind, start + 200 + 10 * j, 3, start + j))
        rows.append(("another node of the graph", "kernel", start + 400, 3, start + j))
    trace = pd.DataFrame(rows, columns=["name", "kind", "start_us", "dur_us", "correlation"])
    assert record.count_launches(trace) == {"step": Counter(launch for *_, launch in work), "none": {}}


def test_without_a_gpu_one_line_and_status_2(tmp_path):
    """And a whole run without what a machine with nothing but torch, numpy, pandas and msgspec lacks."""
    code = """
import sys
missing = "matplotlib seaborn IPython triton safetensors ipywidgets tqdm scipy yaml"
sys.modules |= dict.fromkeys(missing.split())
import torch
from pathlib import Path
from tests.stand_in import StandIn, record
torch.cuda.is_available = lambda: False
torch.set_num_threads(1)
assert record.main(["--out", sys.argv[1]]) == 2 and not Path(sys.argv[1]).exists()
record.WAYS, record.STEPS, record.TENSORS, record.TRACED = ("per_copy",), (), (), "tiny"
record.REPLAYS = record.REPLAYS[:1]
path, status = record.record(StandIn(), Path(sys.argv[1]), quick=True)
print(record.summary(path))
sys.exit(10 + status)"""
    command = [sys.executable, "-c", code, str(tmp_path / "new")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 10, done.stderr
    assert done.stderr == f"record.py: no CUDA or ROCm device: torch {torch.__version__} finds none\n"
    assert done.stdout.startswith("modelled · ") and "dma_bytes: None" in done.stdout
