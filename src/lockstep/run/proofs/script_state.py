"""The values of a script's own variables at a step's beginning, which a resume makes anew, without a checkpoint.

    before = copy.deepcopy(model.state_dict())      weights beside the run: they are part of what is trained
    best, bad = inf, 0                              numbers: of a schedule, or of a log only

The step after a checkpoint begins at the same place of the script in a run that goes on and in a resumed run. A
variable with a different value there has lost its value, even if no effect shows yet. The script's source tells whether
the training depends on the variable, and whether the variable is set again before it is read.

    if not hasattr(self, "mean"): self.mean = x.mean()      missing where a run resumes: what is made is compared
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import re
import zlib
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from queue import Queue
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from lockstep.checkpoint import StateTree
from lockstep.collectives import local_part
from lockstep.loop_variables import dead_at
from lockstep.run.checks.divergence import checksums
from lockstep.run.inputs.training_inputs import training_inputs
from lockstep.run.source.line_calls import LineCalls
from lockstep.run.source.reachable import (
    CACHES,
    NUMBERS,
    TENSOR_RANK,
    Mark,
    find,
    is_plain,
    look,
    mark_of,
    parts_of,
    root_of,
    script_frames,
    script_roots,
    tells_values,
    variables_of,
)
from lockstep.run.source.script_modules import script_files
from lockstep.run.source.script_places import Held
from lockstep.run.source.source_reads import node_of, nodes_of
from lockstep.run.state.registered import State
from lockstep.run.state.user_values import PlainValue

_DEPTH: Final = 6  # such as a trainer, its callbacks, one of them, its list of models, one of these, and its weights
_MOST_PLAIN: Final = 2000
_MOST_VISITED: Final = 5 * _MOST_PLAIN  # objects, for which function or class each is
_MOST_OF_ONE: Final = 500  # of one variable
_ITEMS: Final = (*NUMBERS, torch.Tensor)
_CALLED: Final = (FunctionType, BuiltinFunctionType, MethodType, type)
_SHOWN: Final = 40  # characters of a value
_MISSING: Final = {"NameError", "UnboundLocalError", "AttributeError", "KeyError", "LookupError"}


class Lost(NamedTuple):
    """The script's variables whose values differ from those at the beginning of the same step."""

    weights: list[str]  #: the variables that held other weights
    inputs: list[str]  #: what the training is computed from, each in words with both values
    plain: list[str]  #: other numbers, texts, lengths and tensors, each with both values


def script_state(frame: FrameType | None, state: State, calls: LineCalls, *, waits: bool = True) -> StateTree:
    """The values of variables in the script's running functions, from ``frame`` outward, as plain values.

    Objects of the run are left out. ``calls`` are the calls that were seen in the functions' lines. If it ``waits``,
    it waits for the GPU if the script holds copies of weights there; otherwise these are left out.
    """
    known = _of_run(state)
    dead = {each: _dead_in(each) for each in script_frames(frame)}
    named = _variables(frame, dead)
    roots = _own(named, known)
    # Of a module's own lines, the variables are the module's.
    own_dead = {id(each.f_globals if each.f_code.co_name == "<module>" else each): dead[each] for each in dead}
    read = training_inputs(frame, state, calls)
    for key, (place, _) in [*read.places.items()]:
        if place.name in own_dead.get(id(place.owner), ()):
            del read.places[key]
    between = read.values_between().items()
    whole = {path: {"value": text, "of": what} for path, (value, what) in between if (text := _of(value))}
    return {
        "variables": sorted(roots),
        "inputs": _inputs(read.themselves(read.held_between())) | whole,
        "made": _inputs(read.themselves(read.held_when_needed())),
        "weights": {
            name: sums
            for name, value in roots.items()
            if (sums := _weights_in(value, known.keys(), state.models, waits=waits))
        },
        "plain": _plain(named, known),
    }


def plain_values(frame: FrameType | None, state: State) -> dict[str, str]:
    """The numbers, texts and the like of `script_state` by itself, without reading the script's source for inputs."""
    return _plain(_variables(frame, {each: _dead_in(each) for each in script_frames(frame)}), _of_run(state))


def _variables(frame: FrameType | None, dead: Mapping[FrameType, frozenset[str]]) -> dict[str, object]:
    """The script's variables, with those that are classes, without those that are ``dead`` in a running function."""
    roots = script_roots(frame)
    unread = {root_of(each, name, roots) for each, names in dead.items() for name in names}
    classes = {name: it for each in dead for name, it in variables_of(each).items() if isinstance(it, type)}
    return classes | {name: value for name, value in roots.items() if name not in unread}


def _own(named: Mapping[str, object], known: Mapping[int, str]) -> dict[str, object]:
    """Of the script's variables, those that are neither classes nor objects of the run."""
    return {name: value for name, value in named.items() if not isinstance(value, type) and id(value) not in known}


