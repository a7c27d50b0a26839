"""A user's request to the launcher."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from lockstep.errors import SettingError
from lockstep.formatting import command_line
from lockstep.launch.timeouts import LOST_AFTER_S, SUSPECT_AFTER_S, NodeTimeouts

#: How ranks are started: as copies of one process that has imported torch, or each as a Python process of its own.
#: ``copy``: that one process is itself a copy of the launcher's, which has imported torch already.
StartMethod = Literal["fork", "plain", "copy"]
#: What to do once a hang is reported.
OnHang = Literal["wait", "abort", "restart"]
#: Where launchers meet if only a host is given; torchrun's too.
DEFAULT_PORT = 29400
#: The same for ``--master-addr``.
DEFAULT_MASTER_PORT = 29500
#: Names in ``--rdzv-conf``: torchrun's, as far as they have a meaning here, and two of ours.
_CONF = {
    "join_timeout": "join_timeout_s",
    "last_call_timeout": "last_call_s",
    "lost_after": "lost_after_s",
    "suspect_after": "suspect_after_s",
}

#: Options whose keyword in `lockstep.launch` has another name.
_KEYWORDS = {"--nproc-per-node": "ranks", "--grace": "grace_s", "--hang-after": "hang_after_s"}


@dataclass(frozen=True, slots=True)
class Script:
    """A file, run as ``python name args`` would."""

    name: str
    args: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """The name that the run directory begins with."""
        return Path(self.name).stem


@dataclass(frozen=True, slots=True)
class Module:
    """A module, run as ``python -m name args`` would."""

    name: str
    args: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """The name that the run directory begins with."""
        return self.name.removesuffix(".__main__").rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Executable:
    """A program that need not be Python, run as a shell would run ``name args``."""

    name: str
    args: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """The name that the run directory begins with."""
        return Path(self.name).stem


@dataclass(frozen=True, slots=True)
class Function:
    """A function and its arguments; its ranks are copies of the process that made it."""

    call: Callable[..., Any]
    args: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """The function's own name."""
        return getattr(self.call, "__name__", "function")

    @property
    def stem(self) -> str:
        """The name that the run directory begins with."""
        return self.name.strip("<>")


Program = Script | Module | Executable | Function


