"""The process that brings ranks to life, and the launcher's line to it.

    launcher                 nursery                     rank 0 ... rank n-1      store
    no torch      socket     imports torch once     ─►   copies of it, each       a copy too
    Nursery     ═════════►   serve()                     with a group and a log of its own

A rank costs a fork instead of a second or more of imports, at every start and every restart. When the launcher dies,
however it dies, its end of the socket closes, and the nursery kills the groups of all ranks. When the nursery dies,
the kernel kills the ranks. So nothing is left over in any case.

The nursery must not have threads when it forks, as locks that other threads hold would stay locked in the copies. It
counts them, and where there are any it starts ranks as Python processes of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

from lockstep.errors import LaunchError
from lockstep.launch.child_process import STOPS, stops_held
from lockstep.launch.request import Function, Program, Way
from lockstep.launch.workers.rank_process import program_from, run_program, take_place, words_of
from lockstep.launch.workers.tcp_store import keep_store
from lockstep.launch_contract import CHANNEL

# What every training script needs; the last one is loaded by the first optimizer.
_IMPORTED_ONCE = ("torch", "torch.distributed", "torch.utils.data", "torch.nn.parallel", "torch._dynamo")
_LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Birth:
    """One rank to start."""

    rank: int
    env: Mapping[str, str]  #: what differs from the nursery's own environment
    log: str


@dataclass(frozen=True, slots=True)
class Fell:
    """A rank's process has ended."""

    rank: int
    status: int  #: exit code, or minus the signal that killed it
    at_s: float  #: on the host's monotonic clock


@dataclass(frozen=True, slots=True)
class Plain:
    """The nursery will start ranks as processes of their own, though it was to copy itself."""

    why: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The nursery itself is gone, and its ranks with it."""


Event = Fell | Plain | Lost
_EVENTS = {"fell": Fell, "plain": Plain}


class Nursery:
    """The launcher's line to its nursery: start, signal and hear of ranks. One generation at a time."""

    def __init__(self, line: socket.socket, process: subprocess.Popen[bytes] | Any) -> None:
        self._line, self._process = line, process
        self._heard = b""

    @property
    def pid(self) -> int:
        """The process whose children the ranks are."""
        return int(self._process.pid)

    def start(self, births: Iterable[Birth], meeting: socket.socket | None) -> None:
        """Start these ranks, and the store at which they meet on the listening socket ``meeting``.

        None: the store is on another node. Returns at once: ranks come to life when the nursery is ready.
        """
        port = meeting.getsockname()[1] if meeting else 0
        order = _line(do="start", births=[asdict(birth) for birth in births], port=port)
        sent = socket.send_fds(self._line, [order], [meeting.fileno()]) if meeting else 0
        self._line.sendall(order[sent:])

    def signal(self, signum: int) -> None:
        """Send ``signum`` to every rank that lives, though not to what ranks have started themselves."""
        self._tell(do="signal", signum=signum)

    def kill(self) -> None:
        """Kill every rank that lives, together with all that it has started."""
        self._tell(do="kill")

    def events(self, timeout_s: float) -> list[Event]:
        """What happened since the last call, waiting up to ``timeout_s`` for something to happen."""
        if not select.select([self._line], [], [], timeout_s)[0]:
            return []
        chunk = self._receive()
        if not chunk:
            return [Lost()]
        *lines, self._heard = (self._heard + chunk).split(b"\n")
        return [_event(json.loads(line)) for line in lines]

    def close(self) -> None:
        """Kill what still lives and end the nursery; returns when all of it is gone."""
        self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()
        if isinstance(self._process, subprocess.Popen):
            self._process.wait()
        else:
            self._process.join()

    def _receive(self) -> bytes:
        try:
            return self._line.recv(_LINE_BYTES)
        except ConnectionError:
            return b""

    def _tell(self, **order: object) -> None:
        # A nursery that is gone is heard of as `Lost`.
        with contextlib.suppress(ConnectionError):
            self._line.sendall(_line(**order))


