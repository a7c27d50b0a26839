"""The kinds of faults of the campaign that befall machines and the network between them, on two to four hosts.

What befalls a host befalls the last one that takes part, or `n1`, which is the host of the endpoint. A kind that needs
another host while only `n1` is left brings those that are gone back first (`complete`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace

from campaign_faults import KILL, STOP, Fault, Group, Strike, killed_by
from campaign_ranks import itself
from campaign_training import ENDPOINT_PORT, Training, read, send, wait_for
from hosts import Host

#: A host that takes part beside those that train, with something else than they have.
_OTHER = "n8"


def others_there(training: Training) -> None:
    """Have another host than `n1` take part."""
    if training.alive in ([], ["n1"]) or training.steps()[-1].ranks < training.manner.ranks * 2:
        complete(training)


def one_gone(training: Training) -> None:
    """Have a host be gone, and the others train without it."""
    if not _gone(training):
        training.machines[_victim(training).name].kill()
        training.wait_for_steps(2, ranks=training.manner.ranks * len(training.alive))


def complete(training: Training) -> None:
    """Bring hosts back that are gone, and wait until all train."""
    for name in _gone(training):
        _bring_back(training, name)
    training.wait_for_steps(2, ranks=training.manner.nodes * training.manner.ranks)


def _gone(training: Training) -> list[str]:
    every = [f"n{number}" for number in range(1, training.manner.nodes + 1)]
    return [name for name in every if name not in training.alive]


def _bring_back(training: Training, name: str) -> None:
    if training.machines[name].keeper.poll() is not None:
        training.machines.boot(name)
    training.launch(name)


def _victim(training: Training) -> Host:
    """The last host that takes part, which is not `n1`; one that an earlier fault has taken away is brought back."""
    others_there(training)
    return training.machines[max(name for name in training.alive if name != "n1")]


def for_seconds(
    seconds: float, begin: Callable[[Host], None], end: Callable[[Host], None], *, back: bool = False, name: str = ""
) -> Strike:
    """Something befalls a host for some seconds; with ``back`` it has then to come back and train again."""

    def strike(training: Training) -> None:
        host = training.machines[name] if name else _victim(training)
        begin(host)
        time.sleep(seconds)
        end(host)
        if back:
            training.wait_for_steps(2, ranks=training.manner.ranks * len(training.alive))

    return strike


def packets(rule: str, seconds: float, says: str = "", *, name: str = "") -> Fault:
    """What a host, ``name`` or another one than `n1`, is sent goes as iptables says, for some seconds."""

    def strike(training: Training) -> None:
        host = training.machines[name] if name else _victim(training)
        host.run("iptables", "-I", "INPUT", *rule.split())
        try:
            time.sleep(seconds)
            counted = [line.split() for line in host.run("iptables", "-nvxL").splitlines()]
            assert any(row and row[0].isdigit() and int(row[0]) for row in counted), "no packet was struck"
        finally:
            host.run("iptables", "-F")

    return Fault(strike, says, ends=bool(says))


def parted(seconds: float) -> Strike:
    """Two hosts do not hear each other for some seconds; both reach `n1`."""

    def strike(training: Training) -> None:
        one, other = (training.machines[name] for name in sorted(training.alive)[-2:])
        assert "n1" not in (one.name, other.name), "two hosts beside n1 are needed"
        one.mute(other.address)
        other.mute(one.address)
        time.sleep(seconds)
        one.clear()
        other.clear()

    return strike


def flapping(training: Training) -> None:
    """The network card of a host goes down and up five times."""
    for _ in range(5):
        _victim(training).run("sh", "-c", "ip link set eth0 down; sleep 0.1; ip link set eth0 up")
        time.sleep(0.2)


def readdressed(training: Training) -> None:
    """The address of a host is gone for three seconds."""
    host = _victim(training)
    host.run("ip", "address", "delete", f"{host.address}/24", "dev", "eth0")
    time.sleep(3.0)
    host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")


def nameless(training: Training) -> None:
    """No host knows the name of another one any more, and a rank is killed; the names come back."""
    known = {name: host.hosts_file.read_text() for name, host in training.machines.up.items()}
    for host in training.machines.up.values():
        host.hosts_file.write_text("127.0.0.1 localhost\n")
    send(training.rank(_victim(training).name), KILL)
    training.wait_for_steps(3)
    for name, text in known.items():
        training.machines[name].hosts_file.write_text(text)


def ahead(training: Training) -> None:
    """The wall clock of a host is eleven days ahead, and its rank is killed."""
    name = _victim(training).name
    training.files(name).rule(clock_s=11 * 86400)
    training.wait_for_steps(5)
    send(training.rank(name), KILL)
    training.wait_for_steps(5)
    training.files(name).rule()


def connection_ended(training: Training) -> None:
    """One of a rank's connections is shut down, drawn among all that it has."""
    which = training.draw.random()
    training.tell(_SHUTS_DOWN.format(which), "step")


