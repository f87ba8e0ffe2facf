"""Writes the figure and the numbers of README.md and README.zh.md; with --check, says what is stale.

python scripts/update_readme.py [--check]
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import hashlib
import io
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from PIL import Image, PngImagePlugin

from lib.eagle import EagleConfig
from lib.profiles import AHEAD, WAITS, DeviceProfile
from lib.workbench import plots
from lib.workbench.step import StepCopies, graph_times, saving, step_lanes

FIGURE = ROOT / "data" / "readme_step.png"
PROFILE = DeviceProfile.load("v100")
CONFIG = EagleConfig.preset("llama3-8b")
WAYS = ("per_copy", "grouped_foreach_dma", "small_copy", "copy_plan", "fused")
BLOCK = re.compile(r"(<!-- numbers:begin -->\n).*?(<!-- numbers:end -->)", re.S)
ROWS = {
    "README.md": (
        "| a step, both replays | `copy_()` a field | PR 28465 | SGLang 0.5.23 | `ReplayCopies` | `fused` "
        "| kind | see it |",
        ("launches", "counted"),
        ("launches, padded batch", "counted"),
        ("µs saved a step on a V100 whose GPU waits for the host", "modelled"),
        ("µs saved a step on a V100 whose host is ahead", "modelled"),
    ),
    "README.zh.md": (
        "| 每步，两次重放合计 | 每字段一次 `copy_()` | PR 28465 | SGLang 0.5.23 | `ReplayCopies` | `fused` "
        "| 类别 | 复现命令 |",
        ("启动次数", "计数"),
        ("启动次数（批次有填充）", "计数"),
        ("V100 上每步节省的 µs：GPU 等待主机", "模型推算"),
        ("V100 上每步节省的 µs：主机领先", "模型推算"),
    ),
}


def numbers(name: str) -> str:
    """The table of a README: each number by way of copying, its kind, and how to see it again."""
    whole = [StepCopies.build(CONFIG, way, 8) for way in WAYS]
    padded = [StepCopies.build(CONFIG, way, 5) for way in WAYS]
    head, *texts = ROWS[name]
    values = [[len(copies.launches()) for copies in whole], [len(copies.launches()) for copies in padded]]
    for regime in (WAITS, AHEAD):
        saved = [saving(whole[0], copies, PROFILE, regime) for copies in whole[1:]]
        values.append(["–", *(f"{s.middle:.0f} ({s.low:.0f}–{s.high:.0f})" for s in saved)])
    lines = [head, "|" + " --- |" * (len(WAYS) + 3)]
    for (what, kind), row, notebook in zip(texts, values, ("04", "06", "00", "00")):
        cells = " | ".join(f"**{value}**" for value in row)
        lines.append(f"| {what} | {cells} | {kind} | `./run_all.sh --only {notebook}` |")
    return "\n".join(lines) + f"\n\n<sub>{PROFILE.label()}</sub>\n"


def groups() -> dict[str, dict]:
    """One step as it is, in both regimes, before and after."""
    times = graph_times(CONFIG, PROFILE)
    found = {}
    for regime in (WAITS, AHEAD):
        for way in WAYS[:2]:
            copies = StepCopies.build(CONFIG, way, 8)
            found[f"{regime}: {way}"] = step_lanes(copies, PROFILE, times, regime)
    return found


def fingerprint() -> str:
    """Of what the figure shows; the picture itself differs with fonts and versions."""
    shown = [PROFILE.label()]
    for name, lanes in groups().items():
        shown.append(name)
        for label, table in lanes.items():
            shown += [label, table.round(3).to_csv()]
    return hashlib.sha256("\n".join(shown).encode()).hexdigest()


def draw() -> None:
    fig = plots.timeline(groups(), "7 copies, draft graph, verify, 9 copies, draft-extend graph")
    image = Image.open(io.BytesIO(plots.png(fig, f"{PROFILE.label()} · graphs cut short")))
    about = PngImagePlugin.PngInfo()
    about.add_text("Description", fingerprint())
    image.save(FIGURE, pnginfo=about, optimize=True)


def stale() -> list[str]:
    """What no longer says what the code says."""
    found = []
    if not FIGURE.exists() or Image.open(FIGURE).info.get("Description") != fingerprint():
        found.append(str(FIGURE.relative_to(ROOT)))
    for name in ROWS:
        block = BLOCK.search((ROOT / name).read_text(encoding="utf-8"))
        if block is None or numbers(name) not in block[0]:
            found.append(name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something is stale")
    if parser.parse_args().check:
        names = stale()
        for name in names:
            print(f"stale: {name}; python scripts/update_readme.py writes it anew")
        return bool(names)
    draw()
    for name in ROWS:
        path = ROOT / name
        table = numbers(name)
        text, n = BLOCK.subn(lambda m, t=table: m[1] + t + m[2], path.read_text(encoding="utf-8"))
        if n != 1:
            raise SystemExit(f"{name}: expected one block of numbers between its two comments, found {n}")
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