def open_nursery(program: Program, way: Way, env: Mapping[str, str]) -> Nursery:
    """Start the nursery for ``program``'s ranks; ``env`` is what its ranks have in common.

    For a `Function` the nursery is a copy of this process.

    Raises:
        LaunchError: if this process cannot be copied because CUDA is in use.
    """
    ours, theirs = socket.socketpair()
    if isinstance(program, Function):
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            ours.close()
            theirs.close()
            raise LaunchError(
                "CUDA is in use in this process, and such a process cannot be copied into ranks; restart the kernel "
                "and call launch before anything touches a GPU"
            )
        copied = multiprocessing.get_context("fork").Process(
            target=_serve_copied, args=(theirs, ours, program, dict(env)), name="lockstep nursery"
        )
        with warnings.catch_warnings():
            # Python warns of other threads, such as a notebook's own: the copy uses none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            copied.start()
        theirs.close()
        return Nursery(ours, copied)
    words = [str(theirs.fileno()), way, *words_of(program)]
    with stops_held():
        process = subprocess.Popen(
            own_python("fork-server", words),
            env=with_this_package(env),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    theirs.close()
    return Nursery(ours, process)


def serve(line: socket.socket, way: Way, program: Program) -> NoReturn:
    """Be the nursery until the launcher's end of ``line`` closes; never returns."""
    # A scheduler may tell every process of a job to stop. This one stops when the launcher does.
    for signum in STOPS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    if way == "fork":
        way = _import_once(line)
    nest = _Nest(line, way, program)
    wake, waker = os.pipe()
    for descriptor in (wake, waker):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    nest.private = (wake, waker)
    heard = b""
    passed: list[int] = []
    while True:
        ready, _, _ = select.select([line.fileno(), wake], [], [])
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, _LINE_BYTES)
            nest.reap()
        if line.fileno() in ready:
            try:
                chunk, descriptors, _, _ = socket.recv_fds(line, _LINE_BYTES, 16)
            except ConnectionError:
                chunk, descriptors = b"", []
            if not chunk:
                nest.kill()
                nest.bury()
                # A launcher that was killed could not take away what it had in the file system.
                with contextlib.suppress(OSError, KeyError):
                    Path(os.environ[CHANNEL]).unlink()
                    Path(os.environ[CHANNEL]).parent.rmdir()
                os._exit(0)
            passed += descriptors
            *orders, heard = (heard + chunk).split(b"\n")
            for order in map(json.loads, orders):
                match order.pop("do"):
                    case "start":
                        births = [Birth(**birth) for birth in order["births"]]
                        nest.start(births, passed.pop(0) if order["port"] else None, order["port"])
                    case "signal":
                        nest.signal(order["signum"])
                    case "kill":
                        nest.kill()


