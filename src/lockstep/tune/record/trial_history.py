"""Trials from the records of a journal, in whatever order the workers' files are read; when their search improved."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.tune.record.records import AttemptCut, Entry, LossReported, MovePlanned, TrialBegan, TrialEnded
from lockstep.tune.record.trial import MadeMove, Reported, Trial


@dataclass(slots=True)
class _Attempt:
    """The records of one attempt at a trial."""

    worker: int = 0
    began: TrialBegan | None = None
    last_s: float = 0.0  #: of its newest record
    cut: AttemptCut | None = None
    reports: dict[int, Reported] = field(default_factory=dict)

    def run_s(self, ended: TrialEnded | None) -> float:
        if ended is not None:
            return ended.run_s
        if self.cut is not None:
            return self.cut.run_s
        return max(0.0, self.last_s - self.began.at_s) if self.began is not None else 0.0


@dataclass(slots=True)
class _Story:
    """The records of one trial."""

    attempts: dict[int, _Attempt] = field(default_factory=dict)
    ended: dict[int, TrialEnded] = field(default_factory=dict)


class TrialHistory:
    """Collects entries of a journal and gives the trials; an entry that is added twice counts once.

    Attempts of a trial may be in different files. If two of them have ended, because a worker was wrongly taken for
    dead, the earlier attempt counts.
    """

    def __init__(self) -> None:
        self._stories: dict[int, _Story] = {}
        self._trials: dict[int, Trial | None] = {}  # computed from them, until a new record comes
        self._moves: dict[tuple[int, int], MovePlanned] = {}
        self.has_violations = False  #: some trial violates the constraints, so the search has some
        self.ended = 0  #: number of trials that have ended
        self._running: set[int] = set()  # the numbers of those that have begun and not ended
        self._repeats: dict[int, dict[int, int]] = {}  # by the repeated trial: the number of each repeat
        self._repeated: dict[int, int] = {}  # by the number of a repeat: the trial that it repeats
        self._expected: dict[int, int] = {}  # by worker: serial number of the next entry

    def add(self, entry: Entry) -> bool:
        """Add ``entry``; returns whether it was new. Entries of one worker must come in their order."""
        if entry.serial < self._expected.get(entry.worker, 0):
            return False
        self._expected[entry.worker] = entry.serial + 1
        record = entry.record
        if isinstance(record, MovePlanned):
            self._moves[entry.worker, entry.serial] = record
            return True
        story = self._stories.setdefault(record.number, _Story())
        # A repeat begins after what it repeats; of another one a damaged file tells.
        if isinstance(record, TrialBegan) and record.repeats is not None and record.repeats < record.number:
            self._repeated[record.number] = record.repeats
            self._repeats.setdefault(record.repeats, {})[record.repeat or 0] = record.number
        self._trials.pop(record.number, None)
        self._trials.pop(self._repeated.get(record.number, -1), None)
        attempt = story.attempts.setdefault(record.attempt, _Attempt())
        attempt.worker, attempt.last_s = entry.worker, record.at_s
        match record:
            case TrialBegan():
                attempt.began = record
                self._running |= set() if story.ended else {record.number}
            case LossReported(step=step, loss=loss, at_s=at_s):
                attempt.reports[step] = Reported(step, loss, at_s)
            case AttemptCut():
                attempt.cut = record
            case TrialEnded():
                self.ended += not story.ended
                self._running.discard(record.number)
                story.ended[record.attempt] = record
                if record.violation and not self.has_violations:
                    self.has_violations = True
                    self._trials.clear()
        return True

    def trial(self, number: int) -> Trial | None:
        """The trial ``number``; None if the record of its beginning has not been read."""
        if number not in self._trials and number in self._stories:
            made = _trial(number, self._stories[number], math.inf if self.has_violations else 0.0)
            if made is not None and (repeats := sorted(self._repeats.get(number, {}).items())):
                found = [self.trial(repeat) for _, repeat in repeats]
                made = replace(made, repeats=tuple(one for one in found if one is not None))
            self._trials[number] = made
        return self._trials.get(number)

    def is_repeat(self, number: int) -> bool:
        """Whether the trial ``number`` is a further evaluation of another one."""
        return number in self._repeated

    def trials(self) -> tuple[Trial, ...]:
        """All trials whose beginning has been read, in the order of their numbers; repeats are parts of theirs."""
        found = map(self.trial, sorted(self._stories.keys() - self._repeated.keys()))
        return tuple(trial for trial in found if trial is not None)

    def running(self) -> tuple[Trial, ...]:
        """The trials that have begun and not ended, in the order of their numbers, without repeats."""
        running = sorted(self._running - self._repeated.keys())
        return tuple(trial for trial in map(self.trial, running) if trial is not None)

    def moves(self) -> tuple[MadeMove, ...]:
        """All moves between islands, by time."""
        planned = [move for _, move in sorted(self._moves.items(), key=lambda item: (item[1].at_s, item[0]))]
        places = {(move.replaced_by, move.source): move.number for move in planned if move.what == "replaced"}
        return tuple(
            MadeMove(
                numbers=(move.number,),
                source=move.source,
                target=move.target,
                copies=move.what == "copied",
                replaced=(places[move.number, move.target],) if (move.number, move.target) in places else (),
                at_s=move.at_s,
            )
            for move in planned
            if move.what != "replaced"
        )

    @property
    def next_number(self) -> int:
        """One more than the highest number of a trial, repeats included."""
        return 1 + max(self._stories, default=-1)

    def has_ended(self, number: int) -> bool:
        """Whether the trial ``number`` has ended."""
        story = self._stories.get(number)
        return story is not None and bool(story.ended)

    def began_at_s(self, number: int) -> float:
        """When the newest attempt at the trial ``number`` began, in seconds since 1970."""
        story = self._stories[number]
        return max(one.began.at_s for one in story.attempts.values() if one.began is not None)

    def cuts(self, number: int) -> tuple[AttemptCut, ...]:
        """The recorded interruptions of attempts at the trial ``number``, in their order."""
        story = self._stories.get(number)
        if story is None:
            return ()
        return tuple(one.cut for _, one in sorted(story.attempts.items()) if one.cut is not None)


def _trial(number: int, story: _Story, unknown_violation: float) -> Trial | None:
    attempts = [attempt for _, attempt in sorted(story.attempts.items())]
    begun = next((one.began for one in attempts if one.began is not None and one.began.point is not None), None)
    if begun is None:
        return None
    ended = story.ended[min(story.ended)] if story.ended else None
    # Attempts after the one that ended do not count.
    last = max(story.attempts) if ended is None else ended.attempt
    counted = [attempt for key, attempt in sorted(story.attempts.items()) if key <= last]
    reports: dict[int, Reported] = {}
    for attempt in counted:
        # An attempt that resumed from a checkpoint repeats the reports after it.
        first = min(attempt.reports, default=None)
        if first is not None:
            reports = {step: report for step, report in reports.items() if step < first}
        reports.update(attempt.reports)
    details: dict[str, Any] = {}
    if ended is not None:
        unknown = unknown_violation if ended.state == "stopped" else 0.0
        details = {
            "losses": ended.losses,
            "violation": unknown if ended.violation is None else ended.violation,
            "reason": ended.reason,
            "converged": ended.converged,
            "ended_at_s": ended.at_s,
        }
    ran = story.attempts[last]
    return Trial(
        number=number,
        params=begun.params or {},
        point=begun.point or (),
        state="running" if ended is None else ended.state,
        island=begun.island,
        worker=ran.worker,
        ranks=ran.began.ranks if ran.began is not None else begun.ranks,
        parents=begun.parents,
        operator=begun.operator,
        inherits=begun.inherits,
        attempts=last,
        reports=tuple(reports[step] for step in sorted(reports)),
        began_at_s=min((one.began.at_s for one in counted if one.began is not None), default=begun.at_s),
        run_s=sum(
            story.attempts[key].run_s(ended if ended is not None and key == ended.attempt else None)
            for key in sorted(story.attempts)
            if key <= last
        ),
        **details,
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """What was known when a trial ended."""

    best: Trial | None  #: the last one that was an improvement
    before: Trial | None  #: the one before that
    since: int  #: trials that have ended since
    longest: int  #: most trials in a row without an improvement


_NOTHING = _Step(None, None, 0, 0)


class Improvements:
    """Which trials were better than all that had ended before; of several losses, by the first.

    Trials may be added in any order; those that end late cost less than a microsecond each.

    Args:
        least: an improvement is by more than this part of the best loss until then, such as 0.01.
    """

    def __init__(self, least: float = 0.0) -> None:
        self._least = least
        self._ended: list[tuple[float, int, Trial]] = []
        self._steps: list[_Step] = []  # after each of the first of them
        self._unsorted = False

    def add(self, trials: Iterable[Trial]) -> None:
        """These have ended; those that have not are left out."""
        for trial in trials:
            if trial.ended_at_s is None:
                continue
            entry = (trial.ended_at_s, trial.number, trial)
            if self._ended and entry[:2] < self._ended[-1][:2]:
                # What comes after it is to be seen anew.
                while self._steps and entry[:2] < self._ended[len(self._steps) - 1][:2]:
                    self._steps.pop()
                self._unsorted = True
            self._ended.append(entry)

    @property
    def newest(self) -> _Step:
        """What is known after the last of them."""
        if self._unsorted:
            self._ended.sort(key=lambda entry: entry[:2])
            self._unsorted = False
        for _, _, trial in self._ended[len(self._steps) :]:
            self._steps.append(self._after(trial, self._steps[-1] if self._steps else _NOTHING))
        return self._steps[-1] if self._steps else _NOTHING

    def _after(self, trial: Trial, last: _Step) -> _Step:
        if trial.losses and (last.best is None or self._improves(trial, last.best)):
            return _Step(trial, last.best, 0, last.longest)
        return _Step(last.best, last.before, last.since + 1, max(last.longest, last.since + 1))

    def _improves(self, trial: Trial, best: Trial) -> bool:
        kind, before = (trial.violation, trial.is_cut_short), (best.violation, best.is_cut_short)
        return kind < before or (kind == before and best.loss - trial.loss > self._least * abs(best.loss))
