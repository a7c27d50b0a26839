"""A function of the script, with the values of its parameters and variables. No code of the script is run for them.

def penalty(self, out):            self    the object whose method is called
    mean = self.mean.lerp(...)     out     what the caller gives: a value, or what that is computed from
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, Final, NamedTuple, TypeVar, cast

from lockstep.run.source.decided_tests import UNKNOWN, ChangedNames, value_of_test
from lockstep.run.source.line_calls import LineCalls
from lockstep.run.source.reachable import script_frames, variables_of
from lockstep.run.source.script_places import NOTHING, Place, attribute_of, variable_at
from lockstep.run.source.source_paths import Path, name_in_script, path_of, within
from lockstep.run.source.source_reads import (
    ITEMS,
    NO_LOOP,
    Call,
    Guard,
    Loop,
    Read,
    Reads,
    Text,
    Use,
    node_of,
    reads_of,
)

T = TypeVar("T")

#: Types of numbers and texts.
PLAIN: Final = (bool, int, float, str, type(None))
_CLIPS: Final = {"clip_grad_norm_", "clip_grad_value_", "get_total_norm"}
_LEAVES_ALONE: Final = {"zero_", "detach_", "requires_grad_"}  # methods of gradients that no update needs


class Argument(NamedTuple):
    """The value of a parameter."""

    reads: tuple[Read, ...]  #: in the function that calls
    value: object  #: where it is known
    text: str = ""  #: of a value that no variable of the caller holds
    stays: bool = True  #: whether the caller's variable is bound to no other object
    parts: tuple[Argument, ...] | None = None  #: of ``*arguments``: each of them, where all are known
    named: Mapping[str, Argument] | None = None  #: of ``**options``, likewise

    @property
    def name(self) -> str:
        """How the caller, or its text, calls the value; "" where it is computed there."""
        return self.text or next((read.text for read in self.reads if isinstance(read, Path)), "")


def stands_between(frame: FrameType) -> bool:
    """Whether a running function stands between a loop and its items: a generator, or a method that takes an item."""
    reads = reads_of(frame.f_code)
    is_generator = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
    return is_generator or reads is None or not reads.loop_at(frame.f_lineno).first


@dataclass
class Context:
    """A function of the script whose values are followed."""

    code: CodeType
    reads: Reads
    variables: dict[str, Any]  #: of its module
    frame: FrameType | None = None  #: if it is running
    cells: dict[str, CellType] = field(default_factory=dict)
    is_made_anew: bool = False  #: whether each body makes the function, so that its cells outlive no body
    running: tuple[FrameType, ...] = ()  #: the script's functions that run, of which some have made this one
    arguments: dict[str, Argument] = field(default_factory=dict)
    of_items: frozenset[str] = frozenset()  #: parameters that get what is computed from the items of the loop's turn
    depth: int = 0
    in_body: bool = False  #: whether a body runs it, or it runs the loop
    sometimes: bool = False  #: not in each body
    at_step: bool = False  #: whether it runs where `Run.step` said that a step is done, within a pass
    unsettled: Container[str] = ()  #: variables and attributes that may still get another value
    calls: LineCalls = field(default_factory=LineCalls)  #: what lines have run
    caller: Context | None = None  #: the function that calls this one
    conditions: tuple[Read, ...] = ()  #: under which it does, in that function
    called_sometimes: bool = False  #: not whenever that function runs, or the one that calls that
    callees: dict[int, tuple[Call, list[Callee]]] = field(default_factory=dict)  #: by the `id` of a call, which is kept
    _decided: dict[int, object] = field(default_factory=dict)  # the values of tests, by the `id` of each, which is kept
    _computed: dict[Callable[[Context], Any], Any] = field(default_factory=dict)

    @functools.cached_property
    def held(self) -> dict[str, object]:
        """The variables of a function that is running."""
        return {} if self.frame is None else variables_of(self.frame)

    def once(self, compute: Callable[[Context], T]) -> T:
        """The result of ``compute`` for this function, which is computed once: nothing runs while a script is read."""
        if compute not in self._computed:
            self._computed[compute] = compute(self)
        return cast(T, self._computed[compute])

    @property
    def is_between(self) -> bool:
        """Whether a function that runs `stands_between` a loop and its items."""
        return self.frame is None or stands_between(self.frame)

    @property
    def is_function(self) -> bool:
        """Whether the code is a function's, and not a module's own lines."""
        return bool(self.code.co_flags & inspect.CO_OPTIMIZED)

    def is_local(self, name: str) -> bool:
        """Whether ``name`` is a variable of the function's own, or one that has a name of its own only here."""
        is_own = name in self.code.co_varnames or name in self.code.co_cellvars or name in self.arguments
        return is_own or name != name_in_script(name)

    @functools.cached_property
    def loop(self) -> Loop:
        """The loop that a function which is running is in."""
        return NO_LOOP if self.frame is None else self.reads.loop_at(self.frame.f_lineno)

    def covers(self, line: int) -> bool:
        """Whether a body runs this line."""
        return self.in_body and (not self.loop.first or self.loop.first < line <= self.loop.last)

    def at(self, line: int) -> str:
        """A line of the function's file as messages name it, such as ``train.py:12``."""
        return f"{PurePath(self.code.co_filename).name}:{line}"

    def is_dead(self, guards: Iterable[Guard]) -> bool:
        """Whether a test of ``guards`` never holds, such as the test of an option that is not set."""
        for test, holds in guards:
            if id(test) not in self._decided:
                self._decided[id(test)] = value_of_test(test, self.settled_value)
            value = self._decided[id(test)]
            if value is not UNKNOWN and bool(value) is not holds:
                return True
        return False

    @functools.cached_property
    def live_uses(self) -> tuple[Use, ...]:
        """The calls and writes of the function, but for those that are never reached, see `is_dead`."""
        return tuple(use for use in self.reads.uses if not self.is_dead(use.guards))

    def is_past(self, line: int) -> bool:
        """Whether the running function has left a ``line`` for good, which stands before all loops that it is in."""
        if self.frame is None:
            return False
        now = self.frame.f_lineno
        return line < min((loop.first for loop in self.reads.loops if loop.first <= now <= loop.last), default=0)

    def settled_value(self, path: Path) -> object:
        """The number or text at a path, if the value stays the same; else `UNKNOWN`."""
        value = self.value_of(path)
        is_own = self.frame is None and (path.root in self.reads.set_from or path.root in self.reads.outer)
        if is_own or type(value) not in PLAIN:
            return UNKNOWN
        return UNKNOWN if any(name in self.unsettled for name in (path.root, *path.attributes)) else value

    def place_of(self, path: Path) -> Place | None:
        """The place of a path, if known and outliving a body."""
        if path.root in self.arguments:
            argument = self.arguments[path.root]
            text = path._replace(root=argument.name or path.root).text
            is_gone = not (argument.stays or path.attributes)  # the object may be another one by now
            is_known = argument.value is not NOTHING and not is_gone
            return Place(argument.value, "", path.attributes, text) if is_known else None
        owner: object
        if self.frame is not None and self.is_function and path.root in self.held:
            owner = self.frame
        elif path.root in self.cells:
            if (maker := self._maker_of(path.root)) is None:
                cell = self.cells[path.root]
                return None if self.is_made_anew else Place(cell, "", path.attributes, path.text)
            owner = maker
        elif self.is_local(path.root):
            return None
        else:
            owner = self.variables
        # While bodies run, a variable that they set anew has no value that the script gave to the same name before.
        is_set = name_in_script(path.root) in self._set_by_bodies
        return None if is_set else Place(owner, path.root, path.attributes, path.text)

    @functools.cached_property
    def _set_by_bodies(self) -> frozenset[str]:
        return frozenset(map(name_in_script, self.loop.fresh))

    def _maker_of(self, name: str) -> FrameType | None:
        """The running function that has made this one, with the variable ``name`` that both have."""
        value = variable_at(self.cells[name], "")
        return next(
            (
                frame
                for frame in self.running
                if name in frame.f_code.co_cellvars
                and self.code in _codes_within(frame.f_code)
                and variables_of(frame).get(name, NOTHING) is value
            ),
            None,
        )

    def value_of(self, path: Path) -> object:
        """The value at a path, as far as known without running code; else `NOTHING`."""
        root = path.root
        if root in self.arguments:
            value = self.arguments[root].value
        else:
            value = self.held.get(root, NOTHING)
            if value is NOTHING and self.is_local(root):  # nothing runs, or has not come there yet
                value = self._value_of_local(root)
        if value is NOTHING and not (self.is_local(root) and self.frame is None):
            value = variable_at(self.cells[root], "") if root in self.cells else self.variables.get(root, NOTHING)
            value = getattr(builtins, root, NOTHING) if value is NOTHING else value
        for name in path.attributes:
            value = attribute_of(value, name)
        return value

    def text_of(self, text: Text) -> object:
        """The whole text, if all parts are known; else `NOTHING`."""
        values = [part if isinstance(part, str) else self.value_of(part) for part in text.parts]
        return "".join(map(str, values)) if all(type(value) in PLAIN for value in values) else NOTHING

    def is_loop_variable(self, name: str) -> bool:
        """Whether ``name`` is a variable of these lines' own that a loop sets to one item after the other."""
        is_own = (self.is_local(name) or not self.is_function) and name not in self.arguments
        bound = self.reads.bound_to.get(name, ()) if is_own else ()
        return any(
            isinstance(read, Call) and read.function and isinstance(of := read.function[0], Path) and _is_loop(of)
            for part in bound
            for read in part
        )

    def _value_of_local(self, name: str) -> object:
        """Of a variable that is another name of something, or of an item of a list, which stands for all of them."""
        match self.reads.bound_to.get(name, []):
            case [(Path(root=root) as path,)] if root != name:
                return self.value_of(path)
            case [(Call(function=(Path(attributes=(*_, last)) as path,)),)] if last == ITEMS and path.root != name:
                items = self.value_of(path.owner)
                return items[0] if isinstance(items, list | tuple) and items else NOTHING
        return NOTHING


