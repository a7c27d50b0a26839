"""The body of the loop is a function of its micro-batch, and that is tried: one of a step is handed out twice.

a rank's micro-batches of a checked step     0 1 2 0' 3        of one alone: 0' 0' 0        0' is a replay of 0

Both plays that are compared begin with the same parameters, buffers, kept and carried state and random numbers, and
with samples that are read again. So losses, gradients, measured values and buffers must have the same bits. What
differs depends on something that no checkpoint holds and that other numbers of ranks change differently: a generator or
a counter of the script's own, an attribute that a forward pass changes, a cache of a data set. A replay counts for
nothing.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from lockstep.batch import BatchPlan, MicroBatchPosition, StepCheck
from lockstep.collectives import local_part
from lockstep.data import CheckedSteps
from lockstep.errors import UsageError
from lockstep.run.divergence import checksum
from lockstep.run.state import State

#: Passes of a process whose first steps are checked in any case; in later ones, a replay is made once in so many
#: micro-batches.
_FREE_PASSES: Final = 2
_FIRST_STEPS: Final = 2
_ONE_IN: Final = 200

_NOTHING: Final = "nothing"


class CheckSchedule:
    """Which steps are checked: the first two of each pass, as far as that costs 0.5 % at most, and one in so many.

    The same on all ranks.

    Args:
        every: one step of a pass in so many.
        replays: whether a micro-batch of each is replayed.
    """

    def __init__(self, every: int, *, replays: bool) -> None:
        self._every: Final = every
        self._replays: Final = replays
        self._began: int | None = None  # steps of the run before the first pass of this process
        self._passes = 0
        self._granted = 0  # replays

    def begin_pass(self, steps: int, plan: BatchPlan) -> CheckedSteps:
        """Those of a pass that begins after ``steps`` of the run, which are divided by ``plan``."""
        if self._began is None:
            self._began = steps
        most = -(-plan.micro_batches // plan.world_size)  # that a rank computes in a step
        is_free = self._passes < _FREE_PASSES or self._granted * _ONE_IN <= (steps - self._began) * most
        first = _FIRST_STEPS if is_free else 0
        self._passes += 1
        self._granted += first * (2 if most == 1 else 1)
        return CheckedSteps(first, self._every, self._replays)


class ReplayError(UsageError):
    """A micro-batch gave other values when it was computed once more."""

    def __init__(self, difference: str, place: str, *, of_samples: bool) -> None:
        self._difference: Final = difference
        self._place: Final = place
        self.of_samples: Final = of_samples  #: whether the data set gave other samples
        super().__init__(self._text(()))

    def naming(self, changed: Sequence[str]) -> UsageError:
        """The same error, with the names of what the body ``changed``."""
        return UsageError(self._text(changed))

    def _text(self, changed: Sequence[str]) -> str:
        head = f"{self._place} was computed twice, with the same parameters, buffers and random numbers"
        if self.of_samples:
            return (
                f"{head}, and its samples differed: the data set, its transforms or the collate function give other "
                "samples each time they are asked, as with a generator of their own, a cache, or a change of the "
                "stored data in place. So they would depend on the number of ranks and of loader processes. Draw from "
                "the generators of torch, NumPy or Python, which Lockstep seeds for each micro-batch, and leave stored "
                "samples as they are"
            )
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        culprits = f" The body changed {', '.join(changed[:5])}{more}." if changed else ""
        return (
            f"{head}, and {self._difference}: the loop's body depends on something that it changes itself, which "
            f"other numbers of ranks and a resume would change differently.{culprits} Count by run.progress.step, "
            "draw from the generators of torch, NumPy or Python, hold what a forward pass changes in a buffer of the "
            "model, carry it from step to step in run.carry, or change it where run.step(loss) returns True and give "
            "it to run.keep(...). If the body has such an effect on purpose, as where it steps an environment, "
            "Run(replay=False) leaves this check out, and nothing then finds a body that depends on the number of "
            "ranks"
        )


class Play:
    """What one computation of a micro-batch has given, by name, in the order in which it came."""

    def __init__(self) -> None:
        self._notes: Final[dict[str, tuple[Any, Any]]] = {}
        self._losses = 0  # that the body gave to ``run.step`` so far

    def note(self, name: str, value: object) -> None:
        """Remember the bits of ``value``, a tensor or a plain value; does not wait for a GPU."""
        if not isinstance(value, torch.Tensor):
            mark = struct.pack("d", value) if isinstance(value, float) else repr(value)
            self._notes[name] = mark, value
            return
        value = local_part(value.detach())
        if value.is_sparse:
            value = value.coalesce()
            self.note(f"{name} (places)", value.indices())
            value = value.values()
        if value.layout is torch.strided and not value.is_nested and not value.is_meta:
            self._notes[name] = checksum(value), None if value.dim() else value.clone()

    def note_all(self, name: str, value: object) -> None:
        """Remember each part of ``value``, nested containers."""
        for number, leaf in enumerate(pytree.tree_leaves(value)):
            if isinstance(leaf, torch.Tensor | int | float | str | bytes | None):
                self.note(f"{name} {number}", leaf)

    def note_loss(self, count: object) -> None:
        """The body gives a loss, with a ``count`` or None."""
        self._losses += 1
        self.note(f"the count of the loss{self.which}", count)

    @property
    def which(self) -> str:
        """Which of the body's losses came last, where there are several."""
        return f" {self._losses}" if self._losses > 1 else ""

    def first_difference(self, replay: Play) -> str:
        """What of ``replay`` differs first from this play, in words; "" if nothing does. Waits for the GPU."""
        for name in dict.fromkeys((*self._notes, *replay._notes)):
            (mark, value), (other_mark, other) = (p._notes.get(name, (_NOTHING, _NOTHING)) for p in (self, replay))
            if _plain(mark) != _plain(other_mark):
                values = f" ({_plain(value)}, then {_plain(other)})" if value is not None else ""
                return f"{name} differed{values}"
        return ""