def kind_options(program: Program) -> list[str]:
    """The option of ``lockstep run`` that says what kind of program the next word names; none for a script."""
    return ["-m"] * isinstance(program, Module) + ["--no-python"] * isinstance(program, Executable)


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How the nodes of a job stay together, whichever they are; as the options of the command line say it."""

    conf: str | None = None  #: times, as ``NAME=SECONDS,...``
    max_changes: int | None = None  #: as in `Nodes`
    spares: int = 0  #: as in `Nodes`
    takeover: bool = False  #: as in `Nodes`


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines of a run on several of them, each with a launcher of its own, and where the launchers meet."""

    min_nodes: int
    max_nodes: int
    endpoint: str  #: ``host:port``
    run_id: str = ""  #: must be the same for all
    join_timeout_s: float = 600.0  #: how long ``min_nodes`` are waited for
    last_call_s: float = 3.0  #: how long ``max_nodes`` are waited for once ``min_nodes`` are there
    lost_after_s: float = LOST_AFTER_S  #: a node that has reported nothing for so long is lost
    suspect_after_s: float = SUSPECT_AFTER_S  #: at most that; after so long it is lost, too, if its ranks must be dead
    #: Restarts after nodes were lost, joined or left; None: 10, or none for a fixed number of nodes without restarts.
    max_changes: int | None = None
    spares: int = 0  #: of ``max_nodes``, those that wait until another one is lost or leaves
    takeover: bool = False  #: another node may become the coordinator when its host is lost
    hosts: tuple[str, ...] = ()  #: of the allocation, where a scheduler names them
    node_rank: int | None = None  #: which of them this is; None: as they come

    @property
    def host(self) -> str:
        """The host where the launchers meet."""
        return self.endpoint.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port where the launchers meet."""
        return int(self.endpoint.rpartition(":")[2])

    @classmethod
    def of(
        cls,
        nnodes: str,
        endpoint: str | None,
        run_id: str | None,
        options: NodeOptions,
        *,
        node_rank: int | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
    ) -> Self | None:
        """What torchrun's options, and some of ours, say; None for one machine, where each start finds a free port.

        Raises:
            SettingError: if one of them has no meaning, or they contradict each other.
        """
        min_nodes, max_nodes = _node_range(nnodes)
        spares, max_changes = options.spares, options.max_changes
        if node_rank is not None and not 0 <= node_rank < max_nodes:
            raise SettingError(
                f"--node-rank {node_rank} with --nnodes {nnodes}: the first machine is 0, the last one {max_nodes - 1}"
            )
        if spares and not 0 < min_nodes <= max_nodes - spares < max_nodes:
            raise SettingError(
                f"--spares {spares} with --nnodes {nnodes}: {spares} of {max_nodes} machines wait as spares, and the "
                "others must be at least MIN, as in --nnodes 4:6 --spares 2"
            )
        if max_changes is not None and max_changes < 0:
            raise SettingError(f"--max-changes {max_changes}: it must be at least 0")
        if max_nodes == 1:
            return None
        if node_rank is not None and min_nodes < max_nodes:
            raise SettingError(
                f"--node-rank {node_rank} with --nnodes {nnodes}: machines that come and go have no fixed numbers; "
                "leave --node-rank out"
            )
        return cls(
            min_nodes,
            max_nodes,
            _endpoint(nnodes, endpoint, master_addr, master_port),
            run_id or "",
            node_rank=node_rank,
            max_changes=max_changes,
            spares=spares,
            takeover=options.takeover,
            **_rdzv_conf(options.conf or ""),
        )


def with_option(options: Sequence[str], name: str, value: str) -> tuple[str, ...]:
    """The words of a command line with ``value`` for the option ``name``, whether it was given before or not."""
    return (*without_options(options, valued=[name]), name, value)


def without_options(words: Sequence[str], names: Iterable[str] = (), *, valued: Iterable[str] = ()) -> tuple[str, ...]:
    """The words of a command line without the options ``names``, and without those of ``valued`` and their values."""
    left_out, with_value = set(names), set(valued)
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        option, equals, _ = word.partition("=")
        option = option.replace("_", "-")
        if option in with_value:
            if not equals:
                next(rest, None)
        elif option not in left_out:
            kept.append(word)
    return tuple(kept)


def _node_range(nnodes: str) -> tuple[int, int]:
    least, colon, most = nnodes.partition(":")
    most = most if colon else least
    if not (least.isdigit() and most.isdigit() and 0 < int(least) <= int(most)):
        raise SettingError(f"--nnodes {nnodes}: give a number of machines, or MIN:MAX such as 1:4")
    return int(least), int(most)


def _endpoint(nnodes: str, endpoint: str | None, master_addr: str | None, master_port: int | None) -> str:
    """``HOST:PORT`` where the launchers meet, as torchrun's two ways of saying it give it."""
    if master_addr or master_port:
        if endpoint:
            raise SettingError("--rdzv-endpoint and --master-addr say the same thing; give one of them")
        if not master_addr:
            raise SettingError(f"--master-port {master_port}: say --master-addr HOST, too, the same on each machine")
        endpoint = f"{master_addr}:{DEFAULT_MASTER_PORT if master_port is None else master_port}"
    if not endpoint:
        raise SettingError(
            f"--nnodes {nnodes}: say where the machines meet, the same on each: --rdzv-endpoint HOST:PORT, with HOST "
            "one of them"
        )
    before, colon, after = endpoint.rpartition(":")
    if colon and ":" not in before and not after.isdigit():
        raise SettingError(f"--rdzv-endpoint {endpoint}: {after!r} is no port; give HOST:PORT, with a number from 1")
    host, _, port = endpoint.rpartition(":") if re.search(r":\d+$", endpoint) else (endpoint, "", str(DEFAULT_PORT))
    if not host or not 0 < int(port) < 65536:
        option = "--master-addr and --master-port" if master_addr else f"--rdzv-endpoint {endpoint}"
        raise SettingError(f"{option}: give HOST:PORT, with a port between 1 and 65535")
    return f"{host}:{port}"


