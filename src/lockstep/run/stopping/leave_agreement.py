"""The agreement of ranks to leave a loop, and the run, after the same step; a rank that does not is reported at once.

    rank 1, main thread    leaves the loop of run.train after step 7, and calls the run again
                           says so in the store, and gathers from all ranks where they stand
    rank 0, main thread    waits for rank 1 in the reduction of step 8
    rank 0, a thread       sees that its rank is past what rank 1 has left, and takes part in its place
    rank 1, main thread    UsageError, with the lines of both; its end is what wakes rank 0

If all ranks leave after the same step, the agreement is one exchange over the CPU. A step costs one assignment.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lockstep.collectives import Group, KeyValueStore
from lockstep.errors import LockstepError, MismatchError, UsageError
from lockstep.formatting import format_ranks, grouped
from lockstep.heartbeat import find_user_frame, is_users
from lockstep.memory_use import text_of

_WENT_ON: Final = "went on"
_POLL_S: Final = 0.1
_QUIET_POLLS: Final = 3
_QUIET_POLLS_SPINNING: Final = 20
_READ_S: Final = 60.0  # for a value that is set already
_CLOSE_S: Final = 2.0  # to wait for a thread whose peers do not answer


@dataclass(frozen=True, slots=True)
class Leave:
    """The action of a rank after ``step`` steps, in words, and the user's line."""

    did: str
    step: int
    place: str


class LeaveAgreement:
    """The agreement on one rank; does nothing in a world of one rank.

    Args:
        group: all ranks.
        agrees: whether the ranks make the same calls; with servers, ranks leave separately.
    """

    def __init__(self, group: Group, *, agrees: bool) -> None:
        self._group: Final = group
        self._agrees: Final = agrees and group.size > 1
        # Agreements before, and the step whose reduction the main thread has entered: read together by the thread.
        self._at = 0, 0
        self._left: Leave | None = None
        self._store: KeyValueStore | None = None
        self._main = self._main_task = 0
        self._spins: Final = group.device.type == "cuda"  # a thread that waits for a GPU does not sleep
        self._closing: Final = threading.Event()
        self._thread: threading.Thread | None = None
        self._joins = False  # whether the thread takes part in the place of the main thread
        self._parted = ""  # the error text that the thread has learned

    def open(self) -> None:
        """The training begins, in this thread."""
        if self._agrees:
            self._main, self._main_task = threading.get_ident(), threading.get_native_id()
            # Connected here, not by the thread: a loader process that is forked while another thread connects inherits
            # locks of the C library that are never released.
            store = self._group.store("leaves")
            self._thread = threading.Thread(
                target=self._watch, args=(store,), name="lockstep leave agreement", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """The run is over; may be called twice."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def enter(self, step: int) -> None:
        """This rank begins the last backward pass of ``step``, which no rank leaves undone."""
        self._at = self._at[0], step

    def leave(self, did: str, step: int, error: BaseException | None = None) -> None:
        """This rank ``did``, in words, leave a loop or the run after ``step`` steps, by ``error`` or where it is now.

        The ranks agree at the run's next call, which may fail: the rank may also be ending with an error of its own,
        and then it must not wait for others.
        """
        if self._agrees:
            self._left = Leave(did, step, _user_line(error))

    def agree(self) -> None:
        """Check that all ranks have left a loop or the run after the same step, if this rank has. Collective then.

        Takes about 1 ms.

        Raises:
            UsageError: with the lines of the ranks, if ranks left after different steps.
            PeerLost: if a rank is gone.
        """
        leave, self._left = self._left, None
        if leave is None or self._closing.is_set():
            return
        if self._store is None:
            self._store = self._group.store("leaves")
        number, step = self._at
        self._store.set(str(number), f"{leave.step} rank {self._group.rank} {_told(leave)}")
        try:
            parted = _parted(self._gather(leave))
        except MismatchError:  # from the call in which the other ranks are
            parted = f"ranks have parted ways: rank {self._group.rank} {_told(leave)}, and not all ranks did"
        if parted:
            raise UsageError(
                f"{parted}. All ranks must leave a loop, and the run, after the same step, and what a rank sees by "
                "itself, such as its own loss or its clock, differs from rank to rank: decide by run.progress, "
                "run.metrics or run.early_stopping(...); by a clock, once a step and by all clocks: `if run.step(loss) "
                "and any(run.gather(time.time() > end)): break`"
            )
        self._at = number + 1, step

    def explain(self, error: BaseException) -> str:
        """The note for ``error`` if some rank left a loop or the run where not all ranks did; else ""."""
        if self._joins and self._thread is not None:
            self._thread.join(_CLOSE_S)
        told = self._parted
        if isinstance(error, MismatchError) and self._agrees:
            with contextlib.suppress(LockstepError, RuntimeError):  # the store may be gone by now
                store, number = self._group.store("leaves", anew=False), str(self._at[0])
                told = store.get(number, _READ_S).partition(" ")[2] if store.is_set(number) else told
        return told

    def _gather(self, leave: Leave) -> list[Leave]:
        return self._group.gather_objects(leave, "the end of a loop or of the run")

    def _watch(self, store: KeyValueStore) -> None:
        try:
            at, quiet = self._at, 0
            while not self._closing.wait(_POLL_S):
                # A rank that waits for others makes no progress, and its main thread sleeps; else the rank is slow, on
                # a busy machine.
                quiet = quiet + 1 if self._at == at and (self._spins or _sleeps(self._main_task)) else 0
                at = self._at
                if quiet < (_QUIET_POLLS_SPINNING if self._spins else _QUIET_POLLS) or not store.is_set(str(at[0])):
                    continue
                left_after = int(store.get(str(at[0]), _READ_S).partition(" ")[0])
                if self._at == at and at[1] > left_after:
                    self._joins = True
                    frame = sys._current_frames().get(self._main)
                    place = "" if frame is None else find_user_frame(frame)[0].short
                    self._parted = _parted(self._gather(Leave(_WENT_ON, at[1] - 1, place)))
                    return
        except (LockstepError, RuntimeError):
            # The store or a rank is gone: the main thread gets this error itself.
            pass


def _sleeps(task: int) -> bool:
    """Whether the thread ``task`` of this process sleeps; True if the system does not say."""
    state = text_of(Path(f"/proc/self/task/{task}/stat")).rpartition(")")[2].split()
    return not state or state[0] == "S"


def _user_line(error: BaseException | None) -> str:
    """The user's line that has raised ``error``, or is running now, as FILE:LINE."""
    trace = traceback.walk_tb(None if error is None else error.__traceback__)
    places = ((frame.f_code.co_filename, line) for frame, line in trace)
    lines = [f"{Path(file).name}:{line}" for file, line in places if is_users(file)]
    return lines[-1] if lines else find_user_frame(sys._getframe())[0].short


def _told(leave: Leave) -> str:
    when = f"after step {leave.step}" if leave.step else "before its first step"
    return f"{leave.did} {when}{f' ({leave.place})' if leave.place else ''}"


def _parted(leaves: list[Leave]) -> str:
    """The text about ranks that did different things; "" if all did the same after the same step."""
    if len({(leave.did, leave.step) for leave in leaves}) == 1:
        return ""
    ranks = grouped((leave, rank) for rank, leave in enumerate(leaves))
    said = []
    for leave, those in sorted(ranks.items(), key=lambda one: (one[0].did == _WENT_ON, one[0].step, one[1])):
        said.append(f"{format_ranks(those)} {_told(leave)}")
    return "ranks have parted ways: " + ", and ".join(said)
