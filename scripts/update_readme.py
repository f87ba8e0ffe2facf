"""Writes the figure and the numbers of README.md and README.zh.md; with --check, says what is stale.

python scripts/update_readme.py [--check]
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import matplotlib

matplotlib.use("Agg")

from PIL import Image

from lib import plots, step
from lib.device_model import DeviceProfile
from lib.eagle import EagleConfig
from lib.routes import Launch

FIGURE = ROOT / "data" / "readme_step.png"
PROFILE = DeviceProfile.load("v100")
CONFIG = EagleConfig.preset("llama3-8b")
BLOCK = re.compile(r"(<!-- numbers:begin -->\n).*?(<!-- numbers:end -->)", re.S)
ROWS = {
    "README.md": {
        "head": "| a step, both replays | one `copy_()` a field | PR 28465 | `CopyPlan` | kind | see it |",
        "launches": "launches",
        "padded": "launches, padded batch",
        "span": "µs until the last copy is done, V100, without Python",
        "counted": "counted",
        "modelled": "modelled",
    },
    "README.zh.md": {
        "head": "| 每步，两次重放合计 | 每字段一次 `copy_()` | PR 28465 | `CopyPlan` | 类别 | 复现命令 |",
        "launches": "启动次数",
        "padded": "启动次数（批次有填充）",
        "span": "最后一次拷贝完成所需 µs，V100，不含 Python",
        "counted": "计数（精确）",
        "modelled": "模型推算",
    },
}


def launches(strategy: str, batch_size: int) -> list[Launch]:
    return step.StepCopies.build(CONFIG, strategy, batch_size).launches()


def numbers(words: dict[str, str]) -> str:
    """The table of a README: three numbers, each before, after, with a plan, and how to see it again."""
    ways = ("per_copy", "grouped_foreach_dma", "copy_plan")
    whole = [launches(way, 8) for way in ways]
    padded = [launches(way, 5) for way in ways]
    spans = []
    for made in whole:
        middle, ends = step.span_us(made, PROFILE), step.assumed_range_us(made, PROFILE)
        known = ends[1] - ends[0] < 0.5
        spans.append(f"{middle:.0f}" if known else f"{middle:.0f} ({ends[0]:.0f}–{ends[1]:.0f})")
    rows = (
        (words["launches"], [len(x) for x in whole], words["counted"], "04"),
        (words["padded"], [len(x) for x in padded], words["counted"], "06"),
        (words["span"], spans, words["modelled"], "04"),
    )
    lines = [words["head"], "| --- | --- | --- | --- | --- | --- |"]
    for what, values, kind, notebook in rows:
        cells = " | ".join(f"**{value}**" for value in values)
        lines.append(f"| {what} | {cells} | {kind} | `./run_all.sh --only {notebook}` |")
    return "\n".join(lines) + f"\n\n<sub>{PROFILE.label()}</sub>\n"


def lanes() -> dict:
    return {
        name: step.modelled_lanes(launches(name, 8), PROFILE) for name in ("per_copy", "grouped_foreach_dma")
    }


def fingerprint() -> str:
    """Of what the figure shows; the picture itself differs with fonts and versions."""
    tables = [table.round(3).to_csv() for tables in lanes().values() for table in tables.values()]
    return hashlib.sha256("\n".join(tables).encode()).hexdigest()


def draw() -> None:
    plots.use_style()
    fig = plots.timeline(lanes(), "The input copies of one EAGLE step: 16 launches, then 6")
    plots.write_evidence(fig, PROFILE.label())
    fig.savefig(FIGURE, dpi=120, bbox_inches="tight", metadata={"Description": fingerprint()})


def stale() -> list[str]:
    """What no longer says what the code says."""
    found = []
    if not FIGURE.exists() or Image.open(FIGURE).info.get("Description") != fingerprint():
        found.append(str(FIGURE.relative_to(ROOT)))
    for name, words in ROWS.items():
        block = BLOCK.search((ROOT / name).read_text(encoding="utf-8"))
        if block is None or numbers(words) not in block[0]:
            found.append(name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something is stale")
    if parser.parse_args().check:
        for name in stale():
            print(f"stale: {name}; python scripts/update_readme.py writes it anew")
        return bool(stale())
    draw()
    for name, words in ROWS.items():
        path = ROOT / name
        text, n = BLOCK.subn(lambda m, w=words: m[1] + numbers(w) + m[2], path.read_text(encoding="utf-8"))
        if n != 1:
            raise SystemExit(f"{name}: expected one block of numbers between its two comments, found {n}")
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
