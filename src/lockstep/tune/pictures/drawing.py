"""What the pictures have in common: colours that colour-blind readers tell apart, axes, and files.

The colours are those of Okabe and Ito, "Color Universal Design" (2008); what a colour says, a shape or a word says,
too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lockstep.report import save_svg, write_table
from lockstep.tune.record.journal import SearchRecord

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, GREY, PALE, INK = "#56B4E9", "#CC79A7", "#8c8c8c", "#ececec", "#222222"
#: The colour and the marker of a trial's state, with its name.
STATES: Final[Mapping[str, tuple[str, str, str]]] = {
    "done": (BLUE, "o", "done"),
    "stopped": (ORANGE, "v", "stopped early"),
    "failed": (VERMILION, "x", "failed"),
    "running": (SKY, ".", "running"),
}
ISLANDS: Final = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, INK, GREY)
MARKERS: Final = ("o", "s", "D", "^", "P", "v", "X", "*")

_STYLE: Final[Any] = {
    "svg.hashsalt": "lockstep",  # equal searches, equal files
    "svg.fonttype": "none",  # text stays text
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.facecolor": "white",
}

Row = Mapping[str, Any]
Figure = Any  # matplotlib has no part in what is typed here, since it is loaded only to draw
Axes = Any


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: what it shows as rows, and how these are drawn."""

    name: str  #: of its files
    title: str
    method: str  #: how the rows come about, in a sentence or two
    rows: Callable[[SearchRecord], Sequence[Row]]
    draw: Callable[[Sequence[Row]], Figure]

    def write(self, record: SearchRecord, directory: Path) -> tuple[Path, ...]:
        """``NAME.svg``, with the same numbers in ``NAME.csv`` and ``NAME.json``; returns the paths."""
        rows = self.rows(record)
        paths = tuple(directory / f"{self.name}.{kind}" for kind in ("svg", "csv", "json"))
        with styled():
            save_svg(self.draw(rows), paths[0], self.title)
        write_table(paths[1], rows)
        content = {"title": self.title, "method": self.method, "rows": [_plain(row) for row in rows]}
        paths[2].write_text(json.dumps(content, indent=1, default=repr) + "\n", encoding="utf-8")
        return paths


@contextmanager
def styled() -> Iterator[None]:
    """Within it, figures are drawn in the style of this house; the user's own settings come back afterwards."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def say_nothing(axes: Axes, why: str) -> None:
    """Instead of an empty frame: why there is nothing to see."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color=GREY)


def scale_losses(axes: Axes, losses: Sequence[float]) -> None:
    """A logarithmic axis where losses are positive and far apart; few that are far off do not hide the others."""
    finite = sorted(loss for loss in losses if math.isfinite(loss))
    if not finite:
        return
    axes.set_ylabel("loss")
    low, most, high = finite[0], finite[int(0.95 * (len(finite) - 1))], finite[-1]
    if low > 0 and high > 20 * low:
        axes.set_yscale("log")
    elif high - low > 5 * (most - low) > 0:
        margin = 0.08 * (most - low)
        axes.set_ylim(low - margin, most + 3 * margin)
        axes.set_ylabel(f"loss (up to {high:.3g})")


def legend(axes: Axes, columns: int = 4) -> None:
    """Above the axes, where it covers nothing."""
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=columns, borderpad=0, handletextpad=0.2)


def time_unit(seconds: float) -> tuple[float, str]:
    """By what seconds are divided for an axis up to this many, and what comes out."""
    return next(
        (scale, name)
        for scale, name in ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
        if seconds >= 2 * scale or scale == 1
    )


def _plain(row: Row) -> dict[str, Any]:
    """As JSON has it: what is not finite is null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }
