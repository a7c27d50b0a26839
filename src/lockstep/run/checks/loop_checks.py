"""Checks of the loop's body, which ranks run different numbers of times in a step.

    step of 4 micro-batches     1 rank: the body runs 4 times     3 ranks: once, once, twice     4 ranks: once each

So changes by the body for the next step (a learning rate, an average of the weights, a count) must be made once a step:
where `Run.step` returns True. This also holds for parameters that the body changes itself, such as a teacher's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.collectives import local_part
from lockstep.errors import UsageError
from lockstep.formatting import some_of
from lockstep.nested import map_leaves
from lockstep.run.checks.divergence import checksums, tensors_in
from lockstep.run.state.registered import State
from lockstep.run.state.user_values import Stateful, exposed
from lockstep.strategies import Strategy, parameters_of
from lockstep.torch_private import version_of

WITHOUT_DDP: Final = (
    "DistributedDataParallel around a model of this run: run.model(...) does what it does, and both would sum the "
    "gradients; leave DistributedDataParallel out, and .module where the script asks for it"
)
_ONCE = "write `if run.step(loss): ...`, which is true once a step on any number of ranks"
_FORWARD = (
    ". If a forward pass in training mode did it, as BatchNorm does: call {name}.eval() before the loop; or give it to "
    "run.model({name}) in place of run.keep(...), which keeps its buffers alike on all ranks"
)


class LoopChecks:
    """The loop checks of a run on one rank, which wait for no other rank, and for a GPU only to compare bodies.

    Args:
        state: what the run holds.
    """

    def __init__(self, state: State) -> None:
        self._state: Final = state
        self._options: list[Any] = []  # of all optimizers at the step's first backward pass
        # Values at the body's beginning, to be compared at its end: marks of kept objects, checksums of parameters.
        self._kept_marks: dict[str, Any] | None = None
        self._checksums_before: dict[nn.Parameter, int] | None = None
        self._at_point: dict[str, Any] = {}  # marks of kept objects
        self._buffer_versions: list[int] = []
        self.run_steps = True  #: whether an optimizer may step now: outside of the loop, and where the run does it
        self._hooks: Final = (
            register_optimizer_step_pre_hook(self._before_step),
            register_module_module_registration_hook(self._refuse_second_ddp),
        )

    def close(self) -> None:
        """Optimizers may step at any time again."""
        for hook in self._hooks:
            hook.remove()

    def note_options(self) -> None:
        """Note the options of optimizers at a step's first backward pass."""
        self._options = self._options_now()

    def require_same_options(self, step: int) -> None:
        """Check that no option of an optimizer has changed since `note_options`.

        Raises:
            UsageError: if one has changed.
        """
        now = self._options_now()
        if now == self._options:
            return
        for optimizer, before, after in zip(self._state.optimizers, self._options, now, strict=True):
            for group, (was, options) in enumerate(zip(before, after, strict=True)):
                for name, value in options.items():
                    if was.get(name) != value:
                        raise UsageError(
                            f"{name} of {type(optimizer).__name__}'s group {group} changed from {was.get(name)} to "
                            f"{value} between two micro-batches of step {step + 1}, so the result would depend on "
                            f"the number of ranks: give the scheduler to run.scheduler(...), or {_ONCE}"
                        )

    def begin_body(self, *, compare: bool) -> None:
        """Begin the body for a micro-batch; with ``compare``, forbidden changes are looked for at its end."""
        self._kept_marks = {name: _mark(value) for name, value in self._state.kept.items()} if compare else None
        self._checksums_before = self._checksums() if compare else None
        if compare:
            self._state.require_kept(sys._getframe())
            if self._state.attributes is not None:
                self._state.attributes.begin_body()

    def note_point(self) -> None:
        """Note kept objects at a step's end, to find changes by the script until the next update."""
        self._at_point = {name: _mark(value) for name, value in self._state.kept.items()}

    def changed_since_point(self) -> str | None:
        """The first kept object that was changed since `note_point`; None: no change. To be asked once."""
        noted, self._at_point = self._at_point, {}
        changed = (f"keep({name}=...)" for name, mark in noted.items() if _mark(self._state.kept[name]) != mark)
        return next(changed, None)

    def forget_point(self) -> None:
        """The loop is left: the script may change anything now."""
        self._at_point = {}

    def end_step(self, strategy: Strategy) -> None:
        """End the comparison of bodies after the optimizers' steps: the rest of the body may change kept objects.

        Raises:
            UsageError: if bodies are compared in this step, and an optimizer has state that cannot be saved.
        """
        if self._kept_marks is not None and self._state.attributes is not None:
            self._state.attributes.require_storable(strategy)
        self._kept_marks = self._checksums_before = None

    def body_steps(self) -> None:
        """The body has come to its step."""
        if self._state.attributes is not None:
            self._state.attributes.end_of_body()

    def require_parameters_unchanged(self, index: int, of: int) -> None:
        """Check that no parameter has changed since `begin_body`.

        Raises:
            UsageError: if one has.
        """
        if self._checksums_before is None:
            return
        now = self._checksums()
        # One that is not there any more was replaced.
        odd = [self._state.name_of(p) for p, value in self._checksums_before.items() if now.get(p) != value]
        if odd:
            raise UsageError(
                f"{some_of(odd, 1)} changed in the loop's body on micro-batch {index} of {of} of a "
                f"step, so the result would depend on the number of ranks: {_ONCE}. A weight that forward() limits or "
                "derives is a parametrization (torch.nn.utils.parametrize) before run.model(...), and what forward() "
                "moves by itself, such as a codebook, must be a buffer (register_buffer). A weight that the first "
                "batch sets is set before the loop, by a forward pass of a batch that the script reads itself"
            )

    def end_body(self, index: int, of: int) -> None:
        """Check a body, at its end, in which `Run.step` did not return True.

        Raises:
            UsageError: if the body changed a kept object or a parameter.
        """
        self.require_parameters_unchanged(index, of)
        before, self._kept_marks = self._kept_marks, None
        for name, mark in (before or {}).items():
            if _mark(self._state.kept[name]) != mark:
                kept = exposed(self._state.kept[name])
                moves = isinstance(kept, nn.Module) and kept.training and any(True for _ in kept.buffers())
                raise UsageError(
                    f"keep({name}={type(kept).__name__}) was changed in the loop's body on "
                    f"micro-batch {index} of {of} of a step, so the result would depend on the number of ranks: {_ONCE}"
                    + (_FORWARD.format(name=name) if moves else "")
                )

    def note_buffers(self) -> None:
        """The micro-batch's last backward pass has been made: no forward pass may move buffers any more."""
        self._buffer_versions = [version_of(buffer) for _, buffer in self._state.buffers]

    def require_buffers_unchanged(self) -> None:
        """Check that no buffer has changed since `note_buffers`.

        Raises:
            UsageError: if one has.
        """
        for (name, buffer), was in zip(self._state.buffers, self._buffer_versions, strict=False):
            if was != version_of(buffer):
                raise UsageError(
                    f"the buffer {name} changed after run.step(...) in the loop's body: what a forward pass in "
                    "training mode does there would count on some ranks and not on others. Make that pass before "
                    "run.step(...) or between model.eval() and model.train(), and set buffers by hand before "
                    "run.train(...). What the script sets once a step, where run.step(...) returns True, is a "
                    "parameter that does not learn: nn.Parameter(tensor, requires_grad=False)"
                )

    def _checksums(self) -> dict[nn.Parameter, int]:
        """Checksums of this rank's part of each parameter; a divided model's own list, not its gathered parameters."""
        parameters: list[nn.Parameter] = []
        for model, own in zip(self._state.models, self._state.parameters, strict=True):
            is_divided = any(hasattr(p, "to_local") for p in own)
            parameters += [p for p in (own if is_divided else model.parameters()) if not p.is_meta]
        return dict(zip(parameters, checksums([local_part(p.detach()) for p in parameters]), strict=True))

    def _options_now(self) -> list[list[dict[str, object]]]:
        return [[_plain(group) for group in optimizer.param_groups] for optimizer in self._state.optimizers]

    def _refuse_second_ddp(self, outer: nn.Module, _name: str, inner: nn.Module | None) -> None:
        if type(outer) is nn.parallel.DistributedDataParallel and not self._state.known_parameters.isdisjoint(
            () if inner is None else inner.parameters()
        ):
            raise UsageError(WITHOUT_DDP)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        if self.run_steps:
            return
        known = {id(p) for model in self._state.models for p in model.parameters()}
        if any(id(p) in known for p in parameters_of(optimizer)):
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called in the loop of run.train(...), where each rank would "
                "step by itself, on its own gradients: run.step(loss) takes the place of loss.backward(), "
                "optimizer.step() and optimizer.zero_grad()"
            )


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group; without tensors on a GPU, which would have to be waited for."""
    options = {}
    for name, value in group.items():
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and value.numel() == 1:
                options[name] = value.item()
        elif name != "params":
            options[name] = value
    return options


def _mark(value: Stateful) -> object:
    """A mark that differs if ``value`` was changed, in whatever way; waits for the GPU."""
    state = value.state_dict()
    return map_leaves(_without_values, state), checksums([tensor for _, tensor in tensors_in(state)])


def _without_values(leaf: object) -> object:
    return (str(leaf.dtype), tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else repr(leaf)
