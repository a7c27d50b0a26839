"""When each worker ran which trial, and when it stood idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.report import new_figure
from lockstep.tune.pictures.drawing import (
    INK,
    PALE,
    STATES,
    Figure,
    Picture,
    Row,
    legend,
    say_nothing,
    time_unit,
)
from lockstep.tune.record.journal import SearchRecord


def rows(record: SearchRecord) -> list[Row]:
    """One row for each trial, by worker and time, in seconds since the search began; ``idle_s`` lies before it."""
    began = min((trial.began_at_s for trial in record.trials), default=0.0)
    newest = began
    for trial in record.trials:
        newest = max(newest, trial.ended_at_s or trial.began_at_s, *(report.at_s for report in trial.reports), began)
    found: list[Row] = []
    free: dict[int, float] = {}
    for trial in sorted(record.evaluations, key=lambda one: (one.worker, one.ended_at_s or newest, one.number)):
        end = (newest if trial.ended_at_s is None else trial.ended_at_s) - began
        # A trial that was interrupted and resumed later did not run all of the time.
        begin = max(trial.began_at_s - began, end - trial.run_s) if trial.ended_at_s else trial.began_at_s - began
        found.append(
            {
                "worker": trial.worker,
                "ranks": trial.ranks,
                "number": trial.number,
                "state": trial.state,
                "began_s": begin,
                "ended_s": end,
                "idle_s": max(0.0, begin - free.get(trial.worker, 0.0)),
                "attempts": trial.attempts,
            }
        )
        free[trial.worker] = end
    return found


def draw(rows: Sequence[Row]) -> Figure:
    """A lane for each worker, as high as it has ranks; what is pale is idle."""
    workers = sorted({row["worker"] for row in rows})
    heights = {worker: max(row["ranks"] for row in rows if row["worker"] == worker) for worker in workers}
    figure = new_figure(9.0, min(12.0, 1.3 + 0.3 * sum(heights.values()) + 0.12 * len(workers)))
    axes = figure.subplots()
    if not rows:
        say_nothing(axes, "no trial has begun yet")
        return figure
    end = max(row["ended_s"] for row in rows) or 1.0
    scale, unit = time_unit(end)
    ticks, top, labelled = [], 0.0, set[str]()
    for worker in workers:
        height, those = heights[worker], [row for row in rows if row["worker"] == worker]
        axes.add_patch(_box(0, top, end / scale, height, PALE))
        for row in those:
            colour, _, name = STATES[row["state"]]
            width = row["ended_s"] - row["began_s"]
            hatch = {"stopped": "////", "failed": "xxxx"}.get(row["state"])
            patch = _box(row["began_s"] / scale, top, width / scale, height, colour, hatch=hatch, edge="white")
            if row["state"] not in labelled:
                patch.set_label(name)
                labelled.add(row["state"])
            axes.add_patch(patch)
            if width / end > 0.035:
                axes.text(
                    (row["began_s"] + width / 2) / scale, top + height / 2, str(row["number"]), ha="center",
                    va="center", fontsize=7, color="white" if hatch is None else INK,
                    bbox=None if hatch is None else {"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                )  # fmt: skip
        busy = sum(row["ended_s"] - row["began_s"] for row in those) / end
        axes.text(end / scale, top + height / 2, f"  {100 * min(busy, 1):.0f} %", va="center")
        ranks = f"{height} rank{'s' if height > 1 else ''}"
        ticks.append((top + height / 2, f"worker {worker}, {ranks}"))
        top += height + 0.35
    axes.set_yticks([place for place, _ in ticks], [text for _, text in ticks])
    axes.set_ylim(top - 0.35, 0)
    axes.set_xlim(0, end / scale * 1.07)
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    busy = sum((row["ended_s"] - row["began_s"]) * heights[row["worker"]] for row in rows)
    share = min(busy / (end * sum(heights.values())), 1.0)
    axes.set_title(f"trials on ranks: busy {100 * share:.0f} % of the time, pale is idle")
    axes.set_xlabel(f"{unit} since the search began")
    legend(axes)
    return figure


def _box(
    left: float, top: float, width: float, height: float, colour: str, hatch: str | None = None, edge: str = "none"
) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(
        (left, top), width, height, facecolor=colour, edgecolor=edge, hatch=hatch, linewidth=0.4, label=None
    )


PICTURE = Picture(
    "timeline",
    "Trials on ranks, with idle gaps",
    "A lane for each worker, as high as it has ranks, from the first beginning to the newest end; the share in which "
    "it ran a trial stands at its right. A trial is drawn on the worker of its last attempt, as long as all of its "
    "attempts took.",
    rows,
    draw,
)
