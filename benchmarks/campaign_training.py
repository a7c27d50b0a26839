"""One training of the campaign, on hosts of its own: started, looked at, let go, and what it has left behind.

Each host has its own processes, network and `/dev/shm` (`hosts.py`), so whatever is found there afterwards was left by
this training, however many others run beside it.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import lockstep
from campaign_scripts import PLAIN, SAVE_EVERY, TRAIN
from faulty_files import FaultyFiles
from hosts import Host, Hosts, hosts

T = TypeVar("T")
HOME = str(Path(lockstep.__file__).parents[1])
#: For any one thing that is waited for.
LIMIT_S = 300.0
#: Within so long after its launcher a run must be gone from a host.
LEFT_S = 10.0
RESTARTS = 100
ENDPOINT_PORT = 29400
#: Torch says where it cannot look up the name of an address.
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True)
class Manner:
    """How a training is started."""

    way: Literal["lockstep", "torchrun"] = "lockstep"
    nodes: int = 1
    ranks: int = 2  #: on each node
    ipv6: bool = False
    lost_after_s: int = 30
    takeover: bool = False
    strategy: str = "ddp"
    mirror: bool = False
    epochs: int = 30
    hang_after_s: int = 20


@dataclass(frozen=True)
class Step:
    """A step that the leader has done."""

    at_s: float  #: on the machine's monotonic clock, which no fault sets
    generation: str
    ranks: int
    number: int


@dataclass
class Training:
    """Launchers on hosts, in one directory that all of them see."""

    machines: Hosts
    here: Path
    manner: Manner
    draw: random.Random
    launchers: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    #: Hosts whose launchers were killed or told to leave the others.
    excused: set[str] = field(default_factory=set)

    def launch(
        self,
        host: str,
        *more: str,
        script: str = "train.py",
        env: dict[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        """Start the launcher of ``host``; ``more`` are options for it, ``within`` is the command that starts it."""
        if self.manner.way == "torchrun":
            script, command = "plain.py", ["-m", "torch.distributed.run", *_torchrun_options(self.manner)]
        else:
            command = ["-m", "lockstep", "run", *_lockstep_options(self.manner), *more]
        args = [str(self.manner.epochs), *(("1", "0.05") if self.manner.nodes == 1 else ("0", "0.2"))]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
        clean |= {"PYTHONPATH": HOME, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **_QUIET}
        clean["TMPDIR"] = str(self.temporary(host))
        # Torch keeps what it compiles for later runs: that is not left behind.
        clean["TORCHINDUCTOR_CACHE_DIR"] = str(self.here / "compiled")
        self.temporary(host).mkdir(exist_ok=True)
        self.excused.discard(host)
        with (self.here / f"{host}.screen").open("a") as screen:
            self.launchers[host] = self.machines[host].start(
                [*within, sys.executable, *command, script, *args],
                cwd=self.here,
                env=clean | self.files(host).env | (env or {}),
                stdout=screen,
                stderr=screen,
            )

    def files(self, host: str = "n1") -> FaultyFiles:
        """What befalls the files and the clock of ``host``."""
        return FaultyFiles(self.here / f"faulty-{host}")

    def temporary(self, host: str) -> Path:
        """The directory for temporary files of ``host``, another one each time that it comes up."""
        return self.here / f"tmp-{host}-{self.machines[host].place}"

    def steps(self) -> list[Step]:
        """The steps that were done, in the order of their lines."""
        with suppress(OSError):
            lines = [line.split() for line in (self.here / "steps").read_text().splitlines()]
            return [Step(float(at), made, int(ranks), int(step)) for at, made, ranks, step in lines]
        return []

    def screens(self) -> dict[str, str]:
        """What the launchers have said, by host."""
        return {path.stem: path.read_text(errors="replace") for path in sorted(self.here.glob("*.screen"))}

    def said(self, since: dict[str, str] | None = None) -> str:
        """What they have said since they had said that."""
        before = since or {}
        return "".join(text[len(before.get(host, "")) :] for host, text in self.screens().items())

    def ended(self, host: str = "n1") -> bool:
        """Whether the launcher of ``host`` has ended."""
        return self.launchers[host].poll() is not None

    @property
    def over(self) -> bool:
        """Whether no launcher runs, or none will make another step."""
        return not self.alive or (self.here / "digest-0").exists()

    @property
    def finishers(self) -> list[str]:
        """Hosts whose launchers are to end well."""
        return [name for name in self.launchers if self._is_up(name) and name not in self.excused]

    @property
    def alive(self) -> list[str]:
        """Hosts that are up and whose launcher runs."""
        return [name for name in self.launchers if self._is_up(name) and not self.ended(name)]

    def _is_up(self, host: str) -> bool:
        return self.machines[host].keeper.poll() is None

    def launcher(self, host: str = "n1") -> int:
        """The launcher's process."""
        return wait_for(lambda: children(self.launchers[host].pid), f"the launcher of {host}")[0]

    def fork_server(self, host: str = "n1") -> int:
        """The process that forks the ranks of ``host``."""
        launcher = self.launcher(host)
        return wait_for(
            lambda: next((p for p in children(launcher) if "fork-server" in command_of(p)), 0),
            f"the fork server of {host}",
        )

    def ranks_store(self, host: str = "n1") -> int:
        """The store where ranks meet, on the host that has it."""
        return self._store(host, lambda process, launcher: parent_of(process) != launcher)

    def launchers_store(self, host: str = "n1") -> int:
        """The store where launchers meet, on the host that has it."""
        return self._store(host, lambda process, launcher: parent_of(process) == launcher)

    def _store(self, host: str, is_it: Callable[[int, int], bool]) -> int:
        launcher = self.launcher(host)
        return wait_for(
            lambda: next(
                (p for p, n in self.machines[host].processes().items() if n == "lockstep store" and is_it(p, launcher)),
                0,
            ),
            f"a store on {host}",
        )

    def ranks(self, host: str = "n1") -> list[int]:
        """The processes of the ranks of ``host``."""

        def found() -> list[int]:
            if self.manner.way == "torchrun":
                started = children(self.launcher(host))
                return [process for process in started if b"\0RANK=" in read(process, "environ")]
            return [p for p, name in self.machines[host].processes().items() if re.fullmatch(r"rank \d+", name)]

        return wait_for(
            lambda: all_found if len(all_found := found()) == self.manner.ranks else [], f"all ranks of {host}"
        )

    def rank(self, host: str = "n1") -> int:
        """The process of a rank of ``host``, drawn."""
        return self.draw.choice(self.ranks(host))

    def worker(self) -> int:
        """A rank's loader process, drawn."""
        rank = self.rank()
        return wait_for(lambda: children(rank), "a loader process")[0]

    def wait_for_checkpoint(self) -> None:
        """Wait until there is a checkpoint: somebody may have moved them away just now."""
        run_dir = self.run_dir
        wait_for(lambda: any(run_dir.glob("checkpoints/step-*")) or not self.alive, "a checkpoint")

    @property
    def run_dir(self) -> Path:
        """The run directory; on one host it is on a disk that only the host sees."""
        root = self.machines["n1"].root if self.manner.nodes == 1 else Path("/")
        return root / self.here.relative_to("/") / "r"

    def tell(self, code: str, place: str = "step", *, later: bool = False) -> int:
        """Have a rank, drawn, run ``code`` when it comes to that place of the script; its number.

        With ``later``, that may be after all other faults; else returns when it has come there.
        """
        rank = self.draw.randrange(self.manner.ranks * max(1, len(self.alive)))
        told = self.here / f"do-{place}-{rank}"
        (self.here / "do").write_text(code)
        (self.here / "do").rename(told)
        if not later:
            wait_for(lambda: not told.exists(), f"rank {rank} to do it")
        return rank

    def wait_for_steps(self, more: int, *, ranks: int = 0) -> None:
        """Wait until so many more steps are done, with so many ranks if that is given, or all launchers have ended."""
        before = len(self.steps())

        def enough() -> bool:
            new = self.steps()[before:]
            return len([step for step in new if ranks in (0, step.ranks)]) >= more or not self.alive

        wait_for(enough, f"{more} more steps")

    def go(self) -> None:
        """Have the training end soon."""
        (self.here / "go").touch()

    def left_of(self, *names: str) -> list[str]:
        """What is left on these hosts `LEFT_S` after their launchers, in words."""

        def found() -> list[str]:
            there = [self.machines[name] for name in names if self._is_up(name)]
            return [f"{host.name}: {what}" for host in there for what in _left_on(host, self.temporary(host.name))]

        with suppress(TimeoutError):
            wait_for(lambda: not found(), "the end of all", LEFT_S)
        return found()


