"""The decisions after each step to save or to stop, made for all ranks at once.

A decision that depends on a clock, a signal or a file may differ between ranks. So ranks exchange their requests, over
the CPU, after a step that they have agreed on as soon as there was a request (see `step_agreement`):

    step    ..  40  41  42  43 ..
    SIGTERM        x                  rank 1: only sets a flag
    agreed on        42               some milliseconds later, by threads
    decision             stop         all ranks, after the same step

An evaluation has no common steps; ranks agree at its end, and a rank that knows of a stop goes to the end at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lockstep.collectives import Group
from lockstep.run.stopping.step_agreement import StepAgreement, StoreAgreement
from lockstep.run.stopping.stop_requests import JobDeadline
from lockstep.settings import Interval


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of all ranks after a step."""

    save: bool = False
    stop: str | None = None  #: why

    @property
    def saves(self) -> bool:
        """Whether a checkpoint is saved: also before a stop."""
        return self.save or self.stop is not None


NOTHING: Final = Decision()


class SaveStopController:
    """Decides after each step, equally on every rank.

    Args:
        group: the ranks.
        interval: how often to save.
        stop_reason: gives the reason if this rank wants to stop, from then on always. May be called from any thread.
        end: is told the duration of steps.
        now: the clock.
        peer_timeout_s: how long to wait for the other ranks.
    """

    def __init__(
        self,
        group: Group,
        interval: Interval | None,
        stop_reason: Callable[[], str | None],
        end: JobDeadline,
        now: Callable[[], float] = time.monotonic,
        *,
        peer_timeout_s: float,
    ) -> None:
        self._group, self._interval, self._stop_reason = group, interval, stop_reason
        self._end, self._now, self._peer_timeout_s = end, now, peer_timeout_s
        self._stepped_at = self._saved_at = now()
        self._agreement: StepAgreement = StepAgreement(lambda: False, lambda: False)

    def open(self) -> None:
        """Begin to accept requests, and start the leader's clock. Collective."""
        self._stepped_at = self._saved_at = self._now()
        if self._group.size == 1:
            self._agreement = StepAgreement(self._wants_stop, self._is_due)
        else:
            self._agreement = StoreAgreement(
                self._group.store("save-stop"),
                self._group.rank,
                self._group.size,
                self._wants_stop,
                self._is_due,
                peer_timeout_s=self._peer_timeout_s,
            )

    def close(self) -> None:
        """Requests count no more; may be called twice."""
        self._agreement.close()

    def final_barrier(self) -> None:
        """The last barrier of a run; afterwards rank 0 may take the store down. Collective."""
        self.close()
        self._group.barrier("end of the run")

    def after_step(self, step: int) -> Decision:
        """The decision after ``step`` steps. Collective."""
        now, interval = self._now(), self._interval
        self._end.step_took(now - self._stepped_at)
        self._stepped_at = now
        save = interval is not None and interval.unit == "step" and step % int(interval.every) == 0
        if self._agreement.due(step):
            decision = self._agree(save=save)
            # Not after an exchange for another reason: ranks would still meet after the agreed step, and a new
            # agreement must not come in between.
            self._agreement.met()
            return decision
        return Decision(save) if save else NOTHING

    def after_epoch(self, epochs: int) -> Decision:
        """The decision after ``epochs`` epochs. Collective."""
        interval = self._interval
        return Decision(interval is not None and interval.unit == "epoch" and epochs % int(interval.every) == 0)

    def stop_pending(self) -> bool:
        """Whether an evaluation is to be left, for its end will be the end of the run. Any rank, at any moment."""
        return self._agreement.stop_pending()

    def after_evaluation(self) -> Decision:
        """The decision after all ranks have ended an evaluation, or left it early. Collective."""
        return self._agree(save=False)

    def saved(self) -> None:
        """A checkpoint was just begun."""
        self._saved_at = self._now()

    def _agree(self, *, save: bool) -> Decision:
        own = (self._stop_reason(), self._is_due(), self.stop_pending())
        requests = self._group.gather_objects(own, "the save/stop agreement")
        reasons = [reason for reason, _, _ in requests if reason]
        # If a rank has left an evaluation early, the decision must be to stop.
        pending = "another rank" if any(stop_pending for _, _, stop_pending in requests) else None
        return Decision(save or requests[0][1], reasons[0] if reasons else pending)

    def _wants_stop(self) -> bool:
        return self._stop_reason() is not None

    def _is_due(self) -> bool:
        interval = self._interval
        return interval is not None and interval.unit == "second" and self._now() - self._saved_at >= interval.every
