"""The views for a terminal and for a cell of a notebook.

    training   epoch 3/10  ━━━━━━━━━━━━━━━━╸━━━━━━━━━  step 1 240/2 000
    4 ranks | 2 140 samples/s | loss 0.4321 | 12 m 05 s left | saved at step 1 200

Where the terminal is too narrow, the end of the second line is left out.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TextIO, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.report.status import Status

Shown = TypeVar("Shown", contravariant=True)
_COLUMNS = 100  # of a notebook
_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:normal;margin:0">{code}</pre>'
_ORDER = ("ranks", "speed", "loss", "eta", "job", "saved", "late", "unprotected", "generation")


class TerminalView(Generic[Shown]):
    """Some lines at the bottom of a terminal; whatever else is printed goes above them.

    Drawn by the caller's thread, when it calls, at about a millisecond each. While the view is open, what the
    process prints to a standard stream that is a terminal also goes above it.

    Args:
        stream: the terminal.
        env: the environment: what the terminal can do, and the user's choice of colours.
        picture: what is drawn of what is shown.
    """

    def __init__(self, stream: TextIO, env: Mapping[str, str], picture: Callable[[Shown], RenderableType]) -> None:
        self._picture = picture
        self._console = Console(file=stream, force_terminal=True, force_jupyter=False, _environ=env)
        self._live: Live | None = None  # None before the first picture, and after one that was left where it is

    def show(self, status: Shown) -> None:
        """Draw it."""
        if self._live is None:
            # A new one each time: one that is started again would take the line above it for its last picture's.
            self._live = Live(
                console=self._console,
                auto_refresh=False,  # no thread of its own: a display that moves while the run does not would be wrong
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()
            # Live hides the cursor, and a process that is killed could not give it back.
            self._console.show_cursor(True)
        self._live.update(self._picture(status), refresh=True)

    def line(self, text: str) -> None:
        """Print above the picture; colours in ``text`` stay."""
        self._console.print(Text.from_ansi(text.rstrip("\r\n")), soft_wrap=True)

    def close(self) -> None:
        """Leave the picture where it is; the next one is drawn below what is printed until then."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def picture(status: Status, below: Sequence[str] = ()) -> Group:
    """The status in two lines, and those ``below`` under it."""
    words = status.words()
    first = Table.grid(expand=True, padding=(0, 2))
    first.add_column(no_wrap=True, min_width=len("evaluating"))  # the bar stands still when the state changes
    for ratio in (None, 1, None):
        first.add_column(ratio=ratio, no_wrap=True)
    bar = ProgressBar(total=status.steps_total, completed=status.step, pulse=status.steps_total is None)
    first.add_row(Text(words["state"], style="bold"), words["epoch"], bar, words["step"])
    second = " | ".join(words[name] for name in _ORDER if name in words)
    lines = [Text(f" {line}") for line in ("", *below)] if below else []
    return Group(first, Text(second, style="dim", no_wrap=True, overflow="ellipsis"), *lines)


class NotebookView(Generic[Shown]):
    """Draws what is shown in one output of the cell that runs, where each picture takes the place of the one before.

    What is printed stands below it, in the cell's other outputs. A picture takes about two milliseconds; one that is
    equal to the last one is not sent.

    Args:
        stream: the cell's, for lines.
        picture: what is drawn of what is shown.
    """

    def __init__(self, stream: TextIO, picture: Callable[[Shown], RenderableType]) -> None:
        self._stream, self._picture = stream, picture
        self._handle: Any = None  # of the cell's output, once there is one
        self._drawn: dict[str, str] = {}

    def show(self, status: Shown) -> None:
        """Draw it."""
        drawn = _drawn(self._picture(status))
        if drawn != self._drawn:
            self._drawn = drawn
            if self._handle is None:
                from IPython.display import display  # it is there where such a stream is

                self._handle = display(drawn, raw=True, display_id=True)  # type: ignore[no-untyped-call, unused-ignore]
            else:
                self._handle.update(drawn, raw=True)

    def line(self, text: str) -> None:
        """Print below the picture."""
        self._stream.write(text.rstrip("\r\n") + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the last picture in the cell; nothing is sent."""


def _drawn(picture: RenderableType) -> dict[str, str]:
    console = Console(file=io.StringIO(), record=True, width=_COLUMNS, force_jupyter=False, _environ={})
    console.print(picture)
    html = console.export_html(inline_styles=True, clear=False, code_format=_HTML)
    return {"text/html": html, "text/plain": console.export_text().rstrip("\n")}
