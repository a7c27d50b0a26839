"""What the training of a script is computed from: its variables and attributes, found by reading the script.

    for x, y in run.train(batches):
        forced = random.random() < self.ratio       self.ratio is an input: the loss is computed from it
        self.ratio *= 0.995
        loss = criterion(model(x, forced), y)
        running += loss.item()                      running is none: it goes to a print
        run.step(loss)

Begun with is what the script gives to `run.step`, writes into the run's optimizers and modules, or gives to their
methods; and the conditions under which it does so. From there `lockstep.run.source_reads` says what is computed from
what, through the functions, methods and modules of the script, which are found by the objects that its variables hold.
No code of the script is run.
"""

from __future__ import annotations

import builtins
import functools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from types import CellType, CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.autograd import Function
from torch.optim import Optimizer

from lockstep.heartbeat import is_users
from lockstep.run.kept import PlainValue
from lockstep.run.reachable import script_frames, variables_of
from lockstep.run.script_places import NOTHING, Held, Place, attribute_of, attributes_of, held, variable_at
from lockstep.run.source_reads import ITEMS, WORLD_SIZE, Call, Choice, Path, Read, Reads, reads_of
from lockstep.run.state import State

_DEEPEST: Final = 12  # calls within calls
_MOST: Final = 4000  # reads that are followed
_OF_RANKS: Final = {"rank", "world_size"}
#: The methods of `Run` that take what is computed, and what a training is made of. Of a loader, how samples are read
#: changes no result.
_STEPS: Final = {"step", "backward", "update"}
_REGISTERS: Final = {"optimizer", "scheduler"}
_HOOKS: Final = {"register_hook", "register_post_accumulate_grad_hook"}  # the methods of tensors that take functions
_READING: Final = {"workers", "prefetch_factor", "pin_memory", "timeout"}
LENGTH: Final = "len(run.train(...))"  #: what a `RankUse` is on, if not on an attribute of `Run`
_NOTED: Final = {"step", "write"}  # what each body computes, and each turn of an outer loop


class Given(NamedTuple):
    """Something that the script gives to the run."""

    kind: Literal["step", "write", "registered", "loader", "seed"]  #: how: see `_Follower.given`
    what: str  #: in the script's words
    where: str  #: a line of it
    reads: tuple[Read, ...] = ()  #: what it is computed from


class RankUse(NamedTuple):
    """Something that depends on the rank, or on the number of ranks."""

    given: Given
    on: str


@dataclass
class TrainingInputs:
    """The places that a training is computed from."""

    places: dict[tuple[int, str, tuple[str, ...]], tuple[Place, str]] = field(default_factory=dict)
    #: Of each, what is computed from it.
    ranks: list[RankUse] = field(default_factory=list)
    skip: set[int] = field(default_factory=set)  #: the `id` of what the run has
    carried: str = ""  #: a variable of these that the loop's body changes, whenever it does; "" for none
    failed: str = ""  #: why the script could not be read

    def held(self) -> Held:
        """What is at these places now."""
        return held(self.places.values(), self.skip, _STATELESS)


def training_inputs(frame: FrameType | None, state: State) -> TrainingInputs:
    """What the script computes its training from, whose functions are running from ``frame`` outward.

    Raises nothing: where its source is such that it cannot be read, nothing is known, and `TrainingInputs.failed` says
    why.
    """
    follower = _Follower(state)
    kept = (value.value if isinstance(value, PlainValue) else value for value in state.kept.values())
    follower.found.skip |= {*follower.trained, *map(id, kept)}
    is_body = True
    try:
        for script in script_frames(frame):
            reads = reads_of(script.f_code)
            context = _Context(script.f_code, reads or Reads(), script.f_globals, frame=script)
            given = follower.given(context)
            # A generator, or a method that takes a micro-batch, stands between the loop and its micro-batches.
            is_between = script.f_code.co_flags & _GENERATOR or not context.reads.loop_at(script.f_lineno).first
            if is_body and is_between:
                what = f"what {script.f_code.co_name} hands on"
                given.append(Given("step", what, "", tuple(context.reads.returned)))
            for each in given:
                follower.take(context, each)
            if is_body:
                follower.find_carried(context)
            is_body = is_body and bool(is_between)
    except Exception as error:  # noqa: BLE001 - what only looks on ends no training
        return TrainingInputs(failed=f"{type(error).__name__}: {error}")
    return follower.found


