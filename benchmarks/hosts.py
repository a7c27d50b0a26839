"""Several hosts on one machine, for tests and benchmarks: namespaces of network, processes, mounts and host name.

    switch (a network namespace of its own: a bridge, no address)
      ├── port-n1 ═══ eth0  n1  10.77.0.1      each host is one process, the first of its own process namespace,
      ├── port-n2 ═══ eth0  n2  10.77.0.2      with a host name, an /etc/hosts that names all of them, and no other
      └── ...                                  way out

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


@dataclass
class Host:
    """One machine."""

    name: str
    address: str
    place: int  #: process number, as seen from here, of its first process
    keeper: subprocess.Popen[str]
    switch: int
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
        shape = ("root", "tbf", "rate", rate, "burst", burst, "latency", "400ms")
        _in(self.switch, "tc", "qdisc", "replace", "dev", f"port-{self.name}", *shape)
        self.run("tc", "qdisc", "replace", "dev", "eth0", *shape)

    def _enter(self, *more: str) -> list[str]:
        return ["nsenter", f"--target={self.place}", "--net", "--uts", "--mount", "--pid", *more, "--"]


@dataclass
class Hosts:
    """All machines on one switch."""

    switch: int
    directory: Path
    up: dict[str, Host] = field(default_factory=dict)
    ipv6: bool = False  #: they have addresses of IPv6 only
    memory: str = "50%"  #: what each may keep in its /dev/shm, as mount says it; lost with the host

    def __getitem__(self, name: str) -> Host:
        """The host of this name."""
        return self.up[name]

    def boot(self, name: str) -> Host:
        """Start the host ``name``, ``n1`` to ``n250``, also once more after `Host.kill`."""
        number = int(name.removeprefix("n"))
        address = f"{_NETWORK_6}{number}" if self.ipv6 else f"{_NETWORK}.{number}"
        with contextlib.suppress(AssertionError):  # of one that was killed a moment ago
            _in(self.switch, "ip", "link", "delete", f"port-{name}")
        keeper = _keep(
            "--net",
            "--uts",
            "--mount",
            "--pid",
            "--mount-proc",
            script=f"""
            mount --bind {self.directory}/hosts /etc/hosts &&
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
        host = Host(name, address, place, keeper, self.switch)
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
        world = Hosts(_children(switch.pid)[0], Path(directory), ipv6=ipv6, memory=memory)
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
