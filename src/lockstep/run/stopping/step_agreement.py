"""The step after which all ranks exchange their requests to save or stop, agreed between them while they train.

Ranks that reduce gradients together are never more than a step apart, but no rank knows the others' step. So threads
agree over the store, without a collective and without a wait of the device:

    rank 2, a thread      SIGTERM has set a flag        set "request"
    leader, a thread      sees it; is at step 40        set "step": 42 is proposed
    each rank, a thread   has not done 42 yet: "yes", and from then on its main thread waits there for the decision
    leader, a thread      all said yes                  set "decision": "go"; a rank was past it: "no", try a later step
    all, main thread      after step 42                 exchange their requests

Without a request, a step costs one comparison.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from typing_extensions import override

from lockstep.collectives import KeyValueStore
from lockstep.errors import LockstepError, PeerLost

_POLL_S = 0.1  # between two polls of the store while there is no request
_POLL_QUICKLY_S = 0.002
_READ_S = 60.0  # for a value that is set already
_CLOSE_S = 2.0  # to wait for a thread whose store does not answer
_NEVER = 1 << 62


class StepAgreement:
    """The agreement on the step of an exchange of requests. This class is for a single rank, which asks no other.

    Each rank has an agreement, whose `due` is called after the same steps on all ranks.

    Args:
        wants_stop: whether this rank must stop.
        wants_save: whether the leader wants to save.
    """

    def __init__(self, wants_stop: Callable[[], bool], wants_save: Callable[[], bool]) -> None:
        self._wants_stop, self._wants_save = wants_stop, wants_save

    def due(self, step: int) -> bool:
        """Whether all ranks exchange requests after ``step``, which was just made."""
        return self._wants_stop() or self._wants_save()

    def met(self) -> None:
        """All ranks have exchanged their requests."""

    def stop_pending(self) -> bool:
        """Whether some rank wants to stop, as far as this rank knows; then work without steps may be cut short."""
        return self._wants_stop()

    def close(self) -> None:
        """End the thread."""


class StoreAgreement(StepAgreement):
    """The agreement of a rank in a world of several.

    Args:
        store: for this object's thread only.
        rank: of this process.
        size: number of ranks.
        wants_stop: whether this rank must stop; called in the thread.
        wants_save: whether the leader wants to save; called in its thread.
        peer_timeout_s: timeout of the leader's decision.
    """

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        size: int,
        wants_stop: Callable[[], bool],
        wants_save: Callable[[], bool],
        *,
        peer_timeout_s: float,
    ) -> None:
        super().__init__(wants_stop, wants_save)
        self._store: Final = store
        self._rank, self._size = rank, size
        self._peer_timeout_s: Final = peer_timeout_s
        self._changed = threading.Condition()
        self._done = 0  # steps
        self._at = _NEVER  # the step after which the main thread waits for the decision
        self._go = False  # the decision, once it is known
        self._pending = False  # on the leader: a step is agreed on, and not done yet
        self._stop_pending = False
        self._requested_in = -1  # the round in which this rank has asked for a stop
        self._round = 0  # number of rounds of agreement before
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep save/stop agreement", daemon=True)
        self._thread.start()

    def due(self, step: int) -> bool:
        """See `StepAgreement.due`. Waits for the leader's decision if this rank has agreed to a step.

        Raises:
            PeerLost: if no decision comes in time.
        """
        with self._changed:
            self._done = step
            while step >= self._at and not self._go:
                if not self._changed.wait(self._peer_timeout_s):
                    raise PeerLost(
                        f"the ranks could not agree on where to stop or save: no answer within "
                        f"{self._peer_timeout_s:g} s after step {step}; one of them has exited or hangs"
                    )
            if step < self._at:
                return False
            self._at, self._go = _NEVER, False
            return True

    @override
    def met(self) -> None:
        self._pending = False

    @override
    def stop_pending(self) -> bool:
        return self._stop_pending

    @override
    def close(self) -> None:
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._closing.wait(_POLL_S):
                if self._rank == 0:
                    self._lead()
                else:
                    self._follow()
        except (LockstepError, RuntimeError):
            # The store is gone, with the rank or launcher that kept it: the main thread gets this error itself.
            pass
        finally:
            self._closing.set()
            self._conclude(go=False)

    def _lead(self) -> None:
        if self._pending:
            return
        stop = self._wants_stop() or self._store.is_set(self._key("request"))
        if not (stop or self._wants_save()):
            return
        self._stop_pending |= stop
        ahead = 2
        while not (self._pending or self._closing.is_set()):
            at = self._done + ahead
            agreed = self._agree_to(at)
            self._store.set(self._key("step"), f"{at} {int(stop)}")
            answers = [self._wait_for(self._key(str(rank))) for rank in range(1, self._size)]
            self._pending = agreed and all(answer == "yes" for answer in answers)
            self._store.set(self._key("decision"), "go" if self._pending else "no")
            self._conclude(go=self._pending)
            ahead *= 2

    def _follow(self) -> None:
        if not self._stop_pending and self._wants_stop():
            self._stop_pending = True
        if self._stop_pending and self._requested_in != self._round:
            self._requested_in = self._round
            self._store.set(self._key("request"), "stop")
        if not self._store.is_set(self._key("step")):
            return
        at, _, stop = self._wait_for(self._key("step")).partition(" ")
        if not at:
            return
        self._stop_pending |= stop == "1"
        agreed = self._agree_to(int(at))
        self._store.set(self._key(str(self._rank)), "yes" if agreed else "late")
        self._conclude(go=self._wait_for(self._key("decision")) == "go")

    def _agree_to(self, step: int) -> bool:
        """Let the main thread wait after ``step``, unless this step is done already; returns whether it will wait."""
        with self._changed:
            if self._done >= step:
                return False
            self._at, self._go = step, False
            return True

    def _conclude(self, *, go: bool) -> None:
        with self._changed:
            self._go = go
            if not go:
                self._at = _NEVER
            self._changed.notify_all()
        self._round += 1

    def _wait_for(self, key: str) -> str:
        """The value of ``key``, once it is set; "" if this rank is closing."""
        while not self._store.is_set(key):
            if self._closing.wait(_POLL_QUICKLY_S):
                return ""
        return self._store.get(key, _READ_S)

    def _key(self, what: str) -> str:
        return f"{self._round}/{what}"
