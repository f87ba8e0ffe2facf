"""Executes the numbered notebooks and leaves a report; behind run_all.sh."""

from __future__ import annotations

import argparse
import base64
import datetime
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from command_line import (
    ROOT,
    OneLineParser,
    parse_value,
    plain,
    resolve_paths,
    run_here,
    run_main,
    write_json,
    write_whole,
)

MACHINE = """
import json, platform, sys, torch
from lib.workbench.evidence import choose_device, device_name
device = choose_device(sys.argv[1])
print(json.dumps({"device": device, "name": device_name(device), "torch": torch.__version__,
                  "python": platform.python_version(), "system": platform.platform()}))
"""
FOLDED = """{% extends 'lab/index.html.j2' %}
{% block input_group %}
{%- if "hide-input" in cell.metadata.get("tags", []) -%}
<details><summary>code</summary>{{ super() }}</details>
{%- else -%}{{ super() }}{%- endif -%}
{% endblock %}
{% block html_head %}
{{ super() }}
<style>
.jp-InputArea-editor .highlight pre { white-space: pre-wrap; }
.jp-OutputArea-output pre { word-break: normal; overflow-wrap: anywhere; }
</style>
{% endblock %}"""


def make_parser() -> argparse.ArgumentParser:
    about = "Execute the notebooks into runs/<UTC time>/; leave figures, summary.json and report.html there."
    parser = OneLineParser(prog="run_all.sh", description=about, allow_abbrev=False)
    add, repeated = parser.add_argument, {"action": "append", "default": []}
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add(
        "--quick",
        action="store_true",
        help="fewer samples, two notebooks at a time: a check",
    )
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


def parse_parameters(options: list[list[str]], known: set[str], parser: OneLineParser) -> dict[str, Any]:
    """The values of -p; a relative path among them counts from where the caller stands."""
    values = {}
    for name, text in options:
        if name not in known:
            parser.error(f"-p {name}: no such parameter; these notebooks declare {', '.join(sorted(known))}")
        try:
            values[name] = parse_value(text)
        except ValueError as error:
            parser.error(f"-p {name}: {error}")
    return resolve_paths(values, Path.cwd())


def choose_machine(device: str, parser: OneLineParser) -> dict[str, str]:
    """What the run stands on, asked in a process of its own: this one stays without torch."""
    command = [sys.executable, "-c", MACHINE, device]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace")
    if asked.returncode:
        said = [f"status {asked.returncode}", *asked.stderr.strip().splitlines()][-1]
        if said.startswith("ValueError: device"):
            parser.error(f"--{said.removeprefix('ValueError: ')}")
        parser.error(f"torch cannot be used here: {said}")
    return json.loads(asked.stdout)


def make_run_folder(output: Path | None, started: datetime.datetime, parser: OneLineParser) -> Path:
    """A folder with a folder notebooks in it, for this run alone."""
    run = (output or ROOT / "runs" / started.strftime("%Y-%m-%dT%H-%M-%SZ")).absolute()
    try:
        run.mkdir(parents=True, exist_ok=True)
        if any(run.iterdir()):
            parser.error(f"--output: expected a new or empty folder, {run} is not")
        (run / "notebooks").mkdir()
    except OSError as error:
        parser.error(f"--output: {error}")
    return run


def keep_files(record: dict[str, Any], source: Path, run: Path, stems: set[str]) -> None:
    """Write the notebook's figures as PNG and its HTML; in the record, a figure's file replaces its bytes.

    stems: of the notebooks of this run, to whose pages links may lead.
    """
    from nbconvert import HTMLExporter

    executed = run / "notebooks" / source.name
    (run / "figures").mkdir(exist_ok=True)
    for figure in record["figures"]:
        figure["file"] = f"figures/{record['notebook'][:2]}_{figure['name']}.png"
        write_whole(run / figure["file"], base64.b64decode(figure.pop("png")))
    html, _ = HTMLExporter(raw_template=FOLDED).from_filename(str(executed))
    write_whole(executed.with_suffix(".html"), lead_links(html, source, executed.parent, stems))


def lead_links(html: str, source: Path, folder: Path, stems: set[str]) -> str:
    """Links of a notebook, seen from its page in `folder`: to other pages there, else to the sources."""

    def lead(match: re.Match) -> str:
        path, sharp, anchor = match[1].partition("#")
        target = source.parent / unquote(path)
        if not target.is_file():
            return match[0]
        if target.stem in {*stems, "glossary"}:
            target = folder / f"{target.stem}.html"
        return f'href="{quote(os.path.relpath(target, folder))}{sharp}{anchor}"'

    return re.sub(r'href="([^":#]+(?:#[^"]*)?)"', lead, html)


