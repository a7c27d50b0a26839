"""A search as text, for terminals and logs: what ``lockstep tune --show RUN`` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.formatting import duration, harmless, plural
from lockstep.tune.record.journal import SearchRecord
from lockstep.tune.record.trial import Trial
from lockstep.tune.record.trial_history import Improvements
from lockstep.tune.results.importance import PART
from lockstep.tune.results.result import SearchResult

_STATES = {"done": "done", "stopped": "stopped early", "failed": "failed", "running": "running"}
_FAILURES = 8
_FRONT = 20
#: Of so many trials the mean time is taken: parameters that train longer may be found better as the search goes on.
_LAST = 50


def show(record: SearchRecord, width: int = 80, top: int = 5) -> str:
    """Counts, the best trial, the ``top`` trials of each island, reasons of failures; lines have at most ``width``."""
    result = SearchResult(record)
    lines = [counts_of(record)]
    if (left_s := time_left_s(record, last_s(record))) is not None:
        lines.append(f"expected to take {duration(left_s)} more")
    lines += [*improvement_lines(record, last_s(record)), *warm_start_lines(record.settings)]
    if best := result.top(1):
        lines += ["", f"best: trial {best[0].number}, {_losses(best[0])}{_where(best[0])}"]
        name_width = max((len(name) for name in best[0].params), default=0)
        lines += [f"  {name:<{name_width}}  {_value(value)}" for name, value in best[0].params.items()]
    if any(len(trial.losses) > 1 for trial in record.trials):
        front = result.pareto_front
        lines += ["", f"Pareto front: {plural(len(front), 'trial')}", *_table(front[:_FRONT])]
        lines += [f"  ... and {len(front) - _FRONT} more"] if len(front) > _FRONT else []
    for island, trials in result.top_by_island(top).items():
        if trials:
            bred = sum(trial.island == island for trial in record.trials)
            lines += ["", f"island {island}: the best of {plural(bred, 'trial')}", *_table(trials)]
    if shares := result.importances:
        lines += ["", f"importance for the loss (from .. to: {PART:.0%} of resampled searches)"]
        names = max(len(one.name) for one in shares)
        lines += [f"  {one.name:<{names}}  {one.share:4.0%}  {one.low:4.0%} .. {one.high:.0%}" for one in shares]
    if failures := result.failures:
        lines += ["", "failed:"]
        for failure in failures[:_FAILURES]:
            some = ", ".join(map(str, failure.numbers[:5])) + (", ..." if len(failure.numbers) > 5 else "")
            noun = "trial" if len(failure.numbers) == 1 else f"{len(failure.numbers)} trials:"
            lines.append(f"  {failure.reason or 'no reason known'} ({noun} {some})")
        if len(failures) > _FAILURES:
            lines.append(f"  ... and {plural(len(failures) - _FAILURES, 'other reason')}")
    shown = map(harmless, lines)  # reasons and values are whatever a script, or who writes its journal, says
    return "\n".join(line if len(line) <= width else f"{line[: width - 3]}..." for line in shown)


def counts_of(record: SearchRecord) -> str:
    """One line: the number of trials in each state, wall time, and the time of all ranks."""
    result = SearchResult(record)
    told = ", ".join(f"{number} {_STATES[state]}" for state, number in result.counts.items() if number)
    planned = record.settings.get("trials")
    total = f"{len(record.trials)} of {planned}" if isinstance(planned, int) else str(len(record.trials))
    words = [f"{total} trials: {told}" if told else f"{total} trials"]
    if record.trials:
        words += [duration(elapsed_s(record)), f"{duration(result.rank_hours * 3600)} of ranks"]
    if repeats := [one for trial in record.trials for one in trial.repeats]:
        with_loss = sum(bool(trial.losses) for trial in record.trials)
        planned = record.settings.get("repeats", 0) * min(record.settings.get("repeat_best", 0), with_loss)
        ended = sum(one.state != "running" for one in repeats)
        words.insert(1, f"{ended} of {max(planned, len(repeats))} repeats")
    return " | ".join(words)


def time_left_s(record: SearchRecord, now_s: float) -> float | None:
    """How long the search will still take if its trials go on as the last ones did; None if none runs or has ended.

    By the mean time of the last trials that have ended, over as many workers as evaluate one now.
    """
    evaluations = list(record.evaluations)
    running = [one for one in evaluations if one.state == "running"]
    ended = sorted((one for one in evaluations if one.ended_at_s is not None), key=lambda one: one.ended_at_s or 0.0)
    planned, settings = record.settings.get("trials"), record.settings
    if not running or not ended or not isinstance(planned, int):
        return None
    repeats = settings.get("repeats", 0) * min(settings.get("repeat_best", 0), planned)
    left: float = max(planned - len(record.trials), 0) + max(repeats - (len(evaluations) - len(record.trials)), 0)
    last = ended[-_LAST:]
    mean_s = sum(one.run_s for one in last) / len(last)
    rest_s = sum(max(mean_s - (now_s - one.began_at_s), 0.0) for one in running)
    return (left * mean_s + rest_s) / len(running)


def improvement_lines(record: SearchRecord, now_s: float) -> list[str]:
    """When the search has last improved and by how much, and whether that has ended it."""
    patience, least = record.settings.get("patience"), record.settings.get("min_improvement", 0.0)
    counted, any_gain = Improvements(least), Improvements()
    for improvements in (counted, any_gain):
        improvements.add(record.trials)
    lines, last = [], any_gain.newest
    if (best := last.best) is not None and best.ended_at_s is not None:
        before = "" if last.before is None else f"from {_value(last.before.loss)} "
        ago, since = duration(max(now_s - best.ended_at_s, 0.0)), plural(last.since, "trial")
        lines.append(f"last improvement: trial {best.number}, {before}to {_value(best.loss)}, {ago} and {since} ago")
    if patience is not None and counted.newest.longest >= patience:
        by = f" of more than {least:.3g} of the loss" if least else ""
        lines.append(f"ended: no improvement{by} in {plural(patience, 'trial')}")
    return lines


def warm_start_lines(settings: Mapping[str, Any]) -> list[str]:
    """For each search that this one began from, how many of its trials are known here, and why the others are not."""
    lines = []
    for source, told in settings.get("warm_start", {}).items():
        others = "; ".join(f"{number} {reason}" for reason, number in told.items() if reason != "used")
        lines.append(
            f"known from {source}: {plural(told.get('used', 0), 'trial')}{f' (not {others})' if others else ''}"
        )
    return lines


def elapsed_s(record: SearchRecord) -> float:
    """Seconds from the first trial's begin to the newest record of a trial, pauses between resumes included."""
    began = min((trial.began_at_s for trial in record.trials), default=0.0)
    return max(last_s(record) - began, 0.0)


