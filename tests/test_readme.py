"""README figure and numbers are what the code says; both languages have the same parts."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
READMES = ("README.md", "README.zh.md")


def test_figure_and_numbers_are_fresh_and_a_changed_number_is_stale(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import update_readme

    assert update_readme.stale() == []
    for name in READMES:
        text = (ROOT / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("**16**", "**17**"), encoding="utf-8")
    monkeypatch.setattr(update_readme, "ROOT", tmp_path)
    assert update_readme.stale() == list(READMES)


@pytest.mark.parametrize("name", [*READMES, "notebooks/glossary.md", "data/README.md"])
def test_local_links_lead_somewhere(name):
    page = ROOT / name
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", prose)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_both_languages_show_the_same_commands_and_sections():
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in READMES)

    def code(text):
        blocks = re.findall(r"```(?:bash|python)\n(.*?)```", text, re.S)
        return [re.sub(r"\s*#.*", "", line) for block in blocks for line in block.splitlines()]

    assert code(english) == code(chinese)
    assert len(re.findall(r"^## ", english, re.M)) == len(re.findall(r"^## ", chinese, re.M))
