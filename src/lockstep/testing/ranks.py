"""Real ranks for one function call.

    caller ──► forkserver (torch is loaded once) ──► rank 0 ──┐
                                                 ──► rank 1 ──┼──► what the function returned or raised, by rank
                                                 ──► rank 2 ──┘

Ranks are processes of their own, so a test may kill them, and nothing that they do to themselves is left behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from lockstep.peer_failure import is_peer_failure
from lockstep.world import LAUNCHERS, World

T = TypeVar("T")

#: Loaded once for all ranks, if installed. Every optimizer loads `torch._dynamo`, which takes seconds.
_PRELOAD = (
    *("torch", "torch._dynamo", "hypothesis", "pytest", "lockstep.testing", "lockstep.run"),
    "lockstep.strategies.sharded.fully_sharded",
    *("lockstep.strategies.pipelined.pipeline", "lockstep.strategies.parameter_server.hybrid"),
    *("lockstep.strategies.replicated.zero", "lockstep.strategies.local.diloco", "lockstep.strategies.local.local_sgd"),
    *("lockstep.strategies.parameter_server.parameter_server", "encodings.idna"),  # Python's, for each connection
)
#: How long ranks may go on after one of them failed: enough to be told that it is gone.
_GRACE_S = 10.0
#: How long a rank has at the deadline to write where it is.
_STACKS_S = 1.0
_STACKS_SIGNAL = signal.SIGRTMAX - 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended: it returned, it raised, or it died."""

    rank: int
    value: Any = None  #: what the function returned
    error: BaseException | None = None  #: what it raised; `ChildProcessError` if the process died, or `TimeoutError`
    trace: str = field(default="", repr=False)  #: the traceback of ``error``, or at a timeout the stacks of all threads
    collateral: bool = False  #: whether ``error`` only tells that another rank was gone


def run_ranks(
    fn: Callable[..., T], world_size: int, *args: object, timeout_s: float = 60, env: Mapping[str, str] | None = None
) -> list[T]:
    """``fn(*args)`` on ``world_size`` real ranks of this machine; what each returned, by rank.

    Each rank is a new process with torchrun's variables and a port to meet at, one CPU thread, and this process's
    directory and environment otherwise, without variables of launchers and of Lockstep. About 0.1 s, for torch is
    loaded once only. When this returns or raises, none of the processes is left.

    Args:
        fn: a function at the top level of a module, such as a test module; it, ``args`` and its result are pickled.
        world_size: ranks, from 1.
        args: for each rank the same.
        timeout_s: how long all of it may take.
        env: more environment variables for the ranks.

    Raises:
        Exception: what a rank raised, with its rank and traceback as a note. Of several the first that is no mere
            consequence of another; the others are notes too. `ChildProcessError` for a rank that died,
            `TimeoutError` for one that did not end, with its stacks.
    """
    outcomes = run_each(fn, world_size, *args, timeout_s=timeout_s, env=env)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if not failed:
        return [outcome.value for outcome in outcomes]
    first = min(failed, key=lambda outcome: (outcome.collateral, isinstance(outcome.error, TimeoutError)))
    assert first.error is not None
    for outcome in (first, *(o for o in failed if o is not first)):
        told = str(outcome.error) if outcome.collateral else outcome.trace or str(outcome.error)
        first.error.add_note(f"rank {outcome.rank} of {world_size}:\n{told}")
    raise first.error


def run_each(
    fn: Callable[..., Any], world_size: int, *args: object, timeout_s: float = 60, env: Mapping[str, str] | None = None
) -> list[Outcome]:
    """As `run_ranks`, but tells how each rank ended instead of raising: for tests in which ranks fail or are killed.

    Once a rank has failed by itself, the others have at most 10 s more.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in _PRELOAD if _is_installed(name)])
    call = pickle.dumps((fn, args))
    with _held_port() as port, tempfile.TemporaryDirectory(prefix="lockstep-ranks-") as stacks:
        ends: list[Connection] = []
        processes = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                world = World(rank, world_size, rank, world_size, 0, 1, address="127.0.0.1", port=port)
                setup = _ProcessSetup(os.getcwd(), _environment(world, env or {}), Path(stacks, str(rank)))
                process = context.Process(target=_run_as_rank, args=(theirs, setup, _module_of(fn), call))
                process.start()
                theirs.close()
                ends.append(ours)
                processes.append(process)
            return _collect(ends, processes, Path(stacks), timeout_s)
        finally:
            for end in ends:
                end.close()
            for process in processes:
                _kill(process)


# ---- in the caller ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _held_port() -> Iterator[int]:
    """A port that only the ranks can take: bound here and not listening, so one of them may bind it once more."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))  # of all addresses: the ranks listen on all, and another's connection may use one
        yield held.getsockname()[1]


def _environment(world: World, more: Mapping[str, str]) -> dict[str, str]:
    foreign = {name for row in LAUNCHERS for name in (*row.rank, *row.size, *row.local_rank, *row.local_size)}
    mine = {n: v for n, v in os.environ.items() if n not in foreign and not n.startswith("LOCKSTEP_")}
    return {**mine, "OMP_NUM_THREADS": "1", **world.rank_variables(), **more}


def _module_of(fn: Callable[..., Any]) -> tuple[str, str | None]:
    """The module of ``fn`` and its file, for a test runner's modules cannot always be imported by name."""
    name = getattr(fn, "__module__", None) or "__main__"
    return name, getattr(sys.modules.get(name), "__file__", None)


