"""PBS: its nodes are known, and the user starts the launchers of the other nodes.

It was not tried on a real machine, so it does no more than this: no job script, no end of the job, no requeue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.launch.schedulers.scheduler import (
    Allocation,
    Read,
    Scheduler,
    StartCommand,
    launcher_argv,
    merge_nodes,
)


class Pbs(Scheduler):
    """Jobs of PBS' ``qsub``."""

    name = "pbs"
    title = "PBS"

    def detect(self, env: Mapping[str, str]) -> bool:
        """Detected by the job's number and the file of its nodes."""
        return bool(env.get("PBS_JOBID") and env.get("PBS_NODEFILE"))

    def allocation(self, env: Mapping[str, str], read: Read) -> Allocation:
        """The file names a node once for each slot."""
        hosts = [line.strip() for line in read(env["PBS_NODEFILE"]).splitlines()]
        return Allocation(self, env["PBS_JOBID"], merge_nodes([(host, 1) for host in hosts if host]))

    def start_commands(
        self, given: Allocation, launcher: Sequence[str], *, endpoint: str, directory: str
    ) -> list[StartCommand]:
        """The first node's launcher starts here; the others are left to a user who can reach their nodes."""
        argv = tuple(launcher_argv(given, launcher, endpoint))
        return [StartCommand(node.name, argv, by_user=number > 0) for number, node in enumerate(given.nodes)]
