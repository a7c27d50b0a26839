"""``lockstep config show``: each setting and option, with where its value comes from."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from lockstep.cli.bench import bench_options
from lockstep.cli.command import Command, Parser, option_lines
from lockstep.cli.doctor import doctor_options
from lockstep.cli.run_options import run_options
from lockstep.cli.tune import tune_options
from lockstep.cli.verify import verify_options
from lockstep.cpython_private import actions_of
from lockstep.errors import SettingError
from lockstep.formatting import did_you_mean, harmless
from lockstep.launch_contract import BARE, EXIT_OK, PROJECT
from lockstep.project_files import FILE, ProjectFile, freeze_settings, project_files, resolve_settings, unknown_tables
from lockstep.settings import Settings

T = TypeVar("T")

#: Options of a single start. In a file they would hold each time that a job is started again.
_ONCE = frozenset(("help", "set", "module", "no-python", "attach", "fault", "fit", "fresh", "resume", "resume-from"))


#: The commands whose options files give, each with the table of its options, and with all of them.
_OPTIONS_OF: Final[dict[str, tuple[str, Callable[[], Parser]]]] = {
    "run": ("launch", run_options),
    "bench": ("bench", bench_options),
    "tune": ("tune", tune_options),
    "verify": ("verify", verify_options),
    "doctor": ("doctor", doctor_options),
}


class FileOption(NamedTuple):
    """An option of a command that a file gives."""

    words: list[str]
    place: str


def file_words(command: str, options: Parser) -> list[str]:
    """The words that the files put before those of the command line of ``command``, which has these ``options``.

    The command line may say otherwise.

    What is true in a file cannot be taken back. The ranks of this launcher have the settings that the files give now.

    Raises:
        SettingError: as `file_options` does.
    """
    if command == "run":
        freeze_settings(os.environ)
        if os.environ.pop(BARE, ""):
            return []
    elif command not in _OPTIONS_OF:
        return []
    return [word for option in file_options(project_files(os.environ), command, options) for word in option.words]


def file_options(files: Sequence[ProjectFile], command: str, options: Parser) -> list[FileOption]:
    """Those ``options`` of ``command`` that ``files`` give.

    Raises:
        SettingError: for unknown tables and options and for values that cannot be used, all of them at once.
    """
    table = _OPTIONS_OF[command][0]
    known = {name: action for action in actions_of(options) for name in action.option_strings if name.startswith("--")}
    found: dict[str, FileOption] = {}
    wrong = unknown_tables(files)
    for file in reversed(files):
        for key, value in file.table(table).items():
            option, place = f"--{key.replace('_', '-')}", file.place(table, key)
            try:
                found[option] = FileOption(_words(command, option, value, known), place)
                options.parse_known_args(found[option].words)
            except SettingError as error:
                wrong.append(f"{place}: {error}")
    if wrong:
        raise SettingError("\n  ".join(wrong))
    return list(found.values())


def _words(command: str, option: str, value: object, known: dict[str, argparse.Action]) -> list[str]:
    name = option[2:]
    shown = f"[{_OPTIONS_OF[command][0]}] {name}"
    if command == "run" and name.replace("-", "_") in {field.name for field in fields(Settings)}:
        raise SettingError(f"{shown}: a setting of the run; write it under [run]")
    if name in _ONCE:
        raise SettingError(f"{shown}: of one start, not of a project; give it on the command line")
    if option not in known:
        offered = [one for one in known if one[2:] not in _ONCE]
        raise SettingError(f"{shown}: lockstep {command} has no such option; {did_you_mean(option, offered)}")
    takes = known[option].nargs
    if isinstance(value, bool) and takes == 0:
        return [option] if value else []
    values = value if isinstance(value, list) and takes == "+" else [value]
    if (
        values
        and takes != 0
        and all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in values)
    ):
        return [option, *map(str, values)]
    wanted = "true or false" if takes == 0 else "a list of texts or numbers" if takes == "+" else "a text or a number"
    raise SettingError(f"{shown} = {value!r}: give {wanted}")


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
    options = {
        command: _or_note(wrong, partial(file_options, files, command, options_of())) or []
        for command, (_, options_of) in _OPTIONS_OF.items()
    }
    if resolved is None or wrong:
        raise SettingError("\n  ".join(dict.fromkeys(line for text in wrong for line in text.split("\n  "))))
    if parsed.json:
        shown = {
            "files": {file.of: str(file.path) for file in files},
            "settings": {
                name: {"value": value, "source": resolved.sources[name]} for name, value in resolved.as_dict().items()
            },
        } | {
            _OPTIONS_OF[command][0]: [{"option": " ".join(option.words), "source": option.place} for option in given]
            for command, given in options.items()
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


def _lines(files: Sequence[ProjectFile], resolved: Any, options: Mapping[str, Sequence[FileOption]]) -> Iterator[str]:
    found = {file.of: str(file.path) for file in files}
    for of in ("project", "user"):
        yield f"{of + ':':<9}{found.get(of, 'no file')}"
    rows = [
        (f"{name} = {'' if value is None else value}", resolved.sources[name])
        for name, value in resolved.as_dict().items()
    ]
    given = {
        f"options of lockstep {command}": [(" ".join(one.words), one.place) for one in some if one.words]
        for command, some in options.items()
    }
    width = max(len(what) for some in (rows, *given.values()) for what, _ in some) + 2
    for head, some in (("settings", rows), *given.items()):
        if some:
            yield from ("", f"{head}:", *(f"  {what:<{width}}{source}" for what, source in some))


COMMANDS = (Command("config show", "settings that hold here, each with where it comes from", _show_options, _show),)
