"""Options of optimizers, such as learning rates, that a resumed script gives differently from the run's beginning."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch

from lockstep.run.setup.identity import optimizers_of
from lockstep.run.state.registered import State
from lockstep.torch_private import note_learning_rates

_BASE: Final = "initial_lr"  # what torch's schedulers multiply; they set it when they are made


class ScriptOptions:
    """The script's options of each parameter group, noted before a checkpoint is loaded."""

    def __init__(self, state: State) -> None:
        self._state: Final = state
        self._given: Final = [[_copied(group) for group in one.param_groups] for one in state.optimizers]
        self._texts: Final = optimizers_of(state.optimizers)

    def settle(self, began: Sequence[Any], *, script_holds: bool) -> tuple[list[list[object]], list[str]]:
        """Give optimizers and schedulers the script's options after a checkpoint was loaded, if ``script_holds``.

        Only options that the script has changed are set: others may have changed since by a schedule. If a torch
        scheduler sets the learning rate, its base is changed, and the rate itself in proportion.

        Args:
            began: result of `optimizers_of` when the run began, or when the script's options were taken last.
            script_holds: whether the script's options are used, not the checkpoint's.

        Returns:
            `began` for the next checkpoint, and a text about each option that differs.
        """
        holds, said = [], []
        for place, (optimizer, (_, were), (kind, texts)) in enumerate(
            zip(self._state.optimizers, began, self._texts, strict=False)
        ):
            for group, given, old, new in zip(optimizer.param_groups, self._given[place], were, texts, strict=False):
                for name in _changed(old, new):
                    shown = "lr" if name == _BASE else name
                    if script_holds:
                        _set(group, name, given[name], old[name])
                        now = f"; by its schedule it is {_shown(group['lr'])} now" if name == _BASE else ""
                        said.append(f"{kind}: {shown}={new[name]} of this script holds now, not {old[name]}{now}")
                    else:
                        said.append(
                            f"{kind}: {shown}={_shown(group[shown])} of the checkpoint holds, not the {new[name]} of "
                            f"this script (the run began with {old[name]}); to take the script's, resume with "
                            "Run(resume_options='script') or --set resume_options=script"
                        )
            groups = [new if script_holds else {**new, **old} for old, new in zip(were, texts, strict=False)]
            holds.append([kind, groups])
            if script_holds:
                _set_bases(self._schedulers(), optimizer)
        return holds, said

    def _schedulers(self) -> Iterator[object]:
        waiting = [*(one.scheduler for one in self._state.schedulers), *self._state.kept.values()]
        while waiting:
            one = waiting.pop()
            yield one
            waiting += getattr(one, "_schedulers", ())


def _copied(group: dict[str, object]) -> dict[str, object]:
    options = {name: value for name, value in group.items() if name != "params"}
    return {name: v.detach().clone() if isinstance(v, torch.Tensor) else v for name, v in options.items()}


def _changed(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """The options that differ; not the learning rate that a scheduler has set, but its base."""
    return [
        name
        for name in new
        if old.get(name, new[name]) != new[name] and not (name == "lr" and _BASE in new and _BASE in old)
    ]


def _set(group: dict[str, Any], name: str, value: Any, began: str) -> None:
    if name == _BASE and "lr" in group:
        was = float(began)
        _put(group, "lr", group["lr"] * (float(value) / was) if was and math.isfinite(was) else value)
    _put(group, name, value)


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(there := group.get(name), torch.Tensor):
        there.fill_(float(value))  # compiled or captured code reads this tensor
    else:
        group[name] = value


def _set_bases(schedulers: Iterable[Any], optimizer: torch.optim.Optimizer) -> None:
    for one in schedulers:
        if getattr(one, "optimizer", None) is not optimizer:
            continue
        groups = optimizer.param_groups
        if len(bases := getattr(one, "base_lrs", ())) == len(groups):
            one.base_lrs = [group.get(_BASE, base) for group, base in zip(groups, bases, strict=True)]
        note_learning_rates(one, [group["lr"] for group in groups])


def _shown(value: object) -> str:
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    return f"{number:.6g}" if isinstance(number, float) else str(number)
