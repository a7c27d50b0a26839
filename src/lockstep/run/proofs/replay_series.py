"""Series of replays in a run's first step: the body computes its micro-batches many times, with equal results.

a replay             0 1 2 0' 3                           finds changes by a few bodies
a series of them     0 1 2 0' 0' 1' 2' 0' 1' 2' ... 3     finds what begins after many: a threshold, a full list, each
                                                          seventh call, whatever holds it

The script sees nothing of these: its iterators do not go on, its objects are put back
(`script_snapshot`), and what it prints and logs is not shown. A series ends after a second of the CPU. The body of the
loop is made a function for that:

for number, (x, y) in enumerate(bar(run.train(batches))):       def main(run, model, number, total, data):
    total += F.mse_loss(model(x), y).item()                         for x, y in (data,):
    ...                                                                  total += ...
                                                                    else:
                                                                         return locals()
"""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
import io
import itertools
import logging
import pdb
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from types import CellType, CodeType, FrameType, FunctionType
from typing import Final

import torch

from lockstep.batch import MicroBatchPosition, StepCheck
from lockstep.data import Data
from lockstep.errors import LockstepError
from lockstep.heartbeat import collectives_begun
from lockstep.loop_variables import stored
from lockstep.run.loop.train_step import CurrentMicroBatch, TrainStep
from lockstep.run.proofs.replay import ReplayError, place_of
from lockstep.run.proofs.script_snapshot import ScriptSnapshot
from lockstep.run.setup.run_context import RunContext
from lockstep.run.source.line_calls import function_of
from lockstep.run.source.reachable import script_frames, variables_of
from lockstep.run.source.script_functions import is_ours, is_run
from lockstep.run.source.script_places import attribute_of
from lockstep.run.source.source_paths import path_of, within
from lockstep.run.source.source_reads import node_of
from lockstep.strategies import LossStrategy, ServerStrategy
from lockstep.torch_private import pytree

MOST: Final = 64  #: bodies
_MOST_DIFFERENT: Final = 4
_MOST_CPU_S: Final = 1.0  # of this process: on a machine that others load, as many bodies are tried
_MOST_S: Final = 5.0
_MOST_LOOPS: Final = 3

HandingOut = Callable[[MicroBatchPosition, Data], AbstractContextManager[CurrentMicroBatch]]
"""A context in which a body computes a micro-batch."""
_DATA: Final = "lockstep_data"
_LOCALS: Final = "lockstep_locals"  # the script may have a variable `locals`
_BARS: Final = {"tqdm", "rich", "alive_progress", "progressbar", "fastprogress"}
_PAUSES: Final = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)