class _Argument(NamedTuple):
    """What a parameter stands for."""

    reads: tuple[Read, ...]  #: in the function that calls
    value: object  #: where it is known
    text: str = ""  #: of a value that no variable of the caller holds


@dataclass
class _Context:
    """A function whose values are asked for."""

    code: CodeType
    reads: Reads
    variables: dict[str, Any]  #: of its module
    frame: FrameType | None = None  #: if it is running
    cells: dict[str, CellType] = field(default_factory=dict)
    arguments: dict[str, _Argument] = field(default_factory=dict)
    depth: int = 0

    @functools.cached_property
    def held(self) -> dict[str, Any]:
        """The variables of a function that is running."""
        return {} if self.frame is None else variables_of(self.frame)

    def is_local(self, name: str) -> bool:
        return name in self.code.co_varnames or name in self.code.co_cellvars or name in self.arguments

    @functools.cached_property
    def fresh(self) -> frozenset[str]:
        return frozenset() if self.frame is None else self.reads.loop_at(self.frame.f_lineno).fresh

    def value_of(self, path: Path) -> object:
        """What a path leads to, as far as that is known without running anything."""
        root = path.root
        if root in self.arguments:
            value = self.arguments[root].value
        elif self.frame is not None:
            value = self.held.get(root, NOTHING)
        elif self.is_local(root):
            # Another name of something, or a new object: only the first one is known.
            others = self.reads.set_from.get(root, [])
            is_name = len(others) == 1 and isinstance(others[0], Path) and others[0].root != root
            value = self.value_of(others[0]) if is_name and isinstance(others[0], Path) else NOTHING
        else:
            value = NOTHING
        if value is NOTHING and not (self.is_local(root) and self.frame is None):
            value = variable_at(self.cells[root], "") if root in self.cells else self.variables.get(root, NOTHING)
            value = getattr(builtins, root, NOTHING) if value is NOTHING else value
        for name in path.attributes:
            value = attribute_of(value, name)
        return value


class _Callee(NamedTuple):
    """A function of the script that a call runs."""

    function: FunctionType
    bound: _Argument | None  #: its first argument, of a method


_GENERATOR: Final = 32  # `inspect.CO_GENERATOR`
_OPTIMIZED: Final = 1  # `inspect.CO_OPTIMIZED`: a function, not a module's own lines
#: What is made of what its methods are given; a log or a progress bar is not.
_FILLED: Final = (list, dict, set, deque, torch.Tensor, np.ndarray)
_STATELESS: Final = (ModuleType, type, FunctionType, MethodType, nn.Module, Optimizer, property)


_Key = tuple[CodeType, tuple[int, ...]]
"""A function, and the objects that it is called with."""