def _lockstep_options(manner: Manner) -> list[str]:
    options: list[object] = ["--nproc-per-node", manner.ranks, "--run-dir", "r", "--max-restarts", RESTARTS]
    options += ["--save-every", f"{SAVE_EVERY} steps", "--grace", 3, "--strategy", manner.strategy]
    options += ["--set", "mirror=true"] * manner.mirror
    options += ["--hang-after", manner.hang_after_s, "--on-hang", "restart"]
    if manner.nodes > 1:
        quick = f"suspect_after={min(5, manner.lost_after_s / 3):g},last_call_timeout=2,join_timeout=100"
        options += ["--nnodes", f"1:{manner.nodes}", "--rdzv-endpoint", f"n1:{ENDPOINT_PORT}", "--refill-after", 1]
        options += ["--rdzv-conf", f"lost_after={manner.lost_after_s},{quick}"]
        options += ["--rdzv-takeover"] * manner.takeover
    return list(map(str, options))


def _torchrun_options(manner: Manner) -> list[str]:
    options = ["--nproc-per-node", str(manner.ranks), "--max-restarts", str(RESTARTS), "--rdzv-backend", "c10d"]
    if manner.nodes == 1:
        return [*options, "--nnodes", "1", "--rdzv-endpoint", "localhost:0"]
    beats = manner.lost_after_s // 3
    conf = f"last_call_timeout=2,join_timeout=100,keep_alive_interval={beats},keep_alive_max_attempt=3"
    return [*options, "--nnodes", f"1:{manner.nodes}", "--rdzv-endpoint", f"n1:{ENDPOINT_PORT}", "--rdzv-conf", conf]