def running_functions(frame: FrameType | None, calls: LineCalls) -> Iterator[Context]:
    """The functions of the script that are running, from ``frame`` outward; ``calls`` are what their lines have run.

    The function with the loop, and those that stand between the loop and its items, are `Context.in_body`.
    """
    frames = tuple(script_frames(frame))
    unsettled = ChangedNames(name for each in frames for name in _names_changed(each))
    in_body = True
    for script in frames:
        reads = reads_of(script.f_code) or Reads()
        context = Context(
            script.f_code,
            reads,
            script.f_globals,
            frame=script,
            unsettled=unsettled,
            running=frames,
            calls=calls,
            in_body=in_body,
        )
        in_body = in_body and context.is_between
        yield context


def _names_changed(frame: FrameType) -> Iterator[str]:
    """The names of variables and attributes that a function which is running changes in its loops."""
    reads = reads_of(frame.f_code) or Reads()
    changes = (change.path for change in reads.changes if reads.loop_at(change.line).first)
    return (name for path in changes for name in (path.attributes or (path.root,))[-1:])


@functools.lru_cache(maxsize=256)
def _codes_within(code: CodeType) -> frozenset[CodeType]:
    """The code of functions that a function makes."""
    own = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(own).union(*map(_codes_within, own))


class Callee(NamedTuple):
    """A function of the script that a call runs."""

    function: FunctionType
    bound: Argument | None  #: its first argument, of a method
    known: Mapping[str, object] | None = None  #: what was seen of its arguments, where it was seen to run


