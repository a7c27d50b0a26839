"""What is drawn, as numbers for the script in the page, which gives them to plotly.

All of it is text and numbers: what a run says was made harmless, and is no markup of plotly's either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.html_report.run_record import RunRecord
from lockstep.html_report.tables import text

Chart = dict[str, Any]

_MOST_POINTS = 2000  # of a curve
_MOST_CHARTS = 60  # of metrics
_SPEEDS = 400  # intervals at most over which a speed is taken
_LEAST_S = 1.0  # ... and how long each of them is at least
_OWN = ("step", "epoch", "wall_s")
_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def metric_names(runs: Sequence[RunRecord]) -> list[str]:
    """The names of all metrics of ``runs``, in the order in which they were logged first."""
    return list(dict.fromkeys(name for run in runs for row in run.metrics for name in row if name not in _OWN))


def metric_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """A chart for each metric, all runs in it, and one of the speed; time counts from the first start of each run."""
    unit, unit_s = _unit(max((one.ended_s - run.began_s for run in runs for one in run.generations()), default=0.0))
    curves = {
        "steps per second": [list(_speeds(run)) for run in runs],
        **{
            name: [[(row["step"], row["wall_s"], row[name]) for row in run.metrics if name in row] for run in runs]
            for name in metric_names(runs)[:_MOST_CHARTS]
        },
    }
    events = [
        {
            "run": number,
            "kind": event.kind,
            "step": event.step,
            "time": (event.wall_s - run.began_s) / unit_s,
            "what": text(f"{run.name}: {event.what}"),
        }
        for number, run in enumerate(runs)
        for event in run.events()
    ]
    return [
        {
            "title": text(name),
            "unit": unit,
            "events": events,
            "lines": [
                _line(run, points, unit_s) for run, points in zip(runs, curves[name], strict=True)
            ],
        }
        for name in curves
        if any(curves[name])
    ]  # fmt: skip


def run_charts(run: RunRecord) -> list[Chart]:
    """Where the time of ``run`` went, and what its ranks wait and hold, as traces and layouts of plotly."""
    generations = run.generations()
    unit, unit_s = _unit(max((one.ended_s - run.began_s for one in generations), default=0.0))
    rows = [f"generation {one.number}" for one in generations]
    spans = {
        "until its first record": [(one.began_s, one.first_s) for one in generations],
        "from its first to its last record": [(one.first_s, one.last_s) for one in generations],
        "after its last record": [(one.last_s, one.ended_s) for one in generations],
    }
    bars: list[Chart] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": rows,
            "base": [(begin - run.began_s) / unit_s for begin, _ in pairs],
            "x": [(end - begin) / unit_s for begin, end in pairs],
        }
        for name, pairs in spans.items()
    ]
    for kind, symbol in (("checkpoint", "diamond"), ("fault", "x")):
        those = [event for event in run.events() if event.kind == kind]
        bars.append(
            {
                "type": "scatter",
                "mode": "markers",
                "marker": {"symbol": symbol, "size": 9, "line": {"width": 1, "color": "white"}},
                "name": kind,
                "hoverinfo": "text",
                "x": [(event.wall_s - run.began_s) / unit_s for event in those],
                "y": [_row_at(run, event.wall_s) for event in those],
                "text": [text(event.what) for event in those],
            }
        )
    charts: list[Chart] = [
        {
            "title": "Where the time went",
            "data": bars,
            "layout": {
                "barmode": "overlay",
                "xaxis": {"title": {"text": f"{unit} since the start"}},
                "yaxis": {"autorange": "reversed", "type": "category"},
                "height": 160 + 30 * len(rows),
            },
        }
    ]
    waits = {"waits": [_scaled(one.waits, 100.0) for one in run.ranks]}
    memory = {
        name: [_scaled(getattr(one.memory, key), 2.0**-30) for one in run.ranks]
        for key, name in (
            ("host", "host"),
            ("host_peak", "host, peak"),
            ("device", "GPU"),
            ("device_peak", "GPU, peak"),
        )
    }
    for title, unit, of_rank in (("How long each rank waited for others", "%", waits), ("Memory", "GiB", memory)):
        data = [
            {"type": "bar", "name": name, "x": [f"rank {one.rank}" for one in run.ranks], "y": values}
            for name, values in of_rank.items()
            if any(value is not None for value in values)
        ]
        charts.append({"title": title, "data": data, "layout": {"yaxis": {"title": {"text": unit}}}})
    return [chart for chart in charts if any(trace["x"] for trace in chart["data"])]


def _line(run: RunRecord, points: Sequence[tuple[float, float, float]], unit_s: float) -> Chart:
    kept = list(_thinned(points))
    return {
        "name": text(run.name),
        "step": [step for step, _, _ in kept],
        "time": [round((wall_s - run.began_s) / unit_s, 5) for _, wall_s, _ in kept],
        "value": [_finite(value) for _, _, value in kept],
    }


def _thinned(points: Sequence[tuple[float, float, float]]) -> Iterator[tuple[float, float, float]]:
    """The least and the greatest of each of some parts of ``points``, in their order; all of them if they are few."""
    length = max(1, -(-2 * len(points) // _MOST_POINTS))
    for begin in range(0, len(points), length):
        part = range(begin, min(begin + length, len(points)))
        ends = {pick(part, key=lambda at: points[at][2]) for pick in (min, max)}
        yield from (points[at] for at in (sorted(ends) if length > 2 else part))


def _speeds(run: RunRecord) -> Iterator[tuple[float, float, float]]:
    """Steps per second, of intervals that follow each other: (step, time, speed) at the end of each."""
    if not run.metrics:
        return
    begin = run.metrics[0]
    length_s = max(_LEAST_S, (run.metrics[-1]["wall_s"] - begin["wall_s"]) / _SPEEDS)
    for row in run.metrics:
        took_s = row["wall_s"] - begin["wall_s"]
        if took_s >= length_s and row["step"] > begin["step"]:
            yield row["step"], row["wall_s"], (row["step"] - begin["step"]) / took_s
            begin = row


def _row_at(run: RunRecord, wall_s: float) -> str:
    before = [one for one in run.generations() if one.began_s <= wall_s]
    return f"generation {before[-1].number if before else 0}"


def _unit(length_s: float) -> tuple[str, float]:
    return next((unit for unit in _UNITS if length_s >= 3 * unit[1]), _UNITS[-1])


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _scaled(value: float | None, by: float) -> float | None:
    return None if value is None else _finite(value * by)
