"""The best loss so far: over time, and over what the ranks spent."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.report import new_figure
from lockstep.tune.pictures.drawing import (
    INK,
    STATES,
    VERMILION,
    Axes,
    Figure,
    Picture,
    Row,
    legend,
    say_nothing,
    scale_losses,
    time_unit,
)
from lockstep.tune.record.journal import SearchRecord


def rows(record: SearchRecord) -> list[Row]:
    """One row for each trial that has ended, by the time of its end."""
    began = min((trial.began_at_s for trial in record.trials), default=0.0)
    found: list[Row] = []
    best, spent = math.inf, 0.0
    for trial in sorted(record.trials, key=lambda one: (one.ended_at_s or math.inf, one.number)):
        if trial.ended_at_s is None:
            continue
        spent += trial.run_s * trial.ranks / 3600
        if trial.losses and not trial.violation and trial.loss < best:
            best = trial.loss
        found.append(
            {
                "number": trial.number,
                "state": trial.state,
                "loss": trial.loss,
                "at_s": trial.ended_at_s - began,
                "rank_hours": spent,
                "best_so_far": best,
            }
        )
    return found


def draw(rows: Sequence[Row]) -> Figure:
    """Two panels with the same losses."""
    figure = new_figure(9.0, 3.8)
    left, right = figure.subplots(1, 2, sharey=True)
    shown = [row for row in rows if math.isfinite(row["loss"])]
    if not shown:
        say_nothing(left, "no trial has a loss yet")
        say_nothing(right, "")
        return figure
    scale, unit = time_unit(max(row["at_s"] for row in rows))
    hours = max(row["rank_hours"] for row in rows)
    cost_scale, cost_unit = (1.0, "rank-hours") if hours >= 0.5 else (1 / 3600, "rank-seconds")
    _panel(left, rows, [row["at_s"] / scale for row in rows], f"{unit} since the search began")
    _panel(right, rows, [row["rank_hours"] / cost_scale for row in rows], f"{cost_unit} spent on trials")
    scale_losses(left, [row["loss"] for row in shown])
    left.set_title("best loss so far")
    legend(right)
    return figure


def _panel(axes: Axes, rows: Sequence[Row], places: Sequence[float], label: str) -> None:
    for state, (colour, marker, name) in STATES.items():
        those = [index for index, row in enumerate(rows) if row["state"] == state]
        if state == "failed":
            # They have no loss: a tick at the upper edge says when.
            for number, index in enumerate(those):
                label_once = f"failed ({len(those)})" if number == 0 else None
                axes.plot(
                    [places[index]],
                    [0.985],
                    "x",
                    ms=5,
                    color=VERMILION,
                    transform=axes.get_xaxis_transform(),
                    label=label_once,
                    clip_on=False,
                )
        elif those:
            axes.plot(
                [places[index] for index in those],
                [rows[index]["loss"] for index in those],
                marker,
                color=colour,
                ms=4,
                alpha=0.55,
                mew=0,
                label=f"{name} ({len(those)})",
            )
    best = [(place, row["best_so_far"]) for place, row in zip(places, rows, strict=True)]
    best = [(place, loss) for place, loss in best if math.isfinite(loss)]
    if best:
        axes.step(*zip(*best, strict=True), where="post", color=INK, lw=1.6)
        axes.annotate(
            f"{best[-1][1]:.4g}", best[-1], (0, -5), textcoords="offset points", ha="right", va="top", weight="bold"
        )
    axes.set_xlim(left=0)
    axes.set_xlabel(label)
    axes.margins(y=0.12)


PICTURE = Picture(
    "progress",
    "Best loss so far, over time and over the time of ranks",
    "Each trial at its end. Rank-hours add up wall time times ranks over the trials that have ended by then. Stopped "
    "trials are shown with the loss they had when they were stopped.",
    rows,
    draw,
)
