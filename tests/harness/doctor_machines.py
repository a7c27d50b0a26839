"""Facts of machines on which nothing is wrong, to be changed by tests."""

from dataclasses import replace

from lockstep.doctor.host_facts import FileFacts, GpuFacts, HostFacts, InterfaceFacts
from lockstep.doctor.machine_facts import MachineFacts, NodeFacts, PairFacts, RankFacts, RanksFacts, ReachFacts

H100 = "NVIDIA H100 80GB HBM3"
GIB = 1 << 30


def gpu(**more):
    """One GPU."""
    return replace(GpuFacts(H100, 80 * GIB, GIB // 2, lanes=16, most_lanes=16), **more)


def host(name="n1", number=1, gpus=2, **more):
    """A host with two GPUs."""
    values = {
        "torch": "2.13.0",
        "torch_cuda": "12.8" if gpus else "",
        "driver": "570.86" if gpus else "",
        "driver_cuda": "12.8" if gpus else "",
        "gpus": (gpu(),) * gpus,
        "pci_gpus": gpus,
        "visible_gpus": gpus,
        "cpus": 16,
        "host_cpus": 16,
        "interfaces": (InterfaceFacts("lo", ("127.0.0.1",)), InterfaceFacts("eth0", (f"10.0.0.{number}",), 10_000)),
        "name_addresses": (f"10.0.0.{number}",),
    }
    return HostFacts(**{"host": name, **values, **more})


def files(**more):
    """A good file system."""
    return FileFacts(**{"path": "/runs", "kind": "xfs", **more})


def machine(nodes=1, gpus=2, sum_s=0.0003, **more):
    """Facts of all nodes and their ranks; ``more`` are fields of `MachineFacts`."""
    names = [f"n{number + 1}" for number in range(nodes)]
    each = max(gpus, 2)
    ranks = tuple(
        RankFacts(
            rank=rank,
            node=rank // each,
            host=names[rank // each],
            device=H100 if gpus else "CPU, AVX2",
            on_gpu=bool(gpus),
            backend="nccl" if gpus else "gloo",
            cpus=tuple(range(16)),
            interface="eth0",
            bits="4f2a",
        )
        for rank in range(nodes * each)
    )
    pairs = tuple(
        PairFacts(a, b, 20e-6, 200e9 if gpus else 2e9) for a in range(len(ranks)) for b in range(a + 1, len(ranks))
    )
    reached = [
        tuple(ReachFacts(name, other, f"10.0.0.{other[1:]}", 0.001) for other in names if other != name)
        for name in names
    ]
    found = tuple(
        NodeFacts(host(name, number + 1, gpus), files(), reached[number] if nodes > 1 else ())
        for number, name in enumerate(names)
    )
    facts = MachineFacts(found, RanksFacts(ranks, pairs, 32 << 20, sum_s))
    return replace(facts, **more)


def with_host(facts, number=0, **more):
    """``facts`` with another host."""
    nodes = list(facts.nodes)
    nodes[number] = replace(nodes[number], host=replace(nodes[number].host, **more))
    return replace(facts, nodes=tuple(nodes))


def with_files(facts, **more):
    """``facts`` with another file system."""
    return replace(facts, nodes=tuple(replace(node, files=replace(node.files, **more)) for node in facts.nodes))


def with_rank(facts, number, **more):
    """``facts`` with one other rank."""
    ranks = list(facts.seen.ranks)
    ranks[number] = replace(ranks[number], **more)
    return replace(facts, seen=replace(facts.seen, ranks=tuple(ranks)))
