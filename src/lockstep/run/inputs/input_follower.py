"""The way from a value that a script gives to the run back to the variables that the value is computed from."""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
from collections import deque
from collections.abc import Collection, Iterator
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Final, Literal

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.run.inputs.body_changes import (
    OF_EACH_RANK,
    BodyChanges,
    asks_step,
    gives_micro_batches,
    goes_over_pass,
    is_given_to_all,
    is_of_all_ranks,
    is_of_items,
    is_of_last_body,
    is_of_turn,
    is_pass,
    reached_values,
    yields_of_turn,
)
from lockstep.run.inputs.input_places import (
    CLOCK,
    FOLLOWED,
    GRADIENTS,
    LENGTH,
    NOTED,
    STATELESS,
    STEPS,
    Given,
    RankUse,
    TrainingInputs,
    is_clock,
    opaque_read,
)
from lockstep.run.metrics.common_numbers import is_of_rank
from lockstep.run.source.reachable import BUILTIN_METHODS, find
from lockstep.run.source.script_callees import (
    callees_of,
    is_memo,
    of_script,
    ran_by,
    sampling,
    scheduling,
)
from lockstep.run.source.script_functions import (
    Argument,
    Callee,
    Context,
    attributes_read,
    bind,
    gradients_read,
    is_of,
    is_ours,
    is_run,
    runs_in_body,
)
from lockstep.run.source.script_modules import file_of
from lockstep.run.source.script_places import NOTHING, Place, attribute_of, variable_at
from lockstep.run.source.source_paths import Path, is_key, name_in_script
from lockstep.run.source.source_reads import (
    ITEMS,
    WORLD_SIZE,
    Call,
    Choice,
    Counted,
    ItemsOf,
    Lines,
    Read,
    Text,
    reads_of,
)
from lockstep.run.state.registered import State
from lockstep.run.state.user_values import PlainValue

_COUNTS: Final = "zip(...) or enumerate(...) counts beside run.train(...), which are this rank's micro-batches"
_DEEPEST: Final = 12  # calls within calls
_MOST: Final = 4000  # reads that are followed
_OF_RANKS: Final = {"rank", "world_size"}
_SAMPLE: Final = "a sample"
_LATER_SAMPLE: Final = "a sample of a later pass"
_BRINGS: Final = "dist_sync_fn"  # of torchmetrics
UNNAMED: Final = Call((), (), (), False, 0)  # of a function that no call of the script names
_CONTAINERS: Final = (list, dict, set, deque)
#: What is made of what its methods are given; a log or a progress bar is not.
_FILLED: Final = (*_CONTAINERS, torch.Tensor, np.ndarray)
#: Methods that return None, if they are a container's.
_GIVE_NOTHING: Final = {("add",), ("update",)}

_Key = tuple[CodeType, tuple[int, ...], bool]
"""A function, the objects that it is called with, and whether a body does that."""


