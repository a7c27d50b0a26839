"""A private Slurm: real daemons on ports and in a directory of their own, and several nodes on this one machine.

    munged ── slurmctld ──┬── slurmd -N node1
                          └── slurmd -N node2

It needs root, for only then does slurmd start jobs; and Debian's slurm-wlm, which allows several slurmd on a machine.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")

CONF = """\
ClusterName=lockstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job may start again no sooner than its credentials expire, which is after two minutes otherwise.
AuthInfo=socket={here}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool-%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd-%n.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=1,sched_interval=1,bf_interval=1
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobRequeue=1
ReturnToService=2
KillWait=10
OverTimeLimit=0
PropagateResourceLimits=NONE
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """What this machine lacks for a Slurm of its own; nothing, if it can have one."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return absent or ([] if os.geteuid() == 0 else ["root"])


@dataclass
class Slurm:
    """Daemons that run until `stop`; commands are given with `__call__`."""

    here: Path
    nodes: int = 2
    cpus: int = 4
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """For the commands that speak to this Slurm."""
        return {"SLURM_CONF": str(self.here / "slurm.conf")}

    def start(self) -> None:
        """Return when all nodes are idle."""
        host = socket.gethostname().partition(".")[0]
        ports = _free_ports(self.nodes + 1)
        munge = self.here / "munge"
        for directory in (munge, self.here / "state"):
            directory.mkdir(parents=True)
        (munge / "key").write_bytes(secrets.token_bytes(64))
        (munge / "key").chmod(0o600)
        # munged refuses a socket that others cannot reach.
        munge.chmod(0o755)
        nodes = "\n".join(
            f"NodeName=node{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[number]} CPUs={self.cpus} "
            "RealMemory=1000 State=UNKNOWN"
            for number in range(1, self.nodes + 1)
        )
        (self.here / "slurm.conf").write_text(CONF.format(here=self.here, host=host, ports=ports, nodes=nodes))
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        wait_until((munge / "socket").exists, "munged to open its socket")
        self._daemon("slurmctld", "-D", "-c", "-f", str(self.here / "slurm.conf"))
        for number in range(1, self.nodes + 1):
            (self.here / f"spool-node{number}").mkdir()
            self._daemon("slurmd", "-D", "-N", f"node{number}", "-f", str(self.here / "slurm.conf"))
        wait_until(lambda: self.idle() == self.nodes, lambda: f"all nodes to be idle\n{self.logs()}")

    def __call__(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Give a Slurm command, such as ``slurm("squeue")``."""
        return subprocess.run(
            words, env={**os.environ, **self.env, **env}, capture_output=True, text=True, timeout=60, cwd=self.here
        )

    def must(self, *words: str) -> str:
        """As `__call__`; what it printed. It must succeed."""
        done = self(*words)
        assert done.returncode == 0, f"{words}: {done}"
        return done.stdout

    def idle(self) -> int:
        """How many nodes wait for work."""
        return len(self("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").stdout.split())

    def state(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` says, by name."""
        words = self("scontrol", "show", "job", job, "--oneliner").stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def logs(self) -> str:
        """The end of what each daemon wrote."""
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in self.here.glob("*.log"))

    def stop(self) -> None:
        """End all jobs, then all daemons."""
        self("scancel", "--user=root")
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not self("squeue", "-h").stdout.strip(), "all jobs to end", deadline_s=25)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _daemon(self, *words: str) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "LOCKSTEP_"))}
        out = (self.here / f"{words[0]}-{len(self.daemons)}.out").open("w")
        with out:
            self.daemons.append(
                subprocess.Popen(words, env={**env, **self.env}, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                 cwd=self.here, preexec_fn=_die_with_parent)  # noqa: PLW1509
            )  # fmt: skip


def _die_with_parent() -> None:
    """A test session that is killed leaves no daemon."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
