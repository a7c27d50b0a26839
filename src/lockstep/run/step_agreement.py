"""The step after which all ranks look at each other's wishes, agreed between them while they train.

Ranks that reduce gradients together are never more than a step apart, but nobody knows which one is where. So threads
make an appointment over the store, with no collective and nothing that the device would have to wait for:

    rank 2, a thread      SIGTERM has set a flag        post "wish"
    leader, a thread      sees it; is at step 40        post "let us meet after step 42"
    each rank, a thread   has not done 42 yet: "yes", and from then on its main thread waits there for the last word
    leader, a thread      all said yes                  post "go";   one was past it: "no", and a later step is tried
    all, main thread      after step 42                 look

Where nobody wishes anything a step costs one comparison, however long it takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Protocol

from lockstep.collectives import KeyValueStore
from lockstep.errors import LockstepError, PeerLost

_POLL_S = 0.1  # between looks at the store while nothing is going on: a small question each
_POLL_QUICKLY_S = 0.002
_READ_S = 60.0  # for what is there already
_CLOSE_S = 2.0  # to wait for a thread whose store does not answer
_NEVER = 1 << 62


class StepAgreement(Protocol):
    """When to look. Each rank has one; `due` is called after the same steps on all."""

    def due(self, step: int) -> bool:
        """Whether all ranks look after ``step``, of which they have just done it."""
        ...

    def met(self) -> None:
        """All ranks have looked."""
        ...

    def stop_pending(self) -> bool:
        """Whether some rank wants to stop, as far as this one knows by now: what has no steps may be cut short."""
        ...

    def close(self) -> None:
        """No thread is left."""
        ...


class NoAgreement:
    """For one rank, which need not ask anyone."""

    def __init__(self, wants_stop: Callable[[], bool], wants_look: Callable[[], bool]) -> None:
        self._wants_stop, self._wants_look = wants_stop, wants_look

    def due(self, step: int) -> bool:
        """See `StepAgreement.due`."""
        return self._wants_stop() or self._wants_look()

    def met(self) -> None:
        """See `StepAgreement.met`."""

    def stop_pending(self) -> bool:
        """See `StepAgreement.stop_pending`."""
        return self._wants_stop()

    def close(self) -> None:
        """There is no thread."""


class StoreAgreement:
    """For a rank among others.

    Args:
        board: for the thread of this object alone.
        rank: this one.
        size: ranks that take part.
        wants_stop: whether this rank is to stop; asked in the thread.
        wants_look: whether the leader wants all to look for another reason; asked in its thread.
        peer_timeout_s: how long to wait for the last word.
    """

    def __init__(
        self,
        board: KeyValueStore,
        rank: int,
        size: int,
        wants_stop: Callable[[], bool],
        wants_look: Callable[[], bool],
        *,
        peer_timeout_s: float,
    ) -> None:
        self._board: Final = board
        self._rank, self._size = rank, size
        self._wants_stop, self._wants_look = wants_stop, wants_look
        self._peer_timeout_s: Final = peer_timeout_s
        self._news = threading.Condition()
        self._done = 0  # steps
        self._at = _NEVER  # after which step the main thread waits for the last word
        self._go = False  # the last word, once it is there
        self._pending = False  # the leader's: ranks have agreed to meet and not met yet
        self._hurry = False
        self._wished = -1  # the appointment that this rank has asked for
        self._number = 0  # of the appointment to come
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._attend, name="lockstep agenda", daemon=True)
        self._thread.start()

    def due(self, step: int) -> bool:
        """See `StepAgreement.due`. Waits for the leader's last word where this rank has agreed to meet.

        Raises:
            PeerLost: if it does not come.
        """
        with self._news:
            self._done = step
            while step >= self._at and not self._go:
                if not self._news.wait(self._peer_timeout_s):
                    raise PeerLost(
                        f"the ranks could not agree on where to stop or save: no answer within "
                        f"{self._peer_timeout_s:g} s after step {step}; one of them is gone or stands still"
                    )
            if step < self._at:
                return False
            self._at, self._go = _NEVER, False
            return True

    def met(self) -> None:
        """See `StepAgreement.met`."""
        self._pending = False

    def stop_pending(self) -> bool:
        """See `StepAgreement.stop_pending`."""
        return self._hurry

    def close(self) -> None:
        """See `StepAgreement.close`."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def _attend(self) -> None:
        try:
            while not self._closing.wait(_POLL_S):
                if self._rank == 0:
                    self._lead()
                else:
                    self._follow()
        except (LockstepError, RuntimeError):
            # The store is gone, and with it the rank or launcher that kept it: the main thread meets that itself.
            pass
        finally:
            self._closing.set()
            self._settle(go=False)

    def _lead(self) -> None:
        if self._pending:
            return
        stop = self._wants_stop() or self._board.is_set(self._key("wish"))
        if not (stop or self._wants_look()):
            return
        self._hurry |= stop
        ahead = 2
        while not (self._pending or self._closing.is_set()):
            at = self._done + ahead
            agreed = self._agree_to(at)
            self._board.set(self._key("step"), f"{at} {int(stop)}")
            answers = [self._hear(self._key(str(rank))) for rank in range(1, self._size)]
            self._pending = agreed and all(answer == "yes" for answer in answers)
            self._board.set(self._key("word"), "go" if self._pending else "no")
            self._settle(go=self._pending)
            ahead *= 2

    def _follow(self) -> None:
        if not self._hurry and self._wants_stop():
            self._hurry = True
        if self._hurry and self._wished != self._number:
            self._wished = self._number
            self._board.set(self._key("wish"), "stop")
        if not self._board.is_set(self._key("step")):
            return
        at, _, stop = self._hear(self._key("step")).partition(" ")
        if not at:
            return
        self._hurry |= stop == "1"
        agreed = self._agree_to(int(at))
        self._board.set(self._key(str(self._rank)), "yes" if agreed else "late")
        self._settle(go=self._hear(self._key("word")) == "go")

    def _agree_to(self, step: int) -> bool:
        """The main thread will wait after ``step``; unless it is past it already."""
        with self._news:
            if self._done >= step:
                return False
            self._at, self._go = step, False
            return True

    def _settle(self, *, go: bool) -> None:
        with self._news:
            self._go = go
            if not go:
                self._at = _NEVER
            self._news.notify_all()
        self._number += 1

    def _hear(self, key: str) -> str:
        """What is posted under ``key``, once it is; "" if this rank is closing."""
        while not self._board.is_set(key):
            if self._closing.wait(_POLL_QUICKLY_S):
                return ""
        return self._board.get(key, _READ_S)

    def _key(self, what: str) -> str:
        return f"{self._number}/{what}"
