"""Replays, which test that the loop's body is a function of its micro-batch: a micro-batch is handed out twice.

a rank's micro-batches of a checked step     0 1 2 0' 3        of one alone: 0' 0' 0        0' is a replay of 0

Both compared plays begin with the same parameters, buffers, kept and carried state and random numbers, and with samples
that are read again. So losses, gradients, measured values and buffers must have the same bits. A different value
depends on state that no checkpoint holds and that other numbers of ranks change differently: a generator or a counter
of the script's own, an attribute that a forward pass changes, a cache of a data set. The results of a replay are
dropped.

The inputs of these values are also examined, by reading the script (`run.inputs`): a body that changes such an input
itself is refused, even if no checked step shows an effect, as with a list from which samples are drawn only when it is
full.

On several ranks, each second checked step replays the first micro-batch of the next rank. The ranks compare at the
step's end. A difference then comes from state that each rank has separately, such as a number set from its losses:

rank 0     0 1 2 4' 3        4' on rank 0 must be 4 on rank 1
rank 1     4 5 6 0' 7        0' on rank 1 must be 0 on rank 0
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from lockstep.batch import BatchPlan, MicroBatchPosition, StepCheck
from lockstep.collectives import Group, local_part
from lockstep.data import AuditedSteps, CheckedSteps
from lockstep.errors import UsageError
from lockstep.formatting import some_of
from lockstep.run.checks.divergence import checksum, numbers
from lockstep.run.inputs.shared_inputs import SharedInputs
from lockstep.run.setup.kernels import nodes_of
from lockstep.run.source.reachable import TENSOR_RANK, Mark, changed, look, script_roots
from lockstep.run.source.script_places import Held, changed_by
from lockstep.run.state.registered import State
from lockstep.torch_private import pytree

#: Number of passes of a process whose first steps are checked in any case; in later passes, one in `_ONE_IN`
#: micro-batches is replayed.
_FREE_PASSES: Final = 2
_FIRST_STEPS: Final = 2
_ONE_IN: Final = 200
_COUNT: Final = "the count of "


class CheckSchedule:
    """The schedule of checked steps: the first two of each pass, at a cost of at most 0.5 %, and one in ``every``.

    Equal on all ranks.

    Args:
        every: interval of checked steps in a pass.
        replays: whether a micro-batch of each checked step is replayed.
        of_others: whether each second checked step replays another rank's micro-batch.
        audit: interval of audited steps, in steps of the run; 0: never.
        seed: of the run.
    """

    def __init__(self, every: int, *, replays: bool, of_others: bool, audit: int = 0, seed: int = 0) -> None:
        self._every: Final = every
        self._replays: Final = replays
        self._of_others: Final = of_others
        self._audit: Final = audit
        self._seed: Final = seed
        self._began: int | None = None  # steps of the run before the first pass of this process
        self._passes = 0
        self._granted = 0  # replays

    def begin_pass(self, steps: int, plan: BatchPlan) -> CheckedSteps:
        """The checked steps of a pass that begins after ``steps`` steps of the run, divided by ``plan``."""
        if self._began is None:
            self._began = steps
        most = -(-plan.micro_batches // plan.world_size)  # micro-batches of a rank in a step
        is_free = self._passes < _FREE_PASSES or self._granted * _ONE_IN <= (steps - self._began) * most
        first = _FIRST_STEPS if is_free else 0
        self._passes += 1
        self._granted += first * (2 if most == 1 else 1)
        audits = AuditedSteps(self._audit, steps, self._seed) if self._audit else None
        return CheckedSteps(first, self._every, self._replays, self._of_others, audits)


_AT_STEP: Final = (
    "change it where run.step(loss) returns True, from all micro-batches of the step (run.sum, run.gather), and give "
    "it to run.keep(...)"
)
_EVERY_WAY: Final = (
    "Count by run.progress.step, draw from the generators of torch, NumPy or Python, hold what a forward pass changes "
    f"in a buffer of the model, carry it from step to step in run.carry, or {_AT_STEP}; what changes samples from step "
    "to step belongs into the body"
)
_OF_KERNELS: Final = (
    " On a GPU a kernel may give other bits each time, too: docs/gpu.md lists operations and what to write instead, "
    "and Run(nondeterministic='warn') gives equal bits up."
)
#: What to do instead, by the `Mark.rank` of what the body has changed.
_WAYS_OUT: Final = {
    0: "Draw from the generators of torch, NumPy or Python, which Lockstep seeds for each micro-batch",
    1: f"Count by run.progress.step, which is the same on any number of ranks, or {_AT_STEP}",
    TENSOR_RANK: f"Hold the tensor in a buffer of the model, carry it from step to step in run.carry, or {_AT_STEP}",
    3: f"Fill it for each micro-batch anew, or {_AT_STEP}",
}


class ReplayError(UsageError):
    """The error that a micro-batch had different values when it was computed again."""

    def __init__(
        self,
        difference: str,
        place: str,
        ranks: tuple[int, int] | None = None,
        *,
        reads_world_size: bool = False,
        after: int = 0,
    ) -> None:
        self._difference: Final = difference
        self._place: Final = place
        self._reads_world_size: Final = reads_world_size
        self._after: Final = after  # more bodies
        self._ranks: Final = ranks  # that have computed it; None: this rank, twice
        self.of_samples: Final = difference.startswith(SAMPLES)  #: whether the data set gave other samples
        super().__init__(self._text(()))

    def after(self, bodies: int) -> ReplayError:
        """The same error, for a micro-batch that was computed again after ``bodies`` other bodies."""
        return ReplayError(self._difference, self._place, reads_world_size=self._reads_world_size, after=bodies)

    def naming(self, names: Sequence[str], marks: Mapping[str, Mark] | None = None) -> UsageError:
        """The same error, with the ``names`` of values that the body has changed, or in which the two ranks differ.

        The ``marks`` of the values tell which way out fits the first one.
        """
        first = marks.get(names[0]) if marks and names else None
        return UsageError(self._text(names, _EVERY_WAY if first is None else _WAYS_OUT[first.rank]))

    def _text(self, names: Sequence[str], way_out: str = _EVERY_WAY) -> str:
        often = f"again after {self._after} other bodies" if self._after else "twice"
        by = often if self._ranks is None else f"by rank {self._ranks[0]} and by rank {self._ranks[1]}"
        head = f"{self._place} was computed {by}, with the same parameters, buffers and random numbers"
        if self.of_samples:
            return (
                f"{head}, and its samples differed: the data set, its transforms or the collate function give other "
                "samples each time they are asked, as with a generator of their own, a cache, or a change of the "
                "stored data in place. So they would depend on the number of ranks and of loader processes. Draw from "
                "the generators of torch, NumPy or Python, which Lockstep seeds for each micro-batch, and leave stored "
                "samples as they are"
            )
        if self._reads_world_size:
            return (
                f"{head}, but with another run.world_size, and {self._difference}: the result would depend on the "
                "number of ranks. Leave run.world_size out of what is computed: a loss is the mean over its "
                "micro-batch, and Lockstep weighs it by that on any number of ranks"
            )
        listed = some_of(names, 5)
        purpose = (
            "If the body has such an effect on purpose, as where it steps an environment, Run(replay=False) leaves "
            "this check out, and nothing then finds a body that depends on the number of ranks"
        )
        if self._ranks is not None:
            apart = f" What these ranks have apart: {listed}." if listed else ""
            return (
                f"{head}, and {self._difference}: the loop's body depends on something that each rank has for itself, "
                f"such as a number set from its own losses or its own samples.{apart} Set such a number where "
                "run.step(loss) returns True, from the losses of all micro-batches of the step: append them to a list, "
                "if run.counts, and give that to run.gather(...); or hold it for each sample, in the data set. "
                f"{purpose}"
            )
        culprits = f" The body changed {listed}." if listed else _OF_KERNELS * torch.cuda.is_initialized()
        return (
            f"{head}, and {self._difference}: the loop's body depends on something that it changes itself, which "
            f"other numbers of ranks and a resume would change differently.{culprits} {way_out}. {purpose}"
        )


Notes = Mapping[str, tuple[object, object]]
"""Of each value by its name: a mark, equal for equal bits; and the value, if it is a number."""


class Play:
    """The results of a computation of a micro-batch, by name, in order."""

    def __init__(self) -> None:
        self._notes: Final[dict[str, tuple[Any, Any]]] = {}
        self._losses = 0  # that the body gave to ``run.step`` so far
        self.before: Held = {}  #: the inputs of the training before the body, if known
        self.after: Held = {}

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
        self.note(f"{_COUNT}the loss{self.which}", count)

    @property
    def which(self) -> str:
        """The number of the body's last loss, if there are several; else ""."""
        return f" {self._losses}" if self._losses > 1 else ""

    def notes(self) -> Notes:
        """The remembered results as plain values. Waits once for each device."""
        flat = [each for pair in self._notes.values() for each in pair if isinstance(each, torch.Tensor)]
        plain = dict(zip(map(id, flat), numbers(flat), strict=True))
        return {
            name: (plain.get(id(mark), mark), plain.get(id(value), value))
            for name, (mark, value) in self._notes.items()
        }