class _Follower:
    """Goes from what is given to the run back to the places it is computed from."""

    def __init__(self, state: State) -> None:
        self.found: Final = TrainingInputs()
        modules = [module for model in state.models for module in model.modules()]
        groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
        schedulers = [one.scheduler for one in state.schedulers]
        #: What a script changes to change the training.
        lists = [optimizer.param_groups for optimizer in state.optimizers]
        self.trained: Final = {id(one) for one in (*modules, *state.optimizers, *groups, *lists, *schedulers)}
        self._left: int = _MOST
        self._running: Final[list[_Key]] = []
        self._giving_nothing: Final[set[_Key]] = set()

    # ---- what is given -----------------------------------------------------------------------------------------

    def given(self, context: _Context) -> list[Given]:
        """What a function gives to the run, itself or by the functions that it calls.

        To `Run.step` ("step"), by a change of what is trained ("write"), when objects are made known to the run
        ("registered", "loader"), or to something that seeds.
        """
        found: list[Given] = []
        file = PurePath(context.code.co_filename).name
        for use in context.reads.uses:
            where = f"{file}:{use.line}"
            conditions = (*use.conditions, *context.reads.exits[use.loop])
            if use.read is not None:
                found += self._given_by(context, use.read, where, conditions)
            elif use.target is not None and id(context.value_of(use.target)) in self.trained:
                if use.target.root in context.arguments and _is(context.value_of(use.target), nn.Module):
                    continue  # what a module notes by itself matters where its forward pass reads it
                what = f"what is written into {use.target.text}"
                found.append(Given("write", what, where, (*use.value, *conditions)))
        return found

    def _given_by(self, context: _Context, call: Call, where: str, conditions: tuple[Read, ...]) -> Iterator[Given]:
        path = call.function[0] if len(call.function) == 1 else None
        method = path.attributes[-1] if isinstance(path, Path) and path.attributes else ""
        owner = context.value_of(path.owner) if isinstance(path, Path) and method else NOTHING
        what = f"{path.text}(...)" if isinstance(path, Path) else ""
        if _is_run(owner):
            if method in _STEPS:
                yield Given("step", what, where, (*call.every, *conditions))
            elif method in _REGISTERS:
                yield Given("registered", what, where, call.every)
            elif method == "loader":
                yield Given("loader", what, where, call.without(_READING))
                yield Given("step", "a sample", where, tuple(_sample_calls(call)))
            return
        if method in _HOOKS:
            yield Given("step", what, where, (*call.every, *conditions))
        seeds = [name for name, _ in call.keywords if "seed" in name.lower()]
        if isinstance(path, Path) and "seed" in path.text.rpartition(".")[2].lower():
            yield Given("seed", what, where, call.every)
        elif seeds:
            reads = (read for name, part in call.keywords if name in seeds for read in part)
            yield Given("seed", seeds[0], where, tuple(reads))
        callees = self._callees(context, call)
        is_module = isinstance(path, Path) and _is(context.value_of(path), nn.Module)
        if id(owner) in self.trained and not (callees or is_module):
            yield Given("write", what, where, call.every)
        for callee in callees:
            inner = self._enter(context, call, callee)
            if inner is None:
                continue
            key = self._running[-1]
            gives = [] if key in self._giving_nothing else self.given(inner)
            for given in gives:
                # What it computes from its parameters, the caller gives.
                needed: list[Read] = []
                self.take(inner, given, needed)
                yield given._replace(reads=tuple(needed))
            yield from (given._replace(reads=conditions) for given in gives if given.kind in _NOTED)
            if not gives:
                self._giving_nothing.add(key)
            self._running.pop()

    # ---- what it is computed from ------------------------------------------------------------------------------

    def take(self, context: _Context, given: Given, outward: list[Read] | None = None) -> None:
        """Note what ``given`` is computed from; what the caller knows is added to ``outward``."""
        seen: set[Read] = set()
        waiting = list(given.reads)
        while waiting and self._left:
            read = waiting.pop()
            if read in seen:
                continue
            seen.add(read)
            self._left -= 1
            if isinstance(read, Path):
                waiting += self._of_path(context, read, given, outward)
            elif isinstance(read, Choice):
                waiting += _chosen(context, read)
            else:
                waiting += self._of_call(context, read, given, outward)

    def _of_path(self, context: _Context, path: Path, given: Given, outward: list[Read] | None) -> list[Read]:
        """Note the place of a path; returns what else is to be followed in the same function."""
        followed: list[Read] = []
        if path == WORLD_SIZE:
            self.found.ranks.append(RankUse(given, "WORLD_SIZE"))
        if self._is_set_here(context, path.root):
            followed += context.reads.set_from.get(path.root, ())
            root = context.value_of(Path(path.root))
            if path.root not in context.arguments and (root is NOTHING or _is(root, *_FILLED)):
                followed += context.reads.filled_from.get(path.root, ())
        for end in range(1, len(path.attributes) + 1):
            followed += context.reads.set_from.get(Path(path.root, path.attributes[:end]).text, ())
        argument = context.arguments.get(path.root)
        if argument is not None:
            if outward is not None and len(argument.reads) == 1 and isinstance(name := argument.reads[0], Path):
                outward.append(Path(name.root, (*name.attributes, *path.attributes)))
            elif outward is not None:
                outward += argument.reads
            if argument.text:
                self._note(
                    context,
                    Place(argument.value, "", path.attributes, ".".join((argument.text, *path.attributes))),
                    given,
                )
        elif context.frame is not None and context.code.co_flags & _OPTIMIZED:
            if path.root in context.held:
                if path.root not in context.fresh:
                    self._note(context, Place(context.frame, path.root, path.attributes, path.text), given)
            elif not context.is_local(path.root):
                self._note(context, Place(context.variables, path.root, path.attributes, path.text), given)
        elif path.root in context.cells:
            self._note(context, Place(context.cells[path.root], "", path.attributes, path.text), given)
        elif not context.is_local(path.root) and path.root not in context.fresh:
            self._note(context, Place(context.variables, path.root, path.attributes, path.text), given)
        value = context.value_of(path)
        if _is(value, FunctionType, MethodType):
            followed += self._of_call(context, Call((path,), (), (), True, 0), given, outward)
        return followed

    def _is_set_here(self, context: _Context, name: str) -> bool:
        return context.is_local(name) or name in context.reads.outer or not context.code.co_flags & _OPTIMIZED

    def _of_call(self, context: _Context, call: Call, given: Given, outward: list[Read] | None) -> list[Read]:
        """What the value of a call is computed from, in terms of the function that calls."""
        every = call.every
        path = call.function[0] if len(call.function) == 1 else None
        if not isinstance(path, Path):
            return [*call.function, *every]
        owner = context.value_of(path.owner) if path.attributes else NOTHING
        if _is_run(owner):
            return []  # what it returns is the same on all ranks, or is checked elsewhere
        if path.attributes[-1:] == (ITEMS,):
            return self._of_items(context, path, owner, call, given)
        if path.attributes[-1:] == ("get_world_size",):
            self.found.ranks.append(RankUse(given, f"{path.text}()"))
        if path.text == "len" and any(self._is_pass(context, read) for read in every):
            self.found.ranks.append(RankUse(given, LENGTH))
        followed: list[Read] = []
        known = [self._take_returned(context, call, one, given, followed) for one in self._callees(context, call)]
        value = context.value_of(path)
        if any(known) and not _is(value, nn.Module, type, functools.partial):
            return followed
        if _is(owner, ModuleType) or value is getattr(builtins, path.text, None):
            return [*followed, *every]
        # Of a method that cannot be read, the object; of a function, itself; and what they are given.
        receiver = path.owner if path.attributes else path
        return [*followed, *every, *([] if _is(value, nn.Module, type) else [receiver])]

    def _of_items(self, context: _Context, path: Path, owner: object, call: Call, given: Given) -> list[Read]:
        """What a loop over an object gets: of one of the script's classes, what its methods return.

        Of a package's, such as a progress bar, nothing: it hands on what it was given, and counts for itself.
        """
        followed: list[Read] = []
        if isinstance(owner, GeneratorType) and owner.gi_running:
            return []  # in which the loop of `Run.train` is: its own variables are looked at
        if owner is NOTHING or _is(owner, *_FILLED, tuple, GeneratorType):
            return [path.owner]
        for name in ("__next__", ITEMS):  # the second one returns the object itself where there is the first
            method = call._replace(function=(Path(path.root, (*path.attributes[:-1], name)),))
            if callees := self._callees(context, method):
                for callee in callees:
                    self._take_returned(context, method, callee, given, followed)
                break
        return followed

    def _is_pass(self, context: _Context, read: Read) -> bool:
        if not (isinstance(read, Call) and len(read.function) == 1 and isinstance(path := read.function[0], Path)):
            return False
        return path.attributes[-1:] == ("train",) and _is_run(context.value_of(path.owner))

    # ---- what bodies change --------------------------------------------------------------------------------------

    def find_carried(self, context: _Context) -> None:
        """Note a variable of the places found that each body, or some bodies, make from what it was before.

        Not where it is changed once a step, as `Run.step` says; nor where it is made when it is needed first.
        """
        assert context.frame is not None
        loop = context.reads.loop_at(context.frame.f_lineno)
        whats = {place.text: what for place, what in self.found.places.values()}
        changes = [change for change in context.reads.changes if loop.first < change.line <= loop.last]
        exits = tuple(read for each in context.reads.exits for read in each)
        for change in changes:
            here, name = change.path, change.path.text
            if name not in whats or name in loop.fresh or self._asks_step(context, (*change.conditions, *exits)):
                continue
            is_made_of_itself = all(here in other.value for other in changes if other.path == here)
            of_body = (
                isinstance(read, Path) and not read.attributes and read.root in loop.fresh for read in change.value
            )
            is_variable = not here.attributes and here not in change.conditions
            if is_made_of_itself or (is_variable and any(of_body)):
                self.found.carried = (
                    f"{name}, which {whats[name]} is computed from, is changed in line {change.line} from what it was"
                )
                return

    def _asks_step(self, context: _Context, reads: Iterable[Read]) -> bool:
        """Whether the value of `Run.step` is among what these are computed from."""
        seen: set[Read] = set()
        waiting = list(reads)
        while waiting:
            read = waiting.pop()
            if read in seen:
                continue
            seen.add(read)
            if isinstance(read, Path):
                waiting += context.reads.set_from.get(read.root, ())
                continue
            if isinstance(read, Choice):
                waiting += (*read.then, *read.otherwise)
                continue
            path = read.function[0] if len(read.function) == 1 else None
            if isinstance(path, Path) and path.attributes[-1:] in (("step",), ("update",)):
                return True
            waiting += read.every
        return False

    # ---- calls -------------------------------------------------------------------------------------------------

    def _callees(self, context: _Context, call: Call) -> list[_Callee]:
        """The functions of the script that a call runs."""
        if len(call.function) != 1 or not isinstance(path := call.function[0], Path):
            return []
        value = context.value_of(path)
        reads: tuple[Read, ...] = (path,)
        while isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, MethodType):
            return _of_script(value.__func__, _Argument((), value.__self__, path.text))
        owner = context.value_of(path.owner) if path.attributes else NOTHING
        if path.attributes[-1:] == ("apply",) and isinstance(owner, type) and issubclass(owner, Function):
            return [c for name in ("forward", "backward") for c in _of_script(attribute_of(owner, name), None)]
        if isinstance(value, FunctionType):
            if not path.attributes:
                return _of_script(value, None)
            is_method = not _is(owner, ModuleType, type) and path.attributes[-1] not in attributes_of(owner)
            return _of_script(value, _Argument((path.owner,), owner) if is_method else None)
        if isinstance(value, nn.Module):
            named = [(f"{path.text}.{name}" if name else path.text, one) for name, one in value.named_modules()]
            return [callee for text, one in named for callee in _computing(one, text)]
        if isinstance(value, type):
            return _of_script(getattr(value, "__init__", None), _Argument((), NOTHING))
        called = attribute_of(value, "__call__")
        return _of_script(called, _Argument(reads, value)) if isinstance(called, FunctionType) else []

    def _enter(self, context: _Context, call: Call, callee: _Callee) -> _Context | None:
        """The function that is called, with what its parameters stand for; None where it is to be left alone."""
        function, _ = callee
        reads = reads_of(function.__code__)
        if reads is None or context.depth >= _DEEPEST:
            return None
        arguments = _bind(context, call, callee, reads)
        key = function.__code__, tuple(id(one.value) for one in arguments.values())
        if key in self._running:
            return None
        self._running.append(key)
        closure = function.__closure__ or ()
        cells = dict(zip(function.__code__.co_freevars, closure, strict=False))
        return _Context(
            function.__code__, reads, function.__globals__, cells=cells, arguments=arguments, depth=context.depth + 1
        )

    # ---- places ------------------------------------------------------------------------------------------------

    def _note(self, context: _Context, place: Place, given: Given) -> None:
        """``given`` is computed from what is at ``place``, unless an object on the way says more, or the run has it."""
        value = variable_at(place.owner, place.name)
        for number, name in enumerate(place.attributes):
            if _is_run(value):
                if name in _OF_RANKS:
                    self.found.ranks.append(RankUse(given, f"run.{name}"))
                return
            if _is_ours(value):
                return
            if _is(value, ModuleType) and not _is_script(attributes_of(value).get("__file__") or "<frozen"):
                return
            following = attribute_of(value, name)
            if isinstance(following, property):
                text = ".".join((place.text.split(".")[0], *place.attributes[:number]))
                for callee in _of_script(following.fget, _Argument((), value, text)):
                    self._take_returned(context, Call((), (), (), False, 0), callee, given, [])
                return
            value = following
        is_known = value is NOTHING or _is(value, *_STATELESS) or _is_ours(value) or id(value) in self.trained
        if given.kind in _NOTED and not is_known:
            self.found.places.setdefault(place.key, (place, given.what))

    def _take_returned(self, context: _Context, call: Call, callee: _Callee, given: Given, outward: list[Read]) -> bool:
        """Note what the value of a function is computed from; whether its source is known."""
        inner = self._enter(context, call, callee)
        if inner is None:
            return False
        self.take(inner, given._replace(reads=tuple(inner.reads.returned)), outward)
        self._running.pop()
        return True


