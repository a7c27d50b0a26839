"""What the training of a script is computed from: its variables and attributes, found by reading the script.

    for x, y in run.train(batches):
        forced = random.random() < self.ratio       self.ratio is an input: the loss is computed from it
        self.ratio *= 0.995
        loss = criterion(model(x, forced), y)
        running += loss.item()                      running is none: it goes to a print
        run.step(loss)

Begun with is what the script gives to `run.step`, writes into the run's optimizers and modules, or gives to their
methods; and the conditions under which it does so. From there `run.source` says what is computed from
what, through the functions, methods and modules of the script, which are found by the objects that its variables hold.
No code of the script is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FrameType
from typing import Final

from torch.optim import Optimizer

from lockstep.errors import UsageError
from lockstep.run.inputs.given import given_by
from lockstep.run.inputs.input_follower import UNNAMED, InputFollower
from lockstep.run.inputs.input_places import LENGTH, Given, RankUse, TrainingInputs
from lockstep.run.source.line_calls import LineCalls
from lockstep.run.source.script_callees import updating
from lockstep.run.source.script_functions import Context, running_functions
from lockstep.run.state.registered import State

_SCALED: Final = (
    "Nothing needs to be scaled by ranks, or seeded by rank: a step holds global_batch samples on any number of them, "
    "and each micro-batch draws its own random numbers"
)


def training_inputs(frame: FrameType | None, state: State, calls: LineCalls) -> TrainingInputs:
    """What the script computes its training from, whose functions are running from ``frame`` outward.

    ``calls`` are what lines of these were seen to run.
    Raises nothing: where the source cannot be read, nothing is known, and `TrainingInputs.failed` says why.
    """
    follower = InputFollower(state)
    follower.found.skip |= {*follower.trained, *map(id, follower.kept)}
    is_body = True
    try:
        for context in running_functions(frame, calls):
            context.in_body = is_body
            follower.enter(context)
            given = given_by(follower, context)
            if is_body and context.is_between:
                what = f"what {context.code.co_name} hands on"
                given.append(Given("step", what, "", tuple(context.reads.returned)))
            for each in given:
                follower.take(context, each)
            if is_body:
                follower.take_samples(context)
                _take_updates(follower, context, state.optimizers)
                follower.note_attributes(state.models)
                follower.find_carried(context)
            is_body = is_body and context.is_between
        follower.follow_changes()
        follower.find_carried_within()
    except Exception as error:  # noqa: BLE001 - what only looks on ends no training
        return TrainingInputs(failed=f"{type(error).__name__}: {error}")
    return follower.found


def _take_updates(follower: InputFollower, context: Context, optimizers: Iterable[Optimizer]) -> None:
    """Note what decides what functions of the script write into weights and options, when optimizers step."""
    for callee in (callee for optimizer in optimizers for callee in updating(optimizer)):
        with follower.entered(context, UNNAMED, callee, per_step=True) as inner:
            if inner is not None:
                for each in given_by(follower, inner):
                    follower.take(inner, each)


def carried_between_batches(frame: FrameType | None, state: State) -> str:
    """The first such variable or attribute with its line, in words; "" for none, or where the source cannot be read.

    for x, y in run.evaluate(test):
        hidden = cell(x, hidden)                        from this rank's batch before: other ranks have other batches
        run.measure(error=loss(hidden, y))

    Args:
        frame: from which on outward the script's functions are running.
        state: of the run.
    """
    follower = InputFollower(state, steps={"measure"})
    try:
        for context in running_functions(frame, LineCalls()):
            context.in_body = True
            follower.enter(context)
            for given in given_by(follower, context):
                if given.kind == "step":
                    follower.take(context, given)
            follower.find_carried(context)
            if not context.is_between:
                break
        follower.follow_changes()
        follower.find_carried_within(always=True)
    except Exception:  # noqa: BLE001 - what only looks on ends no evaluation
        return ""
    return follower.found.carried


def require_no_ranks(inputs: TrainingInputs, say: Callable[[str], None]) -> None:
    """Refuse what changes the training with the number of ranks, and ``say`` what may.

    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1 * run.world_size))      refused: another training
    batches = run.loader(data, global_batch=32 * run.world_size)                     said: the run's identity shows it
    torch.manual_seed(seed + run.rank)                                               said: each micro-batch is seeded
    print(run.world_size); workers = cpus // run.world_size                          changes no result

    Raises:
        UsageError: if an optimizer or a scheduler is made from it, a model or one of these is changed by it, or a loss
            is computed from it.
    """
    if inputs.failed:
        say(f"the script's source could not be read ({inputs.failed}): what a body changes is found by its effect only")
    for use in inputs.ranks:
        given = use.given
        if use.on == LENGTH or (use.on != "run.rank" and given.kind in ("registered", "write", "step")):
            raise UsageError(
                f"{given.where}: {given.what} is computed from {use.on}, so the result would depend on the number of "
                f"ranks. {_WAYS.get(use.on, _SCALED)}"
            )
    for text in dict.fromkeys(map(_said, inputs.ranks)):
        if text:
            say(text)


_WAYS: Final = {
    LENGTH: "That is the number of this rank's micro-batches, for a progress bar. A schedule counts steps: "
    "len(batches) is the number of an epoch, where batches is what run.loader(...) returned"
}


def _said(use: RankUse) -> str:
    kind, what, where, _ = use.given
    if kind == "seed" or (kind == "loader" and use.on != "run.rank"):
        return f"{where}: {what} depends on {use.on}, and the result with it. {_SCALED}"
    return ""