def first_difference(first: Notes, second: Notes) -> str:
    """The first difference, in words; "" if the results are equal."""
    for name in dict.fromkeys((*first, *second)):
        if (name in first) != (name in second):
            return f"{name.removeprefix(_COUNT)} was there only the {'first' if name in first else 'second'} time"
        (mark, value), (other_mark, other) = first[name], second[name]
        if mark != other_mark:
            return f"{name} differed{f' ({value}, then {other})' if value is not None else ''}"
    return ""


class Replays:
    """Compares the two plays of micro-batches.

    Args:
        group: all ranks.
        state: what the run holds.
        inputs: of the training's computation.
        notes_all: whether each micro-batch has a play, also if it is not compared.
    """

    def __init__(self, group: Group, state: State, inputs: SharedInputs, *, notes_all: bool = False) -> None:
        self._group: Final = group
        self._state: Final = state
        self._inputs: Final = inputs
        self._notes_all: Final = notes_all
        self.play: Play | None = None  #: of the script's micro-batch, if it is compared
        self._firsts: dict[int, Played] = {}  # first plays of this rank's own micro-batches in this step, by place
        self._other: Played | None = None  # of another rank's
        self.reads_world_size = False  #: whether a replay has read the number of ranks
        self.of_effects = False  #: whether only effects are compared, without examining the script

    def begin(self, position: MicroBatchPosition) -> None:
        """The micro-batch at ``position`` is handed out."""
        is_compared = _is_compared(position)
        is_noted = is_compared or (self._notes_all and not position.is_padding)
        self.play = Play() if is_noted else None
        looks = is_compared and not (position.audited or self.of_effects)
        if self.play is not None and looks and position.is_replay:
            self.play.before = self._inputs.held()
        if looks:
            self._inputs.calls.watch()

    def note_given(self, parts: object) -> None:
        """Remember the parts of the body's data for a loss that is computed later."""
        if self.play is not None:
            self.play.note_all(f"what run.step was given{self.play.which},", parts)

    @contextlib.contextmanager
    def watching(self, loss: torch.Tensor) -> Iterator[None]:
        """A context for the backward pass of ``loss``, which is remembered with the gradients that it computes.

        Only while there is a `play`.
        """
        play = self.play
        assert play is not None
        play.note(f"the loss{play.which}", loss)
        names = {id(p): name for model in self._state.models for name, p in model.named_parameters()}
        with contextlib.ExitStack() as hooks:
            for number, node in enumerate(_leaves(loss)):
                name = f"{_GRADIENT}{names.get(id(node.variable), f'parameter {number}')}{play.which}"

                def note(gradients: Sequence[torch.Tensor | None], name: str = name) -> None:
                    for gradient in gradients:
                        if gradient is not None:
                            play.note(name, gradient)

                hooks.callback(node.register_prehook(note).remove)
            yield

    def note_buffers(self) -> None:
        """Remember the buffers, after the losses of the micro-batch."""
        if self.play is not None:
            for model in self._state.models:
                for name, buffer in model.named_buffers():
                    self.play.note(f"the buffer {name}", buffer)

    def end(self, position: MicroBatchPosition, step: int, carried: Mapping[str, object]) -> Play | None:
        """End the play of a body; a second play is compared with the first. Waits for the GPU then.

        Returns the play of the micro-batch, if it has one.

        Args:
            position: of the micro-batch.
            step: steps done before the micro-batch's step.
            carried: state that the micro-batch carries to the next step.

        Raises:
            ReplayError: if the plays differ.
        """
        play, self.play = self.play, None
        self._inputs.calls.unwatch()
        if play is not None:
            play.note_all("what run.carry holds,", dict(carried))
        if play is not None and _is_compared(position):
            if not (position.is_other_ranks or position.audited or self.of_effects):
                self._inputs.read_loop(step)
                play.after = self._inputs.held()
                self._inputs.body_is_over(play.before, play.after, (step, position.index))
            played = Played(step, position.index, position.of, play)
            if position.is_other_ranks:
                self._other = played
            elif (first := self._firsts.get(played.place)) is None or first.step != step:
                self._firsts = {n: one for n, one in self._firsts.items() if one.step == step} | {played.place: played}
            else:
                difference = first_difference(first.play.notes(), play.notes())
                if not (difference or self.of_effects):
                    difference = (
                        changed_by(first.play.after, play.before, play.after)
                        or self._inputs.carried
                        or self._inputs.changed_in_pass()
                    )
                if difference:
                    place = place_of(position.index, position.of, step)
                    raise ReplayError(difference, place, reads_world_size=self.reads_world_size)
        return play

    def take(self, position: MicroBatchPosition, step: int) -> Played | None:
        """End and return the play of an audited micro-batch, after its losses; None if it has no play."""
        play, self.play = self.play, None
        return None if play is None else Played(step, position.index, position.of, play)

    def end_pass(self, step: int) -> None:
        """A pass is over, after ``step`` steps.

        Raises:
            UsageError: if its bodies have changed something that the training is computed from.
        """
        if changed := self._inputs.changed_in_pass():
            raise ReplayError(changed, f"a pass that ends after step {step}").naming(())

    def compare_ranks(self) -> None:
        """Compare ranks at the end of a step in which they replayed each other's micro-batches. Collective then.

        Raises:
            UsageError: on all ranks, if two plays differ, naming the values in which the two ranks differ.
        """
        own, other = next(iter(self._firsts.values()), None), self._other
        if other is None:
            return
        self.forget()
        told = self._group.gather_objects(
            (None if own is None else own.digest(), other.digest()), "micro-batches that two ranks have computed"
        )
        by_index = {first.place: (rank, first) for rank, (first, _) in enumerate(told) if first is not None}
        for reader, (_, second) in enumerate(told):
            owner, first = by_index.get(second.place, (reader, second))
            if first.differs(second):
                break
        else:
            return
        mine = {owner: own, reader: other}.get(self._group.rank)
        held: tuple[Notes, Mapping[str, Mark]] = ({}, {})
        if mine is not None:
            held = mine.play.notes(), look(script_roots(sys._getframe()))
        by_rank = self._group.gather_objects(held, "what two ranks have computed")
        (first_notes, first_marks), (second_notes, second_marks) = by_rank[owner], by_rank[reader]
        difference = first_difference(first_notes, second_notes)
        place = place_of(second.place, other.of, other.step)
        error = ReplayError(difference, place, (owner, reader), reads_world_size=self.reads_world_size)
        apart = changed({name: mark for name, mark in first_marks.items() if name in second_marks}, second_marks)
        # Tensors of the micro-batch differ between ranks in any script.
        plain = [name for name in apart if second_marks[name].rank < TENSOR_RANK]
        raise error.naming(plain or apart)

    def forget(self) -> None:
        """The step is over, or discarded."""
        self.play = self._other = None
        self._firsts = {}
        self._inputs.calls.unwatch()

    def leave(self) -> None:
        """Leave the loop, and forget its plays and variables."""
        self.forget()
        self._inputs.leave()


