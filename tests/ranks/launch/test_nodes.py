"""`lockstep run` on several machines: real hosts as far as network and processes go (see `benchmarks/hosts.py`).

A fault is injected when the job is seen to have reached a step, never by a clock, and the job waits for it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from hosts import hosts, why_not
from lockstep.launch_contract import EXIT_TERMINATED, EXIT_TIMEOUT
from waiting import wait_until

pytestmark = [
    pytest.mark.together,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts"),
    pytest.mark.timeout(240),
]

DEADLINE_S = 100
SOURCE = str(Path(lockstep.__file__).parents[1])
CONF = "join_timeout=60,last_call_timeout=1,suspect_after=2,lost_after=4"

#: Trains a little and says each step in a file. From step WAIT on its steps are slow, until there is a file "go". What
#: is final are the bits of the model and all that was logged.
TRAIN = """
import hashlib, os, socket, sys, time
from pathlib import Path
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import lockstep

HERE, WAIT = Path(sys.argv[1]), int(sys.argv[2])
with lockstep.Run(seed=3) as run:
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    model = run.model(net)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    x = torch.sin(torch.arange(960.0).reshape(120, 8))
    batches = run.loader(TensorDataset(x, torch.arange(120) % 3), global_batch=24, micro_batch=4, workers=0)
    generation = os.environ.get("LOCKSTEP_GENERATION", "0")
    for epoch in run.epochs(50):
        for images, labels in run.train(batches):
            out = model(images)
            run.measure(right=out.argmax(1) == labels)
            run.step(F.cross_entropy(out, labels))
            name = f"g{generation}-{socket.gethostname()}-{run.rank}of{run.world_size}"
            (HERE / f".{name}").write_text(str(run.progress.step))
            (HERE / f".{name}").rename(HERE / name)
            if run.progress.step >= WAIT and not (HERE / "go").exists():
                time.sleep(0.4)  # slowly on: stops and new hosts take effect at a step
            while run.progress.step == 13 and (HERE / "hold").exists():
                time.sleep(0.05)
        logged = repr(run.log())
        if run.leads:
            (HERE / f"log-{epoch:02}").write_text(logged)
    own = [getattr(value, "full_tensor", lambda value=value: value)() for value in net.state_dict().values()]
    sums = hashlib.sha256(b"".join(value.numpy().tobytes() for value in own))
    step = run.progress.step
for log in sorted(HERE.glob("log-*")):
    sums.update(log.read_bytes())
(HERE / f"final-{run.rank}").write_text(f"{step} {sums.hexdigest()}")
"""


class Cluster:
    """Launchers on hosts, in one directory that all of them see."""

    def __init__(self, machines, here):
        self.machines, self.here = machines, here
        self.launchers, self.before = {}, []
        (here / "train.py").write_text(TRAIN)

    def launch(
        self, name, nodes, *args, ranks=1, wait=10**6, script="train.py", conf=CONF, endpoint="n1:29400", **more
    ):
        self.before += [self.launchers[name]] if name in self.launchers else []
        out = (self.here / f"{name}.txt").open("a")
        env = {key: value for key, value in os.environ.items() if not key.startswith(("LOCKSTEP_R", "OMP_"))}
        options = ("--nnodes", nodes, "--rdzv-endpoint", endpoint, "--rdzv-conf", conf, "--run-dir", "r")
        command = (sys.executable, "-m", "lockstep", "run", *options, "--nproc-per-node", ranks, *args)
        self.launchers[name] = self.machines[name].start(
            [str(arg) for arg in (*command, script, self.here, wait)],
            cwd=self.here,
            env={**env, "PYTHONPATH": SOURCE, "PYTHONUNBUFFERED": "1", **more},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        out.close()

    def said(self, name):
        return (self.here / f"{name}.txt").read_text()

    def until(self, what, why=""):
        return wait_until(what, lambda: f"{why}\n{self.everything()}", deadline_s=DEADLINE_S)

    def until_said(self, name, text):
        self.until(lambda: text in self.said(name), f"{name} never said {text!r}")

    def until_steps(self, generation, *, ranks, steps=1):
        """Wait until a generation (``*``: any) of so many ranks has trained; returns the hosts that it ran on."""

        def seen():
            worlds = {}
            for path in self.here.glob(f"g{generation}-*of{ranks}"):
                worlds.setdefault(path.name.split("-")[0], []).append(path)
            far = [w for w in worlds.values() if len(w) == ranks and all(int(p.read_text()) >= steps for p in w)]
            return far and {path.name.split("-")[1] for path in far[-1]}

        return self.until(seen, f"no generation {generation} of {ranks} ranks")

    def end_of(self, name):
        try:
            return self.launchers[name].wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{name} does not end\n{self.everything()}")

    def everything(self):
        logs = [*sorted(self.here.glob("*.txt")), *sorted(self.here.glob("r/logs/*"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in logs)

    def close(self):
        for launcher in (*self.before, *self.launchers.values()):
            launcher.wait(DEADLINE_S)

    def go(self):
        (self.here / "go").write_text("")

    def finals(self):
        return {path.read_text() for path in self.here.glob("final-*")}


@pytest.fixture
def cluster(tmp_path, request):
    with hosts(2, **getattr(request, "param", {})) as machines:
        made = Cluster(machines, tmp_path)
        yield made
    made.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What one rank on one machine trains."""
    here = tmp_path_factory.mktemp("alone")
    (here / "train.py").write_text(TRAIN)
    (here / "go").write_text("")
    env = {**os.environ, "PYTHONPATH": SOURCE}
    subprocess.run([sys.executable, "train.py", str(here), "0"], cwd=here, env=env, check=True, timeout=DEADLINE_S)
    return (here / "final-0").read_text()


