"""A private Slurm on hosts of its own (see `benchmarks/hosts.py`), in a directory of its own.

    n1   munged, slurmctld, slurmd      n2   slurmd      n3   a login node, where commands are given

The names of the nodes are as on Debian: each stands for its own loopback there. It needs root, for only then does
slurmd start jobs; and Debian's slurm-wlm.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from hosts import Hosts, why_not
from waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")

CONF = """\
ClusterName=lockstep
SlurmctldHost=n1({address})
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
    return absent or [why for why in [why_not()] if why]


@dataclass
class Slurm:
    """Daemons that run until `stop`; commands are given with `__call__`."""

    here: Path
    machines: Hosts
    nodes: tuple[str, ...] = ("n1", "n2")
    cpus: int = 4
    daemons: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """For the commands that speak to this Slurm."""
        return {"SLURM_CONF": str(self.here / "slurm.conf")}

    def start(self) -> None:
        """Return when all nodes are idle."""
        munge = self.here / "munge"
        for directory in (munge, self.here / "state"):
            directory.mkdir(parents=True)
        (munge / "key").write_bytes(secrets.token_bytes(64))
        (munge / "key").chmod(0o600)
        # munged refuses a socket that others cannot reach.
        munge.chmod(0o755)
        for name in self.nodes:
            self.machines[name].like_debian()
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={self.machines[name].address} CPUs={self.cpus} RealMemory=1000 State=UNKNOWN"
            for name in self.nodes
        )
        address = self.machines["n1"].address
        (self.here / "slurm.conf").write_text(CONF.format(here=self.here, address=address, nodes=nodes))
        self._daemon(
            "n1", "munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        wait_until((munge / "socket").exists, "munged to open its socket")
        self._daemon("n1", "slurmctld", "-D", "-c", "-f", str(self.here / "slurm.conf"))
        for name in self.nodes:
            (self.here / f"spool-{name}").mkdir()
            self._daemon(name, "slurmd", "-D", "-N", name, "-f", str(self.here / "slurm.conf"))
        wait_until(lambda: self.idle() == len(self.nodes), lambda: f"all nodes to be idle\n{self.logs()}")

    def __call__(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Give a Slurm command, such as ``slurm("squeue")``."""
        given = self.machines["n3"].start(
            words, cwd=self.here, env={**os.environ, **self.env, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = given.communicate(timeout=120)
        return subprocess.CompletedProcess(words, given.returncode, out, err)

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
        # The daemons go with their hosts.

    def _daemon(self, host: str, *words: str) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "LOCKSTEP_"))}
        with (self.here / f"{words[0]}-{host}.out").open("w") as out:
            self.daemons.append(
                self.machines[host].start(words, env={**env, **self.env}, cwd=self.here, stdout=out, stderr=out)
            )