class Replays:
    """Compares the two plays of micro-batches.

    Args:
        state: what the run holds.
    """

    def __init__(self, state: State) -> None:
        self._state: Final = state
        self.play: Play | None = None  #: of the micro-batch that the script has, if it is compared
        self._first: tuple[tuple[int, int], Play] | None = None  # the play that came first, and of what

    def begin(self, position: MicroBatchPosition) -> None:
        """The micro-batch at ``position`` is handed out."""
        is_compared = position.check >= StepCheck.REPLAYED and not position.is_padding
        self.play = Play() if is_compared else None

    def note_given(self, parts: object) -> None:
        """The body gives what a loss is computed of later: remember its parts."""
        if self.play is not None:
            self.play.note_all(f"what run.step was given{self.play.which},", parts)

    @contextlib.contextmanager
    def watching(self, loss: torch.Tensor) -> Iterator[None]:
        """A context for the backward pass of ``loss``, which is remembered with the gradients that it computes."""
        play = self.play
        if play is None:
            yield
            return
        play.note(f"the loss{play.which}", loss)
        names = {id(p): name for model in self._state.models for name, p in model.named_parameters()}
        handles = []
        for number, node in enumerate(_leaves(loss)):
            name = f"the gradient of {names.get(id(node.variable), f'parameter {number}')}{play.which}"

            def note(gradients: Sequence[torch.Tensor | None], name: str = name) -> None:
                for gradient in gradients:
                    if gradient is not None:
                        play.note(name, gradient)

            handles.append(node.register_prehook(note))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def note_buffers(self) -> None:
        """The micro-batch has its losses: what buffers hold now."""
        if self.play is not None:
            for model in self._state.models:
                for name, buffer in model.named_buffers():
                    self.play.note(f"the buffer {name}", buffer)

    def end(self, position: MicroBatchPosition, step: int, carried: Mapping[str, Any]) -> None:
        """The body is over; the second play of a step is compared with the first one. Waits for the GPU.

        Args:
            position: of the micro-batch.
            step: steps done before its own.
            carried: what it carries to the next step.

        Raises:
            ReplayError: if they differ.
        """
        play, self.play = self.play, None
        if play is None:
            return
        play.note_all("what run.carry holds,", dict(carried))
        first, key = self._first, (step, position.index)
        if first is None or first[0] != key:
            self._first = key, play
            return
        self._first = None
        if difference := first[1].first_difference(play):
            place = f"micro-batch {position.index} of {position.of} of step {step + 1}"
            raise ReplayError(difference, place, of_samples=difference.startswith(SAMPLES))

    def forget(self) -> None:
        """The step is over, or discarded."""
        self.play = self._first = None


SAMPLES: Final = "the samples,"  #: the name under which a micro-batch's data is noted


def _leaves(loss: torch.Tensor) -> Iterator[Any]:
    """The nodes of autograd's graph of ``loss`` at which gradients arrive at parameters, in a fixed order."""
    waiting: list[Any] = [loss.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node
        waiting.extend(following for following, _ in node.next_functions)


def _plain(value: object) -> object:
    return value.item() if isinstance(value, torch.Tensor) else value
