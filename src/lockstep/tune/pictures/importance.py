"""How much each parameter matters, with what other trials would have said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from lockstep.report import new_figure
from lockstep.tune.pictures.drawing import BLUE, INK, Figure, Picture, Row, say_nothing
from lockstep.tune.record.journal import SearchRecord
from lockstep.tune.results.importance import LEAST, PART, RESAMPLES, importances

TITLE = "How much each parameter matters to the loss"


def rows(record: SearchRecord) -> Sequence[Row]:
    """One for each parameter, the most important first."""
    return [asdict(one) for one in importances(record)]


def draw(rows: Sequence[Row]) -> Figure:
    """A bar for each parameter, with a line from the lower to the upper limit."""
    figure = new_figure(6.0, 1.0 + 0.3 * max(len(rows), 2))
    axes = figure.subplots()
    if not rows:
        say_nothing(axes, f"fewer than {LEAST} trials were trained to their end")
        return figure
    places = range(len(rows))
    axes.barh(places, [row["share"] for row in rows], color=BLUE, height=0.6)
    axes.hlines(places, [row["low"] for row in rows], [row["high"] for row in rows], color=INK, lw=1.5)
    axes.set_yticks(places, [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the importance")
    axes.set_title(TITLE)
    return figure


PICTURE = Picture(
    "importance",
    TITLE,
    "PED-ANOVA (Watanabe et al. 2023) by Optuna, of the first loss of trials that were trained to their end; "
    f"low and high: the limits of {PART:.0%} of the shares in {RESAMPLES} bootstrap samples of the trials.",
    rows,
    draw,
)
