"""A private Slurm.

    n1   munged, slurmctld, slurmd      n2   slurmd      n3   a login node, where commands are given

The names of the nodes are as on Debian: each stands for its own loopback there. It needs Debian's slurm-wlm.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from daemons import Daemons, Kind
from waiting import wait_until

NODES = ("n1", "n2")
CPUS = 4

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


def idle(slurm: Daemons) -> int:
    """How many nodes wait for work."""
    return len(slurm("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").stdout.split())


def job_state(slurm: Daemons, job: str) -> dict[str, str]:
    """What ``scontrol show job`` says, by name."""
    words = slurm("scontrol", "show", "job", job, "--oneliner").stdout.split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def _env(here: Path) -> dict[str, str]:
    return {"SLURM_CONF": str(here / "slurm.conf")}


def _start(slurm: Daemons) -> None:
    here, munge, conf = slurm.here, slurm.here / "munge", str(slurm.here / "slurm.conf")
    for directory in (munge, here / "state", *(here / f"spool-{name}" for name in NODES)):
        directory.mkdir(parents=True)
    (munge / "key").write_bytes(secrets.token_bytes(64))
    (munge / "key").chmod(0o600)
    # munged refuses a socket that others cannot reach.
    munge.chmod(0o755)
    for name in NODES:
        slurm.machines[name].like_debian()
    nodes = "\n".join(
        f"NodeName={name} NodeAddr={slurm.machines[name].address} CPUs={CPUS} RealMemory=1000 State=UNKNOWN"
        for name in NODES
    )
    Path(conf).write_text(CONF.format(here=here, address=slurm.machines["n1"].address, nodes=nodes))
    slurm.daemon(
        "n1", "munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
        f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
    )  # fmt: skip
    wait_until((munge / "socket").exists, lambda: f"munged to open its socket\n{slurm.logs()}")
    slurm.daemon("n1", "slurmctld", "-D", "-c", "-f", conf)
    for name in NODES:
        slurm.daemon(name, "slurmd", "-D", "-N", name, "-f", conf)
    wait_until(lambda: idle(slurm) == len(NODES), lambda: f"all nodes to be idle\n{slurm.logs()}")


SLURM = Kind(
    title="Slurm",
    hosts=3,
    login="n3",
    programs=("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel"),
    files=(),
    logs=("*.log",),
    env=_env,
    start=_start,
)
