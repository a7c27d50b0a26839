"""The launcher's side of the fork server: it starts, signals and kills ranks, and hears what happens to them."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import subprocess
import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import popen_fork
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from typing import Any

from lockstep.cpython_private import launch_fork
from lockstep.errors import LaunchError
from lockstep.gpu_driver import has_started_cuda
from lockstep.launch.host import procfs
from lockstep.launch.host.child_process import kill_group, own_python, stop_signals_blocked, with_this_package
from lockstep.launch.job.request import Function, Program, StartMethod
from lockstep.launch.timeouts import ANSWER_S, GONE_S, Silence
from lockstep.launch.workers.fork_messages import (
    Event,
    ForkServerDied,
    ForkUnavailable,
    LastWords,
    LeaseExpired,
    OrderReceived,
    RankExited,
    RankSpec,
    Started,
    StoreExited,
    StoreUnused,
    event_from,
    message,
)
from lockstep.launch.workers.fork_server import serve_copied
from lockstep.launch.workers.rank_process import program_to_args

_CHUNK_BYTES = 1 << 16


class ForkServerClient:
    """The launcher's side: starts and signals ranks, and reads what happens to them. One generation at a time.

    No call waits for the fork server, but for `close`, which has deadlines.
    """

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | Any) -> None:
        self._connection, self._process = connection, process
        connection.setblocking(False)
        self._unread = b""
        self._unsent: list[tuple[bytes, socket.socket | None]] = []  # each with a descriptor that goes with it
        self._orders, self._answered = 0, Silence(0)  # by their numbers
        self._ranks: dict[int, _Process] = {}
        self._store: int | None = None
        self._last_words = ""

    @property
    def pid(self) -> int:
        """The process whose children the ranks are."""
        return int(self._process.pid)

    @property
    def store(self) -> int | None:
        """The process id of the store where the ranks meet; None if it is not here."""
        return self._store

    @property
    def silent_s(self) -> float:
        """For how long it has owed an answer to an order. It owes one while it imports torch, too."""
        return 0.0 if self._answered.said == self._orders else self._answered.for_s(time.monotonic())

    def processes(self) -> dict[int, int]:
        """The process ids of the ranks that have started and are not known to have ended, by rank."""
        return {rank: process.pid for rank, process in self._ranks.items()}

    def start(self, ranks: Iterable[RankSpec], listening: socket.socket | None) -> None:
        """Start these ranks, and the store where they meet behind the socket ``listening``.

        None: the store is on another node. Returns at once: the ranks start when the fork server is ready.
        """
        port = listening.getsockname()[1] if listening else 0
        passed = listening.dup() if listening else None
        self._ranks, self._store = {}, None
        self._order(passed, order="start", ranks=[asdict(spec) for spec in ranks], port=port)

    def signal(self, signum: int) -> None:
        """Send ``signum`` to every rank that lives, though not to processes that ranks have started themselves."""
        self._order(order="signal", signum=signum)

    def kill(self) -> None:
        """Kill every rank that lives, together with all processes that it has started."""
        self._order(order="kill")

    def renew_lease(self, for_s: float) -> None:
        """Have every rank killed unless this is called again within ``for_s`` seconds: the launcher may stand still."""
        self._order(order="lease", for_s=for_s)

    def signal_directly(self, signum: int) -> None:
        """As `signal`, without the fork server: for when it does not answer."""
        for process in self._ranks.values():
            process.signal(signum)

    def kill_ranks(self, ranks: Collection[int]) -> None:
        """Kill these ranks, together with all processes that they have started; the others live."""
        for rank in ranks:
            if rank in self._ranks:
                self._ranks[rank].kill_group()

    def kill_directly(self) -> None:
        """As `kill`, without the fork server, and the fork server, too: for when it does not answer."""
        for process in self._ranks.values():
            process.kill_group()
        self._kill_fork_server()
        # The ranks that it forked after it was heard last die with it, by the kernel.

    def events(self, timeout_s: float, descriptors: Sequence[int] = ()) -> list[Event]:
        """What happened since the last call, waiting up to ``timeout_s`` for something to happen.

        Something to read from one of the ``descriptors`` ends the waiting, too.
        """
        connection = self._connection.fileno()
        # Not `select.select`, which takes no descriptor above 1023: a copied process may have many files open.
        ready = select.poll()
        for descriptor in descriptors:
            ready.register(descriptor, select.POLLIN)
        ready.register(connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        found = dict(ready.poll(1000 * timeout_s)).get(connection, 0)
        if found & select.POLLOUT:
            self._send()
        if not found & ~select.POLLOUT:
            return []
        chunk = self._receive()
        if chunk is None:
            return []
        if not chunk:
            # What was killed needs a moment until it can be waited for.
            status = _status_of(self._process, ANSWER_S)
            for process in self._ranks.values():
                process.kill_group()
            return [ForkServerDied(status, self._last_words)]
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        return [event for line in lines if (event := self._taken_in(event_from(line))) is not None]

    def close(self) -> bool:
        """Kill the ranks that still live and end the fork server; returns whether all of them are gone.

        They are gone at once, but for a process that the kernel itself holds, or one that has much memory to free.
        """
        answer_s = ANSWER_S if self.silent_s else GONE_S
        self._order(order="close")
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        for _, descriptor in self._unsent:
            if descriptor is not None:
                descriptor.close()
        # A stopped fork server would not notice that, and nothing else would continue it.
        asked = procfs.state(self.pid) not in ("T", "t")
        if not asked or _status_of(self._process, answer_s) is None:
            self.kill_directly()
        return _status_of(self._process, GONE_S) is not None and self._wait_for_ranks(GONE_S)

    def _taken_in(self, event: Event | Started | OrderReceived | LastWords) -> Event | None:
        """``event`` if it is for the caller."""
        match event:
            case Started(process, None):
                self._store = process
            case Started(process, int() as rank):
                self._ranks[rank] = _Process(process, procfs.begun(process))
            case OrderReceived(number):
                self._answered = Silence(number, time.monotonic())
            case LastWords(why):
                self._last_words = why
            case RankExited(rank):
                self._ranks.pop(rank, None)
                return event
            case StoreExited():
                self._store = None
                return event
            case ForkUnavailable() | ForkServerDied() | StoreUnused() | LeaseExpired():
                return event
        return None

    def _order(self, descriptor: socket.socket | None = None, /, **fields: object) -> None:
        if self._answered.said == self._orders:
            self._answered = self._answered.restarted(time.monotonic())
        self._orders += 1
        self._unsent.append((message(number=self._orders, **fields), descriptor))
        self._send()

    def _send(self) -> None:
        while self._unsent:
            order, descriptor = self._unsent[0]
            try:
                passed = [] if descriptor is None else [descriptor.fileno()]
                sent = socket.send_fds(self._connection, [order], passed)
            except BlockingIOError:
                return
            except OSError:
                # That the fork server is gone is read as `ForkServerDied`.
                sent = len(order)
            if descriptor is not None:
                descriptor.close()
            if sent < len(order):
                self._unsent[0] = (order[sent:], None)
            else:
                del self._unsent[0]

    def _receive(self) -> bytes | None:
        try:
            return self._connection.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _kill_fork_server(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _wait_for_ranks(self, within_s: float) -> bool:
        end_s = time.monotonic() + within_s
        while any(process.lives for process in self._ranks.values()):
            if time.monotonic() > end_s:
                return False
            time.sleep(0.01)
        return True


@dataclass(frozen=True, slots=True)
class _Process:
    """A rank's process; a later process with the same number is a different one."""

    pid: int
    begun: str  #: as `procfs.begun` says

    @property
    def lives(self) -> bool:
        return procfs.begun(self.pid) == self.begun != "" and procfs.state(self.pid) not in ("Z", "X")

    def signal(self, signum: int) -> None:
        if procfs.begun(self.pid) == self.begun:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signum)

    def kill_group(self) -> None:
        # While a group has members, no other process is given its number.
        if procfs.begun(self.pid) in (self.begun, ""):
            kill_group(self.pid)


