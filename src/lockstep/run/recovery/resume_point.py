"""The last place where the run can be gone on from, and whether this rank still holds the state of it.

    step 41   forward, backward, reduction     held: what step 40 has left
              update, the rest of the body     lost: partly step 41 already, or not where a resume can go on
              the body ends                    held: step 41
    the loop is left                           held, and noted: the script may change anything now
    step 42   ... its body ends                held: step 42

Within the loop no copy is made, for nothing changes until the update. A script that does change something before its
step, such as a learning rate at step 3000, would change it once more after a resume: so cheap marks are taken each time
(`point_marks`), what a checkpoint holds is compared now and then (`LoopChecks`), and such a state is not given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch

from lockstep.checkpoint import FlatTree, StateTree
from lockstep.run.checks.divergence import checksums
from lockstep.torch_private import version_of

_SMALL_BYTES: Final = 64 << 10  # such as running statistics, whose kernels do not count changes


class TakesMarks(Protocol):
    """What gives another value where the script has changed something of its state."""

    def __call__(self, *, afresh: bool = False) -> object:
        """The value now; ``afresh``: without what was remembered of how to find it."""
        ...


def _no_marks(*, afresh: bool = False) -> object:
    return None


class ResumePoint:
    """Of one rank.

    Args:
        tree: the state of the run as this rank has it now; asks no other rank. None: nobody will ask for it.
        marks: another value where the script has changed something of it; cheap, so that it is asked in each step.
    """

    def __init__(self, tree: Callable[[], StateTree] | None, marks: TakesMarks = _no_marks) -> None:
        self._tree: Final = tree
        self._marks: Final = marks
        self._marked: object = None  # when the last step's body was over
        self._held = False
        self.is_turn = False  #: whether it is where a turn of the outer loop begins
        self._noted: _Noted | None = None  # where the script has been able to change something since
        self.why_not = ""  #: why `take` gives no state, where that lies with the script and not with the moment
        self._unsafe = False  # by what the loop's body changes before its step

    def lose(self) -> None:
        """The state begins to change: from here on it is neither that of the last step nor of the next."""
        self._held, self._noted = False, None

    def reach(self) -> None:
        """The body of a step is over: the run can be gone on from here."""
        self._held, self._noted, self.is_turn = True, None, False
        if not self._unsafe:
            self.why_not = ""
        if self._tree is not None:
            self._marked = self._marks_now()

    def note(self) -> None:
        """The loop is left: what the script changes from here on is not the state of the last step."""
        if self._held and self._noted is None:
            self._noted = self._of_now() if self._unchanged else None
            self._held = self._noted is not None

    def begin_turn(self) -> None:
        """A turn of the outer loop begins: the run can be gone on from here, after whatever the script has changed."""
        self.is_turn = True
        self._noted = self._of_now()
        self._held = self._noted is not None

    def refuse(self, what: str) -> None:
        """The loop's body changes ``what`` before its step, so that no later moment is that at the body's end."""
        self._unsafe = True
        self.why_not = f"{what} is changed in the loop's body before run.step(loss), and would be once more"

    def take(self) -> FlatTree | None:
        """The state, if this rank still holds it; to be asked when the step in work is discarded.

        Raises:
            Exception: what the script's own objects raise when they are asked for their state.
        """
        if not self._held or self._tree is None or self._unsafe:
            return None
        if self._unchanged if self._noted is None else self._noted.holds():
            return FlatTree.of(self._tree()) if self._noted is None else self._noted.flat
        self.why_not = self.why_not or "the script has changed what a checkpoint holds since the last step ended"
        return None

    @property
    def _unchanged(self) -> bool:
        return self._tree is not None and self._marked == self._marks_now(afresh=True)

    def _marks_now(self, *, afresh: bool = False) -> object:
        try:
            return self._marks(afresh=afresh)
        except Exception as error:  # noqa: BLE001 - as in `_of_now`
            self.why_not = described(error)
            return object()  # equals nothing

    def _of_now(self) -> _Noted | None:
        if self._tree is None:
            return None
        try:
            return _Noted(FlatTree.of(self._tree()))
        except Exception as error:  # noqa: BLE001 - a script's own objects may raise anything; nobody has asked for a save
            self.why_not = described(error)
            return None


def described(error: Exception) -> str:
    """Why a state could not be had, in one line."""
    return f"{type(error).__name__} while the state was collected: {' '.join(str(error).split())}"


class _Noted:
    """A state and by what one knows that its tensors have not changed since: plain values are copies."""

    def __init__(self, flat: FlatTree) -> None:
        self.flat: Final = flat
        self._marks: Final = _marks(flat.tensors)

    def holds(self) -> bool:
        return self._marks == _marks(self.flat.tensors)


def tree_marks(tree: StateTree) -> object:
    """What differs if something in ``tree`` changes: plain values, and marks of tensors."""
    flat = FlatTree.of(tree)
    return flat.encoded, [tensor.data_ptr() for tensor in flat.tensors], _marks(flat.tensors)


def _marks(tensors: Sequence[torch.Tensor]) -> list[int]:
    """What differs if a tensor changes: checksums of small ones, and how often the others have been changed.

    Those that were made under `torch.inference_mode` count no changes.
    """
    counted = [t.numel() * t.element_size() > _SMALL_BYTES and not t.is_inference() for t in tensors]
    summed = [t for t, is_counted in zip(tensors, counted, strict=True) if not is_counted]
    return [*checksums(summed), *(version_of(t) for t, is_counted in zip(tensors, counted, strict=True) if is_counted)]
