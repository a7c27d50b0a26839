"""What a command consists of."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from lockstep.errors import SettingError


@dataclass(frozen=True, slots=True)
class Command:
    """One word after ``lockstep``, or two."""

    name: str
    does: str  #: one line
    options: Callable[[], argparse.ArgumentParser]
    act: Callable[[argparse.Namespace, Sequence[str]], int]  #: what was parsed, and the words it was parsed from


class Parser(argparse.ArgumentParser):
    """Raises a usage error instead of printing all options and leaving; `argparse` has no other way to ask for it."""

    def error(self, message: str) -> NoReturn:
        """Raise `SettingError`."""
        if given := re.match(r"argument (--[\w-]+).*: ignored explicit argument '(.*)'", message):
            option, value = given.groups()
            known = [name for action in self._actions for name in action.option_strings]
            longer = next((name for name in known if name.startswith(f"{option}-")), "")
            message = f"{option} takes no value" + (f"; did you mean {longer} {value}?" if longer else "")
        raise SettingError(message)
