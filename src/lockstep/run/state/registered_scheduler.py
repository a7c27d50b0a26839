"""A scheduler of an optimizer that the run steps, once after each step of the optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from types import FrameType
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoint import SavedTree, StateTree
from lockstep.errors import UsageError
from lockstep.run.source.reachable import find, look, script_roots


class RegisteredScheduler:
    """A ``scheduler`` that only the run may step."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler: Final = scheduler
        self._counts: list[Any] | None = None  # after the last step; None: before the first, when the script may set it

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose options the scheduler sets."""
        optimizer: torch.optim.Optimizer = self.scheduler.optimizer
        return optimizer

    def step(self) -> None:
        """Step the scheduler.

        Raises:
            UsageError: if the script has stepped the scheduler since the last step.
        """
        if self._counts is not None and (counts := self._count()) != self._counts:
            was, now = next((was, now) for was, now in zip(self._counts, counts, strict=True) if was != now)
            raise UsageError(
                f"{type(self.scheduler).__name__} was stepped by the script, too: its last_epoch is {now}, not {was}. "
                "After run.scheduler(...) the run steps it, once after each optimizer step: leave scheduler.step() "
                "out; or, to step it yourself, such as once an epoch, write run.keep(scheduler=scheduler) in place of "
                "run.scheduler(...)"
            )
        self.scheduler.step()
        self._counts = self._count()

    def _count(self) -> list[object]:
        """The step counts of the scheduler and of its inner schedulers, as in `SequentialLR`."""
        return [
            getattr(one, "last_epoch", None) for one in (self.scheduler, *getattr(self.scheduler, "_schedulers", ()))
        ]


class UnregisteredSchedulers:
    """Schedulers of a run's optimizers that the script steps, and has given neither to `Run.scheduler` nor to `keep`.

    Schedulers are identified by the script's variables, such as ``scheduler`` or ``self.warmup``.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[LRScheduler, object]] = {}  # with the marks of the state when it was found
        self._waiting: StateTree = {}  # saved states of schedulers that the script has not made yet

    def look(
        self,
        frame: FrameType,
        optimizers: Collection[torch.optim.Optimizer],
        known: Collection[object],
    ) -> None:
        """Find the script's schedulers in ``frame`` and outer frames, except the ``known`` ones."""
        found = find(script_roots(frame), LRScheduler)
        outer = [*found.values(), *known]
        skip = {id(one) for each in outer for one in getattr(each, "_schedulers", ())} | {id(one) for one in known}
        skip |= {id(scheduler) for scheduler, _ in self._found.values()}
        for name, scheduler in found.items():
            of_run = any(getattr(scheduler, "optimizer", None) is optimizer for optimizer in optimizers)
            if isinstance(scheduler, LRScheduler) and of_run and id(scheduler) not in skip:
                self._found[name] = scheduler, _marks(scheduler)
                if name in self._waiting:
                    scheduler.load_state_dict(self._waiting.pop(name))

    def state(self) -> StateTree:
        """The states of schedulers that have changed since they were found."""
        return {name: one.state_dict() for name, (one, first) in self._found.items() if _marks(one) != first}

    def load(self, state: SavedTree) -> None:
        """Restore schedulers from ``state``, also schedulers that the script makes later."""
        for name, saved in state.items():
            if name in self._found:
                self._found[name][0].load_state_dict(saved)
            else:
                self._waiting[name] = saved


def _marks(scheduler: LRScheduler) -> object:
    return look({"": scheduler.state_dict()})


def check_scheduler(scheduler: Any) -> None:
    """Check that ``scheduler`` can be stepped once after each step.

    Raises:
        UsageError: for a scheduler whose ``step`` needs an argument, such as a metric.
    """
    step = inspect.signature(type(scheduler).step)
    required = [
        name
        for name, parameter in list(step.parameters.items())[1:]
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    if required:
        name = type(scheduler).__name__
        raise UsageError(
            f"{name}.step({', '.join(required)}) needs {' and '.join(required)}, and a run steps schedulers after "
            f"each step by itself: write run.keep(scheduler=scheduler) in place of run.scheduler(...), and "
            "scheduler.step(run.metrics['accuracy']) after run.evaluate(...), with the metric that you measure"
        )
