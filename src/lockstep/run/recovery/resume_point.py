"""The last place where the run can be gone on from, and whether this rank still holds the state of it.

    step 41   forward, backward, reduction     held: what step 40 has left
              update, the rest of the body     lost: partly step 41 already, or not where a resume can go on
              the body ends                    held: step 41
    the loop is left                           held, and noted: the script may change anything now
    step 42   ... its body ends                held: step 42

Within the loop no copy is made, for nothing changes until the update. A script that does change something before its
step, such as a learning rate at step 3000, would change it once more after a resume: so cheap marks are taken each time
(`PointMarks`), what a checkpoint holds is compared now and then (`LoopChecks`), and such a state is not given.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch
from torch import nn

from lockstep.checkpoint import FlatTree, StateTree
from lockstep.run.checks.divergence import checksums
from lockstep.run.state.registered import State
from lockstep.run.state.user_values import PlainValue, Stateful
from lockstep.torch_private import version_of

_SMALL_BYTES: Final = 64 << 10  # such as running statistics, whose kernels do not count changes
_GLANCE: Final = 4  # values of a list or dict, the newest ones
_DEPTH: Final = 3  # of lists within lists
# One that is not a number equals itself in a list, as long as it is the same object.
_IMMUTABLE: Final = frozenset({float, int, bool, str, bytes, type(None)})


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


class PointMarks:
    """Takes marks of one run's ``state`` when it is called: marks are equal as long as nothing has changed.

        the body of step 3001    if run.progress.step == 3000: lower the learning rate     made once more after a resume
                                 run.step(loss)

    They are taken after each step, so they look at no tensor's values and at no long list from its beginning: options
    of optimizers, how often each tensor was changed in place, and what is kept, as far as it can be seen at a glance.

    Takes about 2 us for each group of an optimizer, 1 us for 30 parameters, and 1 to 3 us for each kept object.
    """

    def __init__(self, state: State) -> None:
        self._state: Final = state
        # Finding it takes longer than looking at it. If it is replaced in its module, the marks tell of another one.
        self._first: Final[dict[str, torch.Tensor | None]] = {}

    def __call__(self, *, afresh: bool = False) -> object:
        """The marks as they are now; ``afresh``: modules are looked through again."""
        if afresh:
            self._first.clear()
        state = self._state
        return (
            [[_options(group) for group in optimizer.param_groups] for optimizer in state.optimizers],
            [version_of(p) for parameters in state.parameters for p in parameters],
            [self._of_kept(name, value) for name, value in state.kept.items()],
        )

    def _of_kept(self, name: str, value: Stateful) -> object:
        if isinstance(value, PlainValue):
            return _of(value.value, _DEPTH)
        if isinstance(value, nn.Module):  # such as an average of the weights: all of it is changed, or nothing
            if name not in self._first:
                self._first[name] = next(itertools.chain(value.parameters(), value.buffers()), None)
            return _of(self._first[name], 0)
        # What it says of itself may be a copy of much.
        held = getattr(value, "__dict__", {})
        return _of({name: one for name, one in held.items() if _is_plain(one)}, _DEPTH)


def _options(group: dict[str, object]) -> list[object]:
    return [_of(value, _DEPTH) for name, value in group.items() if name != "params"]


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple | dict | torch.Tensor)


def _of(value: object, depth: int) -> object:
    if type(value) in _IMMUTABLE:
        return value
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else version_of(value)
    if isinstance(value, dict) and depth:
        newest = itertools.islice(reversed(value.items()), _GLANCE)
        return len(value), [(key, _of(held, depth - 1)) for key, held in newest]
    if isinstance(value, list | tuple) and depth:
        return len(value), [_of(held, depth - 1) for held in value[-_GLANCE:]]
    return value if isinstance(value, float | int | str | bytes) else id(value)
