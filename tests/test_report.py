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
RESULTS = [
    result("launches_per_copy", 16),
    result("launch_table", [{"strategy": "per_copy", "both": 16}], note="bfloat16"),
    result("host_us_saved", 12.345678, "measured"),
    result("by_device", {"V100": 1234.5, "A100": True}, "modelled", "profile v100"),
    result("modelled_us_saved_v100", "53 µs (3 to 80)", "modelled", "the GPU waits"),
]
CLAIMS = ["grouping saves 10 launches <of 16>"]
SUMMARY = {
    "started": "2026-11-29T14:00:00+00:00",
    "seconds": 4.0,
    "complete": True,
    "machine": {"device": "cpu", "name": "A CPU", "torch": "2.13.0", "python": "3.11.7", "system": "Linux"},
    "parameters": {"device": "cpu", "quick": False},
    "peak_limit_mb": 1500,
    "notebooks": [
        notebook("00_first", figures=[DOT], results=RESULTS, claims=CLAIMS),
        notebook("01_second"),
    ],
}


class Page:
    """What the page refers to, its images' alt texts, its table rows and its text."""

    def __init__(self, html: str) -> None:
        self.html, page = html, BeautifulSoup(html, "html.parser")
        self.references = [tag.get("href") or tag["src"] for tag in page(["a", "img"])]
        self.alts = [image["alt"] for image in page("img")]
        self.rows = [[cell.get_text() for cell in row(["td", "th"])] for row in page("tr")]
        self.text = page.body.get_text()


@pytest.fixture
def write(tmp_path):
    def write_page(summary: dict) -> Page:
        for kind in ("figures", "notebooks"):
            (tmp_path / kind).mkdir(exist_ok=True)
        (tmp_path / "figures/00_dot.png").write_bytes(PNG)
        (tmp_path / "notebooks/00_first.html").write_text("executed")
        write_json(tmp_path / "summary.json", summary)
        report.write(tmp_path)
        return Page((tmp_path / "report.html").read_text(encoding="utf-8"))

    return write_page


def test_the_page_stands_alone_and_links_to_what_is_there(write):
    page = write(SUMMARY)
    inlined = [reference for reference in page.references if reference.startswith("data:")]
    assert [base64.b64decode(data.partition("base64,")[2]) for data in inlined] == [PNG]
    links = [reference for reference in page.references if not reference.startswith("data:")]
    assert links == ["notebooks/00_first.html", "figures/00_dot.png"]  # no network, nothing that is missing
    assert not any(word in page.html for word in ("http:", "https:", "url(", "<script"))


def test_numbers_tables_figures_claims_and_what_they_stand_on_are_told(write):
    page = write(SUMMARY)
    assert page.alts == ["A `dot` <small>"]
    for told in ("A dot <small>", *CLAIMS, "bfloat16", "A CPU", "53\u00a0µs (3 to 80)", "the GPU waits"):
        assert told in page.text, told
    assert page.text.count("not run") == 2  # two of the headlines
    assert ["strategy", "both"] in page.rows and ["per_copy", "16"] in page.rows
    assert ["host us saved", "12.3", "measured", ""] in page.rows
    assert ["V100", "1,234"] in page.rows and ["A100", "yes"] in page.rows
    assert ["00_first", "ok", "2.0 s", "321 MB"] in page.rows
    places = [page.text.index(part) for part in ("Launches", "About 00_first", "About 01_second")]
    assert places == sorted(places)
    rests = page.text[page.text.index("What rests on what") :]
    for told in ("A CPU · torch 2.13.0 · 2026-11-29: host us saved", "2026-11-29: dot"):
        assert told in rests, told
    assert "counted" in rests and "recorded" not in rests  # nothing was


def test_the_mechanism_stands_above_the_notebooks(write):
    summary = copy.deepcopy(SUMMARY)
    summary["notebooks"][0]["figures"][0]["name"] = report.FIRST_FIGURE
    page = write(summary)
    assert write(SUMMARY | {"notebooks": []}).alts == []
    assert len(page.alts) == 2 and page.text.index("A dot <small>") < page.text.index("Launches")


def test_failures_come_first(write):
    summary = copy.deepcopy(SUMMARY) | {"complete": False}
    error = {"cell": "In [3]", "heading": "The claim", "line": "assert x", "message": "AssertionError: x > 1"}
    summary["notebooks"][1] |= {"status": "failed", "error": error}
    text = write(summary).text
    said = "About 01_second failed in In [3], under The claim: AssertionError: x > 1"
    assert said in text and text.index(said) < text.index("not run")
    assert "stopped before its end" in text


def test_a_name_is_text_wherever_it_comes_from(write):
    summary = copy.deepcopy(SUMMARY) | {"parameters": {"quick": True, HOSTILE: HOSTILE}}
    summary["machine"] |= {"name": HOSTILE, "system": HOSTILE}
    first, second = summary["notebooks"]
    first |= {"title": HOSTILE, "claims": [HOSTILE], "status": HOSTILE}
    first["figures"][0] |= {"alt": HOSTILE, "evidence": f"modelled · {HOSTILE}"}
    first["results"] += [result(HOSTILE, HOSTILE, HOSTILE, HOSTILE), result("a", [{HOSTILE: HOSTILE}])]
    second |= {"notebook": HOSTILE, "error": {"cell": HOSTILE, "heading": HOSTILE, "message": HOSTILE}}
    page = write(summary)
    assert page.html.count("<img ") == 1 and "<script" not in page.html and "default-src 'none'" in page.html
    assert not [char for char in page.html if not char.isprintable() and char != "\n"]
    assert page.alts == [HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")]
    assert page.text.count("<script>alert(1)</script>") > 10


def test_scripts_and_notebooks_agree_on_how_results_are_handed_over(capsys):
    assert execute_notebook.RESULT_MIME == evidence.RESULT_MIME and set(report.KINDS) == set(evidence.KINDS)
    cells.start().claim("it holds", True)
    assert capsys.readouterr().out == f"{execute_notebook.CLAIM_MARK}it holds\n"
