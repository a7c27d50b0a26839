"""The rank of this process in its world, under any launcher; the only reader of rank variables.

lockstep run ─┐
torchrun ─────┤
mpirun, srun ─┼──  environment  ──  LAUNCHERS (first row that is present)  ──  World
a shell ──────┤
nothing ──────┘
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypedDict

from lockstep.errors import WorldError
from lockstep.formatting import plural
from lockstep.launch_contract import RUN_DIR, RUN_ID, job_port
from lockstep.slurm_syntax import expand_counts, expand_hosts
from lockstep.world.launchers import (
    Environment,
    Launcher,
    Names,
    find_launcher,
    first_set,
    number_in,
    rank_and_size,
    values_of,
)

_HERE = "127.0.0.1"
_LOOPBACK = frozenset({_HERE, "localhost", "::1"})


class _Run(TypedDict):
    generation: int
    run_id: str
    run_dir: str | None


@dataclass(frozen=True, slots=True)
class World:
    """The place of a rank among all ranks.

    Raises:
        WorldError: if the numbers describe no rank of a world.
    """

    rank: int
    size: int  #: ranks in the world
    local_rank: int  #: among the ranks of this node
    local_size: int  #: ranks of this node
    node_rank: int
    nodes: int
    generation: int = 0  #: number of worlds of this run before this one
    address: str = _HERE  #: host of the leader
    port: int = 0  #: at which the ranks meet on the leader's host; 0 for a single rank
    launcher: str = "none"  #: the row of `LAUNCHERS` from which the world was read
    run_id: str = ""
    run_dir: str | None = None

    def __post_init__(self) -> None:
        for place, of in (("rank", "size"), ("local_rank", "local_size"), ("node_rank", "nodes")):
            if not 0 <= getattr(self, place) < getattr(self, of):
                raise WorldError(
                    f"{place}={getattr(self, place)} with {of}={getattr(self, of)}: "
                    f"{place} counts from 0 and stays below {of}"
                )
        for part in ("local_size", "nodes"):
            if getattr(self, part) > self.size:
                raise WorldError(f"{part}={getattr(self, part)} with size={self.size}: it cannot be larger")
        if self.generation < 0:
            raise WorldError(f"generation={self.generation}: it counts from 0")
        if not 0 <= self.port < 65536:
            raise WorldError(f"port={self.port}: ports lie between 1 and 65535")

    @property
    def leads(self) -> bool:
        """Whether this rank writes for all."""
        return self.rank == 0

    @property
    def leads_node(self) -> bool:
        """Whether this rank does the work that is done once on each node."""
        return self.local_rank == 0

    @classmethod
    def from_env(cls, env: Environment) -> World:
        """The place of this process that the environment describes; a world of one rank if it describes none.

        If a launcher does not tell the node, consecutive ranks are assumed to share a node.

        Raises:
            WorldError: if the variables contradict each other, hold no usable numbers, or do not say where to meet.
        """
        launcher = find_launcher(env)
        if not launcher.rank:
            return cls(0, 1, 0, 1, 0, 1, launcher=launcher.name, **_run(env, launcher))
        rank, size = rank_and_size(env, launcher.rank, launcher.size)
        address = env.get("MASTER_ADDR", "")
        node_rank = number_in(env, launcher.node_rank)
        local_size = _tasks_here(env, launcher.local_size, node_rank or 0)
        if local_size is None:
            if size > 1 and address not in _LOOPBACK:
                raise WorldError(
                    f"{values_of(env, launcher.rank + launcher.size)}, but nothing says how many of these ranks are on "
                    f"this machine; set {launcher.local_size[0]} and {launcher.local_rank[0]} for each rank (1 and 0 "
                    f"where every rank has a machine of its own), or MASTER_ADDR={_HERE} where all share this one"
                )
            local_size = size
        local_rank = number_in(env, launcher.local_rank)
        if local_rank is None:
            local_rank = rank % local_size
        if not 0 <= local_rank < local_size <= size:
            raise WorldError(
                f"{values_of(env, launcher.size + launcher.local_rank + launcher.local_size)}: the local rank counts "
                "from 0 and stays below the ranks of this machine, which are no more than all ranks; correct them, "
                "or unset them all to run alone"
            )
        nodes = number_in(env, launcher.nodes) or -(-size // local_size)
        if node_rank is None:
            node_rank = min(rank // local_size, nodes - 1)
        return cls(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=node_rank,
            nodes=nodes,
            address=_address(env, launcher, size, nodes),
            port=_port(env, launcher, size),
            launcher=launcher.name,
            **_run(env, launcher),
        )

    def rank_variables(self) -> dict[str, str]:
        """The variables that torchrun would set for this rank, from which `from_env` reads an equal `World`."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            # The number of the node has two names: torchrun's, and the one that other frameworks read.
            "GROUP_RANK": str(self.node_rank),
            "NODE_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }

    def __str__(self) -> str:
        """Such as ``rank 3 of 8, local rank 1 of 2 on node 1 of 4``."""
        node = f", local rank {self.local_rank} of {self.local_size} on node {self.node_rank} of {self.nodes}"
        return f"rank {self.rank} of {self.size}{node if self.nodes > 1 else ''}"


