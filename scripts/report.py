"""report.html of a run: one page, no network, for a colleague who has not seen the notebooks.

`python scripts/report.py runs/<run>` writes it again from summary.json and the figures.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from html import escape as escape_html
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from command_line import plain, write_whole

# The numbers at the top: the published name and what the number is.
HEADLINES = (
    ("launches_per_copy", "launches to fill the buffers of both replays, one copy a field"),
    ("launches_grouped_foreach_dma", "launches for the same bytes, grouped, the large field by itself"),
    ("modelled_us_saved_v100", "sooner done, a step on a V100"),
    ("modelled_us_saved_ahead_v100", "sooner done, the same step"),
)
FIRST_FIGURE = "mechanism"  # at the top, too
LAUNCH_TABLE = "launch_table"
QUESTION = "Why do a few hundred bytes of copying cost tens of microseconds a step?"
ANSWER = """Before a CUDA graph is replayed, the step's inputs are copied into its static buffers, twice in a
step of speculative decoding. One `copy_()` a field is one launch a field, whatever its bytes. Grouped by
dtype, the same buffers hold the same bits after fewer launches. What that is worth depends on who waits:"""
KINDS = {
    "counted": "by PyTorch's rules, from shapes and dtypes: a prediction until a profiler has seen it",
    "measured": "timed in this run, on this machine",
    "recorded": "read from a file, measured on the device it names",
    "modelled": "from the device model, with the profile and the error it names",
}
STYLE = Path(__file__).with_name("report.css")
# Whatever text may have got into the page: it loads nothing and runs nothing.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write(run: Path) -> Path:
    """Write report.html beside the run's summary.json; return its path."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    page = run / "report.html"
    write_whole(page, _page(summary, run))
    return page


def _page(summary: dict[str, Any], run: Path) -> str:
    notebooks = summary["notebooks"]
    results = {result["name"]: result for notebook in notebooks for result in notebook["results"]}
    machine = summary["machine"]
    on = f"{machine['name']} · torch {machine['torch']} · {summary['started'][:10]}"
    quick = " · quick run: a check rather than a measurement" if summary["parameters"]["quick"] else ""
    parts = [
        f'<p class="soft">Replay Copy Workbench · {escape(on)}{quick}</p>',
        f"<h1>{QUESTION}</h1><p>{escape(ANSWER)}</p>",
        _failures(summary),
        '<div class="numbers">' + "".join(_headline(results, *headline) for headline in HEADLINES) + "</div>",
    ]
    figures = [figure for notebook in notebooks for figure in notebook["figures"]]
    parts += [_figure(figure, run) for figure in figures if figure["name"] == FIRST_FIGURE][:1]
    if LAUNCH_TABLE in results:
        parts += ["<h2>Launches</h2>", _result(results[LAUNCH_TABLE], with_name=False)]
    parts += ["<h2>What the notebooks show</h2>"] + [_notebook(notebook, run) for notebook in notebooks]
    parts += ["<h2>What rests on what</h2>", _evidence(notebooks, on)]
    parts += ["<h2>The run</h2>", _run_table(summary)]
    style = STYLE.read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>Replay Copy Workbench: {escape(summary['started'][:10])}</title>"
        f"<style>{style}</style></head>\n"
        "<body><main>\n" + "\n".join(filter(None, parts)) + "\n</main></body></html>\n"
    )


def _headline(results: dict[str, Any], name: str, text: str) -> str:
    if name not in results:
        return f'<div class="number"><b class="none">not run</b><p>{text}</p></div>'
    result = results[name]
    note = f'<br><span class="soft">{escape(result["note"])}</span>' if result["note"] else ""
    number, bracket, span = _shown(result["value"]).partition(" (")
    span = f"<small>{bracket}{span}</small>" if span else ""
    number = number.replace(" ", "&nbsp;")  # not without its unit
    number = f"<b>{number}{span}</b><p>{text}{note}</p>"
    return f'<div class="number">{number}<span class="kind">{escape(result["kind"])}</span></div>'


def _failures(summary: dict[str, Any]) -> str:
    lines = [
        f"<b>{escape(n['title'])}</b> {escape(n['status'])} in {escape(n['error']['cell'])}"
        f"{', under ' + escape(n['error']['heading']) if n['error']['heading'] else ''}: "
        f"<code>{escape(n['error']['message'])}</code>"
        for n in summary["notebooks"]
        if n["error"]
    ]
    if not summary["complete"]:
        lines.append("The run was stopped before its end: this page shows what was finished.")
    return "".join(f'<p class="failed">{line}</p>' for line in lines)


