"""The part of a search that the leader of one worker does: it chooses the next trial and records what happens to it.

    journal of all workers ─► Breeding ─► TrialOrder ─► (the ranks evaluate) ─► Outcome ─► own journal

No worker waits for another: it breeds from the records that it has read so far. After a kill, its journal and the
claims say which trials it had begun.
"""

from __future__ import annotations

import bisect
import contextlib
import heapq
import math
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from lockstep.checkpoint import list_checkpoints
from lockstep.errors import SettingError
from lockstep.records import JsonRecord
from lockstep.trial_contract import CHECKPOINTS
from lockstep.tune.record.journal import JournalReader, JournalWriter, collector_paused
from lockstep.tune.record.planned_trials import PlannedTrial, PlannedTrials
from lockstep.tune.record.records import AttemptCut, LossReported, MovePlanned, TrialBegan, TrialEnded
from lockstep.tune.record.search_directory import Death, Search, WorkerPlacement
from lockstep.tune.record.trial import Trial
from lockstep.tune.record.trial_claims import TrialClaims
from lockstep.tune.record.trial_history import Improvements, TrialHistory
from lockstep.tune.record.warm_start import WarmStart
from lockstep.tune.results.result import rank_of
from lockstep.tune.search import Move, Point, Proposal
from lockstep.tune.search.pareto import dominates_losses
from lockstep.tune.stopping import EndedCurves, OtherTrials, make_stopping
from lockstep.tune.workers.breeding import Breeding
from lockstep.tune.workers.outcome import Outcome


@dataclass(frozen=True, slots=True)
class TrialOrder(JsonRecord):
    """A trial to evaluate now."""

    number: int
    attempt: int
    point: Point
    inherits: int | None
    repeats: int | None = None  #: the trial that is evaluated again...
    repeat: int = 0  #: ... the how manieth time


