"""A benchmark as a picture: throughput beside the ideal, efficiency with its bands, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.report import new_figure, save_svg, write_table
from lockstep.scale.bench_result import PARTS, BenchResult, BenchRow
from lockstep.scale.rows import most_worthwhile

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
    found: dict[str, list[BenchRow]] = {}
    for row in sorted(rows, key=lambda r: r.variant.ranks):
        found.setdefault(str(row.variant).replace(f" x {row.variant.ranks}", "", 1), []).append(row)
    return found


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
