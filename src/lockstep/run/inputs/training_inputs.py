"""The inputs of a training: the script's variables and attributes that losses and updates are computed from.

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

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Final

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.errors import UsageError
from lockstep.run.inputs.body_changes import in_place, is_of_all_ranks, is_of_turn, within_pass
from lockstep.run.inputs.input_follower import UNNAMED, InputFollower
from lockstep.run.inputs.input_places import GRADIENTS, LENGTH, NOTED, Given, RankUse, TrainingInputs
from lockstep.run.metrics.common_numbers import is_of_rank
from lockstep.run.source.line_calls import LineCalls
from lockstep.run.source.script_callees import callees_of, is_torchs_change, updating
from lockstep.run.source.script_functions import Context, is_of, is_run, running_functions
from lockstep.run.source.script_modules import file_of
from lockstep.run.source.script_places import NOTHING, Place, attribute_of
from lockstep.run.source.source_paths import Path
from lockstep.run.source.source_reads import Call, Lines, Read, flat
from lockstep.run.state.registered import State

_SCALED: Final = (
    "Nothing needs to be scaled by ranks, or seeded by rank: a step holds global_batch samples on any number of them, "
    "and each micro-batch draws its own random numbers"
)
#: The methods of `Run` that take what a training is made of. Of a loader, how samples are read changes no result.
_REGISTERS: Final = {"optimizer", "scheduler"}
_LENGTHS: Final = {"epochs", "steps"}  # those that say how long it is
_READING: Final = {"workers", "prefetch_factor", "pin_memory", "timeout"}
_PARTS: Final = {
    ("parameters",),
    ("named_parameters",),
    ("buffers",),
    ("modules",),
    ("children",),
    ("values",),
    ("items",),
    ("__iter__",),  # as of `for group in optimizer.param_groups`, also before the loop has run
}
#: Methods of models and optimizers that change nothing; a change of what they give is another call.
_READS: Final = {"named_parameters", "parameters", "named_buffers", "buffers", "named_modules", "modules", "state_dict"}
_HANDS_ON: Final = "hands on"
_CHANGES: Final = {"clear", "pop", "popitem", "setdefault", "update"}  # methods of an optimizer's dicts
_VIEWS: Final = {"detach", "flatten", "reshape", "squeeze", "unsqueeze", "view", "view_as"}
#: Functions and methods that tell a reader what they are given, of Python, of Lockstep, and of loggers and trackers.
_WRITES: Final = re.compile(  # a file
    "(save(?!d)|safe_dump|dump(?!s)|export|write_|im(save|write)|tofile).*"
)
_WRITES_PARTS: Final = re.compile(
    "write|writerows?|dumps|execute(many)?|to_(csv|json|excel|parquet|pickle|sql)"  # of a table, see `_given_in`
)
#: What is told of each micro-batch or step, and read later.
_RECORDS: Final = re.compile(
    "log_(metrics?|dict|image|figure|text|artifact)|add_(scalars?|histogram|images?|figure|text|hparams)|track"
)
_TELLS: Final = re.compile(
    "print|debug|info|warning|error|critical|log|say|report|measure|set_(postfix(_str)?|description)|_?exit"
)
#: Packages whose functions and methods draw what they are given; a reader sees that picture later.
_DRAWING: Final = {"matplotlib", "seaborn", "plotly", "altair", "bokeh"}
_HOOKS: Final = {"register_hook", "register_post_accumulate_grad_hook"}  # the methods of tensors that take functions


def training_inputs(frame: FrameType | None, state: State, calls: LineCalls) -> TrainingInputs:
    """The inputs of the script whose functions are running from ``frame`` outward.

    ``calls`` are the functions that lines of the script were seen to run.
    Raises nothing: where the source cannot be read, nothing is known, and `TrainingInputs.failed` says why.
    """
    follower = InputFollower(state)
    follower.found.skip |= {*follower.trained, *map(id, follower.kept)}
    try:
        for context in running_functions(frame, calls):
            follower.enter(context)
            given = given_by(follower, context)
            if context.in_body and context.is_between:
                what = f"what {context.code.co_name} {_HANDS_ON}"
                given.append(Given("step", what, "", tuple(context.reads.returned)))
            for each in given:
                follower.take(context, each)
            if context.in_body:
                follower.note_gradients(context)
                follower.take_samples(context)
                _take_updates(follower, context, state.optimizers)
                _note_attributes(follower.found, state.models)
                follower.find_carried(context)
        follower.follow_changes()
        follower.find_carried_within()
        if follower.has_backward:
            follower.found.lines.pop(GRADIENTS, None)
    except Exception as error:  # noqa: BLE001 - what only looks on ends no training
        return TrainingInputs(failed=unread(error))
    return follower.found


def _take_updates(follower: InputFollower, context: Context, optimizers: Iterable[Optimizer]) -> None:
    """Note the places from which functions of the script compute weights and options when optimizers step."""
    for callee in (callee for optimizer in optimizers for callee in updating(optimizer)):
        with follower.entered(context, UNNAMED, callee, per_step=True) as inner:
            if inner is not None:
                for each in given_by(follower, inner):
                    follower.take(inner, each)


def _note_attributes(found: TrainingInputs, models: Iterable[nn.Module]) -> None:
    """Note values that the script has written into attributes of parameters, such as an importance of each."""
    for model in models:
        for name, parameter in model.named_parameters():
            for attribute in vars(parameter):
                if not attribute.startswith("_"):
                    found.note(Place(parameter, "", (attribute,), f"{name}.{attribute}"), "run.step(...)")


def unread(error: Exception) -> str:
    """That the source could not be read, in words."""
    return f"the script's source could not be read ({type(error).__name__}: {error})"


def carried_between_batches(frame: FrameType | None, state: State, say: Callable[[str], None]) -> str:
    """The first place that batches change and a measured value depends on, in words; "" for none or without source.

    for x, y in run.evaluate(test):
        hidden = cell(x, hidden)                        from this rank's batch before: other ranks have other batches
        run.measure(error=loss(hidden, y))

    Args:
        frame: from which on outward the script's functions are running.
        state: of the run.
        say: is told where the source cannot be read.
    """
    follower = InputFollower(state, steps={"measure"})
    try:
        for context in running_functions(frame, LineCalls()):
            if not context.in_body:
                break
            follower.enter(context)
            for given in given_by(follower, context, in_loop=True):
                if given.kind == "step":
                    follower.take(context, given)
            follower.find_carried(context)
        follower.follow_changes()
        follower.find_carried_within(always=True)
    except Exception as error:  # noqa: BLE001 - what only looks on ends no evaluation
        say(f"{unread(error)}: what is measured may be computed from this rank's batch before")
        return ""
    return follower.found.carried


def require_no_ranks(inputs: TrainingInputs, say: Callable[[str], None]) -> None:
    """Refuse inputs that change the training with the number of ranks, and ``say`` inputs that may do so.

    optimizer = run.optimizer(SGD(model.parameters(), lr=0.1 * run.world_size))      refused: another training
    batches = run.loader(data, global_batch=32 * run.world_size)                     said: the run's identity shows it
    torch.manual_seed(seed + run.rank)                                               said: each micro-batch is seeded
    print(run.world_size); workers = cpus // run.world_size                          changes no result

    Raises:
        UsageError: if a loss, an optimizer, a scheduler or a change of these or of a model is computed from the number
            of ranks.
    """
    if inputs.failed:
        say(f"{inputs.failed}: what a body changes is found by its effect only")
    for use in inputs.ranks:
        given = use.given
        if given.what.endswith(_HANDS_ON):
            continue  # of a function in which the loop has not begun: its own result, such as a number of batches
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
    given = use.given
    if given.kind == "seed" or (given.kind == "loader" and use.on != "run.rank"):
        return f"{given.where}: {given.what} depends on {use.on}, and the result with it. {_SCALED}"
    return ""


def given_by(follower: InputFollower, context: Context, *, in_loop: bool = False) -> list[Given]:
    """The values that a function gives to the run, itself or by the functions that it calls; or only ``in_loop``.

    To `Run.step` ("step"), by a change of a trained object ("write"), when objects are made known to the run
    ("registered", "loader"), to a function that seeds ("seed"), or to a reader ("told", if the follower is of these).
    """
    found: list[Given] = []
    for use in context.live_uses:
        if (in_loop and not context.covers(use.line)) or (follower.is_of_reader and context.is_past(use.line)):
            continue
        where, before = context.at(use.line), len(found)
        if use.read is not None:
            found += _given_in(follower, context, use.read, where, use.conditions)
        elif use.target is not None and (
            _is_of_trained(follower, context, use.target) or _is_kept_variables(context, use.target)
        ):
            written = context.value_of(use.target)
            is_own = is_of(written, nn.Module) and file_of(sys.modules.get(type(written).__module__))
            if is_own and use.target.root in context.arguments:
                continue  # what a module notes by itself matters where its forward pass reads it
            found.append(Given("write", use.written, where, (*use.value, *use.conditions)))
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
    is_drawn = follower.is_of_reader and _draws(context, call.function)
    name = call.method
    is_written, is_part = _WRITES.fullmatch(name), _WRITES_PARTS.fullmatch(name)
    is_recorded = is_written or is_part or _RECORDS.fullmatch(name)
    is_told = is_drawn or (follower.is_of_reader and (is_recorded or _TELLS.fullmatch(name)))
    if is_told and not callees_of(context, call):  # else the script's own function tells
        is_kept = bool(is_drawn or is_written or is_part) and not context.covers(call.line)
        # A file is read later, so whether the file is written counts, too.
        is_file = is_kept and is_written
        if name.startswith("to_") or name == "tofile":
            receiver = (path.owner,) if isinstance(path, Path) else call.function
            yield Given("told", what, where, receiver, is_kept)
        is_record = is_recorded or (name == "log" and (is_run(owner) or what.startswith("wandb.")))
        is_record = is_record and follower.is_in_body and within_pass(context, call.line)
        for keyword, part in (*(("", one) for one in call.arguments), *call.keywords):
            if not is_of_rank(keyword):
                if is_record and is_of_turn(context, tuple(flat(part))) and not is_of_all_ranks(context, part):
                    follower.found.note_own(what, call.line, "a micro-batch of this rank in line {}")
                taken = (*part, *conditions) if is_file else part
                yield Given("told", f"{what[:-4]}{keyword}=...)" if keyword else what, where, taken, is_kept)
    if is_run(owner):
        if method in follower.steps:
            hooks = Lines(call.line, call.line)
            yield Given("step", what, where, (*call.every, *conditions, hooks))
        elif method == "train" and follower.steps:
            reads = flat(read for part in call.arguments for read in _choosing(context, part))
            yield Given("step", what, where, tuple(read for read in reads if not _is_loader(context, read)))
        elif method in _LENGTHS and follower.steps:
            yield Given("step", what, where, (*call.every, *conditions))
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
        (id(owner) in follower.trained and method not in _READS)
        or (call.method == "step" and _is_scheduler(follower, context, call))
        or (is_torchs_change(context, call) and _is_given_trained(follower, context, call))
        or (in_place(call.method) and any(_is_of_trained(follower, context, each) for each in _changed_by(call)))
        or (isinstance(path, Path) and method in _CHANGES and _is_of_optimizer(context, path.owner))
    )
    if writes and not (callees or is_module):
        chosen = () if isinstance(path, Path) else call.function
        yield Given("write", what, where, (*chosen, *call.every, *conditions))
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


def _draws(context: Context, called: Iterable[Read], depth: int = 4) -> bool:
    """Whether a called function, or the object whose method is called, is of a package that draws.

    Or made by such a function: ``figure, axes = plt.subplots()``.
    """
    for read in called:
        if isinstance(read, Path):
            values = (context.value_of(read), context.value_of(read.owner) if read.attributes else NOTHING)
            names = (attribute_of(values[0], "__module__"), type(values[1]).__module__)
            if any(isinstance(name, str) and name.partition(".")[0] in _DRAWING for name in names):
                return True
            made = (part for part in context.reads.bound_to.get(read.root, ()) if values[0] is NOTHING)
            makers = [one for one in flat(part for each in made for part in each) if isinstance(one, Call)]
        else:
            makers = [read] if isinstance(read, Call) else []
        if depth and any(_draws(context, maker.function, depth - 1) for maker in makers):
            return True
    return False


def _choosing(context: Context, loader: tuple[Read, ...]) -> tuple[Read, ...]:
    """The reads by which one of several loaders is chosen, and these loaders: ``easy if seen < 100 else hard``."""
    if len(loader) > 1:
        return loader
    changes = [change for change in context.reads.changes if change.path in loader]
    return tuple(read for one in changes for read in (*one.conditions, *(one.value if len(one.value) > 1 else ())))


def _is_loader(context: Context, read: Read) -> bool:
    value = context.value_of(read) if isinstance(read, Path) else NOTHING
    return is_of(value, DataLoader) or (is_of(value, list, tuple, dict) and bool(value))


def _is_scheduler(follower: InputFollower, context: Context, call: Call) -> bool:
    """Whether the object whose method is called, or one of those, has an optimizer that is trained."""
    paths = (read for read in flat(call.function) if isinstance(read, Path))
    owners = (context.value_of(path.owner if path.attributes[-1:] == (call.method,) else path) for path in paths)
    return any(id(attribute_of(owner, "optimizer")) in follower.trained for owner in owners)


def _is_given_trained(follower: InputFollower, context: Context, call: Call) -> bool:
    """Whether a trained object, or its parameters, is among the arguments of a call."""
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
                yield (owner := read.owner)
                if owner.attributes[-1:] == ("data",):
                    yield owner.owner
        elif isinstance(read, Call) and (in_place(read.method) or read.method in _VIEWS):
            yield from _changed_by(read)


def _is_of_trained(follower: InputFollower, context: Context, path: Path) -> bool:
    """Whether a path leads to a trained object, or is a loop's variable over parts of such an object."""
    if id(context.value_of(path)) in follower.trained or _is_of_optimizer(context, path):
        return True
    calls = (read for read in flat(context.reads.set_from.get(path.root, ())) if isinstance(read, Call))
    made = (call.function[0] for call in calls if len(call.function) == 1)
    return any(
        isinstance(of, Path)
        and of.attributes[-1:] in _PARTS
        and of.root != path.root
        and _is_of_trained(follower, context, of.owner)
        for of in made
    )


def _is_kept_variables(context: Context, path: Path) -> bool:
    """Whether a path is ``run.kept``, whose attributes are part of the state."""
    return path.attributes == ("kept",) and is_run(context.value_of(Path(path.root)))


def _is_of_optimizer(context: Context, path: Path) -> bool:
    """Whether a path leads into an optimizer, such as to its state."""
    owners = (path._replace(attributes=path.attributes[:end]) for end in range(len(path.attributes)))
    return any(is_of(context.value_of(owner), Optimizer) for owner in owners)
