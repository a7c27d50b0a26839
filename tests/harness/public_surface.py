"""What users and programs rely on, one thing a line: names with their signatures, options, settings, variables, codes.

``public_surface.txt`` beside this file is the list that was promised; ``make surface`` writes it. A thing that is gone
or changed is written only when the changelog names it (docs/versioning.md).
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep import launch_contract
from lockstep.cli import COMMANDS
from lockstep.cpython_private import actions_of
from lockstep.settings import Settings

HOUSE = Path(__file__).parents[2]
FILE = Path(__file__).with_suffix(".txt")
REFERENCE = HOUSE / "docs" / "reference"
#: What public functions return, without a name in the reference: where its class is, and what of it is public.
RETURNED = {
    "lockstep.batch.MicroBatchPosition": "index of last is_padding samples step_samples step",
    "lockstep.batch.EpochSteps": "samples micro_batches step_samples __len__",
    "lockstep.run.metrics.early_stopping.EarlyStopping": "should_stop stopped",
    "lockstep.run.batches.micro_batches.MicroBatches": "__iter__ __len__ close",
    "lockstep.run.state.carried_state.CarriedState": "__getitem__ __iter__ __len__",
    "lockstep.tune.results.result.Failure": "reason numbers",
    "lockstep.tune.record.trial.Reported": "step loss at_s",
    "lockstep.verify.VerifyResult": "steps took_s ways differing is_equal to_json write",
}
#: Of the things of a class that Python gives to each, those that are not named by a word of their own.
_CALLS = ("__init__", "__call__", "__iter__", "__len__", "__enter__", "__exit__", "__getitem__", "__contains__")


def surface() -> dict[str, str]:
    """What is public now: each thing's name, and how it is used."""
    return dict([*_names(), *_options(), *_settings(), *_variables(), *_exit_codes()])


def documented() -> dict[str, list[str]]:
    """The names that the reference documents, by module: they are public, others are not."""
    found: dict[str, list[str]] = {}
    for page in sorted(REFERENCE.glob("*.md")):
        for module, listed in re.findall(r"automodule:: (\S+)\n\s+:members:((?: [^:\n]+\n?)*)", page.read_text()):
            if module != launch_contract.__name__:  # named as variables and exit codes
                names = re.findall(r"\w+", listed) or importlib.import_module(module).__all__
                found[module] = sorted(set(names))
    return found


def _names() -> Iterator[tuple[str, str]]:
    for module, names in documented().items():
        for name in names:
            value = getattr(importlib.import_module(module), name)
            yield from _of(f"{module}.{name}", value.tune if isinstance(value, ModuleType) else value)
    for place, members in RETURNED.items():
        module, _, name = place.rpartition(".")
        found = dict(_members(getattr(importlib.import_module(module), name)))
        yield from ((f"returned {name}.{member}", found[member]) for member in members.split())


