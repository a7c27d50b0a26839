"""Values that a script tells a reader, by a print or a log, and that one rank has made of its own micro-batches.

    for x, y in run.evaluate(test):
        correct += (model(x).argmax(1) == y).sum()      half of the samples on two ranks
    print(correct / len(test))                          said: correct is changed by the loop's body

What is told is followed back to variables in the source. What the body has changed there, a look before the body and
one after it shows, whatever holds it; where the same micro-batch once more changes nothing, the source says so, as it
does of what is changed once a step by the last micro-batch (``if run.step(loss): losses.append(loss.item())``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from types import FrameType

from lockstep.run.inputs.body_changes import is_of_all_ranks, is_of_turn, meets
from lockstep.run.inputs.input_follower import InputFollower
from lockstep.run.inputs.input_places import NOTED, STEPS
from lockstep.run.inputs.training_inputs import given_by, unread
from lockstep.run.source.line_calls import LineCalls
from lockstep.run.source.reachable import root_of, script_roots
from lockstep.run.source.script_callees import callees_of
from lockstep.run.source.script_functions import Context, running_functions
from lockstep.run.source.script_places import NOTHING
from lockstep.run.source.source_paths import Path, name_in_script
from lockstep.run.source.source_reads import Call
from lockstep.run.state.registered import State


def part_told(
    frame: FrameType | None,
    state: State,
    changed: Collection[str],
    say: Callable[[str], None],
    *,
    of_evaluation: bool = False,
) -> str:
    """The first place that a body changes and something told to a reader depends on, in words.

    "" for none, for one that the script brings together from all ranks, and where the source cannot be read.

    Args:
        frame: from which on outward the script's functions are running.
        state: of the run.
        changed: by a body; the paths of variables and of what they hold.
        say: is told where the source cannot be read.
        of_evaluation: whether the body is one of `Run.evaluate`, and the training is looked at as a reader: a number
            of each rank's own decides the same on all of them now and then, and not what it decides on one rank.
    """
    return _part(frame, state, changed, say, {"told"}) or (
        _part(frame, state, changed, say, NOTED) if of_evaluation else ""
    )


def _part(
    frame: FrameType | None, state: State, changed: Collection[str], say: Callable[[str], None], kinds: Collection[str]
) -> str:
    follower = InputFollower(state, () if "told" in kinds else STEPS, is_of_reader=True)
    met: set[int] = set()
    try:
        contexts = list(running_functions(frame, LineCalls()))
        follower.running.update((context.code, context) for context in contexts if context.in_body)
        for context in contexts:
            follower.enter(context)
            follower.is_in_body = context is contexts[0]
            met |= _given_to_meetings(follower, context)
            for given in given_by(follower, context):
                if given.kind in kinds:
                    follower.take(context, given._replace(kind="told"))
            if context.in_body and "told" not in kinds:
                follower.take_samples(context)
        follower.follow_changes()
    except Exception as error:  # noqa: BLE001 - what only looks on ends no training, and no evaluation
        say(f"{unread(error)}: what the script tells may be of one rank's own micro-batches")
        return ""
    changes, roots = follower.changes, script_roots(frame)
    elsewhere = {each for one in contexts for each in _set_elsewhere(one)}
    for place, what in follower.found.places.values():
        if (id(place.owner), place.name) in elsewhere:
            continue
        # The same micro-batch once more changes no set and no minimum.
        if line := changes.line_of_last(place):  # also where it is brought together: of the last ones alone
            return (
                f"{place.text}, which {what} is computed from, is made in line {line} of the last micro-batch of a step"
            )
        made = changes.reads_at(place)
        if changes.makes_when_needed(place) and not any(is_of_turn(one.context, one.reads) for one in made):
            continue  # once, of what no body has from its micro-batch
        line = changes.line_of(place, always=True)
        # Of two variables with one name, a look has another name for the outer one.
        is_variable = isinstance(place.owner, FrameType | dict)
        own = root_of(place.owner, place.name, roots) if is_variable else place.name
        seen_as = own + place.text[len(place.name) :]
        starts = (f"{seen_as}.", f"{seen_as}[")
        read = follower.found.read_names
        paths = (path for path in changed if path == seen_as or path.startswith(starts))
        if not line and not any(_is_read(path.removeprefix(seen_as), read) for path in paths):
            continue
        owners = [place._replace(attributes=place.attributes[:end]) for end in range(len(place.attributes) + 1)]
        is_met = not met.isdisjoint(id(owner.value(None)) for owner in owners)
        if not (is_met or any(is_of_all_ranks(one.context, one.reads) for one in made)):
            where = f" in line {line}" if line else ""
            return f"{place.text}, which {what} is computed from, is changed by the loop's body{where}"
    return next(iter(follower.found.own.values()), "")


def _is_read(rest: str, read: Collection[str]) -> bool:
    """Whether what is at the ``rest`` of a path counts: of attributes of items in a container only those ``read``."""
    attribute = re.match(r"(?:\[[^\]]*\])+\.(\w+)", rest)
    return attribute is None or attribute[1] in read


def _set_elsewhere(context: Context) -> Iterator[tuple[int, str]]:
    """The owner and the name of variables whose values that are told are not those that the loop's body sets.

    Other loops of a running function set them anew before they read them, or lines after the loop do, for which
    `with_separate_names` has given a name of its own to the body's variable.
    """
    assert context.frame is not None
    owner = id(context.frame if context.is_function else context.variables)
    for loop in context.reads.loops:
        if not loop.first <= context.frame.f_lineno <= loop.last:
            yield from ((owner, name) for name in loop.fresh)
            continue
        inner = [each for each in context.reads.loops if loop.first <= each.first <= loop.last]
        firsts = {each.first for each in inner}  # a change there has the script's own name
        inside = (change for change in context.reads.changes if loop.first <= change.line <= loop.last)
        set_here = {change.path.root for change in inside if change.line not in firsts}
        set_here = set_here.union(*(each.items for each in inner))
        named_anew = {name_in_script(name) for name in loop.fresh if name != name_in_script(name)}
        yield from ((owner, name) for name in named_anew - set_here)


def _given_to_meetings(follower: InputFollower, context: Context) -> set[int]:
    """The `id` of each object that a function gives, after the loop, to calls that bring together what ranks have."""
    found: set[int] = set()
    for use in context.live_uses:
        if use.read is not None and not context.covers(use.line) and _leads_to_meeting(follower, context, use.read):
            path = use.read.function[0] if len(use.read.function) == 1 else None
            receiver = [path.owner] if isinstance(path, Path) and path.attributes else []
            values = [context.value_of(each) for each in (*receiver, *use.read.every) if isinstance(each, Path)]
            found |= {id(value) for value in values if value is not NOTHING}
    return found


def _leads_to_meeting(follower: InputFollower, context: Context, call: Call, depth: int = 3) -> bool:
    if meets(context, call):
        return True
    for callee in callees_of(context, call) if depth else ():
        with follower.entered(context, call, callee) as inner:
            calls = [] if inner is None else [use.read for use in inner.reads.uses if use.read is not None]
            if inner is not None and any(_leads_to_meeting(follower, inner, each, depth - 1) for each in calls):
                return True
    return False
