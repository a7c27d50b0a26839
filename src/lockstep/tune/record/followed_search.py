"""A search that runs, for those who only read it: each record is read once."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from lockstep.tune.record.journal import JournalReader, SearchPlan, SearchRecord
from lockstep.tune.record.records import AttemptCut
from lockstep.tune.record.trial_history import TrialHistory


class FollowedSearch:
    """The search in ``directory``, which need not have begun; each look reads only new records."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._plan: SearchPlan | None = None
        self._reader, self._history = JournalReader(directory), TrialHistory()
        self._deaths: list[AttemptCut] = []

    def record(self) -> SearchRecord | None:
        """The search as it is now; None before it has begun."""
        # Each time: a resumed search may be asked for another number of trials.
        self._plan = SearchPlan.read(self._directory) or self._plan
        if self._plan is None:
            return None
        for entry in self._reader.read():
            if self._history.add(entry) and isinstance(entry.record, AttemptCut) and entry.record.reason:
                self._deaths.append(entry.record)
        return SearchRecord(self._plan.space, self._plan.settings, self._history.trials(), self._history.moves())

    def new_deaths(self) -> list[AttemptCut]:
        """What ended attempts whose ranks died or hung, of the records that `record` has read since the last call."""
        found, self._deaths = self._deaths, []
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
