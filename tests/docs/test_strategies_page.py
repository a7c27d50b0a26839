"""docs/strategies.md says what the code does: each word, and each option with its default."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from lockstep.strategy_kinds import BUILT_IN

PAGE = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("word", BUILT_IN)
def test_each_word_has_a_section_with_its_options(word):
    section = PAGE.split(f"\n## `{word}`\n", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")]
    told = {name: row[1].strip("`") for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    options = BUILT_IN[word].options
    assert told.keys() == {field.name for field in fields(options)}
    for field in fields(options):
        default = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        assert told[field.name] in ("", default), field.name


def test_nothing_is_left_to_be_measured():
    tables = re.findall(r"<!-- measured: (\w+) -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    assert [name for name, _ in tables] == ["ways", "four", "ranks", "memory", "servers"]
    for name, text in tables:
        assert "| `ddp` |" in text, name