class SearchWorker:
    """Chooses trials for one worker and writes its journal; on the leader of the worker.

    Args:
        search: what is searched.
        placement: which worker it is.
        ranks: number of ranks of the worker.
        death: how the worker's last generation died; None: this is the first one, or the last one was stopped.
        leave_at_s: when no trial begins any more, for the job of this worker ends; in seconds since 1970.
        now: seconds since 1970.

    Raises:
        SettingError: if another process writes this worker's journal, or the file system has no locks.
    """

    def __init__(
        self,
        search: Search,
        placement: WorkerPlacement,
        *,
        ranks: int,
        death: Death | None,
        leave_at_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        directory, space, settings = search.directory, search.space, search.settings
        self._directory, self._ranks = directory, ranks
        self._worker, self._workers = placement.worker, placement.workers
        self._space, self._settings, self._death = space, settings, death
        self._leave_at_s, self._now = leave_at_s, now
        limit_s = settings.time_limit_s
        self._limit_at_s = math.inf if limit_s is None else placement.began_s + limit_s  # in seconds since 1970
        self._stopping = make_stopping(settings.stopping)
        self._warm_start: Final = WarmStart.read(directory.path, space)
        self._breeding = self._new_breeding()
        self._improvements, self._kept, self._curves = self._new_views()
        with contextlib.ExitStack() as stack:
            self._writer: Final = stack.enter_context(contextlib.closing(JournalWriter(directory.path, self._worker)))
            self._claims: Final = stack.enter_context(contextlib.closing(TrialClaims(directory.path)))
            self._reader: Final = stack.enter_context(contextlib.closing(JournalReader(directory.path)))
            self._open: Final = stack.pop_all()
        self._planned: Final = PlannedTrials(directory.path, self._claims)
        self._history: Final = TrialHistory()
        self._unlearnt: dict[int, None] = {}  # trials that have ended and that breeding has not been given yet
        self._learnt: dict[int, None] = {}  # those that it has been given, in their order
        self._moves: list[Move] = []  # that it has been given
        with collector_paused():
            self._learn()
        self._unfinished = self._claimed_before(self._worker)
        self._began_s = 0.0  # when the current attempt began

    @property
    def is_over(self) -> bool:
        """Whether all trials of the search have ended; after its time limit or its patience, all that had begun."""
        self._learn()
        most, is_late = self._most, self._now() >= self._limit_at_s
        if is_late:
            most = min(most, self._claims.count())
        return self._history.ended >= most and (is_late or not self._unbound_repeats())

    @property
    def _most(self) -> int:
        """How many trials there are to be with all repeats, as far as is known now."""
        bound = self._planned.repeats().values()
        to_last_repeat = 1 + max(bound, default=-1)
        if self._improves_no_more:
            return max(self._claims.count(), to_last_repeat)
        return max(self._settings.trials + len(bound), to_last_repeat)

    def _unbound_repeats(self) -> list[tuple[int, int]]:
        """The repeats of what are the best trials now that are bound to no number yet, and the how manieth each is."""
        if not self._settings.repeats:
            return []
        ended = (trial for trial in self._history.trials() if trial.losses and trial.state != "running")
        best = heapq.nsmallest(self._settings.repeat_best, ended, key=rank_of)
        bound = self._planned.repeats()
        wanted = [(trial.number, 1 + index) for index in range(self._settings.repeats) for trial in best]
        return [one for one in wanted if one not in bound]

    @property
    def _improves_no_more(self) -> bool:
        """Whether no further trial begins, for too many have ended without an improvement."""
        patience = self._settings.patience
        return patience is not None and self._improvements.newest.longest >= patience

    def next(self) -> TrialOrder | None:
        """The trial to evaluate now, which is recorded as begun; None if there is none for this worker."""
        while self._unfinished:
            if (order := self._go_on_with(self._unfinished.pop(0))) is not None:
                return order
        if self._now() >= min(self._limit_at_s, self._leave_at_s):
            return None
        while (number := self._claim()) is not None:
            # A power failure may have cost claims of trials that are in the journal.
            self._learn()
            trial = self._history.trial(number)
            if trial is not None and trial.worker != self._worker and not self._directory.is_gone(trial.worker):
                self._claims.take_over(number, self._worker, trial.worker)  # who goes on with it, or has ended it
                continue
            if (order := self._go_on_with(number)) is not None:
                return order
        self._learn()
        while (orphan := self._take_over()) is not None:
            if (order := self._go_on_with(orphan)) is not None:
                return order
        return None

    def _claim(self) -> int | None:
        """Claim a new trial and return its number; None if no further one is to begin."""
        self._learn()
        if (number := self._claims.claim(self._worker, self._most)) is None and (wanted := self._unbound_repeats()):
            # Trials that others evaluate may turn out better; their repeats come then, and nobody waits for them.
            self._planned.repeat(wanted, self._history.next_number)
            return self._claims.claim(self._worker, self._most)
        return number

    def report(self, order: TrialOrder, loss: float, step: int) -> str:
        """Record that the trial of ``order`` has reported ``loss``; returns the reason to stop it, or ``""``."""
        self._writer.append(LossReported(order.number, order.attempt, step, loss, self._now()))
        self._learn()
        trial = self._history.trial(order.number)
        assert trial is not None, "it has begun"
        # A repeat is to end as its trial did, and is compared with nobody.
        return self._stopping.stops(trial, () if order.repeats is not None else self._others(order.number))

    def _others(self, number: int) -> OtherTrials:
        running = [trial for trial in self._history.running() if trial.number != number]
        return OtherTrials(
            self._curves, running, lambda: [other for other in self._history.trials() if other.number != number]
        )

    def end(self, order: TrialOrder, outcome: Outcome) -> None:
        """Record how the attempt of ``order`` ended; an end of the trial is kept as `JournalWriter.append` says."""
        at_s = self._now()
        run_s = at_s - self._began_s
        if outcome.state == "interrupted" or outcome.state == "lost":
            self._writer.append(AttemptCut(order.number, order.attempt, at_s, run_s, outcome.reason))
            return
        losses, converged = outcome.losses, False
        if outcome.state == "stopped":
            losses, converged = self._stopped(order)
        self._writer.append(
            TrialEnded(
                order.number,
                order.attempt,
                outcome.state,
                at_s,
                run_s,
                losses=losses,
                violation=outcome.violation,
                reason=outcome.reason,
                converged=converged,
            )
        )
        self._learn()
        if order.repeats is None:
            for move in self._breeding.plan_moves(order.number):
                self._writer.append(_planned(move, at_s))
        self._remove_checkpoints(order.number)

    def close(self) -> None:
        """Flush the journal to the disk and let other processes write it."""
        self._open.close()

    def _stopped(self, order: TrialOrder) -> tuple[tuple[float, ...], bool]:
        """The losses of a stopped trial, as far as they compare, and whether it had come to its own end."""
        self._learn()
        trial = self._history.trial(order.number)
        if trial is None or not trial.reports or self._settings.objectives > 1:
            return (), False
        loss = trial.reports[-1].loss
        # Nobody to compare with, and stopped all the same.
        return ((loss,) if math.isfinite(loss) else ()), bool(self._stopping.stops(trial, ()))

    def _learn(self) -> None:
        """Read the new records of all workers and give them to breeding; costs what is new."""
        moves: list[Move] = []
        had_violations, is_late = self._history.has_violations, False
        for entry in self._reader.read():
            if not self._history.add(entry):
                continue
            if isinstance(entry.record, MovePlanned):
                moves.append(_move(entry.record))
                continue
            is_late |= entry.record.number in self._learnt
            if isinstance(entry.record, TrialEnded) and entry.record.number not in self._learnt:
                self._unlearnt[entry.record.number] = None
        known = [trial for number in self._unlearnt if (trial := self._history.trial(number)) is not None]
        for trial in known:
            del self._unlearnt[trial.number]
        ended = [trial for trial in known if not self._history.is_repeat(trial.number)]
        self._learnt |= dict.fromkeys(trial.number for trial in ended)
        self._moves += moves
        viewed = ended
        if is_late or self._history.has_violations != had_violations:
            # Of trials that were learnt, something else is known now, such as the records of an earlier attempt.
            self._improvements, self._kept, self._curves = self._new_views()
            viewed = [trial for number in self._learnt if (trial := self._history.trial(number)) is not None]
        if self._history.has_violations and not had_violations:
            # It is unknown whether stopped trials violate constraints, and there are some. Breed from what is known
            # now, as a worker does that begins again.
            self._breeding = self._new_breeding()
            ended, moves = viewed, self._moves
        self._improvements.add(viewed)
        self._curves.add(viewed)
        if self._kept is not None:
            self._kept.add(viewed)
        if ended or moves:
            self._breeding.learn(ended, moves)

    def _new_views(self) -> tuple[Improvements, KeptTrials | None, EndedCurves]:
        """What is known of the ended trials beside breeding, before any has."""
        keep = self._settings.keep_trials
        kept = None if keep is None else KeptTrials(keep, self._settings.objectives)
        return Improvements(self._settings.min_improvement), kept, EndedCurves()

    def _new_breeding(self) -> Breeding:
        """Breeding that has learnt of no trial."""
        return Breeding(
            self._space,
            self._settings,
            worker=self._worker,
            workers=self._workers,
            known=self._warm_start.individuals(),
        )

    def _begin(self, number: int) -> TrialOrder:
        self._learn()
        # Of a beginning with other parameters, which no journal knows any more: its checkpoints are not this trial's.
        shutil.rmtree(self._directory.trial(number), ignore_errors=True)
        proposal = self._proposal(number)
        inherits = self._parent_with_weights(proposal.parents) if self._settings.inherit_weights else None
        order = self._order(number, 1, proposal.point, inherits)
        self._began_s = self._now()
        self._writer.append(
            TrialBegan(
                number,
                1,
                self._ranks,
                self._began_s,
                params=self._space.params(proposal.point),
                point=proposal.point,
                island=self._breeding.island,
                parents=proposal.parents,
                operator=proposal.operator,
                inherits=inherits,
                repeats=order.repeats,
                repeat=order.repeat or None,
            )
        )
        return order

    def _order(self, number: int, attempt: int, point: Point, inherits: int | None) -> TrialOrder:
        planned = self._planned.by_number().get(number, PlannedTrial(number, None))
        return TrialOrder(number, attempt, point, inherits, planned.repeats, planned.repeat)

    def _proposal(self, number: int) -> Proposal:
        planned = self._planned.by_number().get(number)
        if planned is None:
            return self._breeding.propose(number, self._history.running())
        if planned.repeats is not None:
            repeated = self._history.trial(planned.repeats)
            assert repeated is not None, "it has ended"
            return Proposal(repeated.point, (repeated.number,), "repeat")
        with contextlib.suppress(SettingError):  # where not all parameters are given
            return Proposal(self._space.point(planned.params), (), "enqueued")
        chosen = self._breeding.propose(number, self._history.running()).point
        return Proposal(self._breeding.complete(number, planned.params, chosen), (), "enqueued")

    def _go_on_with(self, number: int) -> TrialOrder | None:
        """Another attempt at the trial ``number``, which this worker has claimed; None if it has ended, or does now."""
        if self._history.has_ended(number):
            return None
        trial = self._history.trial(number)
        if trial is None:
            return self._begin(number)
        order = self._order(number, trial.attempts, trial.point, trial.inherits)
        death, self._death = self._death, None
        if death is not None and trial.worker == self._worker:
            self._began_s = self._history.began_at_s(number)
            deaths = [cut for cut in self._history.cuts(number) if cut.reason]
            if death.is_of_objective or len(deaths) >= self._settings.retries:
                self.end(order, Outcome("failed", reason=death.reason))
                return None
            self.end(order, Outcome("interrupted", reason=death.reason))
        self._began_s = self._now()
        self._writer.append(TrialBegan(number, trial.attempts + 1, self._ranks, self._began_s))
        return replace(order, attempt=trial.attempts + 1)

    def _claimed_before(self, worker: int) -> list[int]:
        """The trials of ``worker`` that have not ended."""
        owners = enumerate(self._claims.owners())
        return [n for n, owner in owners if self._owner(n, owner) == worker and not self._history.has_ended(n)]

    def _owner(self, number: int, claimed: int | None) -> int | None:
        """Whose the trial ``number`` is: as the claims say, else the journal; None if neither does."""
        if claimed is None and (trial := self._history.trial(number)) is not None:
            return trial.worker
        return claimed

    def _take_over(self) -> int | None:
        """Claim a trial of a worker that does not run any more and return its number; None if there is none."""
        gone: dict[int | None, bool] = {self._worker: False, None: True}
        for number, claimed in enumerate(self._claims.owners()[: self._most]):
            if self._history.has_ended(number):
                continue
            owner = self._owner(number, claimed)
            if owner is not None and owner not in gone:
                gone[owner] = self._directory.is_gone(owner)
            if gone[owner] and self._claims.take_over(number, claimed, self._worker):
                # The trial may have ended after the last read and before its worker did.
                self._learn()
                return number
        return None

    def _parent_with_weights(self, parents: tuple[int, ...]) -> int | None:
        """The first of ``parents`` that has a checkpoint."""
        return next((one for one in parents if list_checkpoints(self._directory.trial(one) / CHECKPOINTS)), None)

    def _remove_checkpoints(self, number: int) -> None:
        """Remove the checkpoints of trials that are not among the best any more, and of this one if it is not."""
        if self._kept is None:
            return
        needed = {trial.inherits for trial in self._history.running()}
        gone = self._kept.take_dropped(needed)
        if number not in self._kept and number not in needed:
            gone.add(number)
        for trial in gone:
            for checkpoints in self._directory.trial(trial).glob(f"**/{CHECKPOINTS}"):
                shutil.rmtree(checkpoints, ignore_errors=True)


def _planned(move: Move, at_s: float) -> MovePlanned:
    return MovePlanned(
        move.kind, move.number, move.source, move.target, move.responsible, at_s, move.step, move.replaced_by
    )


def _move(record: MovePlanned) -> Move:
    return Move(
        record.what,
        record.number,
        record.source,
        record.target,
        record.responsible,
        record.step,
        record.replaced_by,
    )


class KeptTrials:
    """Which trials keep their checkpoints now: the best ones and, of several losses, those on the front.

    Trials end in any order. A trial costs what ``most`` or the front has.

    Args:
        most: how many of the best ones are kept.
        objectives: number of losses; of several, the front is kept, too.
    """

    def __init__(self, most: int, objectives: int) -> None:
        self._most, self._has_front = most, objectives > 1 and most > 0
        self._best: list[tuple[tuple[float, bool, float, int], int]] = []
        self._front: dict[int, tuple[float, ...]] = {}
        self._dropped: set[int] = set()  # were kept, and have not been taken

    def add(self, trials: Iterable[Trial]) -> None:
        """These have ended."""
        for trial in trials:
            if not trial.losses:
                continue
            bisect.insort(self._best, (rank_of(trial), trial.number))
            self._dropped |= {number for _, number in self._best[self._most :]} - {trial.number}
            del self._best[self._most :]
            if self._has_front and not trial.violation:
                self._add_to_front(trial)

    def _add_to_front(self, trial: Trial) -> None:
        if any(dominates_losses(losses, trial.losses) for losses in self._front.values()):
            return
        beaten = {number for number, losses in self._front.items() if dominates_losses(trial.losses, losses)}
        self._front = {number: losses for number, losses in self._front.items() if number not in beaten}
        self._front[trial.number] = trial.losses
        self._dropped |= beaten

    def __contains__(self, number: int) -> bool:
        return number in self._front or any(number == kept for _, kept in self._best)

    def take_dropped(self, needed: set[int | None]) -> set[int]:
        """Those that were kept and are not any more, each once; those that are ``needed`` stay until a later call."""
        gone = {number for number in self._dropped if number not in self and number not in needed}
        self._dropped &= needed
        return gone
