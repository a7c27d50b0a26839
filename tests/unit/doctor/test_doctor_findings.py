"""What facts of a machine mean: facts are written by hand, so that this holds for GPUs and clusters, too."""

from dataclasses import replace

import pytest

from doctor_machines import GIB, gpu, machine, with_files, with_host, with_rank
from lockstep.doctor.finding import Report
from lockstep.doctor.host_facts import InterfaceFacts
from lockstep.doctor.machine_facts import ReachFacts
from lockstep.doctor.machine_findings import judge

MIB = 1 << 20
ONE, TWO, CPUS = machine(), machine(2), machine(gpus=0)


def variables(**values):
    return with_host(CPUS, variables=values)


def far_clock(seconds):
    return with_rank(TWO, 3, clock_s=seconds)


def closed(facts):
    """The second node lets nothing in."""
    first, second = facts.nodes
    return replace(facts, nodes=(replace(first, reached=(ReachFacts("n1", "n2", "10.0.0.2", None),)), second))


def half_closed(facts):
    first, second = facts.nodes
    more = (*first.reached, ReachFacts("n1", "n2", "172.17.0.1", None))
    return replace(facts, nodes=(replace(first, reached=more), second))


def slow_pair(facts):
    first, *others = facts.seen.pairs
    return replace(facts, seen=replace(facts.seen, pairs=(replace(first, bytes_per_s=1e9), *others)))


