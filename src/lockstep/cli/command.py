"""What a command consists of, and the lines of its ``--help``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

from lockstep.errors import SettingError
from lockstep.strategy_kinds import strategy_names

if TYPE_CHECKING:  # loads what a command needs that starts ranks
    from lockstep.launch import Module, Script


#: In the help of an option: the words of all strategies. Other packages are looked up only where the help is shown.
STRATEGIES: Final = "<strategies>"
_WIDTH: Final = 112


@dataclass(frozen=True, slots=True)
class Command:
    """One word after ``lockstep``, or two."""

    name: str
    does: str  #: one line
    options: Callable[[], Parser]
    act: Callable[[argparse.Namespace, Sequence[str]], int]  #: what was parsed, and the words it was parsed from


class Parser(argparse.ArgumentParser):
    """Raises a usage error instead of printing all options and leaving; `argparse` has no other way to ask for it."""

    of_script = "after its name"  #: where the script's own options stand

    def error(self, message: str) -> NoReturn:
        """Raise `SettingError`."""
        if given := re.match(r"argument (--[\w-]+).*: ignored explicit argument '(.*)'", message):
            option, value = given.groups()
            known = [name for action in self._actions for name in action.option_strings]
            longer = next((name for name in known if name.startswith(f"{option}-")), "")
            message = f"{option} takes no value" + (f"; did you mean {longer} {value}?" if longer else "")
        raise SettingError(message)


def say(text: str) -> None:
    """Tell the user something beside what the command prints."""
    print(text, file=sys.stderr, flush=True)


def program_of(parsed: argparse.Namespace) -> Script | Module:
    """The script, or the module that ``-m NAME`` names, of a command line of `ScriptParser`."""
    # Late, for help and usage errors do without it.
    from lockstep.launch import Module, Script

    kind = Script if parsed.module is None else Module
    return kind(parsed.script or parsed.module, tuple(parsed.args))


def split_at_script(parsed: argparse.Namespace, words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The ``words`` of a command line before the ``script`` that was parsed from them, and those behind it.

    Of a ``--`` right behind it, which is the script's own, `argparse` says nothing.
    """
    at = len(words) - len(parsed.args) - 1
    at -= words[at] != parsed.script
    return list(words[:at]), tuple(words[at + 1 :])


class ScriptParser(Parser):
    """Finds the script anywhere among options, of which some take several values.

    `argparse` would take it for one more of these values, or the options behind it for the script's.
    """

    of_script = "after --"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As `argparse`; the script is the first word that ends in ``.py``, its own options come after ``--``."""
        words = list(args or ())
        cut = words.index("--") if "--" in words else len(words)
        own, of_script = words[:cut], words[cut + 1 :]
        script = next((word for word in own if word.endswith(".py")), None)
        if script is not None:
            own.remove(script)
        parsed, unknown = super().parse_known_args(own, namespace)
        if unknown and script is None and not unknown[0].startswith("-"):
            raise SettingError(f"{unknown[0]}: give a script, a file whose name ends in .py")
        parsed.script, parsed.args = script, of_script
        return parsed, unknown


class _OptionLines(argparse.HelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = super()._get_help_string(action)
        return text and (text.replace(STRATEGIES, ", ".join(strategy_names())) if STRATEGIES in text else text)


def option_lines(option_columns: int) -> partial[_OptionLines]:
    """A formatter of argparse, with options in so many columns of each line."""
    return partial(_OptionLines, max_help_position=option_columns, width=_WIDTH)
