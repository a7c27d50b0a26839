"""The division of an epoch's order into steps and micro-batches, whose samples depend on no rank; pure functions.

    order of epoch 3      | 7 2 9 0 4 1 | 8 5 3 6 |        global_batch 6, micro_batch 2
    step                  |      0      |    1    |
    micro-batch           | 0    1    2 | 0     1 |        the last step is short, not padded
    rank of 3, training   | 0    1    2 | 1     2 |        rank 0 has none in step 1, or a padding micro-batch
    rank of 3, evaluation | 0    1    1 | 2     2 |        no step to finish together: one block of the pass each

The batches of a batch sampler are steps of any size, each divided as the short one here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch.utils.data import DataLoader

from lockstep.batch import BatchPlan, EpochSteps, MicroBatchPosition, StepCheck
from lockstep.errors import DataError
from lockstep.formatting import plural
from lockstep.seeding import seed_of

UserDataset = Any
"""A data set of the user's: samples by index (``__getitem__`` and ``__len__``), or in turn (``__iter__``)."""
Sample = Any
"""A sample of a data set."""
UserSampler = Any
"""A sampler of the user's: gives indices, or lists of indices, and may have generators and ``set_epoch``."""
Data = Any
"""The data of a micro-batch in the loop: collated samples, such as ``(images, labels)``."""
TorchLoader = DataLoader[Any]
"""The type of the result of `Run.loader`."""

Padding = Literal["none", "one", "even"]
"""Whether a rank computes padding: micro-batches of weight zero, so that every rank joins the same collectives. None;
one, in a short step that holds no micro-batch for the rank; or as many as make all ranks compute equally many in every
step."""


class MicroBatch(NamedTuple):
    """The samples of one forward and backward pass, and their position in the step."""

    position: MicroBatchPosition
    data: Data


@dataclass(frozen=True, slots=True)
class AuditedSteps:
    """The audited steps of a run: one in ``every`` steps, counted over all passes."""

    every: int
    done: int  #: steps of the run before the pass
    seed: int

    def draw(self, step: int) -> int | None:
        """The seed for the choice of audited micro-batches in ``step``, counted in the pass; None: no audit."""
        number = self.done + step + 1
        return None if number % self.every else seed_of(self.seed, "audit", number)


