"""The site of the documentation builds without a warning and misses no name and no command; its pages are short."""

import importlib
import re
import subprocess
import sys

import pytest

from doc_blocks import HOUSE, PAGES, blocks_of, environment
from lockstep import Run
from lockstep.cli.main import COMMANDS

MOST_LINES = 250
#: Longer pages, and why.
LONGER = {"docs/failures.md": "benchmarks/failures.py writes what the screen says of each failure"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("furo")
    for package in ("sphinx", "myst_parser", "sphinx_copybutton", "sphinxcontrib.programoutput"):
        pytest.importorskip(package)
    place = tmp_path_factory.mktemp("site")
    # As `make docs`, in a place of its own. Warnings are errors: links without a target, pages in no table of contents.
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(place)]
    done = subprocess.run(command, cwd=HOUSE, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return place


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.together
@pytest.mark.parametrize("room", ["lockstep", "lockstep.testing"])
def test_the_reference_has_each_public_name(site, room):
    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    names = set(importlib.import_module(room).__all__) - {"__version__"}
    missing = {name for name in names if not re.search(rf'id="(module-)?{re.escape(f"{room}.{name}")}"', pages)}
    assert not missing


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.together
def test_the_reference_has_the_help_of_each_command(site):
    page = re.sub(r"<[^>]+>", "", (site / "reference" / "commands.html").read_text())
    for name in COMMANDS:
        assert f"usage: lockstep {name} " in page, name
    assert (site / "searchindex.js").stat().st_size > 100_000


def test_pages_are_short():
    lines = {page.relative_to(HOUSE).as_posix(): len(page.read_text().splitlines()) for page in PAGES}
    assert {page: number for page, number in lines.items() if number > MOST_LINES and page not in LONGER} == {}
    assert all(lines[page] > MOST_LINES for page in LONGER)


def names_in(text):
    """Names of methods of a run and of arguments of `Run` in code of a page."""
    code = " ".join(re.findall(r"`([^`\n]+)`", text))
    methods = set(re.findall(r"\brun\.([a-z_]+)", code))
    return methods, {name for given in re.findall(r"\bRun\(([^`]*?)\)", code) for name in re.findall(r"(\w+)=", given)}


@pytest.mark.parametrize("page", sorted((HOUSE / "docs" / "coming_from").glob("*.md")), ids=lambda page: page.stem)
def test_tables_of_words_name_what_there_is(page):
    methods, arguments = names_in(page.read_text())
    assert {name for name in methods if not hasattr(Run, name)} <= {"device", "kept"}
    assert arguments <= Run.__init__.__annotations__.keys()


def test_a_name_that_is_not_there_is_found():
    assert names_in("`run.modle(net)`, `Run(strategies='ddp', keep=3)`") == ({"modle"}, {"strategies", "keep"})


@pytest.mark.campaign
@pytest.mark.long
def test_the_cells_of_the_page_on_notebooks_run(tmp_path):
    cells = [block.text for block in blocks_of(HOUSE / "docs" / "jupyter.md") if block.file]
    assert len(cells) == 4
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(cells)], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "resumed at step" in done.stdout
