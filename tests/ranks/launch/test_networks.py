"""Ranks find the way to each other on networks as they are: several interfaces and families, names of the loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from hosts import hosts, why_not
from waiting import wait_until

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts"),
    pytest.mark.timeout(290),
]

#: For what takes five seconds on an idle machine: two launchers, a store and two ranks load torch.
DEADLINE_S = 250
SOURCE = str(Path(lockstep.__file__).parents[1])

#: Adds one of each rank, and leaves the sum, and by which interface the ranks spoke.
MEET = """
import json, os, sys
from pathlib import Path
import torch
import lockstep

with lockstep.Run() as run:
    total = int(run.sum(torch.ones(1)))
    told = json.dumps([total, os.environ.get("GLOO_SOCKET_IFNAME", "")])
    Path(sys.argv[1], f"rank-{run.rank}").write_text(told)
"""

#: A rank is killed once nobody knows a name any more.
NAMES_GO = """
import json, os, signal, socket, sys, time
from pathlib import Path
import torch
import lockstep

here = Path(sys.argv[1])
with lockstep.Run() as run:
    model = run.model(torch.nn.Linear(2, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = run.loader(torch.ones(8, 2), global_batch=4, micro_batch=2, workers=0)
    for epoch in run.epochs(3):
        for batch in run.train(batches):
            run.step(model(batch).square().mean())
        if run.world.generation == 0 and epoch == 1:
            (here / f"trained-{run.rank}").write_text("")
            while not (here / "gone").exists():
                time.sleep(0.05)
            try:
                socket.getaddrinfo("n1", 1)
            except socket.gaierror:
                (here / f"unknown-{run.rank}").write_text("")
            run.barrier()
            if run.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    told = json.dumps([run.progress.step, run.world.generation])
    (here / f"rank-{run.rank}").write_text(told)
"""

NO_IPV6 = "sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.lo.disable_ipv6=1"


def start(machines, here, name, *words, **env):
    """Start Python with these words on a host; what it prints goes into NAME.txt."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("LOCKSTEP_R", "OMP_"))}
    with (here / f"{name}.txt").open("w") as out:
        return machines[name].start(
            [sys.executable, *map(str, words)],
            cwd=here,
            env={**own, "PYTHONPATH": SOURCE, "PYTHONUNBUFFERED": "1", **env},
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def launch(machines, here, name, endpoint, *options, script="meet.py"):
    words = ("-m", "lockstep", "run", "--nproc-per-node", 1, "--nnodes", 2, "--rdzv-endpoint", endpoint)
    conf = f"join_timeout={DEADLINE_S - 30}"
    return start(machines, here, name, *words, "--rdzv-conf", conf, "--run-dir", "r", *options, script, here)


def met(here, started):
    """What both ranks have left, once they have ended well."""

    def said():
        return "\n".join(f"{file.name}: {file.read_text()}" for file in sorted(here.rglob("*.txt")))

    wait_until(lambda: None not in [each.poll() for each in started], said, deadline_s=DEADLINE_S)
    assert [each.returncode for each in started] == [0, 0], said()
    return [json.loads((here / f"rank-{rank}").read_text()) for rank in range(2)]


@pytest.fixture
def here(tmp_path):
    (tmp_path / "meet.py").write_text(MEET)
    return tmp_path


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("names", "commands", "endpoint", "interface"),
    [
        ({}, {"n1": NO_IPV6, "n2": NO_IPV6}, "n1:29400", "eth0"),
        (
            {"n1": "127.0.0.1 localhost\nfd77::1 n1\n10.77.0.1 n1\n", "n2": "127.0.0.1 localhost\n10.77.0.1 n1\n"},
            {"n1": "ip address add fd77::1/64 dev eth0 nodad", "n2": NO_IPV6},
            "n1:29400",
            "eth0",
        ),
        (
            {"n2": "127.0.0.1 localhost\nfd99::1 n1\n10.77.0.1 n1\n"},
            {"n2": "ip address add fd99::2/64 dev fast0 nodad"},
            "n1:29400",
            "eth0",
        ),
        ({}, {}, "10.88.0.1:29400", "fast0"),
        ({}, {}, "[fe80::ff:fe00:1%eth0]:29400", "eth0"),
    ],
    ids=["no ipv6", "two families", "a family that leads nowhere", "two networks", "link-local"],
)
def test_ranks_take_the_interface_that_leads_to_the_endpoint(here, names, commands, endpoint, interface):
    with hosts(2) as machines:
        for number in (1, 2):
            machines[f"n{number}"].plug("fast0", f"10.88.0.{number}/24")
            machines[f"n{number}"].like_debian()
        for name, text in names.items():
            machines[name].hosts_file.write_text(text)
        for name, line in commands.items():
            machines[name].run("sh", "-c", line)
        assert met(here, [launch(machines, here, name, endpoint) for name in ("n2", "n1")]) == 2 * [[2, interface]]


@pytest.mark.campaign
def test_ranks_of_another_launcher_do_so_too(here):
    """Gloo by itself would use the address of the host's own name."""
    with hosts(2) as machines:
        for machine in machines.up.values():
            machine.like_debian()
        place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "n1"}
        started = [
            start(machines, here, f"n{rank + 1}", "meet.py", here, RANK=str(rank), MASTER_PORT="29500", **place)
            for rank in range(2)
        ]
        assert met(here, started) == 2 * [[2, "eth0"]]


@pytest.mark.campaign
def test_names_that_cannot_be_resolved_any_more_cost_no_restart(here):
    (here / "names.py").write_text(NAMES_GO)
    with hosts(2) as machines:
        options = ("--max-restarts", 1)
        started = [launch(machines, here, name, "n1:29400", *options, script="names.py") for name in ("n2", "n1")]

        def has(name):
            return all((here / f"{name}-{rank}").exists() for rank in range(2))

        wait_until(lambda: has("trained"), (here / "n1.txt").read_text, deadline_s=DEADLINE_S)
        for machine in machines.up.values():
            machine.hosts_file.write_text("127.0.0.1 localhost\n")
        (here / "gone").write_text("")
        assert met(here, started) == 2 * [[6, 1]], "after one restart"
        assert has("unknown"), "names were not resolved any more"
        assert "cannot resolve" not in (here / "n1.txt").read_text()


def test_a_host_that_takes_itself_for_the_endpoint_says_why(here):
    with hosts(1) as machines:
        machines["n1"].hosts_file.write_text("127.0.0.1 localhost n7\n")
        launcher = launch(machines, here, "n1", "n7:29400")
        said = "note: on this machine, n1, the name n7 of --rdzv-endpoint stands for the machine itself"
        wait_until(lambda: said in (here / "n1.txt").read_text(), (here / "n1.txt").read_text)
        machines["n1"].kill()
        launcher.wait(DEADLINE_S)
