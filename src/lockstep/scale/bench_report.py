"""A benchmark as text of 80 columns, and as a picture: throughput beside the ideal, efficiency, where the time goes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lockstep.formatting import count, duration, grouped, plural, size
from lockstep.report import new_figure, save_svg, write_table
from lockstep.scale.bench_result import PARTS, BenchResult, BenchRow, most_worthwhile

WIDTH = 80
_NAME = 21  # columns of a variant
#: Efficiency from which on a world is used well, and below which most of it waits.
BANDS = (0.9, 0.7)
_BAND_COLOURS = ("#d5ead3", "#fdf0c4", "#f6d3cf")
#: Told apart also without colours, by the order of the parts.
PART_COLOURS = {
    "data": "#b07aa1",
    "forward": "#4e79a7",
    "backward": "#76b7b2",
    "exposed": "#e15759",
    "optimizer": "#f28e2b",
    "other": "#bab0ac",
}


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


def draw(result: BenchResult, path: Path) -> None:
    """Write the picture to ``path``, an SVG, and what it shows to a CSV file beside it.

    Raises:
        SettingError: if matplotlib is not installed; the CSV file is there then.
    """
    write_csv(result, path.with_suffix(".csv"))
    rows = [row for row in result.rows if row.samples_per_s is not None]
    if not rows:
        return
    drawing = new_figure(11, 7.5)
    axes = drawing.subplot_mosaic([["throughput", "efficiency"], ["parts", "parts"]])
    _draw_throughput(axes["throughput"], rows)
    _draw_efficiency(axes["efficiency"], rows)
    _draw_parts(axes["parts"], rows)
    for name in ("throughput", "efficiency"):
        axes[name].set_xticks(sorted({row.variant.ranks for row in rows}))
    crowded = "; hollow: more threads than cores" if any(row.oversubscribed for row in rows) else ""
    drawing.suptitle(f"{Path(result.script).name}, {result.machine.device}, {result.scaling} scaling{crowded}")
    save_svg(drawing, path)


def write_csv(result: BenchResult, path: Path) -> None:
    """Write each row of ``result``, with what the picture shows, as one line of a CSV file."""
    named = ("strategy", "ranks", "batch", "bucket_mb", "precision", "workers")
    of_row = ("samples_per_s", "speed_up", "efficiency", "epoch_s", "gpu_hours", "cost", "mfu", "oversubscribed")
    of_step = ("global_batch", "micro_batch", "step_s", "low_s", "high_s")
    lines: list[dict[str, object]] = []
    for row in result.rows:
        seen, parts = row.measured, dict.fromkeys(PARTS, "") if row.measured is None else row.measured.parts_s
        step = (
            ("",) * len(of_step)
            if seen is None
            else (seen.global_batch, seen.micro_batch, seen.step_s.median, seen.step_s.low, seen.step_s.high)
        )
        lines.append(
            {
                **{name: getattr(row.variant, name) for name in named},
                **dict(zip(of_step, step, strict=True)),
                **{name: getattr(row, name) for name in of_row},
                **{f"{part}_s": parts[part] for part in PARTS},
                "failed": row.failed,
            }
        )
    write_table(path, lines)


def curves(rows: Sequence[BenchRow]) -> dict[str, list[BenchRow]]:
    """Rows by what their curve is called, by ranks: all that differ in ranks only. A pure function."""
    ascending = sorted(rows, key=lambda r: r.variant.ranks)
    return grouped((str(row.variant).replace(f" x {row.variant.ranks}", "", 1), row) for row in ascending)


def _draw_throughput(axes: Any, rows: Sequence[BenchRow]) -> None:
    for name, own in curves(rows).items():
        ranks, speeds = [r.variant.ranks for r in own], [r.samples_per_s or 0.0 for r in own]
        batches = [(r.measured.global_batch, r.measured.step_s) for r in own if r.measured]
        below = [s - batch / step.high for s, (batch, step) in zip(speeds, batches, strict=True)]
        above = [batch / step.low - s for s, (batch, step) in zip(speeds, batches, strict=True)]
        line = axes.errorbar(ranks, speeds, [below, above], capsize=3, marker="o", label=name)
        for row in own:
            if row.oversubscribed:
                colour = line[0].get_color()
                axes.plot(row.variant.ranks, row.samples_per_s, "o", color="white", mec=colour, zorder=5)
    first = min(rows, key=lambda r: r.variant.ranks)
    most = max(r.variant.ranks for r in rows)
    each = (first.samples_per_s or 0.0) / first.variant.ranks
    axes.plot([first.variant.ranks, most], [each * first.variant.ranks, each * most], "--", color="grey", label="ideal")
    axes.set(xlabel="ranks", ylabel="samples a second", title="Throughput")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")


def _draw_efficiency(axes: Any, rows: Sequence[BenchRow]) -> None:
    most = max(1.05, *(1.05 * (row.efficiency or 0.0) for row in rows))
    for low, high, colour in zip((BANDS[0], BANDS[1], 0.0), (most, *BANDS), _BAND_COLOURS, strict=True):
        axes.axhspan(100 * low, 100 * high, color=colour, zorder=0)
    for name, own in curves(rows).items():
        axes.plot([r.variant.ranks for r in own], [100 * (r.efficiency or 0.0) for r in own], marker="o", label=name)
        scales = [row for row in own if not row.oversubscribed]
        best = most_worthwhile(scales)
        if best is not None and len(scales) > 1:
            axes.plot(best.variant.ranks, 100 * (best.efficiency or 0.0), "*", color="black", ms=14, zorder=5)
    axes.set(xlabel="ranks", ylabel="efficiency, %", title="Efficiency; the star: worth asking for")
    axes.set_ylim(0, 100 * most)


def _draw_parts(axes: Any, rows: Sequence[BenchRow]) -> None:
    measured = [(row, row.measured) for row in rows if row.measured is not None]
    places = range(len(measured))
    left = [0.0] * len(measured)
    for part in PARTS:
        widths = [1e3 * seen.parts_s[part] for _, seen in measured]
        hatch = "///" if part == "exposed" else None
        axes.barh(places, widths, left=left, label=part, color=PART_COLOURS[part], hatch=hatch, edgecolor="white")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(places, [str(row.variant) for row, _ in measured])
    axes.invert_yaxis()
    axes.set(xlabel="ms of a step, mean over ranks", title="Where the time goes")
    axes.legend(fontsize="small", ncols=len(PARTS), loc="upper center", bbox_to_anchor=(0.5, -0.15))
