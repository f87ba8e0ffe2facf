"""The recorder end to end with a stand-in for the GPU, cut short anywhere; and what reads its recordings."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch

from lib import record, recordings
from lib.device_model import DeviceProfile, simulate
from lib.routes import Launch
from lib.strategies import DEFAULT_DMA_BYTES, STRATEGIES
from lib.traces import COLUMNS, load_trace
from tests.stand_in import StandIn

ROOT = Path(__file__).resolve().parents[1]
SMALL = record.Plan(
    steps=(
        ("llama3-8b", "int64_seq_lens", 8),
        ("llama3-8b", "int64_seq_lens", 5),
        ("llama3-8b", "int32_seq_lens", 8),
    ),
    replays=(("tiny", "int64_seq_lens", 3),),
    crossover=((1, torch.int16), (1, torch.int64), (65, torch.int16), (8, torch.int16)),
    sizes=tuple(2**n for n in range(8, 23, 2)),
    rounds=5,
)
LEAST = record.Plan(
    traces=(("tiny",),),
    steps=(("tiny", "int64_seq_lens", 5), ("tiny", "int32_seq_lens", 5)),
    replays=(("tiny", "int64_seq_lens", 1),),
    crossover=((1, torch.int16),),
    sizes=(256, 65536),
    rounds=3,
)
FEW = {name: STRATEGIES[name] for name in ("per_copy", "uint8_view", "grouped_foreach")}


@pytest.fixture(scope="module", autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, 2))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> recordings.Recording:
    """Everything of SMALL, every strategy, on a modelled V100."""
    path, status = record.record(StandIn(), tmp_path_factory.mktemp("whole"), plan=SMALL)
    recording = recordings.load(path)
    assert status == 0, recording.meta["problems"]
    return recording


@pytest.fixture
def few_strategies(monkeypatch):
    monkeypatch.setattr(record, "STRATEGIES", FEW)


def test_a_full_run_leaves_out_only_what_cannot_be_done_and_says_so(whole):
    assert whole.meta["parts"] == dict.fromkeys(record.PARTS, "done")
    cannot_convert = [name for name in ("uint8_view", "arena", "no_copy") if name in STRATEGIES]
    skipped = [text for text in whole.missing if "cannot convert" in text]
    assert [text.split(",")[0].removeprefix("steps: ") for text in skipped] == cannot_convert
    rest = [text for text in whole.missing if text not in skipped]
    assert all("no memory" in text or "ImportError" in text for text in rest), rest
    size = sum(path.stat().st_size for path in whole.path.rglob("*") if path.is_file())
    traces = list(whole.path.glob("traces/*"))
    assert size < 2_000_000 and all(path.stat().st_size <= 200_000 for path in traces)
    assert {"calibration", *FEW} <= set(whole.traces())
    assert not list(whole.path.rglob("*.part"))


def test_every_strategy_is_in_every_table_with_its_launches(whole):
    runnable = [name for name in STRATEGIES if not any(name in text for text in whole.missing)]
    for table in ("steps", "replays"):
        assert set(runnable) <= set(whole.tables[table]["strategy"]), table
        assert whole.tables[table]["equal"].isin((True, None)).all()
        assert (whole.tables[table]["predicted"] == whole.tables[table]["counted"]).all()
    assert whole.tables["replays"]["equal"].all()
    (full,) = whole.where("steps", strategy="per_copy", batch_size=8, layout="int64_seq_lens")["counted"]
    (padded,) = whole.where("steps", strategy="per_copy", batch_size=5, layout="int64_seq_lens")["counted"]
    (older,) = whole.where("steps", strategy="per_copy", batch_size=8, layout="int32_seq_lens")["counted"]
    assert (full, padded) == ({"memcpy": 16}, {"memcpy": 16, "fill": 14})
    assert older == {"memcpy": 14, "elementwise": 2}
    (replay,) = whole.where("replays", strategy="grouped_foreach")["counted"]
    assert replay["graph"] == 2


def test_the_saving_is_the_difference_of_the_modelled_spans(whole):
    v100 = DeviceProfile.load("v100")

    def span(launches):
        table = simulate([replace(x, reason=str(i)) for i, x in enumerate(launches)], v100)
        return (table["start_us"] + table["dur_us"]).max()

    (row,) = whole.where("steps", strategy="arena", batch_size=8, layout="int64_seq_lens").itertuples()
    (per_copy,) = whole.where(
        "steps", strategy="per_copy", batch_size=8, layout="int64_seq_lens"
    ).itertuples()
    assert row.saved_us[1] == pytest.approx(np.median(np.subtract(per_copy.gpu_us, row.gpu_us)), abs=0.01)
    sixteen = span([Launch("memcpy", 1, 512, "")] * 16)
    assert np.median(per_copy.gpu_us) == pytest.approx(sixteen, rel=0.05)


def test_the_fitted_profile_is_that_of_the_device(whole):
    """Every figure that a run measures comes back, also those that a trace alone cannot tell."""
    modelled, fitted = DeviceProfile.load("v100"), whole.profile
    for figure in set(modelled.figures) - set(fitted.unknown):
        assert fitted[figure] == pytest.approx(modelled[figure], rel=0.03, abs=0.02), figure
    from_table = [f for f in fitted.figures.values() if f.source.startswith("fitted: crossover table")]
    assert len(from_table) == 6 and {"host-bound", "queued"} == set(fitted.error)
    assert max(fitted.error.values()) < 0.05


def test_dma_bytes_is_where_a_memcpy_of_its_own_ends_sooner(whole):
    v100 = DeviceProfile.load("v100")

    def ends(size: int, beside: bool) -> float:
        group = Launch("foreach", 8 + (not beside), 8 * 128 + size * (not beside), "group", "foreach")
        table = simulate([group, Launch("memcpy", 1, size, "")] if beside else [group], v100)
        return (table["start_us"] + table["dur_us"]).max()

    expected = next(size for size in SMALL.sizes if ends(size, beside=True) <= ends(size, beside=False))
    assert whole.dma_bytes() == expected
    assert (
        replace(whole, tables=whole.tables | {"crossover": whole.tables["crossover"][:0]}).dma_bytes() is None
    )


def test_what_a_stand_in_made_says_modelled_everywhere(whole, monkeypatch):
    assert whole.evidence == "modelled" and whole.path.name.startswith("modelled-")
    assert whole.label().startswith("modelled · modelled Tesla V100")
    for path in whole.path.glob("*.jsonl"):
        assert all(json.loads(line)["evidence"] == "modelled" for line in path.read_text().splitlines())
    for path in whole.path.glob("traces/*"):
        document = json.loads(gzip.decompress(path.read_bytes()))
        assert document["evidence"] == "modelled"
        assert document["deviceProperties"][0]["name"].startswith("modelled ")
        assert load_trace(path).attrs["device"][:8] in ("modelled", "")  # in_graph and no_copy launch nothing
        assert whole.trace(path.name.removesuffix(".json.gz")).attrs["evidence"] == "modelled"
    assert all("modelled" in label for label in whole.lanes("per_copy"))
    profile = whole.profile
    assert profile.source.startswith("modelled") and profile.device.startswith("modelled")
    assert "modelled" in record.summary(whole).splitlines()[0]
    monkeypatch.setattr(recordings, "RECORDINGS", whole.path.parent)
    assert recordings.find() == [] and recordings.choose("auto") is None
    assert recordings.choose(whole.path.name).path == whole.path  # asked for by name: shown, and labelled
    assert recordings.dma_bytes("Tesla V100-SXM2-32GB") == DEFAULT_DMA_BYTES


def test_no_part_of_a_modelled_recording_passes_for_a_recorded_one(whole, tmp_path):
    copy = Path(shutil.copytree(whole.path, tmp_path / "copy"))
    meta = json.loads((copy / "meta.json").read_text())
    (copy / "meta.json").write_text(json.dumps(meta | {"evidence": "recorded"}))
    with pytest.raises(ValueError, match=r"meta.json says recorded, steps.jsonl says \['modelled'\]"):
        recordings.load(copy)


def recorded(whole, folder: Path, device: str, date: str) -> Path:
    """The same numbers in a recording that calls itself recorded, as one from a GPU does."""
    copy = Path(shutil.copytree(whole.path, folder / f"{device}-{date}"))
    meta = json.loads((copy / "meta.json").read_text())
    (copy / "meta.json").write_text(
        json.dumps(meta | {"evidence": "recorded", "device": device, "date": date})
    )
    for path in copy.glob("*.jsonl"):
        path.write_text(path.read_text().replace('"modelled"', '"recorded"'))
    return copy


def test_notebooks_find_the_newest_recording_of_their_device(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(recordings, "RECORDINGS", tmp_path)
    for device, date in (("a", "2026-01-01"), ("a", "2026-03-01"), ("b", "2026-02-01")):
        recorded(whole, tmp_path, device, date)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "meta.json").write_text("{")
    with pytest.warns(UserWarning, match="broken: not a recording"):
        assert [r.meta["date"][:7] for r in recordings.find()] == ["2026-03", "2026-02", "2026-01"]
    shutil.rmtree(tmp_path / "broken")
    assert [recordings.choose("auto", device).path.name for device in ("b", "c", None)] == [
        "b-2026-02-01", "a-2026-03-01", "a-2026-03-01",
    ]  # fmt: skip
    assert recordings.choose("none") is None
    assert "lib.record" in recordings.describe(None)
    assert recordings.describe(recordings.choose("b-2026-02-01")).startswith("recorded · b · ")
    assert recordings.dma_bytes("a") == whole.dma_bytes() != DEFAULT_DMA_BYTES
    assert recordings.dma_bytes("c") == DEFAULT_DMA_BYTES
    assert recordings.grouped_foreach_dma("a").route.keywords == {"dma_bytes": whole.dma_bytes()}
    with pytest.raises(ValueError, match="not a recording"):
        recordings.choose("of no device")


def test_plots_take_what_a_recording_gives(whole):
    import matplotlib.pyplot as plt

    from lib import plots

    of = {"preset": "llama3-8b", "batch_size": 8, "layout": "int64_seq_lens"}
    assert [len(x) for x in whole.launches(**of).values()][:3] == [16, 4, 6]
    plots.launch_counts(whole.launches(**of), "t")
    plots.timings(whole.timings("steps", **of), "t", "u", gpu=True)
    plots.timings(whole.timings("replays", batch_size=3), "t", "u", gpu=True)
    lanes = whole.lanes("per_copy")
    assert [(lane.kind == "memcpy").sum() for lane in lanes.values()] == [0, 16]
    plots.timeline({"per_copy": lanes}, "t")
    lines = whole.crossover_lines()
    assert list(lines) == list(recordings.WAYS.values()) and all(len(x) == len(y) for x, y in lines.values())
    assert lines["driver memcpy"][0] == list(SMALL.sizes)
    plots.curves(lines, "t", "x", "y")
    plt.close("all")


@pytest.mark.parametrize(
    "notebook", sorted((ROOT / "notebooks").glob("0[1-6]*.ipynb")), ids=lambda p: p.stem[:2]
)
def test_notebooks_draw_recordings_whole_and_cut_short(
    notebook, whole, few_strategies, tmp_path, monkeypatch
):
    """The cells tagged `recorded` run on what is there, down to nothing, and say what is missing."""
    cells = [c for c in nbformat.read(notebook, 4).cells if "recorded" in c.metadata.get("tags", ())]
    if not cells:
        pytest.skip(f"{notebook.name} has no cell tagged `recorded` yet")
    empty, _ = record.record(StandIn(), tmp_path, minutes=0)
    from lib import plots

    shown = []
    monkeypatch.setattr(plots, "show", lambda *figure: shown.append(figure))
    for path, draws in ((whole.path, True), (empty, False)):
        shown.clear()
        namespace = {
            "recording": str(path),
            "device": "cpu",
            "here_and_now": "this machine",
            "pd": pd,
            "plots": plots,
        }
        exec("from lib import recordings\nfrom lib.evidence import check, label, publish", namespace)
        for cell in cells:
            exec(cell.source, namespace)
        assert all(evidence.startswith("modelled · modelled") for *_, evidence in shown)
        assert bool(shown) == draws


def test_cut_short_anywhere_it_is_a_smaller_recording(few_strategies, tmp_path):
    """Ctrl-C at every call to the device: what was written before stays, what is missing is said."""
    device = StandIn()
    record.record(device, tmp_path, plan=LEAST)
    rows = 0
    for call in range(1, device.calls + 1):
        path, status = record.record(StandIn(fail_after=call), tmp_path, plan=LEAST)
        recording = recordings.load(path)
        assert status == 130
        assert "profile: not reached" in recording.missing and any(
            "cut short" in x for x in recording.missing
        )
        assert len(record.summary(recording).splitlines()) < 40
        held = sum(map(len, recording.tables.values()))
        assert held >= rows
        rows = held
    assert device.calls > 10 and rows > 0


def test_killed_it_is_a_smaller_recording(tmp_path):
    """SIGKILL as soon as the first row is there."""
    code = (
        "import sys, pathlib; from lib import record; from tests.stand_in import StandIn;"
        "endless = record.Plan(traces=(), steps=(('tiny', 'int64_seq_lens', 5),) * 500);"
        "record.record(StandIn(), pathlib.Path(sys.argv[1]), plan=endless)"
    )
    run = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("*/steps.jsonl")):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    (path,) = tmp_path.iterdir()
    assert recordings.load(path).missing[:2] == ["steps: cut short", "replays: not reached"]


def test_a_line_cut_short_is_left_out_and_the_rest_stays(whole, tmp_path):
    copy = Path(shutil.copytree(whole.path, tmp_path / "copy"))
    text = (whole.path / "steps.jsonl").read_bytes()
    for end in [*range(0, len(text), 997), len(text) - 1]:
        (copy / "steps.jsonl").write_bytes(text[:end])
        assert len(recordings.load(copy).tables["steps"]) == text[:end].count(b"\n")


def test_a_crossover_cut_short_still_tells_a_size_or_none(whole, tmp_path):
    copy = Path(shutil.copytree(whole.path, tmp_path / "copy"))
    lines = (whole.path / "crossover.jsonl").read_text().splitlines(keepends=True)
    found = set()
    for end in range(len(lines) + 1):
        (copy / "crossover.jsonl").write_text("".join(lines[:end]))
        found.add(recordings.load(copy).dma_bytes())
    assert {None, whole.dma_bytes()} <= found <= {None, *SMALL.sizes}
    for samples in ([], None):  # a way that was not timed, and one that was timed twice
        spoiled = json.dumps(json.loads(lines[0]) | {"way": "in_group", "bytes": 3, "gpu_us": samples}) + "\n"
        (copy / "crossover.jsonl").write_text("".join([*lines, spoiled, *lines]))
        assert recordings.load(copy).dma_bytes() == whole.dma_bytes()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(field, value) for field in ("device", "torch", "date") for value in (None, "", 3)],
        ("parts", []),
        ("parts", None),
        ("skipped", {}),
        ("skipped", None),
        ("evidence", None),
    ],
)
def test_a_recording_that_does_not_say_what_it_is_is_refused(whole, tmp_path, monkeypatch, field, value):
    copy = recorded(whole, tmp_path, "a", "2026-01-01")
    meta = json.loads((copy / "meta.json").read_text())
    without = {key: x for key, x in meta.items() if key != field}
    monkeypatch.setattr(recordings, "RECORDINGS", tmp_path)
    for spoiled in (meta | {field: value}, without):
        (copy / "meta.json").write_text(json.dumps(spoiled))
        with pytest.raises(ValueError, match=f"not a recording .*{field}"):
            recordings.load(copy)
        with pytest.warns(UserWarning, match=field):
            assert recordings.choose() is None


def test_json_nested_too_deeply_is_no_recording(tmp_path):
    (tmp_path / "meta.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match="not a recording"):
        recordings.load(tmp_path)


def test_a_modelled_trace_does_not_pass_for_a_recorded_one(whole, tmp_path):
    copy = recordings.load(recorded(whole, tmp_path, "a", "2026-01-01"))
    with pytest.raises(ValueError, match="says recorded, the trace says modelled"):
        copy.trace("per_copy")


def test_out_of_time_every_part_says_how_much_is_missing(few_strategies, tmp_path):
    path, status = record.record(StandIn(), tmp_path, minutes=0, plan=LEAST)
    recording = recordings.load(path)
    assert status == 0 and not any(map(len, recording.tables.values()))
    assert [x for x in recording.missing if "time was up" in x] == [
        f"{part}: {n} of {n} cases, time was up"
        for part, n in {"traces": 1, "steps": 2, "replays": 1, "crossover": 1, "profile": 1}.items()
    ]


def test_a_second_recording_leaves_the_first_alone(few_strategies, tmp_path):
    paths = [record.record(StandIn(), tmp_path, minutes=0)[0] for _ in range(3)]
    assert [path.name.removeprefix(paths[0].name) for path in paths] == ["", "-2", "-3"]


def test_a_count_that_differs_is_printed_with_its_tensors(few_strategies, tmp_path, capsys):
    """A device that copies anything from 64 KiB on with a kernel."""

    def quirk(launch):
        return (
            replace(launch, kind="elementwise")
            if launch.kind == "memcpy" and launch.bytes >= 2**16
            else launch
        )

    plan = replace(LEAST, steps=SMALL.steps[:1], crossover=(), replays=())
    path, status = record.record(StandIn(quirk=quirk), tmp_path, plan=plan)
    printed = capsys.readouterr().err
    assert status == 1
    first, layout = recordings.load(path).meta["problems"][0], "strides (4096, 1) torch.bfloat16"
    assert first in printed and first.splitlines() == [
        "steps: llama3-8b, int64_seq_lens, batch 8, per_copy: predicted {'memcpy': 16}, "
        "counted {'elementwise': 2, 'memcpy': 14}",
        f"  draft.hidden_states: (8, 4096) {layout} <- (8, 4096) {layout}",
        f"  draft_extend.hidden_states: (128, 4096) {layout} <- (128, 4096) {layout}",
    ]


def test_a_build_that_holds_65_tensors_in_one_launch_is_told(few_strategies, tmp_path, capsys):
    """Here the launch of the one left over never comes, though 4 KB of arguments predict it."""

    def quirk(launch):
        return (
            None
            if launch.call == "foreach" and launch.n_copies == 1 and launch.bytes in (256, 1024)
            else launch
        )

    plan = replace(LEAST, steps=(), replays=(), crossover=((65, torch.int16),), sizes=(256, 1024))
    path, status = record.record(StandIn(quirk=quirk), tmp_path, plan=plan)
    assert status == 1
    printed = capsys.readouterr().err
    assert (
        "crossover: 65 of torch.int16, 256 foreach: predicted {'foreach': 2}, counted {'foreach': 1}"
        in printed
    )
    assert "65 tensors in one launch: yes" in record.summary(recordings.load(path))


def test_a_strategy_that_cannot_run_is_skipped_and_one_that_copies_wrong_is_a_failure(
    few_strategies, tmp_path, monkeypatch, capsys
):
    class Missing(type(STRATEGIES["per_copy"])):
        def __call__(self, dsts, srcs, names=None):
            raise ImportError("no compiler here")

    class Wrong(type(STRATEGIES["per_copy"])):
        def __call__(self, dsts, srcs, names=None):
            super().__call__(dsts[1:], srcs[1:])

    route = STRATEGIES["per_copy"].route
    odd = {"missing": Missing("missing", route), "wrong": Wrong("wrong", route)}
    monkeypatch.setattr(record, "STRATEGIES", FEW | odd)
    monkeypatch.setattr("lib.eagle.runners.STRATEGIES", FEW | odd)
    path, status = record.record(StandIn(), tmp_path, plan=replace(LEAST, crossover=()))
    recording = recordings.load(path)
    assert status == 1
    assert "steps: missing, int64_seq_lens: ImportError: no compiler here" in recording.missing
    assert (
        "steps: tiny, int64_seq_lens, batch 5: wrong leaves other bits than per_copy"
        in capsys.readouterr().err
    )
    steps = recording.where("steps", layout="int64_seq_lens").set_index("strategy")["equal"]
    assert steps.to_dict() == {"per_copy": True, "uint8_view": True, "grouped_foreach": True, "wrong": False}


def test_a_part_that_fails_leaves_the_others(few_strategies, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "DraftModel", None)
    path, status = record.record(StandIn(), tmp_path, plan=LEAST)
    recording = recordings.load(path)
    assert status == 1 and "replays: cut short" in recording.missing
    assert len(recording.tables["crossover"]) and recording.profile
    assert any(text.startswith("replays: AttributeError") for text in recording.meta["problems"])


def kineto(rows: list[tuple]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=["name", "kind", "start_us", "dur_us", "correlation"])
    return table.reindex(columns=list(COLUMNS)).assign(track=pd.Categorical(["t"] * len(table)))


def test_launches_are_counted_by_the_kernel_names_of_real_devices():
    """Names as Kineto writes them; work that runs after its annotation is found by its correlation."""
    foreach = (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)"
        "::TensorListMetadata<2>, at::native::(anonymous namespace)::CopyFunctor<long, long, 2, 1, 1>, "
        "at::native::Copy<long, long> >"
    )
    fill = "void at::native::vectorized_elementwise_kernel<2, at::native::FillFunctor<long>, array<char*> >"
    work = [  # name, kind, call, launch
        (foreach, "copy_kernel", "cudaLaunchKernel", "foreach"),
        (fill, "kernel", "cudaLaunchKernel", "fill"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copy_kernel",
         "cudaLaunchKernel", "elementwise"),
        ("Memcpy DtoD (Device -> Device)", "memcpy", "cudaMemcpyAsync", "memcpy"),
        ("__amd_rocclr_copyBuffer", "kernel", "hipMemcpyWithStream", "memcpy"),
        ("_copy", "kernel", "cuLaunchKernelEx", "fused"),
        ("Memset (Device)", "memset", "cudaMemsetAsync", "memset Memset (Device)"),
        ("ampere_bf16_gemm", "kernel", "cudaGraphLaunch", "graph"),
    ]  # fmt: skip
    rows = [
        ("step", "annotation", 0, 100, -1),
        ("step", "annotation", 1000, 100, -1),
        ("none", "annotation", 3000, 9, -1),
    ]
    for i in range(2):
        for j, (name, kind, call, _) in enumerate(work):
            rows.append((call, "runtime", 1000 * i + 5 * j, 2, 100 * i + j))
            rows.append((name, kind, 1000 * i + 200 + 10 * j, 3, 100 * i + j))
        rows.append(("another node of the graph", "kernel", 1000 * i + 400, 3, 100 * i + len(work) - 1))
    rows += [("cudaLaunchKernel", "runtime", 500, 2, 999), ("outside", "kernel", 510, 2, 999)]
    counted = record.count_launches(kineto(rows))
    kinds = {launch: 1 for *_, launch in work} | {"memcpy": 2}
    assert counted["step"]["counted"] == kinds
    assert counted["step"]["device_us"] == [27.0] * 2
    assert counted["none"]["counted"] == {}


def test_without_a_gpu_one_line_and_status_2(tmp_path):
    """And all of it without what a machine with nothing but torch, numpy and pandas lacks."""
    code = f"""
