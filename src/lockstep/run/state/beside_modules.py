"""Models of the script outside of the run, whose buffers the loop's body changes, such as a teacher's BatchNorm.

a body in the loop of run.train     each rank changes them by its own micro-batches; a replay changes nothing
the same loop, in eval mode         computing with changed buffers is refused: ranks hold different values
run.evaluate, on several ranks      computing with changed buffers is refused, too
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lockstep.errors import UsageError
from lockstep.run.source.reachable import find, script_roots
from lockstep.run.state.user_values import Stateful


class BesideModules:
    """The modules of a script outside of its run's models.

    Args:
        models: of the run.
        kept: of the script.
    """

    def __init__(self, models: Collection[nn.Module], kept: Mapping[str, Stateful]) -> None:
        self._models: Final = models
        self._kept: Final = kept
        # Buffers, and their values from before replays; None: no replay has begun.
        self._before: list[tuple[str, nn.Module, torch.Tensor, torch.Tensor]] | None = None
        self._moved: Final[dict[nn.Module, str]] = {}  # modules with changed buffers, and the name of one
        self._hook: RemovableHandle | None = None  # within the loop, once a body has changed buffers

    def begin_replay(self) -> None:
        """Note the values of buffers that the script can reach, before a replay is handed out."""
        self._watch()
        if self._before is not None:
            return
        self._before = [
            (f"{path}.{name}.{buffer_name}".replace("..", "."), module, buffer, buffer.clone())
            for path, name, module in self._within_reach()
            for buffer_name, buffer in module.named_buffers(recurse=False)
        ]

    def end_replays(self) -> None:
        """Restore buffers that replays have changed, before another micro-batch is handed out."""
        before, self._before = self._before, None
        for name, module, buffer, value in before or ():
            if not torch.equal(buffer, value):
                buffer.copy_(value)
                self._moved[module] = name
        self._watch()

    def _watch(self) -> None:
        """Refuse computing with changed buffers in eval mode from now on."""
        if self._moved and self._hook is None:
            refuse = partial(self._refuse, where="eval mode in the loop of run.train(...)")
            self._hook = register_module_forward_pre_hook(refuse)

    def forget(self) -> None:
        """Leave the loop, perhaps in a replay: buffers keep the changes by the body."""
        self._before = []
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @contextlib.contextmanager
    def evaluating(self, ranks: int) -> Iterator[None]:
        """A context for an evaluation on ``ranks`` ranks.

        Raises:
            UsageError: if a module is called in the context whose buffers differ between ranks.
        """
        hook = register_module_forward_pre_hook(self._refuse) if self._moved and ranks > 1 else None
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()

    def _within_reach(self) -> Iterator[tuple[str, str, nn.Module]]:
        kept = (value for value in self._kept.values() if isinstance(value, nn.Module))
        known = {module for root in (*self._models, *kept) for module in root.modules()}
        for path, root in find(script_roots(sys._getframe()), nn.Module).items():
            if isinstance(root, nn.Module) and root not in known:
                yield from ((path, name, module) for name, module in root.named_modules() if module not in known)

    def _refuse(self, module: nn.Module, _inputs: object, where: str = "run.evaluate(...)") -> None:
        name = self._moved.get(module)
        if name is not None and not module.training:
            model = name.partition(".")[0]
            raise UsageError(
                f"{model} is computed in {where}, and forward passes in the loop of run.train(...) have "
                f"moved {name}: on each rank by its own micro-batches, so that ranks hold different values. Give it to "
                f"run.model({model}), which keeps buffers alike on all ranks and in checkpoints; or call "
                f"{model}.eval() before the loop, if these are not to move"
            )
