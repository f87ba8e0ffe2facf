"""report.html of a run: one page, no network, for a colleague who has not seen the notebooks.

`python scripts/report.py runs/<run>` writes it again from summary.json and the figures, by report.html.j2.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections import defaultdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2
from command_line import plain, write_whole
from markupsafe import Markup, escape

# The numbers at the top: the published name and what the number is.
HEADLINES = (
    ("launches_per_copy", "launches to fill the buffers of both replays, one copy a field"),
    ("launches_grouped_foreach_dma", "launches for the same bytes, grouped, the large field by itself"),
    ("modelled_us_saved_v100", "sooner done, a step on a V100"),
    ("modelled_us_saved_ahead_v100", "sooner done, the same step"),
)
FIRST_FIGURE = "mechanism"  # at the top of the page
KINDS = {
    "counted": "by PyTorch's rules, from shapes and dtypes: a prediction until a profiler has seen it",
    "measured": "timed in this run, on this machine",
    "recorded": "read from a file, measured on the device it names",
    "modelled": "from the device model, with the profile and the error it names",
}


def write(run: Path) -> None:
    """Write report.html beside the run's summary.json."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    notebooks, machine = summary["notebooks"], summary["machine"]
    results = list(chain.from_iterable(notebook["results"] for notebook in notebooks))
    figures = list(chain.from_iterable(notebook["figures"] for notebook in notebooks))
    on = f"{machine['name']} · torch {machine['torch']} · {summary['started'][:10]}"
    for notebook in notebooks:
        split_results(notebook)
    page = {
        "run": run,
        "on": on,
        "headlines": HEADLINES,
        "first_figure": FIRST_FIGURE,
        "figures": figures,
        "results": {result["name"]: result for result in results},
        "kinds": KINDS,
        "uses": what_rests_on(figures, results, on),
    }
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    jinja = jinja2.Environment(
        loader=loader, autoescape=True, finalize=told, trim_blocks=True, lstrip_blocks=True
    )
    jinja.filters |= {"told": told, "words": words, "columns": columns, "attribute": attribute}
    jinja.filters["png"] = partial(inlined, run)
    write_whole(run / "report.html", jinja.get_template("report.html.j2").render(summary | page))


def split_results(notebook: dict[str, Any]) -> None:
    """Sort a notebook's results into rows of one table of `numbers`, and `tables` of their own."""
    notebook["numbers"], notebook["tables"] = [], []
    for result in notebook["results"]:
        value = result["value"]
        if isinstance(value, dict):
            value = result["value"] = [{"for": name, "value": number} for name, number in value.items()]
        if isinstance(value, list) and all(isinstance(row, dict) for row in value):
            notebook["tables"].append(result)
        else:
            row = {"result": words(result["name"])}
            notebook["numbers"].append(row | {name: result[name] for name in ("value", "kind", "note")})


def what_rests_on(figures: list[dict], results: list[dict], on: str) -> dict[str, dict[str, str]]:
    """For each kind of number, on what it stands here, and the names of figures and results that show it."""
    uses = defaultdict(lambda: defaultdict(dict))
    for figure in figures:
        for line in figure["evidence"].splitlines():
            kind, _, where = line.partition(" · ")
            uses[kind]["" if kind == "counted" else where][words(figure["name"])] = True
    for result in results:
        where = {"measured": on, "counted": ""}.get(result["kind"], result["note"])  # counted: on no device
        uses[result["kind"]][where][words(result["name"])] = True
    return {kind: {where: ", ".join(names) for where, names in uses[kind].items()} for kind in KINDS}


def columns(rows: list[dict[str, Any]]) -> dict[str, Markup]:
    """The columns of a table and the attribute of their cells: numbers stand to the right."""
    names = dict.fromkeys(chain.from_iterable(rows))
    is_number = {name: all(isinstance(row.get(name, 0), int | float) for row in rows) for name in names}
    return {name: Markup(' class="n"' if is_number[name] else "") for name in names}


def inlined(run: Path, file: str) -> Markup | None:
    """A figure of the run as the address of an image; None where it is not there."""
    path = run / "figures" / Path(file).name
    return path.is_file() and Markup(f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}")


def words(name: object) -> str:
    return str(name).replace("_", " ")


def attribute(text: str) -> Markup:
    return escape(plain(text))


def told(value: Any) -> Markup:
    """HTML of a value: floats to three digits, thousands apart, bools as words; `this` in a text is code."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, bool):
        value = "yes" if value else "no"
    elif isinstance(value, float) and abs(value) < 1000:
        value = f"{value:.3g}"
    elif isinstance(value, int | float):
        value = f"{value:,.0f}"
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(plain(value)))))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