def bind(context: Context, call: Call, callee: Callee, reads: Reads) -> dict[str, Argument]:
    """The value of each parameter of a called function."""
    parameters = reads.parameters
    if parameters is None:
        return {}
    names = [one.arg for one in (*parameters.posonlyargs, *parameters.args)]
    others = [one.arg for one in parameters.kwonlyargs]
    every = call.every
    rest = [one.arg for one in (parameters.vararg, parameters.kwarg) if one is not None]
    bound = {name: Argument(every, NOTHING) for name in rest}
    function, own, known = callee
    if known is not None:
        for name in (*names, *others):
            value = known.get(name, NOTHING)
            is_self = attribute_of(type(value), function.__name__) is not NOTHING
            text = type(value).__name__ if is_self else f"{function.__name__}'s {name}"
            bound[name] = Argument(every, value, text)
        return bound
    positional, by_name, is_loose = _given_to(context, call)
    bound |= {name: Argument(every if is_loose else (), NOTHING) for name in (*names, *others)}
    defaults = dict(zip(reversed(names), reversed(function.__defaults__ or ()), strict=False))
    if not is_loose:
        for name, value in {**defaults, **(function.__kwdefaults__ or {})}.items():
            bound[name] = Argument((), value, f"{function.__name__}'s {name}")
    if own is not None and names:
        bound[names.pop(0)] = own
    bound |= dict(zip(names, positional, strict=False))
    bound |= {name: one for name, one in by_name.items() if name in (*names, *others)}
    if parameters.vararg is not None and not is_loose:
        parts = tuple(positional[len(names) :])
        bound[parameters.vararg.arg] = Argument(every, NOTHING, parts=parts)
    if parameters.kwarg is not None and not is_loose:
        rest_named = {name: one for name, one in by_name.items() if name not in (*names, *others)}
        bound[parameters.kwarg.arg] = Argument(every, NOTHING, named=rest_named)
    return bound


