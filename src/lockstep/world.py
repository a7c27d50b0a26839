"""Which rank this process is, no matter which launcher started it; the only reader of rank variables.

    lockstep run ─┐
    torchrun ─────┤
    mpirun, srun ─┼──  environment  ──  LAUNCHERS (first row that is present)  ──  World
    a shell ──────┤
    nothing ──────┘

The rows of `LAUNCHERS` are in order of precedence: a launcher that runs inside another one comes before it. ``mpirun``
and ``torchrun`` may run inside a Slurm step, whose variables then count their helper processes; the other way round
does not happen. ``RANK`` and ``WORLD_SIZE`` set by hand come last, and must not contradict a launcher.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypedDict

from lockstep.errors import WorldError
from lockstep.formatting import plural
from lockstep.launch_contract import GENERATION, LAUNCHER, RUN_DIR, RUN_ID, job_port
from lockstep.slurm_syntax import FIRST_SPECIAL_STEP, expand_counts, expand_hosts

_HERE = "127.0.0.1"
_LOOPBACK = frozenset({_HERE, "localhost", "::1"})

Environment = Mapping[str, str]
Names = tuple[str, ...]


class _Run(TypedDict):
    generation: int
    run_id: str
    run_dir: str | None


@dataclass(frozen=True, slots=True)
class World:
    """One rank's place among all ranks.

    Raises:
        WorldError: if the numbers describe no rank of a world.
    """

    rank: int
    size: int  #: ranks in the world
    local_rank: int  #: among the ranks of this node
    local_size: int  #: ranks of this node
    node_rank: int
    nodes: int
    generation: int = 0  #: how many worlds this run had before this one
    address: str = _HERE  #: host of the leader
    port: int = 0  #: at which the ranks meet on that host; 0 if there is only one rank
    launcher: str = "none"  #: the row of `LAUNCHERS` that this was read from
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
        """Whether this rank does what is to be done once on each node."""
        return self.local_rank == 0

    @classmethod
    def from_env(cls, env: Environment) -> World:
        """The rank that the environment says this process is; a world of one rank if it names none.

        Where a launcher does not say which node it is, consecutive ranks are assumed to share one.

        Raises:
            WorldError: if the variables contradict each other, hold no usable numbers, or do not say where to meet.
        """
        launcher = _believed(env)
        if not launcher.rank:
            return cls(0, 1, 0, 1, 0, 1, launcher=launcher.name, **_run(env, launcher))
        rank, size = _place(env, launcher.rank, launcher.size)
        address = env.get("MASTER_ADDR", "")
        node_rank = number_in(env, launcher.node_rank)
        local_size = _tasks_here(env, launcher.local_size, node_rank or 0)
        if local_size is None:
            if size > 1 and address not in _LOOPBACK:
                raise WorldError(
                    f"{_said(env, launcher.rank + launcher.size)}, but nothing says how many of these ranks are on "
                    f"this machine; set {launcher.local_size[0]} and {launcher.local_rank[0]} for each rank (1 and 0 "
                    f"where every rank has a machine of its own), or MASTER_ADDR={_HERE} where all share this one"
                )
            local_size = size
        local_rank = number_in(env, launcher.local_rank)
        if local_rank is None:
            local_rank = rank % local_size
        if not 0 <= local_rank < local_size <= size:
            raise WorldError(
                f"{_said(env, launcher.size + launcher.local_rank + launcher.local_size)}: the local rank counts "
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
        """The variables that torchrun would set for this rank; `from_env` reads the same `World` from them."""
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


@dataclass(frozen=True, slots=True)
class Launcher:
    """How one launcher tells a process which rank it is: each value is the first of its variables that is set."""

    name: str
    known_by: str  #: for messages: what started the process
    present: Callable[[Environment], bool]
    rank: Names = ()  #: none: the process is no rank, though a scheduler gave it resources
    size: Names = ()
    local_rank: Names = ()
    local_size: Names = ()
    node_rank: Names = ()
    nodes: Names = ()
    generation: Names = ()
    run_id: Names = ()  #: together they name the run, in words that are the same on all its ranks
    leader: Names = ()  #: hold the leader's host: a node list, or an address to call back
    set_variable: str = "export {0}={1}"  #: how a user sets a variable for all ranks


def _all_of(*names: str) -> Callable[[Environment], bool]:
    return lambda env: all(env.get(name, "") != "" for name in names)


def _in_slurm_step(env: Environment) -> bool:
    """Whether ``srun`` started this process as one of several.

    A batch script sees ``SLURM_PROCID=0`` and ``SLURM_NTASKS=n`` too, but runs once; the step of one task under an
    interactive shell also stays one process, whatever the allocation could hold.
    """
    step = number_in(env, ("SLURM_STEP_ID",))
    tasks = number_in(env, _SLURM_TASKS)
    return step is not None and step < FIRST_SPECIAL_STEP and tasks is not None and tasks > 1


_SLURM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_SCHEDULER_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
_SLURM_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_JOB_NODES = ("SLURM_JOB_NODELIST",)

LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(
        name="lockstep",
        known_by="lockstep run",
        present=_all_of(RUN_ID, "RANK", "WORLD_SIZE"),
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK", "NODE_RANK"),
        nodes=("GROUP_WORLD_SIZE",),
        generation=(GENERATION,),
        run_id=(RUN_ID,),
    ),
    Launcher(
        name="torchrun",
        known_by="torchrun",
        present=_all_of("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"),
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK", "NODE_RANK"),
        nodes=("GROUP_WORLD_SIZE",),
        generation=("TORCHELASTIC_RESTART_COUNT",),
        run_id=("TORCHELASTIC_RUN_ID",),
    ),
    Launcher(
        name="openmpi",
        known_by="Open MPI's mpirun",
        present=_all_of("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        # Not OMPI_COMM_WORLD_NODE_RANK: in spite of its name it counts ranks within the node.
        nodes=("OMPI_MCA_orte_num_nodes",),
        run_id=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", *_SCHEDULER_JOB),
        # The allocation's list first: mpirun itself may run on a login node, outside the world.
        leader=(*_JOB_NODES, "OMPI_MCA_orte_hnp_uri"),
        set_variable="mpirun -x {0}={1}",
    ),
    Launcher(
        name="mvapich2",
        known_by="MVAPICH2's mpirun_rsh",
        present=_all_of("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
        rank=("MV2_COMM_WORLD_RANK",),
        size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
        run_id=_SCHEDULER_JOB,
        leader=_JOB_NODES,
        set_variable="mpirun_rsh ... {0}={1} python ...",
    ),
    Launcher(
        name="pals",
        known_by="PALS' mpiexec",
        present=_all_of("PALS_RANKID", "PMI_SIZE"),
        rank=("PALS_RANKID",),
        size=("PMI_SIZE",),
        local_rank=("PALS_LOCAL_RANKID",),
        local_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        node_rank=("PALS_NODEID",),
        run_id=("PALS_APID", *_SCHEDULER_JOB),
        set_variable="mpiexec --env {0}={1}",
    ),
    Launcher(
        # ``srun --mpi=pmi2`` sets PMI_RANK and PMI_SIZE as well, but not MPI_LOCALRANKID.
        name="hydra",
        known_by="the mpiexec of MPICH or Intel MPI",
        present=_all_of("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
        run_id=_SCHEDULER_JOB,
        leader=_JOB_NODES,
        set_variable="mpiexec -genv {0} {1}",
    ),
    Launcher(
        name="slurm",
        known_by="srun",
        present=_in_slurm_step,
        rank=("SLURM_PROCID",),
        size=_SLURM_TASKS,
        local_rank=("SLURM_LOCALID",),
        local_size=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        node_rank=("SLURM_NODEID",),
        nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        generation=("SLURM_RESTART_COUNT",),
        run_id=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        leader=_SLURM_NODES,
    ),
    Launcher(
        name="generic",
        known_by="RANK and WORLD_SIZE",
        present=_all_of("RANK", "WORLD_SIZE"),
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        node_rank=("NODE_RANK", "GROUP_RANK", "CROSS_RANK"),
        nodes=("GROUP_WORLD_SIZE", "CROSS_SIZE"),
    ),
    # From here on: a scheduler gave resources to one process, which may start ranks but is not a rank.
    Launcher("slurm-job", "a Slurm job without srun", _all_of("SLURM_JOB_ID"), generation=("SLURM_RESTART_COUNT",)),
    Launcher("sge-job", "a Grid Engine job", _all_of("JOB_ID", "SGE_ROOT", "QUEUE")),
    Launcher("pbs-job", "a PBS job", _all_of("PBS_JOBID", "PBS_NODEFILE")),
    Launcher("none", "no launcher", lambda env: True),
)
_BY_NAME = {launcher.name: launcher for launcher in LAUNCHERS}


def _believed(env: Environment) -> Launcher:
    """The row to read: the one that the user named, or the first one that is present and not contradicted."""
    if named := env.get(LAUNCHER, ""):
        if named not in _BY_NAME:
            raise WorldError(f"{LAUNCHER}={named}: there is no such launcher; give one of {', '.join(_BY_NAME)}")
        if not _BY_NAME[named].present(env):
            raise WorldError(
                f"{LAUNCHER}={named}, but this process was not started by {_BY_NAME[named].known_by}; unset it"
            )
        return _BY_NAME[named]
    found = next(launcher for launcher in LAUNCHERS if launcher.present(env))
    if not found.rank:
        _no_half_a_place(env)
    elif found.rank != ("RANK",):
        _no_contradiction(env, found)
    return found


def _no_half_a_place(env: Environment) -> None:
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if env.get(name, "") != "":
            raise WorldError(f"{name}={env[name]} is set but {other} is not; set both, or unset {name} to run alone")


def _no_contradiction(env: Environment, found: Launcher) -> None:
    rank, size = _place(env, found.rank, found.size)
    if number_in(env, ("RANK",)) in (None, rank) and number_in(env, ("WORLD_SIZE",)) in (None, size):
        return
    by_hand = ("RANK", "WORLD_SIZE")
    raise WorldError(
        f"two launchers contradict each other: {_said(env, by_hand)} is in the environment, but "
        f"{found.known_by} says {_said(env, found.rank + found.size)}; unset RANK and WORLD_SIZE (a shell profile or "
        f"job script may export them), or say which one is meant: {LAUNCHER}={found.name} or {LAUNCHER}=generic"
    )


def _place(env: Environment, rank: Names, size: Names) -> tuple[int, int]:
    place, of = number_in(env, rank), number_in(env, size)
    if place is None or of is None or not 0 <= place < of:
        raise WorldError(
            f"{_said(env, rank + size)}: the rank counts from 0 and stays below the number of ranks; "
            "correct them, or unset both to run alone"
        )
    return place, of


def _first_set(env: Environment, names: Names) -> str | None:
    return next((name for name in names if env.get(name, "") != ""), None)


def number_in(env: Environment, names: Names) -> int | None:
    """The first of these variables that is set, as a number; None if none is."""
    name = _first_set(env, names)
    if name is None:
        return None
    try:
        return int(env[name])
    except ValueError:
        raise WorldError(f"{name}={env[name]!r}: it must be a whole number; correct it, or unset it") from None


def _tasks_here(env: Environment, names: Names, node_rank: int) -> int | None:
    """Ranks of this node, where Slurm writes those of all nodes: ``2(x3),1`` is 2, 2, 2, 1."""
    name = _first_set(env, names)
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
    if name := _first_set(env, launcher.leader):
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
        # Every rank must compute the same number without asking another one, and two jobs on a node different ones.
        return job_port(job)
    raise WorldError(
        f"{launcher.known_by} started {size} ranks but does not say at which port they meet; "
        f"choose a free one for this job: {launcher.set_variable.format('MASTER_PORT', '29500')}"
    )


def leading_host(hosts: str) -> str:
    """The first host of a Slurm node list, ``n[01-03,7]`` is ``n01``, or that of a ``tcp://`` address.

    Raises:
        WorldError: if it is neither.
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


def _said(env: Environment, names: Names) -> str:
    """These variables as they are set, for messages."""
    return " ".join(f"{name}={env[name]}" for name in names if env.get(name, "") != "")
