"""Everything that a checkpoint of a run holds, gathered and put back by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from lockstep.errors import CheckpointError, UsageError


class Stateful(Protocol):
    """What `Run.keep` takes."""

    def state_dict(self) -> Any:
        """What to save."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Go on from what was saved."""
        ...


class State:
    """The objects of a run: models without their wrappers, optimizers, schedulers, and what the user wants kept."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.kept: dict[str, Stateful] = {}

    def keep(self, name: str, value: object) -> None:
        """Save ``value`` under ``name``.

        Raises:
            UsageError: if it has no state, or the name is taken.
        """
        if name in self.kept:
            raise UsageError(f"keep({name}=...): something is kept under that name already; give it another")
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise UsageError(
                f"keep({name}={type(value).__name__}): it has no state_dict() and load_state_dict(); "
                "give the object both, or keep one that has"
            )
        self.kept[name] = value

    def tree(self) -> dict[str, Any]:
        """The state of every object."""
        return {
            "models": [m.state_dict() for m in self.models],
            "optimizers": [o.state_dict() for o in self.optimizers],
            "schedulers": [s.state_dict() for s in self.schedulers],
            "kept": {name: value.state_dict() for name, value in self.kept.items()},
        }

    def load(self, tree: Mapping[str, Any]) -> None:
        """Put `tree` back.

        Raises:
            CheckpointError: if the script made other objects than the one that saved, or one of them does not fit.
        """
        for kind in ("models", "optimizers", "schedulers"):
            self._load_all(kind, getattr(self, kind), tree[kind])
        if set(tree["kept"]) != set(self.kept):
            raise CheckpointError(
                f"the checkpoint keeps {_names(tree['kept'])} and this script {_names(self.kept)}; "
                "call run.keep(...) for the same names before the training begins"
            )
        for name, value in self.kept.items():
            _load_one(f"keep({name}=...)", value, tree["kept"][name])

    def _load_all(self, kind: str, here: list[Any], saved: list[Any]) -> None:
        if len(here) != len(saved):
            raise CheckpointError(
                f"the checkpoint holds {len(saved)} {kind} and this script made {len(here)}; "
                "it must be resumed by the script that wrote it, or begin with --fresh"
            )
        for place, (value, state) in enumerate(zip(here, saved, strict=True)):
            _load_one(f"{kind[:-1]} {place}" if len(here) > 1 else kind[:-1], value, state)


def _load_one(what: str, value: Stateful, state: Any) -> None:
    try:
        value.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the {what} of the checkpoint does not fit this script's {type(value).__name__}: {error}"
        ) from error


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