WRONG = {
    # what: facts, section, level, words of the finding
    "no torch": (with_host(CPUS, torch=""), "software", "problem", "not installed"),
    "an old torch": (with_host(CPUS, torch="2.3.1"), "software", "problem", "2.3.1 is older"),
    "torch without CUDA": (with_host(ONE, torch="2.13.0+cpu", torch_cuda=""), "software", "problem", "2 GPUs"),
    "an old driver": (with_host(ONE, driver_cuda="11.4"), "software", "problem", "knows CUDA 11.4"),
    "no driver": (with_host(CPUS, pci_gpus=4), "GPUs", "problem", "4 GPUs of NVIDIA plugged in"),
    "two kinds": (with_host(ONE, gpus=(gpu(), gpu(name="Tesla V100"))), "GPUs", "note", "different kinds"),
    "hidden GPUs": (with_host(ONE, visible_gpus=1), "GPUs", "note", "1 of 2"),
    "MIG": (with_host(ONE, gpus=(gpu(mig=True),), visible_gpus=0), "GPUs", "note", "0 of 1"),
    "memory errors": (with_host(ONE, gpus=(gpu(), gpu(memory_errors=3))), "GPUs", "problem", "GPU 1: 3 memory errors"),
    "prohibited": (with_host(ONE, gpus=(gpu(prohibited=True), gpu())), "GPUs", "problem", "nobody compute"),
    "rows to replace": (with_host(ONE, gpus=(gpu(remap_pending=True), gpu())), "GPUs", "note", "wait to be replaced"),
    "another job": (
        with_host(ONE, gpus=(gpu(used_bytes=60 * GIB, processes=("77 (python)",)), gpu())),
        "GPUs",
        "note",
        "GPU 0: 60.0 GiB of 80.0 GiB in use by 77 (python)",
    ),
    "a hot GPU": (with_host(ONE, gpus=(gpu(slowed_by=("heat",)), gpu())), "GPUs", "note", "lowered by heat"),
    "half of the lanes": (with_host(ONE, gpus=(gpu(lanes=8), gpu())), "GPUs", "note", "8 of 16 lanes"),
    "ranks that fail": (machine(failure="rank 1: OSError: no"), "ranks", "problem", "rank 1: OSError: no"),
    "GPUs that torch cannot use": (with_host(CPUS, visible_gpus=2), "ranks", "problem", "none of the GPUs"),
    "other devices": (with_rank(ONE, 1, device="Tesla V100"), "ranks", "problem", "1 x Tesla V100"),
    "other bits": (with_rank(TWO, 3, bits="0000"), "ranks", "problem", "rank 3 (n2) computed other bits"),
    "a slow link": (machine(sum_s=0.01), "links", "note", "nvlink4"),
    "slow Ethernet": (machine(2, gpus=0, sum_s=1.0), "links", "note", "eth0 has"),
    "a slow pair": (slow_pair(machine(gpus=4)), "links", "note", "ranks 0 and 1 are slower"),
    "a firewall": (closed(TWO), "ports", "problem", "n1 to n2"),
    "a bridge of containers": (half_closed(TWO), "ports", "note", "n2 at 172.17.0.1"),
    "clocks": (far_clock(7.0), "clocks", "note", "7.0 s apart"),
    "the server's clock": (with_files(ONE, clock_s=-90.0), "clocks", "note", "1 m 30 s"),
    "other versions": (with_host(TWO, 1, torch="2.12.0"), "versions", "problem", "2.13.0 on n1; 2.12.0 on n2"),
    "other code": (with_host(TWO, 1, code="ab"), "versions", "problem", "code differs"),
    "another kernel": (with_host(TWO, 1, kernel="5.4"), "versions", "note", "kernel differs: none on n1; 5.4 on n2"),
    "other variables": (with_host(TWO, 1, variables={"NCCL_DEBUG": "WARN"}), "versions", "note", "NCCL_DEBUG"),
    "IPv6 alone": (
        with_host(TWO, 1, interfaces=(InterfaceFacts("lo", ("::1",)), InterfaceFacts("eth0", ("fd00::2",)))),
        "interfaces",
        "problem",
        "IPv6 alone on n2",
    ),
    "no loopback": (with_host(CPUS, interfaces=()), "interfaces", "problem", "loopback is down"),
    "no name": (with_host(CPUS, name_addresses=()), "host name", "note", "does not resolve"),
    "a slow name server": (with_host(CPUS, name_s=5.0), "host name", "note", "took 5.0 s"),
    "no /dev/shm": (with_host(CPUS, shm_bytes=0, shm_free=0), "memory", "problem", "0 bytes free"),
    "Docker's /dev/shm": (with_host(CPUS, shm_free=64 * MIB, container="Docker"), "memory", "note", "64.0 MiB free"),
    "little memory": (with_host(CPUS, memory_free=MIB, memory_limit=GIB), "memory", "note", "of 1.00 GiB"),
    "few open files": (with_host(CPUS, limits={"open files": 256}), "limits", "note", "open files: 256"),
    "few processes": (with_host(CPUS, limits={"processes": 100}), "limits", "note", "processes: 100"),
    "few processes in a container": (with_host(CPUS, pids_limit=64), "limits", "note", "allows 64 processes"),
    "locked memory": (
        with_host(ONE, limits={"locked memory": 65536}, infiniband=True),
        "limits",
        "note",
        "locked memory",
    ),
    "an address space": (with_host(CPUS, limits={"address space": GIB}), "limits", "note", "address space"),
    "a file size": (with_host(CPUS, limits={"file size": GIB}), "limits", "note", "file size"),
    "seconds of CPU": (with_host(CPUS, limits={"CPU seconds": 600}), "limits", "note", "CPU seconds: 600"),
    "a disk that cannot be written": (with_files(CPUS, error="[Errno 30] no"), "run directory", "problem", "Errno 30"),
    "a full disk": (with_files(CPUS, free_bytes=MIB), "run directory", "problem", "1.00 MiB free"),
    "nearly full": (with_files(CPUS, free_bytes=100 * MIB), "run directory", "note", "100 MiB free"),
    "a slow disk": (with_files(CPUS, bytes_per_s=1e6), "run directory", "note", "written and flushed"),
    "slow commits": (with_files(CPUS, commit_s=9.0), "run directory", "note", "takes 9.0 s"),
    "no locks": (with_files(CPUS, locks=False), "run directory", "note", "no locks"),
    "no links": (with_files(CPUS, links=False), "run directory", "note", "no hard links"),
    "in memory": (with_files(CPUS, kind="tmpfs"), "run directory", "note", "in memory"),
    "in the container": (with_files(CPUS, kind="overlay"), "run directory", "note", "the container's own"),
    "not seen": (with_rank(TWO, 2, seen_s=None), "run directory", "problem", "n2 does not see"),
    "seen late": (with_rank(TWO, 2, seen_s=3.0), "run directory", "note", "after 3.0 s"),
    "a lock for two": (with_rank(TWO, 2, lock="granted"), "run directory", "problem", "rank 2 on n2 got a lock"),
    "a busy host": (with_host(CPUS, load=80.0), "CPUs", "note", "80.0 processes"),
    "one CPU for all": (
        with_rank(with_rank(CPUS, 0, cpus=(0,)), 1, cpus=(0,)),
        "CPUs",
        "note",
        "2 ranks with 2 threads share 1 CPU",
    ),
    "GPUs of the job": (
        with_host(ONE, scheduler="Slurm job 7", scheduler_gpus=8, scheduler_nodes=1),
        "scheduler",
        "problem",
        "8 GPUs a node, and CUDA sees 2",
    ),
    "CPUs of the job": (
        with_host(CPUS, scheduler="Slurm job 7", scheduler_cpus=64, scheduler_nodes=1),
        "scheduler",
        "note",
        "64 CPUs here",
    ),
    "nodes of the job": (with_host(TWO, scheduler="Slurm job 7", scheduler_nodes=4), "scheduler", "note", "2 of"),
    "a login node": (with_host(CPUS, scheduler="Slurm job 7", on_login_node=True), "scheduler", "note", "login node"),
    "blocking launches": (variables(CUDA_LAUNCH_BLOCKING="1"), "variables", "note", "CUDA_LAUNCH_BLOCKING=1"),
    "no P2P": (variables(NCCL_P2P_DISABLE="1"), "variables", "note", "NCCL_P2P_DISABLE"),
    "no cuBLAS workspace": (variables(CUBLAS_WORKSPACE_CONFIG=":0:0"), "variables", "problem", "CUBLAS"),
    "no number of threads": (variables(OMP_NUM_THREADS="all"), "variables", "problem", "OMP_NUM_THREADS=all"),
    "bound threads": (variables(OMP_PROC_BIND="close"), "variables", "note", "OMP_PROC_BIND"),
    "one of several ranks": (variables(RANK="0", WORLD_SIZE="2"), "variables", "problem", "RANK=0"),
    "a setting": (variables(LOCKSTEP_PRECISION="bf16"), "variables", "note", "LOCKSTEP_PRECISION"),
}


