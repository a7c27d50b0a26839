"""Facts are gathered from the machine as it is, and ranks that are really started see each other."""

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from doctor_command import DEADLINE_S, SOURCE, doctor
from doctor_machines import files, host
from hosts import hosts, why_not
from lockstep.collectives import pair_rounds
from lockstep.doctor.host_facts import LARGE, driver_facts, gather_files, gather_host
from lockstep.doctor.machine_facts import MachineFacts, NodeFacts

pytestmark = pytest.mark.timeout(DEADLINE_S + 30)


def test_this_host_is_as_python_knows_it():
    facts = gather_host({"NCCL_DEBUG": "INFO", "LOCKSTEP_SECRET": "x", "HOME": "/home/a", "MASTER_ADDR": "n1"})
    assert facts.host == socket.gethostname()
    assert facts.torch == torch.__version__
    assert facts.torch_cuda == (torch.version.cuda or "")
    assert facts.variables == {"NCCL_DEBUG": "INFO", "MASTER_ADDR": "n1"}
    assert facts.limits["open files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert any("127.0.0.1" in each.addresses for each in facts.interfaces)
    assert 1 <= facts.cpus <= facts.host_cpus
    assert facts.memory_free > 1 << 20


class NoSuchThing(Exception):
    pass


def refuses(*_):
    raise NoSuchThing


def nvml(**more):
    """Stands for NVIDIA's library, of which there is none without a driver: its calls, as pynvml names them."""
    calls = {
        "nvmlSystemGetDriverVersion": lambda: "570.86",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 << 30, used=1 << 30),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=os.getpid())] * handle,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x20 if handle else 0x4,
        "nvmlDeviceGetMigMode": lambda handle: [handle, 0],
        "nvmlDeviceGetComputeMode": lambda handle: 2 * handle,
        "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 7 * handle,
        "nvmlDeviceGetRemappedRows": lambda handle: [0, 0, handle, 0],
        "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 8,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
    }
    numbers = {"NVML_COMPUTEMODE_PROHIBITED": 2, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1, "NVML_VOLATILE_ECC": 0}
    return SimpleNamespace(NVMLError=NoSuchThing, **{**calls, **numbers, **more})


def test_gpus_are_what_the_driver_says():
    facts = driver_facts(nvml())
    assert (facts["driver"], facts["driver_cuda"]) == ("570.86", "12.8")
    good, bad = facts["gpus"]
    assert (good.name, good.memory_bytes, good.lanes, good.most_lanes) == ("NVIDIA H100 80GB HBM3", 80 << 30, 8, 16)
    assert not (good.processes)
    assert not (good.mig)
    assert not (good.prohibited)
    assert not (good.memory_errors)
    assert not (good.slowed_by)
    assert bad.mig
    assert bad.prohibited
    assert bad.remap_pending
    assert bad.memory_errors == 7
    assert bad.slowed_by == ("heat",)
    assert bad.processes[0].startswith(f"{os.getpid()} (")


def test_a_gpu_that_does_not_say_all_counts_as_well():
    optional = ("ComputeRunningProcesses", "MigMode", "TotalEccErrors", "RemappedRows", "CurrPcieLinkWidth")
    facts = driver_facts(nvml(**{f"nvmlDeviceGet{name}": refuses for name in optional}))
    assert not any(gpu.memory_errors or gpu.mig or gpu.processes or gpu.lanes for gpu in facts["gpus"])


def test_a_directory_is_written_as_a_checkpoint_and_left_as_it_was(tmp_path):
    facts = gather_files(tmp_path, LARGE)
    assert not facts.error
    assert facts.links
    assert facts.locks
    assert facts.bytes_per_s > 0
    assert facts.commit_s > 0
    assert abs(facts.clock_s) < 60
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_told():
    assert gather_files(Path("/proc"), 1000).error
    assert gather_files(Path("/proc"), 1000).kind == "proc"


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_each_pair_has_one_round_and_no_node_two_at_once(sizes):
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    rounds = pair_rounds(nodes)
    firsts = [nodes.index(node) for node in range(len(sizes))]
    within = {(a, b) for a in range(len(nodes)) for b in range(a + 1, len(nodes)) if nodes[a] == nodes[b]}
    between = {(a, b) for a in firsts for b in firsts if a < b}
    pairs = [pair for each in rounds for pair in each]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == within | between
    for each in rounds:
        busy = [node for pair in each for node in {nodes[rank] for rank in pair}]
        assert len(busy) == len(set(busy))


