"""The script's variables that hold kept values, checked for being bound to other objects, which are not saved.

run.keep(queue=queue)
queue = torch.cat([queue, new])[-16:]       another tensor; the saved tensor stays unchanged
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FrameType
from typing import Final, NamedTuple

import torch

from lockstep.errors import UsageError
from lockstep.run.source.reachable import look, script_frames, variables_of
from lockstep.run.state.user_values import PlainValue, Stateful

_IMMUTABLE: Final = (bool, int, float, str, bytes, tuple, type(None))


class _Variable(NamedTuple):
    text: str  #: the variable as the script writes it
    now: Callable[[FrameType], object]  #: gives the object that it is bound to, seen from a frame
    was: object
    marks: object  #: of the kept value at that time


class KeptVariables:
    """The script's variables that hold the kept values of a run."""

    def __init__(self, kept: Mapping[str, Stateful]) -> None:
        self._kept: Final = kept
        self._variables: Final[dict[str, _Variable]] = {}

    def note(self, name: str, frame: FrameType | None) -> None:
        """Note the variable that holds a kept value, as the script calls `Run.keep` in ``frame`` or an outer frame."""
        kept = self._kept[name]
        found = _find(name, kept.value, frame) if isinstance(kept, PlainValue) else None
        if found is not None:
            self._variables[name] = _Variable(*found, exposed_value(kept), _marks(kept))

    def restored(self) -> None:
        """Take new marks of kept values, which were restored, and so have changed without the script."""
        for name, variable in self._variables.items():
            self._variables[name] = variable._replace(marks=_marks(self._kept[name]))

    def require_bound(self, frame: FrameType) -> None:
        """Check that each variable is bound to its object from before, or that the kept value has changed, too.

        Raises:
            UsageError: if a variable is bound to a new object and the kept value is unchanged.
        """
        for name, variable in self._variables.items():
            kept, now = self._kept[name], variable.now(frame)
            is_same = now is variable.was or now is exposed_value(kept) or now is None
            if is_same or type(now) is not type(variable.was) or _marks(kept) != variable.marks:
                continue
            if look({"": now}) == look({"": variable.was}):
                continue
            in_place = {
                torch.Tensor: f"{variable.text}.copy_(...) under torch.no_grad()",
                list: f"{variable.text}[:] = ...",
                dict: f"{variable.text}.update(...)",
            }.get(type(now))
            ways = " or ".join(filter(None, (in_place, f"run.kept.{name} = ...")))
            raise UsageError(
                f"{variable.text} is another {type(now).__name__} than the one that was given to run.keep({name}=...), "
                f"which has not changed since, so a resumed run would begin with the first one: write {ways} "
                f"where it changes, and read run.kept.{name}"
            )


def exposed_value(kept: Stateful) -> object:
    """The kept plain value; None for an object with a state of its own."""
    return kept.value if isinstance(kept, PlainValue) else None


def _find(name: str, value: object, frame: FrameType | None) -> tuple[str, Callable[[FrameType], object]] | None:
    """The variable that holds ``value``: the variable ``name``, or for a mutable value any other variable."""
    for script in script_frames(frame):
        variables = variables_of(script)
        names = [name, *variables] if type(value) not in _IMMUTABLE else [name]
        for each in names:
            if each in variables and variables[each] is value:
                return each, _reader(script.f_code, each)
        attributes = getattr(variables.get("self"), "__dict__", {})
        for each in [name, *attributes] if type(value) not in _IMMUTABLE else [name]:
            if attributes.get(each) is value and each in attributes:
                return f"self.{each}", lambda _, each=each, attributes=attributes: attributes.get(each)
    return None


def _reader(code: object, name: str) -> Callable[[FrameType], object]:
    def now(frame: FrameType) -> object:
        found = (one for one in script_frames(frame) if one.f_code is code)
        return next((variables_of(one).get(name) for one in found), None)

    return now


def _marks(kept: Stateful) -> object:
    return look({"": exposed_value(kept)})