def _tasks_here(env: Environment, names: Names, node_rank: int) -> int | None:
    """The number of ranks on this node, from Slurm's list for all nodes: ``2(x3),1`` is 2, 2, 2, 1."""
    name = first_set(env, names)
    if name is None:
        return None
    try:
        counts = expand_counts(env[name])
    except ValueError:
        raise WorldError(f"{name}={env[name]!r}: it must be a number, or a list such as 2(x3),1") from None
    if len(counts) == 1:
        return counts[0]
    if node_rank >= len(counts):
        raise WorldError(
            f"{name}={env[name]} describes {plural(len(counts), 'node')}, but this is node {node_rank} from 0"
        )
    return counts[node_rank]


def _address(env: Environment, launcher: Launcher, size: int, nodes: int) -> str:
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if nodes == 1:
        return _HERE
    if name := first_set(env, launcher.leader):
        return leading_host(env[name])
    raise WorldError(
        f"{launcher.known_by} started {plural(size, 'rank')} on {plural(nodes, 'node')} but does not say where "
        f"they meet; name the host of rank 0: {launcher.set_variable.format('MASTER_ADDR', 'HOST')}"
    )


def _port(env: Environment, launcher: Launcher, size: int) -> int:
    port = number_in(env, ("MASTER_PORT",))
    if port is not None:
        if not 0 < port < 65536 and size > 1:
            raise WorldError(f"MASTER_PORT={port}: ports lie between 1 and 65535")
        return port
    if size == 1:
        return 0
    if launcher.run_id and (job := _job(env, launcher)):
        # Every rank must compute the same number without asking another rank, and two jobs on a node different numbers.
        return job_port(job)
    raise WorldError(
        f"{launcher.known_by} started {size} ranks but does not say at which port they meet; "
        f"choose a free one for this job: {launcher.set_variable.format('MASTER_PORT', '29500')}"
    )


def leading_host(hosts: str) -> str:
    """The first host of a Slurm node list (of ``n[01-03,7]``, ``n01``), or the host of a ``tcp://`` address.

    Raises:
        WorldError: if ``hosts`` is neither.
    """
    _, scheme, rest = hosts.partition("tcp://")
    if scheme:
        return re.split(r"[,:;]", rest)[0]
    try:
        return expand_hosts(hosts)[0]
    except ValueError as error:
        raise WorldError(f"the host of rank 0 cannot be read: {error}; set MASTER_ADDR to it on every rank") from None


def _job(env: Environment, launcher: Launcher) -> str:
    return ".".join(env[name] for name in launcher.run_id if env.get(name, "") != "")


def _run(env: Environment, launcher: Launcher) -> _Run:
    return {
        "generation": number_in(env, launcher.generation) or 0,
        "run_id": env.get(RUN_ID) or _job(env, launcher),
        "run_dir": env.get(RUN_DIR) or None,
    }
