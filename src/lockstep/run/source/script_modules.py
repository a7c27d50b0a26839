"""The modules of the script: its own file, and files of the user's beside it, without installed packages."""

from __future__ import annotations

import functools
import linecache
import sys
from typing import Any, Final

from lockstep.heartbeat import is_users

#: Whether a file is the script's own, or of a module beside it.
is_script: Final = functools.lru_cache(maxsize=8192)(is_users)


def dict_of(value: object) -> Any:
    """The ``__dict__`` of an object, of which no ``__getattr__`` of the script is asked; None for no such."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def file_of(module: object) -> str:
    """The file of a module, if the module is the script's; else ""."""
    file = (dict_of(module) or {}).get("__file__")
    return file if type(file) is str and is_script(file) else ""


def script_files() -> dict[str, str]:
    """The files of the script's modules that are loaded, by the names of the modules."""
    names = [name for name in sys.modules.keys() - _OF_OTHERS if name in sys.modules]
    return {name: file for name in names if (file := file_of(sys.modules[name]))}


def says(word: str) -> bool:
    """Whether a ``word`` stands in the script's files, anywhere in a line."""
    return any(word in line for file in script_files().values() for line in linecache.getlines(file))


#: Computed once, in the process from which ranks are forked: two thousand modules take some milliseconds. ``__main__``
#: of that process is not the script of the ranks.
_OF_OTHERS: Final = frozenset(name for name, one in list(sys.modules.items()) if not file_of(one)) - {"__main__"}