@pytest.mark.campaign
@pytest.mark.parametrize("cluster", [{"ipv6": True}], indirect=True)
def test_two_hosts_train_the_bits_of_one_over_a_slow_link_with_addresses_of_ipv6_only(cluster, expected):
    cluster.machines["n2"].slow("20mbit")
    cluster.go()
    for name in ("n2", "n1"):
        cluster.launch(name, "2")
    assert (cluster.end_of("n1"), cluster.end_of("n2")) == (0, 0), cluster.everything()
    assert "generation 0: 2 ranks on 2 nodes: n1 (1), n2 (1)" in cluster.said("n1")
    assert cluster.finals() == {expected}
    about = json.loads((cluster.here / "r/run.json").read_text())
    assert about["generations"][0]["hosts"] == ["n1", "n2"]
    assert about["starts"][0]["nodes"].keys() == {"n1", "n2"}


def test_the_cause_on_one_host_is_told_on_all_with_one_exit_code(cluster):
    for machine in cluster.machines.up.values():
        machine.like_debian()  # see `test_networks.py`
    (cluster.here / "fails.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if dist.get_rank() == 3:\n"
        "    raise ValueError('bad label 255')\n"
        "while True:\n"
        "    dist.all_reduce(torch.ones(1))\n"
    )
    for name in ("n1", "n2"):
        cluster.launch(name, "2", ranks=2, script="fails.py")
    for name in ("n1", "n2"):
        assert cluster.end_of(name) == 1
        last = cluster.said(name).rpartition("run failed: ")[2].splitlines()
        assert last[:3] == ["rank 3 of 4 (host n2) raised ValueError", "    bad label 255", "    at fails.py:5"]


