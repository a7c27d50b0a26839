"""The view for a cell of a notebook: one output of the cell, in which each picture takes the place of the one before.

What is printed are other outputs of the cell.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Generic, TextIO, TypeVar

from rich.console import Console, RenderableType

Shown = TypeVar("Shown", contravariant=True)
_COLUMNS = 100
_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:normal;margin:0">{code}</pre>'


class NotebookView(Generic[Shown]):
    """Draws what is shown in one output of the cell that runs; a picture that is equal to the last one is not sent.

    A picture takes about two milliseconds.

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