class ReplaySeries:
    """Makes a series of replays once for each loop of the script.

    Args:
        context: of the run.
        train_step: compares the results of bodies.
        handing_out: see `HandingOut`.
    """

    def __init__(self, context: RunContext, train_step: TrainStep, handing_out: HandingOut) -> None:
        self._context: Final = context
        self._train_step: Final = train_step
        self._handing_out: Final = handing_out
        self._tried: Final[set[CodeType | None]] = set()
        self._began: int | None = None  # steps done before the first step of this process
        #: The micro-batches that the rank has had in this step, before a body could change them.
        self._had: Final[dict[int, tuple[MicroBatchPosition, Data]]] = {}
        self._is_new = False  # whether the script's micro-batch is computed for the first time
        self._collectives: int | None = 0  # begun before it

    def step_begins(self) -> None:
        """The first micro-batch of a step is about to be handed out."""
        self._had.clear()

    def body_begins(self, position: MicroBatchPosition, data: Data) -> None:
        """Prepare for a series, which may follow the micro-batch that is about to be handed out."""
        strategy, done = self._context.strategy, self._context.position.progress.step
        self._began = done if self._began is None else self._began
        if (
            self._began  # a resume must go on at once
            or not position.is_checked
            or position.is_other_ranks
            or position.is_padding
            or strategy.forward_is_collective
            or self._context.settings.reduction != "exact"  # torch's reducer counts backward passes
            or isinstance(strategy, LossStrategy | ServerStrategy)
            or len(self._tried) == _MOST_LOOPS
            or self._loop in self._tried
        ):
            return
        self._is_new = position.index not in self._had
        if self._is_new and len(self._had) < _MOST_DIFFERENT:
            with contextlib.suppress(Exception):  # an object may not be copyable
                self._had[position.index] = replace(position, last=False, check=StepCheck.REPLAY), _copied(data)
        self._collectives = _collectives()

    def body_is_over(self, position: MicroBatchPosition, step: int) -> None:
        """Compute the step's micro-batches so far again and again, after a replay.

        Args:
            position: of the micro-batch computed last.
            step: steps done before this step.

        Raises:
            ReplayError: if a micro-batch gives other values than before, or a body leaves its loop.
        """
        if position.check is StepCheck.REPLAY and position.index in self._had and not self._is_new:
            self._tried.add(self._loop)
            # A collective would have to be begun by all ranks.
            is_alone = self._collectives is not None and _collectives() == self._collectives
            if is_alone and (body := loop_body(sys._getframe(1))) is not None:
                self._repeat(body, list(self._had.values()), step)

    def _repeat(self, body: Callable[[Data], None], had: Sequence[tuple[MicroBatchPosition, Data]], step: int) -> None:
        state = self._context.state
        snapshot = ScriptSnapshot(sys._getframe(), state.used_by_run())
        began, cpu_began = time.perf_counter(), time.process_time()
        self._train_step.replays.of_effects = True
        with _quietly():
            for number, (position, pristine) in enumerate(itertools.islice(itertools.cycle(had), MOST), 2):
                if time.process_time() - cpu_began > _MOST_CPU_S or time.perf_counter() - began > _MOST_S:
                    break
                data = _copied(pristine)
                try:
                    with self._handing_out(position, data) as current:
                        body(data)
                    self._train_step.end(current)
                except ReplayError as error:
                    raise error.after(number) from None
                except (LockstepError, GeneratorExit):
                    raise
                except Exception as error:
                    if _finds_no_room(error):
                        break
                    ended = "its loop was left" if isinstance(error, LeftLoop) else f"the body raised {error!r}"
                    place = place_of(position.index, position.of, step)
                    raise ReplayError(ended, place, after=number).naming(()) from error
        self._train_step.replays.of_effects = False
        snapshot.restore()

    @property
    def _loop(self) -> CodeType | None:
        return next((frame.f_code for frame in script_frames(sys._getframe())), None)


def _collectives() -> int | None:
    try:
        return collectives_begun()
    except RuntimeError:  # the backend does not count collectives
        return None


def _copied(data: Data) -> Data:
    copied: Data = pytree.tree_map(lambda one: one.clone() if isinstance(one, torch.Tensor) else deepcopy(one), data)
    return copied


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """A context without prints and logs, and without a debugger's prompt."""
    nowhere = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        # Not `logging.disable`, which a script can ask for.
        stack.enter_context(_without(logging.Logger, "callHandlers"))
        stack.enter_context(_without(sys, "breakpointhook"))
        stack.enter_context(_without(pdb, "set_trace"))
        yield


@contextlib.contextmanager
def _without(owner: object, name: str) -> Iterator[None]:
    """A context in which the function ``name`` of ``owner`` does nothing."""
    function = getattr(owner, name)
    setattr(owner, name, lambda *_args, **_named: None)
    try:
        yield
    finally:
        setattr(owner, name, function)


