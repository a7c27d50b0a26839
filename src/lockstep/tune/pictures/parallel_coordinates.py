"""Each trial as a line across the parameters, to its loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from lockstep.report import new_figure
from lockstep.tune.journal import SearchRecord
from lockstep.tune.pictures.drawing import GREY, INK, VERMILION, Axes, Figure, Picture, Row, say_nothing
from lockstep.tune.search.dimensions import Choice
from lockstep.tune.search.space import Space

_TICKS = 5
_LINES = 2000


def rows(record: SearchRecord) -> list[Row]:
    """One row for each trial with a loss: ``NAME`` is its parameter, ``place of NAME`` where that is on its axis."""
    found: list[Row] = []
    space = Space.from_json(record.space) if record.space else None
    for trial in record.trials:
        if space is None or not math.isfinite(trial.loss):
            continue
        row: dict[str, object] = {"number": trial.number, "state": trial.state, "loss": trial.loss}
        for gene, place, exists in zip(space.genes, trial.point, space.active(trial.point), strict=True):
            # Two dimensions of one name are never there at once, and still have an axis each.
            name = gene.name
            while f"place of {name}" in row:
                name += " (2)"
            dimension = gene.dimension
            cells = dimension.cells if isinstance(dimension, Choice) else 0
            row[name] = trial.params.get(gene.name) if exists else None
            row[f"place of {name}"] = ((place + 0.5) / cells if cells else place) if exists else None
        found.append(row)
    return found


def draw(rows: Sequence[Row]) -> Figure:
    """The better the darker and the further in front; the best in a colour of its own."""
    names = [name.removeprefix("place of ") for name in (rows[0] if rows else ()) if name.startswith("place of ")]
    figure = new_figure(max(5.0, 1.5 * (len(names) + 1) + 1.2), 4.2)
    axes = figure.subplots()
    if not rows:
        say_nothing(axes, "no trial has a loss yet")
        return figure
    ranked = sorted(rows, key=lambda row: (row["loss"], row["number"]))[:_LINES]
    heights = _loss_heights([row["loss"] for row in ranked])
    for index, row in reversed(list(enumerate(ranked))):
        worth = 1 - index / max(len(ranked) - 1, 1)
        line = [*(row[f"place of {name}"] for name in names), heights[index]]
        leads = index == 0
        look = {"color": VERMILION if leads else _shade(worth), "lw": 2.2 if leads else 0.9, "zorder": worth}
        there = [number for number, place in enumerate(line) if place is not None]
        if len(there) < len(line):
            axes.plot(there, [line[number] for number in there], ls=":", **look)
        axes.plot(range(len(line)), [math.nan if place is None else place for place in line], **look)
    _axes(axes, ranked, names, heights)
    best = ranked[0]
    axes.set_title(f"parameters and loss of {len(ranked)} trials", pad=26)
    axes.annotate(
        f"best: trial {best['number']}",
        (len(names), heights[0]),
        (6, 0),
        textcoords="offset points",
        va="center",
        color=VERMILION,
        weight="bold",
        annotation_clip=False,
    )
    return figure


def _axes(axes: Axes, ranked: Sequence[Row], names: Sequence[str], heights: Sequence[float]) -> None:
    for number, name in enumerate(names):
        axes.axvline(number, color=GREY, lw=0.8, zorder=2)
        axes.text(number, 1.06, name, ha="center", va="bottom", weight="bold")
        for place, text in _ticks(ranked, name):
            axes.text(
                number,
                place,
                f" {text}",
                fontsize=7,
                va="center",
                zorder=3,
                bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.6},
            )
    last = len(names)
    axes.axvline(last, color=INK, lw=1.2, zorder=2)
    axes.text(last, 1.06, "loss", ha="center", va="bottom", weight="bold")
    for index in sorted({0, len(ranked) // 2, len(ranked) - 1}):
        axes.text(
            last,
            heights[index],
            f"{ranked[index]['loss']:.3g} ",
            fontsize=7,
            ha="right",
            va="center",
            zorder=3,
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.6},
        )
    axes.set_xlim(-0.2, last + 0.9)
    axes.set_ylim(-0.04, 1.04)
    axes.set_axis_off()


def _ticks(rows: Sequence[Row], name: str) -> list[tuple[float, str]]:
    """Some of the values that trials have, spread over the axis, each at its place."""
    seen = sorted(
        {(row[f"place of {name}"], _text(row[name])) for row in rows if row[f"place of {name}"] is not None},
    )
    firsts = [next(same) for _, same in groupby(seen, key=lambda one: one[1])]
    kept: list[tuple[float, str]] = []
    for place, text in firsts:
        if len(firsts) <= _TICKS + 4 or not kept or place - kept[-1][0] >= 1 / _TICKS:
            kept.append((place, text))
    return kept


def _loss_heights(losses: Sequence[float]) -> list[float]:
    """From 0 for the lowest to 1 for the highest; of positive ones far apart by their logarithms."""
    low, high = losses[0], losses[-1]
    if low > 0 and high > 20 * low:
        losses = [math.log(loss) for loss in losses]
        low, high = losses[0], losses[-1]
    return [(loss - low) / (high - low) if high > low else 0.5 for loss in losses]


def _shade(worth: float) -> tuple[float, float, float]:
    """From pale grey for the worst, 0, to dark blue for the best, 1: the order is that of the darkness."""
    pale, dark = (0.87, 0.87, 0.87), (0.0, 0.27, 0.50)
    strength = worth**2
    return tuple(a + strength * (b - a) for a, b in zip(pale, dark, strict=True))  # type: ignore[return-value]


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


PICTURE = Picture(
    "parallel_coordinates",
    "Parameters and loss of each trial",
    "An axis for each dimension of the space, with its own scale (logarithmic where the dimension is), and one for the "
    f"loss. Where there are more than {_LINES} trials, the best of them. A line is dotted where a dimension does "
    "not exist at the values of others.",
    rows,
    draw,
)
