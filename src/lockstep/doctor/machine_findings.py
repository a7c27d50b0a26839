"""What facts of all nodes and ranks together mean for a training: pure functions from facts to findings."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from lockstep.doctor.finding import Finding, Level, note, ok, problem
from lockstep.doctor.host_facts import LARGE
from lockstep.doctor.host_findings import brief, host_findings, rate
from lockstep.doctor.machine_facts import MachineFacts
from lockstep.formatting import format_ranks, grouped, plural, size
from lockstep.scale import open_catalogue

_SLOW_LINK: Final = 4.0  # times slower than the catalogue: another link than the one that should be there
_SLOW_PAIR: Final = 3.0  # times slower than the median pair
_CLOCK_S: Final = 1.0
_NUMBER: Final = re.compile(r"(?<!GPU )\d[\d.]*( [KMGT]?iB)?")


def judge(facts: MachineFacts) -> tuple[Finding, ...]:
    """All findings, by section, in the order in which one looks for a cause. What several hosts have alike is one."""
    found = [finding for rule in RULES for finding in rule(facts)]
    alike: dict[tuple[str, ...], list[tuple[Finding, str]]] = {}
    for node in facts.nodes:
        for finding in host_findings(node.host, node.files):
            # Each host has numbers of its own, and of what is well one host is an example.
            what = "" if finding.level == "ok" else _NUMBER.sub("", finding.what)
            alike.setdefault((finding.section, finding.level, what), []).append((finding, node.host.host))
    for same in alike.values():
        first, hosts = same[0][0], [host for _, host in same]
        where = f" (on {', '.join(hosts[:4])}{', ...' * (len(hosts) > 4)})" if len(facts.nodes) > 1 else ""
        found.append(replace(first, what=f"{first.what}{where}"))
    order = [finding.section for finding in found]
    return tuple(sorted(found, key=lambda finding: order.index(finding.section)))


def _ranks(facts: MachineFacts) -> Iterator[Finding]:
    ranks = facts.seen.ranks
    if facts.failure:
        yield problem(
            "ranks",
            what=f"they did not start, or not finish: {facts.failure}",
            command="lockstep run --nproc-per-node 2 -m lockstep.doctor.probe 1000000",
        )
    if not ranks:
        return
    if any(node.host.visible_gpus for node in facts.nodes) and not any(rank.on_gpu for rank in ranks):
        yield problem(
            "ranks",
            what="torch can use none of the GPUs that the driver shows",
            why="they compute on the CPU",
            command="python -c 'import torch; torch.zeros(1).cuda()'",
        )
    kinds = Counter(rank.device for rank in ranks)
    if len(kinds) > 1:
        yield problem(
            "ranks",
            what=f"they compute on different devices: {', '.join(f'{n} x {kind}' for kind, n in kinds.items())}",
            why="other devices give other bits, and a run refuses them unless equal bits are given up",
            command="--reduction fast" if ranks[0].on_gpu else "ATEN_CPU_CAPABILITY=avx2 lockstep run ...",
        )
    bits = Counter(rank.bits for rank in ranks)
    usual = bits.most_common(1)[0][0]
    if len(bits) > 1 and len(kinds) == 1:
        odd = [rank for rank in ranks if rank.bits != usual]
        where = f"{format_ranks(rank.rank for rank in odd)} ({', '.join(sorted({rank.host for rank in odd}))})"
        yield problem(
            "ranks",
            what=f"{where} computed other bits than the others on equal devices",
            why="a faulty device, or another library: the model would depend on which rank computes what",
            command="nvidia-smi -q -d ECC" if ranks[0].on_gpu else "lscpu",
        )
    if len(kinds) == len(bits) == 1:
        yield ok("ranks", what=f"{facts.tested}, on {ranks[0].device}; all computed the same bits")


def _links(facts: MachineFacts) -> Iterator[Finding]:
    seen, pairs = facts.seen, facts.seen.pairs
    if len(seen.ranks) < 2 or not seen.sum_s:
        return
    ranks, nodes = len(seen.ranks), {rank.rank: rank.node for rank in seen.ranks}
    first, several = seen.ranks[0], len(facts.nodes) > 1
    catalogue = open_catalogue()
    gpu = catalogue.find_gpu(first.device) if first.on_gpu else catalogue.gpus["cpu"]
    link = None if gpu is None else catalogue.links[gpu.between if several else gpu.within]
    reached = 2 * (ranks - 1) / ranks * seen.sum_bytes / seen.sum_s
    expected = 0.0 if link is None else link.bytes_per_s
    if several and not first.on_gpu:
        # Which Ethernet there is, the interface knows.
        speeds = [each.mbit for n in facts.nodes for each in n.host.interfaces if each.name == first.interface]
        expected = min(filter(None, speeds), default=0) * 1e6 / 8
    what = f"a sum over all ranks moves {rate(reached)} ({size(seen.sum_bytes)} in {brief(seen.sum_s)})"
    if seen.sum_bytes >= LARGE and reached * _SLOW_LINK < expected:
        yield note(
            "links",
            what=f"{what}; {link.name if link and first.on_gpu else first.interface} has {rate(expected)}",
            why="the ranks take another way than the fastest one, or others use it",
            command="NCCL_DEBUG=INFO lockstep doctor" if first.on_gpu else "ethtool " + (first.interface or "eth0"),
        )
    else:
        yield ok("links", what=what)
    for place, here in (("within a node", False), ("between nodes", True)):
        some = [pair for pair in pairs if (nodes[pair.first] != nodes[pair.second]) == here]
        if not some:
            continue
        rates, latency = [pair.bytes_per_s for pair in some], statistics.median(pair.latency_s for pair in some)
        spread = rate(min(rates)) + (f" to {rate(max(rates))}" if len(some) > 1 else "")
        yield ok("links", what=f"{plural(len(some), 'pair')} {place}: {spread}, {brief(latency)} one way")
        for pair in some:
            if len(some) > 2 and pair.bytes_per_s * _SLOW_PAIR < statistics.median(rates):
                yield note(
                    "links",
                    what=f"ranks {pair.first} and {pair.second} are slower than the others: {rate(pair.bytes_per_s)}",
                    why="all ranks wait for the slowest link: a cable, a card, or a device in the wrong slot",
                    command="nvidia-smi topo -m" if first.on_gpu else "ethtool " + (first.interface or "eth0"),
                )


def _ports(facts: MachineFacts) -> Iterator[Finding]:
    if len(facts.nodes) < 2:
        return
    tries = [each for node in facts.nodes for each in node.reached]
    ways = grouped(((each.host, each.to), each.seconds is not None) for each in tries)
    closed = [f"{host} to {to}" for (host, to), found in ways.items() if not any(found)]
    if closed:
        yield problem(
            "ports",
            what=f"no connection at a port of the system's choice from {', '.join(closed[:4])}",
            why="ranks listen at such ports; a firewall lets nothing through, or there is no route",
            command="cat /proc/sys/net/ipv4/ip_local_port_range    # to be open between the nodes",
        )
    partly = [each for each in tries if each.seconds is None and any(ways[each.host, each.to])]
    if partly:
        some = ", ".join(dict.fromkeys(f"{each.to} at {each.address}" for each in partly[:4]))
        yield note(
            "ports",
            what=f"some addresses do not answer: {some}",
            why="bridges of containers, or networks of which one leads nowhere; ranks use the endpoint's",
            command="--rdzv-endpoint with the address of the fast network, or GLOO_SOCKET_IFNAME=eth0",
        )
    if tries and not closed:
        yield ok("ports", what=f"{plural(len(ways), 'way')} between {plural(len(facts.nodes), 'node')} open")


def _clocks(facts: MachineFacts) -> Iterator[Finding]:
    offsets = {rank.host: rank.clock_s for rank in facts.seen.ranks}
    if len(offsets) > 1:
        apart = max(offsets.values()) - min(offsets.values())
        yield _clock(f"clocks of the nodes are {brief(apart)} apart", apart, "chronyc tracking")
    for node in facts.nodes:
        ahead = node.files.clock_s
        if abs(ahead) > _CLOCK_S:
            yield _clock(
                f"the file server's clock differs by {brief(abs(ahead))} from {node.host.host}'s", ahead, "date"
            )


def _clock(what: str, seconds: float, command: str) -> Finding:
    if abs(seconds) < _CLOCK_S:
        return ok("clocks", what=what)
    why = "logs of several nodes are in a wrong order, and programs such as make take old files for new ones"
    return note("clocks", what=what, why=why, command=command)


def _shared_files(facts: MachineFacts) -> Iterator[Finding]:
    unseen = sorted({rank.host for rank in facts.seen.ranks if rank.seen_s is None})
    if unseen:
        yield problem(
            "run directory",
            what=f"{', '.join(unseen)} does not see what rank 0 writes to {facts.nodes[0].files.path}",
            why="checkpoints and logs of all ranks are there",
            command="--run-dir on a file system of all nodes",
        )
    late = max((rank.seen_s or 0.0 for rank in facts.seen.ranks), default=0.0)
    if late > _CLOCK_S:
        yield note(
            "run directory",
            what=f"a new file is seen on other nodes after {brief(late)}",
            why="the file server's cache of attributes: a resume may take an older checkpoint",
            command="mount -o actimeo=1",
        )
    for rank in [rank for rank in facts.seen.ranks if rank.lock == "granted"][:1]:
        yield problem(
            "run directory",
            what=f"rank {rank.rank} on {rank.host} got a lock that rank 0 holds",
            why="two runs in one directory are not noticed, and remove each other's checkpoints",
            command="mount -o local_lock=none, or --run-dir on another file system",
        )


def _equal(facts: MachineFacts) -> Iterator[Finding]:
    if len(facts.nodes) < 2:
        return
    hosts, equal = [node.host for node in facts.nodes], True
    for name, level in _MUST_MATCH.items():
        values = grouped((getattr(host, name), host.host) for host in hosts)
        if len(values) > 1:
            equal = False
            shown = "; ".join(f"{value or 'none'} on {', '.join(where[:3])}" for value, where in values.items())
            yield Finding(
                "versions",
                level,
                f"{name.replace('_', ' ')} differs: {shown}",
                "other versions give other bits, or do not understand each other" if level == "problem" else "",
                "one environment on a shared file system, or the same image on all nodes",
            )
    if len({tuple(sorted(host.variables.items())) for host in hosts}) > 1:
        names = sorted(
            {n for h in hosts for n, v in h.variables.items() if any(o.variables.get(n) != v for o in hosts)}
        )
        yield note("versions", what=f"variables differ between nodes: {', '.join(names)}", command="env | sort")
    families = {host.host: any(":" not in a for a in host.addresses()) for host in hosts}
    if len(set(families.values())) > 1:
        yield problem(
            "interfaces",
            what=f"IPv6 alone on {', '.join(h for h, has in families.items() if not has)}, IPv4 elsewhere",
            why="gloo takes the first address of an interface, IPv4 before IPv6, and these do not meet",
            command="ip -4 addr",
        )
    if equal:
        yield ok("versions", what=f"equal on {plural(len(hosts), 'node')}, Lockstep's own code too")


#: Of `HostFacts`: what must be equal on all nodes, and what had better be.
_MUST_MATCH: Final[Mapping[str, Level]] = {
    **dict.fromkeys(("python", "torch", "torch_cuda", "lockstep", "code", "numpy"), "problem"),
    **dict.fromkeys(("driver", "kernel"), "note"),
}


def _affinity(facts: MachineFacts) -> Iterator[Finding]:
    for number, node in enumerate(facts.nodes):
        ranks = [rank for rank in facts.seen.ranks if rank.node == number]
        own = {cpu for rank in ranks for cpu in rank.cpus}
        threads = sum(rank.threads for rank in ranks)
        if own and threads > len(own) and not ranks[0].on_gpu:
            yield note(
                "CPUs",
                what=f"{plural(len(ranks), 'rank')} with {plural(threads, 'thread')} share "
                f"{plural(len(own), 'CPU')} on {node.host.host}",
                why="they slow each other down",
                command=f"--nproc-per-node {max(1, len(own) // max(1, ranks[0].threads))}"
                if len(own) >= node.host.cpus
                else "unset OMP_PROC_BIND GOMP_CPU_AFFINITY, or mpirun --bind-to none",
            )


def _allocated(facts: MachineFacts) -> Iterator[Finding]:
    wanted, tested = facts.nodes[0].host.scheduler_nodes, len({rank.node for rank in facts.seen.ranks})
    if tested < wanted:
        what = f"{tested} of the job's {plural(wanted, 'node')} took part"
        yield note("scheduler", what=what, command="lockstep doctor, in the job's script, without --nodes")


#: Of all nodes together.
RULES: Final = (_ranks, _links, _ports, _clocks, _equal, _shared_files, _affinity, _allocated)