@dataclass(frozen=True, slots=True)
class CheckedSteps:
    """The checked steps of a pass, see `StepCheck`; steps are counted from the first step read in the pass."""

    first: int = 0  #: number of checked steps at the pass's beginning
    every: int = 0  #: then one in this number of steps; 0: none
    replays: bool = True  #: whether a micro-batch of each checked step is replayed
    of_others: bool = False  #: whether each second checked step replays another rank's micro-batch
    audits: AuditedSteps | None = None  #: steps that are audited instead
    after: int = 0  #: steps of the pass before the first step read

    def later(self, steps: int) -> CheckedSteps:
        """The same checked steps, counted from a step that comes ``steps`` steps later in the pass."""
        audits = self.audits and replace(self.audits, done=self.audits.done + steps)
        return replace(self, after=self.after + steps, audits=audits)

    def __contains__(self, step: int) -> bool:
        step += self.after
        return step < self.first or (self.every > 0 and step > 0 and step % self.every == 0)

    def is_second(self, step: int) -> bool:
        """Whether the checked ``step`` is every second one, which replays in another way."""
        step += self.after
        return (step if step < self.first else self.first + step // self.every) % 2 == 1


NO_CHECKS: CheckedSteps = CheckedSteps()


def checked(
    positions: Sequence[MicroBatchPosition],
    *,
    replays: bool,
    comes_next: bool = False,
    of_other: MicroBatchPosition | None = None,
) -> list[MicroBatchPosition]:
    """A rank's ``positions`` of a checked step; with ``replays``, the rank's first micro-batch comes twice.

    The replay comes just before the last micro-batch: all bodies but one lie between first computation and replay, and
    no update does. With ``comes_next`` the replay comes next to the first computation, which finds state that returns
    to its earlier value after several bodies. A single micro-batch is replayed twice before it is computed. A rank with
    only padding replays the padding, since forward passes may be collective.

    With ``of_other``, the first micro-batch of another rank, this micro-batch is replayed before the last one, once.
    """
    marked = [replace(position, check=StepCheck.STEP) for position in positions]
    if not replays or not positions:
        return marked
    original = next((number for number, position in enumerate(positions) if not position.is_padding), 0)
    replay = replace(positions[original], last=False, check=StepCheck.REPLAY)
    if len(positions) == 1 and of_other is None:
        return [replay, replay, *marked]
    if not positions[original].is_padding:
        marked[original] = replace(positions[original], check=StepCheck.REPLAYED)
    if comes_next:
        return [*marked[: original + 1], replay, *marked[original + 1 :]]
    return [*marked[:-1], replay if of_other is None else of_other, marked[-1]]


def _of_next_rank(plan: BatchPlan, rank: int, samples: int) -> MicroBatchPosition | None:
    """A replay of the next rank's first micro-batch; None on all ranks if only one rank has micro-batches."""
    runs = [plan.run(each, plan.micro_batches_of(samples)) for each in range(plan.world_size)]
    following = [run for run in (*runs[rank + 1 :], *runs[:rank]) if run]
    if sum(map(bool, runs)) < 2:
        return None
    return replace(plan.position(0, samples, following[0][0], last=False), check=StepCheck.OTHER_RANKS)


def _audited(
    positions: Sequence[MicroBatchPosition], plan: BatchPlan, rank: int, samples: int, drawn: int
) -> list[MicroBatchPosition]:
    """A rank's ``positions`` of an audited step: a micro-batch of each rank, ``drawn``, is replayed by another.

    The replay comes just before the last micro-batch. A rank without micro-batches also audits, since forward passes
    may be collective.
    """
    runs = {each: plan.run(each, plan.micro_batches_of(samples)) for each in range(plan.world_size)}
    chosen = {each: run[drawn % len(run)] for each, run in runs.items() if run}
    marked = [replace(position, audited=True) for position in positions]
    if not marked:
        return marked
    marked = [
        replace(one, check=StepCheck.REPLAYED) if one.index == chosen.get(rank) and not one.is_padding else one
        for one in marked
    ]
    ranks, turn = [*chosen], drawn // plan.micro_batches
    owner = ranks[turn % len(ranks)]
    if rank in chosen:  # from the next rank to the rank before this one; a single rank from itself
        owner = ranks[(ranks.index(rank) + 1 + turn % max(1, len(ranks) - 1)) % len(ranks)]
    check = StepCheck.REPLAY if owner == rank else StepCheck.OTHER_RANKS
    replay = replace(plan.position(0, samples, chosen[owner], last=False), check=check, audited=True)
    return [*marked[:-1], replay, marked[-1]]


def audited_alone(positions: Sequence[MicroBatchPosition], drawn: int) -> list[MicroBatchPosition]:
    """A rank's ``positions`` of an audited step of a stream, which other ranks cannot read again.

    The rank computes one of its own micro-batches three times.
    """
    marked = [replace(position, audited=True) for position in positions]
    own = [number for number, position in enumerate(marked) if not position.is_padding] or [0]
    number = own[drawn % len(own)]
    replay = replace(marked[number], last=False, check=StepCheck.REPLAY)
    marked[number] = replace(marked[number], check=StepCheck.REPLAYED)
    return [*marked[:-1], replay, replay, marked[-1]]


def epoch_positions(
    steps: EpochSteps, rank: int, *, first_step: int, padding: Padding, checks: CheckedSteps = NO_CHECKS
) -> Iterator[MicroBatchPosition]:
    """This rank's micro-batches of an epoch from ``first_step`` on, in the order of their computation.

    Raises:
        DataError: if the epoch has fewer than ``first_step`` steps.
    """
    if not 0 <= first_step <= len(steps):
        of = "" if steps.plan.varies else f" of {steps.plan.global_batch}"
        raise DataError(
            f"first_step={first_step}, but an epoch of {plural(steps.samples, 'sample')} has "
            f"{plural(len(steps), 'step')}{of}; was the data set or global_batch changed since the checkpoint? Then "
            "begin with a fresh one"
        )
    size, positions = 0, list[MicroBatchPosition]()
    for step in range(first_step, len(steps)):
        if (samples := steps.step_samples(step)) != size:  # most steps have equal size
            size, positions = samples, list(_step_positions(steps.plan, rank, samples, padding))
        this = positions
        drawn = None if checks.audits is None else checks.audits.draw(step - first_step)
        if drawn is not None:
            this = _audited(positions, steps.plan, rank, size, drawn)
        elif step - first_step in checks:
            second, alone = checks.is_second(step - first_step), steps.plan.world_size == 1
            other = _of_next_rank(steps.plan, rank, size) if second and checks.of_others else None
            this = checked(positions, replays=checks.replays, comes_next=second and alone, of_other=other)
        for position in this:
            yield position.of_step(step)


def _step_positions(plan: BatchPlan, rank: int, samples: int, padding: Padding) -> Iterator[MicroBatchPosition]:
    """This rank's run of the micro-batches of step 0, of ``samples``, after the rank's padding."""
    of = plan.micro_batches_of(samples)
    run = plan.run(rank, of)
    before = padding_of(plan, len(run), of, padding)
    for number, index in enumerate([of - 1] * before + [*run]):
        last = number == before + len(run) - 1
        yield plan.position(0, samples, index, last=last, is_padding=number < before)


def evaluation_positions(steps: EpochSteps, rank: int, *, padding: Padding) -> Iterator[MicroBatchPosition]:
    """This rank's block of the epoch's micro-batches, where the micro-batches of all steps are laid end to end.

    The blocks of all ranks, one after another, are the whole pass in its order, also if some blocks are empty. Padding
    is as in a step that holds all micro-batches of the pass.
    """
    plan, of = steps.plan, steps.micro_batches
    block = plan.block(rank, of)
    before = padding_of(plan, len(block), of, padding)
    places = [steps.place(number) for number in [of - 1] * before + [*block]]
    for i, (step, index) in enumerate(places):
        last = i == len(places) - 1 or places[i + 1][0] != step
        yield plan.position(step, steps.step_samples(step), index, last=last, is_padding=i < before)


def padding_of(plan: BatchPlan, own: int, micro_batches: int, padding: Padding) -> int:
    """The number of padding micro-batches of a rank with ``own`` micro-batches in a step of ``micro_batches``."""
    if padding == "even":
        return -(-micro_batches // plan.world_size) - own
    return int(padding == "one" and not own and micro_batches > 0)


def count_of_evaluation(plan: BatchPlan, rank: int, micro_batches: int, padding: Padding) -> int:
    """The micro-batches that ``rank`` computes in an evaluation of ``micro_batches``, including its padding."""
    own = len(plan.block(rank, micro_batches))
    return own + padding_of(plan, own, micro_batches, padding)


def count_of_steps(plan: BatchPlan, rank: int, micro_batches: Iterable[int], padding: Padding) -> int:
    """The micro-batches that ``rank`` computes in steps that hold ``micro_batches`` each, including its padding."""
    runs = ((len(plan.run(rank, of)), of) for of in micro_batches)
    return sum(own + padding_of(plan, own, of, padding) for own, of in runs)