def _collect(
    ends: Sequence[Connection], processes: Sequence[BaseProcess], stacks: Path, timeout_s: float
) -> list[Outcome]:
    """How each rank ended: in its own words, or by what is known of its death."""
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout_s
    deaths = [process.sentinel for process in processes]
    while len(outcomes) < len(ends):
        waiting = [rank for rank in range(len(ends)) if rank not in outcomes]
        # Not by the end of the pipe alone: loader processes hold it open after their rank has died.
        watched = [watch for rank in waiting for watch in (ends[rank], deaths[rank])]
        ready = wait(watched, max(0.0, deadline - time.monotonic()))
        for rank in waiting:
            if ends[rank] in ready or deaths[rank] in ready:
                outcomes[rank] = _outcome_of(rank, ends[rank], processes[rank])
            else:
                continue
            if outcomes[rank].error is not None and not outcomes[rank].collateral:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        if not ready:
            late = {rank: _stacks_of(processes[rank], stacks / str(rank)) for rank in waiting}
            after = f"after {timeout_s:g} s" if not outcomes else f"{_GRACE_S:g} s after another one had failed"
            for rank, stack in late.items():
                error = TimeoutError(f"rank {rank} was still running {after}")
                outcomes[rank] = Outcome(rank, error=error, trace=stack)
    return [outcomes[rank] for rank in range(len(ends))]


def _outcome_of(rank: int, end: Connection, process: BaseProcess) -> Outcome:
    with contextlib.suppress(EOFError, ConnectionResetError):
        if end.poll():
            return _unpacked(rank, *end.recv())
    return _died(rank, process)


def _stacks_of(process: BaseProcess, file: Path) -> str:
    """What each thread of a rank does; nothing, if it does not answer within a second."""
    assert process.pid is not None  # it has started
    before = 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, _STACKS_SIGNAL)
    deadline = time.monotonic() + _STACKS_S
    while time.monotonic() < deadline:
        time.sleep(0.05)
        size = file.stat().st_size if file.exists() else 0
        if size and size == before:
            break
        before = size
    return file.read_text() if file.exists() else ""


def _unpacked(rank: int, packed: bytes, trace: str, collateral: bool) -> Outcome:
    try:
        value, error = pickle.loads(packed)
    except Exception as problem:  # noqa: BLE001 - whatever the user's class does when it is unpickled
        value, error = None, RuntimeError(f"rank {rank}'s result cannot be unpickled: {problem!r}")
    return Outcome(rank, value, error, trace, collateral)


def _died(rank: int, process: BaseProcess) -> Outcome:
    process.join(_STACKS_S)
    code = process.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"left with exit code {code}"
    return Outcome(rank, error=ChildProcessError(f"rank {rank} {how} before the function returned"))


def _kill(process: BaseProcess) -> None:
    """The process is gone, and what it started, such as loader processes."""
    assert process.pid is not None  # it has started
    for kill in (os.killpg, os.kill):  # its group too, unless it died before it had one
        with contextlib.suppress(ProcessLookupError):
            kill(process.pid, signal.SIGKILL)
    process.join(_GRACE_S)
    if process.exitcode is not None:
        process.close()


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


# ---- in a rank -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ProcessSetup:
    directory: str
    env: dict[str, str]
    stacks: Path  #: where to write the stacks when asked


def _run_as_rank(pipe: Connection, setup: _ProcessSetup, home: tuple[str, str | None], call: bytes) -> None:
    """Call the function and tell how it ended; then leave at once, for peers wait until this process is gone."""
    os.setpgid(0, 0)
    gc.freeze()  # what is loaded here will not become garbage: no search for garbage or for referrers goes through it
    _end_with_parent()
    # As in a process that was started by hand: loader processes are copies, in no need of a server of their own.
    multiprocessing.set_start_method(None, force=True)
    os.chdir(setup.directory)
    os.environ.clear()
    os.environ.update(setup.env)
    torch.set_num_threads(1)
    value, error, trace = None, None, ""
    with setup.stacks.open("w") as stacks:
        # Answered also where Python itself is stuck. No timer of faulthandler's: a forked child would wait for it.
        faulthandler.register(_STACKS_SIGNAL, file=stacks)
        try:
            _load(*home)
            fn, args = pickle.loads(call)
            value = fn(*args)
        except BaseException as raised:  # noqa: BLE001 - also SystemExit is an outcome, which the caller sees
            error, trace = raised, traceback.format_exc()
        faulthandler.unregister(_STACKS_SIGNAL)
    collateral = error is not None and is_peer_failure(error)
    with contextlib.suppress(BrokenPipeError):
        pipe.send((_packed(value, error), trace, collateral))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else 1)


def _packed(value: object, error: BaseException | None) -> bytes:
    try:
        packed = pickle.dumps((value, error))
        pickle.loads(packed)
    except Exception as problem:  # noqa: BLE001 - whatever the user's class does when it is pickled
        what = f"{type(error).__name__}: {error}" if error is not None else f"the result cannot be pickled: {problem!r}"
        packed = pickle.dumps((None, RuntimeError(what)))
    return packed


def _load(name: str, file: str | None) -> None:
    """Make the caller's module known here, by its name there; from its file, if that is the only way."""
    if name in sys.modules or file is None:
        return
    with contextlib.suppress(ImportError):
        found = importlib.util.find_spec(name)
        if found is not None and found.origin and Path(found.origin) == Path(file):
            return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch(sentinel: int) -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, args=(parent.sentinel,), name="ends with its parent", daemon=True).start()