def _left_on(host: Host, temporary: Path) -> Iterator[str]:
    for process, name in host.processes().items():
        yield f"process {process} ({name})"
    for directory in (host.root / "dev" / "shm", temporary):
        with suppress(OSError):
            yield from (f"{directory.name}/{path.name}" for path in directory.iterdir())
    for table in ("tcp", "tcp6", "unix"):
        with suppress(OSError):
            for line in (Path("/proc") / str(host.place) / "net" / table).read_text().splitlines()[1:]:
                # The kernel keeps closed connections for a while, and sockets of the machine's own are not here.
                if table == "unix" or line.split()[3] in ("0A", "01"):
                    yield f"socket {table} {line.strip()}"


def children(process: int) -> list[int]:
    """What ``process`` has started and lives."""
    with suppress(OSError):
        return [int(n) for n in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def read(process: int, name: str) -> bytes:
    """A file of ``process`` in ``/proc``; empty if it is gone. Begins with a zero byte."""
    with suppress(OSError):
        return b"\0" + Path(f"/proc/{process}/{name}").read_bytes()
    return b""


def command_of(process: int) -> str:
    """The command line of ``process``."""
    return read(process, "cmdline").decode(errors="replace")


def parent_of(process: int) -> int:
    """The parent of ``process``; 0 if it is gone."""
    fields = read(process, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def send(process: int, signum: signal.Signals) -> None:
    """Signal a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(process, signum)


def wait_for(happened: Callable[[], T], what: str, limit_s: float = LIMIT_S) -> T:
    """The first true value of ``happened``.

    Raises:
        TimeoutError: if there is none in time.
    """
    end_s = time.monotonic() + limit_s
    while not (value := happened()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"waited {limit_s:g} s for {what}")
        time.sleep(0.05)
    return value


@contextmanager
def training(manner: Manner, draw: random.Random) -> Iterator[Training]:
    """Hosts and a directory with the scripts; nothing is left of them."""
    with tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True) as place:
        here = Path(place)
        (here / "train.py").write_text(TRAIN)
        (here / "plain.py").write_text(PLAIN)
        with hosts(manner.nodes, ipv6=manner.ipv6, memory="256m") as machines:
            if manner.nodes == 1:
                # A small disk of its own, which may be filled.
                (here / "r").mkdir(mode=0o700)
                small = "size=96m,nr_inodes=2000,mode=0700"
                machines["n1"].run("mount", "-t", "tmpfs", "-o", small, "disk", str(here / "r"))
            one = Training(machines, here, manner, draw)
            try:
                yield one
            finally:
                for host in machines.up.values():
                    with suppress(subprocess.TimeoutExpired):
                        host.kill()
                _reap(one.launchers.values())


def _reap(launchers: Sequence[subprocess.Popen[str]]) -> None:
    for launcher in launchers:
        # One that was stopped with its child does not see that it is gone.
        launcher.send_signal(signal.SIGCONT)
        launcher.wait(LIMIT_S)