#: A TCP connection to another host, as the kernel's table lists it, has a descriptor in this process.
_SHUTS_DOWN = """
import socket
found = []
for name in os.listdir('/proc/self/fd'):
    try:
        if 'socket' in os.readlink(f'/proc/self/fd/{{name}}'):
            one = socket.socket(fileno=os.dup(int(name)))
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                one.getpeername()
                found.append(one)
    except OSError:
        pass
found[int({} * len(found))].shutdown(socket.SHUT_RDWR)
"""


def host_killed(training: Training) -> None:
    """The power of a host goes."""
    _victim(training).kill()


def host_comes(training: Training) -> None:
    """A host that is gone comes back."""
    _bring_back(training, _gone(training)[0])


def launcher_killed(training: Training) -> None:
    """The launcher of a host is killed."""
    host = _victim(training).name
    training.excused.add(host)
    send(training.launcher(host), KILL)


def of_host(process: Callable[[Training, str], int], signum: signal.Signals) -> Strike:
    """A process of a host other than `n1` gets ``signum``."""
    return lambda training: send(process(training, _victim(training).name), signum)


def launchers_store_killed(training: Training) -> None:
    """The store where launchers meet is killed; returns when all have found the new one."""
    send(training.launchers_store(), KILL)
    wait_for(lambda: _connected(training) >= len(training.alive), "the launchers to find the new store")


def _connected(training: Training) -> int:
    """How many connections the store of the launchers has accepted: those that wait for it have no inode yet."""
    place, port = training.machines["n1"].place, f":{ENDPOINT_PORT:04X}"
    rows = [line.split() for name in ("tcp", "tcp6") for line in read(place, f"net/{name}").decode().splitlines()]
    return sum(len(row) > 9 and row[1].endswith(port) and row[3] == "01" and row[9] != "0" for row in rows)


def launcher_stands(training: Training) -> None:
    """The launcher of a host is stopped for eight seconds."""
    name = _victim(training).name
    send(training.launcher(name), STOP)
    time.sleep(8.0)
    training.launchers[name].send_signal(signal.SIGCONT)
    send(training.launcher(name), signal.SIGCONT)


def endpoint_killed(training: Training) -> None:
    """The power of the endpoint's host goes, and is back when the others have said what is to be done."""
    since = training.screens()
    training.machines["n1"].kill()
    wait_for(lambda: "cut off: " in training.said(since), "the others to be cut off")
    training.machines.boot("n1")
    training.launch("n1", "--resume")


def endpoint_killed_for_good(training: Training) -> None:
    """The power of the endpoint's host goes."""
    training.machines["n1"].kill()


def endpoint_sleeps(training: Training) -> None:
    """The endpoint's host is paused until another one has taken over, and then wakes up."""
    since = training.screens()
    training.machines["n1"].freeze()
    wait_for(lambda: "this node is the coordinator now" in training.said(since), "a new coordinator")
    training.machines["n1"].thaw()