import sys
missing = "matplotlib seaborn IPython triton msgspec safetensors ipywidgets tqdm scipy"
sys.modules |= dict.fromkeys(missing.split())
import torch
from pathlib import Path
from lib import record
from tests.stand_in import StandIn
record.torch.cuda.is_available = lambda: False
assert record.main(["--out", sys.argv[1]]) == 2
assert not Path(sys.argv[1]).exists()
record.STRATEGIES = {{n: record.STRATEGIES[n] for n in ("per_copy", "grouped_foreach", "fused_kernel")}}
path, status = record.record(StandIn(), Path(sys.argv[1]), plan=record.{LEAST!r})
print(record.summary(record.recordings.load(path)))
sys.exit(10 + status)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "new")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 10, done.stderr
    line = f"lib.record: no CUDA or ROCm device: torch {torch.__version__} finds none\n"
    assert done.stderr == line
    assert done.stdout.startswith("modelled · ")
    assert (
        "missing: steps: fused_kernel, int64_seq_lens: ImportError: fused_kernel needs Triton" in done.stdout
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_command_itself_ends_with_status_2(tmp_path):
    command = [sys.executable, "-m", "lib.record", "--out", str(tmp_path / "new")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "new").exists()


def test_the_whole_plan_is_what_was_asked_for():
    plan = record.Plan()
    sizes = {}
    for preset, _, batch_size in plan.steps:
        sizes.setdefault(record.EagleConfig.preset(preset), set()).add(batch_size)
    assert [config.hidden_size for config in sizes] == [4096, 7168]
    for config, batch_sizes in sizes.items():
        assert {1, 2, 4, 8, 16, 32, 64} < batch_sizes and any(math.log2(b) % 1 for b in batch_sizes)
        assert max(batch_sizes) == config.max_batch_size
    assert (min(plan.sizes), max(plan.sizes)) == (256, 64 * 2**20)
    assert {1, 64, 65} < {n for n, _ in plan.crossover}
