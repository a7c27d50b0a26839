"""The fork server, which imports torch once and starts each rank as a copy of itself.

    launcher                 fork server             rank 0 ... rank n-1      store
    no torch      socket     imports torch once ─►   copies of it, each       a copy too
    ForkServerClient ═════►  ForkServer              with a process group
                                                     and a log of its own

A rank costs a fork instead of a second or more of imports, at every start and every restart. When the launcher ends,
in whatever way, its end of the socket closes, and the fork server kills the process groups of all ranks; the kernel
has it go on for that if it is stopped. When the fork server dies, the kernel kills the ranks. When it does not
answer, the launcher, which was told each process id, kills them itself. So no process is left over in any case.

The fork server should not have threads when it forks, since locks that other threads hold would stay locked in the
copies. It counts its threads, and where there are others it starts ranks as separate Python processes. A function can
only be run by a copy: there the threads are those that some libraries start anew in every copy of a process, such as
exporters of traces, and they are ready to be copied.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

from lockstep.cpython_private import forget_exit_handlers, forget_finalizers
from lockstep.formatting import plural
from lockstep.launch.host.child_process import kill_group, own_python, signal_when_parent_dies
from lockstep.launch.host.machine import threads_of_rank
from lockstep.launch.job.program_sources import mentions_lockstep, needs_only_python
from lockstep.launch.job.request import Function, Program, StartMethod
from lockstep.launch.run_dir.owned_directory import remove_owned_directory
from lockstep.launch.timeouts import ANSWER_S
from lockstep.launch.workers.fork_messages import RankSpec, message
from lockstep.launch.workers.rank_process import become_rank, program_from, program_to_args, run_program
from lockstep.launch.workers.tcp_store import UNUSED, serve_store
from lockstep.launch_contract import CHANNEL, EMERGENCY, PRIVATE, STOP_SIGNALS
from lockstep.project_files import resolve_settings
from lockstep.strategy_kinds import kind_of

# What every training script needs; the last one is loaded by the first optimizer.
_IMPORTED_ONCE = ("torch", "torch.distributed", "torch.utils.data", "torch.nn.parallel", "torch._dynamo")
# What ranks that use Lockstep need besides: it takes longer than all else that such a rank does before its step. By
# name, since the launcher itself is free of torch.
_RUN = "lockstep.run.run"
_CHUNK_BYTES = 1 << 16
_streams_of_original: list[object] = []


class ForkServer:
    """The process whose children the ranks are: it carries out the launcher's orders and reports ranks that ended."""

    def __init__(self, connection: socket.socket, method: StartMethod, program: Program) -> None:
        # A scheduler may tell every process of a job to stop. This one stops when the launcher does.
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        # Also those that were blocked when the launcher started, such as SIGCHLD, which tells of ranks that end.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # When the launcher is gone the connection closes, and a process that is stopped would not see that.
        signal_when_parent_dies(signal.SIGCONT)
        self._connection, self._program = connection, program
        with _ending_when_closed(connection):
            self._uses_run = mentions_lockstep(program)
            self._only_python = needs_only_python(program)
            self._method = method
            if method == "fork":
                self._method = _import_once(connection, program, self._uses_run, self._only_python)
        self._ranks: dict[int, int] = {}  # process id: rank
        self._store = 0  # process id; 0: none
        self._questions: socket.socket | None = None  # for the store
        self._listening: list[int] = []  # descriptors that the launcher has passed
        self._lease_end_s = float("inf")
        self._launcher, self._is_closed = os.getppid(), False  # it closes its end though it lives
        # A child that ends wakes the loop through this pipe.
        self._wakeup = os.pipe()
        for descriptor in self._wakeup:
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)

    def serve(self) -> NoReturn:
        """Serve until the launcher's end of the connection closes; never returns."""
        wakeup, _ = self._wakeup
        unread = b""
        while True:
            left_s = None if self._lease_end_s == float("inf") else max(0.0, self._lease_end_s - time.monotonic())
            ready = wait([self._connection.fileno(), wakeup], left_s)
            if time.monotonic() >= self._lease_end_s:
                self._expire_lease()
            if wakeup in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wakeup, _CHUNK_BYTES)
                self._reap()
            if self._connection.fileno() in ready:
                chunk = self._receive()
                if not chunk:
                    self._exit()
                *orders, unread = (unread + chunk).split(b"\n")
                for order in map(json.loads, orders):
                    self._carry_out(order)

    def _receive(self) -> bytes:
        try:
            chunk, descriptors, _, _ = socket.recv_fds(self._connection, _CHUNK_BYTES, 16)
        except ConnectionError:
            return b""
        self._listening += descriptors
        return chunk

    def _carry_out(self, order: Mapping[str, Any]) -> None:
        # Before it: an order that starts many ranks takes a while, and says of each that it did.
        self._tell(event="order-received", number=order["number"])
        match order["order"]:
            case "start":
                listening = self._listening.pop(0) if order["port"] else None
                self._start([RankSpec(**fields) for fields in order["ranks"]], listening, order["port"])
            case "signal":
                for process in self._ranks:
                    os.kill(process, order["signum"])
            case "kill":
                self._kill()
            case "close":
                self._is_closed = True
            case "lease":
                self._lease_end_s = time.monotonic() + order["for_s"]

    def _expire_lease(self) -> None:
        """The launcher stands still, and other nodes may go on without this one."""
        self._lease_end_s = float("inf")
        if self._ranks:
            self._tell(event="lease-expired")
            self._kill()

    def _exit(self) -> NoReturn:
        self._kill()
        self._wait_all()
        # It may have been killed since: ranks with much memory take their time to end.
        _leave(launcher_lives=self._is_closed and os.getppid() == self._launcher)

    def _start(self, ranks: list[RankSpec], listening: int | None, port: int) -> None:
        own_pid = os.getpid()
        self._lease_end_s = float("inf")
        if self._store:
            os.kill(self._store, signal.SIGKILL)
            os.waitpid(self._store, 0)
        self._store = 0 if listening is None else self._start_store(listening, port, own_pid)
        if self._store:
            self._tell(event="started", process=self._store, rank=None)
        for spec in ranks:
            process = self._start_rank(spec, listening, own_pid)
            self._ranks[process] = spec.rank
            self._tell(event="started", process=process, rank=spec.rank)
        if listening is not None:
            os.close(listening)

    def _kill(self) -> None:
        for process in self._ranks:
            kill_group(process)

    def _wait_all(self) -> None:
        """Wait until every rank that was killed is gone, and end the store."""
        if self._store:
            os.kill(self._store, signal.SIGKILL)
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return

    def _reap(self) -> None:
        """Report each rank that has ended, and kill the processes that it left."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            at_s = time.monotonic()
            if ended.si_pid in self._ranks:
                # Before it is waited for: until then no other process can have been given its number.
                kill_group(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            if ended.si_pid == self._store:
                self._store = 0
                self._tell(event="store-exited", status=os.waitstatus_to_exitcode(status), at_s=at_s)
            elif (rank := self._ranks.pop(ended.si_pid, None)) is not None:
                if not self._ranks and not status and self._store_is_unused():
                    self._tell(event="store-unused")
                self._tell(event="rank-exited", rank=rank, status=os.waitstatus_to_exitcode(status), at_s=at_s)

    def _tell(self, **fields: object) -> None:
        # That the launcher is gone is noticed by the closed connection.
        with contextlib.suppress(ConnectionError):
            self._connection.sendall(message(**fields))

    def _store_is_unused(self) -> bool:
        """Whether the store answers that no rank has written to it."""
        if not self._store or self._questions is None:
            return False
        with contextlib.suppress(OSError):
            self._questions.sendall(b"?")
            return self._questions.recv(1) == UNUSED
        return False

    def _start_store(self, listening: int, port: int, own_pid: int) -> int:
        if self._questions is not None:
            self._questions.close()
        self._questions, theirs = socket.socketpair()
        self._questions.settimeout(ANSWER_S)
        if self._method == "plain":
            passed = (listening, theirs.fileno())
            for descriptor in passed:
                os.set_inheritable(descriptor, True)
            args = [str(listening), str(port), str(own_pid), str(theirs.fileno()), str(int(self._only_python))]
            store = _spawn(own_python("tcp-store", args), {})
            os.set_inheritable(listening, False)
        else:
            store = _fork()
            if store == 0:
                with _exit_always():
                    self._close_connections()
                    serve_store(listening, port, own_pid, theirs, when_used=self._only_python)
        theirs.close()
        return store

    def _start_rank(self, spec: RankSpec, listening: int | None, own_pid: int) -> int:
        if self._method == "plain":
            assert not isinstance(self._program, Function), "functions are run by copies"
            return _spawn(own_python("rank", [str(own_pid), spec.log, *program_to_args(self._program)]), spec.env)
        child = _fork()
        if child == 0:
            with _exit_always():
                self._close_connections()
                if listening is not None:
                    os.close(listening)
                become_rank({**os.environ, **spec.env}, spec.log, own_pid, self._program, uses_run=self._uses_run)
                run_program(self._program)
        return child

    def _close_connections(self) -> None:
        """In a copy: close what only the fork server uses."""
        signal.set_wakeup_fd(-1)
        self._connection.close()
        if self._questions is not None:
            self._questions.close()
        for descriptor in self._wakeup:
            os.close(descriptor)


@contextlib.contextmanager
def _ending_when_closed(connection: socket.socket) -> Iterator[None]:
    """End this process as soon as the launcher's end of ``connection`` is closed, whatever is done inside.

    That may take long, such as an import on a busy machine, and a launcher that was killed must leave nothing behind.
    """

    def look(*_: object) -> None:
        closed = select.poll()
        closed.register(connection, 0)  # orders may wait there to be read, and its end comes behind them
        if any(found & select.POLLHUP for _, found in closed.poll(0)):
            _leave()

    before = signal.signal(signal.SIGIO, look)
    signal.siginterrupt(signal.SIGIO, False)
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    # The kernel sends the signal when something happens to the connection.
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        look()
        yield
    finally:
        fcntl.fcntl(connection, fcntl.F_SETFL, flags)
        signal.signal(signal.SIGIO, before)


def _leave(*, launcher_lives: bool = False) -> NoReturn:
    """End this process; and remove what a launcher that was killed could not remove from the file system."""
    if launcher_lives:
        os._exit(0)
    if (home := Path(os.environ.get(CHANNEL, "")).parent).name.startswith(PRIVATE):
        remove_owned_directory(home)
    if EMERGENCY in os.environ:
        remove_owned_directory(Path(os.environ[EMERGENCY]))
    os._exit(0)


def import_torch() -> None:
    """Import what all ranks need."""
    for name in _IMPORTED_ONCE:
        importlib.import_module(name)


def _import_for_runs(env: Mapping[str, str]) -> None:
    """Import `Run`, and the strategy of ``env``: that of the run unless the script names another one."""
    importlib.import_module(_RUN)
    with contextlib.suppress(Exception):  # of a word or a strategy of another package: the ranks will tell
        strategy = resolve_settings({}, env).values.strategy
        importlib.import_module(kind_of(strategy).module)


def _import_once(connection: socket.socket, program: Program, uses_run: bool, only_python: bool) -> StartMethod:
    """Import what all ranks of ``program`` need; returns how they can be started afterwards."""
    # To look for garbage meanwhile and afterwards takes a third of the time, and finds next to none.
    gc.disable()
    try:
        if not only_python:
            import_torch()
        if uses_run:
            _import_for_runs(os.environ)
    finally:
        # Objects that exist now are shared by all copies and will not become garbage.
        gc.freeze()
        gc.enable()
        if not isinstance(program, Function):
            forget_finalizers()
    others = len(list(Path("/proc/self/task").iterdir())) - 1 if sys.platform == "linux" else 0
    if others and not isinstance(program, Function):
        why = f"importing torch, or another library, started {plural(others, 'thread')}"
        connection.sendall(message(event="fork-unavailable", why=why))
        return "plain"
    return "fork"


def serve_copied(
    connection: socket.socket, launchers_end: socket.socket, program: Program, env: dict[str, str]
) -> None:
    """Be the fork server, as a copy of a process that is used for something else as well, such as a notebook."""
    launchers_end.close()
    _open_own_streams()
    # What that process registered for its own end, such as saving a history, is not for its copies to do.
    forget_exit_handlers()
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    if not isinstance(program, Function) and not sys.flags.safe_path:
        # A script finds what lies beside itself, not what lies beside the command that starts it.
        del sys.path[0]
    with _last_words_to(connection):
        # Threads are not copied by a fork, and OpenMP would wait for its thread pool forever.
        importlib.import_module("torch").set_num_threads(threads_of_rank(env))
        ForkServer(connection, "fork", program).serve()


def _open_own_streams() -> None:
    """Leave the standard streams of the process that was copied alone, for good.

    They may hold text that the original will write, and locks of threads that were not copied. What they hold would be
    written once more when they are collected.
    """
    _streams_of_original.extend((sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = None
        with contextlib.suppress(OSError):
            stream = open(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _fork() -> int:
    """As `os.fork`, with all signals blocked in the copy until it is ready for them."""
    before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    with warnings.catch_warnings():
        # Python warns of threads: see the top of this file.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child


def _spawn(command: list[str], env: Mapping[str, str]) -> int:
    return os.posix_spawn(command[0], command, {**os.environ, **env}, setsigdef=STOP_SIGNALS)


@contextlib.contextmanager
def _last_words_to(launcher: socket.socket) -> Iterator[None]:
    """Tell the launcher of an error that ends the fork server, as the traceback may be where nobody reads it."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(OSError):
            why = traceback.format_exception_only(error)[-1].strip()
            launcher.sendall(message(event="last-words", why=why))
        raise


@contextlib.contextmanager
def _exit_always() -> Any:
    """Keep a copy from ever going on as a second fork server."""
    try:
        yield
    finally:
        try:
            if (error := sys.exc_info()[1]) is not None:
                sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(1)


def main(argv: list[str]) -> NoReturn:
    """Be the fork server: ``CONNECTION fork|plain KIND NAME ARGS...``, the first an open descriptor."""
    descriptor, method, *args = argv
    connection = socket.socket(fileno=int(descriptor))
    with _last_words_to(connection):
        ForkServer(connection, "fork" if method == "fork" else "plain", program_from(args)).serve()
