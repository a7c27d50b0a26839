"""Trials whose parameters no algorithm chooses, each bound to the number of a trial before that is claimed.

These are the trials that users enqueue, and the repeats of the best ones. A worker that claims a number looks here for
it, so such a trial needs no claim of its own: it is evaluated once, however many workers there are, and a worker that
begins it again after a kill finds the same here. Numbers are bound under the lock of the claims.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from lockstep.errors import SettingError
from lockstep.records import MOST_GROWN, from_known, read_bytes, value_in
from lockstep.small_files import replace_text
from lockstep.tune.record.journal import JournalReader, SearchPlan
from lockstep.tune.record.records import TrialBegan
from lockstep.tune.record.trial_claims import TrialClaims
from lockstep.tune.search import Space
from lockstep.tune.search.dimensions import decoded, encoded

_FILE = "planned.json"


@dataclass(frozen=True, slots=True)
class PlannedTrial:
    """What the trial ``number`` is to be."""

    number: int
    given: dict[str, Any] | None  #: parameters by name, their values as `encoded` has them; others are the algorithm's
    repeats: int | None = None  #: instead: the trial that it evaluates again...
    repeat: int = 0  #: ... the how manieth time, from 1

    @property
    def params(self) -> dict[str, object]:
        """The parameters that are given."""
        return {name: decoded(value) for name, value in (self.given or {}).items()}


class PlannedTrials:
    """Those of one search, which may be running.

    Args:
        directory: of the search.
        claims: of the same.
    """

    def __init__(self, directory: Path, claims: TrialClaims) -> None:
        self._path: Final = directory / _FILE
        self._claims: Final = claims
        self._known: dict[int, PlannedTrial] = {}
        self._seen: tuple[int, ...] = ()

    def by_number(self) -> Mapping[int, PlannedTrial]:
        """All, by their numbers; a look at the file's date if there are no new ones.

        Raises:
            SettingError: if the file is damaged.
        """
        try:
            status = self._path.stat()
            if self._seen != (seen := (status.st_ino, status.st_size, status.st_mtime_ns)):
                found = [from_known(PlannedTrial, one) for one in value_in(read_bytes(self._path, MOST_GROWN))]
                for one in found:
                    one.params  # noqa: B018 - raises where these are none
                self._known, self._seen = {one.number: one for one in found}, seen
        except FileNotFoundError:
            pass
        except (TypeError, ValueError) as error:
            raise SettingError(f"{self._path} is damaged: {error}; put it back from a copy") from error
        return self._known

    def enqueue(self, trials: Sequence[Mapping[str, object]], least: int, *, again: bool) -> tuple[int, ...]:
        """Bind ``trials`` to the next numbers that are not claimed and not bound, and return these.

        Args:
            trials: parameters of each.
            least: no number below is free.
            again: also what was bound before; else only what of ``trials`` exceeds that.
        """
        given: list[dict[str, Any] | None] = [
            {name: encoded(value) for name, value in trial.items()} for trial in trials
        ]
        with self._claims.locked() as claimed:
            before = [one.given for one in self.by_number().values()]
            for one in [] if again else before:
                with contextlib.suppress(ValueError):
                    given.remove(one)
            first = max(claimed, least, 1 + max(self._known, default=-1))
            new = [PlannedTrial(first + index, one) for index, one in enumerate(given)]
            if new:
                self._write([*self._known.values(), *new])
            return tuple(one.number for one in new)

    def repeat(self, wanted: Sequence[tuple[int, int]], least: int) -> None:
        """Bind repeats to the next numbers that are not claimed; what users have enqueued there comes after them.

        Args:
            wanted: of each repeat the trial that it evaluates again, and the how manieth time.
            least: no number below is free.
        """
        with self._claims.locked() as claimed:
            known = list(self.by_number().values())
            bound = self.repeats()
            first = max(claimed, least, 1 + max(bound.values(), default=-1))
            waiting = [one for one in known if one.number >= first]
            new = [PlannedTrial(0, None, of, index) for of, index in wanted if (of, index) not in bound]
            after = [replace(one, number=first + index) for index, one in enumerate([*new, *waiting])]
            self._write([one for one in known if one.number < first] + after)

    def repeats(self) -> dict[tuple[int, int], int]:
        """The number of each repeat, by the trial that it evaluates again and the how manieth time."""
        return {(one.repeats, one.repeat): one.number for one in self.by_number().values() if one.repeats is not None}

    def _write(self, trials: Sequence[PlannedTrial]) -> None:
        replace_text(self._path, json.dumps([asdict(one) for one in trials]) + "\n", durable=True)


def enqueue(run_dir: str | Path, trials: Sequence[Mapping[str, object]], *, again: bool = True) -> tuple[int, ...]:
    """Evaluate ``trials`` next in the search in ``run_dir``, which may run or be resumed later; returns their numbers.

    Each is evaluated once, by the worker that claims its number. The algorithm chooses the parameters that are not
    given. Where all trials of the search are claimed, they wait until it is resumed with more.

    Args:
        run_dir: of the search.
        trials: parameters of each, by name.
        again: also those that are enqueued already; else they are not enqueued twice.

    Raises:
        SettingError: if there is no search, or a parameter is none of its space.
    """
    directory = Path(run_dir)
    plan = SearchPlan.read(directory)
    if plan is None:
        raise SettingError(f"{directory} holds no search; enqueue trials once it has begun, or in tune(..., enqueue=)")
    space = Space.from_json(plan.space)
    for params in trials:
        space.check_some(params)
    if not trials:
        return ()
    with contextlib.closing(TrialClaims(directory)) as claims:
        planned = PlannedTrials(directory, claims)
        with contextlib.closing(JournalReader(directory)) as reader:
            # A power failure may have cost claims of trials that are in the journal.
            begun = [one.record.number for one in reader.read() if isinstance(one.record, TrialBegan)]
        return planned.enqueue(trials, 1 + max(begun, default=-1), again=again)
