"""The last point from which the run can go on, and whether this rank still holds the state of this point.

    step 41   forward, backward, reduction     held: what step 40 has left
              update, the rest of the body     lost: partly step 41 already, or not where a resume can go on
              the body ends                    held: step 41
    the loop is left                           held, and noted: the script may change anything now
    step 42   ... its body ends                held: step 42

Within the loop no copy of tensors is made, since state changes only in the update. A script that changes state before
its step, such as a learning rate at step 3000, repeats the change after a resume. Options of optimizers are noted in
each step, and given as they were at the point. Of other state cheap marks are taken in each step (`PointMarks`), the
content of a checkpoint is compared now and then (`LoopChecks`), and a state that has changed is not given.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import nn

from lockstep.checkpoint import FlatTree, StateTree
from lockstep.run.checks.divergence import checksums
from lockstep.run.state.registered import State
from lockstep.run.state.user_values import PlainValue, Stateful
from lockstep.torch_private import version_of

_SMALL_BYTES: Final = 64 << 10  # such as running statistics, whose kernels do not raise the version counter
_GLANCE: Final = 4  # values of a list or dict, the newest ones
_DEPTH: Final = 3  # of lists within lists
# NaN equals itself in a list, as long as it is the same object.
_IMMUTABLE: Final = frozenset({float, int, bool, str, bytes, type(None)})


def _no_marks(*, afresh: bool = False) -> object:
    return None


class ResumePoint:
    """The resume point of a rank.

    Args:
        tree: gives this rank's present state of the run; asks no other rank. None: no state will be asked for.
        marks: gives a value that differs once the script has changed the state; cheap, since called in each step.
            With ``afresh=True`` without remembered places of the values.
        optimizers: those of the run, with the ones that will be added.
    """

    def __init__(
        self,
        tree: Callable[[], StateTree] | None,
        marks: Callable[..., object] = _no_marks,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self._tree: Final = tree
        self._marks: Final = marks
        self._optimizers: Final = optimizers
        self._options: list[tuple[dict[str, object], dict[str, object]]] = []  # of each group, with those at the point
        self._marked: object = None  # at the end of the last step's body
        self._held = False
        self.is_turn = False  #: whether the point is the beginning of a turn of the outer loop
        self._noted: _Noted | None = None  # the state at the point, if the script may have changed state since
        self.why_not = ""  #: why `take` gives no state, if the script is the cause
        self._unsafe = False  # because the loop's body changes state before its step

    def lose(self) -> None:
        """Note that the state begins to change, and is neither that of the last step nor of the next."""
        self._held, self._noted = False, None

    def reach(self) -> None:
        """Set the point to the end of the body of a step."""
        self._held, self._noted, self.is_turn = True, None, False
        if not self._unsafe:
            self.why_not = ""
        if self._tree is not None:
            self._marked = self._marks_now()
            self._options = [(group, dict(group)) for one in self._optimizers for group in one.param_groups]

    def note(self) -> None:
        """Note the state as the loop is left: later changes by the script are not in the state of the last step."""
        if self._held and self._noted is None:
            with self._options_at_point():
                self._noted = self._of_now() if self._unchanged else None
            self._held = self._noted is not None

    def begin_turn(self) -> None:
        """Set the point to the beginning of a turn of the outer loop, after all changes by the script."""
        self.is_turn = True
        self._noted = self._of_now()
        self._held = self._noted is not None

    def refuse(self, what: str) -> None:
        """Give no state any more, since the loop's body changes ``what`` before its step."""
        self._unsafe = True
        self.why_not = f"{what} is changed in the loop's body before run.step(loss), and would be once more"

    def take(self) -> FlatTree | None:
        """The state, if this rank still holds it; to be called when the current step is discarded.

        Raises:
            Exception: any error of the script's own objects in giving their state.
        """
        if not self._held or self._tree is None or self._unsafe:
            return None
        if self._noted is None:
            with self._options_at_point():
                if self._unchanged:
                    return FlatTree.of(self._tree())
        elif self._noted.holds():
            return self._noted.flat
        self.why_not = self.why_not or "the script has changed what a checkpoint holds since the last step ended"
        return None

    @contextmanager
    def _options_at_point(self) -> Iterator[None]:
        """A context in which the options of optimizers are those of the point."""
        now = [dict(group) for group, _ in self._options]
        for group, options in self._options:
            _put(group, options)
        try:
            yield
        finally:
            for (group, _), options in zip(self._options, now, strict=True):
                _put(group, options)

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
        except Exception as error:  # noqa: BLE001 - a script's own objects may raise any error; no save was asked for
            self.why_not = described(error)
            return None