def _finds_no_room(error: BaseException) -> bool:
    """Whether a body has written behind the end of a list or an array that the script has made for its own bodies."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    is_write = trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["STORE_SUBSCR"]
    return isinstance(error, IndexError) and is_write


class LeftLoop(Exception):
    """The body has left its loop, by `break` or `return`."""


def loop_body(frame: FrameType | None) -> Callable[[Data], None] | None:
    """A function that computes what the body of the script's loop does for a micro-batch; None where none can be made.

    Its calls follow each other as the turns of a loop do: variables of the script's function keep their values from
    call to call, and the function itself keeps those that it has. What the body changes elsewhere is changed.

    Args:
        frame: of Lockstep, from which the script waits for its next micro-batch.

    Raises of the function: what the body raises, and `LeftLoop`.
    """
    script = next(iter(script_frames(frame)), None)
    if script is None or script.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE):
        return None
    function = node_of(script.f_code)
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
    try:
        made = _compiled(script, loop, target, list(own) if of_function else [], changed)
    except SyntaxError:  # of a statement that is allowed where the script has it only
        return None
    cells = _cells_of(script, variables)
    if not set(made.co_freevars) <= cells.keys():
        return None
    body = FunctionType(made, script.f_globals, made.co_name, None, tuple(cells[name] for name in made.co_freevars))
    return _Turns(body, own if of_function else {})


class _Turns:
    """Calls a body, with the values that variables had after the last call."""

    def __init__(self, body: FunctionType, variables: dict[str, object]) -> None:
        self._body: Final = body
        self._variables: Final = variables

    def __call__(self, data: Data) -> None:
        after = self._body(**self._variables, **{_DATA: data, _LOCALS: locals})
        if after is None:
            raise LeftLoop
        self._variables.update((name, after[name]) for name in self._variables if name in after)


def _shared(code: CodeType, loop: ast.For) -> set[str]:
    """The variables of a function that others have as well, which are made in it, but not in the ``loop``."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    outside = (one for one in inner if not loop.lineno < one.co_firstlineno <= (loop.end_lineno or loop.lineno))
    return {name for one in outside for name in one.co_freevars}


def _waits_at(node: ast.AST, line: int) -> bool:
    return isinstance(node, ast.For) and node.lineno <= line <= max(node.lineno, node.body[0].lineno - 1)


def _target(target: ast.expr, items: ast.expr, variables: dict[str, object]) -> ast.expr | None:
    """The part of a loop's variables that gets the micro-batch; None where something else may come out there."""
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
    """Whether a function, or a class, is a package's that hands on what it is given and shows how far it is."""
    return str(getattr(value, "__module__", "")).partition(".")[0] in _BARS


def _compiled(script: FrameType, loop: ast.For, target: ast.expr, names: list[str], changed: set[str]) -> CodeType:
    """The code of the function, with these parameters, which sets the ``changed`` variables."""
    code, free = script.f_code, script.f_code.co_freevars
    own = {*code.co_varnames, *code.co_cellvars} if code.co_flags & inspect.CO_OPTIMIZED else set()
    declared = {"global": sorted(changed - own - {*free}), "nonlocal": sorted(changed & {*free})}
    module = ast.parse(
        f"class {_class_around(code) or '_'}:\n"  # whose name is a part of names such as `self.__model`
        f"    def around({', '.join(free)}):\n"
        f"        def {code.co_name.strip('<>')}({', '.join([*names, _DATA, _LOCALS])}):\n"
        + "".join(f"            {word} {', '.join(each)}\n" for word, each in declared.items() if each)
        + f"            for _ in ({_DATA},):\n"
        "                pass\n"
        "            else:\n"
        f"                return {_LOCALS}()\n"
    )
    turn = next(node for node in ast.walk(module) if isinstance(node, ast.For))
    turn.target, turn.body = target, [_WithoutAnnotations().visit(deepcopy(each)) for each in loop.body]
    compiled = compile(ast.fix_missing_locations(module), code.co_filename, "exec", dont_inherit=True)
    for _ in range(3):
        compiled = next(constant for constant in compiled.co_consts if isinstance(constant, CodeType))
    return compiled


def _class_around(code: CodeType) -> str:
    """The name of the innermost class around a function; "" for none."""
    parts = code.co_qualname.split(".")[:-1]
    while parts and parts[-1] == "<locals>":
        del parts[-2:]
    return parts[-1] if parts else ""


class _WithoutAnnotations(ast.NodeTransformer):
    """Makes `x: int = 1` to `x = 1`: a variable that is declared global can have no annotation."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        """The same without the annotation."""
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def _cells_of(script: FrameType, variables: dict[str, object]) -> dict[str, CellType]:
    if not script.f_code.co_freevars:
        return {}
    first = script.f_code.co_varnames[0] if script.f_code.co_argcount else ""
    function = function_of(script, variables.get(first), variables)
    closure = () if function is None else function.__closure__ or ()
    return dict(zip(script.f_code.co_freevars, closure, strict=False))
