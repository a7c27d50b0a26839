"""A model made of stages, as `Run.model` makes from a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


class StageSequence(nn.Module):
    """Stages in sequence: each is called with the result of the stage before.

        stage 0 (inputs of the model) ──► x ──► stage 1 (x) ──► (x, mask) ──► stage 2 (x, mask) ──► output

    A tuple becomes several arguments, any other value one argument. The stages are the submodules ``0``, ``1`` and so
    on.

    Args:
        stages: at least one.
    """

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, stage in enumerate(stages):
            self.add_module(str(number), stage)

    @property
    def stages(self) -> list[nn.Module]:
        """The stages, in order."""
        return [module for module in self._modules.values() if module is not None]

    def forward(self, *inputs: object) -> Any:
        """The result of the last stage."""
        output: Any = inputs
        for stage in self.stages:
            output = stage(*output) if isinstance(output, tuple) else stage(output)
        return output
