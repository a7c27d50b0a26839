"""Chromium without a window, for pages of HTML: what it makes of them, and pictures of that."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"),
    *("--virtual-time-budget=30000", "--timeout=60000"),
)
#: Sent by a page to the one around it: how far its elements reach to the right.
_PROBE = """<script>setTimeout(() => parent.postMessage(JSON.stringify([
innerWidth, document.documentElement.scrollWidth,
[...document.querySelectorAll("main *, header *")].filter((one) => one.getBoundingClientRect().right > innerWidth + 1 &&
!one.closest(".wide, pre, .plotly")).map((one) => one.outerHTML.slice(0, 80))]), "*"), 10000)</script></body>"""


def document(address: str) -> tuple[str, list[str]]:
    """What the document at ``address`` has become once its scripts are done, and what the console says."""
    done = _chromium("--dump-dom", "--window-size=1200,1000", address)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def too_wide(page: Path, width: int, beside: Path) -> str:
    """``[width, width that the page takes, elements that reach over it]`` as JSON, at ``width``.

    A window is at least 500 pixels wide, so the page is shown in a frame, from a copy ``beside`` that tells.
    """
    text = page.read_text(encoding="utf-8")
    copy = beside / "probed.html"
    copy.write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text).replace("</body>", _PROBE))
    frame = _framed(copy, width, 1000, beside)
    told, _ = document(frame.as_uri())
    found = re.search(r"<title>(.*?)</title>", told)
    assert found is not None, told[-500:]
    return found[1]


def picture(page: Path, out: Path, *, width: int, height: int, dark: bool, beside: Path) -> None:
    """Write a PNG of the top of ``page`` to ``out``."""
    frame = _framed(page, width, height, beside)
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    _chromium(scheme, f"--window-size={max(width, 500)},{height}", f"--screenshot={out}", frame.as_uri())


def _framed(page: Path, width: int, height: int, beside: Path) -> Path:
    frame = beside / "frame.html"
    frame.write_text(
        "<title></title><body style='margin:0'><script>onmessage = (told) => document.title = told.data</script>"
        f"<iframe src='{page.absolute().as_uri()}' style='border:0;width:{width}px;height:{height}px'></iframe>"
    )
    return frame


def _chromium(*words: str) -> subprocess.CompletedProcess[str]:
    assert PROGRAM is not None, "no Chromium is installed"
    return subprocess.run([PROGRAM, *_OPTIONS, *words], capture_output=True, text=True, timeout=110, check=True)
