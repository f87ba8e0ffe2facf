"""Executes the numbered notebooks, one after the other, and leaves a report; behind run_all.sh."""

from __future__ import annotations

import argparse
import ast
import base64
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
MACHINE = """
import json, platform, sys, torch
from lib.evidence import choose_device, device_name
device = choose_device(sys.argv[1])
print(json.dumps({"device": device, "name": device_name(device), "torch": torch.__version__,
                  "python": platform.python_version(), "system": platform.platform()}))
"""


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def parse_value(text: str) -> Any:
    """A Python literal where `text` is one (also true, false and null as in YAML), else the text itself."""
    spelled = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in spelled:
        return spelled[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def make_parser() -> argparse.ArgumentParser:
    about = "Execute the notebooks into runs/<UTC time>/; leave figures, summary.json and report.html there."
    parser = OneLineParser(prog="run_all.sh", description=about, allow_abbrev=False)
    add, repeated = parser.add_argument, {"action": "append", "default": []}
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--quick", action="store_true", help="fewer samples: a check rather than a measurement")
    add("--only", metavar="NN", **repeated, help="this notebook; may be repeated")
    about = "a parameter of the notebooks that declare it; may be repeated"
    add("-p", dest="parameters", nargs=2, metavar=("NAME", "VALUE"), **repeated, help=about)
    add("--output", type=Path, metavar="DIR", help="instead of runs/<UTC time>; new or empty")
    add("--notebooks", type=Path, metavar="DIR", default=ROOT / "notebooks", help="others than the project's")
    return parser


def choose_notebooks(folder: Path, only: list[str], parser: argparse.ArgumentParser) -> list[Path]:
    notebooks = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not notebooks:
        parser.error(f"no numbered notebooks in {folder}")
    numbers = [path.name[:2] for path in notebooks]
    wanted = {number.zfill(2) for number in only} or set(numbers)
    for number in sorted(wanted - set(numbers)):
        parser.error(f"--only: expected one of {', '.join(numbers)}, got {number}")
    return [path for path in notebooks if path.name[:2] in wanted]


def choose_machine(device: str, parser: argparse.ArgumentParser) -> dict[str, str]:
    """What the run stands on, asked in a process of its own: this one stays without torch."""
    asked = subprocess.run([sys.executable, "-c", MACHINE, device], cwd=ROOT, capture_output=True, text=True)
    if asked.returncode:
        parser.error(f"--{asked.stderr.strip().splitlines()[-1].removeprefix('ValueError: ')}")
    return json.loads(asked.stdout)


def keep_files(record: dict[str, Any], executed: Path, run: Path) -> None:
    """Write the notebook's figures as PNG and its HTML; in the record, a figure's file replaces its bytes."""
    from nbconvert import HTMLExporter

    for figure in record["figures"]:
        figure["file"] = f"figures/{record['notebook'][:2]}_{figure['name']}.png"
        (run / figure["file"]).parent.mkdir(exist_ok=True)
        (run / figure["file"]).write_bytes(base64.b64decode(figure.pop("png")))
    if executed.exists():
        html, _ = HTMLExporter(embed_images=True).from_filename(str(executed))
        executed.with_suffix(".html").write_text(html, encoding="utf-8")


def print_table(records: list[dict[str, Any]], describe: Callable[[dict], str], limit_mb: int) -> None:
    width = max(len(record["notebook"]) for record in records)
    print(f"\n{'notebook':<{width}}  {'result':<11}     time  peak memory")
    for record in records:
        time_and_memory = f"{record['seconds']:6.1f} s {record['peak_mb']:9.0f} MB"
        over = f", over the limit of {limit_mb} MB" if record["peak_mb"] > limit_mb else ""
        print(f"{record['notebook']:<{width}}  {record['status']:<11} {time_and_memory}{over}")
        if record["error"]:
            print(f"{'':<{width}}  {describe(record['error'])}")


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ending it any polite way is a Ctrl-C
    parser = make_parser()
    options = parser.parse_args()
    notebooks = choose_notebooks(options.notebooks, options.only, parser)
    started = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    run = (options.output or ROOT / "runs" / started.strftime("%Y-%m-%dT%H-%M-%SZ")).resolve()
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        parser.error(f"--output: expected a new or empty folder, {run} is not")

    import report
    from execute_notebook import PEAK_LIMIT_MB, declared_parameters, describe, execute

    extra = {name: parse_value(value) for name, value in options.parameters}
    known = set().union(*map(declared_parameters, notebooks))
    for name in sorted(set(extra) - known):
        parser.error(f"-p {name}: no such parameter; these notebooks declare {', '.join(sorted(known))}")
    machine = choose_machine(options.device, parser)
    parameters = {"device": machine["device"], "quick": options.quick} | extra

    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output: {error}")
    summary: dict[str, Any] = {"started": started.isoformat(), "seconds": 0.0, "complete": False}
    summary |= {"machine": machine, "parameters": parameters, "peak_limit_mb": PEAK_LIMIT_MB, "notebooks": []}
    records, clock = summary["notebooks"], time.monotonic()
    print(
        f"{len(notebooks)} notebooks on {machine['name']}, torch {machine['torch']}, into {run}", flush=True
    )
    try:
        for source in notebooks:
            executed = run / "notebooks" / source.name
            record = execute(source, executed, parameters)
            keep_files(record, executed, run)
            records.append(record)
            summary["complete"] = len(records) == len(notebooks) and record["status"] != "interrupted"
            summary["seconds"] = round(time.monotonic() - clock, 1)
            report.write_json(run / "summary.json", summary)
            if record["status"] == "interrupted":
                break
    except KeyboardInterrupt:  # between two notebooks
        pass
    report.write_json(run / "summary.json", summary)
    page = os.path.relpath(report.write(run))
    if records:
        print_table(records, describe, PEAK_LIMIT_MB)
    if not summary["complete"]:
        print(f"\ninterrupted; what was finished is in {page}")
        return 130
    print(f"\n{page}")
    return int(any(record["status"] != "ok" for record in records))


if __name__ == "__main__":
    sys.exit(main())
