"""Figures of matplotlib, which is loaded only when one is drawn, and tables beside them, as harmless files.

Names and values in them are whatever a script says, or who writes its files.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import SettingError
from lockstep.formatting import acts, harmless

#: What begins a formula in a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches, without a window and outside of pyplot's own list, so that nothing is to be closed.

    Raises:
        SettingError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SettingError("pictures need matplotlib: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_svg(figure: Any, path: Path, title: str = "") -> None:
    """Write ``figure`` to ``path`` as SVG that any program can read: no XML holds control characters.

    Equal figures are equal files.
    """
    import matplotlib
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a name with two dollars is no formula
        if acts(text.get_text()):
            text.set_text(harmless(text.get_text(), keep="\n"))
    drawn = io.StringIO()
    with matplotlib.rc_context({"text.parse_math": False}):
        figure.savefig(drawn, format="svg", metadata={"Date": None, **({"Title": title} if title else {})})
    path.write_text(harmless(drawn.getvalue(), keep="\n\t"), encoding="utf-8")


def write_table(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write ``rows``, values by the names of their columns, to ``path`` as CSV.

    A spreadsheet computes nothing of it: what begins a formula is quoted.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        write = csv.writer(file).writerow
        write([_cell(name) for name in names])
        for row in rows:
            write([_cell(row.get(name, "")) for name in names])


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value if isinstance(value, int | float | None) else harmless(str(value))
    return harmless(f"'{value}" if value.startswith(_FORMULA) else value)