class _Nest:
    """The nursery's own view of its ranks."""

    def __init__(self, line: socket.socket, way: Way, program: Program) -> None:
        self._line, self._way, self._program = line, way, program
        self._ranks: dict[int, int] = {}  # process id: rank
        self._store = 0
        self.private: tuple[int, ...] = ()  # descriptors that ranks must not keep

    def start(self, births: list[Birth], meeting: int | None, port: int) -> None:
        me = os.getpid()
        if self._store:
            os.kill(self._store, signal.SIGKILL)
            os.waitpid(self._store, 0)
        self._store = 0 if meeting is None else self._begin_store(meeting, port, me)
        for birth in births:
            self._ranks[self._begin_rank(birth, meeting, me)] = birth.rank
        if meeting is not None:
            os.close(meeting)

    def signal(self, signum: int) -> None:
        for process in self._ranks:
            os.kill(process, signum)

    def kill(self) -> None:
        for process in self._ranks:
            _kill_group(process)

    def bury(self) -> None:
        """Wait until every rank that was killed is gone, and end the store."""
        if self._store:
            os.kill(self._store, signal.SIGKILL)
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return

    def reap(self) -> None:
        """Tell of each rank that has ended, and kill what it left behind."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            at_s = time.monotonic()
            if ended.si_pid in self._ranks:
                # Before it is waited for, as long as nobody else can have been given its number.
                _kill_group(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            if ended.si_pid == self._store:
                self._store = 0
            elif (rank := self._ranks.pop(ended.si_pid, None)) is not None:
                told = _line(event="fell", rank=rank, status=os.waitstatus_to_exitcode(status), at_s=at_s)
                # A launcher that is gone is noticed by its closed line.
                with contextlib.suppress(ConnectionError):
                    self._line.sendall(told)

    def _begin_store(self, meeting: int, port: int, me: int) -> int:
        if self._way == "plain":
            os.set_inheritable(meeting, True)
            store = _spawn(own_python("tcp-store", [str(meeting), str(port), str(me)]), {})
            os.set_inheritable(meeting, False)
            return store
        child = _copy()
        if child == 0:
            with _last_resort():
                self._forget_launcher()
                keep_store(meeting, port, me)
        return child

    def _begin_rank(self, birth: Birth, meeting: int | None, me: int) -> int:
        if self._way == "plain":
            assert not isinstance(self._program, Function), "functions are run by copies"
            return _spawn(own_python("rank", [str(me), birth.log, *words_of(self._program)]), birth.env)
        child = _copy()
        if child == 0:
            with _last_resort():
                self._forget_launcher()
                if meeting is not None:
                    os.close(meeting)
                take_place({**os.environ, **birth.env}, birth.log, me)
                run_program(self._program)
        return child

    def _forget_launcher(self) -> None:
        signal.set_wakeup_fd(-1)
        self._line.close()
        for descriptor in self.private:
            os.close(descriptor)


def _import_once(line: socket.socket) -> Way:
    for name in _IMPORTED_ONCE:
        importlib.import_module(name)
    if sys.platform == "linux" and (threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
        line.sendall(_line(event="plain", why=f"importing torch started {threads - 1} threads"))
        return "plain"
    # What lives now is shared by all copies and will not become garbage.
    gc.collect()
    gc.freeze()
    return "fork"


def _serve_copied(line: socket.socket, launchers_end: socket.socket, program: Function, env: dict[str, str]) -> None:
    """Be the nursery, as a copy of a process that is used for something else as well, such as a notebook."""
    launchers_end.close()
    # What that process wanted done at its own end, such as saving a history, is not for its copies to do.
    atexit._clear()
    atexit.register(util._exit_function)  # type: ignore[attr-defined]
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    # A pool of threads is not copied along, and OpenMP would wait for it for ever.
    importlib.import_module("torch").set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    serve(line, "fork", program)


def own_python(role: str, words: list[str]) -> list[str]:
    """The command for one of this package's own processes (see `lockstep.launch.__main__`)."""
    # -P: the current directory must not lend its random.py to us; the program's own path is set by its ranks.
    return [sys.executable, "-P", "-m", "lockstep.launch", role, *words]


def _copy() -> int:
    """As `os.fork`, with all signals held back in the copy until it is ready for them."""
    held = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    return child


def _spawn(command: list[str], env: Mapping[str, str]) -> int:
    return os.posix_spawn(command[0], command, {**os.environ, **env}, setsigdef=STOPS)


@contextlib.contextmanager
def _last_resort() -> Any:
    """Keep a copy from ever going on as a second nursery."""
    try:
        yield
    finally:
        if (error := sys.exc_info()[1]) is not None:
            sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)


def _kill_group(process: int) -> None:
    # A rank that was born this very moment has no group of its own yet.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)


def with_this_package(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` under which another Python finds the package that runs here, such as one that is not installed."""
    home = str(Path(__file__).parents[3])
    if home in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()):
        return dict(env)
    return {**env, "PYTHONPATH": os.pathsep.join(path for path in (env.get("PYTHONPATH"), home) if path)}


def _line(**words: object) -> bytes:
    return json.dumps(words).encode() + b"\n"


def _event(words: dict[str, Any]) -> Event:
    return _EVENTS[words.pop("event")](**words)  # type: ignore[no-any-return]


def main(argv: list[str]) -> NoReturn:
    """Be the nursery: ``LINE fork|plain script|module NAME ARGS...``, the line being an open socket's descriptor."""
    line, way, *words = argv
    serve(socket.socket(fileno=int(line)), "fork" if way == "fork" else "plain", program_from(words))
