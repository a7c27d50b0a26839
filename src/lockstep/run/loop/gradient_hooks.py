"""Hooks that a script has put on the gradients of parameters: a hook is called once a step, with the step's gradient.

    backward passes of micro-batches     hooks are off
    reduction, division by the counts    .grad is the gradient of the step
    hooks                                in the order in which they were registered, with the same random numbers on
                                         all ranks; then those of register_post_accumulate_grad_hook
    [the script's own lines]             run.backward has returned True
    clipping, optimizers

On one GPU the global batch is one micro-batch, and its gradient is what a hook sees. A hook that limits each number,
adds noise or keeps a history would compute something else of the gradients of single micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.run.setup.run_context import RunContext
from lockstep.torch_private import gradient_hooks

Hook = Callable[..., Any]

_OURS: Final = f"{__name__.partition('.')[0]}."


class GradientHooks:
    """Keeps hooks away from the backward passes of micro-batches, and calls them with the gradient of the step."""

    def __init__(self, context: RunContext) -> None:
        self._share: Final = context.strategy.update_share
        self._strategy: Final = context.settings.strategy
        self._position: Final = context.position

    @contextmanager
    def off(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Within the context, backward passes call no hook of the script on ``parameters``.

        Raises:
            UsageError: if there is such a hook, and under the strategy no rank has all gradients of a step.
        """
        taken = list(_script_hooks(parameters))
        if taken and not self._share.has_gradients:
            raise UsageError(
                f"a hook on the gradient of a parameter: under strategy {self._strategy} no rank has all gradients of "
                "a step, which hooks would be called with. To clip gradients, write lockstep.Run(clip_norm=...); for "
                "what else a hook does, use ddp or zero"
            )
        for hooks, own in taken:
            for key in own:
                del hooks[key]
        try:
            yield
        finally:
            for hooks, own in taken:
                hooks.update(own)

    def call(self, parameters: Iterable[nn.Parameter]) -> None:
        """Call the script's hooks on ``parameters``, whose ``.grad`` is the gradient of the step."""
        hooked = [p for p in parameters if p.grad is not None and any(_script_hooks([p]))]
        if not hooked:
            return
        self._position.seed_script("hooks")
        with torch.no_grad():
            for parameter in hooked:
                of_gradient, of_parameter = map(_of_script, gradient_hooks(parameter))
                for hook in of_gradient.values():
                    changed = hook(parameter.grad)
                    if changed is not None:
                        parameter.grad = changed
                for hook in of_parameter.values():
                    hook(parameter)


def _script_hooks(parameters: Iterable[nn.Parameter]) -> Iterator[tuple[dict[int, Hook], dict[int, Hook]]]:
    """Each dict of hooks on ``parameters`` that has hooks of the script, with these."""
    for parameter in parameters:
        for hooks in gradient_hooks(parameter):
            own = _of_script(hooks)
            if own:
                yield hooks, own


def _of_script(hooks: Mapping[int, Hook]) -> dict[int, Hook]:
    """Those of ``hooks`` that are no functions of this package, which take times, for example."""
    return {key: hook for key, hook in hooks.items() if not _module_of(hook).startswith(_OURS)}


def _module_of(hook: Hook) -> str:
    return getattr(hook.func if isinstance(hook, partial) else hook, "__module__", None) or ""