_is_script: Final = functools.lru_cache(maxsize=1024)(is_users)


def _of_script(function: object, bound: _Argument | None) -> list[_Callee]:
    if not isinstance(function, FunctionType):  # such as `functools.lru_cache` makes
        function = attribute_of(function, "__wrapped__")
    if isinstance(function, FunctionType) and _is_script(function.__code__.co_filename):
        return [_Callee(function, bound)]
    return []


def _chosen(context: _Context, choice: Choice) -> tuple[Read, ...]:
    """What of a choice is read: one side, where what decides is given to a function, and set nowhere in it."""
    value = context.value_of(choice.path)
    is_given = choice.path.root not in context.reads.set_from and _is(value, bool, int, str, type(None))
    if not is_given:
        return (*choice.then, *choice.otherwise)
    return choice.then if value == choice.constant else choice.otherwise


def _computing(module: nn.Module, text: str) -> Iterator[_Callee]:
    """What a call of ``module`` runs, but for its parts: its forward pass, and hooks that may return another value."""
    yield from _of_script(type(module).forward, _Argument((), module, text))
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if isinstance(hook, MethodType):
            yield from _of_script(hook.__func__, _Argument((), hook.__self__, f"{text}'s hook"))
        else:
            yield from _of_script(hook, None)


def _sample_calls(call: Call) -> Iterator[Call]:
    """What a loader calls for a sample: of the data set that it is given, and its functions."""
    data = [*call.arguments[:1], *(part for name, part in call.keywords if name == "dataset")]
    functions = [part for name, part in call.keywords if name in ("collate_fn", "order")]
    for part, methods in ((data, ("__getitem__", "__getitems__", ITEMS)), (functions, ("",))):
        for path in (read for reads in part for read in reads if isinstance(read, Path)):
            for method in methods:
                named = Path(path.root, (*path.attributes, method)) if method else path
                yield Call((named,), (), (), False, call.line)