def wanted_back(name: str = "") -> Strike:
    """A host, ``name`` or another one than `n1`, is told that its machine is wanted back."""

    def strike(training: Training) -> None:
        host = _victim(training).name
        launcher = training.launcher(name or host)
        training.excused.add(name or host)
        send(launcher, signal.SIGTERM)
        wait_for(lambda: training.ended(name or host), "the end of the host that is told to stop")

    return strike


def other(*options: str, text: tuple[str, str] = ("", ""), env: dict[str, str] | None = None) -> Fault:
    """A host comes to take part that has another script, other options or another environment."""

    def strike(training: Training) -> None:
        script = "other/train.py"
        (training.here / "other").mkdir(exist_ok=True)
        (training.here / script).write_text((training.here / "train.py").read_text().replace(*text))
        training.machines.boot(_OTHER)
        training.launch(_OTHER, *options, script=script if text[0] else "train.py", env=env)
        wait_for(lambda: training.ended(_OTHER), "the end of the host that is refused")
        training.machines[_OTHER].kill()

    return Fault(strike, rf"this node cannot take part in the job at .*on {_OTHER}", ends=False)


_LOST = r"lost node n\d \(rank"
_RANK = r"run failed: rank \d of \d \(host n\d\) "
_CONNECTIONS = r"run failed: .*(lost|connection)"
_SOME = "-m statistic --mode random --probability"
_STORE = f"-p tcp --dport {ENDPOINT_PORT}"