def _status_of(process: subprocess.Popen[bytes] | Any, within_s: float) -> int | None:
    """The exit code of the fork server, or minus the signal that killed it; None if it lives on for ``within_s``."""
    if isinstance(process, subprocess.Popen):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(within_s)
        return None
    process.join(within_s)
    return None if process.exitcode is None else int(process.exitcode)


class _Copy(ForkProcess):
    """A process that starts as a copy of this one, at once.

    `multiprocessing` would first flush the standard streams, and wait for whoever reads them: the thread of the screen
    may be writing to a pipe that nobody reads. What a stream still holds is the original's to write.
    """

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> popen_fork.Popen:  # noqa: N802 - multiprocessing's name
        return launch_fork(process_obj)


def check_can_be_copied() -> None:
    """Check that ranks can be copies of this process.

    Raises:
        LaunchError: if it has started CUDA.
    """
    if has_started_cuda():
        raise LaunchError(
            "CUDA is in use in this process, and such a process cannot be copied into ranks; restart the kernel "
            "and call launch before anything touches a GPU"
        )


def open_fork_server(program: Program, method: StartMethod, env: Mapping[str, str]) -> ForkServerClient:
    """Start the fork server for the ranks of ``program``; ``env`` is what they have in common.

    For a `Function`, and with the method ``copy``, the fork server is a copy of this process.

    Raises:
        LaunchError: if this process cannot be copied because CUDA is in use.
    """
    if method == "copy" or isinstance(program, Function):
        check_can_be_copied()
        gc.collect()  # a copy never frees the garbage that it inherits
        ours, theirs = socket.socketpair()
        copied = _Copy(target=serve_copied, args=(theirs, ours, program, dict(env)), name="lockstep fork server")
        with warnings.catch_warnings():
            # Python warns of other threads, such as a notebook's own: the copy uses none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            copied.start()
        theirs.close()
        return ForkServerClient(ours, copied)
    ours, theirs = socket.socketpair()
    args = [str(theirs.fileno()), method, *program_to_args(program)]
    with stop_signals_blocked():
        process = subprocess.Popen(
            own_python("fork-server", args),
            env=with_this_package(env),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    theirs.close()
    return ForkServerClient(ours, process)
