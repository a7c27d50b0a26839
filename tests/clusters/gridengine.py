"""A private Grid Engine.

    n1   sge_qmaster, sge_execd, and where commands are given      n2, n3   sge_execd

A job on two hosts that starts again needs the third one: see `lockstep.launch.schedulers.grid_engine`. It needs
Debian's gridengine-master, -exec and -client.
"""

from __future__ import annotations

import re
from pathlib import Path

from daemons import Daemons, Kind
from waiting import wait_until

HOSTS = ("n1", "n2", "n3")
LIBRARY = Path("/usr/lib/gridengine")
SHARED = Path("/usr/share/gridengine")

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
    # Between the signal and the kill, for a run to save in; no job that saves waits for it.
    "notify": "00:05:00",
    "load_thresholds": "NONE",
    # The hosts share their file systems, and each removes a job's directory there when its part of the job is over.
    "tmpdir": "/tmp,[n1={here}/tmp-n1],[n2={here}/tmp-n2],[n3={here}/tmp-n3]",
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


def _env(here: Path) -> dict[str, str]:
    return {"SGE_ROOT": str(here), "SGE_CELL": "cell", "SGE_QMASTER_PORT": "6444", "SGE_EXECD_PORT": "6445"}


def _start(engine: Daemons) -> None:
    here, common = engine.here, engine.here / "cell" / "common"
    for directory in (
        common,
        here / "qmaster" / "job_scripts",
        *(here / "execd" / host for host in HOSTS),
        *(here / f"tmp-{host}" for host in HOSTS),
    ):
        directory.mkdir(parents=True)
    for directory in ("bin", "utilbin"):
        (here / directory).mkdir()
        (here / directory / "lx-amd64").symlink_to(LIBRARY)
    (here / "util").symlink_to(SHARED / "util")
    (common / "bootstrap").write_text(BOOTSTRAP.format(here=here, library=LIBRARY))
    (common / "act_qmaster").write_text("n1\n")
    _spool(engine)
    engine.daemon("n1", str(LIBRARY / "sge_qmaster"), SGE_ND="true")
    wait_until(
        lambda: (told := engine("qconf", "-ss")).returncode == 0 or "no submit host" in told.stderr,
        lambda: f"qmaster to answer\n{engine('qconf', '-ss')}\n{engine.logs()}",
    )
    for host in HOSTS:
        engine.must("qconf", "-ah", host)
        engine.must("qconf", "-as", host)
        _from_file(engine, "-Ae", HOST.format(host=host))
    schedule = re.sub(r"(?m)^schedule_interval .*$", "schedule_interval 0:0:1", engine.must("qconf", "-ssconf"))
    schedule = re.sub(r"(?m)^flush_(submit|finish)_sec .*$", r"flush_\1_sec 1", schedule)
    _from_file(engine, "-Msconf", schedule)
    for name, rule in PARALLEL_RULES.items():
        _from_file(engine, "-Ap", PARALLEL.format(name=name, rule=rule))
    queue = re.sub(r"(?m)^hostlist .*$", f"hostlist {' '.join(HOSTS)}", engine.must("qconf", "-sq"))
    queue = re.sub(r"(?m)^qname .*$", "qname all.q", queue)
    for name, value in QUEUE.items():
        queue = re.sub(rf"(?m)^{name} .*$", f"{name} {value.format(here=here)}", queue)
    for host in HOSTS:
        engine.daemon(host, str(LIBRARY / "sge_execd"), SGE_ND="true")
    _from_file(engine, "-Aq", queue)
    wait_until(
        lambda: "-NA-" not in (told := engine("qstat", "-f").stdout) and told.count("lx") == len(HOSTS),
        lambda: f"the queue to open\n{engine('qstat', '-f').stdout}\n{engine.logs()}",
    )


def _spool(engine: Daemons) -> None:
    here = engine.here
    text = (SHARED / "default-configuration").read_text()
    for name, value in CONFIGURATION.items():
        text = re.sub(rf"(?m)^{name}\s.*$", f"{name} {value.format(here=here)}", text)
    (here / "configuration").write_text(text)
    spooled = f"{here}/cell/common;{here}/qmaster"
    for words in (
        (f"{LIBRARY}/spoolinit", "classic", "libspoolc", spooled, "init"),
        (f"{LIBRARY}/spooldefaults", "configuration", f"{here}/configuration"),
        (f"{LIBRARY}/spooldefaults", "complexes", f"{SHARED}/util/resources/centry"),
        (f"{LIBRARY}/spooldefaults", "usersets", f"{SHARED}/util/resources/usersets"),
        (f"{LIBRARY}/spooldefaults", "managers", "root"),
        (f"{LIBRARY}/spooldefaults", "operators", "root"),
    ):
        engine.must(*words)


def _from_file(engine: Daemons, option: str, text: str) -> None:
    file = engine.here / f"qconf{option}"
    file.write_text(text)
    engine.must("qconf", option, str(file))


GRID_ENGINE = Kind(
    title="Grid Engine",
    hosts=len(HOSTS),
    login="n1",
    programs=("sge_qmaster", "sge_execd", "qsub", "qconf", "qdel", "qstat"),
    files=(LIBRARY / "spooldefaults",),
    logs=("qmaster/messages", "execd/*/messages"),
    env=_env,
    start=_start,
)