def _given_to(context: Context, call: Call) -> tuple[list[Argument], dict[str, Argument], bool]:
    """The arguments of a call by their order and by name, and whether there may be others.

    A function that hands on its own ``*arguments`` and ``**options`` hands on those that it got.
    """
    positional = [_argument(context, part) for part in call.arguments[: call.certain]]
    named = {name: _argument(context, part) for name, part in call.keywords if name}
    is_loose = False
    if call.is_starred:
        handed_on = [_handed_on(context, part) for part in call.arguments[call.certain :]]
        got = handed_on[0].parts if len(handed_on) == 1 and handed_on[0] is not None else None
        is_loose = got is None
        positional += [one._replace(reads=call.arguments[call.certain], text=one.name) for one in got or ()]
    for reads in (part for name, part in call.keywords if not name):
        handed = _handed_on(context, reads)
        options = None if handed is None else handed.named
        is_loose = is_loose or options is None
        named |= {name: one._replace(reads=reads, text=one.name) for name, one in (options or {}).items()}
    return positional, named, is_loose


def _handed_on(context: Context, reads: tuple[Read, ...]) -> Argument | None:
    """The parameter of the calling function that ``reads`` are; None for anything else."""
    path = reads[0] if len(reads) == 1 else None
    return context.arguments.get(path.root) if isinstance(path, Path) and not path.attributes else None


def _argument(context: Context, part: tuple[Read, ...]) -> Argument:
    value, stays = NOTHING, True
    if len(part) == 1 and isinstance(part[0], Path):
        value = context.value_of(part[0])
        stays = bool(part[0].attributes) or len(context.reads.bound_to.get(part[0].root, ())) < 2
        if type(value) in PLAIN and context.settled_value(part[0]) is UNKNOWN:
            value = NOTHING
    elif len(part) == 1 and isinstance(part[0], Text):
        value = context.text_of(part[0])
    return Argument(part, value, stays=stays)


def _is_loop(function: Path) -> bool:
    return function.attributes[-1:] in ((ITEMS,), ("values",), ("items",))


def runs_in_body(context: Context, call: Call) -> bool:
    """Whether a body runs a called function, as the body runs the calling one."""
    path = call.function[0] if call.function else None
    is_next = isinstance(path, Path) and path.attributes[-1:] == (ITEMS,) and call.line == context.loop.first
    return context.in_body and (not call.line or is_next or context.covers(call.line))


def is_of(value: object, *kinds: type) -> bool:
    """Whether ``value`` is of a kind. Not `isinstance`, which asks the object itself: it may stand for another one."""
    return issubclass(type(value), kinds)


def is_run(value: object) -> bool:
    """Whether ``value`` is a `Run`."""
    return type(value).__module__ == "lockstep.run.run"


def is_ours(value: object) -> bool:
    """Whether ``value`` belongs to Lockstep."""
    return type(value).__module__.partition(".")[0] == "lockstep"


@functools.lru_cache(maxsize=512)
def attributes_read(code: CodeType) -> frozenset[str]:
    """The names of the attributes that the function with this ``code`` reads, of whatever objects."""
    parts = ast.walk(node_of(code) or ast.Module([], []))
    return frozenset(one.attr for one in parts if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Load))


@functools.lru_cache(maxsize=512)
def gradients_read(code: CodeType) -> tuple[tuple[int, Path | None], ...]:
    """The lines in which the function with this ``code`` reads or clips gradients, and whose, if that is a path.

    Not where a gradient is only set, set to zero, or compared with None.
    """
    node = node_of(code)
    skip: set[int] = set()
    found: list[tuple[int, Path | None]] = []
    for each in () if node is None else within(node):
        match each:
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in _CLIPS:
                found.append((each.lineno, None))
            case ast.Call(func=function):  # such as torch.autograd.grad
                skip.add(id(function))
            case ast.Compare(left=left, comparators=[ast.Constant(value=None)]):
                skip.add(id(left))
            case ast.Attribute(value=value, attr=name) if name in _LEAVES_ALONE:
                skip.add(id(value))
            case ast.Attribute(value=owner, attr="grad", ctx=ast.Load()) if id(each) not in skip:
                found.append((each.lineno, path_of(owner)))
    return tuple(found)