class Digest(NamedTuple):
    """A digest of a micro-batch's play, compared first."""

    place: int  #: of the micro-batch in its step
    values: str
    gradients: str  #: "" if none was computed

    def differs(self, other: Digest) -> bool:
        """Whether the bits differ; gradients count if both digests have them."""
        has_gradients = bool(self.gradients and other.gradients)
        return self.values != other.values or (has_gradients and self.gradients != other.gradients)


class Played(NamedTuple):
    """The play of a micro-batch of a step."""

    step: int
    place: int  #: of the micro-batch in it
    of: int  #: micro-batches of the step
    play: Play

    def digest(self) -> Digest:
        """The digest of the play. Waits for the GPU."""
        notes = self.play.notes()
        marks = sorted((name, repr(mark)) for name, (mark, _) in notes.items())
        gradients = [pair for pair in marks if pair[0].startswith(_GRADIENT)]
        values = [pair for pair in marks if not pair[0].startswith(_GRADIENT)]
        return Digest(self.place, _hash(values), _hash(gradients) if gradients else "")


def _is_compared(position: MicroBatchPosition) -> bool:
    return position.check >= StepCheck.REPLAYED and not position.is_padding


def _hash(marks: Sequence[tuple[str, str]]) -> str:
    return hashlib.blake2b(repr(marks).encode(), digest_size=16).hexdigest()


def place_of(index: int, of: int, step: int) -> str:
    """The words for micro-batch ``index`` of ``of`` in the step after ``step`` steps."""
    return f"micro-batch {index} of {of} of step {step + 1}"


_GRADIENT: Final = "the gradient of "
SAMPLES: Final = "the samples,"  #: the name under which a micro-batch's data is noted


def _leaves(loss: torch.Tensor) -> Iterator[Any]:
    """The nodes of autograd's graph of ``loss`` at which gradients arrive at parameters, in a fixed order."""
    return (node for node in nodes_of(loss) if hasattr(node, "variable"))
