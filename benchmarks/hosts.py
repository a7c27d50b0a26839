"""Several hosts on one machine, for tests and benchmarks: namespaces of network, processes, mounts and host name.

    switch (a network namespace of its own: a bridge, no address)
      ├── port-n1 ═══ eth0  n1  10.77.0.1      each host is one process, the first of its own process namespace,
      ├── port-n2 ═══ eth0  n2  10.77.0.2      with a host name, an /etc/hosts that names all of them, a /dev/shm of
      └── ...                                  its own, and no other way out

All of it hangs on processes that die with this one: however a test ends, nothing is left, and the machine's own
network, names and routes are never touched. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_DEADLINE_S = 30.0
_NETWORK = "10.77.0"
_NETWORK_6 = "fd77::"


@functools.cache
def why_not() -> str:
    """Why there can be no hosts here; "" if there can."""
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter", "setpriv") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        return f"needs {', '.join(missing)}" if missing else "needs root"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "sh", "-c", _A_NETWORK_AT_ALL],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return "" if tried.returncode == 0 else f"no network namespaces: {tried.stderr.strip()}"


_A_NETWORK_AT_ALL = "ip link add br0 type bridge && ip link add v0 type veth peer name v1 && ip link set v0 master br0"


def _bucket(rate: str, burst: str) -> tuple[str, ...]:
    return ("tbf", "rate", rate, "burst", burst, "latency", "400ms")


_NOBODY = "02:00:00:00:00:ff"  # is the card of no host
#: A bucket that holds less than any packet.
_NOTHING_PASSES = _bucket("1kbit", "10b")


@dataclass
class Host:
    """One machine."""

    name: str
    address: str
    place: int  #: process number, as seen from here, of its first process
    keeper: subprocess.Popen[str]
    switch: int
    hosts_file: Path  #: its /etc/hosts
    others: Sequence[str] = ()  #: addresses of the other hosts
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], **more: object
    ) -> subprocess.Popen[str]:
        """Start ``command`` on this host; ``signal`` of it goes through `Host.signal`."""
        started: subprocess.Popen[str] = subprocess.Popen(
            [*self._enter(f"--wd={cwd}"), *command],
            env=dict(env),
            text=True,
            **{"stdin": subprocess.DEVNULL, **more},  # type: ignore[call-overload]
        )
        self.started.append(started)
        return started

    def run(self, *command: str) -> str:
        """Run a short ``command`` on this host; what it printed."""
        done = subprocess.run(
            [*self._enter(), *command], capture_output=True, text=True, check=False, timeout=_DEADLINE_S
        )
        assert done.returncode == 0, f"{command} on {self.name}: {done.stderr}"
        return done.stdout

    @staticmethod
    def signal(started: subprocess.Popen[str], signum: int) -> None:
        """Send ``signum`` to the process that `start` has started."""
        for child in _children(started.pid):
            os.kill(child, signum)

    def kill(self) -> None:
        """As if the power went: every process of this host is gone at once, its network too."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.place, signal.SIGKILL)
        self.keeper.wait(_DEADLINE_S)

    def freeze(self) -> None:
        """Stop every process of this host, as when a virtual machine is paused; what it is sent is still received."""
        self.run("sh", "-c", "kill -STOP -1")

    def thaw(self) -> None:
        """Undo `freeze`."""
        self.run("sh", "-c", "kill -CONT -1")
        for one in self.started:
            # It entered the host, and was stopped with what it started there.
            one.send_signal(signal.SIGCONT)

    def cut(self) -> None:
        """Nothing that this host sends arrives any more, or the other way round; nobody is told."""
        _in(self.switch, "ip", "link", "set", f"port-{self.name}", "nomaster")

    def mend(self) -> None:
        """Undo `cut`."""
        _in(self.switch, "ip", "link", "set", f"port-{self.name}", "master", "bridge")

    def slow(self, rate: str, burst: str = "32kb") -> None:
        """Limit what this host sends and is sent to ``rate`` each, such as ``10mbit``."""
        self._shape_sent("replace", *_bucket(rate, burst))
        self._shape_received("replace", *_bucket(rate, burst))

    def mute(self, *addresses: str) -> None:
        """Nothing that this host sends to ``addresses`` arrives any more, and nobody is told; without any: to no host.

        What it is sent does arrive.
        """
        # It sends to cards that nobody has. Where its own queue drops packets, TCP knows and soon gives up.
        for address in addresses or self.others:
            self.run("ip", "neighbour", "replace", address, "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")

    def deafen(self) -> None:
        """Nothing that this host is sent arrives any more, and nobody is told; what it sends does arrive."""
        self._shape_received("replace", *_NOTHING_PASSES)

    def clear(self) -> None:
        """Undo `slow`, `mute` and `deafen`, whichever was done."""
        for address in self.others:
            with contextlib.suppress(AssertionError):  # it was not mute
                self.run("ip", "neighbour", "delete", address, "dev", "eth0")
        for shape in (self._shape_sent, self._shape_received):
            with contextlib.suppress(AssertionError):  # there is nothing to undo in this direction
                shape("del")

    def processes(self) -> dict[int, str]:
        """What runs on this host, by process number as seen from here; not its first process, which keeps it up."""
        space, found = os.stat(f"/proc/{self.place}/ns/pid").st_ino, {}
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.stat(directory / "ns" / "pid").st_ino == space and int(directory.name) != self.place:
                    # The first process reaps no orphans, as that of many containers does not: zombies stay.
                    dead = (directory / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
                    found |= {} if dead else {int(directory.name): (directory / "comm").read_text().strip()}
        return found

    @property
    def root(self) -> Path:
        """The root of this host's file system, as seen from here."""
        return Path(f"/proc/{self.place}/root")

    def _shape_sent(self, what: str, *shape: str) -> None:
        self.run("tc", "qdisc", what, "dev", "eth0", "root", *shape)

    def _shape_received(self, what: str, *shape: str) -> None:
        _in(self.switch, "tc", "qdisc", what, "dev", f"port-{self.name}", "root", *shape)

    def plug(self, card: str, address: str) -> None:
        """Add the network interface ``card``, with ``address/prefix``, to the same switch."""
        port = f"{card}-{self.name}"
        _in(self.switch, "ip", "link", "add", port, "type", "veth", "peer", "name", card, "netns", str(self.place))
        _in(self.switch, "ip", "link", "set", port, "master", "bridge", "up")
        self.run("sh", "-c", f"ip address add {address} dev {card} nodad && ip link set {card} up")

    def like_debian(self) -> None:
        """Its own name stands for its loopback, here alone; and it has a bridge of containers, as every host has."""
        lines = self.hosts_file.read_text().splitlines()
        own = [f"127.0.1.1 {self.name}.lan {self.name}" if line.split()[1] == self.name else line for line in lines]
        self.hosts_file.write_text("\n".join(own) + "\n")
        bridge = "ip link add docker0 type bridge && ip address add 172.17.0.1/16 dev docker0 && ip link set docker0 up"
        self.run("sh", "-c", bridge)

    def _enter(self, *more: str) -> list[str]:
        return ["nsenter", f"--target={self.place}", "--net", "--uts", "--mount", "--pid", *more, "--"]


@dataclass
class Hosts:
    """All machines on one switch."""

    switch: int
    directory: Path
    up: dict[str, Host] = field(default_factory=dict)
    ipv6: bool = False  #: they have addresses of IPv6 only
    named: int = 8  #: hosts whose names are known
    memory: str = "50%"  #: what each may keep in its /dev/shm, as mount says it; lost with the host

    def __getitem__(self, name: str) -> Host:
        """The host of this name."""
        return self.up[name]

    def boot(self, name: str) -> Host:
        """Start the host ``name``, ``n1`` to ``n250``, also once more after `Host.kill`."""
        number = int(name.removeprefix("n"))
        network = _NETWORK_6 if self.ipv6 else f"{_NETWORK}."
        address = f"{network}{number}"
        with contextlib.suppress(AssertionError):  # of one that was killed a moment ago
            _in(self.switch, "ip", "link", "delete", f"port-{name}")
        hosts_file = self.directory / f"hosts-{name}"
        shutil.copyfile(self.directory / "hosts", hosts_file)
        keeper = _keep(
            "--net",
            "--uts",
            "--mount",
            "--pid",
            "--mount-proc",
            script=f"""
            mount --bind {hosts_file} /etc/hosts &&
            {{ [ ! -e /etc/resolv.conf ] || mount --bind {self.directory}/resolv.conf /etc/resolv.conf; }} &&
            mount -t tmpfs -o size={self.memory} tmpfs /dev/shm &&
            hostname {name} && ip link set lo up && echo up && exec sleep infinity""",
        )
        place = _children(keeper.pid)[0]
        port = f"port-{name}"
        # The same card each time, or the others would talk to the one of before for a while.
        card = ("peer", "name", "eth0", "address", f"02:00:00:00:00:{number:02x}", "netns", str(place))
        _in(self.switch, "ip", "link", "add", port, "type", "veth", *card)
        _in(self.switch, "ip", "link", "set", port, "master", "bridge", "up")
        others = [f"{network}{other}" for other in range(1, self.named + 1) if other != number]
        host = Host(name, address, place, keeper, self.switch, hosts_file, others)
        # Without nodad an address of IPv6 could not be used for a second or two.
        added = f"{address}/64 dev eth0 nodad" if self.ipv6 else f"{address}/24 dev eth0"
        host.run("sh", "-c", f"ip address add {added} && ip link set eth0 up")
        self.up[name] = host
        return host


@contextlib.contextmanager
def hosts(count: int, *, named: int = 8, ipv6: bool = False, memory: str = "50%") -> Iterator[Hosts]:
    """``count`` hosts ``n1``, ``n2``... on one switch; the names of ``named`` are known. All gone afterwards.

    With ``ipv6`` they have addresses of IPv6 only, and names that stand for these. Each has a ``/dev/shm`` of its own,
    of so much ``memory``.
    """
    with tempfile.TemporaryDirectory(prefix="hosts-") as directory, contextlib.ExitStack() as stack:
        network = _NETWORK_6 if ipv6 else f"{_NETWORK}."
        local = "::1 localhost" if ipv6 else "127.0.0.1 localhost"
        lines = [local, *(f"{network}{number} n{number}" for number in range(1, named + 1))]
        Path(directory, "hosts").write_text("\n".join(lines) + "\n")
        # No name server: an unknown name is refused at once, as a good one would.
        Path(directory, "resolv.conf").write_text("options timeout:1 attempts:1\n")
        switch = _keep(
            "--net",
            script="ip link add bridge type bridge forward_delay 0 && ip link set bridge up "
            "&& echo up && exec sleep infinity",
        )
        stack.callback(_end, switch)
        world = Hosts(_children(switch.pid)[0], Path(directory), ipv6=ipv6, named=named, memory=memory)
        # The other way round: the hosts end, and with them what was started there.
        stack.callback(lambda: [one.wait(_DEADLINE_S) for host in world.up.values() for one in host.started])
        stack.callback(lambda: [_end(host.keeper) for host in world.up.values()])
        for number in range(1, count + 1):
            world.boot(f"n{number}")
        yield world


def _keep(*namespaces: str, script: str) -> subprocess.Popen[str]:
    """A process that holds namespaces open and dies with this one; returns once ``script`` has said ``up``."""
    keeper = subprocess.Popen(
        ["setpriv", "--pdeathsig=KILL", "unshare", *namespaces, "--fork", "--kill-child", "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # some versions of unshare complain when their child is killed
        text=True,
        start_new_session=True,
        env={"PATH": os.environ["PATH"], "LOCKSTEP_TEST_SESSION": os.environ.get("LOCKSTEP_TEST_SESSION", "")},
    )
    assert keeper.stdout is not None
    said = keeper.stdout.readline()
    keeper.stdout.close()
    assert said == "up\n", f"a host did not come up: {said}"
    return keeper


def _end(keeper: subprocess.Popen[str]) -> None:
    for child in _children(keeper.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    keeper.kill()
    keeper.wait(_DEADLINE_S)


def _in(place: int, *command: str) -> None:
    done = subprocess.run(
        ["nsenter", f"--target={place}", "--net", "--", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=_DEADLINE_S,
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _children(parent: int) -> list[int]:
    end = time.monotonic() + _DEADLINE_S
    while True:
        try:
            found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        except OSError:
            return []
        if found or time.monotonic() > end:
            return [int(child) for child in found]
        time.sleep(0.005)
