"""How much each parameter matters to the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lockstep.report import new_figure
from lockstep.tune.journal import SearchRecord
from lockstep.tune.pictures.drawing import BLUE, GREY, Figure, Picture, Row, say_nothing
from lockstep.tune.pictures.random_forest import permutation_importance
from lockstep.tune.search.dimensions import Choice
from lockstep.tune.search.space import Space
from lockstep.tune.stopping import losses_at_equal_budget

_FEWEST = 12  # trials
_NEWEST = 3000


def rows(record: SearchRecord) -> list[Row]:
    """One row for each parameter, the most important first; none while there are too few trials."""
    losses = losses_at_equal_budget(record.trials)
    trials = [trial for trial in record.trials if math.isfinite(losses.get(trial.number, math.nan))][-_NEWEST:]
    if len(trials) < _FEWEST or not record.space:
        return []
    space = Space.from_json(record.space)
    # Each value of a choice is an input, since their order says nothing; -1 where a dimension does not exist.
    columns: list[list[float]] = []
    owners: list[str] = []
    active = [space.active(trial.point) for trial in trials]
    for index, gene in enumerate(space.genes):
        places = [trial.point[index] if exists[index] else -1.0 for trial, exists in zip(trials, active, strict=True)]
        if isinstance(gene.dimension, Choice):
            columns += [[float(place == value) for place in places] for value in range(gene.dimension.cells)]
            owners += [gene.name] * gene.dimension.cells
        else:
            columns.append(places)
            owners.append(gene.name)
    outputs = np.array([losses[trial.number] for trial in trials])
    # By ranks: a few failed trainings with huge losses are not what one asks about.
    ranks = np.argsort(np.argsort(outputs, kind="stable"), kind="stable") / (len(outputs) - 1)
    seen = permutation_importance(np.array(columns).T, ranks, np.random.default_rng(0))
    names = dict.fromkeys(owners)
    found = [
        {
            "parameter": name,
            "share": sum(share for share, owner in zip(seen.shares, owners, strict=True) if owner == name),
            "standard_error": math.sqrt(
                sum(spread**2 for spread, owner in zip(seen.spreads, owners, strict=True) if owner == name)
            ),
            "explained": seen.explained,
            "trials": len(trials),
        }
        for name in names
    ]
    return sorted(found, key=lambda row: (-float(row["share"]), str(row["parameter"])))


def draw(rows: Sequence[Row]) -> Figure:
    """A bar for each parameter."""
    figure = new_figure(6.0, max(1.6, 0.34 * len(rows) + 1.1))
    axes = figure.subplots()
    if not rows:
        say_nothing(axes, f"fewer than {_FEWEST} trials have a loss: too few to say")
        return figure
    places = list(range(len(rows)))[::-1]
    shares = [100 * row["share"] for row in rows]
    errors = [100 * row["standard_error"] for row in rows]
    axes.barh(places, shares, height=0.68, color=BLUE)
    axes.errorbar(shares, places, xerr=errors, fmt="none", ecolor=GREY, capsize=2, lw=1)
    for place, share, error in zip(places, shares, errors, strict=True):
        axes.text(share + error, place, f"  {share:.0f} %", va="center")
    axes.set_yticks(places, [row["parameter"] for row in rows])
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, max(share + error for share, error in zip(shares, errors, strict=True)) * 1.15 or 1)
    axes.set_xlabel(
        f"share in the importance, %\na random forest explains {100 * rows[0]['explained']:.0f} % of the ranks of "
        f"{rows[0]['trials']} trials"
    )
    axes.set_title("what the loss depends on")
    return figure


PICTURE = Picture(
    "importance",
    "How much each parameter matters to the loss",
    "Permutation importance (Breiman, 2001): how much the out-of-bag error of a random forest of 64 trees grows when "
    "the values of one parameter are permuted, as a share of the sum over parameters. The forest predicts the rank of "
    "a trial's loss from its parameters; stopped trials rank at equal budget. Trials are not drawn uniformly but where "
    "the search went, so it is the importance there.",
    rows,
    draw,
)