def _put(group: dict[str, object], options: dict[str, object]) -> None:
    group.clear()
    group.update(options)


def described(error: Exception) -> str:
    """The reason why a state could not be collected, in one line."""
    return f"{type(error).__name__} while the state was collected: {' '.join(str(error).split())}"


class _Noted:
    """A state, with marks that show whether its tensors have changed since; plain values are copies."""

    def __init__(self, flat: FlatTree) -> None:
        self.flat: Final = flat
        self._marks: Final = _marks(flat.tensors)

    def holds(self) -> bool:
        return self._marks == _marks(self.flat.tensors)


def tree_marks(tree: StateTree) -> object:
    """Marks that differ if a value in ``tree`` changes: plain values, and marks of tensors."""
    flat = FlatTree.of(tree)
    return flat.encoded, [tensor.data_ptr() for tensor in flat.tensors], _marks(flat.tensors)


def _marks(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Marks that differ if a tensor changes: checksums of small tensors, version counters of others.

    Tensors made under `torch.inference_mode` have no version counter, and get checksums.
    """
    counted = [t.numel() * t.element_size() > _SMALL_BYTES and not t.is_inference() for t in tensors]
    summed = [t for t, is_counted in zip(tensors, counted, strict=True) if not is_counted]
    return [*checksums(summed), *(version_of(t) for t, is_counted in zip(tensors, counted, strict=True) if is_counted)]


class PointMarks:
    """A function that takes marks of a run's ``state``: marks are equal as long as no value has changed.

        the body of step 3001    if run.progress.step == 3000: kept.append(3000)     repeated after a resume
                                 run.step(loss)

    Marks are taken after each step, so they read no tensor's values and only the ends of long lists: they cover version
    counters of tensors, the outermost values of kept objects, and those options of optimizers that are objects and may
    change themselves, such as a learning rate in a tensor.

    Takes about 2 us for each group of an optimizer, 1 us for 30 parameters, and 1 to 3 us for each kept object.
    """

    def __init__(self, state: State) -> None:
        self._state: Final = state
        # Finding the tensor takes longer than reading its version. If the tensor is replaced in its module, the marks
        # differ.
        self._first: Final[dict[str, torch.Tensor | None]] = {}

    def __call__(self, *, afresh: bool = False) -> object:
        """The present marks; ``afresh``: modules are searched again."""
        if afresh:
            self._first.clear()
        state = self._state
        return (
            [(id(group), _objects(group)) for one in state.optimizers for group in one.param_groups],
            [version_of(p) for parameters in state.parameters for p in parameters],
            [self._of_kept(name, value) for name, value in state.kept.items()],
        )

    def _of_kept(self, name: str, value: Stateful) -> object:
        if isinstance(value, PlainValue):
            return _of(value.value, _DEPTH)
        if isinstance(value, nn.Module):  # such as an average of the weights: all its tensors are changed, or none
            if name not in self._first:
                self._first[name] = next(itertools.chain(value.parameters(), value.buffers()), None)
            return _of(self._first[name], 0)
        # The object's state_dict() may copy much.
        held = getattr(value, "__dict__", {})
        return _of({name: one for name, one in held.items() if _is_plain(one)}, _DEPTH)


def _objects(group: dict[str, object]) -> list[object]:
    return [_of(value, _DEPTH) for name, value in group.items() if not _is_fixed(value) and name != "params"]


def _is_fixed(value: object) -> bool:
    return type(value) in _IMMUTABLE or (type(value) is tuple and all(map(_is_fixed, value)))


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | deque | tuple | dict | torch.Tensor)


def _of(value: object, depth: int) -> object:
    if type(value) in _IMMUTABLE:
        return value
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and value.device.type == "cpu":
            return id(value), value.item()  # `.data` counts no version
        return id(value), 0 if value.is_inference() else version_of(value)
    if isinstance(value, dict) and depth:
        newest = itertools.islice(reversed(value.items()), _GLANCE)
        return len(value), [(key, _of(held, depth - 1)) for key, held in newest]
    if isinstance(value, list | deque | tuple) and depth:
        return len(value), [_of(held, depth - 1) for held in itertools.islice(reversed(value), _GLANCE)]
    return value if isinstance(value, float | int | str | bytes) else id(value)
