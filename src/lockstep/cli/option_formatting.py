"""The lines of ``--help``, for all commands alike."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Final

from lockstep.strategy_kinds import strategy_names

#: In the help of an option: the words of all strategies. Other packages are looked up only where the help is shown.
STRATEGIES: Final = "<strategies>"
_WIDTH: Final = 112


class _OptionLines(argparse.HelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = super()._get_help_string(action)
        return text and (text.replace(STRATEGIES, ", ".join(strategy_names())) if STRATEGIES in text else text)


def option_lines(option_columns: int) -> partial[_OptionLines]:
    """A formatter of argparse, with options in so many columns of each line."""
    return partial(_OptionLines, max_help_position=option_columns, width=_WIDTH)
