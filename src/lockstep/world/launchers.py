"""The launchers that may have started this process, and the variables in which each tells the rank.

The rows of `LAUNCHERS` are in order of precedence: a launcher that runs inside another launcher comes first. ``mpirun``
and ``torchrun`` may run inside a Slurm step, whose variables then count their helper processes; the other way round
does not happen. ``RANK`` and ``WORLD_SIZE`` set by hand come last, and must not contradict a launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.errors import WorldError
from lockstep.launch_contract import GENERATION, LAUNCHER, RUN_ID
from lockstep.slurm_syntax import FIRST_SPECIAL_STEP

Environment = Mapping[str, str]
Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Launcher:
    """The variables in which a launcher tells a process its rank: each value is the first variable that is set."""

    name: str
    known_by: str  #: for messages: what started the process
    present: Callable[[Environment], bool]
    rank: Names = ()  #: empty: the process is no rank, though a scheduler gave it resources
    size: Names = ()
    local_rank: Names = ()
    local_size: Names = ()
    node_rank: Names = ()
    nodes: Names = ()
    generation: Names = ()
    run_id: Names = ()  #: together they name the run, with equal words on all its ranks
    leader: Names = ()  #: give the leader's host: a node list, or an address to call back
    set_variable: str = "export {0}={1}"  #: how a user sets a variable for all ranks


def _all_of(*names: str) -> Callable[[Environment], bool]:
    return lambda env: all(env.get(name, "") != "" for name in names)


def _in_slurm_step(env: Environment) -> bool:
    """Whether ``srun`` started this process as one of several tasks.

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


def find_launcher(env: Environment) -> Launcher:
    """The launcher's row: named by the user, or the first row that is present and not contradicted.

    Raises:
        WorldError: if no such row exists, or the environment contradicts it.
    """
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
    rank, size = rank_and_size(env, found.rank, found.size)
    if number_in(env, ("RANK",)) in (None, rank) and number_in(env, ("WORLD_SIZE",)) in (None, size):
        return
    by_hand = ("RANK", "WORLD_SIZE")
    raise WorldError(
        f"two launchers contradict each other: {values_of(env, by_hand)} is in the environment, but "
        f"{found.known_by} says {values_of(env, found.rank + found.size)}; unset RANK and WORLD_SIZE (a shell "
        f"profile or job script may export them), or say which one is right: {LAUNCHER}={found.name} or "
        f"{LAUNCHER}=generic"
    )


def rank_and_size(env: Environment, rank: Names, size: Names) -> tuple[int, int]:
    """The rank and the number of ranks.

    Raises:
        WorldError: if the two numbers are missing or contradict each other.
    """
    place, of = number_in(env, rank), number_in(env, size)
    if place is None or of is None or not 0 <= place < of:
        raise WorldError(
            f"{values_of(env, rank + size)}: the rank counts from 0 and stays below the number of ranks; "
            "correct them, or unset both to run alone"
        )
    return place, of


def first_set(env: Environment, names: Names) -> str | None:
    """The value of the first of ``names`` that is set; None if none is."""
    return next((name for name in names if env.get(name, "") != ""), None)


def number_in(env: Environment, names: Names) -> int | None:
    """The value of the first of ``names`` that is set, as a number; None if none is.

    Raises:
        WorldError: if the value is no whole number.
    """
    name = first_set(env, names)
    if name is None:
        return None
    try:
        return int(env[name])
    except ValueError:
        raise WorldError(f"{name}={env[name]!r}: it must be a whole number; correct it, or unset it") from None


def values_of(env: Environment, names: Names) -> str:
    """The set variables among ``names`` with their values, for messages."""
    return " ".join(f"{name}={env[name]}" for name in names if env.get(name, "") != "")