def write_glossary(source: Path, page: Path) -> None:
    """The glossary as a page, with the anchors that links to the Markdown file have."""
    import nbformat
    from nbconvert import HTMLExporter

    text = nbformat.v4.new_markdown_cell(source.read_text(encoding="utf-8"))
    notebook = nbformat.v4.new_notebook(cells=[text])
    html, _ = HTMLExporter().from_notebook_node(notebook, {"metadata": {"name": "Glossary"}})

    def anchor(match: re.Match) -> str:
        return match[1] + re.sub(r"[^\w-]", "", match[2].lower())

    write_whole(page, re.sub(r'(<h\d id=")([^"]*)', anchor, html))


def print_table(records: list[dict[str, Any]], limit_mb: int) -> None:
    from execute_notebook import describe

    width = max(len(record["notebook"]) for record in records)
    print(f"\n{'notebook':<{width}}  {'result':<11}     time  peak memory")
    for record in records:
        time_and_memory = f"{record['seconds']:6.1f} s {record['peak_mb']:9.0f} MB"
        over = f", over the limit of {limit_mb} MB" if record["peak_mb"] > limit_mb else ""
        print(f"{record['notebook']:<{width}}  {record['status']:<11} {time_and_memory}{over}")
        if record["error"]:
            print(f"{'':<{width}}  {describe(record['error'])}")


def run_all(notebooks: list[Path], summary: dict[str, Any], run: Path) -> str:
    """Execute the notebooks; what is done so far lies in the run's folder at any time.

    A quick run, a check rather than a measurement, executes two at a time. While one is written as HTML
    here, the next one's kernel starts.

    Returns "", or why the rest is not done: "interrupted", or which file could not be written.
    """
    import report
    from execute_notebook import execute
    from tqdm import tqdm

    sources = {source.stem: source for source in notebooks}
    tasks = [(source, run / "notebooks" / source.name, summary["parameters"]) for source in notebooks]
    clock = time.monotonic()

    def save() -> None:
        summary["notebooks"].sort(key=lambda record: record["notebook"])
        summary["complete"] = len(summary["notebooks"]) == len(notebooks)
        summary["seconds"] = round(time.monotonic() - clock, 1)
        write_json(run / "summary.json", summary)
        report.write(run)

    def done(record: dict[str, Any]) -> None:
        keep_files(record, sources[record["notebook"]], run, set(sources))
        summary["notebooks"].append(record)
        save()
        bar.set_postfix_str(f"{record['notebook']} {record['status']}")
        bar.update()

    bar = tqdm(total=len(notebooks), unit="notebook")
    why = ""
    try:
        if (glossary := notebooks[0].with_name("glossary.md")).exists():
            write_glossary(glossary, run / "notebooks" / "glossary.html")
        save()
        run_here(execute, tasks, 2 if summary["parameters"]["quick"] else 1, done)
    except KeyboardInterrupt:
        why = "interrupted"
    except (OSError, BrokenProcessPool) as error:  # a full disk; a process that was killed
        why = f"stopped: {type(error).__name__}: {error}"
    with suppress(OSError):  # a full disk, or nobody who reads what is said
        save()
        bar.close()
    return why


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    from execute_notebook import PEAK_LIMIT_MB, declared_parameters  # only now: --help needs no environment

    notebooks = choose_notebooks(options.notebooks.absolute(), options.only, parser)
    try:
        known = set().union(*map(declared_parameters, notebooks))
    except ValueError as error:
        parser.error(str(error))
    extra = parse_parameters(options.parameters, known, parser)
    machine = choose_machine(options.device, parser)
    started = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    run = make_run_folder(options.output, started, parser)

    summary: dict[str, Any] = {"started": started.isoformat(), "seconds": 0.0, "complete": False}
    summary |= {"machine": machine, "peak_limit_mb": PEAK_LIMIT_MB, "notebooks": []}
    summary["parameters"] = {"device": machine["device"], "quick": options.quick} | extra
    about = f"{plain(machine['name'])}, torch {machine['torch']}, into {plain(run)}"
    print(f"{len(notebooks)} notebooks on {about}", flush=True)

    why = run_all(notebooks, summary, run)
    if summary["notebooks"]:
        print_table(summary["notebooks"], PEAK_LIMIT_MB)
    page = plain(os.path.relpath(run / "report.html"))
    print(f"\n{plain(why)}; what was finished is in {page}" if why else f"\n{page}")
    if why == "interrupted":
        return 130
    return int(bool(why) or any(record["error"] for record in summary["notebooks"]))


if __name__ == "__main__":
    run_main(main)
