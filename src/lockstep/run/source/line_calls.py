"""The functions that lines of a script have run, seen while a body ran: the source does not name all of them.

loss = model(x) * self.scale               Scale.__get__, of a descriptor
await controller.update(loss)              Controller.update
heapq.heappush(self.pool, item)            Item.__lt__
self.actions.popleft()()                   what was in there

A function that a package calls belongs to the line of the script that called the package. No function is kept from
running, and a body runs somewhat slower while it is looked at: by some microseconds for each call of a Python function.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Final

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.run.source.reachable import parts_of
from lockstep.run.source.script_modules import is_script
from lockstep.run.source.script_places import NOTHING, attribute_of, variable_at
from lockstep.run.source.source_reads import Lines

#: Code that belongs to the function around it.
_PARTS: Final = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
_MOST: Final = 16  # objects of one function and one line
_VALUES: Final = (torch.Tensor, np.ndarray, np.generic, bool, int, float, complex, str, bytes, type(None))
#: What is run once a step, and in no body.
_OF_STEPS: Final = (Optimizer, LRScheduler)
#: What saves, and a file that is imported.
_NOT_COMPUTING: Final = {"state_dict", "load_state_dict", "__getstate__", "__setstate__", "__reduce__", "<module>"}
MEMO: Final = type(functools.lru_cache(int))  #: what `functools.lru_cache` makes
_BUILT_IN: Final = {"builtins", "torch.nn.modules.module"}


@dataclass(frozen=True)  # so that its function is no method
class Ran:
    """A function that a line has run."""

    function: FunctionType
    arguments: Mapping[str, object]  #: by parameter; without those that each body has anew, see `_is_of_body`


class LineCalls:
    """The functions that the lines of one loop have run."""

    def __init__(self) -> None:
        self._ran: Final[dict[tuple[str, int], dict[tuple[CodeType, int], Ran]]] = {}  # by file and line
        self._known: Final[set[tuple[str, int, CodeType]]] = set()
        self.is_new = False  #: whether something was seen that had not been seen before `seen`

    def watch(self) -> None:
        """Trace the functions that this thread runs from now on, unless a debugger does."""
        # Not by a profile function: before Python 3.13 that would keep all variables of the loop's function alive.
        if sys.gettrace() is None:
            sys.settrace(self._note)

    def unwatch(self) -> None:
        """End the trace."""
        if sys.gettrace() == self._note:
            sys.settrace(None)

    def ran_by(self, file: str, lines: Lines) -> list[Ran]:
        """The functions that ``lines`` of a file have run, directly or by way of a package."""
        by_line = (self._ran.get((file, line), {}) for line in range(lines.first, lines.last + 1))
        return [one for ran in by_line for one in ran.values()]

    def seen(self) -> None:
        """Note that the script has been read with the functions known now."""
        self.is_new = False

    def forget(self) -> None:
        """Let go of the script's objects."""
        self._ran.clear()

    def _note(self, frame: FrameType, _event: str, _: object) -> None:
        code = frame.f_code
        if not _is_read(code) or code.co_name in _NOT_COMPUTING:
            return
        caller = frame.f_back
        while caller is not None and not _is_read(caller.f_code):
            caller = caller.f_back
        if caller is None:
            return
        line = caller.f_lineno
        ran = self._ran.setdefault((caller.f_code.co_filename, line), {})
        if len(ran) >= _MOST:
            return
        # Not `variables_of`: before Python 3.13, what is taken out of this snapshot is taken out of the function.
        variables = dict(frame.f_locals)
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = {name: variables[name] for name in names if name in variables}
        first = next(iter(given.values()), None)
        # Dicts and lists are made anew in each body: by their identities, those of sixteen bodies would be kept.
        key = code, 0 if issubclass(type(first), (dict, list, tuple)) else id(first)
        if issubclass(type(first), _OF_STEPS) or key in ran:
            return
        function = function_of(frame, first, variables)
        if function is None:
            return
        ran[key] = Ran(function, {name: value for name, value in given.items() if not _is_of_body(value)})
        if (caller.f_code.co_filename, line, code) not in self._known:
            self._known.add((caller.f_code.co_filename, line, code))
            self.is_new = True


def _is_read(code: CodeType) -> bool:
    """Whether a function is the script's; a comprehension belongs to the function around the comprehension."""
    return code.co_name not in _PARTS and is_script(code.co_filename)


def _is_of_body(value: object, depth: int = 2) -> bool:
    """Whether each body has another ``value``, which is not to be kept: a number, a text, a tensor, results of a graph.

    On a GPU, the outputs of a model for one micro-batch, in a dict, may take gigabytes.
    """
    return issubclass(type(value), _VALUES) or (depth > 0 and _holds_results(value, depth - 1))


def _holds_results(value: object, depth: int) -> bool:
    if issubclass(type(value), (dict, list, tuple)):
        items = [one for _, one in parts_of(value)]
    else:
        items = [attribute_of(value, name) for name in getattr(type(value), "__dataclass_fields__", ())]
    return any(
        one.grad_fn is not None  # type: ignore[attr-defined]  # as just asked
        if issubclass(type(one), torch.Tensor)
        else depth > 0 and _holds_results(one, depth - 1)
        for one in items
    )


def function_of(frame: FrameType, first: object, variables: Mapping[str, object]) -> FunctionType | None:
    """The function that runs in ``frame``: of the class of its first argument, of its module, or any with its code."""
    code = frame.f_code
    kind = first if isinstance(first, type) else type(first)
    own = (value for each in kind.__mro__ if each.__module__ not in _BUILT_IN for value in vars(each).values())
    for value in (*own, frame.f_globals.get(code.co_name)):
        for function in _functions_in(value):
            if function.__code__ is code:
                return function
    for holder in gc.get_referrers(code):  # made by a function that runs, and perhaps several times
        if type(holder) is FunctionType and holder.__code__ is code:
            cells = zip(code.co_freevars, holder.__closure__ or (), strict=False)
            if all(variable_at(cell, "") is variables.get(name, NOTHING) for name, cell in cells):
                return holder
    return None


def _functions_in(value: object) -> Iterator[FunctionType]:
    """The function that ``value`` is, and those that it wraps as properties and decorators do."""
    if isinstance(value, FunctionType):
        yield value
        yield from _functions_in(vars(value).get("__wrapped__"))
    elif isinstance(value, property):
        yield from (each for each in (value.fget, value.fset, value.fdel) if isinstance(each, FunctionType))
    elif isinstance(value, staticmethod | classmethod):
        yield from _functions_in(value.__func__)
    elif isinstance(value, functools.cached_property | functools.partialmethod):
        yield from _functions_in(value.func)
    elif isinstance(value, MEMO):
        yield from _functions_in(value.__wrapped__)
