"""Draw the pictures of the documentation: of pages about runs, of terminals, of the site and of a notebook.

    .venv/bin/python tests/harness/pictures.py docs/pictures                  all, in about five minutes
    .venv/bin/python tests/harness/pictures.py docs/pictures terminals        or: report, site, notebook

Pages need Chromium, terminals tmux, and the notebook nbconvert; runs need scikit-learn, for the example that is shown.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI, TerminalTheme
from rich.text import Text

import browser
from lockstep.formatting import size

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FAULTS = {"steady": [], "killed": ["--fault", "kill rank 1 at step 60", "--fault", "delay rank 1 by 2 s at step 90"]}
SCREEN_S = 120  #: until a terminal shows what is waited for
#: By the name of the picture: columns, rows, theme, environment.
TERMINALS: dict[str, tuple[int, int, TerminalTheme, Mapping[str, str]]] = {
    "terminal-80-dark.svg": (80, 14, MONOKAI, {}),
    "terminal-80-light.svg": (80, 14, DEFAULT_TERMINAL_THEME, {}),
    "terminal-80-plain.svg": (80, 14, MONOKAI, {"NO_COLOR": "1"}),
    "terminal-200-dark.svg": (200, 14, MONOKAI, {}),
}


def lockstep(*words: str, cwd: Path) -> None:
    """Carry out a command."""
    env = os.environ | {"LOCKSTEP_VIEW": "silent"}
    subprocess.run([sys.executable, "-m", "lockstep", *words], cwd=cwd, env=env, check=True, stdout=sys.stderr)


def report(out: Path, place: Path) -> None:
    """Pages about two runs, light and dark; prints how large the pages are."""
    run = ("run", "--ranks", "2", "--max-restarts", "1", "--save-every", "40 steps")
    for name, faults in FAULTS.items():
        lockstep(*run, *faults, "--run-dir", f"runs/{name}", str(EXAMPLES / "digits.py"), cwd=place)
        lockstep("report", f"runs/{name}", cwd=place)
    lockstep("report", "-o", "both.html", *(f"runs/{name}" for name in FAULTS), cwd=place)
    lockstep("report", "--list", "runs", cwd=place)
    for file in ("runs/killed/report.html", "both.html", "runs/runs.html"):
        page = (place / file).read_bytes()
        print(f"{file}: {size(len(page))}, {size(len(gzip.compress(page)))} packed")
    for file, dark in (("report-light.png", False), ("report-dark.png", True)):
        browser.picture(place / "both.html", out / file, width=1000, height=1290, dark=dark, beside=place)


def terminals(out: Path, place: Path) -> None:
    """A run of two ranks in which a rank is killed, on terminals of several kinds."""
    command = [sys.executable, "-m", "lockstep", "run", "--ranks", "2", "--max-restarts", "1"]
    for number, (file, (columns, rows, theme, env)) in enumerate(TERMINALS.items()):
        words = [*command, "--fault", "kill rank 1 at step 52", "--run-dir", f"terminal-{number}"]
        text = screen([*words, str(EXAMPLES / "digits.py")], columns, rows, env, place, until=r"epoch [6-9]/10")
        (out / file).write_text(drawn(text, columns, theme))


def screen(words: list[str], columns: int, rows: int, env: Mapping[str, str], place: Path, *, until: str) -> str:
    """What a terminal of this size shows, with its colours, once ``until`` is on it."""
    tmux = ["tmux", "-L", f"pictures-{os.getpid()}", "-f", "/dev/null"]
    variables = [f"{name}={value}" for name, value in {"TERM": "tmux-256color", **env}.items()]
    command = shlex.join(["env", *variables, *words])
    start = ["new-session", "-d", "-x", str(columns), "-y", str(rows), "-c", str(place), command]
    subprocess.run([*tmux, *start], check=True)
    try:
        end_s = time.monotonic() + SCREEN_S
        while time.monotonic() < end_s:
            shown = subprocess.run([*tmux, "capture-pane", "-e", "-p"], capture_output=True, text=True, check=True)
            if re.search(until, shown.stdout):
                return shown.stdout
            time.sleep(0.05)
        raise TimeoutError(f"the terminal has not shown {until!r}")
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)


def drawn(text: str, columns: int, theme: TerminalTheme) -> str:
    """``text`` with its escape sequences as SVG, which asks no other host for fonts."""
    console = Console(file=io.StringIO(), record=True, width=columns, force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(text.rstrip("\n")))
    picture = console.export_svg(title="lockstep run", theme=theme)
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")


def site(out: Path, place: Path) -> None:
    """The first page of the documentation, light and dark."""
    _build_site(place)
    for file, dark in (("site-light.png", False), ("site-dark.png", True)):
        browser.picture(place / "site" / "index.html", out / file, width=1200, height=900, dark=dark, beside=place)


def notebook(out: Path, place: Path) -> None:
    """The executed example, as Jupyter writes it as a page."""
    shutil.copy(EXAMPLES / "notebook.ipynb", place)
    subprocess.run([sys.executable, "-m", "nbconvert", "--to", "html", "notebook.ipynb"], cwd=place, check=True)
    browser.picture(place / "notebook.html", out / "notebook.png", width=1000, height=1400, dark=False, beside=place)


def _build_site(place: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", str(ROOT / "docs"), str(place / "site")]
    subprocess.run([*command, "-d", str(place / "doctrees")], check=True)


PARTS: dict[str, Callable[[Path, Path], None]] = {
    "report": report,
    "terminals": terminals,
    "site": site,
    "notebook": notebook,
}


def main(out: Path, parts: list[str]) -> None:
    """Draw the pictures of these parts into ``out``, and say how large all pictures are."""
    for part in parts or PARTS:
        with tempfile.TemporaryDirectory() as place:
            PARTS[part](out, Path(place))
    for file in out.glob("*.png"):
        Image.open(file).convert("RGB").quantize(128).save(file, optimize=True)
    for file in sorted([*out.glob("*.png"), *out.glob("*.svg")]):
        print(f"{file.name}: {size(file.stat().st_size)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
