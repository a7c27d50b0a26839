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

from collections.abc import Iterable
from types import FrameType

from torch.optim import Optimizer

from lockstep.run.inputs.given import given_by
from lockstep.run.inputs.input_follower import UNNAMED, InputFollower
from lockstep.run.inputs.input_places import Given, TrainingInputs
from lockstep.run.source.line_calls import LineCalls
from lockstep.run.source.script_callees import updating
from lockstep.run.source.script_functions import Context, running_functions
from lockstep.run.state.registered import State


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
