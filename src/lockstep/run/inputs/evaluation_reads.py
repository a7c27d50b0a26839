"""What the loop over `Run.evaluate` carries from batch to batch, and measured values are computed from.

for x, y in run.evaluate(test):
    hidden = cell(x, hidden)                        from this rank's batch before: other ranks have other batches
    run.measure(error=loss(hidden, y))
"""

from __future__ import annotations

from types import FrameType

from lockstep.run.inputs.given import given_by
from lockstep.run.inputs.input_follower import InputFollower
from lockstep.run.source.line_calls import LineCalls
from lockstep.run.source.script_functions import running_functions
from lockstep.run.state.registered import State


def carried_between_batches(frame: FrameType | None, state: State) -> str:
    """The first such variable or attribute with its line, in words; "" for none, or where the source cannot be read.

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
