"""The body of the script's loop as a function, which can compute a micro-batch again without the loop's iterator.

for number, (x, y) in enumerate(bar(run.train(batches))):       def main(run, model, number, total, data):
    total += F.mse_loss(model(x), y).item()                         for x, y in (data,):
    ...                                                                  total += ...
                                                                    else:
                                                                         return locals()
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from types import CellType, CodeType, FrameType, FunctionType
from typing import Final

from lockstep.data import Data
from lockstep.loop_variables import stored
from lockstep.run.source.line_calls import function_of
from lockstep.run.source.reachable import script_frames, variables_of
from lockstep.run.source.script_functions import is_ours, is_run
from lockstep.run.source.script_places import attribute_of
from lockstep.run.source.source_reads import nodes_of, path_of, within

_DATA: Final = "lockstep_data"
_LOCALS: Final = "lockstep_locals"  # the script may have a variable `locals`
_BARS: Final = {"tqdm", "rich", "alive_progress", "progressbar", "fastprogress"}
_PAUSES: Final = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)


class LeftLoop(Exception):
    """The body has left its loop, by `break` or `return`."""


def loop_body(frame: FrameType | None) -> Callable[[Data], None] | None:
    """A function that runs the body of the script's loop for a micro-batch; None if none can be made.

    Successive calls are like the turns of a loop: variables of the script's function keep their values from call to
    call, but the running function's own variables do not change. Changes of other objects by the body are real.

    Args:
        frame: of Lockstep, from which the script waits for its next micro-batch.

    The returned function raises the errors of the body, and `LeftLoop`.
    """
    script = next(iter(script_frames(frame)), None)
    if script is None or script.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE):
        return None
    function = nodes_of(script.f_code.co_filename).get((script.f_code.co_name, script.f_code.co_firstlineno))
    if function is None:
        return None
    loop = next((node for node in within(function) if _waits_at(node, script.f_lineno)), None)
    if not isinstance(loop, ast.For) or any(isinstance(node, _PAUSES) for node in within(loop)):
        return None
    variables = variables_of(script)
    target = _target(loop.target, loop.iter, {**script.f_globals, **variables})
    changed = stored([loop])
    if target is None or not changed.isdisjoint(_shared(script.f_code, loop)):
        return None
    of_function = bool(script.f_code.co_flags & inspect.CO_OPTIMIZED)
    free = script.f_code.co_freevars
    own = {name: value for name, value in variables.items() if name.isidentifier() and name not in free}
    made = _compiled(script, loop, target, list(own) if of_function else [], [] if of_function else sorted(changed))
    cells = _cells_of(script, variables)
    if not set(made.co_freevars) <= cells.keys():
        return None
    body = FunctionType(made, script.f_globals, made.co_name, None, tuple(cells[name] for name in made.co_freevars))
    return _Turns(body, own if of_function else {})


class _Turns:
    """Calls a body with the values of variables after the last call."""

    def __init__(self, body: FunctionType, variables: dict[str, object]) -> None:
        self._body: Final = body
        self._variables: Final = variables

    def __call__(self, data: Data) -> None:
        after = self._body(**self._variables, **{_DATA: data, _LOCALS: locals})
        if after is None:
            raise LeftLoop
        self._variables.update((name, after[name]) for name in self._variables if name in after)


def _shared(code: CodeType, loop: ast.For) -> set[str]:
    """The variables of a function that inner functions share, if these are made outside of the ``loop``."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    outside = (one for one in inner if not loop.lineno < one.co_firstlineno <= (loop.end_lineno or loop.lineno))
    return {name for one in outside for name in one.co_freevars}


def _waits_at(node: ast.AST, line: int) -> bool:
    return isinstance(node, ast.For) and node.lineno <= line <= max(node.lineno, node.body[0].lineno - 1)


def _target(target: ast.expr, items: ast.expr, variables: dict[str, object]) -> ast.expr | None:
    """The part of a loop's target that gets the micro-batch; None if the loop may give other values."""
    match items, target:
        case ast.Call(func=ast.Name(id="enumerate"), args=[part, *_]), ast.Tuple(elts=[_, one]):
            return _target(one, part, variables)
        case ast.Call(func=ast.Name(id="zip"), args=parts), ast.Tuple(elts=targets) if len(parts) == len(targets):
            found = (_target(one, part, variables) for one, part in zip(targets, parts, strict=True))
            return next((one for one in found if one is not None), None)
        case ast.Call(func=function, args=arguments), _:
            path = path_of(function)
            owner = value = variables.get(path.root) if path is not None else None
            for name in path.attributes if path is not None else ():
                owner, value = value, attribute_of(value, name)
            if is_run(owner) and path is not None and path.attributes[-1:] == ("train",):
                return target
            return _target(target, arguments[0], variables) if arguments and _shows_progress(value) else None
        case ast.Name(id=name), _:
            value = variables.get(name)
            return target if is_ours(value) or _shows_progress(type(value)) else None
    return None


def _shows_progress(value: object) -> bool:
    """Whether a function or class is of a package for progress bars, which hands on the items of an iterable."""
    return str(getattr(value, "__module__", "")).partition(".")[0] in _BARS


def _compiled(script: FrameType, loop: ast.For, target: ast.expr, names: list[str], outer: list[str]) -> CodeType:
    """The code of the function, with these parameters, and variables of its module that it sets."""
    name, free = script.f_code.co_name.strip("<>"), script.f_code.co_freevars
    module = ast.parse(
        f"def around({', '.join(free)}):\n"
        f"    def {name}({', '.join([*names, _DATA, _LOCALS])}):\n"
        f"        {'global ' if outer else 'pass'}{', '.join(outer)}\n"
        f"        for _ in ({_DATA},):\n"
        "            pass\n"
        "        else:\n"
        f"            return {_LOCALS}()\n"
    )
    turn = next(node for node in ast.walk(module) if isinstance(node, ast.For))
    turn.target, turn.body = target, loop.body
    code = compile(module, script.f_code.co_filename, "exec", dont_inherit=True)
    for _ in range(2):
        code = next(constant for constant in code.co_consts if isinstance(constant, CodeType))
    return code


def _cells_of(script: FrameType, variables: dict[str, object]) -> dict[str, CellType]:
    if not script.f_code.co_freevars:
        return {}
    first = script.f_code.co_varnames[0] if script.f_code.co_argcount else ""
    function = function_of(script, variables.get(first), variables)
    closure = () if function is None else function.__closure__ or ()
    return dict(zip(script.f_code.co_freevars, closure, strict=False))
