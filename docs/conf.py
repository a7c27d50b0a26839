"""How Sphinx makes the site of these pages: ``make docs``."""

import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "src"))

import lockstep  # noqa: E402

project = "Lockstep"
copyright = "the Lockstep developers"
version = release = lockstep.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinxcontrib.programoutput",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"Lockstep {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
copybutton_exclude = ".linenos, .gp, .go"

# Anchors as the repository's web view makes them, so that one link is right in both.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# Docstrings name code by one backtick: a link where the name is on the site, else code.
default_role = "py:obj"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Help pages are made by the commands themselves, with the Python that makes the site.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
os.environ["PYTHONPATH"] = f"{HERE.parent / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
os.environ["COLUMNS"] = "100"

#: Pages of the repository outside of this folder, which the site has, too.
OUTSIDE = {"SECURITY.md": "security.md", "benchmarks/README.md": "benchmarks.md"}


def _inside(app: object, page: str, source: list[str]) -> None:
    """Links to pages outside of this folder lead to those of the site that include them."""
    for outside, here in OUTSIDE.items():
        source[0] = re.sub(rf"\]\((?:\.\./)+{re.escape(outside)}", f"](/{here}", source[0])


def _no_types(app: object, what: str, name: str, documented: object, options: object, lines: list[str]) -> None:
    """Put an empty comment first: else napoleon takes the words before a colon for the type of an attribute."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]


def _leave_out_of_search(app: object, env: object) -> None:
    """The search finds pages for developers by their titles only: else they come before the pages for users."""
    for page in env.metadata:
        if page.startswith(("decisions/", "notebook")) or page in ("house", "releasing", "decisions"):
            env.metadata[page]["nosearch"] = True


def setup(app: object) -> None:
    """Called by Sphinx."""
    app.connect("env-updated", _leave_out_of_search)
    app.connect("source-read", _inside)
    app.connect("autodoc-process-docstring", _no_types, priority=400)  # before napoleon, which has 500
