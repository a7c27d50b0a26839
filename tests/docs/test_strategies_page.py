"""The pages of strategies say what the code does: each word, and each option with its default."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from lockstep.strategy_kinds import BUILT_IN

PAGES = Path(__file__).parents[2] / "docs" / "strategies"


@pytest.mark.parametrize("word", BUILT_IN)
def test_each_word_has_a_page_with_its_options(word):
    page = (PAGES / f"{word}.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    told = {name: row[1].strip("`") for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    options = BUILT_IN[word].options
    assert told.keys() == {field.name for field in fields(options)}
    for field in fields(options):
        default = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        assert told[field.name] in ("", default), field.name


def test_nothing_is_left_to_be_measured():
    page = (PAGES / "measured.md").read_text(encoding="utf-8")
    tables = re.findall(r"<!-- measured: (\w+) -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert [name for name, _ in tables] == ["ways", "four", "ranks", "memory", "servers"]
    for name, text in tables:
        assert "| `ddp` |" in text, name
