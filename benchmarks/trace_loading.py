"""How fast, and in how much memory, a Kineto trace becomes a table: lib.profiles beside another reader.

    python benchmarks/trace_loading.py data/traces/v100_ddp_training.pt.trace.json.gz
    python benchmarks/trace_loading.py TRACE --gigabytes 1    # memory, on plain JSON of that size, from TRACE

HolisticTraceAnalysis comes from PyPI into a folder that is removed afterwards. Every sample is a process of
its own, the two take turns. Timed are the calls, not the imports; memory is the growth of peak resident
memory in the first call.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READERS = {
    "lib.profiles.load_trace": "from lib.profiles import load_trace as read",
    "HolisticTraceAnalysis": """
import logging; logging.disable()
from hta.common.trace_parser import parse_trace_dataframe
from hta.configs.parser_config import ParserConfig
config = ParserConfig.get_default_cfg()
def read(path): return parse_trace_dataframe(path, config)""",
}
SAMPLE = """
import json, resource, sys, time
{imports}
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB on Linux
before, calls, cpu = peak(), [], []
for call in range({calls}):
    start, used = time.perf_counter(), time.process_time()
    read(sys.argv[1])
    calls.append(time.perf_counter() - start); cpu.append(time.process_time() - used)
    if call == 0: growth = peak() - before
print(json.dumps({{"first_s": calls[0], "later_s": min(calls), "cpu_s": min(cpu), "growth_mib": growth}}))
"""


def sample(reader: str, trace: Path, packages: Path | None, calls: int = 3) -> dict[str, float]:
    """One process that reads the trace `calls` times: first_s, later_s, cpu_s (the fastest), growth_mib."""
    paths = [str(ROOT)] + ([str(packages)] if packages else [])
    code = SAMPLE.format(imports=READERS[reader], calls=calls)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(trace)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(result.stdout.splitlines()[-1])


def enlarge(trace: Path, gigabytes: float, to: Path) -> int:
    """Write plain JSON of this size: a trace's events again and again, each time later by its length."""
    with (gzip.open if trace.suffix == ".gz" else open)(trace, "rb") as file:
        document = json.load(file)
    events = [e for e in document.pop("traceEvents") if isinstance(e.get("ts"), int | float)]
    length = max(e["ts"] for e in events) - min(e["ts"] for e in events) + 1e6
    with open(to, "w", encoding="utf-8") as file:
        file.write(json.dumps(document)[:-1] + ', "traceEvents": [')
        copies = 0
        while file.tell() < gigabytes * 1e9:
            for e in events:
                if "correlation" in e.get("args", {}):
                    e["args"]["correlation"] += copies and 10**7
                e["ts"] += copies and length
            file.write((",\n" if copies else "") + ",\n".join(map(json.dumps, events)))
            copies += 1
        file.write("]}")
    return to.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument(
        "--gigabytes", type=float, help="only read a JSON file of this size, made from the trace"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.gigabytes:
            large = Path(folder) / "large.json"
            size = enlarge(options.trace, options.gigabytes, large) / 2**20
            result = sample("lib.profiles.load_trace", large, None, calls=1)
            growth = result["growth_mib"]
            print(f"{size:.0f} MiB of JSON: {result['first_s']:.1f} s, peak memory +{growth:.0f} MiB, "
                  f"{growth / size:.2f} times the file")  # fmt: skip
            return
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder]
        subprocess.run([*install, "HolisticTraceAnalysis"], check=True)
        results: dict[str, list] = {reader: [] for reader in READERS}
        for _ in range(options.samples):
            for reader, samples in results.items():
                samples.append(sample(reader, options.trace, Path(folder) if "Holistic" in reader else None))
    medians = {
        reader: {figure: statistics.median(s[figure] for s in samples) for figure in samples[0]}
        for reader, samples in results.items()
    }
    for reader, m in medians.items():
        print(f"{reader:>22}: first call {m['first_s']:.2f} s, later ones {m['later_s']:.2f} s, "
              f"processor {m['cpu_s']:.2f} s, peak memory +{m['growth_mib']:.0f} MiB")  # fmt: skip
    ours, theirs = medians.values()
    print("ratio: " + ", ".join(f"{figure} {ours[figure] / theirs[figure]:.2f}" for figure in ours))


if __name__ == "__main__":
    main()
