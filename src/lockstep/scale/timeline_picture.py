"""A median step and the worst one as a picture: of each rank a lane for what it computes, and one for what it sends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.report import new_figure, save_svg
from lockstep.scale.bench_picture import PART_COLOURS
from lockstep.scale.timeline import Span, clock_offsets, laid_out
from lockstep.step_record import RankRecord

_LANE = 0.38  # of the height of a rank
_SENDS = "#59a14f"

Lanes = dict[int, tuple[list[Span], list[Span]]]
"""By rank: what it computes, with exposed communication among it, and what it sends, both since the step began."""


def lanes_of(records: Sequence[RankRecord], sends: Mapping[int, Sequence[Span]], place: int) -> Lanes:
    """The lanes of the step at ``place`` of each record. A pure function."""
    offsets = clock_offsets(records)
    begins = [r.began_at - offset for r, offset in zip(records, offsets, strict=True)]
    starts = [begin + r.steps[place].began_s for r, begin in zip(records, begins, strict=True)]
    origin = min(starts)
    lanes: Lanes = {}
    for record, begin in zip(records, begins, strict=True):
        own = [_shifted(span, begin - origin) for span in laid_out(record.steps[place])]
        end = max(span.end_s for span in own)
        sent = [_shifted(span, -origin) for span in sends.get(record.rank, ())]
        within = [span for span in sent if span.end_s > 0 and span.start_s < end]
        lanes[record.rank] = ([span for span in own if span.end_s > span.start_s], within)
    return lanes


def _shifted(span: Span, by_s: float) -> Span:
    return Span(span.name, span.start_s + by_s, span.end_s + by_s)


def draw_timeline(steps: Mapping[str, Lanes], path: Path, title: str) -> None:
    """Write the picture of some steps, by their titles, to ``path``, and what it shows as JSON beside it.

    Raises:
        SettingError: if matplotlib is not installed; the JSON file is there then.
    """
    shown = {
        name: {
            rank: {"computes": [asdict(s) for s in own], "sends": [asdict(s) for s in sent]}
            for rank, (own, sent) in lanes.items()
        }
        for name, lanes in steps.items()
    }
    path.with_suffix(".json").write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
    ranks = max(len(lanes) for lanes in steps.values())
    drawing = new_figure(11, 1.5 + 0.9 * ranks * len(steps))
    for axes, (name, lanes) in zip(
        drawing.subplots(len(steps), squeeze=False, sharex=True)[:, 0], steps.items(), strict=True
    ):
        _draw_step(axes, lanes)
        axes.set_title(name, loc="left", fontsize="medium")
    axes.set_xlabel("ms")
    handles = [_patch(axes, part, colour) for part, colour in PART_COLOURS.items()]
    drawing.legend(
        handles=[*handles, _patch(axes, "sends", _SENDS)], loc="outside lower center", ncols=7, fontsize="small"
    )
    drawing.suptitle(title)
    save_svg(drawing, path)


def _draw_step(axes: Any, lanes: Lanes) -> None:
    for rank, (own, sent) in lanes.items():
        for span in own:
            exposed = span.name == "exposed"
            lane = rank + _LANE if exposed else rank
            _bar(axes, span, lane, PART_COLOURS[span.name], hatch="///" if exposed else None)
        for span in sent:
            _bar(axes, span, rank + _LANE, _SENDS, zorder=1)
    axes.set_yticks([rank + _LANE / 2 for rank in lanes], [f"rank {rank}" for rank in lanes])
    axes.invert_yaxis()


def _bar(axes: Any, span: Span, lane: float, colour: str, hatch: str | None = None, zorder: int = 2) -> None:
    width = 1e3 * (span.end_s - span.start_s)
    axes.barh(
        lane, width, _LANE, 1e3 * span.start_s, color=colour, hatch=hatch, edgecolor="white", lw=0.4, zorder=zorder
    )


def _patch(axes: Any, name: str, colour: str) -> Any:
    return axes.barh(0, 0, color=colour, hatch="///" if name == "exposed" else None, edgecolor="white", label=name)
