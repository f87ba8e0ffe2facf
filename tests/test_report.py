"""report.html from a summary: one page, nothing from the network, everything that a colleague asks for."""

import base64
import copy

import pytest
import report
import tiny_notebooks
from bs4 import BeautifulSoup
from command_line import write_json

from lib.workbench import evidence

PNG = base64.b64decode(tiny_notebooks.PNG)
HOSTILE = "</code></td><script>alert(1)</script><img src=x onerror=alert(1)> $x$ `\"'` \x1b[31m\u202e"


def result(name: str, value, kind: str = "counted", note: str = "") -> dict:
    return {"name": name, "value": value, "kind": kind, "note": note}


DOT = {"name": "dot", "alt": "A `dot` <small>", "file": "figures/00_dot.png"}
DOT["evidence"] = "modelled · V100 · torch 2.13.0 · 2026-11-29\ncounted · shapes alone"
MECHANISM = DOT | {"name": report.FIRST_FIGURE, "alt": "The mechanism"}
RESULTS = [
    result("launches_per_copy", 16),
    result("launch_table", [{"strategy": "per_copy", "both": 16}], note="bfloat16"),
    result("host_us_saved", 12.345678, "measured"),
    result("by_device", {"V100": 1234.5, "A100": True}, "modelled", "profile v100"),
    result("modelled_us_saved_v100", "53 µs (3 to 80)", "modelled", "the GPU waits"),
]
FIRST = {"notebook": "00_first", "title": "The first", "status": "ok", "seconds": 2.0, "peak_mb": 321.4}
FIRST |= {"figures": [DOT, MECHANISM], "results": RESULTS, "claims": ["<16> launches go"], "error": None}
SECOND = FIRST | {"notebook": "01_second", "title": "The second", "status": "failed", "claims": []}
SECOND |= {"figures": [], "results": []}
SECOND["error"] = {"cell": "In [3]", "heading": "The claim", "line": "assert x", "message": "Error: x > 1"}
SUMMARY = {"started": "2026-11-29T14:00:00+00:00", "seconds": 4.0, "complete": False, "peak_limit_mb": 1500}
SUMMARY["machine"] = {"name": "A CPU", "torch": "2.13.0", "python": "3.11.7", "system": "Linux"}
SUMMARY |= {"parameters": {"quick": False}, "notebooks": [FIRST, SECOND]}


@pytest.fixture
def write(tmp_path):
    """Writes the report of a summary; the page as it stands there, and parsed."""
    for kind in ("figures", "notebooks"):
        (tmp_path / kind).mkdir()
    for file in ("figures/00_dot.png", "elsewhere.png", "notebooks/00_first.html"):
        (tmp_path / file).write_bytes(PNG)

    def write_page(summary: dict) -> tuple[str, BeautifulSoup]:
        write_json(tmp_path / "summary.json", summary)
        report.write(tmp_path)
        html = (tmp_path / "report.html").read_text(encoding="utf-8")
        return html, BeautifulSoup(html, "html.parser").body

    return write_page


def test_the_page_stands_alone_and_links_to_what_is_there(write):
    html, page = write(SUMMARY)
    images = [(image["alt"], image["src"].partition("base64,")[2]) for image in page("img")]
    assert images == [(alt, tiny_notebooks.PNG) for alt in ("The mechanism", "A `dot` <small>")]
    links = [link["href"] for link in page("a")]  # no network, nothing that is missing
    assert links == ["figures/00_dot.png", "notebooks/00_first.html", "figures/00_dot.png"]
    assert not any(word in html for word in ("http:", "https:", "url(", "<script"))
    assert write(SUMMARY | {"notebooks": []})[1]("img") == []


def test_numbers_tables_claims_failures_and_what_they_stand_on_are_told_in_order(write):
    _, page = write(SUMMARY)
    text = page.get_text()
    told = ["The second failed in In [3], under The claim: Error: x > 1", "stopped before its end", "16"]
    told += ["53\u00a0µs (3 to 80)", "the GPU waits", "not run", "The mechanism", "Launches", "bfloat16"]
    told += ["What the notebooks show", "The first", "A dot <small>", "<16> launches go", "The second"]
    told += ["What rests on what", "A CPU · torch 2.13.0 · 2026-11-29: host us saved", "2026-11-29: dot"]
    for words in told:
        assert words in text
        text = text.partition(words)[2]
    assert page.get_text().count("not run") == 2  # of the headlines
    rows = [[cell.get_text() for cell in row(["td", "th"])] for row in page("tr")]
    assert ["strategy", "both"] in rows and ["host us saved", "12.3", "measured", ""] in rows
    assert ["V100", "1,234"] in rows and ["A100", "yes"] in rows
    assert ["00_first", "ok", "2.0 s", "321 MB"] in rows
    kinds = [kind.get_text() for kind in page("dt")]
    assert kinds == ["counted", "measured", "modelled"] and {*report.KINDS} == {*evidence.KINDS}


def test_a_name_is_text_wherever_it_comes_from_and_a_figure_is_of_the_run(write):
    summary = copy.deepcopy(SUMMARY) | {"parameters": {"quick": True, HOSTILE: HOSTILE}}
    summary["machine"] |= {"name": HOSTILE, "system": HOSTILE}
    first, second = summary["notebooks"]
    first |= {"title": HOSTILE, "claims": [HOSTILE], "status": HOSTILE}
    first["figures"][0] |= {"alt": HOSTILE, "evidence": f"modelled · {HOSTILE}"}
    first["figures"][1] |= {"file": "figures/../elsewhere.png"}
    first["results"] += [result(HOSTILE, HOSTILE, HOSTILE, HOSTILE), result("a", [{HOSTILE: HOSTILE}])]
    second |= {"notebook": HOSTILE, "error": {"cell": HOSTILE, "heading": HOSTILE, "message": HOSTILE}}
    html, page = write(summary)
    assert html.count("<img ") == 1 and "<script" not in html and "default-src 'none'" in html
    assert not [char for char in html if not char.isprintable() and char != "\n"]
    assert page.img["alt"] == HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert page.get_text().count("<script>alert(1)</script>") > 10
