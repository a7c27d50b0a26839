"""The strategies: what each is called, which options it has, what it promises, and how it is predicted; without torch.

    --strategy ddp:compress=powersgd,rank=2
               ^^^ ^^^^^^^^^^^^^^^^^^^^^^^^
               name       its options, checked before any rank starts

A strategy of another package is known by an entry point of the group ``lockstep.strategies``, which names its
`StrategyKind`::

    [project.entry-points."lockstep.strategies"]
    ring = "my_package.ring:KIND"

Commands import that module only if the word is used, so a kind in a file without torch costs a launcher nothing.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import SettingError
from lockstep.option_words import split_options
from lockstep.settings import read_options
from lockstep.strategy_kinds.kinds import (
    BUILT_IN,
    CHUNKS,
    EVERYTHING,
    WHOLE,
    DdpOptions,
    DilocoOptions,
    DpOptions,
    FsdpOptions,
    HsdpOptions,
    HybridOptions,
    LocalSgdOptions,
    NoOptions,
    ParameterServerOptions,
    PipelineOptions,
    StrategyKind,
    ZeroOptions,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "BUILT_IN",
    "CHUNKS",
    "EVERYTHING",
    "WHOLE",
    "DdpOptions",
    "DilocoOptions",
    "DpOptions",
    "FsdpOptions",
    "HsdpOptions",
    "HybridOptions",
    "LocalSgdOptions",
    "NoOptions",
    "ParameterServerOptions",
    "PipelineOptions",
    "StrategyKind",
    "ZeroOptions",
    "kind_of",
    "read_strategy",
    "split",
    "strategy_names",
]

#: What other libraries call them, each with what it is here.
_ELSEWHERE: Final = {
    other: f"{kind.name}:{options}" if options else kind.name
    for kind in BUILT_IN.values()
    for other, options in kind.elsewhere.items()
}
_GROUP: Final = "lockstep.strategies"


def strategy_names() -> list[str]:
    """The words of all strategies, those of other packages last. Imports no other package."""
    return [*BUILT_IN, *sorted(_entry_points().keys() - BUILT_IN.keys())]


def split(spec: str) -> tuple[str, dict[str, str]]:
    """The name and the options of ``spec``, as they were written; an option alone means true.

    Raises:
        SettingError: if there is no such strategy or option (with the nearest one), an option is named twice, or there
            is none between two commas.
    """
    kind, options = _found(spec)
    return kind.name, options


def kind_of(spec: str) -> StrategyKind:
    """The kind of the strategy that ``spec`` names.

    Raises:
        SettingError: as `split` does.
    """
    return _found(spec)[0]


def read_strategy(spec: str) -> tuple[StrategyKind, Any]:
    """The kind of the strategy that ``spec`` names, and its options as an object of `StrategyKind.options`.

    Raises:
        SettingError: as `split` does, and for a value that cannot be used.
    """
    kind, options = _found(spec)
    return kind, read_options(f"strategy {kind.name}", kind.options, options)


def _found(spec: str) -> tuple[StrategyKind, dict[str, str]]:
    """The kind that ``spec`` names, and its options as they were written."""
    word = spec.partition(":")[0]
    kinds = dict(BUILT_IN)
    if word not in kinds:
        others = _entry_points()
        kinds |= {name: _load(others[name]) if name == word else StrategyKind(name, "", "") for name in others}
    known = {name: kind.option_names for name, kind in kinds.items()}
    name, options = split_options("strategy", spec, known, elsewhere=_ELSEWHERE)
    return kinds[name], options


@cache
def _entry_points() -> dict[str, EntryPoint]:
    # Takes 30 ms, which only those pay who ask for a strategy of another package, or for help.
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=_GROUP):
        if (other := found.setdefault(entry.name, entry)).value != entry.value:
            raise SettingError(
                f"two packages bring a strategy {entry.name}: {_owner(other)} and {_owner(entry)}; remove one of them"
            )
    return found


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "a package"


@cache
def _load(entry: EntryPoint) -> StrategyKind:
    """The kind that ``entry`` names.

    Raises:
        SettingError: if it cannot be imported, or is no kind of this name.
    """
    place = f"strategy={entry.name}: the entry point {entry.name} = {entry.value!r} of {_owner(entry)}"
    try:
        kind = entry.load()
    except Exception as error:
        raise SettingError(f"{place} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(kind, StrategyKind) or kind.name != entry.name:
        raise SettingError(f"{place} is {kind!r}; let it name a StrategyKind with name={entry.name!r}")
    return kind
