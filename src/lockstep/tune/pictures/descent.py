"""The population over births: who descends from whom, and who went to another island."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from lockstep.report import new_figure
from lockstep.tune.pictures.drawing import (
    GREY,
    INK,
    ISLANDS,
    MARKERS,
    Axes,
    Figure,
    Picture,
    Row,
    legend,
    say_nothing,
    scale_losses,
)
from lockstep.tune.record.journal import SearchRecord
from lockstep.tune.record.trial import Trial
from lockstep.tune.results.result import SearchResult


def rows(record: SearchRecord) -> list[Row]:
    """A row for each trial (``kind`` is ``birth``) and for each move between islands (``migration`` or ``copy``)."""
    trials = {trial.number: trial for trial in record.trials}
    line = _ancestors(trials, SearchResult(record).top(1))
    found: list[Row] = [
        {
            "kind": "birth",
            "place": trial.number,
            "island": trial.island,
            "to_island": None,
            "loss": trial.loss,
            "state": trial.state,
            "operator": trial.operator,
            "parents": " ".join(map(str, trial.parents)),
            "inherits": trial.inherits,
            "ancestor_of_best": trial.number in line,
        }
        for trial in record.trials
    ]
    births = sorted(trial.began_at_s for trial in record.trials)
    found += [
        {
            "kind": "copy" if move.copies else "migration",
            "place": bisect_left(births, move.at_s),
            "island": move.source,
            "to_island": move.target,
            "trials": " ".join(map(str, move.numbers)),
        }
        for move in record.moves
    ]
    return found


def _ancestors(trials: Mapping[int, Trial], best: Sequence[Trial]) -> set[int]:
    """The best one and all that it descends from."""
    line: set[int] = set()
    waiting = [trial.number for trial in best]
    while waiting:
        number = waiting.pop()
        if number not in line and number in trials:
            line.add(number)
            waiting += trials[number].parents
    return line


def draw(rows: Sequence[Row]) -> Figure:
    """Above, losses with lines from parents to children; below, a lane for each island with what went between them."""
    births = [row for row in rows if row["kind"] == "birth"]
    islands = sorted({row["island"] for row in births})
    figure = new_figure(9.0, 4.2 + 0.3 * len(islands))
    shown = {row["place"]: row for row in births if math.isfinite(row["loss"])}
    if not shown:
        say_nothing(figure.subplots(), "no trial has a loss yet")
        return figure
    if len(islands) == 1:
        upper = figure.subplots()
        lower = None
        upper.set_xlabel("trial, by birth")
    else:
        upper, lower = figure.subplots(
            2, 1, sharex=True, gridspec_kw={"height_ratios": [4.2, 0.35 * len(islands) + 0.4]}
        )
    _losses(upper, shown, islands)
    if lower is not None:
        _lanes(lower, births, [row for row in rows if row["kind"] != "birth"], islands)
    return figure


def _losses(axes: Axes, shown: Mapping[int, Row], islands: Sequence[int]) -> None:
    for row in shown.values():
        for parent in map(int, row["parents"].split()):
            if parent in shown:
                best = row["ancestor_of_best"] and shown[parent]["ancestor_of_best"]
                axes.plot(
                    [parent, row["place"]],
                    [shown[parent]["loss"], row["loss"]],
                    color=INK if best else GREY,
                    lw=1.4 if best else 0.4,
                    alpha=0.9 if best else 0.35,
                    zorder=2 if best else 1,
                )
    for lane, island in enumerate(islands):
        those = [row for row in shown.values() if row["island"] == island]
        axes.plot(
            [row["place"] for row in those],
            [row["loss"] for row in those],
            MARKERS[lane % len(MARKERS)],
            color=ISLANDS[lane % len(ISLANDS)],
            ms=4.5,
            mew=0,
            alpha=0.8,
            zorder=3,
            label=f"island {island}",
        )
    best = min(shown.values(), key=lambda row: (not row["ancestor_of_best"], row["loss"]))
    axes.annotate(
        f"best: trial {best['place']}, {best['loss']:.4g}",
        (best["place"], best["loss"]),
        (0, -12),
        textcoords="offset points",
        ha="center",
        va="top",
        weight="bold",
    )
    scale_losses(axes, [row["loss"] for row in shown.values()])
    axes.margins(y=0.14)
    axes.set_title("births, and the line of descent of the best")
    legend(axes, columns=6)


def _lanes(axes: Axes, births: Sequence[Row], moves: Sequence[Row], islands: Sequence[int]) -> None:
    lanes = {island: lane for lane, island in enumerate(islands)}
    for island, lane in lanes.items():
        axes.axhline(lane, color=GREY, lw=0.5, zorder=0)
        axes.plot(
            [row["place"] for row in births if row["island"] == island],
            [lane] * sum(row["island"] == island for row in births),
            "|",
            color=ISLANDS[lane % len(ISLANDS)],
            ms=7,
        )
    for move in moves:
        if move["island"] in lanes and move["to_island"] in lanes:
            copies = move["kind"] == "copy"
            axes.annotate(
                "",
                (move["place"], lanes[move["to_island"]]),
                (move["place"], lanes[move["island"]]),
                arrowprops={
                    "arrowstyle": "-|>", "color": INK, "lw": 0.8, "alpha": 0.7, "shrinkA": 0, "shrinkB": 3,
                    "linestyle": "--" if copies else "-", "mutation_scale": 7,
                },
            )  # fmt: skip
    axes.set_yticks(list(lanes.values()), [f"island {island}" for island in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    what = " and ".join(
        f"{sum(row['kind'] == kind for row in moves)} {words}"
        for kind, words in (("migration", "migrations (solid)"), ("copy", "copies (dashed)"))
        if any(row["kind"] == kind for row in moves)
    )
    axes.set_xlabel("trial, by birth" + (f"; arrows: {what}" if what else ""))


PICTURE = Picture(
    "descent",
    "The population over births, with lines of descent and migrations",
    "Each trial with a loss at its number; a line leads from each parent to its child, dark where both are ancestors "
    "of the best trial. A move between islands stands behind the trials that had begun by then.",
    rows,
    draw,
)
