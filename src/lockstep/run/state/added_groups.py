"""Parameter groups that the script adds to an optimizer while it trains.

A resume makes them again before it loads the optimizer's state, for the lines that added them may not run again:

    if epoch == 1: optimizer.add_param_group({"params": model.head.parameters()})      resumed in epoch 3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import nn

Named = list[list[list[tuple[int, str]]]]
"""Of each optimizer, each added group: each parameter as the number of its model and its name there."""


class AddedGroups:
    """The parameter groups of ``optimizers`` that were not there as the training began.

    Args:
        optimizers: of the run, as the training begins.
        models: of the run, which have the parameters.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], models: Sequence[nn.Module]) -> None:
        self._optimizers: Final = optimizers
        self._models: Final = models
        self._began: Final = [len(optimizer.param_groups) for optimizer in optimizers]

    def state(self) -> Named:
        """The added groups, as plain values."""
        added = [o.param_groups[count:] for o, count in zip(self._optimizers, self._began, strict=True)]
        if not any(added):
            return []
        models = enumerate(self._models)
        names = {id(p): (number, name) for number, model in models for name, p in model.named_parameters()}
        # A parameter of no model is refused before a step.
        return [[[names[id(p)] for p in group["params"] if id(p) in names] for group in groups] for groups in added]

    def load(self, added: Named, states: Sequence[Mapping[str, Any]]) -> None:
        """Make the groups of ``added`` that an optimizer lacks, with the options that its state has in ``states``."""
        for optimizer, groups, state in zip(self._optimizers, added, states, strict=False):
            missing = min(len(state["param_groups"]) - len(optimizer.param_groups), len(groups))
            if missing <= 0:
                continue
            made = [[self._parameter(*each) for each in names] for names in groups[-missing:]]
            for parameters, options in zip(made, state["param_groups"][-missing:], strict=True):
                optimizer.add_param_group({**options, "params": parameters})
            _let_repeat(optimizer, made)

    def _parameter(self, number: int, name: str) -> nn.Parameter:
        return self._models[number].get_parameter(name)


def _let_repeat(optimizer: torch.optim.Optimizer, made: Sequence[Sequence[nn.Parameter]]) -> None:
    """Let the script add once more groups that a resume has ``made``: what the script gives is there already."""
    add: Callable[[dict[str, Any]], None] = optimizer.add_param_group
    known = [{id(p) for p in parameters} for parameters in made]

    def add_param_group(group: dict[str, Any]) -> None:
        given = group["params"]
        parameters = [given] if isinstance(given, torch.Tensor) else list(given)
        if {id(p[1] if isinstance(p, tuple) else p) for p in parameters} not in known:
            add({**group, "params": parameters})

    cast(Any, optimizer).add_param_group = add_param_group
