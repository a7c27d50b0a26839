"""Predictions as text of 100 columns and as pictures: times, costs, why it is not n times as fast, assumptions.

For a table of measured runs also how good predictions are: errors, and what lies in how wide intervals.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lockstep.formatting import count, duration, plural, size
from lockstep.report import new_figure, save_svg, write_table
from lockstep.scale.predict import Estimate, waterfall
from lockstep.scale.table_prediction import TablePrediction

#: What each loss is, in words.
CAUSES = {
    "communication": "communication that nothing hides",
    "compression": "compressing gradients",
    "waiting": "waiting for the slowest rank",
    "bubbles": "bubbles in the pipeline",
    "input": "input that comes too slowly",
    "fixed": "fixed cost of several ranks",
    "unexplained": "what published systems lose beyond that",
    "undivided": "work that does not shrink with the ranks",
}

#: Groups of the rows of a table, and which row belongs to each.
_GROUPS: Final[Mapping[str, Callable[[TablePrediction], bool]]] = {
    "all": lambda one: True,
    "weak scaling": lambda one: not one.row.strong,
    "strong scaling": lambda one: one.row.strong,
    "one node": lambda one: one.row.nodes == 1,
    "several nodes": lambda one: one.row.nodes > 1,
}
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


def estimates_table(estimates: Sequence[Estimate], currency: str) -> list[str]:
    """One line for each estimate; intervals of nine cases of ten in brackets."""
    head = f"{'system':<24} {'strategy':<11}{'step':>8} {'(90 % of cases)':<20} {'samples/s':>10}{'eff.':>6}"
    lines = [f"{head} {'time':>11} {'GPU-h':>8} {currency or '':>8}".rstrip()]
    for one in estimates:
        step = one.step
        between = f"({_ms(step.low)} to {_ms(step.high)})"
        spent = [
            "" if one.total_s is None else duration(one.total_s),
            "" if one.gpu_hours is None else _amount(one.gpu_hours),
            "" if one.cost is None else _amount(one.cost),
        ]
        cells = f"{one.system:<24} {one.strategy[:10]:<11}{_ms(step.seconds):>8} {between:<20} "
        cells += f"{count(step.samples_per_s):>10}{one.efficiency:>6.0%} {spent[0]:>11} {spent[1]:>8} {spent[2]:>8}"
        lines.append(cells.rstrip() + ("" if one.fits else f"  does not fit: {size(one.needs_bytes)} and activations"))
    return lines


def why_not(estimate: Estimate) -> list[str]:
    """The waterfall of one estimate."""
    lines = [f"{estimate.system}: why {estimate.speed_up:.2f}x and not {estimate.ranks}x"]
    for cause, change in waterfall(estimate)[1:]:
        if abs(change) >= 0.0005 * estimate.ranks:
            lines.append(f"  {change:>+8.2f}x  {CAUSES[cause]}")
    return lines


def basis(estimates: Sequence[Estimate]) -> list[str]:
    """Where numbers come from, each source once, and what was assumed."""
    sources = dict.fromkeys(source for one in estimates for source in one.sources)
    notes = dict.fromkeys(note for one in estimates for note in one.notes)
    return ["from", *(f"  {source}" for source in sources), *(f"note: {note}" for note in notes)]


def choice(what: str, estimate: Estimate | None) -> str:
    """A line on the best one under a deadline or a budget."""
    if estimate is None:
        return f"{what}: none of these"
    cost = "" if estimate.cost is None else f", {_amount(estimate.cost)}"
    least, most = estimate.total_low_s or 0.0, estimate.total_high_s or 0.0
    return (
        f"{what}: {estimate.system} with {estimate.strategy}, {plural(estimate.ranks, 'rank')}: "
        f"{duration(estimate.total_s or 0.0)} ({duration(least)} to {duration(most)}){cost}"
    )


def largest(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Of each kind of system and each strategy the one with most ranks."""
    found: dict[tuple[str, str], Estimate] = {}
    for one in estimates:
        key = (one.gpu, one.strategy)
        if key not in found or found[key].ranks < one.ranks:
            found[key] = one
    return list(found.values())


def compared(pairs: Sequence[tuple[Estimate, Estimate | None]], what: str) -> list[str]:
    """What a change does, from estimates before and after it."""
    lines = [f"what if {what}"]
    for old, new in pairs:
        if new is None:
            lines.append(f"  {old.system}: cannot be so")
            continue
        ratio = new.step.samples_per_s / old.step.samples_per_s
        steps = f"{_ms(old.step.seconds)} -> {_ms(new.step.seconds)}"
        lines.append(f"  {old.system} -> {new.system}, {new.strategy}: {steps}, {ratio:.2f}x the samples/s")
    return lines


def rows_table(found: Sequence[TablePrediction]) -> list[str]:
    """Rows of a published table: predicted, measured, and how far apart."""
    head = f"{'line':>5} {'model':<24}{'GPU':<18}{'GPUs':>5}{'predicted':>12} "
    lines = [f"{head}{'(90 % of cases)':<24}{'measured':>12}{'error':>8}"]
    for one in found:
        row = one.row
        between = f"({_amount(one.low)} to {_amount(one.high)})"
        measured = "" if row.throughput is None else _amount(row.throughput)
        error = "" if one.error is None else f"{one.error:+.1%}"
        lines.append(
            f"{row.line:>5} {row.model[:23]:<24}{row.gpu[:17]:<18}{row.ranks:>5}{_amount(one.predicted):>12} "
            f"{between:<24}{measured:>12}{error:>8}".rstrip()
        )
    return lines


def rows_summary(found: Sequence[TablePrediction]) -> list[str]:
    """Errors, coverage and width of intervals, for each group of rows."""
    return [
        f"{one.group + ', ' + plural(one.rows, 'row'):<25} error {one.mean_error:>5.1%} mean, {one.median_error:>5.1%} "
        f"median, {one.tail_error:>5.1%} 90th percentile; {one.inside:>4.0%} in intervals {one.median_width:.0%} wide"
        for one in summarize(found)
    ]


def _ms(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 9.95 else f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def _amount(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 999.5 else count(value)


@dataclass(frozen=True, slots=True)
class GroupErrors:
    """Errors are parts of what was measured, the width of an interval a part of what is predicted."""

    group: str
    rows: int
    mean_error: float
    median_error: float
    tail_error: float  #: nine of ten rows have less
    inside: float  #: the part of the rows whose measured throughput lies in the interval
    median_width: float


def summarize(found: Sequence[TablePrediction]) -> list[GroupErrors]:
    """Each group that has rows; those not measured, and those that the table calls suspect, do not count."""
    counted = [one for one in found if one.error is not None and not one.row.suspect]
    groups = ((name, [one for one in counted if belongs(one)]) for name, belongs in _GROUPS.items())
    return [errors_of(name, members) for name, members in groups if members]


def errors_of(group: str, found: Sequence[TablePrediction]) -> GroupErrors:
    """Those of ``found``, at least one, of which each is measured."""
    errors = sorted(abs(one.error or 0.0) for one in found)
    return GroupErrors(
        group=group,
        rows=len(found),
        mean_error=statistics.mean(errors),
        median_error=statistics.median(errors),
        tail_error=errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        inside=statistics.mean(float(bool(one.inside)) for one in found),
        median_width=statistics.median((one.high - one.low) / one.predicted for one in found),
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
