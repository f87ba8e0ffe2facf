"""What other engines' own input lines cost the host, against ReplayCopies and PackedInputs.

    PYTHONPATH=. python benchmarks/engines.py [--rounds 60] [--device cpu]

Each engine's lines are re-stated (sources in data/engines.csv), each way does all its own work: slices,
lists, keys, padding. Ways of an engine run interleaved; ratios are those of the medians. On a CPU nothing is
launched.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from lib.copies import ReplayCopies, StaticInput
from lib.packed import PackedInputs
from lib.workbench.evidence import device_name, label
from lib.workbench.timing import measure, ratio

ROOM = 512  # requests that the buffers hold
BLOCKS = 32  # columns of a block table
Ways = dict[str, Callable[[], object]]
INT64, INT32 = torch.int64, torch.int32
NANO = {"input_ids": INT64, "positions": INT64, "slot_mapping": INT32, "context_lens": INT32}
PADS = {"slot_mapping": -1, "context_lens": 0}


def zeros(names: dict[str, torch.dtype], rows: int, device: str) -> dict[str, Tensor]:
    return {name: torch.zeros(rows, dtype=dtype, device=device) for name, dtype in names.items()}


def with_plan(buffers: dict[str, Tensor], sources: dict[str, Tensor], rows: int) -> Callable[[], object]:
    """Every buffer padded whole where the engine fills it."""
    fields = {name: StaticInput(buffer, pad=PADS.get(name)) for name, buffer in buffers.items()}
    copies = ReplayCopies(fields, pad_to="buffer")
    return lambda: copies(sources, rows, rows)


def nano_vllm(rows: int, device: str) -> Ways:
    """nanovllm/engine/model_runner.py, run_model: the four fields of one width, on the device."""
    buffers, step = zeros(NANO, ROOM, device), zeros(NANO, rows, device)

    def own() -> None:
        buffers["input_ids"][:rows] = step["input_ids"]
        buffers["positions"][:rows] = step["positions"]
        buffers["slot_mapping"].fill_(-1)
        buffers["slot_mapping"][:rows] = step["slot_mapping"]
        buffers["context_lens"].zero_()
        buffers["context_lens"][:rows] = step["context_lens"]

    return {"own": own, "ReplayCopies": with_plan(buffers, step, rows)}


def nano_vllm_from_lists(rows: int, device: str) -> Ways:
    """The same with its uploads and the block table: Python lists become tensors, then fill the buffers."""
    buffers = zeros(NANO, ROOM, device)
    tables = torch.zeros(ROOM, BLOCKS, dtype=INT32, device=device)
    lists, table = {name: [1] * rows for name in NANO}, [[5] * BLOCKS] * rows
    fields = {name: ((ROOM,), dtype, PADS.get(name)) for name, dtype in NANO.items()}
    packed = PackedInputs(fields | {"block_tables": ((ROOM, BLOCKS), INT32, None)}, device)

    def own() -> None:
        uploaded = {name: torch.tensor(lists[name], dtype=dtype).to(device) for name, dtype in NANO.items()}
        uploaded_table = torch.tensor(table, dtype=INT32).to(device)
        for name, pad in PADS.items():
            buffers[name].fill_(pad)
        for name, values in uploaded.items():
            buffers[name][:rows] = values
        tables[:rows] = uploaded_table

    def one_upload() -> None:
        with packed.step() as host:
            for name, values in lists.items():
                host[name][:rows] = values
            host["block_tables"][:rows] = table

    return {"own": own, "PackedInputs": one_upload}


def mini_sglang(rows: int, device: str) -> Ways:
    """python/minisgl/engine/graph.py, GraphCaptureBuffer.copy_from: three fields, dummy requests pad."""
    names = dict.fromkeys(("input_ids", "out_loc", "positions"), INT32)
    buffers, batch = zeros(names, ROOM, device), zeros(names, rows, device)

    def own() -> None:
        part = slice(rows)
        for name, buffer in buffers.items():
            buffer[part] = batch[name]

    return {"own": own, "ReplayCopies": with_plan(buffers, batch, rows)}


def light_llm(rows: int, device: str) -> Ways:
    """lightllm/common/basemodel/infer_struct.py, copy_for_cuda_graph: every attribute, two are aliases."""
    names = {"input_ids": INT64} | dict.fromkeys((f"b_{i}" for i in range(9)), INT32)
    buffers, state = zeros(names, rows, device), zeros(names, rows, device)

    def own() -> None:
        for name, value in (*state.items(), ("b_0", state["b_0"]), ("b_1", state["b_1"])):
            mine = buffers.get(name)
            if mine is not None and mine is not value:
                mine.copy_(value, non_blocking=True)

    return {"own": own, "ReplayCopies": with_plan(buffers, state, rows)}


ROWS = {
    "nano-vllm, device copies": nano_vllm,
    "nano-vllm, from lists": nano_vllm_from_lists,
    "mini-sglang": mini_sglang,
    "LightLLM": light_llm,
}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for engine, section in ROWS.items():
        for rows in (8, 64):
            ways = section(rows, args.device)
            own, other = measure(ways, args.rounds, 100, device=args.device).values()
            times = f"own {own.median_us:.1f} us, {[*ways][1]} {other.median_us:.1f} us"
            print(f"{engine}, {rows} requests: {times}, ratio {ratio(other, own):.2f}")
    print(label("measured", device_name(args.device)))


if __name__ == "__main__":
    main()
