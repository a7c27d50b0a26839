"""What a function of the script gives to a run: losses, changes of what is trained, objects made known to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Final

from torch import nn
from torch.optim import Optimizer

from lockstep.run.inputs.body_changes import in_place
from lockstep.run.inputs.input_follower import InputFollower
from lockstep.run.inputs.input_places import NOTED, Given
from lockstep.run.source.script_callees import callees_of, is_torchs_change
from lockstep.run.source.script_functions import Context, is_of, is_run
from lockstep.run.source.script_places import NOTHING
from lockstep.run.source.source_reads import Call, Lines, Path, Read, flat

#: The methods of `Run` that take what a training is made of. Of a loader, how samples are read changes no result.
_REGISTERS: Final = {"optimizer", "scheduler"}
_READING: Final = {"workers", "prefetch_factor", "pin_memory", "timeout"}
_PARTS: Final = {
    ("parameters",),
    ("named_parameters",),
    ("buffers",),
    ("modules",),
    ("children",),
    ("values",),
    ("items",),
}
_CHANGES: Final = {"clear", "pop", "popitem", "setdefault", "update"}  # methods of an optimizer's dicts
_VIEWS: Final = {"detach", "flatten", "reshape", "squeeze", "unsqueeze", "view", "view_as"}
_HOOKS: Final = {"register_hook", "register_post_accumulate_grad_hook"}  # the methods of tensors that take functions


def given_by(follower: InputFollower, context: Context) -> list[Given]:
    """What a function gives to the run, itself or by the functions that it calls.

    To `Run.step` ("step"), by a change of what is trained ("write"), when objects are made known to the run
    ("registered", "loader"), or to something that seeds.
    """
    found: list[Given] = []
    file = PurePath(context.code.co_filename).name
    for use in context.reads.uses:
        if context.is_dead(use.guards):
            continue
        where, before = f"{file}:{use.line}", len(found)
        if use.read is not None:
            found += _given_in(follower, context, use.read, where, use.conditions)
        elif use.target is not None and _is_of_trained(follower, context, use.target):
            if use.target.root in context.arguments and is_of(context.value_of(use.target), nn.Module):
                continue  # what a module notes by itself matters where its forward pass reads it
            what = f"what is written into {use.target.text}"
            found.append(Given("write", what, where, (*use.value, *use.conditions)))
        if noted := [given for given in found[before:] if given.kind in NOTED]:
            exits = tuple(read for loop in use.loops for read in context.reads.exits[loop])
            found.append(noted[0]._replace(kind="exit", reads=exits))
    return found


def _given_in(
    follower: InputFollower, context: Context, call: Call, where: str, conditions: tuple[Read, ...]
) -> Iterator[Given]:
    path = call.function[0] if len(call.function) == 1 else None
    method = path.attributes[-1] if isinstance(path, Path) and path.attributes else ""
    owner = context.value_of(path.owner) if isinstance(path, Path) and method else NOTHING
    what = f"{path.text if isinstance(path, Path) else call.method}(...)"
    if is_run(owner):
        if method in follower.steps:
            hooks = Lines(call.line, call.line)
            yield Given("step", what, where, (*call.every, *conditions, hooks))
        elif method in _REGISTERS:
            yield Given("registered", what, where, call.every)
        elif method == "loader":
            yield Given("loader", what, where, call.without(_READING))
        return
    if is_of(owner, Optimizer) and method.startswith("register_"):
        return  # what the hook does is taken with what optimizers do
    if method in _HOOKS:
        yield Given("step", what, where, (*call.every, *conditions))
    seeds = [name for name, _ in call.keywords if "seed" in name.lower()]
    if isinstance(path, Path) and "seed" in path.text.rpartition(".")[2].lower():
        yield Given("seed", what, where, call.every)
    elif seeds:
        reads = (read for name, part in call.keywords if name in seeds for read in part)
        yield Given("seed", seeds[0], where, tuple(reads))
    callees = callees_of(context, call)
    is_module = isinstance(path, Path) and is_of(context.value_of(path), nn.Module)
    writes = (
        id(owner) in follower.trained
        or (is_torchs_change(context, call) and _is_given_trained(follower, context, call))
        or (in_place(call.method) and any(_is_of_trained(follower, context, each) for each in _changed_by(call)))
        or (isinstance(path, Path) and method in _CHANGES and _is_of_optimizer(context, path.owner))
    )
    if writes and not (callees or is_module):
        yield Given("write", what, where, (*call.every, *conditions))
    for callee in callees:
        with follower.entered(context, call, callee) as inner:
            if inner is None:
                continue
            key = follower.entered_last
            gives = [] if key in follower.giving_nothing else given_by(follower, inner)
            for given in gives:
                # What it computes from its parameters, the caller gives.
                needed: list[Read] = []
                follower.take(inner, given, needed)
                yield given._replace(reads=tuple(needed))
            yield from (given._replace(reads=conditions) for given in gives if given.kind in NOTED)
            if not gives:
                follower.giving_nothing.add(key)
            # Between two passes, an exception is a way to end the training.
            is_between = context.frame is not None and not context.covers(call.line)
            if is_between and inner.reads.raises and context.reads.loop_at(call.line).first:
                end = Given("exit", "the end of the training", where, tuple(inner.reads.raises))
                needed = []
                follower.take(inner, end, needed)
                yield end._replace(reads=(*needed, *conditions))


def _is_given_trained(follower: InputFollower, context: Context, call: Call) -> bool:
    """Whether something that is trained is among what a function is given, or its parameters."""
    for read in call.every:
        of = read.function[0] if isinstance(read, Call) and read.function else read
        if isinstance(of, Path):
            is_method = isinstance(read, Call) and bool(of.attributes)
            if id(context.value_of(of.owner if is_method else of)) in follower.trained:
                return True
        if isinstance(read, Call) and _is_given_trained(follower, context, read):
            return True
    return False


def _changed_by(call: Call) -> Iterator[Path]:
    """What a method in place may change: ``p`` of ``p.mul_(x).add_(y)``, ``o.state`` of ``o.state[p].zero_()``."""
    for read in flat(call.function):
        if isinstance(read, Path):
            yield read
            if read.attributes:
                yield read.owner
        elif isinstance(read, Call) and (in_place(read.method) or read.method in _VIEWS):
            yield from _changed_by(read)


def _is_of_trained(follower: InputFollower, context: Context, path: Path) -> bool:
    """Whether a path leads to something that is trained, or is a variable that goes over parts of that."""
    if id(context.value_of(path)) in follower.trained or _is_of_optimizer(context, path):
        return True
    calls = (read for read in flat(context.reads.set_from.get(path.root, ())) if isinstance(read, Call))
    made = (call.function[0] for call in calls if len(call.function) == 1)
    return any(
        isinstance(of, Path)
        and of.attributes[-1:] in _PARTS
        and (id(context.value_of(of.owner)) in follower.trained or _is_of_optimizer(context, of.owner))
        for of in made
    )


def _is_of_optimizer(context: Context, path: Path) -> bool:
    """Whether a path leads into an optimizer, such as to its state."""
    owners = (path._replace(attributes=path.attributes[:end]) for end in range(len(path.attributes)))
    return any(is_of(context.value_of(owner), Optimizer) for owner in owners)