def _plain(named: Mapping[str, object], known: Mapping[int, str]) -> dict[str, str]:
    marks: dict[str, Mark] = {}
    # Each by itself: what a variable of a loop reaches, too, is not there yet under that name where a script resumes.
    for name, value in _own(named, known).items():
        limit = min(_MOST_OF_ONE, _MOST_PLAIN - len(marks))
        marks |= look({name: value}, skip=known.keys(), depth=_DEPTH, limit=limit)
    texts = (*_referents(named, known), *((path, _shown(mark)) for path, mark in marks.items()))
    return {path: text for path, text in texts if text and "._" not in path}  # such as a module's hooks


def _of(value: object) -> str:
    """A text for a function, a class, a file that is read, or the numbers, texts and tensors of a sequence or queue.

    "" for others, and where the text cannot be known.
    """
    if isinstance(value, io.IOBase):
        with contextlib.suppress(OSError, ValueError):  # closed, a pipe, or in the midst of a loop over its lines
            return f"a file at position {value.tell()}" if value.readable() else ""
        return ""
    if isinstance(value, Queue):
        value = value.queue
    if isinstance(value, list | tuple | deque):
        marks = [mark_of(item) for item in value if isinstance(item, _ITEMS)] if len(value) <= _MOST_OF_ONE else []
        texts = [_shown(mark) for mark in marks if mark is not None]
        is_known = bool(texts) and len(texts) == len(value)
        return f"{len(value)} items of checksum {zlib.crc32(repr(texts).encode()):08x}" if is_known else ""
    return _referent(value, {}) if isinstance(value, _CALLED) else ""