def wrong(facts):
    return [finding for finding in judge(facts) if finding.level != "ok"]


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found_and_nothing_else(what):
    facts, section, level, words = WRONG[what]
    found = wrong(facts)
    assert {finding.section for finding in found} == {section}, found
    (named,) = [finding for finding in found if words in finding.what]
    assert named.level == level
    assert named.command, "each finding has one command"
    blocks = any(finding.level == "problem" for finding in found)
    assert Report("machine", "", judge(facts)).exit_code == (3 if blocks else 0)


@pytest.mark.parametrize("facts", [ONE, TWO, CPUS, machine(2, gpus=0, sum_s=0.03)], ids=["1", "2", "cpu", "2 cpu"])
def test_where_nothing_is_wrong_nothing_is_found_and_all_is_told(facts):
    assert wrong(facts) == []
    sections = [finding.section for finding in judge(facts)]
    assert {"ranks", "links", "software", "GPUs", "interfaces", "memory", "limits", "run directory", "CPUs"} < {
        *sections
    }
    assert sections == sorted(sections, key=sections.index), "a section is in one piece"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMP_NUM_THREADS", "4,2"),
        ("OMP_PROC_BIND", "false"),
        ("NCCL_DEBUG", "WARN"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        ("PYTHONHASHSEED", "0"),
        ("NCCL_IB_DISABLE", "0"),
        ("CUDA_VISIBLE_DEVICES", "0,1"),
    ],
)
def test_variables_that_do_not_bite(name, value):
    assert wrong(variables(**{name: value})) == []


def test_a_small_sum_says_nothing_of_a_link():
    slow = WRONG["slow Ethernet"][0]
    assert wrong(replace(slow, seen=replace(slow.seen, sum_bytes=1 << 20))) == []


def test_what_several_hosts_have_alike_is_one_finding_with_their_names():
    facts = with_host(with_host(TWO, 0, load=80.0), 1, load=90.0)
    (busy,) = wrong(facts)
    assert busy.what.endswith("(on n1, n2)")
    alone = with_host(TWO, 1, load=90.0)
    assert wrong(alone)[0].what.endswith("(on n2)")


def test_gpus_of_one_host_are_each_a_finding():
    facts = with_host(ONE, gpus=(gpu(memory_errors=1), gpu(memory_errors=1)))
    assert [finding.what[:6] for finding in wrong(facts)] == ["GPU 0:", "GPU 1:"]