class InputFollower:
    """Follows values that are given to the run back to the places of the script that they are computed from.

    Args:
        state: of the run.
        steps: the methods of `Run` whose arguments are followed.
        is_of_reader: whether values are followed that the script tells a reader, by a print or a log.
    """

    def __init__(self, state: State, steps: Collection[str] = STEPS, *, is_of_reader: bool = False) -> None:
        self.steps: Final = steps
        self.is_of_reader: Final = is_of_reader
        self.has_backward = False  #: whether a function of the script computes gradients without an update
        self._in_updates = 0  # functions that are entered of those that run when optimizers step
        self.is_in_body = False  #: whether the function that is read has the loop over micro-batches
        self.found: Final = TrainingInputs()
        self.kept: Final = [value.value if isinstance(value, PlainValue) else value for value in state.kept.values()]
        models = [*state.models, *(value for value in self.kept if isinstance(value, nn.Module))]
        modules = [module for model in models for module in model.modules()]
        schedulers, averages = [one.scheduler for one in state.schedulers], find({"kept": self.kept}, torch.Tensor)
        lists = [optimizer.param_groups for optimizer in state.optimizers]
        tensors = [tensor for module in modules for tensor in (*module.parameters(False), *module.buffers(False))]
        held = [*lists, *(group for groups in lists for group in groups), *schedulers, *tensors, *averages.values()]
        self.trained: Final = {id(one) for one in (*modules, *state.optimizers, *held)}  #: by what a script trains
        self.changes: Final = BodyChanges()
        self._of_samples: Final[dict[tuple[int, str], Place]] = {}  # places that samples are computed from
        self._sources: Final = state.sample_sources
        self._constants: Final = {id(buffer) for buffer in state.transient_buffers()}
        self._schedulers: Final = schedulers
        self._left: int = _MOST
        self._running: Final[list[_Key]] = []
        self.giving_nothing: Final[set[_Key]] = set()
        self._lines_followed: Final[set[CodeType]] = set()
        #: Functions around the loop, by what they return: a logged value may be computed from their variables.
        self.running: Final[dict[CodeType, Context]] = {}

    # ---- what it is computed from ------------------------------------------------------------------------------

    @property
    def entered_last(self) -> _Key:
        """The key of the innermost function that is entered."""
        return self._running[-1]

    def take(self, context: Context, given: Given, outward: list[Read] | None = None) -> None:
        """Note the places that ``given`` is computed from; add reads of the function's parameters to ``outward``."""
        seen: set[Read] = set()
        waiting = list(given.reads)
        self.found.read_names |= attributes_read(context.code)
        while waiting and self._left:
            read = waiting.pop()
            if read in seen:
                continue
            seen.add(read)
            self._left -= 1
            if isinstance(read, Path):
                waiting += self._of_path(context, read, given, outward)
            elif isinstance(read, Choice):
                waiting += () if context.is_dead(read.guards) else read.reads
            elif isinstance(read, Counted):
                if given.kind in NOTED and any(goes_over_pass(context, each) for each in read.items):
                    self._note_carried(f"{given.what} is computed from what {_COUNTS}")
            elif isinstance(read, ItemsOf):
                if given.kind == "told" and gives_micro_batches(context, read.call):
                    self.found.note_own(given.what, read.call.line, "what line {} collects")
            elif isinstance(read, Text):
                waiting += read.reads
            elif isinstance(read, Lines):
                for callee in ran_by(context, read):
                    self._take_returned(context, UNNAMED._replace(line=read.first), callee, given, waiting)
            else:
                waiting += self._of_call(context, read, given, outward)

    def take_samples(self, context: Context) -> None:
        """Note the places that samples are computed from, in data sets and in functions that loaders were given.

        Also the places that learning rates are computed from, and modes of torch that the script is in.
        """
        given, nothing = Given("step", _SAMPLE, ""), UNNAMED
        for source in self._sources:
            for callee in sampling(source):
                self._take_returned(context, nothing, callee, given, [], samples=True)
        rates = Given("step", "a learning rate", "")
        for callee in (callee for scheduler in self._schedulers for callee in scheduling(scheduler)):
            self._take_returned(context, nothing, callee, rates, [])
        for name, value in context.held.items():
            if is_of(value, TorchFunctionMode, TorchDispatchMode):
                under = Given("step", f"what torch computes under {name}", "")
                for method in ("__torch_function__", "__torch_dispatch__"):
                    for callee in of_script(attribute_of(value, method), Argument((), value, name)):
                        self._take_returned(context, nothing, callee, under, [])

    def _of_path(self, context: Context, path: Path, given: Given, outward: list[Read] | None) -> list[Read]:
        """Note the place of a path; returns the reads of the same function that remain to be followed."""
        followed: list[Read] = []
        if path == WORLD_SIZE:
            self.found.ranks.append(RankUse(given, "WORLD_SIZE"))
        if context.is_local(path.root) or path.root in context.reads.outer or not context.is_function:
            made = context.reads.set_from.get(path.root, ())
            if given.kind == "told" and (is_of_all_ranks(context, made) or is_given_to_all(context, path.root)):
                return []
            if given.is_kept and is_of_last_body(context, path.root):
                last = f"{name_in_script(path.root)}, of the last micro-batch of the loop in line {{}}"
                self.found.note_own(given.what, context.loop.first, last)
            attribute = path.attributes[0] if path.attributes else ""
            followed += (one._replace(attribute=attribute) if isinstance(one, Call) else one for one in made)
            root = context.value_of(Path(path.root))
            if path.root not in context.arguments and (root is NOTHING or is_of(root, *_FILLED)):
                followed += context.reads.filled_from.get(path.root, ())
        for end in range(1, len(path.attributes) + 1):
            followed += context.reads.set_from.get(Path(path.root, path.attributes[:end]).text, ())
        if given.kind == "told":  # with all that was set within: `table.loc[epoch] = accuracy`
            sets = (*context.reads.changes, *context.reads.items_set)
            parts = [each for each in sets if each.path.root == path.root and each.path != path]
            within = [each for each in parts if each.path.attributes[: len(path.attributes)] == path.attributes]
            followed += [read for each in within for read in each.value]
        argument = context.arguments.get(path.root)
        if argument is not None and outward is not None:
            if len(argument.reads) == 1 and isinstance(name := argument.reads[0], Path):
                outward.append(Path(name.root, (*name.attributes, *path.attributes)))
            else:
                outward += argument.reads
        if argument is None or argument.text or outward is None:
            place = context.place_of(path)
            if place is not None:
                self._note(context, place, given)
        value = context.value_of(path)
        if is_of(value, FunctionType, MethodType, type):
            followed += self._of_call(context, Call((path,), (), (), True, 0), given, outward)
        return followed

    def _of_call(self, context: Context, call: Call, given: Given, outward: list[Read] | None) -> list[Read]:
        """The reads of the calling function that the value of a call is computed from."""
        every = call.every
        path = call.function[0] if len(call.function) == 1 else None
        if not isinstance(path, Path):
            inner: list[Read] = []
            for callee in callees_of(context, call):
                self._take_returned(context, call, callee, given, inner)
            return [*inner, *call.function, *every]
        owner = context.value_of(path.owner) if path.attributes else NOTHING
        if is_run(owner):
            return self._of_run(context, path, call, given)
        if path.attributes[-1:] == (ITEMS,):
            return self._of_items(context, path, owner, call, given)
        if path.attributes[-1:] == ("get_world_size",):
            self.found.ranks.append(RankUse(given, f"{path.text}()"))
        if path.text == "len" and any(is_pass(context, read) for read in every):
            self.found.ranks.append(RankUse(given, LENGTH))
        followed: list[Read] = []
        if path.attributes[-1:] in _GIVE_NOTHING and is_of(owner, *_CONTAINERS):
            return []
        callees = callees_of(context, call)
        taken = [self._take_returned(context, call, one, given, followed) for one in callees]
        is_known = any(done and one.known is None for done, one in zip(taken, callees, strict=True))
        value = context.value_of(path)
        made = [change for change in context.reads.changes if change.path == path]
        if len(made) > 1 or any(change.conditions for change in made):
            followed += context.reads.set_from.get(path.text, ())  # such as a loss function that lines choose
        if path.root in context.loop.fresh:  # such as one that a body makes, of what its maker is given
            makers = [read for read in context.reads.set_from.get(path.text, ()) if isinstance(read, Call)]
            followed += [read for maker in makers for read in maker.every]
        if given.kind == "exit" and is_clock(value):
            self.found.lines.setdefault(CLOCK, context.at(call.line))
        if given.kind in NOTED and context.covers(call.line) and given.what != _SAMPLE:
            opaque = opaque_read(path, value, owner, ends_loop=given.kind == "exit")
            if is_memo(value) and self._computes_by_model(context, path):
                opaque = f"what {path.text} remembers of the model as it was"
            self._note_carried(f"{given.what} is computed from {opaque}" if opaque else "")
        if is_known and not is_of(value, nn.Module, type, functools.partial):
            return followed
        if is_of(owner, ModuleType) or value is getattr(builtins, path.text, None):
            return [*followed, *every]
        # Of a method that cannot be read, the object; of a function, itself; and what they are given.
        receiver = path.owner if path.attributes and not is_of(value, *BUILTIN_METHODS) else path
        is_read = any(one.known and next(iter(one.known.values()), None) is owner for one in callees)
        return [*followed, *every, *([] if is_read or is_of(value, nn.Module, type) else [receiver])]

    def _computes_by_model(self, context: Context, path: Path) -> bool:
        """Whether a function of the script calls a model that is trained."""
        call = Call((path,), (), (), True, 0)
        for callee in callees_of(context, call):
            with self.entered(context, call, callee) as inner:
                uses = inner.reads.uses if inner is not None else []
                called = (use.read.function[0] for use in uses if use.read is not None and use.read.function)
                modules = [inner.value_of(one) for one in called if inner is not None and isinstance(one, Path)]
                if any(id(one) in self.trained and is_of(one, nn.Module) for one in modules):
                    return True
        return False

    def _of_run(self, context: Context, path: Path, call: Call, given: Given) -> list[Read]:
        """No reads: the value of a method of `Run` is the same on all ranks, or is checked elsewhere.

        Where each rank gives its own last micro-batch, other numbers of ranks have other values: that is noted.
        """
        if given.kind in NOTED:
            self.found.asked.setdefault(context.at(call.line), given.what)
        is_of_body = given.kind in NOTED and context.covers(call.line)
        if path.attributes[-1] in OF_EACH_RANK and is_of_body and is_of_items(context, call.every):
            self._note_carried(
                f"{given.what} is computed from {path.text}(...) of each rank's last micro-batch, and other numbers of "
                "ranks have other ones (run.measure(...) is of all samples of a step, in run.metrics afterwards)"
            )
        return []

    def _of_items(self, context: Context, path: Path, owner: object, call: Call, given: Given) -> list[Read]:
        """The reads that the items of an object are computed from: for a class of the script, by its methods.

        None for an object of a package, such as a progress bar, which hands on the items that it was given.
        """
        followed: list[Read] = []
        if isinstance(owner, GeneratorType) and owner.gi_running:
            return []  # in which the loop of `Run.train` is: its own variables are looked at
        if owner is NOTHING or is_of(owner, *_FILLED, tuple, GeneratorType):
            return [path.owner]
        for name in ("__next__", ITEMS):  # the second one returns the object itself where there is the first
            method = call._replace(function=(Path(path.root, (*path.attributes[:-1], name)),))
            if callees := callees_of(context, method):
                for callee in callees:
                    self._take_returned(context, method, callee, given, followed)
                break
        return followed

    # ---- what bodies change --------------------------------------------------------------------------------------

    def find_carried(self, context: Context) -> None:
        """Note a variable among the places found that each body, or some bodies, compute from its earlier value.

        Not where the variable is changed once a step, as `Run.step` says, or is made when first needed.
        """
        assert context.frame is not None
        loop = context.loop
        whats = {place.text: what for place, what in self.found.places.values()}
        changes = [
            change
            for change in context.reads.changes
            if loop.first < change.line <= loop.last and not context.is_dead(change.guards)
        ]
        exits = tuple(read for each in context.reads.exits for read in each)
        for change in changes:
            here, name = change.path, change.path.text
            if name not in whats or name in loop.fresh or asks_step(context, (*change.conditions, *exits)):
                continue
            is_made_of_itself = all(here in other.value for other in changes if other.path == here)
            of_body = (
                isinstance(read, Path) and not read.attributes and read.root in loop.fresh for read in change.value
            )
            is_variable = not here.attributes and here not in change.conditions
            if is_made_of_itself or (is_variable and any(of_body)):
                self._note_carried(
                    f"{name}, which {whats[name]} is computed from, is changed in line {change.line} from what it was"
                )

    def _note_carried(self, text: str) -> None:
        self.found.carried = self.found.carried or text

    def follow_changes(self) -> None:
        """Note the places from which functions that a body calls compute the places found so far."""
        waiting = list(self.found.places)
        while waiting:
            place, what = self.found.places[key := waiting.pop()]
            known = set(self.found.places)
            for made in self.changes.reads_at(place):
                of_later = what == _SAMPLE and not made.in_pass
                kind: Literal["told", "step"] = "told" if self.is_of_reader else "step"
                told = Given(kind, _LATER_SAMPLE if of_later else what, "", made.reads, key in self.found.kept)
                self._take_outward(made.context, told)
            waiting += self.found.places.keys() - known

    def _take_outward(self, context: Context, given: Given) -> None:
        """Note the places that ``given`` is computed from, in a function and in those that call it.

        What a function computes from its parameters its caller gives, who also decides whether it runs:
        ``if seen > 100: criterion.set_margin(0.1 * seen)``.
        """
        while True:
            outward: list[Read] = []
            self.take(context, given, outward)
            if context.caller is None:
                return
            context, given = context.caller, given._replace(reads=(*outward, *context.conditions))

    def find_carried_within(self, *, always: bool = False) -> None:
        """As `find_carried`, for functions that a body calls: changes that only some bodies make, or ``always`` all."""
        for place in self._of_samples.values():
            if line := self.changes.line_at_step(place):
                self._note_carried(
                    f"{place.text}, which {_SAMPLE} is computed from, is changed in line {line} when a step is done: "
                    "samples of later steps may have been read by then, in loader processes that copied the data set "
                    "(change the data set between two passes over it, or the batch in the loop's body)"
                )
        for key, (place, what) in self.found.places.items():
            if self.changes.is_bodys(place):
                self.found.of_bodies.add(key)
            if self.changes.fills(place):
                self.found.filled.add(key)
            if self.changes.makes_anew(place):
                self.found.anew.add(key)
            elif self.changes.makes_when_needed(place) and not self._is_made_of_trained(place):
                self.found.when_needed.add(key)
                self.found.made_with[key] = self.changes.made_with(place)
            elif line := self.changes.line_of(place, always=always):
                self._note_carried(
                    f"{place.text}, which {what} is computed from, is changed in line {line} from what it was"
                )

    def _is_made_of_trained(self, place: Place) -> bool:
        """Whether bodies make a place, when first needed, from weights as they were then, which no resume has."""
        made = self.changes.reads_at(place)
        reached = {id(value) for one in made for value in reached_values(one.context, one.reads)}
        return not self.trained.isdisjoint(reached - self._constants)

    # ---- calls -------------------------------------------------------------------------------------------------

    def enter(self, context: Context) -> None:
        """Note the changes that a function makes, and enter the functions that its lines were seen to run."""
        self.changes.enter(context)
        self.has_backward |= "backward" in context.reads.methods
        if context.code in self._lines_followed:
            return
        self._lines_followed.add(context.code)
        for lines in (statement.lines for statement in context.reads.statements):
            for callee in ran_by(context, lines):
                with self.entered(context, UNNAMED._replace(line=lines.first), callee):
                    pass

    @contextlib.contextmanager
    def entered(
        self, context: Context, call: Call, callee: Callee, *, samples: bool = False, per_step: bool = False
    ) -> Iterator[Context | None]:
        """The context of the called function, with its parameters' values; None where the function is not followed.

        Args:
            context: of the function that calls.
            call: of the function.
            callee: which function.
            samples: whether the function makes samples, which are read before the body.
            per_step: whether the function runs once a step, and in no body.
        """
        function, *_ = callee
        reads = reads_of(function.__code__)
        if reads is None or context.depth >= _DEEPEST:
            yield None
            return
        arguments = bind(context, call, callee, reads)
        whole = call._replace(attribute="")
        use = next((one for one in context.reads.uses if one.line == call.line and one.read == whole), None)
        at = use or context.reads.statement_at(call.line)
        asks = at is not None and asks_step(context, at.conditions)
        in_body = runs_in_body(context, call) and not (per_step or asks)
        key = function.__code__, tuple(id(one.value) for one in arguments.values()), samples or in_body
        if key in self._running:
            yield None
            return
        self._running.append(key)
        closure = function.__closure__ or ()
        inner = Context(
            function.__code__,
            reads,
            function.__globals__,
            cells=dict(zip(function.__code__.co_freevars, closure, strict=False)),
            is_made_anew=any(isinstance(read, Path) and read.root in context.loop.fresh for read in call.function),
            arguments=arguments,
            of_items=frozenset(name for name, one in arguments.items() if is_of_turn(context, one.reads)),
            depth=context.depth + 1,
            in_body=samples or in_body,
            at_step=context.at_step or per_step or (asks and runs_in_body(context, call)),
            running=context.running,
            unsettled=context.unsettled,
            # Two bodies show no difference of samples.
            sometimes=samples or context.sometimes or (at is not None and at.sometimes),
            calls=context.calls,
            caller=context,
            called_sometimes=context.called_sometimes or (at is not None and at.sometimes),
            conditions=() if at is None or context.is_dead(at.guards) else at.conditions,
        )
        self.enter(inner)
        self._in_updates += per_step
        if not (samples or self._in_updates) and (inner.in_body or inner.at_step):
            self.note_gradients(inner)
        yield inner
        self._in_updates -= per_step
        self._running.pop()

    def note_gradients(self, context: Context) -> None:
        """Note where a function that runs in bodies, or where a step is done, reads or clips gradients."""
        for line, path in gradients_read(context.code):
            owner = NOTHING if path is None else context.value_of(path)
            if owner is NOTHING or is_of(owner, torch.Tensor):
                self.found.lines.setdefault(GRADIENTS, context.at(line))

    # ---- places ------------------------------------------------------------------------------------------------

    def _note(self, context: Context, place: Place, given: Given) -> None:
        """Note that ``given`` is computed from ``place``, unless the run holds the value or its class tells more."""
        owner = value = variable_at(place.owner, place.name)
        for number, name in enumerate(place.attributes):
            if is_run(value):
                if name in _OF_RANKS:
                    self.found.ranks.append(RankUse(given, f"run.{name}"))
                if name == "progress" and given.what == _SAMPLE:
                    self._note_carried(f"{_SAMPLE} is computed from run.progress, and is made before its step begins")
                return
            if is_ours(value):
                return
            if is_of(value, ModuleType) and name != "environ" and not file_of(value):
                return
            if id(value) in self.trained and not is_of(value, nn.Module):
                return  # an option of an optimizer, or its state
            following = attribute_of(value, name)
            if following is NOTHING and is_key(name):
                text = place.text.removesuffix(Path("", place.attributes[number:]).text)
                place = place._replace(attributes=place.attributes[:number], text=text)
                break
            if isinstance(following, property):
                text = place.text.removesuffix(Path("", place.attributes[number:]).text)
                callees = of_script(following.fget, Argument((), value, text))
                for callee in callees:
                    self._take_returned(context, UNNAMED, callee, given, [])
                if callees:
                    return
                place = place._replace(attributes=place.attributes[:number], text=text)
                break
            maker = None if following is not None else inspect.getattr_static(type(value), name, None)
            if isinstance(maker, functools.cached_property):
                self._take_made(context, place, number, Argument((), value, ""), maker, given)
                return
            owner, value = value, following
        if place.attributes and id(owner) in self.trained and _is_registered(owner, place.attributes[-1]):
            return
        # A module that is not trained may be a meter, or an observer; some bring together by themselves.
        is_meter = given.kind == "told" and is_of(value, nn.Module) and attribute_of(value, _BRINGS) is NOTHING
        is_known = value is NOTHING or is_ours(value) or id(value) in self.trained
        is_known |= is_of(value, *STATELESS) and not is_meter
        if given.kind == "told" and is_of_rank(place.text):
            return
        if given.kind in FOLLOWED and not is_known:
            self.found.note(place, given.what, is_kept=given.is_kept)
            if given.what == _SAMPLE:
                self._of_samples[place.slot] = place

    def _take_made(
        self,
        context: Context,
        place: Place,
        number: int,
        owner: Argument,
        maker: functools.cached_property[object],
        given: Given,
    ) -> None:
        """Note the places that a cached property is computed from; the property itself, if made from weights."""
        text = place.text.removesuffix(Path("", place.attributes[number:]).text)
        call = UNNAMED
        for callee in of_script(maker.func, owner._replace(text=text)):
            with self.entered(context, call, callee) as inner:
                if inner is None:
                    continue
                self.take(inner, given._replace(reads=tuple(inner.reads.returned)), [])
                if any(id(value) in self.trained for value in reached_values(inner, inner.reads.returned)):
                    self.found.note(place._replace(attributes=place.attributes[: number + 1]), given.what)

    def _take_returned(
        self,
        context: Context,
        call: Call,
        callee: Callee,
        given: Given,
        outward: list[Read],
        *,
        samples: bool = False,
    ) -> bool:
        """Note the places that the value of a function is computed from; returns whether the source is known."""
        with self.entered(context, call, callee, samples=samples) as inner:
            if inner is None:
                return False
            reads = tuple(inner.reads.returned)
            if given.kind == "told" and (line := yields_of_turn(inner)):
                self.found.note_own(given.what, line, "what line {} yields")
            if inner.code in self.running and given.kind == "told":
                self.take(self.running[inner.code], given._replace(reads=reads))
            if callee.function.__name__ == "__init__" and inner.reads.parameters and inner.reads.parameters.args:
                # The value is the object, with all that this sets.
                own = inner.reads.parameters.args[0].arg
                sets = [change for change in inner.reads.changes if change.path.root == own and change.path.attributes]
                sets = [change for change in sets if change.path.attributes[0] == call.attribute] or sets
                reads = tuple(read for change in sets for read in (*change.value, *change.conditions))
            self.take(inner, given._replace(reads=reads), outward)
        return True


def _is_registered(module: object, name: str) -> bool:
    """Whether a module has a parameter or a buffer of this name."""
    return is_of(module, nn.Module) and any(name in vars(module)[part] for part in ("_parameters", "_buffers"))
