"""When to save and when to stop, decided for all ranks at once.

A decision that hangs on a clock, a signal or a file may fall differently on every rank. So ranks look at each other's
wishes, over the CPU, after a step that they have agreed on when there was something to look at (see `appointment`):

    step    ..  40  41  42  43 ..
    SIGTERM        x                  rank 1: only sets a flag
    agreed on        42               some milliseconds later, by threads
    decision             stop         all ranks, after the same step

An evaluation has no steps in common; its end is a look, and a rank that knows of a stop goes there at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lockstep.collectives import Group
from lockstep.run.step_agreement import NoAgreement, StepAgreement, StoreAgreement
from lockstep.run.stop_requests import JobDeadline
from lockstep.settings import Interval


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do after this step."""

    save: bool = False
    stop: str | None = None  #: why

    @property
    def saves(self) -> bool:
        """Whether a checkpoint is saved: also before a stop."""
        return self.save or self.stop is not None


NOTHING: Final = Decision()


class SaveStopController:
    """Decides after each step, alike on every rank.

    Args:
        group: the ranks.
        cadence: how often to save.
        stop_reason: why this rank wants to stop, if it does; once it does, it always does. From any thread.
        end: told how long steps take.
        now: the clock.
        peer_timeout_s: how long to wait for the other ranks.
    """

    def __init__(
        self,
        group: Group,
        cadence: Interval | None,
        stop_reason: Callable[[], str | None],
        end: JobDeadline,
        now: Callable[[], float] = time.monotonic,
        *,
        peer_timeout_s: float,
    ) -> None:
        self._group, self._cadence, self._stop_reason = group, cadence, stop_reason
        self._end, self._now, self._peer_timeout_s = end, now, peer_timeout_s
        self._stepped_at = self._saved_at = now()
        self._appointment: StepAgreement = NoAgreement(lambda: False, lambda: False)

    def open(self) -> None:
        """From here on a wish is heard. All ranks; the leader's clock runs from now."""
        self._stepped_at = self._saved_at = self._now()
        if self._group.size == 1:
            self._appointment = NoAgreement(self._wants_stop, self._is_due)
        else:
            self._appointment = StoreAgreement(
                self._group.store("agenda"),
                self._group.rank,
                self._group.size,
                self._wants_stop,
                self._is_due,
                peer_timeout_s=self._peer_timeout_s,
            )

    def close(self) -> None:
        """Nothing is heard any more."""
        self._appointment.close()

    def after_step(self, step: int) -> Decision:
        """What to do now that ``step`` steps are done. Collective."""
        now, every = self._now(), self._cadence
        self._end.step_took(now - self._stepped_at)
        self._stepped_at = now
        save = every is not None and every.unit == "step" and step % int(every.every) == 0
        if self._appointment.due(step):
            decision = self._look(save=save)
            # Not after a look for another reason: the ranks would still meet after the step that was agreed on, and a
            # new appointment must not come in between.
            self._appointment.met()
            return decision
        return Decision(save) if save else NOTHING

    def after_epoch(self, epochs: int) -> Decision:
        """What to do now that ``epochs`` epochs are done. Collective."""
        every = self._cadence
        return Decision(every is not None and every.unit == "epoch" and epochs % int(every.every) == 0)

    def stop_pending(self) -> bool:
        """Whether an evaluation is to be left, for its end will be the end of the run. Any rank, at any moment."""
        return self._appointment.stop_pending()

    def after_evaluation(self) -> Decision:
        """What to do now that all ranks are through with an evaluation, or have left it in a hurry. Collective."""
        return self._look(save=False)

    def saved(self) -> None:
        """A checkpoint was just begun."""
        self._saved_at = self._now()

    def _look(self, *, save: bool) -> Decision:
        wishes = self._group.gather_objects((self._stop_reason(), self._is_due(), self.stop_pending()), "a look")
        reasons = [reason for reason, _, _ in wishes if reason]
        # A rank that has left an evaluation early must find that all stop.
        hurry = "another rank" if any(hurries for _, _, hurries in wishes) else None
        return Decision(save or wishes[0][1], reasons[0] if reasons else hurry)

    def _wants_stop(self) -> bool:
        return self._stop_reason() is not None

    def _is_due(self) -> bool:
        every = self._cadence
        return every is not None and every.unit == "second" and self._now() - self._saved_at >= every.every
