"""Kept values beside models and optimizers: objects with a state of their own, and plain values.

run.keep(ema=ema)                 saved and restored through its state_dict and load_state_dict
run.keep(history=[], scores={})   restored in place: the script's own list, deque or dict holds what was saved
run.keep(best=0.0)                a number cannot change in place: run.kept.best is read and set
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import Any, Final, Protocol

import numpy as np
import torch

from lockstep.errors import UsageError
from lockstep.nested import map_leaves

_LEAVES = (type(None), bool, int, float, str, bytes, torch.Tensor, np.number, np.bool_)
_DICTS = (dict, OrderedDict, Counter)


class Stateful(Protocol):
    """An object that `Run.keep` saves by the object's own methods."""

    def state_dict(self) -> object:
        """The state to be saved."""

    def load_state_dict(self, state: Any, /) -> object:
        """Restore the saved state."""


class PlainValue:
    """A kept number, text, tensor, list, deque, tuple or dict.

    Raises:
        UsageError: for a value that cannot be saved, naming its place.
    """

    def __init__(self, name: str, value: object) -> None:
        self._name: Final = name
        self.value: Any = None
        self.replace(value)

    def replace(self, value: object) -> None:
        """Keep ``value`` from now on.

        Raises:
            UsageError: if the value cannot be saved.
        """
        _check(_without_deque(value), self._name)
        self.value = value

    def state_dict(self) -> object:
        """The value; lists and dicts are copies; a deque as a list."""
        value = _without_deque(self.value)
        _check(value, self._name)  # the items of a list may have changed since it was given
        return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value)

    def load_state_dict(self, state: object, /) -> None:
        """Set the value to ``state``; lists, deques, dicts and tensors are changed in place.

        Raises:
            TypeError: if value and state are of different kinds, and one is a list, dict or tensor.
            RuntimeError: if tensors have other shapes.
        """
        for kind in ((list, deque), _DICTS, torch.Tensor):
            if isinstance(state, kind) != isinstance(self.value, kind) and None not in (state, self.value):
                raise TypeError(f"a {type(state).__name__} was saved")
        if isinstance(state, torch.Tensor) and isinstance(self.value, torch.Tensor) and state.shape != self.value.shape:
            raise RuntimeError(f"it has shape {tuple(self.value.shape)}, and {tuple(state.shape)} was saved")
        self.value = restored(self.value, state)


class Kept:
    """The objects given to `Run.keep`, as attributes: ``run.kept.best``. A plain value may be set, and is then saved.

    Raises:
        AttributeError: for a name without a kept object.
        UsageError: for setting an object with a state of its own, or a value that cannot be saved.
    """

    def __init__(self, objects: Mapping[str, Stateful]) -> None:
        vars(self)["_objects"] = objects

    def __getattr__(self, name: str) -> Any:
        return exposed(self._find(name))

    def __setattr__(self, name: str, value: object) -> None:
        kept = self._find(name)
        if not isinstance(kept, PlainValue):
            raise UsageError(
                f"run.kept.{name} = ...: keep({name}={type(kept).__name__}) is an object with a state of its own; "
                "change the object itself"
            )
        kept.replace(value)

    def __dir__(self) -> list[str]:
        return sorted(self._objects)

    def _find(self, name: str) -> Stateful:
        objects: Mapping[str, Stateful] = vars(self)["_objects"]
        if name not in objects:
            names = ", ".join(sorted(objects)) or "nothing"
            raise AttributeError(f"run.kept.{name}: nothing is kept under that name, but {names}; run.keep({name}=...)")
        return objects[name]


def as_stateful(name: str, value: object) -> Stateful:
    """``value`` itself if it has a state of its own, else a `PlainValue`.

    Raises:
        UsageError: for a value that cannot be saved.
    """
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        found: Stateful = value
        return found
    return PlainValue(name, value)


def exposed(kept: Stateful) -> object:
    """The object that the script has given for ``kept``."""
    return kept.value if isinstance(kept, PlainValue) else kept


def _check(value: object, path: str) -> None:
    if type(value) in _DICTS:
        assert isinstance(value, dict)
        for key, inner in value.items():
            if type(key) not in (str, int):
                raise UsageError(f"keep({path}=...) has the key {key!r}, which cannot be saved: use str or int keys")
            _check(inner, f"{path}[{key!r}]")
    elif type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        for index, inner in enumerate(value):
            _check(inner, f"{path}[{index}]")
    elif not isinstance(value, _LEAVES):
        raise UsageError(
            f"keep({path}={type(value).__name__}): it has no state_dict() and load_state_dict(), and is no number, "
            "text, tensor, list, tuple or dict of these, or a deque of these; give the object both, or keep one that "
            "has (an array as torch.from_numpy(array))"
        )


def _without_deque(value: object) -> object:
    """A list in place of a deque. Within other values a deque would come back as a list, where there is none yet."""
    return list(value) if type(value) is deque else value


def restored(here: object, saved: object) -> object:
    """The value ``saved``, written into the script's list, deque, dict or tensor ``here`` where possible in place."""
    if isinstance(here, dict) and isinstance(saved, dict):
        new = {key: restored(here.get(key), value) for key, value in saved.items()}
        here.clear()
        here.update(new)
        return here
    if isinstance(here, list | deque) and isinstance(saved, list):
        known = [*here, *([None] * len(saved))]
        here.clear()
        here.extend(restored(known[index], value) for index, value in enumerate(saved))
        return here
    if isinstance(here, torch.Tensor) and isinstance(saved, torch.Tensor) and _alike(here, saved):
        with torch.no_grad():
            here.copy_(saved)
        return here
    return saved


def _alike(here: torch.Tensor, saved: torch.Tensor) -> bool:
    return here.shape == saved.shape and here.dtype == saved.dtype