def _referents(roots: Mapping[str, object], known: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """Which function, class or kind of object a variable of ``roots`` leads to, and its attributes and items."""
    seen = set[int]()
    waiting = deque((name, value, 2) for name, value in roots.items())
    for _ in range(_MOST_VISITED):
        if not waiting:
            return
        path, value, left = waiting.popleft()
        if text := _referent(value, known):
            yield path, text
        if left and id(value) not in known and id(value) not in seen and not isinstance(value, _CALLED):
            seen.add(id(value))
            waiting.extend((path + step, part, left - 1) for step, part in parts_of(value))


def _referent(value: object, known: Mapping[int, str]) -> str:
    """Which function, class or kind of object ``value`` is, or which object of the run; "" for others."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, _CALLED):
        code = getattr(value, "__code__", None)
        line = f" of line {code.co_firstlineno}" if code is not None and code.co_name == "<lambda>" else ""
        return f"{getattr(value, '__qualname__', '')}{line}"
    if mark_of(value) is not None or isinstance(value, ModuleType):
        return ""
    return f"an object of {type(value).__qualname__}"


def _of_run(state: State) -> dict[int, str]:
    """The objects of the run, by `id`, in words; not numbers and texts, each of which many variables may have."""
    kept = ((name, value.value if isinstance(value, PlainValue) else value) for name, value in state.kept.items())
    found = {id(value): f"run.kept.{name}" for name, value in kept if not isinstance(value, NUMBERS)}
    found |= {id(each.scheduler): f"scheduler {number}" for number, each in enumerate(state.schedulers)}
    found |= {id(each): f"optimizer {number}" for number, each in enumerate(state.optimizers)}
    return found | {id(each): f"model {number}" for number, each in enumerate(state.models)}


def _inputs(held: Held) -> dict[str, dict[str, str]]:
    """The values of inputs, and what is computed from each, by their paths."""
    return {
        path: {"value": value, "of": what}
        for path, (mark, what) in held.items()
        # A dict may be a cache, which will be filled again.
        if mark.kind not in CACHES and (value := _shown(mark))
    }


def _dead_in(frame: FrameType) -> frozenset[str]:
    """The variables of a running function that it sets again before it reads them, of numbers, texts and tensors.

    Objects may go on by other ways, such as in a hook. So may a tensor, whose holders are compared by their names.
    """
    function, variables = node_of(frame.f_code), variables_of(frame)
    names = () if function is None else dead_at(function, frame.f_lineno)
    return frozenset(name for name in names if isinstance(variables.get(name), int | float | str | torch.Tensor))


def _shown(mark: Mark) -> str:
    """A text for a mark's value, equal for equal values; "" if the mark does not tell values."""
    if mark.rank != TENSOR_RANK:
        return str(mark.seen)[:_SHOWN]
    return f"a tensor of checksum {zlib.crc32(repr(mark.seen).encode()):08x}" if tells_values(mark) else ""


def _weights_in(value: object, skip: Collection[int], models: list[nn.Module], *, waits: bool) -> str:
    """A text for the bits of copies of a model's weights within reach of ``value``; "" without such copies."""
    held = (local_part(tensor) for model in models for tensor in (*model.parameters(), *model.buffers()))
    own = {tensor.untyped_storage().data_ptr() for tensor in held if is_plain(tensor)}
    tensors = {
        path: tensor
        for path, tensor in find({"": value}, torch.Tensor, skip=skip, depth=_DEPTH).items()
        if isinstance(tensor, torch.Tensor) and is_plain(tensor) and tensor.untyped_storage().data_ptr() not in own
    }
    there = Counter(tensor.shape for tensor in tensors.values())
    for model in models:
        needed = Counter(parameter.shape for parameter in model.parameters())
        if needed and needed <= there:
            copies = {path: tensor for path, tensor in tensors.items() if tensor.shape in needed}
            if not waits and any(tensor.device.type != "cpu" for tensor in copies.values()):
                return ""
            sums = sorted(zip(copies, checksums(list(copies.values())), strict=True))
            return hashlib.blake2b(repr(sums).encode(), digest_size=16).hexdigest()
    return ""


def without(script: StateTree, plain: Mapping[str, str]) -> None:
    """Remove the numbers, texts and the like from ``script``, see `script_state`, that ``plain`` holds as well."""
    for kind in ("inputs", "made", "plain"):
        for path, held in [*script[kind].items()]:
            is_same = plain.get(path) == (held if kind == "plain" else held["value"])
            if is_same or (kind != "plain" and _are_items_same(path, script["plain"], plain)):
                del script[kind][path]


def _are_items_same(path: str, plain: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether both hold the same items of a sequence that is read whole, which are there one by one, too."""
    items, others = (
        {each: text for each, text in held.items() if each.startswith(f"{path}[")} for held in (plain, other)
    )
    return bool(items) and items == others


def lost(before: Mapping[str, Any], now: Mapping[str, Any], after: Mapping[str, Any]) -> Lost:
    """The differences in variables of two states of the script at one place, with its state ``after`` the next step.

    The script sets a missing variable before it reads the variable, if it does not ask whether the variable is there.
    """
    there = set(now.get("variables", ()))
    had, has = (each.get("weights", {}) for each in (before, now))
    weights = [name for name, held in had.items() if name in there and has.get(name, "") != held]
    was, is_now = (each.get("inputs", {}) for each in (before, now))
    other = {path: (was[path]["value"], held) for path, held in is_now.items() if path in was}
    inputs = {
        path: f"{path}, which {held['of']} depends on, was {value} when it began, and is {held['value']} now"
        for path, (value, held) in other.items()
        if value != held["value"]
    } | _made_anew(before, now, after)
    was, is_now, is_then = (each.get("plain", {}) for each in (before, now, after))
    plain = [
        f"{path} ({was[path]}, now {value})"
        for path, value in is_now.items()
        if path not in inputs and was.get(path, value) not in (value, is_then.get(path))
    ]
    return Lost(weights, list(inputs.values()), plain)


def _made_anew(before: Mapping[str, Any], now: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """The values, in words, that the script has made anew because they were not there, and that are others."""
    made = dict(before.get("made", {}))
    made |= {path: held for path, held in before.get("inputs", {}).items() if path not in now.get("inputs", {})}
    there = {path: held for kind in ("inputs", "made") for path, held in after.get(kind, {}).items()}
    return {
        path: f"{path}, which {held['of']} depends on, was {held['value']} when it began, and is made anew now, "
        f"as {there[path]['value']}"
        for path, held in made.items()
        if path in there and there[path]["value"] != held["value"]
        if path in before.get("made", {}) or _is_asked_for(path)
    }


def _is_asked_for(path: str) -> bool:
    """Whether the script may ask if the variable, attribute or item at ``path`` is there."""
    name = re.split(r"[.\[]", path)[-1].strip("]'\"")
    trees = [node for file in script_files().values() if (node := nodes_of(file).get(("<module>", 1))) is not None]
    return any(_asks_for(name, node) for tree in trees for node in ast.walk(tree))


def _asks_for(name: str, node: ast.AST) -> bool:
    """Whether ``node`` is an expression that needs no ``name`` to be there, or a ``try`` that may end without."""

    def is_name(given: ast.expr) -> bool:
        return isinstance(given, ast.Constant) and given.value == name

    match node:
        case ast.Call(func=ast.Name(id="hasattr" | "getattr"), args=[_, given, *_]):
            return is_name(given)
        case ast.Call(func=ast.Attribute(attr="get" | "setdefault" | "pop"), args=[given, *_]):
            return is_name(given)
        case ast.Compare(left=given, ops=[ast.In() | ast.NotIn()]):
            return is_name(given)
        case ast.AugAssign(target=ast.Subscript(slice=given)):  # of a Counter or a defaultdict
            return is_name(given)
        case ast.Try(body=body, handlers=handlers):
            caught = {_name(part) for each in handlers if each.type is not None for part in ast.walk(each.type)}
            parts = (part for statement in body for part in ast.walk(statement))
            return bool(caught & _MISSING) and name in map(_name, parts)
    return False


def _name(node: ast.AST) -> str:
    """The variable or attribute that ``node`` is; "" for others."""
    return str(getattr(node, "id", "") or getattr(node, "attr", ""))