def _rdzv_conf(conf: str) -> dict[str, Any]:
    values: dict[str, float] = {}
    for entry in filter(None, conf.split(",")):
        name, _, value = entry.partition("=")
        if name not in _CONF:
            raise SettingError(f"--rdzv-conf {name}: there are {', '.join(f'{known}=SECONDS' for known in _CONF)}")
        try:
            values[_CONF[name]] = float(value)
        except ValueError:
            raise SettingError(f"--rdzv-conf {entry}: give {name}=SECONDS") from None
        if not values[_CONF[name]] > 0:
            raise SettingError(f"--rdzv-conf {entry}: it must be more than 0 seconds")
    lost_after_s = values.get("lost_after_s", LOST_AFTER_S)
    if values.setdefault("suspect_after_s", NodeTimeouts(lost_after_s).suspect_after_s) > lost_after_s:
        raise SettingError(f"--rdzv-conf suspect_after: it must be at most lost_after, which is {lost_after_s:g}")
    return values


@dataclass(frozen=True, slots=True)
class Request:
    """All that a user may say about one run; unchecked (see `lockstep.launch.run_dir.run_directory.prepare`)."""

    program: Program
    nproc_per_node: int | str | None = None  #: a number, "gpu", "cpu", "auto"; None: one for each GPU, else one
    run_dir: str | None = None  #: None: a new directory under ``runs``
    resume: bool = False  #: from the newest whole checkpoint
    resume_from: str | None = None  #: not the newest but the best, as "best", or the one of this step
    fresh: bool = False  #: move an earlier run in ``run_dir`` aside
    max_restarts: int = 0  #: generations beyond the first that may be started after failures
    refill_after_s: float = 600.0  #: of training at new steps, until restarts and changes of nodes count from 0 again
    settings: Mapping[str, str] = field(default_factory=dict)  #: for `Run`, where they replace what the script says
    bind: bool = False  #: each rank runs on CPUs of its own only
    grace_s: float = 10.0  #: seconds from asking a rank to end until it is killed
    hang_after_s: float | None = None  #: seconds without progress after which ranks hang; None: measured on the run
    on_hang: OnHang | None = None  #: None: end a generation that cannot go on by itself
    faults: str = ""  #: faults to inject, as `lockstep.faults.FaultPlan` parses them
    ends_at_s: float | None = None  #: when the scheduler ends the job, in seconds since 1970; None: ask it
    start_method: StartMethod | None = None  #: None: what suits the machine
    nodes: Nodes | None = None  #: None: this machine only
    #: How the nodes stay together, where not the user but a scheduler says which they are.
    among_nodes: NodeOptions = NodeOptions()
    requeue: bool = False  #: have the scheduler start the job again after a stop with a checkpoint
    everywhere: bool = True  #: in an allocation of several nodes, on all of them
    attach: int | None = None  #: the rank that has the terminal; None: the only one, where there is one
    pass_local_rank: bool = False  #: give each rank its local rank as an option of the script
    options: tuple[str, ...] = ()  #: all of this as on a command line, without the run directory and how to begin

    @property
    def subject(self) -> str:
        """What is run with which settings, as text without secrets; equal for every way to start it."""
        args = () if isinstance(self.program, Function) else self.program.args
        settings = [f"{name}={value}" for name, value in sorted(self.settings.items())]
        return command_line([*settings, self.program.name, *args])

    def command(self, *more: str) -> str:
        """This request as a command line, with ``more`` options; messages tell the user with it what to type next.

        Without secrets, for what is printed lands in files that others may read: ``***`` is in their places.
        """
        if isinstance(self.program, Function):
            return f"lockstep.launch({', '.join([self.program.name, *self._keywords(more)])})"
        return command_line(["lockstep", *self.command_args(*more)])

    def spelt(self, option: str, value: object) -> str:
        """An option as the user has given it: ``--run-dir a``, or ``run_dir='a'`` for `lockstep.launch`."""
        if isinstance(self.program, Function):
            return f"{_KEYWORDS.get(option, option.strip('-').replace('-', '_'))}={value!r}"
        return option if value is True else f"{option} {value}"

    def _keywords(self, more: Sequence[str]) -> list[str]:
        ranks = [] if self.nproc_per_node is None else [self.spelt("--ranks", self.nproc_per_node)]
        words = iter(more)
        return [*ranks, *(self.spelt(word, next(words) if word == "--run-dir" else True) for word in words)]

    def command_args(self, *more: str) -> list[str]:
        """The arguments that follow ``lockstep`` on that command line. Not for a function."""
        kind = kind_options(self.program)
        args = () if isinstance(self.program, Function) else self.program.args
        return ["run", *more, *self.options, *kind, self.program.name, *args]
