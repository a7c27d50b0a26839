"""What a user asks the launcher for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from lockstep.errors import SettingError

#: How ranks come to life: as copies of one process that has imported torch, or each as a Python of its own.
Way = Literal["fork", "plain"]
#: What to do once a hang is reported.
OnHang = Literal["wait", "abort", "restart"]
#: Where launchers meet if only a host is given; torchrun's too.
DEFAULT_PORT = 29400
#: Torchrun's names in ``--rdzv-conf``, as far as they mean something here, and two of ours.
_CONF = {"join_timeout": "join_timeout_s", "last_call_timeout": "last_call_s", "lost_after": "lost_after_s"}


@dataclass(frozen=True, slots=True)
class Script:
    """A file, run as ``python name args`` would."""

    name: str
    args: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """What the run is called after."""
        return Path(self.name).stem


@dataclass(frozen=True, slots=True)
class Module:
    """A module, run as ``python -m name args`` would."""

    name: str
    args: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """What the run is called after."""
        return self.name.removesuffix(".__main__").rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Function:
    """A function without arguments; its ranks are copies of the process that made it."""

    call: Callable[[], Any]

    @property
    def name(self) -> str:
        """The function's own name."""
        return getattr(self.call, "__name__", "function")

    @property
    def stem(self) -> str:
        """What the run is called after."""
        return self.name.strip("<>")


Program = Script | Module | Function


@dataclass(frozen=True, slots=True)
class Nodes:
    """That a run goes over several machines, each with a launcher of its own, and where those meet."""

    least: int
    most: int
    endpoint: str  #: ``host:port``
    run_id: str = ""  #: must be the same for all
    join_timeout_s: float = 600.0  #: how long missing nodes are waited for
    last_call_s: float = 3.0  #: how long more than ``least`` are waited for
    lost_after_s: float = 5.0  #: a node of which nothing is heard for so long is lost
    max_changes: int = 10  #: restarts after nodes were lost or came
    hosts: tuple[str, ...] = ()  #: that are expected, where a scheduler says so

    @property
    def host(self) -> str:
        """Where the launchers meet."""
        return self.endpoint.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """At which port they do."""
        return int(self.endpoint.rpartition(":")[2])

    @classmethod
    def of(cls, nnodes: str, endpoint: str | None, run_id: str | None, conf: str | None) -> Self | None:
        """What torchrun's options say; None for one machine.

        Raises:
            SettingError: if they cannot be meant.
        """
        least, colon, most = nnodes.partition(":")
        if not (least.isdigit() and (most if colon else least).isdigit() and 0 < int(least) <= int(most or least)):
            raise SettingError(f"--nnodes {nnodes}: give a number of machines, or MIN:MAX such as 1:4")
        if int(most or least) == 1:
            return None
        if not endpoint:
            raise SettingError(
                f"--nnodes {nnodes}: say where the machines meet, the same on each: --rdzv-endpoint HOST:PORT, with "
                "HOST one of them"
            )
        host, _, port = endpoint.rpartition(":") if re.search(r":\d+$", endpoint) else (endpoint, "", str(DEFAULT_PORT))
        if not host or not 0 < int(port) < 65536:
            raise SettingError(f"--rdzv-endpoint {endpoint}: give HOST:PORT, with a port between 1 and 65535")
        more: dict[str, Any] = {}
        for word in filter(None, (conf or "").split(",")):
            name, _, value = word.partition("=")
            if name not in _CONF:
                raise SettingError(f"--rdzv-conf {name}: there are {', '.join(f'{one}=SECONDS' for one in _CONF)}")
            try:
                more[_CONF[name]] = float(value)
            except ValueError:
                raise SettingError(f"--rdzv-conf {word}: give {name}=SECONDS") from None
            if not more[_CONF[name]] > 0:
                raise SettingError(f"--rdzv-conf {word}: it must be more than 0 seconds")
        return cls(int(least), int(most or least), f"{host}:{port}", run_id or "", **more)


@dataclass(frozen=True, slots=True)
class Request:
    """All that a user may say about one run; nothing is checked yet (see `lockstep.launch.run_directory.prepare`)."""

    program: Program
    nproc_per_node: int | str | None = None  #: a number, "gpu", "cpu", "auto"; None: one for each GPU, else one
    run_dir: str | None = None  #: None: a new directory under ``runs``
    resume: bool = False  #: from the newest whole checkpoint
    fresh: bool = False  #: set an earlier run in ``run_dir`` aside
    max_restarts: int = 0  #: generations beyond the first that may be started after failures
    settings: Mapping[str, str] = field(default_factory=dict)  #: handed to `Run`, over what the script says
    bind: bool = False  #: each rank keeps to CPUs of its own
    grace_s: float = 10.0  #: seconds from asking a rank to end until it is killed
    hang_after_s: float | None = None  #: seconds without progress after which ranks hang; None: by their own pace
    on_hang: OnHang | None = None  #: None: end a generation that cannot end well by itself
    faults: str = ""  #: what is to go wrong on purpose, as `lockstep.heartbeat.FaultPlan` reads it
    ends_at_s: float | None = None  #: when the job that holds the run ends, in seconds since 1970; None: found out
    way: Way | None = None  #: None: what suits the machine
    nodes: Nodes | None = None  #: None: this machine alone
    requeue: bool = False  #: have the scheduler start the job again after a stop with a checkpoint
    everywhere: bool = True  #: in an allocation of several nodes, on all of them
    options: tuple[str, ...] = ()  #: all of this but the run directory and how to begin, as on a command line

    @property
    def subject(self) -> str:
        """What is run with which settings, in words, wherever and however it is started."""
        args = () if isinstance(self.program, Function) else self.program.args
        settings = [f"{name}={value}" for name, value in sorted(self.settings.items())]
        return shlex.join([*settings, self.program.name, *args])

    def command(self, *more: str) -> str:
        """This request on a command line, with ``more`` options; what to type next is said with it."""
        if isinstance(self.program, Function):
            return f"lockstep.launch({self.program.name}, ...) {shlex.join(more)}".rstrip()
        return shlex.join(["lockstep", *self.words(*more)])

    def words(self, *more: str) -> list[str]:
        """What follows ``lockstep`` on that command line. Not for a function."""
        module = ["-m"] if isinstance(self.program, Module) else []
        args = () if isinstance(self.program, Function) else self.program.args
        return ["run", *more, *self.options, *module, self.program.name, *args]
