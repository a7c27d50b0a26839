"""A private Grid Engine on two hosts (see `benchmarks/hosts.py`), in a directory of its own.

    n1   sge_qmaster, sge_execd, and where commands are given      n2   sge_execd

It needs root, for only then does execd start jobs; and Debian's gridengine-master, -exec and -client.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from hosts import Hosts, why_not
from waiting import wait_until

LIBRARY = Path("/usr/lib/gridengine")
SHARED = Path("/usr/share/gridengine")
PROGRAMS = ("sge_qmaster", "sge_execd", "qsub", "qconf", "qdel", "qstat")

BOOTSTRAP = """\
admin_user              none
default_domain          none
ignore_fqdn             true
spooling_method         classic
spooling_lib            libspoolc
spooling_params         {here}/cell/common;{here}/qmaster
binary_path             {library}
qmaster_spool_dir       {here}/qmaster
security_mode           none
listener_threads        2
worker_threads          2
scheduler_threads       1
"""

#: Over the distribution's defaults.
CONFIGURATION = {
    "execd_spool_dir": "{here}/execd",
    "min_uid": "0",
    "min_gid": "0",
    "mailer": "/bin/true",
    "shell_start_mode": "unix_behavior",
    "load_report_time": "00:00:01",
    "administrator_mail": "none",
    "execd_params": "ENABLE_ADDGRP_KILL=TRUE",
}

QUEUE = {
    "shell": "/bin/bash",
    "slots": "8",
    "pe_list": "lockstep spread",
    "rerun": "TRUE",
    "notify": "00:01:00",
    "load_thresholds": "NONE",
    # The hosts share their file systems, and each removes a job's directory there when its part of the job is over.
    "tmpdir": "/tmp,[n2={here}/tmp-n2]",
}

HOST = """\
hostname {host}
load_scaling NONE
complex_values NONE
user_lists NONE
xuser_lists NONE
projects NONE
xprojects NONE
usage_scaling NONE
report_variables NONE
"""

#: By name: where the slots of a job lie.
PARALLEL_RULES = {"lockstep": "$pe_slots", "spread": "1"}

PARALLEL = """\
pe_name            {name}
slots              999
user_lists         NONE
xuser_lists        NONE
start_proc_args    /bin/true
stop_proc_args     /bin/true
allocation_rule    {rule}
control_slaves     TRUE
job_is_first_task  FALSE
urgency_slots      min
accounting_summary FALSE
qsort_args         NONE
"""


def missing() -> list[str]:
    """What this machine lacks for a Grid Engine of its own; nothing, if it can have one."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    absent += [] if (LIBRARY / "spooldefaults").exists() else [str(LIBRARY / "spooldefaults")]
    return absent or [why for why in [why_not()] if why]