@pytest.mark.campaign
def test_a_rank_that_hangs_on_another_host_is_named_on_all(cluster):
    (cluster.here / "hangs.py").write_text(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "while dist.get_rank() == 1:\n"
        "    time.sleep(0.1)\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    for name in ("n1", "n2"):
        cluster.launch(name, "2", "--hang-after", "5", script="hangs.py")
    for name in ("n1", "n2"):
        assert cluster.end_of(name) == 1
        report, _, failure = cluster.said(name).partition("run failed: ")
        assert re.search(r"rank 0 in all_reduce \(hangs.py:6\); rank 1 in <module> for \d+ s \(hangs.py:5\)", report)
        assert "=> rank 1 keeps the others waiting" in report
        assert failure.startswith("rank 1 of 2 (host n2) hung")


@pytest.mark.campaign
def test_hosts_that_die_are_named_and_the_job_goes_on_when_they_are_back(cluster, expected):
    """First a network that is away for a while; then a host dies that is not the coordinator's, then that one.

    Its part of the state was on the other host, too, and goes to it when it is back.
    """
    options = ("--max-restarts", "1", "--save-every", "100 steps", "--strategy", "fsdp", "--set", "mirror=true")
    conf = CONF.replace("lost_after=4", "lost_after=30")
    for name in ("n1", "n2"):
        cluster.machines[name].like_debian()  # copies find the way to the other host as gloo does
        cluster.launch(name, "2", *options, wait=12, conf=conf)
    assert cluster.until_steps(0, ranks=2, steps=12) == {"n1", "n2"}
    cluster.machines["n2"].cut()
    cluster.until_said("n1", "nothing heard of n2 for 2 s; waiting up to 30 s, while the ranks hold their connections")
    cluster.machines["n2"].mend()
    cluster.until_said("n1", "n2 is heard again")
    cluster.until_steps(0, ranks=2, steps=15)
    assert "lost node" not in cluster.said("n1")

    cluster.machines["n2"].kill()
    cluster.until_said(
        "n1", "lost node n2 (rank 1 of 2); going on as generation 1 with 2 nodes (change 1 of at most 10)"
    )
    cluster.until_said("n1", "waiting for 1 of 2 nodes: here n1")
    cluster.machines.boot("n2")
    cluster.launch("n2", "2", *options, wait=12, conf=conf)
    assert cluster.until_steps(1, ranks=2, steps=16) == {"n1", "n2"}
    (went_on,) = re.findall(r"goes on from step (\d+) \(put together from 2 ranks\)", cluster.said("n1"))
    assert int(went_on) >= 14, "no step but the one in work is lost"

    cluster.machines["n1"].kill()
    cluster.until_said("n2", "cut off: nothing heard of the coordinator")
    again = f"lockstep run --resume --run-dir r --nnodes 2 --rdzv-endpoint n1:29400 --rdzv-conf {conf}"
    cluster.until_said("n2", f"to go on, on n1: {again}")
    cluster.until(lambda: "rank 1" not in cluster.machines["n2"].run("ps", "-eo", "comm"), "n2 kept its rank")
    cluster.machines.boot("n1")
    cluster.go()
    cluster.launch("n1", "2", "--resume", *options, wait=12, conf=conf)
    assert (cluster.end_of("n1"), cluster.end_of("n2")) == (0, 0), cluster.everything()
    assert "generation 2: 2 ranks on 2 nodes: n1 (1), n2 (1)" in cluster.said("n2")
    assert cluster.finals() == {expected}


@pytest.mark.campaign
def test_a_stop_on_one_host_stops_all_with_a_checkpoint(cluster):
    for name in ("n1", "n2"):
        cluster.launch(name, "2", wait=5)
    cluster.until_steps(0, ranks=2, steps=5)
    cluster.machines["n2"].signal(cluster.launchers["n2"], signal.SIGTERM)
    assert (cluster.end_of("n1"), cluster.end_of("n2")) == (75, 75), cluster.everything()
    assert "lockstep run --resume --run-dir r --nnodes 2 --rdzv-endpoint n1:29400" in cluster.said("n1")


def test_who_does_not_come_and_who_does_not_fit_is_told(cluster):
    (cluster.here / "train.py").write_text("")  # no rank of it starts, and each launch would import torch for it
    cluster.launch("n2", "2", endpoint="nohost:29400")
    assert cluster.end_of("n2") == 2
    assert "cannot resolve 'nohost' from node n2" in cluster.said("n2")
    cluster.launch("n1", "2", "--rdzv-id", "mine", conf="join_timeout=600")
    cluster.until_said("n1", "waiting for 1 of 2 nodes: here n1 (3 s)")
    cluster.launch("n2", "2", "--rdzv-id", "other")
    assert cluster.end_of("n2") == 2
    assert "the run's id is other on n2, mine on n1" in cluster.said("n2")
    refused = (
        "a node says that it cannot take part: n2: this node cannot take part in the job at n1:29400: the run's id"
    )
    cluster.until_said("n1", refused)
    cluster.machines["n1"].signal(cluster.launchers["n1"], signal.SIGTERM)
    assert cluster.end_of("n1") == EXIT_TERMINATED
    cluster.launch("n1", "2", "--run-dir", "alone", conf="join_timeout=4")
    assert cluster.end_of("n1") == EXIT_TIMEOUT
    assert re.search(r"gave up waiting for 1 of 2 nodes: here n1 \(\d+ s\)", cluster.said("n1"))


@pytest.mark.campaign
def test_a_host_whose_cpu_has_other_kernels_is_named_as_that(cluster):
    cluster.launch("n1", "2", ATEN_CPU_CAPABILITY="avx2")
    cluster.launch("n2", "2", ATEN_CPU_CAPABILITY="default")
    assert (cluster.end_of("n1"), cluster.end_of("n2")) == (1, 1), cluster.everything()
    assert "note: ATEN_CPU_CAPABILITY is default on n2, avx2 on n1" in cluster.said("n2")
    told = cluster.said("n1").rpartition("run failed: ")[2]
    assert "rank 0 computes on a CPU by AVX2 kernels (ATEN_CPU_CAPABILITY=avx2), " in told
    assert "rank 1 on a CPU by " in told


@pytest.mark.campaign
def test_memory_that_refuses_to_protect_is_told_once_and_tried_again(tmp_path, expected):
    """No step is lost again from the next checkpoint on."""
    with hosts(1) as machines:
        cluster, host = Cluster(machines, tmp_path), machines["n1"]

        def kill_rank_1():
            (victim,) = [process for process, name in host.processes().items() if name == "rank 1"]
            os.kill(victim, signal.SIGKILL)

        def step(generation):
            return max([int(path.read_text()) for path in tmp_path.glob(f"g{generation}-*of2")] or [0])

        hold = tmp_path / "hold"
        hold.touch()  # between two checkpoints
        cluster.launch("n1", "1", "--max-restarts", "3", "--save-every", "5 steps", ranks=2, wait=12)
        cluster.until(lambda: step(0) >= 13, "no step 13")
        (memory,) = (host.root / "dev/shm").glob("lockstep-emergency-*")
        host.run("mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", f"/dev/shm/{memory.name}")
        kill_rank_1()
        hold.unlink()
        cluster.until(lambda: step(1) >= 12, "it does not go on")
        told = "ranks 0, 1 cannot keep in memory what is measured (/dev/shm/lockstep-emergency-"
        assert told in cluster.said("n1")
        assert "No space left on device): if a rank dies, the steps since the last checkpoint are lost" in cluster.said(
            "n1"
        )
        assert "lacks a part, or what a rank that died had measured" in cluster.said("n1")
        status = tmp_path / "r/status.json"
        cluster.until(lambda: json.loads(status.read_text())["unprotected"] == "ranks 0, 1 without emergency memory")
        host.run("umount", f"/dev/shm/{memory.name}")
        cluster.until_said("n1", "emergency memory can be written again: if a rank dies, no step is lost")
        assert cluster.said("n1").count(told) == 1
        there = step(1)
        cluster.until(lambda: step(1) > there + 1, "it does not go on")
        done = step(1)
        kill_rank_1()
        cluster.until(lambda: step(2) > done, "it does not go on")
        assert json.loads(status.read_text())["unprotected"] == ""
        (went_on,) = re.findall(r"goes on from step (\d+) \(state of rank 0\)", cluster.said("n1"))
        assert int(went_on) >= done
        cluster.go()
        assert cluster.end_of("n1") == 0, cluster.everything()
        assert cluster.finals() == {expected}
    cluster.close()


@pytest.mark.campaign
def test_two_hosts_that_do_not_reach_each_other_are_named_and_no_step_is_lost(tmp_path, expected):
    """Both reach the coordinator, and all ranks wait at the same line: it is no bug of the script."""
    with hosts(3) as machines:
        cluster = Cluster(machines, tmp_path)
        conf = CONF.replace("suspect_after=2,lost_after=4", "suspect_after=5,lost_after=30")
        options = ("--hang-after", "6", "--max-restarts", "50", "--save-every", "1000 steps")
        for name in ("n1", "n2", "n3"):
            cluster.launch(name, "3", *options, wait=12, conf=conf)
        assert cluster.until_steps(0, ranks=3, steps=12) == {"n1", "n2", "n3"}
        machines["n2"].mute(machines["n3"].address)
        machines["n3"].mute(machines["n2"].address)
        cluster.until(
            lambda: "run failed: n2 and n3 do not reach each other\n" in cluster.said("n1"), "nobody is named"
        )
        done = min(int(path.read_text()) for path in tmp_path.glob("g0-*of3"))
        for name in ("n2", "n3"):
            machines[name].clear()
        cluster.until(lambda: "goes on from step" in cluster.said("n1"), "it does not go on")
        (went_on,) = re.findall(r"goes on from step (\d+) \(state of rank", cluster.said("n1"))
        assert int(went_on) >= done
        cluster.go()
        for name in ("n1", "n2", "n3"):
            assert cluster.end_of(name) == 0, cluster.everything()
        assert "=> all ranks wait for each other: n2 and n3 do not reach each other" in cluster.said("n2")
        assert "parted ways" not in cluster.everything()
        assert "lost node" not in cluster.everything()
        assert cluster.finals() == {expected}
    cluster.close()


def test_one_to_three_hosts_shrink_when_one_is_cut_off_grow_let_one_go_and_train_the_same_bits(tmp_path, expected):
    with hosts(3) as machines:
        cluster = Cluster(machines, tmp_path)
        options = {"wait": 12, "conf": CONF.replace("last_call_timeout=1", "last_call_timeout=4")}
        args = ("1:3", "--save-every", "1000 steps")
        for name in ("n1", "n2"):
            cluster.launch(name, *args, **options)
        assert cluster.until_steps("*", ranks=2, steps=12) == {"n1", "n2"}
        assert "2 ranks on 2 of at most 3 nodes: n1 (1), " in cluster.said("n1")
        machines["n2"].cut()
        cluster.until_said("n2", "cut off: nothing heard of the coordinator")
        cluster.until(lambda: "rank " not in machines["n2"].run("ps", "-eo", "comm"), "n2 kept its rank")
        cluster.until_said("n1", "lost node n2 (rank ")
        # Nobody has closed its connections, and what it had measured was in its memory, and on n1.
        done = max(int(path.read_text()) for path in tmp_path.glob("g*-n1-*of2"))
        assert cluster.until_steps("*", ranks=1, steps=12) == {"n1"}
        cluster.until_said("n1", f"goes on from step {done} (state of rank ")
        machines["n2"].mend()
        cluster.launch("n3", *args, **options)
        cluster.until_said("n1", " came: stopping at a checkpoint, to go on with more nodes")
        assert cluster.until_steps("*", ranks=3, steps=12) == {"n1", "n2", "n3"}
        machines["n3"].signal(cluster.launchers["n3"], signal.SIGTERM)
        assert cluster.end_of("n3") == 75, cluster.everything()
        assert "left the job with a complete checkpoint; the other nodes continue" in cluster.said("n3")
        cluster.go()
        for name in ("n1", "n2"):
            assert cluster.end_of(name) == 0, cluster.everything()
        assert "n3 was told to stop (SIGTERM) and leaves: stopping at a checkpoint" in cluster.said("n1")
        assert "the connection to the other nodes is back" in cluster.said("n2")
        assert cluster.finals() == {expected}
    cluster.close()


@pytest.mark.campaign
def test_a_spare_and_another_host_take_over_from_a_coordinator_that_sleeps_and_it_follows_them(tmp_path, expected):
    with hosts(3) as machines:
        cluster = Cluster(machines, tmp_path)
        options = ("--spares", "1", "--rdzv-takeover", "--save-every", "5 steps")
        conf = "join_timeout=60,last_call_timeout=30,suspect_after=1,lost_after=3"
        for name in ("n1", "n2", "n3"):
            cluster.launch(name, "2:3", *options, wait=12, conf=conf)
        assert "n1" in cluster.until_steps(0, ranks=2, steps=12)
        waits = "; this node waits until it is needed"
        cluster.until(lambda: waits in cluster.said("n2") + cluster.said("n3"), "no spare")
        machines["n1"].freeze()
        cluster.until(lambda: "this node is the coordinator now (term 2)" in cluster.said("n2") + cluster.said("n3"))
        assert cluster.until_steps("*", ranks=2, steps=15) == {"n2", "n3"}
        machines["n1"].thaw()
        cluster.until_said("n1", " is the coordinator now (term 2)")
        cluster.until_said("n1", waits)
        first = "n2" if "this node is the coordinator now" in cluster.said("n2") else "n3"
        machines[first].signal(cluster.launchers[first], signal.SIGTERM)  # the machine is wanted back
        assert cluster.end_of(first) == 75, cluster.everything()
        rest = {"n1", "n2", "n3"} - {first}
        assert cluster.until_steps(2, ranks=2, steps=16) == rest
        cluster.go()
        for name in rest:
            assert cluster.end_of(name) == 0, cluster.everything()
        assert cluster.finals() == {expected}
    cluster.close()
