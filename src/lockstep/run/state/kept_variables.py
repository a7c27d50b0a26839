"""The script's variables that hold what is kept: found where one was bound to another object, which nobody keeps.

run.keep(queue=queue)
queue = torch.cat([queue, new])[-16:]       another tensor; the one that is saved stays as it was
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
    text: str  #: as the script writes it
    now: Callable[[FrameType], object]  #: what it is bound to, for somebody who is called from that frame
    was: object
    marks: object  #: of the kept value then


class KeptVariables:
    """Of one run."""

    def __init__(self, kept: Mapping[str, Stateful]) -> None:
        self._kept: Final = kept
        self._variables: Final[dict[str, _Variable]] = {}

    def note(self, name: str, frame: FrameType | None) -> None:
        """The script has called `Run.keep` in ``frame``, or outward of it: which variable holds what is kept there."""
        kept = self._kept[name]
        found = _find(name, kept.value, frame) if isinstance(kept, PlainValue) else None
        if found is not None:
            self._variables[name] = _Variable(*found, exposed_value(kept), _marks(kept))

    def restored(self) -> None:
        """Kept values were put back: a variable that is bound to another object since `note` is none of these."""
        for name, variable in self._variables.items():
            self._variables[name] = variable._replace(marks=_marks(self._kept[name]))

    def require_bound(self, frame: FrameType) -> None:
        """Check that variables are bound to what they were, or that something else changes what is kept.

        Raises:
            UsageError: if one is not.
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
    """What is kept by itself; None for an object with a state of its own."""
    return kept.value if isinstance(kept, PlainValue) else None


def _find(name: str, value: object, frame: FrameType | None) -> tuple[str, Callable[[FrameType], object]] | None:
    """The variable that holds ``value``, of the same name, or of any if no other value is the same object."""
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
