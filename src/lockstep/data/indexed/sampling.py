"""The division of an epoch's order into steps and micro-batches: pure functions, no rank number in what they hold.

    order of epoch 3      | 7 2 9 0 4 1 | 8 5 3 6 |        global_batch 6, micro_batch 2
    step                  |      0      |    1    |
    micro-batch           | 0    1    2 | 0     1 |        the last step is short, not padded
    rank of 3, training   | 0    1    2 | 1     2 |        rank 0 has none there: it may compute a padding micro-batch
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
"""Of the user: samples by index (``__getitem__`` and ``__len__``), or one after another (``__iter__``)."""
Sample = Any
"""What a data set gives."""
UserSampler = Any
"""Of the user: gives indices, or lists of them, and may have generators and ``set_epoch``."""
Data = Any
"""What the loop hands out for a micro-batch: collated samples, such as ``(images, labels)``."""
TorchLoader = DataLoader[Any]
"""What `Run.loader` returns."""

Padding = Literal["none", "one", "even"]
"""Whether a rank computes padding: micro-batches of weight zero, so that every rank joins the same collectives. None;
one, in a short step that holds no micro-batch for the rank; or as many as make all ranks compute equally many in every
step."""


class MicroBatch(NamedTuple):
    """The samples of one forward and backward pass, and where in the step they stand."""

    position: MicroBatchPosition
    data: Data


@dataclass(frozen=True, slots=True)
class AuditedSteps:
    """Which steps of a run are audited: one in so many, whatever pass it is in."""

    every: int
    done: int  #: steps of the run before the pass
    seed: int

    def draw(self, step: int) -> int | None:
        """What ``step``, counted from the pass's first one, draws its micro-batches by; None: it is not audited."""
        number = self.done + step + 1
        return None if number % self.every else seed_of(self.seed, "audit", number)


@dataclass(frozen=True, slots=True)
class CheckedSteps:
    """Which steps of a pass are checked, see `StepCheck`; a step is counted from the pass's first one here."""

    first: int = 0  #: so many at the pass's beginning
    every: int = 0  #: and then one in so many; 0: none
    replays: bool = True  #: whether a micro-batch of each is replayed
    of_others: bool = False  #: whether each second one replays another rank's micro-batch
    audits: AuditedSteps | None = None  #: which are audited instead
    after: int = 0  #: steps of the pass that came before the first one here

    def later(self, steps: int) -> CheckedSteps:
        """The same steps, counted from one that comes so many steps later in the pass."""
        audits = self.audits and replace(self.audits, done=self.audits.done + steps)
        return replace(self, after=self.after + steps, audits=audits)

    def __contains__(self, step: int) -> bool:
        step += self.after
        return step < self.first or (self.every > 0 and step > 0 and step % self.every == 0)

    def is_second(self, step: int) -> bool:
        """Whether the checked ``step`` is one of each second, which replay in another way."""
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
    """A rank's ``positions`` of one step that is checked; with ``replays``, its first micro-batch once more.

    The replay comes just before the last one: all bodies but one lie between the two, and no update does. With
    ``comes_next`` it comes next to the first, which finds what is as before after so many bodies. A single micro-batch
    is replayed twice before it. A rank that computes padding alone replays that: forward passes may be collective.

    With ``of_other``, the first micro-batch of another rank, that one is replayed before the last one, once.
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
    """A replay of the first micro-batch of the next rank that has one; None on all ranks, if only one has some."""
    runs = [plan.run(each, plan.micro_batches_of(samples)) for each in range(plan.world_size)]
    following = [run for run in (*runs[rank + 1 :], *runs[:rank]) if run]
    if sum(map(bool, runs)) < 2:
        return None
    return replace(plan.position(0, samples, following[0][0], last=False), check=StepCheck.OTHER_RANKS)


def _audited(
    positions: Sequence[MicroBatchPosition], plan: BatchPlan, rank: int, samples: int, drawn: int
) -> list[MicroBatchPosition]:
    """A rank's ``positions`` of one step that is audited: one that was ``drawn`` of each rank, another one replays.

    Its replay comes just before the last one. A rank that has none audits, too: forward passes may be collective.
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
    if rank in chosen:  # from itself, if it is alone, to the one before it
        owner = ranks[(ranks.index(rank) + 1 + turn % max(1, len(ranks) - 1)) % len(ranks)]
    check = StepCheck.REPLAY if owner == rank else StepCheck.OTHER_RANKS
    replay = replace(plan.position(0, samples, chosen[owner], last=False), check=check, audited=True)
    return [*marked[:-1], replay, marked[-1]]


def audited_alone(positions: Sequence[MicroBatchPosition], drawn: int) -> list[MicroBatchPosition]:
    """The same where other ranks cannot read what this one has read: it computes one of its own three times."""
    marked = [replace(position, audited=True) for position in positions]
    own = [number for number, position in enumerate(marked) if not position.is_padding] or [0]
    number = own[drawn % len(own)]
    replay = replace(marked[number], last=False, check=StepCheck.REPLAY)
    marked[number] = replace(marked[number], check=StepCheck.REPLAYED)
    return [*marked[:-1], replay, replay, marked[-1]]


def epoch_positions(
    steps: EpochSteps, rank: int, *, first_step: int, padding: Padding, checks: CheckedSteps = NO_CHECKS
) -> Iterator[MicroBatchPosition]:
    """This rank's micro-batches of one epoch from ``first_step`` on, in the order it computes them.

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
        if (samples := steps.step_samples(step)) != size:  # of most steps it is the same
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
    """This rank's run of the micro-batches of a step of ``samples``, the epoch's first, after its padding."""
    of = plan.micro_batches_of(samples)
    run = plan.run(rank, of)
    before = padding_of(plan, len(run), of, padding)
    for number, index in enumerate([of - 1] * before + [*run]):
        last = number == before + len(run) - 1
        yield plan.position(0, samples, index, last=last, is_padding=number < before)


def evaluation_positions(steps: EpochSteps, rank: int, *, padding: Padding) -> Iterator[MicroBatchPosition]:
    """This rank's block of the epoch's micro-batches, those of all steps end to end.

    The blocks of all ranks, one after another, are the whole pass in its order, also where some are empty. Padding is
    as in a step that holds all these micro-batches.
    """
    plan, of = steps.plan, steps.micro_batches
    block = plan.block(rank, of)
    before = padding_of(plan, len(block), of, padding)
    places = [steps.place(number) for number in [of - 1] * before + [*block]]
    for i, (step, index) in enumerate(places):
        last = i == len(places) - 1 or places[i + 1][0] != step
        yield plan.position(step, steps.step_samples(step), index, last=last, is_padding=i < before)


def padding_of(plan: BatchPlan, own: int, micro_batches: int, padding: Padding) -> int:
    """How many padding micro-batches a rank with ``own`` computes in a step of so many, before its own."""
    if padding == "even":
        return -(-micro_batches // plan.world_size) - own
    return int(padding == "one" and not own and micro_batches > 0)


def count_of_evaluation(plan: BatchPlan, rank: int, micro_batches: int, padding: Padding) -> int:
    """How many ``rank`` computes in an evaluation of so many micro-batches, its padding among them."""
    own = len(plan.block(rank, micro_batches))
    return own + padding_of(plan, own, micro_batches, padding)


def count_of_steps(plan: BatchPlan, rank: int, micro_batches: Iterable[int], padding: Padding) -> int:
    """How many ``rank`` computes in steps that hold so many each, its padding among them."""
    runs = ((len(plan.run(rank, of)), of) for of in micro_batches)
    return sum(own + padding_of(plan, own, of, padding) for own, of in runs)
