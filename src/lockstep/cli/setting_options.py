"""The options that are settings of a run: declared once for the commands that start one, and read by them.

Also what the files of a project and of a user say to single commands.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from lockstep.cli.command import STRATEGIES
from lockstep.cpython_private import ArgumentGroup
from lockstep.errors import SettingError
from lockstep.project_files import project_files, table
from lockstep.settings import Settings, parse


@dataclass(frozen=True, slots=True)
class _Option:
    """How a setting is given by an option of its own name."""

    help: str
    metavar: str | None  #: None: it has no value, and means true


_OPTIONS: Final[Mapping[str, _Option]] = {
    "checkpoint": _Option("where checkpoints are (default: in the run directory)", "DIR"),
    "save_every": _Option("such as '100 steps', '5 min', '1 epoch'", "SPAN"),
    "strategy": _Option(f"how replicas are kept in step: {STRATEGIES} (default: ddp)", "NAME"),
    "rehearse": _Option("with too few GPUs: ranks share one, threads stand in", None),
    "reduction": _Option("exact or fast", "NAME"),
    "precision": _Option("fp32, bf16 or fp16", "NAME"),
}


def add_setting_options(group: ArgumentGroup, *without: str) -> None:
    """Add the options of settings to ``group``, but for those ``without``; any other setting comes by ``--set``."""
    for name, option in _OPTIONS.items():
        if name in without:
            continue
        flag = f"--{name.replace('_', '-')}"
        if option.metavar is None:
            group.add_argument(flag, action="store_const", const="true", help=option.help)
        else:
            group.add_argument(flag, metavar=option.metavar, help=option.help)
    group.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any other setting")


def read_set(words: Iterable[str]) -> dict[str, str]:
    """The settings that ``--set NAME=VALUE`` gives with these words, not checked.

    Raises:
        SettingError: for a word without ``=``.
    """
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            names = ", ".join(field.name for field in fields(Settings))
            raise SettingError(f"--set {word}: give NAME=VALUE; the names are {names}")
        given[name] = value
    return given


def settings_of(parsed: argparse.Namespace) -> dict[str, str]:
    """The settings that the command line gives, by their names, checked as far as that can be without the script.

    Raises:
        SettingError: for one that does not exist, or a value that cannot be used.
    """
    given = read_set(parsed.set)
    given |= {name: value for name in _OPTIONS if (value := getattr(parsed, name, None)) is not None}
    Settings(**{name: parse(name, value) for name, value in given.items()})
    return given


def site_table(name: str) -> dict[str, object]:
    """The table ``[name]`` of these files; empty where there is none.

    Raises:
        SettingError: as `project_files` does.
    """
    return table(name, project_files(os.environ))


def site_prices() -> Any:
    """The table ``[prices]``, of one device for one hour.

    Raises:
        SettingError: as `site_table`, and for a price that is no number from 0.
    """
    from lockstep.scale import Prices

    files = project_files(os.environ)
    prices = table("prices", files)
    currency = str(prices.pop("currency", "")) or "per hour"
    for name, price in prices.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < math.inf:
            place = next(file.place("prices", name) for file in files if name in file.table("prices"))
            raise SettingError(f"{place}: {name} = {price!r}; give a number, of one device for one hour")
    return Prices(prices, currency if prices else "")
