"""How the ranks of one worker agree on trials and their ends: over the store, not over the training's process group.

leader      order 7 ──────────────►  the others                          all evaluate trial 7
each rank   outcome 7 ────────────►  the leader
leader      verdict 7 ────────────►  the others      well: continue; renew: with new connections; end: out of step
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, Literal

from typing_extensions import override

from lockstep.collectives import KeyValueStore
from lockstep.launch import without_ignored_hangup
from lockstep.tune.workers.outcome import Outcome

#: How the ranks continue after a trial.
Verdict = Literal["well", "renew", "end"]

#: How long a rank that failed waits for the others to fail in the same way. They may wait for it in a collective.
_GRACE_S = 3.0
#: How long a rank that was asked to stop waits for the others, which were asked, too, or have ended.
_LEAVE_S = 0.5
_A_DAY_S = 86400.0
_POLL_S = (0.0002, 0.02)  # the first pause between two looks, and the longest
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


class TrialChannel:
    """The connection of a rank to the other ranks of its worker; this one is for a worker with one rank."""

    def tell(self, text: str) -> str:
        """Return the leader's ``text`` on all ranks; the argument of other ranks is ignored. Collective."""
        return text

    def verdict(self, own: Outcome) -> Verdict:
        """How the ranks continue, from the outcomes of all. Collective; it also returns if others do not call it.

        A rank that failed waits a few seconds for the others.
        """
        return "renew" if _is_bad(own) else "well"


class StoreTrialChannel(TrialChannel):
    """For a worker with several ranks.

    Args:
        store: which all of them can read and write.
        rank: of this process.
        size: number of ranks.
        stops: returns whether this rank was asked to stop; then it does not wait for the others any more.
    """

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        size: int,
        stops: Callable[[], bool],
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._stops = stops
        self._number = -1  # of what was told last
        self._old: list[str] = []  # keys that all have read

    @override
    def tell(self, text: str) -> str:
        self._number += 1
        key = f"{self._number}/told"
        if self._rank == 0:
            self._store.set(key, text)
            return text
        # Python handles no signals during a blocking wait of the store.
        return self._store.get(key, _GRACE_S) if self._wait(lambda: self._store.is_set(key), _A_DAY_S) else ""

    @override
    def verdict(self, own: Outcome) -> Verdict:
        if self._rank:
            self._store.set(f"{self._number}/outcome/{self._rank}", own.to_text())
            return self._leaders_verdict(own)
        outcomes = self._outcomes(own)
        verdict = _verdict(outcomes) if len(outcomes) == self._size else "end"
        self._store.set(f"{self._number}/verdict", verdict)
        if verdict != "end":
            # All ranks have read the text of this trial, and the verdict on the trial before.
            outcome_keys = [f"{self._number}/outcome/{rank}" for rank in range(1, self._size)]
            for key in (*self._old, f"{self._number}/told", *outcome_keys):
                self._store.delete(key)
            self._old = [f"{self._number}/verdict"]
        return verdict

    def _leaders_verdict(self, own: Outcome) -> Verdict:
        key = f"{self._number}/verdict"
        if not self._wait(lambda: self._store.is_set(key), 2 * _GRACE_S if _is_bad(own) else _A_DAY_S):
            return "end"
        text = self._store.get(key, _GRACE_S)
        return "well" if text == "well" else "renew" if text == "renew" else "end"

    def _outcomes(self, own: Outcome) -> list[Outcome]:
        """The outcomes of all ranks, or only of some if one has failed and others do not answer."""
        found: dict[int, Outcome] = {0: own}
        failed_at_s = time.monotonic() if _is_bad(own) else None

        def have_come() -> bool:
            nonlocal failed_at_s
            for rank in range(1, self._size):
                if rank not in found and self._store.is_set(key := f"{self._number}/outcome/{rank}"):
                    found[rank] = Outcome.from_text(self._store.get(key, _GRACE_S))
                    if _is_bad(found[rank]) and failed_at_s is None:
                        failed_at_s = time.monotonic()
            waited_s = 0.0 if failed_at_s is None else time.monotonic() - failed_at_s
            return len(found) == self._size or waited_s > _GRACE_S

        self._wait(have_come, _A_DAY_S)
        return [found[rank] for rank in sorted(found)]

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        until_s, (pause_s, longest_s) = time.monotonic() + timeout_s, _POLL_S
        while not condition():
            if self._stops():
                until_s = min(until_s, time.monotonic() + _LEAVE_S)
            if time.monotonic() > until_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        return True


def _is_bad(outcome: Outcome) -> bool:
    return not outcome.returned and outcome.state != "stopped"


def _verdict(outcomes: list[Outcome]) -> Verdict:
    """Ranks that ended in the same way continue together; they keep their connections only if none has failed."""
    states = {outcome.state for outcome in outcomes}
    if len({outcome.returned for outcome in outcomes}) > 1:
        return "end"
    if outcomes[0].returned or states == {"stopped"}:
        return "well"
    alike = len(states) == 1 and len({outcome.place for outcome in outcomes}) == 1
    return "renew" if alike and states <= {"failed", "interrupted"} else "end"


class Interrupted(BaseException):
    """A signal asks to stop while no `Run` is open that would save a checkpoint first."""


class StopSignals:
    """Handles signals that ask a worker to stop while no `Run` is open, which handles them itself.

    Args:
        by_driver: a driver has started this worker, and would ask it to stop before it interrupts it; else it is its
            user who presses Ctrl-C.
    """

    def __init__(self, *, by_driver: bool) -> None:
        self.asked = False
        self._by_driver: Final = by_driver
        self._interrupts = False

    def means_stop(self, error: BaseException) -> bool:
        """Whether ``error``, which the objective has raised, asks the worker to stop, and not this trial to fail."""
        if isinstance(error, KeyboardInterrupt):
            return self.asked or not self._by_driver
        return isinstance(error, Interrupted)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within, a signal sets ``asked``. Python allows it in the main thread only; elsewhere nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in without_ignored_hangup(_STOP_SIGNALS)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within, a signal also raises `Interrupted`: without a `Run` there is nothing to save first."""
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self._interrupts:
            raise Interrupted(signal.Signals(number).name)
