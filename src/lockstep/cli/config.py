"""``lockstep config show``: each setting and option, with where its value comes from."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

from lockstep.cli.command import Command, Parser
from lockstep.cli.option_formatting import option_lines
from lockstep.cli.run_options import run_options
from lockstep.cpython_private import actions_of
from lockstep.errors import SettingError
from lockstep.formatting import did_you_mean, harmless
from lockstep.launch_contract import BARE, EXIT_OK, PROJECT
from lockstep.project_files import FILE, ProjectFile, freeze_settings, project_files, resolve_settings, unknown_tables
from lockstep.settings import Settings

T = TypeVar("T")

#: Options of a single start. In a file they would hold each time that a job is started again.
_ONCE = frozenset(("help", "set", "module", "no-python", "attach", "fault", "fit", "fresh", "resume", "resume-from"))


class LaunchOption(NamedTuple):
    """An option of ``lockstep run`` that a file gives."""

    words: list[str]
    place: str


def launch_words(options: argparse.ArgumentParser) -> list[str]:
    """The words that the files' tables ``[launch]`` put before those of a command line, which may say otherwise.

    What is true in a file cannot be taken back. The ranks of this launcher have the settings that the files give now.

    Raises:
        SettingError: as `launch_options` does.
    """
    freeze_settings(os.environ)
    if os.environ.pop(BARE, ""):
        return []
    return [word for option in launch_options(project_files(os.environ), options) for word in option.words]


def launch_options(files: Sequence[ProjectFile], options: argparse.ArgumentParser) -> list[LaunchOption]:
    """The options of ``lockstep run`` that ``files`` give; ``options`` are all that there are.

    Raises:
        SettingError: for unknown options and values that cannot be used, all of them at once.
    """
    known = {name: action for action in actions_of(options) for name in action.option_strings if name.startswith("--")}
    found: dict[str, LaunchOption] = {}
    wrong = unknown_tables(files)
    for file in reversed(files):
        for key, value in file.table("launch").items():
            option, place = f"--{key.replace('_', '-')}", file.place("launch", key)
            try:
                found[option] = LaunchOption(_words(option, value, known), place)
                options.parse_known_args(found[option].words)
            except SettingError as error:
                wrong.append(f"{place}: {error}")
    if wrong:
        raise SettingError("\n  ".join(wrong))
    return list(found.values())


def _words(option: str, value: Any, known: dict[str, argparse.Action]) -> list[str]:
    name = option[2:]
    if name.replace("-", "_") in {field.name for field in fields(Settings)}:
        raise SettingError(f"[launch] {name}: a setting of the run; write it under [run]")
    if name in _ONCE:
        raise SettingError(f"[launch] {name}: of one start, not of a project; give it on the command line")
    if option not in known:
        offered = [one for one in known if one[2:] not in _ONCE]
        raise SettingError(f"[launch] {name}: lockstep run has no such option; {did_you_mean(option, offered)}")
    has_value = known[option].nargs != 0
    if isinstance(value, bool) and not has_value:
        return [option] if value else []
    if isinstance(value, str | int | float) and not isinstance(value, bool) and has_value:
        return [option, str(value)]
    raise SettingError(f"[launch] {name} = {value!r}: give {'a text or a number' if has_value else 'true or false'}")


def _show_options() -> Parser:
    parser = Parser(
        prog="lockstep config show",
        usage="lockstep config show [--json]",
        description="Print the settings of a run that is started here, without those that its script gives: each value "
        "with where it comes from.",
        allow_abbrev=False,
        formatter_class=option_lines(30),
        epilog=f"Over these stand what a script gives to lockstep.Run(...), and the command line. {FILE} is looked for "
        f"in the working directory and above it; {PROJECT} names another file.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    return parser


def _show(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    files = project_files(os.environ)
    wrong: list[str] = []
    resolved = _or_note(wrong, lambda: resolve_settings({}, os.environ))
    options = _or_note(wrong, lambda: launch_options(files, run_options()))
    if resolved is None or options is None:
        raise SettingError("\n  ".join(dict.fromkeys(line for text in wrong for line in text.split("\n  "))))
    if parsed.json:
        shown = {
            "files": {file.of: str(file.path) for file in files},
            "settings": {
                name: {"value": value, "source": resolved.sources[name]} for name, value in resolved.as_dict().items()
            },
            "launch": [{"option": " ".join(option.words), "source": option.place} for option in options],
        }
        print(json.dumps(shown, indent=1))
    else:
        print(harmless("\n".join(_lines(files, resolved, options)), keep="\n"))
    return EXIT_OK


def _or_note(wrong: list[str], read: Callable[[], T]) -> T | None:
    """What ``read`` gives; None if it refuses something, which is added to ``wrong``."""
    try:
        return read()
    except SettingError as error:
        wrong.append(str(error))
        return None


def _lines(files: Sequence[ProjectFile], resolved: Any, options: Sequence[LaunchOption]) -> Iterator[str]:
    found = {file.of: str(file.path) for file in files}
    for of in ("project", "user"):
        yield f"{of + ':':<9}{found.get(of, 'no file')}"
    rows = [
        (f"{name} = {'' if value is None else value}", resolved.sources[name])
        for name, value in resolved.as_dict().items()
    ]
    launched = [(" ".join(option.words), option.place) for option in options if option.words]
    width = max(len(what) for what, _ in (*rows, *launched)) + 2
    for head, some in (("settings", rows), ("options of lockstep run", launched)):
        if some:
            yield from ("", f"{head}:", *(f"  {what:<{width}}{source}" for what, source in some))


COMMANDS = (Command("config show", "settings that hold here, each with where it comes from", _show_options, _show),)
