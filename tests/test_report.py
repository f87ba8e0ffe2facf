"""report.html from a summary: one page, nothing from the network, everything that a colleague asks for."""

import base64
import copy

import execute_notebook
import pytest
import report
import tiny_notebooks
from bs4 import BeautifulSoup
from command_line import write_json

from lib.workbench import evidence
from lib.workbench import notebook as cells

PNG = base64.b64decode(tiny_notebooks.PNG)
HOSTILE = "</code></td><script>alert(1)</script><img src=x onerror=alert(1)> $x$ `\"'` \x1b[31m\u202e"


def notebook(stem: str, **changes) -> dict:
    about = {"notebook": stem, "title": f"About {stem}", "status": "ok", "seconds": 2.0, "peak_mb": 321.4}
    return about | {"error": None, "figures": [], "results": [], "claims": []} | changes


def result(name: str, value, kind: str = "counted", note: str = "") -> dict:
    return {"name": name, "value": value, "kind": kind, "note": note}


DOT = {"name": "dot", "alt": "A `dot` <small>", "file": "figures/00_dot.png"}
DOT["evidence"] = "modelled · V100 · torch 2.13.0 · 2026-11-29\ncounted · shapes alone"
CLAIMS = ["grouping saves 10 launches <of 16>"]
RESULTS = [
    result("launches_per_copy", 16),
    result("launch_table", [{"strategy": "per_copy", "both": 16}], note="bfloat16"),
    result("host_us_saved", 12.345678, "measured"),
    result("by_device", {"V100": 1234.5, "A100": True}, "modelled", "profile v100"),
    result("modelled_us_saved_v100", "53 µs (3 to 80)", "modelled", "the GPU waits"),
]
MACHINE = {"device": "cpu", "name": "A CPU", "torch": "2.13.0", "python": "3.11.7", "system": "Linux"}
FIRST = notebook("00_first", figures=[DOT], results=RESULTS, claims=CLAIMS)
SUMMARY = {"started": "2026-11-29T14:00:00+00:00", "seconds": 4.0, "complete": True, "peak_limit_mb": 1500}
SUMMARY |= {"machine": MACHINE, "parameters": {"device": "cpu", "quick": False}}
SUMMARY |= {"notebooks": [FIRST, notebook("01_second")]}


@pytest.fixture
def write(tmp_path):
    """Writes the report of a summary; the page as it stands there, and parsed."""
    for kind in ("figures", "notebooks"):
        (tmp_path / kind).mkdir()
    (tmp_path / "figures/00_dot.png").write_bytes(PNG)
    (tmp_path / "notebooks/00_first.html").write_text("executed")

    def write_page(summary: dict) -> tuple[str, BeautifulSoup]:
        write_json(tmp_path / "summary.json", summary)
        report.write(tmp_path)
        html = (tmp_path / "report.html").read_text(encoding="utf-8")
        return html, BeautifulSoup(html, "html.parser").body

    return write_page


def alts(page: BeautifulSoup) -> list[str]:
    return [image["alt"] for image in page("img")]


def test_the_page_stands_alone_and_links_to_what_is_there(write):
    html, page = write(SUMMARY)
    images = [image["src"].partition("base64,")[2] for image in page("img")]
    assert [base64.b64decode(image) for image in images] == [PNG]
    links = [link["href"] for link in page("a")]
    assert links == ["notebooks/00_first.html", "figures/00_dot.png"]  # no network, nothing that is missing
    assert not any(word in html for word in ("http:", "https:", "url(", "<script"))
    assert alts(write(SUMMARY | {"notebooks": []})[1]) == []


def test_numbers_tables_figures_claims_and_what_they_stand_on_are_told(write):
    _, page = write(SUMMARY)
    text = page.get_text()
    rows = [[cell.get_text() for cell in row(["td", "th"])] for row in page("tr")]
    assert alts(page) == ["A `dot` <small>"]
    told = ("A dot <small>", *CLAIMS, "bfloat16", "A CPU", "53\u00a0µs (3 to 80)", "the GPU waits")
    assert [words for words in told if words not in text] == []
    assert text.count("not run") == 2  # two of the headlines
    for row in (["strategy", "both"], ["per_copy", "16"], ["host us saved", "12.3", "measured", ""]):
        assert row in rows
    assert ["V100", "1,234"] in rows and ["A100", "yes"] in rows
    assert ["00_first", "ok", "2.0 s", "321 MB"] in rows
    assert text.index("Launches") < text.index("About 00_first") < text.index("About 01_second")
    rests = text[text.index("What rests on what") :]
    told = ("A CPU · torch 2.13.0 · 2026-11-29: host us saved", "2026-11-29: dot", "counted")
    assert [words for words in told if words not in rests] == []
    assert "recorded" not in rests  # nothing was


def test_the_mechanism_stands_above_the_notebooks_and_failures_come_first(write):
    summary = copy.deepcopy(SUMMARY) | {"complete": False}
    error = {"cell": "In [3]", "heading": "The claim", "line": "assert x", "message": "AssertionError: x > 1"}
    summary["notebooks"][0]["figures"][0]["name"] = report.FIRST_FIGURE
    summary["notebooks"][1] |= {"status": "failed", "error": error}
    _, page = write(summary)
    text = page.get_text()
    said = "About 01_second failed in In [3], under The claim: AssertionError: x > 1"
    assert text.index(said) < text.index("not run") and "stopped before its end" in text
    assert len(alts(page)) == 1 and text.index("A dot <small>") < text.index("Launches")


def test_a_name_is_text_wherever_it_comes_from(write):
    summary = copy.deepcopy(SUMMARY) | {"parameters": {"quick": True, HOSTILE: HOSTILE}}
    summary["machine"] |= {"name": HOSTILE, "system": HOSTILE}
    first, second = summary["notebooks"]
    first |= {"title": HOSTILE, "claims": [HOSTILE], "status": HOSTILE}
    first["figures"][0] |= {"alt": HOSTILE, "evidence": f"modelled · {HOSTILE}"}
    first["results"] += [result(HOSTILE, HOSTILE, HOSTILE, HOSTILE), result("a", [{HOSTILE: HOSTILE}])]
    second |= {"notebook": HOSTILE, "error": {"cell": HOSTILE, "heading": HOSTILE, "message": HOSTILE}}
    html, page = write(summary)
    assert html.count("<img ") == 1 and "<script" not in html and "default-src 'none'" in html
    assert not [char for char in html if not char.isprintable() and char != "\n"]
    assert alts(page) == [HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")]
    assert page.get_text().count("<script>alert(1)</script>") > 10


def test_scripts_and_notebooks_agree_on_how_results_are_handed_over(capsys):
    assert execute_notebook.RESULT_MIME == evidence.RESULT_MIME and set(report.KINDS) == set(evidence.KINDS)
    cells.start().claim("it holds", True)
    assert capsys.readouterr().out == f"{execute_notebook.CLAIM_MARK}it holds\n"
