"""The strategies under which some ranks serve parameters to others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lockstep.errors import SettingError
from lockstep.strategy_kinds.kind import StrategyKind


@dataclass(frozen=True, slots=True)
class ParameterServerOptions:
    """The options of ``parameter-server``."""

    servers: int = 1  #: how many of the ranks serve, the last ones
    mode: str = "sync"  #: sync: servers wait for all workers; async: they step with each push
    staleness: int | None = None  #: of async: by how many steps a worker may be ahead of the slowest; None: any number

    def __post_init__(self) -> None:
        _check_servers("parameter-server", self.servers)
        if self.mode not in ("sync", "async"):
            raise SettingError(f"strategy parameter-server: mode={self.mode!r}; give sync or async")
        if self.staleness is not None and (self.mode == "sync" or self.staleness < 0):
            raise SettingError(
                f"strategy parameter-server: staleness={self.staleness}, mode={self.mode}; "
                "give a number from 0, with mode=async"
            )


@dataclass(frozen=True, slots=True)
class HybridOptions:
    """The options of ``hybrid``."""

    servers: int = 1  #: how many of the ranks serve, the last ones
    served: str = ""  #: names of the embeddings that lie there, joined by '+'; all of them, if there is none

    def __post_init__(self) -> None:
        _check_servers("hybrid", self.servers)


def _check_servers(strategy: str, servers: int) -> None:
    if servers < 1:
        raise SettingError(f"strategy {strategy}: servers={servers}; give a number from 1")


KINDS: Final = (
    StrategyKind(
        "parameter-server",
        "lockstep.strategies.parameter_server.parameter_server",
        "the last ranks hold the parameters and step; the others compute gradients",
        ParameterServerOptions,
        same_bits=True,
        keeps_bits=frozenset(("servers",)),
        cost="lockstep.scale.simulator:parameter_server",
    ),
    StrategyKind(
        "hybrid",
        "lockstep.strategies.parameter_server.hybrid",
        "the last ranks hold the embedding tables; the others keep the rest as ddp does",
        HybridOptions,
        same_bits=True,
        keeps_bits=frozenset(("servers",)),
        cost="lockstep.scale.simulator:parameter_server",
    ),
)
