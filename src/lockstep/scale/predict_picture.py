"""Predictions as pictures: time and cost over ranks with intervals; predicted against measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.report import new_figure, save_svg, write_table
from lockstep.scale.predict import Estimate, waterfall
from lockstep.scale.predict_report import CAUSES
from lockstep.scale.table_prediction import TablePrediction

_COLOURS = (
    "#4e79a7",
    "#f28e2b",
    "#59a14f",
    "#e15759",
    "#b07aa1",
    "#76b7b2",
    "#9c755f",
    "#edc948",
    "#ff9da7",
    "#bab0ac",
)


def draw_estimates(estimates: Sequence[Estimate], path: Path) -> None:
    """Write speed-up over ranks, cost over time, and the waterfall of the last estimate to ``path``, an SVG.

    What is shown stands in a CSV file beside it.

    Raises:
        SettingError: if matplotlib is not installed; the CSV file is there then.
    """
    write_table(path.with_suffix(".csv"), [_flat(one) for one in estimates])
    drawing = new_figure(12, 4.2)
    speed, money, fall = drawing.subplots(1, 3)
    kinds = list(dict.fromkeys((one.gpu, one.strategy) for one in estimates))
    for kind, colour in zip(kinds, _COLOURS * len(kinds), strict=False):
        rows = sorted((one for one in estimates if (one.gpu, one.strategy) == kind), key=lambda one: one.ranks)
        ranks = [one.ranks for one in rows]
        speed.plot(ranks, [one.efficiency for one in rows], "o-", color=colour, label=f"{kind[0]}, {kind[1]}", ms=3)
        low = [one.efficiency * one.step.seconds / one.step.high for one in rows]
        high = [one.efficiency * one.step.seconds / max(one.step.low, 1e-12) for one in rows]
        speed.fill_between(ranks, low, high, color=colour, alpha=0.15, lw=0)
        of = [(one.total_s / 3600, one.cost or one.gpu_hours or 0.0) for one in rows if one.total_s is not None]
        money.plot([x for x, _ in of], [y for _, y in of], "o-", color=colour, ms=3)
    speed.set(xscale="log", xlabel="ranks", ylabel="efficiency", ylim=(0, 1.3), title="efficiency, 90 % of cases")
    speed.set_xscale("log", base=2)
    speed.legend(fontsize=7)
    priced = any(one.cost is not None for one in estimates)
    money.set(xlabel="hours", ylabel="cost" if priced else "GPU-hours", xscale="log", title="cost of the time")
    _fall(fall, estimates[-1])
    save_svg(drawing, path)


def _fall(axes: Any, estimate: Estimate) -> None:
    """Bars that hang from n down to the speed-up."""
    level = float(estimate.ranks)
    names, shown = ["ideal"], [(0.0, level)]
    for cause, change in waterfall(estimate)[1:]:
        names.append(CAUSES[cause])
        shown.append((level + min(0.0, change), abs(change)))
        level += change
    names.append("speed-up")
    shown.append((0.0, level))
    colours = ["#bab0ac", *["#e15759"] * (len(shown) - 2), "#4e79a7"]
    axes.barh(range(len(names)), [width for _, width in shown], left=[left for left, _ in shown], color=colours)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set(title=f"why not {estimate.ranks}x: {estimate.system}", xlabel="times one device")
    axes.title.set_fontsize(9)


def draw_table(found: Sequence[TablePrediction], path: Path) -> None:
    """Write predicted over measured efficiency of each row to ``path``, an SVG, and the rows to a CSV file beside it.

    Raises:
        SettingError: if matplotlib is not installed; the CSV file is there then.
    """
    write_table(path.with_suffix(".csv"), [{**one.as_dict(), "notes": "; ".join(one.notes)} for one in found])
    rows = [one for one in found if one.row.throughput]
    drawing = new_figure(9, 4.2)
    errors, sizes = drawing.subplots(1, 2)
    ratios = [one.predicted / (one.row.throughput or 1.0) for one in rows]
    ranks = [one.row.ranks for one in rows]
    low = [(one.predicted - one.low) / (one.row.throughput or 1.0) for one in rows]
    high = [(one.high - one.predicted) / (one.row.throughput or 1.0) for one in rows]
    order = sorted(range(len(rows)), key=lambda k: ratios[k])
    errors.errorbar(
        range(len(rows)),
        [ratios[k] for k in order],
        yerr=[[low[k] for k in order], [high[k] for k in order]],
        fmt=".",
        color=_COLOURS[0],
        ecolor="#c9d6e6",
        ms=3,
    )
    errors.axhline(1.0, color="black", lw=0.8)
    errors.set(title="each row with its interval", xlabel="rows", ylabel="predicted / measured")
    sizes.plot(ranks, [abs(ratio - 1) * 100 for ratio in ratios], ".", color=_COLOURS[0], ms=4)
    sizes.set_xscale("log", base=2)
    sizes.set(title="error over GPUs", xlabel="GPUs", ylabel="error, %")
    save_svg(drawing, path)


def _flat(one: Estimate) -> dict[str, object]:
    held = one.as_dict()
    parts = held.pop("step_parts")
    assert isinstance(parts, dict)
    for name in ("sources", "notes", "step_notes"):
        held[name] = "; ".join(map(str, held[name]))  # type: ignore[call-overload]
    return {**held, **{f"{part}_s": seconds for part, seconds in parts.items()}}