_GROUPS: dict[str, Group] = {
    "lost after 6 s": Group(
        {
            "a node is killed": Fault(host_killed, _LOST, beside=True),
            "a node is cut off for 15 s": Fault(for_seconds(15.0, Host.cut, Host.mend, back=True), _LOST, beside=True),
            "a node is paused for 12 s": Fault(for_seconds(12.0, Host.freeze, Host.thaw, back=True), _LOST),
            "a node comes": Fault(host_comes, r" came: stopping at a checkpoint", prepare=one_gone),
            "the launcher of a node is killed": Fault(launcher_killed, _LOST, beside=True),
            "the endpoint's host is killed, and comes back": Fault(
                endpoint_killed, r"(?s)cut off: .*to go on, on n1: "
            ),
        },
        lost_after_s=6,
    ),
    "lost after 30 s": Group(
        {
            "a node is cut off for 3 s": Fault(for_seconds(3.0, Host.cut, Host.mend), ends=False, beside=True),
            "a node is cut off for 12 s": Fault(
                for_seconds(12.0, Host.cut, Host.mend), r"nothing heard of", ends=False, beside=True
            ),
            "what a node sends is lost for 12 s": Fault(
                for_seconds(12.0, Host.mute, Host.clear), r"nothing heard of", ends=False, beside=True
            ),
            "what a node is sent is lost for 12 s": Fault(
                for_seconds(12.0, Host.deafen, Host.clear), r"nothing heard of", ends=False, beside=True
            ),
            "a node's link has 64 kbit/s for 10 s": Fault(
                for_seconds(10.0, lambda host: host.slow("64kbit", "2kb"), Host.clear), ends=False, beside=True
            ),
            "a connection of a rank is shut down": Fault(connection_ended, _CONNECTIONS),
            "a network card goes down and up": Fault(flapping, ends=False),
            "a node's address is gone for 3 s": Fault(readdressed, ends=False),
            "the endpoint's host is paused for 7 s": Fault(
                for_seconds(7.0, Host.freeze, Host.thaw, name="n1"), ends=False
            ),
            "names are unknown, and a rank is killed": Fault(nameless, killed_by(KILL)),
            "a rank of one node is killed": Fault(
                of_host(Training.rank, KILL), _RANK + r"w(as|ere) killed by SIGKILL", beside=True
            ),
            "exception on one node": Fault(
                itself("raise ValueError('bad label 255')"), _RANK + "raised ValueError", beside=True
            ),
            "the fork server of a node is killed": Fault(
                of_host(Training.fork_server, KILL),
                r"run failed: the fork server, which starts the ranks, w(as|ere) killed by SIGKILL",
            ),
            "the ranks' store is killed": Fault(
                lambda training: send(training.ranks_store(), KILL),
                r"run failed: the store where the ranks meet w(as|ere) killed by",
            ),
            "the launchers' store is killed": Fault(
                launchers_store_killed,
                r"the store where the launchers meet w(as|ere) killed by SIGKILL: starting another one",
                ends=False,
            ),
            "the launchers' store is stopped": Fault(
                lambda training: send(training.launchers_store(), STOP),
                r"the store where the launchers meet was stopped",
                ends=False,
            ),
            "the launcher of a node is stopped for 8 s": Fault(launcher_stands, r"nothing heard of", ends=False),
            "spot notice on one node": Fault(
                wanted_back(), r"n\d was told to stop \(SIGTERM\) and leaves", beside=True
            ),
            "another script on one node": other(text=("lr=0.01", "lr=0.02")),
            "another variable on one node": other(env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
            "another setting on one node": other("--set", "clip_norm=2"),
        }
    ),
    "packets": Group(
        {
            "30 % of packets are lost at a node for 6 s": packets(f"{_SOME} 0.3 -j DROP", 6.0),
            "90 % of packets are lost at the endpoint's host for 6 s": packets(f"{_SOME} 0.9 -j DROP", 6.0, name="n1"),
            "packets over 300 bytes are lost for 6 s": packets("-m length --length 300: -j DROP", 6.0),
            "a node is refused by ICMP for 3 s": packets("-j REJECT", 3.0),
            "connections of a node are reset": packets("-p tcp -j REJECT --reject-with tcp-reset", 2.0, _CONNECTIONS),
            "only the launchers' store is out of reach for 6 s": packets(f"{_STORE} -j DROP", 6.0, name="n1"),
            "the launchers' store answers with resets for 6 s": packets(
                f"{_STORE} -j REJECT --reject-with tcp-reset", 6.0, name="n1"
            ),
            "a node's clock is 11 days ahead, and its rank is killed": Fault(ahead, killed_by(KILL)),
        },
        needs=("iptables", "cc"),
    ),
    "two beside the endpoint's": Group(
        {
            "two nodes do not hear each other for 8 s": Fault(parted(8.0), ends=False, prepare=complete),
            "two nodes do not hear each other for 50 s": Fault(
                parted(50.0), r"(?s)run failed: .*(n2.*n3|n3.*n2)", prepare=complete
            ),
        },
        nodes=(3,),
        most=2,
        hang_after_s=25,
    ),
    "takeover": Group(
        {
            "the endpoint's host is killed, with --rdzv-takeover": Fault(
                endpoint_killed_for_good, r"this node is the coordinator now"
            ),
            "the endpoint's host is paused, with --rdzv-takeover": Fault(
                endpoint_sleeps, r"this node is the coordinator now"
            ),
            "spot notice on the endpoint's host, with --rdzv-takeover": Fault(
                wanted_back("n1"), r"this node is the coordinator now"
            ),
        },
        lost_after_s=6,
        takeover=True,
        nodes=(3,),
        most=1,
    ),
    "IPv6 only": Group(
        {
            "IPv6 only: a node is killed": Fault(host_killed, _LOST),
            "IPv6 only: a rank of one node is killed": Fault(
                of_host(Training.rank, KILL), _RANK + r"w(as|ere) killed by SIGKILL"
            ),
            "IPv6 only: the endpoint's host is killed, and comes back": Fault(
                endpoint_killed, r"(?s)cut off: .*to go on, on n1: "
            ),
        },
        lost_after_s=6,
        ipv6=True,
    ),
}
_READY = {
    name: {
        kind: fault if fault.prepare in (one_gone, complete) else replace(fault, prepare=others_there)
        for kind, fault in group.kinds.items()
    }
    for name, group in _GROUPS.items()
}
#: Every kind but one needs another host than `n1`.
HOSTS: dict[str, Group] = {name: replace(group, kinds=_READY[name]) for name, group in _GROUPS.items()}