def _bind(context: _Context, call: Call, callee: _Callee, reads: Reads) -> dict[str, _Argument]:
    """What each parameter of a function stands for."""
    parameters = reads.parameters
    if parameters is None:
        return {}
    names = [one.arg for one in (*parameters.posonlyargs, *parameters.args)]
    others = [one.arg for one in parameters.kwonlyargs]
    every = call.every
    rest = [one.arg for one in (parameters.vararg, parameters.kwarg) if one is not None]
    bound = {name: _Argument(every, NOTHING) for name in rest}
    is_loose = call.is_starred or any(not name for name, _ in call.keywords)
    bound |= {name: _Argument(every if is_loose else (), NOTHING) for name in (*names, *others)}
    function, own = callee
    defaults = dict(zip(reversed(names), reversed(function.__defaults__ or ()), strict=False))
    if not is_loose:
        for name, value in {**defaults, **(function.__kwdefaults__ or {})}.items():
            bound[name] = _Argument((), value, f"{function.__name__}'s {name}")
    if own is not None and names:
        bound[names.pop(0)] = own
    given = [] if call.is_starred else list(zip(names, call.arguments, strict=False))
    given += [(name, part) for name, part in call.keywords if name in bound]
    for name, part in given:
        is_path = len(part) == 1 and isinstance(part[0], Path)
        value = context.value_of(part[0]) if is_path and isinstance(part[0], Path) else NOTHING
        bound[name] = _Argument(part, value)
    return bound


def _is(value: object, *kinds: type) -> bool:
    """Whether ``value`` is of a kind. Not `isinstance`, which asks the object itself: it may stand for another one."""
    return issubclass(type(value), kinds)


def _is_run(value: object) -> bool:
    return type(value).__module__ == "lockstep.run.run"


def _is_ours(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "lockstep"
