"""Environment variables that are meant for Lockstep: a misspelt one would otherwise do nothing, in silence."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields

import lockstep.launch_contract as launch_contract
from lockstep.errors import SettingError
from lockstep.settings import Settings

_PREFIX = "LOCKSTEP_"
_KNOWN = frozenset(
    {value for value in vars(launch_contract).values() if isinstance(value, str) and value.startswith(_PREFIX)}
    | {f"{_PREFIX}{field.name.upper()}" for field in fields(Settings)}
    | {f"{_PREFIX}{name}" for name in ("VIEW", "SECRET", "SETTINGS", "RESULT", "LOCAL_RANK_OPTION")}
)
#: As alike as a word and its misspelling; less alike are variables of somebody else's.
_ALIKE = 0.85


def check_variables(env: Mapping[str, str]) -> None:
    """Check that no variable in ``env`` is a misspelt one of Lockstep's.

    Raises:
        SettingError: naming it and the one that was probably meant.
    """
    for name in sorted(env):
        if name.startswith(_PREFIX) and name not in _KNOWN:
            near = difflib.get_close_matches(name, _KNOWN, n=1, cutoff=_ALIKE)
            if near:
                raise SettingError(f"the environment variable {name} is none of Lockstep's; did you mean {near[0]}?")