def _notebook(notebook: dict[str, Any], run: Path) -> str:
    stem = Path(notebook["notebook"]).name
    links = [
        f'<a href="notebooks/{quote(stem)}.{kind}">{text}</a>'
        for kind, text in (("html", "read it, executed"), ("ipynb", "as a notebook"))
        if (run / "notebooks" / f"{stem}.{kind}").exists()
    ]
    heading = f'<h3 id="{escape_html(plain(stem))}">{escape(notebook["title"])}</h3>'
    parts = [f'{heading}<p class="soft">{" · ".join(links)}</p>']
    parts += [_figure(figure, run) for figure in notebook["figures"]]
    tables = [
        r for r in notebook["results"] if isinstance(r["value"], list | dict) and r["name"] != LAUNCH_TABLE
    ]
    numbers = [r for r in notebook["results"] if not isinstance(r["value"], list | dict)]
    if numbers:
        rows = [
            {"result": _words(r["name"]), "value": r["value"], "kind": r["kind"], "note": r["note"]}
            for r in numbers
        ]
        parts.append(_table(rows))
    parts += [_result(table) for table in tables]
    if notebook["claims"]:
        parts.append('<p class="soft">Claims that this run checked</p>')
        parts.append(
            '<ul class="claims">' + "".join(f"<li>{escape(c)}</li>" for c in notebook["claims"]) + "</ul>"
        )
    return "\n".join(parts)


def _figure(figure: dict[str, str], run: Path) -> str:
    alt = figure["alt"] or _words(figure["name"])
    png = _picture(run, figure["file"])
    if png is None:
        return f'<p class="failed">No picture in {escape(figure["file"])}: {escape(alt)}</p>'
    evidence = "".join(f"<br><small>{escape(line)}</small>" for line in figure["evidence"].splitlines())
    image = f'<img alt="{escape_html(plain(alt))}" src="data:image/png;base64,{png}">'
    link = f'<a href="{quote(figure["file"])}" title="full size">{image}</a>'
    return f"<figure>{link}<figcaption>{escape(alt)}{evidence}</figcaption></figure>"


def _picture(run: Path, file: str) -> str | None:
    """A figure's PNG in base64; None for one that is not in the run's own folder of figures, or not a PNG."""
    path = run / "figures" / PurePosixPath(file).name
    if file != f"figures/{path.name}" or path.is_symlink() or not path.is_file():
        return None
    png = path.read_bytes()
    return base64.b64encode(png).decode() if png.startswith(b"\x89PNG") else None


def _result(result: dict[str, Any], with_name: bool = True) -> str:
    name = f"{escape(_words(result['name']))} " if with_name else ""
    note = escape(result["note"])
    caption = f'<p class="soft">{name}<span class="kind">{escape(result["kind"])}</span> {note}</p>'
    value = result["value"]
    rows = (
        [{"for": name, "value": number} for name, number in value.items()]
        if isinstance(value, dict)
        else value
    )
    return caption + _table(rows)


def _evidence(notebooks: list[dict[str, Any]], on: str) -> str:
    """Each kind of number: what it is, on what it stands here, and the figures and results that show it."""
    uses: dict[str, dict[str, list[str]]] = {}
    for notebook in notebooks:
        for figure in notebook["figures"]:
            for line in figure["evidence"].splitlines():
                kind, _, where = line.partition(" · ")
                if kind in KINDS:
                    uses.setdefault(kind, {}).setdefault(where, []).append(_words(figure["name"]))
        for result in notebook["results"]:
            where = on if result["kind"] == "measured" else result["note"]
            uses.setdefault(result["kind"], {}).setdefault(where, []).append(_words(result["name"]))
    parts = []
    for kind in filter(uses.get, KINDS):
        parts.append(f"<dt>{kind}</dt><dd>{KINDS[kind]}</dd>")
        if kind == "counted":  # no device behind it
            uses[kind] = {"": list(chain.from_iterable(uses[kind].values()))}
        for where, names in sorted(uses[kind].items()):
            shown = escape(", ".join(dict.fromkeys(names)))
            parts.append(f'<dd class="soft">{escape(where) + ": " if where else ""}{shown}</dd>')
    return f"<dl>{''.join(parts)}</dl>" if parts else '<p class="soft">No results yet.</p>'


def _run_table(summary: dict[str, Any]) -> str:
    rows = [
        {
            "notebook": n["notebook"],
            "result": n["status"],
            "time": f"{n['seconds']:.1f} s",
            "peak memory": f"{n['peak_mb']:.0f} MB",
        }
        for n in summary["notebooks"]
    ]
    machine = summary["machine"]
    parameters = ", ".join(f"{name}={value}" for name, value in summary["parameters"].items())
    about = (
        f"{machine['name']}, {machine['system']}, Python {machine['python']}, torch {machine['torch']}; "
        f"{summary['started']}, {summary['seconds']:.0f} s in all; parameters {parameters}. "
        f"Peak memory: resident size of a notebook's largest process; limit {summary['peak_limit_mb']} MB."
    )
    return _table(rows) + f'<p class="soft">{escape(about)}</p>'


def _table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    is_number = {
        name: all(isinstance(row.get(name, 0), int | float) for row in rows) and bool(rows)
        for name in columns
    }
    right = {name: ' class="n"' if is_number[name] else "" for name in columns}
    head = "".join(f"<th{right[name]}>{escape(_words(name))}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td{right[name]}>{_shown(row.get(name, ''))}</td>" for name in columns) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _shown(value: Any) -> str:
    """A cell's HTML: floats to three digits, thousands apart, bools as words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        value = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    elif isinstance(value, int):
        value = f"{value:,}"
    shown = escape(str(value))
    return f'<span class="bad">{shown}</span>' if shown in ("failed", "died", "interrupted") else shown


def _words(name: object) -> str:
    return str(name).replace("_", " ")


def escape(text: object) -> str:
    """HTML of a text in which `this` is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape_html(plain(text)))


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