def last_s(record: SearchRecord) -> float:
    """When the newest record of a trial was written, in seconds since 1970."""
    last = (trial.ended_at_s or max((one.at_s for one in trial.reports), default=0.0) for trial in record.evaluations)
    return max(last, default=0.0)


def _table(trials: Sequence[Trial]) -> list[str]:
    rows = [("trial", "loss", "state", "parameters")]
    rows += [
        (str(one.number), f"{_numbers(one.losses)}{_repeats(one)}", _STATES[one.state], parameters(one))
        for one in trials
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        f"  {number:>{widths[0]}}  {losses:<{widths[1]}}  {state:<{widths[2]}}  {params}".rstrip()
        for number, losses, state, params in rows
    ]


def parameters(trial: Trial) -> str:
    """Such as ``lr=0.0123 layers=4``; nothing in it acts on a terminal."""
    return harmless(" ".join(f"{name}={_value(value)}" for name, value in trial.params.items()))


def _losses(trial: Trial) -> str:
    noun = "loss" if len(trial.losses) == 1 else "losses"
    return f"{noun} {_numbers(trial.losses)}{_repeats(trial)}{_violation(trial.violation)}"


def _repeats(trial: Trial) -> str:
    """The mean over repeats, and how far they are apart."""
    if math.isnan(trial.mean):
        return ""
    spread = "" if math.isnan(trial.spread) else f" +- {trial.spread:.2g}"
    return f", mean of {plural(len(trial.repeat_losses), 'repeat')} {_value(trial.mean)}{spread}"


def _violation(by: float) -> str:
    if math.isinf(by):
        return ", stopped before it was known whether it violates the constraints"
    return f", violates the constraints by {_value(by)}" if by else ""


def _where(trial: Trial) -> str:
    stopped = f", stopped early after {plural(len(trial.reports), 'report')}" if trial.state == "stopped" else ""
    return f", island {trial.island}{stopped}"


def _numbers(losses: Sequence[float]) -> str:
    return ", ".join(map(_value, losses))


def _value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else str(value)