@dataclass
class GridEngine:
    """Daemons that run until `stop`; commands are given with `__call__`."""

    here: Path
    machines: Hosts
    daemons: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """For the commands that speak to this Grid Engine."""
        return {
            "SGE_ROOT": str(self.here),
            "SGE_CELL": "cell",
            "SGE_QMASTER_PORT": "6444",
            "SGE_EXECD_PORT": "6445",
        }

    def start(self) -> None:
        """Return when a queue takes jobs."""
        hosts = sorted(self.machines.up)
        common = self.here / "cell" / "common"
        for directory in (
            common,
            self.here / "qmaster" / "job_scripts",
            *(self.here / "execd" / host for host in hosts),
        ):
            directory.mkdir(parents=True)
        for directory in ("bin", "utilbin"):
            (self.here / directory).mkdir()
            (self.here / directory / "lx-amd64").symlink_to(LIBRARY)
        (self.here / "tmp-n2").mkdir()
        (self.here / "util").symlink_to(SHARED / "util")
        (common / "bootstrap").write_text(BOOTSTRAP.format(here=self.here, library=LIBRARY))
        (common / "act_qmaster").write_text("n1\n")
        self._spool()
        self._daemon("n1", "sge_qmaster")
        wait_until(lambda: self("qconf", "-ss").returncode == 0 or "no submit host" in self("qconf", "-ss").stderr,
               lambda: f"qmaster to answer\n{self('qconf', '-ss')}\n{self.logs()}")  # fmt: skip
        for host in hosts:
            self.must("qconf", "-ah", host)
            self.must("qconf", "-as", host)
            self._from_file("-Ae", HOST.format(host=host))
        schedule = re.sub(r"(?m)^schedule_interval .*$", "schedule_interval 0:0:1", self.must("qconf", "-ssconf"))
        schedule = re.sub(r"(?m)^flush_(submit|finish)_sec .*$", r"flush_\1_sec 1", schedule)
        self._from_file("-Msconf", schedule)
        for name, rule in PARALLEL_RULES.items():
            self._from_file("-Ap", PARALLEL.format(name=name, rule=rule))
        queue = re.sub(r"(?m)^hostlist .*$", f"hostlist {' '.join(hosts)}", self.must("qconf", "-sq"))
        queue = re.sub(r"(?m)^qname .*$", "qname all.q", queue)
        for name, value in QUEUE.items():
            queue = re.sub(rf"(?m)^{name} .*$", f"{name} {value.format(here=self.here)}", queue)
        for host in hosts:
            self._daemon(host, "sge_execd")
        self._from_file("-Aq", queue)
        wait_until(
            lambda: "-NA-" not in (told := self("qstat", "-f").stdout) and told.count("lx") == len(hosts),
            lambda: f"the queue to open\n{self('qstat', '-f').stdout}\n{self.logs()}",
        )

    def __call__(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Give a command, such as ``engine("qstat")``."""
        given = self.machines["n1"].start(
            words, cwd=self.here, env={**os.environ, **self.env, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = given.communicate(timeout=60)
        return subprocess.CompletedProcess(words, given.returncode, out, err)

    def must(self, *words: str) -> str:
        """As `__call__`; what it printed. It must succeed."""
        done = self(*words)
        assert done.returncode == 0, f"{words}: {done}"
        return done.stdout

    def logs(self) -> str:
        """What the daemons wrote."""
        files = [*self.here.glob("*.out"), *self.here.glob("qmaster/messages"), *self.here.glob("execd/*/messages")]
        return "\n".join(f"{file.name}: {file.read_text()[-2000:]}" for file in files)

    def stop(self) -> None:
        """End all jobs, then all daemons; those that stay go with their hosts."""
        self("qdel", "-f", "-u", "*")
        self("qconf", "-kej")
        self("qconf", "-km")
        for daemon in self.daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(15)

    def _spool(self) -> None:
        settings = {name: value.format(here=self.here) for name, value in CONFIGURATION.items()}
        text = (SHARED / "default-configuration").read_text()
        for name, value in settings.items():
            text = re.sub(rf"(?m)^{name}\s.*$", f"{name} {value}", text)
        (self.here / "configuration").write_text(text)
        spooled = f"{self.here}/cell/common;{self.here}/qmaster"
        for words in (
            (f"{LIBRARY}/spoolinit", "classic", "libspoolc", spooled, "init"),
            (f"{LIBRARY}/spooldefaults", "configuration", f"{self.here}/configuration"),
            (f"{LIBRARY}/spooldefaults", "complexes", f"{SHARED}/util/resources/centry"),
            (f"{LIBRARY}/spooldefaults", "usersets", f"{SHARED}/util/resources/usersets"),
            (f"{LIBRARY}/spooldefaults", "managers", "root"),
            (f"{LIBRARY}/spooldefaults", "operators", "root"),
        ):
            self.must(*words)

    def _from_file(self, option: str, text: str) -> None:
        file = self.here / f"qconf{option}"
        file.write_text(text)
        self.must("qconf", option, str(file))

    def _daemon(self, host: str, name: str) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SGE_", "LOCKSTEP_"))}
        with (self.here / f"{name}-{host}.out").open("w") as out:
            self.daemons.append(
                self.machines[host].start(
                    [str(LIBRARY / name)],
                    cwd=self.here,
                    env={**env, **self.env, "SGE_ND": "true"},
                    stdout=out,
                    stderr=out,
                )
            )