def test_facts_survive_their_files(tmp_path):
    own = NodeFacts(host(), files())
    own.write(tmp_path, 0)
    NodeFacts(host("n2"), files()).write(tmp_path, 1)
    facts = MachineFacts.read(tmp_path, own, "")
    assert [node.host.host for node in facts.nodes] == ["n1", "n2"]
    assert facts.nodes[0] == own
    assert facts.nodes[1].host.gpus == own.host.gpus
    assert "tells the rest" in facts.tested
    assert "did not start" in MachineFacts.read(tmp_path / "none", own, "it failed").tested


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nodes", "2"], "--rdzv-endpoint HOST:PORT"),
        (["--nproc-per-node", "0"], "give a number above 0"),
        (["a.py", "-m", "b"], "not both"),
        (["none.py"], "no such file: none.py"),
    ],
)
def test_usage(tmp_path, words, says):
    code, _, said = doctor(*words, cwd=tmp_path)
    assert code == 2
    assert says in said
    assert len(said.splitlines()) <= 2


def test_ranks_really_start_and_send(tmp_path):
    code, shown, _ = doctor("--quick", "--json", "--run-dir", "runs", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    report = json.loads(shown)
    assert code == report["exit_code"] == 0, shown
    assert report["tested"] == "2 ranks on 1 node; 1 pair of ranks moved data over gloo"
    found = {finding["section"]: finding["what"] for finding in report["findings"]}
    assert "all computed the same bits" in found["ranks"]
    assert "1 pair within a node" in shown
    assert list(tmp_path.iterdir()) == [], "nothing is left"


@pytest.mark.campaign
def test_ranks_that_cannot_start_are_a_problem_and_all_else_is_told(tmp_path):
    """A torch that cannot be imported, and a variable that bites."""
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.12: no such file')")
    path = f"{tmp_path / 'broken'}:{SOURCE}"
    code, shown, _ = doctor("--quick", "--issue", cwd=tmp_path, PYTHONPATH=path, OMP_NUM_THREADS="4", NCCL_DEBUG="INFO")
    assert code == 3
    assert "libcudart.so.12" in shown
    assert "no ranks: they did not start" in shown
    assert "NCCL_DEBUG=INFO" in shown
    assert "run directory" in shown


@pytest.mark.campaign
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts")
def test_two_hosts_see_each_other(tmp_path):
    """Two doctors on hosts of their own; one has a variable of its own, whatever its launcher sets for ranks."""
    command = [sys.executable, "-m", "lockstep", "doctor", "--quick", "--json", "--nodes", "2", "--nproc-per-node", "1"]
    with hosts(2) as machines:
        n1, n2 = machines["n1"], machines["n2"]
        # As a bridge of containers, which has the same address everywhere and leads nowhere.
        n2.plug("docker0", "172.17.0.1")
        started = [
            machine.start(
                [*command, "--rdzv-endpoint", f"{n1.address}:29400"],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": SOURCE, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for machine, variables in ((n1, {}), (n2, {"NCCL_DEBUG": "INFO"}))
        ]
        shown = [process.communicate(timeout=DEADLINE_S)[0] for process in started]
    first, second = map(json.loads, shown)
    assert first["tested"] == "2 ranks on 2 nodes; 1 pair of ranks moved data over gloo", shown[0]
    assert second["tested"].endswith("tells the rest")
    # A machine that is busy with other tests may have more to say of its disk, its links and its CPUs.
    notes = [
        each["what"]
        for each in first["findings"]
        if each["level"] != "ok" and each["section"] in ("ports", "variables", "versions", "interfaces", "clocks")
    ]
    assert sorted(notes) == [
        "NCCL_DEBUG=INFO (on n2)",
        "some addresses do not answer: n2 at 172.17.0.1",
        "variables differ between nodes: NCCL_DEBUG",
    ]
    assert any("1 pair between nodes" in each["what"] for each in first["findings"])
    assert any("2 ways between 2 nodes open" in each["what"] for each in first["findings"])
    assert list(tmp_path.iterdir()) == []
