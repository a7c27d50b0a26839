"""A benchmark as text of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from lockstep.formatting import count, duration, plural, size
from lockstep.scale.bench_result import PARTS, BenchResult, BenchRow
from lockstep.scale.rows import most_worthwhile

WIDTH = 80
_NAME = 21  # columns of a variant


def table(result: BenchResult) -> str:
    """What was measured, where the time goes, and what is to be known about it; no line is wider than 80 columns."""
    lines = [*_head(result), "", *_speed(result)]
    lines += ["", *_parts(result.rows)] if any(row.measured for row in result.rows) else []
    lines += ["", *_notes(result)] if _notes(result) else []
    return "\n".join(line.rstrip() for line in lines)


def _head(result: BenchResult) -> list[str]:
    machine = result.machine
    text = (
        f"{result.script} on {machine.device}, {plural(machine.cores, 'core')}; {result.scaling} scaling; "
        f"{plural(result.rounds, 'round')} of {plural(result.steps, 'step')}"
    )
    return textwrap.wrap(text, WIDTH)


def _speed(result: BenchResult) -> Iterable[str]:
    last = "cost" if result.currency else "MFU" if any(r.mfu is not None for r in result.rows) else "peak"
    yield f"{'':<{_NAME}}{'batch':>7}{'samples/s':>11}{'+-':>5}{'speed-up':>10}{'eff.':>7}{'epoch':>11}{last:>8}"
    for row in result.rows:
        name = _name(row)
        if row.measured is None:
            lines = textwrap.wrap(f"failed: {row.failed}", WIDTH - _NAME - 1) or ["failed"]
            yield f"{name:<{_NAME}} {lines[0]}"
            yield from (f"{'':<{_NAME}} {line}" for line in lines[1:4])
            continue
        yield (
            f"{name:<{_NAME}}{row.measured.global_batch:>7}{_number(row.samples_per_s):>11}"
            f"{_percent(row.measured.step_s.half_width):>5}{_factor(row.speed_up):>10}{_percent(row.efficiency):>7}"
            f"{'-' if row.epoch_s is None else duration(row.epoch_s):>11}{_last(row, last):>8}"
        )


def _parts(rows: Sequence[BenchRow]) -> Iterable[str]:
    yield f"{'ms of a step':<{_NAME}}" + "".join(f"{part:>9}" for part in PARTS[:4]) + f"{'optimizer':>11}{'other':>9}"
    for row in rows:
        if row.measured is None:
            continue
        parts = row.measured.parts_s
        cells = "".join(f"{1e3 * parts[part]:>9.3g}" for part in PARTS[:4])
        yield f"{_name(row):<{_NAME}}{cells}{1e3 * parts['optimizer']:>11.3g}{1e3 * parts['other']:>9.3g}"


def _notes(result: BenchResult) -> list[str]:
    rows = [row for row in result.rows if row.measured is not None]
    notes = []
    if any(row.oversubscribed for row in rows):
        notes.append(
            f"* more threads than the {plural(result.machine.cores, 'core')} here: this rehearses the script, and says "
            "nothing about how it scales on as many devices."
        )
    if disturbed := [row for row in rows if row.measured and row.measured.disturbed]:
        most = max(row.measured.other_cores for row in disturbed if row.measured)
        notes.append(
            f"! something else kept up to {most:.1f} cores busy while {plural(len(disturbed), 'variant')} ran: measure "
            "again on a quiet machine."
        )
    if unsteady := [_name(row) for row in rows if row.measured and not row.measured.steady]:
        notes.append(f"~ still changing at the end of a round: {', '.join(unsteady)}; give more --steps.")
    if rows and (least := min(row.variant.ranks for row in rows)) > 1:
        notes.append(f"speed-up and efficiency are those over {plural(least, 'rank')}.")
    for strategy in dict.fromkeys(row.variant.strategy for row in rows):
        own = [row for row in rows if row.variant.strategy == strategy and row.variant.group == rows[0].variant.group]
        own = [row for row in own if not row.oversubscribed]
        best = most_worthwhile(own)
        if best is not None and len(own) > 1:
            ranks = plural(best.variant.ranks, "rank")
            notes.append(
                f"{strategy}: each of {ranks} is worth it."
                if best is max(own, key=lambda row: row.variant.ranks)
                else f"{strategy}: worth asking for up to {ranks}; each further one adds less than half of the first."
            )
    return [line for note in notes for line in textwrap.wrap(note, WIDTH, subsequent_indent="  ")]


def _name(row: BenchRow) -> str:
    variant = row.variant
    more = [f"b{variant.batch}"] if variant.batch is not None else []
    more += [f"{variant.bucket_mb:g}M"] if variant.bucket_mb is not None else []
    more += [variant.precision] if variant.precision is not None else []
    more += [f"w{variant.workers}"] if variant.workers is not None else []
    name = " ".join([f"{variant.strategy} x {variant.ranks}{'*' * row.oversubscribed}", *more])
    return name if len(name) < _NAME else f"{name[: _NAME - 3]}.."


def _last(row: BenchRow, column: str) -> str:
    if column == "cost":
        return "-" if row.cost is None else f"{row.cost:.3g}"
    if column == "MFU":
        return _percent(row.mfu)
    peak = row.measured.peak_bytes if row.measured else 0
    return size(peak).replace("iB", "").replace(" bytes", "")


def _number(value: float | None) -> str:
    return "-" if value is None else count(float(value))


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 1e5 else f"{value:.2g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%" if value < 10 else ">999%"