def _of(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """``value`` and, if it is a class, what its objects have."""
    if not inspect.isclass(value):
        yield name, _signature(value) if callable(value) else type(value).__name__
        return
    yield name, f"class({', '.join(base.__name__ for base in value.__bases__ if base is not object)})"
    for owner in reversed([kind for kind in value.__mro__ if kind.__module__.startswith("lockstep")]):
        for member, use in _members(owner):
            yield f"{name}.{member}", use


def _members(owner: type) -> Iterator[tuple[str, str]]:
    attributes = inspect.get_annotations(owner)
    for member, annotation in attributes.items():
        if not member.startswith("_") and "ClassVar" not in str(annotation):
            yield member, _written(annotation)
    for member, found in vars(owner).items():
        if (member.startswith("_") and member not in _CALLS) or member in attributes:
            continue
        value = inspect.unwrap(found.__func__ if isinstance(found, classmethod | staticmethod) else found)
        if isinstance(value, property):
            yield member, f"property -> {_written(inspect.get_annotations(value.fget)['return'])}"
        elif inspect.isfunction(value) and value.__module__.startswith("lockstep"):
            yield member, _signature(value)
            if member == "__init__" and value.__code__.co_filename == inspect.getsourcefile(owner):
                yield from ((name, "attribute") for name in _set_by(value))


def _set_by(init: Any) -> list[str]:
    """The attributes without an underscore that ``init`` sets."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(init)))
    stored = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return [node.attr for node in stored if ast.unparse(node.value) == "self" and not node.attr.startswith("_")]


def _signature(function: Any) -> str:
    """Its signature, with annotations as they are written; of a default that is no plain value, that there is one."""
    signature = inspect.signature(function)
    parameters = [
        each.replace(
            annotation=each.annotation if each.annotation is each.empty else _Text(_written(each.annotation)),
            default=_Text("...") if " at 0x" in repr(each.default) else each.default,
        )
        for each in signature.parameters.values()
    ]
    result = signature.return_annotation
    result = result if result is signature.empty else _Text(_written(result))
    return str(signature.replace(parameters=parameters, return_annotation=result))


class _Text(str):
    """A text that `inspect` shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _written(annotation: object) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _options() -> Iterator[tuple[str, str]]:
    for command in COMMANDS.values():
        yield f"lockstep {command.name}", "command"
        for action in actions_of(command.options()):
            spelt = ", ".join(option for option in action.option_strings if "_" not in option)
            value = "no value" if action.nargs == 0 else str(action.metavar or action.dest)
            several = {None: "", 0: "", "?": "", "...": ""}.get(action.nargs, f" ({action.nargs} of them)")
            choices = f", one of {' '.join(action.choices)}" if action.choices else ""
            given = action.default not in (None, False, [], argparse.SUPPRESS)
            default = f", default {action.default}" if given else ""
            yield f"lockstep {command.name} {spelt or action.dest}", f"{value}{several}{choices}{default}"


def _settings() -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(Settings):
        yield f"setting {field.name}", f"{_written(field.type)}, default {field.default}"


def _variables() -> Iterator[tuple[str, str]]:
    """The variables that the reference says may be set, or be read by a script."""
    table = (REFERENCE / "environment.md").read_text().split("## What the launcher")[0]
    for name in re.findall(r"`([A-Z_]+[A-Z])(?:=\w+)?`", table):
        yield f"variable {name}", "documented"


def _exit_codes() -> Iterator[tuple[str, str]]:
    for name, value in vars(launch_contract).items():
        if name.startswith("EXIT_"):
            yield f"exit code {value}", name


def read(text: str) -> dict[str, str]:
    """The things of a file such as ``public_surface.txt``."""
    return dict(line.split(" | ", 1) for line in text.splitlines())


def write(things: dict[str, str]) -> str:
    """The text of such a file."""
    return "".join(f"{name} | {use}\n" for name, use in things.items())


def unannounced(promised: dict[str, str], now: dict[str, str], changelog: str) -> list[str]:
    """Things that are gone or changed and that the newest section of ``changelog`` does not name.

    An entry below ``### Changed``, ``### Deprecated`` or ``### Removed`` names a thing by its last word, as code, such
    as ``Run.step`` or ``LOCKSTEP_VIEW``; an option by its command, too, as in ``lockstep run --fit``.
    """
    newest = re.split(r"(?m)^## ", changelog)[1]
    sections = re.split(r"(?m)^### ", newest)[1:]
    kinds = [text for text in sections if text.split()[0] in ("Changed", "Deprecated", "Removed")]
    entries = [entry for text in kinds for entry in re.split(r"(?m)^- ", text)]
    said = [" ".join(re.findall(r"`([^`]+)`", entry)) for entry in entries]
    lost = [name for name, use in promised.items() if not _still_holds(use, now.get(name, ""))]
    return [name for name in lost if not any(_names_all(code, words(name)) for code in said)]


def _still_holds(use: str, now: str) -> bool:
    """Whether all that ``use`` says holds ``now``: the same, or a signature with more parameters that have defaults."""
    if use == now or not (use.startswith("(") and now.startswith("(")):
        return use == now
    (before, result), (after, result_now) = _parameters(use), _parameters(now)
    same = [name for name in before if after.get(name) == before[name]]
    # In place, as far as they are given by it; and none in front of them.
    positional = [name for name in before if not before[name][0]]
    kept = [name for name in after if not after[name][0]][: len(positional)] == positional
    added = all(after[name][2] for name in after if name not in before)
    return result == result_now and len(same) == len(before) and kept and added


def _parameters(signature: str) -> tuple[dict[str, tuple[bool, str, str]], str]:
    """By name: whether it is given by name only, annotation, default; and what is returned."""
    function = ast.parse(f"def function{signature}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [*[None] * (len(positional) - len(given.defaults)), *given.defaults, *given.kw_defaults]
    found = {
        each.arg: (
            each in given.kwonlyargs,
            ast.unparse(each.annotation) if each.annotation else "",
            ast.unparse(default) if default is not None else "",
        )
        for each, default in zip([*positional, *given.kwonlyargs], defaults, strict=True)
    }
    found |= {f"*{each.arg}": (True, "", "given") for each in (given.vararg, given.kwarg) if each}
    return found, ast.unparse(function.returns) if function.returns else ""


def _names_all(code: str, words: list[str]) -> bool:
    return all(re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", code) for word in words)


def words(name: str) -> list[str]:
    """By what the changelog names a thing: the command and its option, ``Run.step``, ``micro_batch``."""
    if name.startswith("lockstep "):
        command, _, option = name.split(", ")[0].rpartition(" ")
        return [command, option] if command != "lockstep" else [name]
    parts = [part for part in name.split()[-1].split(".") if part != "__init__"]
    return [".".join(parts[-2:] if len(parts) > 1 and parts[-2][0].isupper() else parts[-1:])]


def main() -> int:
    """Write the file, unless something is lost that the changelog does not name."""
    promised, now = read(FILE.read_text()) if FILE.exists() else {}, surface()
    if lost := unannounced(promised, now, (HOUSE / "CHANGELOG.md").read_text()):
        print("CHANGELOG.md names below Changed, Deprecated or Removed of its newest section none of these:")
        print("\n".join(f"  {name}: was {promised[name]}; is {now.get(name, 'gone')}" for name in lost))
        return 1
    FILE.write_text(write(now))
    return 0


if __name__ == "__main__":
    sys.exit(main())
