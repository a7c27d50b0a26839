"""What tests of training code need: real ranks for one function call, and a hash of what they trained.

    caller ──► forkserver (torch is loaded once) ──► rank 0 ──┐
                                                 ──► rank 1 ──┼──► what the function returned or raised, by rank
                                                 ──► rank 2 ──┘

Ranks are processes of their own, so a test may kill them, and nothing that they do to themselves is left behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
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
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import permutations
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from lockstep.checkpoint import LOCAL, list_checkpoints, load_tree
from lockstep.faults import FaultPlan
from lockstep.heartbeat import ProgressMarker, progress_marker
from lockstep.launch_contract import RESUME
from lockstep.peer_failure import is_peer_failure
from lockstep.run import Run
from lockstep.world import LAUNCHERS, World

__all__ = ["FaultPlan", "Outcome", "StrategyLaws", "run_each", "run_ranks", "state_hash"]

T = TypeVar("T")

#: Loaded once for all ranks, if installed. Every optimizer loads `torch._dynamo`, which takes seconds.
_PRELOAD = (
    *("torch", "torch._dynamo", "hypothesis", "pytest", "lockstep.run", "lockstep.strategies.sharded.fully_sharded"),
    *("lockstep.strategies.pipelined.pipeline", "lockstep.strategies.parameter_server.hybrid"),
)
#: How long ranks may go on after one of them failed: enough to be told that it is gone.
_GRACE_S = 10.0
#: How long a rank has at the deadline to write where it is.
_LAST_WORDS_S = 1.0
_TELL_STACKS = signal.SIGRTMAX - 1


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
    context.set_forkserver_preload([name for name in _PRELOAD if _is_there(name)])
    call = pickle.dumps((fn, args))
    with _held_port() as port, tempfile.TemporaryDirectory(prefix="lockstep-ranks-") as stacks:
        ends: list[Connection] = []
        processes = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                world = World(rank, world_size, rank, world_size, 0, 1, address="127.0.0.1", port=port)
                place = _Place(os.getcwd(), _environment(world, env or {}), Path(stacks, str(rank)))
                process = context.Process(target=_be_rank, args=(theirs, place, _home_of(fn), call))
                process.start()
                theirs.close()
                ends.append(ours)
                processes.append(process)
            return _collect(ends, processes, Path(stacks), timeout_s)
        finally:
            for end in ends:
                end.close()
            for process in processes:
                _end(process)


def state_hash(*objects: object) -> str:
    """A hash of every bit of ``objects``: equal states give equal hashes, on any rank and in any process.

    Tensors count by type, shape and bytes, not by device, strides or whether they need gradients. Dicts (in any
    order), lists, tuples, plain values, and whatever has a ``state_dict``: modules (without the wrapper of DDP),
    optimizers, schedulers.

    Raises:
        TypeError: for anything else.
    """
    digest = hashlib.sha256()
    for value in objects:
        _feed(digest.update, value)
    return digest.hexdigest()


def _feed(update: Callable[[bytes], None], value: Any) -> None:
    # Each part begins with its kind and length, so that no two states are spelt alike.
    if isinstance(value, torch.Tensor):
        update(f"tensor {value.dtype} {tuple(value.shape)}:".encode())
        update(value.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        update(f"dict {len(value)}:".encode())
        for key in sorted(value, key=repr):
            _feed(update, key)
            _feed(update, value[key])
    elif isinstance(value, list | tuple):
        update(f"list {len(value)}:".encode())
        for item in value:
            _feed(update, item)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        update(f"{type(value).__name__} {len(repr(value))}:{value!r}".encode())
    elif isinstance(value, DistributedDataParallel):
        _feed(update, value.module)
    elif hasattr(value, "state_dict"):
        _feed(update, value.state_dict())
    else:
        raise TypeError(
            f"state_hash of a {type(value).__name__}: give tensors, plain values, dicts and lists of them, or what has "
            "a state_dict()"
        )


# ---- in the caller ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _held_port() -> Iterator[int]:
    """A port that only the ranks can take: bound here and not listening, so one of them may bind it once more."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _environment(world: World, more: Mapping[str, str]) -> dict[str, str]:
    foreign = {name for row in LAUNCHERS for name in (*row.rank, *row.size, *row.local_rank, *row.local_size)}
    mine = {n: v for n, v in os.environ.items() if n not in foreign and not n.startswith("LOCKSTEP_")}
    return {**mine, "OMP_NUM_THREADS": "1", **world.rank_variables(), **more}


def _home_of(fn: Callable[..., Any]) -> tuple[str, str | None]:
    """The module of ``fn`` and its file, for a test runner's modules cannot always be imported by name."""
    name = getattr(fn, "__module__", None) or "__main__"
    return name, getattr(sys.modules.get(name), "__file__", None)


def _collect(ends: Sequence[Connection], processes: Sequence[Any], stacks: Path, timeout_s: float) -> list[Outcome]:
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
                outcomes[rank] = _heard(rank, ends[rank], processes[rank])
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


def _heard(rank: int, end: Connection, process: Any) -> Outcome:
    with contextlib.suppress(EOFError, ConnectionResetError):
        if end.poll():
            return _unpacked(rank, *end.recv())
    return _death(rank, process)


def _stacks_of(process: Any, file: Path) -> str:
    """What each thread of a rank does; nothing, if it does not answer within a second."""
    before = 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, _TELL_STACKS)
    deadline = time.monotonic() + _LAST_WORDS_S
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


def _death(rank: int, process: Any) -> Outcome:
    process.join(_LAST_WORDS_S)
    code = process.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"left with exit code {code}"
    return Outcome(rank, error=ChildProcessError(f"rank {rank} {how} before the function returned"))


def _end(process: Any) -> None:
    """The process is gone, and what it started, such as loader processes."""
    for kill in (os.killpg, os.kill):  # its group too, unless it died before it had one
        with contextlib.suppress(ProcessLookupError):
            kill(process.pid, signal.SIGKILL)
    process.join(_GRACE_S)
    if process.exitcode is not None:
        process.close()


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


# ---- in a rank -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    directory: str
    env: dict[str, str]
    stacks: Path  #: where to write the stacks when asked


def _be_rank(pipe: Connection, place: _Place, home: tuple[str, str | None], call: bytes) -> None:
    """Call the function and tell how it ended; then leave at once, for peers wait until this process is gone."""
    os.setpgid(0, 0)
    _end_with_parent()
    # As in a process that was started by hand: loader processes are copies, in no need of a server of their own.
    multiprocessing.set_start_method(None, force=True)
    os.chdir(place.directory)
    os.environ.clear()
    os.environ.update(place.env)
    torch.set_num_threads(1)
    value, error, trace = None, None, ""
    with place.stacks.open("w") as stacks:
        # Answered also where Python itself is stuck. No timer of faulthandler's: a forked child would wait for it.
        faulthandler.register(_TELL_STACKS, file=stacks)
        try:
            _load(*home)
            fn, args = pickle.loads(call)
            value = fn(*args)
        except BaseException as raised:  # noqa: BLE001 - also SystemExit is an outcome, which the caller sees
            error, trace = raised, traceback.format_exc()
        faulthandler.unregister(_TELL_STACKS)
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


# ---- laws of strategies ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StrategyLaws:
    """What a strategy owes to whoever chooses it by a word: one method for each law, which raises AssertionError.

    Each law trains a small classifier on real ranks, through `Run`, and compares checkpoints: so it sees what a user
    would get, whatever lies where while it trains. A law takes one to five seconds.

    The reference is one rank without a strategy. A strategy that promises bits must end in the same ones; another one
    must not be further away than ``tolerance``, as a part of the way that training went: the 2-norm of the difference
    of parameters over that of what the reference changed. And it must have gone the same way: within 60 degrees of it,
    so that no tolerance forgives one that learns nothing.

    Args:
        strategy: the word, with options.
        directory: for checkpoints; each law makes its own below it.
        worlds: numbers of ranks to try, the first one is used where one will do.
        bits: whether it promises the reference's bits.
        tolerance: how far it may be away, if it does not.
        repeats: whether the same world gives the same bits again.
        dropout: of the classifier; a strategy that computes in an order of its own draws other numbers.
        batchnorm: whether the classifier has it, else LayerNorm: for strategies that cut micro-batches into pieces.
        rehearse: whether CPU threads stand in for GPUs, or ranks share one.
    """

    strategy: str
    directory: Path
    worlds: tuple[int, ...] = (2, 3)
    bits: bool = True
    tolerance: float = 0.0
    repeats: bool = True
    dropout: float = 0.2
    batchnorm: bool = True
    rehearse: bool = False

    #: The names of the laws.
    ALL: ClassVar[tuple[str, ...]] = (
        "equals_the_reference",
        "equals_plain_torch",
        "resumes_exactly",
        "moves_between_worlds",
        "moves_between_strategies",
        "survives_a_killed_rank",
        "respects_count",
        "clips_alike",
        "evaluates_exactly_once",
    )

    def equals_the_reference(self) -> None:
        """On each world, with momentum and with AdamW, buffers included."""
        for lesson in (self._lesson(optimizer="sgd"), self._lesson(optimizer="adamw")):
            for world in self.worlds:
                self._near(self._taught(lesson, world), lesson, f"on {world} ranks, {lesson.optimizer}")

    def equals_plain_torch(self) -> None:
        """Not only like another world: like a loop of plain torch on one process, but for rounding."""
        lesson, world = self._lesson(), self.worlds[0]
        (plain,) = run_ranks(_learn_plainly, 1, lesson, timeout_s=_LAW_S)
        found = _flat(self._taught(lesson, world), lesson)
        if self.bits:
            away = float((found - plain).abs().max())
            assert away <= _ROUNDING, f"{self.strategy} on {world} ranks: {away:.3g} away from plain torch"
        else:
            self._not_far(found, plain, lesson, f"on {world} ranks, from plain torch")

    def resumes_exactly(self) -> None:
        """Left after some steps, within an epoch, and started again: as if it had not been left."""
        lesson, world = self._lesson(), self.worlds[0]
        whole = self._taught(lesson, world)
        place = self._part_way(lesson, world)
        resumed = self._taught(lesson, world, place)
        if self.repeats:
            assert state_hash(resumed) == state_hash(whole), f"{self.strategy}: resumed, it ends in other bits"
        self._near(resumed, lesson, "resumed")

    def moves_between_worlds(self) -> None:
        """Begun on one number of ranks, ended on another, and the other way round."""
        lesson = self._lesson()
        for before, after in permutations(self.worlds, 2):
            place = self._part_way(lesson, before)
            self._near(self._taught(lesson, after, place), lesson, f"begun on {before} ranks, ended on {after}")

    def moves_between_strategies(self) -> None:
        """Begun under ``ddp`` and ended under this one, and the other way round."""
        mine, other, world = self._lesson(), self._lesson(strategy="ddp"), self.worlds[0]
        for before, after in ((other, mine), (mine, other)):
            place = self._part_way(before, world)
            found = self._taught(after, world, place)
            self._near(found, mine, f"begun under {before.strategy}, ended under {after.strategy}")

    def survives_a_killed_rank(self) -> None:
        """A rank is killed; no other hangs, and started again the run ends as if nothing had been."""
        lesson, world = self._lesson(), self.worlds[0]
        for victim in sorted({0, world - 1}):
            place = self._part_way(lesson, world, victim)
            found = self._taught(lesson, world, place)
            if self.repeats:
                same = state_hash(found) == state_hash(self._taught(lesson, world))
                assert same, f"{self.strategy}: after rank {victim} was killed it ends in other bits"
            self._near(found, lesson, f"after rank {victim} was killed")

    def respects_count(self) -> None:
        """The mean is over the items that ``count=`` tells, not over micro-batches or samples."""
        lesson = self._lesson(counted=True)
        self._near(self._taught(lesson, self.worlds[-1]), lesson, "with count=")

    def clips_alike(self) -> None:
        """The norm of the gradient is that of the whole one, wherever its parts lie."""
        lesson = self._lesson(clip_norm=0.05)
        self._near(self._taught(lesson, self.worlds[-1]), lesson, "with clip_norm=0.05")

    def evaluates_exactly_once(self) -> None:
        """Each held-out sample counts once, over all ranks, and outputs are those of the trained model."""
        for world in self.worlds:
            lesson = self._lesson()
            met = run_ranks(_evaluate, world, lesson, timeout_s=_LAW_S)
            once = sum(2.0**i for i in range(_HELD_OUT)) / _HELD_OUT
            assert [m["met"] for m in met] == [once] * world, f"{self.strategy} on {world} ranks met {met}"
            assert len({repr(m) for m in met}) == 1, f"{self.strategy}: ranks have other measures: {met}"

    def _lesson(self, **told: Any) -> _Lesson:
        lesson = _Lesson(self.strategy, dropout=self.dropout, batchnorm=self.batchnorm, rehearse=self.rehearse)
        return replace(lesson, **told)

    def _near(self, found: dict[str, Any], lesson: _Lesson, when: str) -> None:
        reference = _reference(replace(lesson, strategy="none"))
        if self.bits:
            assert state_hash(found) == state_hash(reference), f"{self.strategy} {when}: other bits than one rank"
            return
        self._not_far(_flat(found, lesson), _flat(reference, lesson), lesson, f"{when}, from one rank")

    def _not_far(self, here: torch.Tensor, end: torch.Tensor, lesson: _Lesson, when: str) -> None:
        begin = _flat(_reference(replace(lesson, strategy="none", epochs=0)), lesson)
        away = float((here - end).norm() / (end - begin).norm())
        assert away <= self.tolerance, f"{self.strategy} {when}: {away:.3g} away, over {self.tolerance:g}"
        along = float((here - begin) @ (end - begin) / (here - begin).norm() / (end - begin).norm())
        assert along >= _ALONG, f"{self.strategy} {when}: went elsewhere, by a cosine of {along:.2g}"

    def _taught(self, lesson: _Lesson, world: int, place: Path | None = None) -> dict[str, Any]:
        """The state at the end of training; resumed, if ``place`` holds some of it."""
        resumed = place is not None
        place = place or self._place()
        run_ranks(_learn, world, replace(lesson, place=str(place)), timeout_s=_LAW_S, env={RESUME: str(int(resumed))})
        return _newest(place)

    def _part_way(self, lesson: _Lesson, world: int, victim: int | None = None) -> Path:
        """A directory with a checkpoint of the first steps of training, which was then left, or killed."""
        place = self._place()
        lesson = replace(lesson, place=str(place), leave_after=4, victim=victim)
        outcomes = run_each(_learn, world, lesson, timeout_s=_LAW_S)
        for outcome in outcomes:
            if victim is None:
                left = isinstance(outcome.error, _Left) or outcome.collateral
            else:
                left = isinstance(outcome.error, ChildProcessError) if outcome.rank == victim else outcome.collateral
            assert left, f"{self.strategy}: rank {outcome.rank} of {world} ended with {outcome}\n{outcome.trace}"
        saved = list_checkpoints(place)
        assert saved, f"{self.strategy}: nothing was saved before it was left"
        assert 0 < saved[0].step < _STEPS
        return place

    def _place(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.directory))


_LAW_S = 60.0
_ROUNDING = 1e-6  # of parameters of about 1, in float32
_ALONG = 0.5  # the cosine of 60 degrees; an unrelated way of as many parameters has one of 0 +- 0.04
_SAMPLES, _HELD_OUT, _EPOCHS, _STEPS = 40, 23, 2, 6
_SEED, _GLOBAL_BATCH, _MICRO_BATCH = 3, 16, 4


class _Left(Exception):
    """Training was left on purpose."""


@dataclass(frozen=True, slots=True)
class _Lesson:
    """One training, on every rank of a world."""

    strategy: str
    place: str | None = None
    optimizer: str = "sgd"
    dropout: float = 0.0
    batchnorm: bool = True
    rehearse: bool = False
    counted: bool = False
    clip_norm: float | None = None
    epochs: int = _EPOCHS
    leave_after: int = 0  #: steps; 0: not before the end
    victim: int | None = None  #: the rank that is killed then; None: all leave by themselves


def _pupil(lesson: _Lesson) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(9, 4),
        nn.Flatten(),
        nn.Linear(12, 24),
        nn.BatchNorm1d(24) if lesson.batchnorm else nn.LayerNorm(24),
        nn.ReLU(),
        nn.Dropout(lesson.dropout),
        nn.Linear(24, 10),
        nn.Tanh(),
        nn.Linear(10, 5, bias=False),
    )


def _lines() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is learned: words, labels and weights."""
    random = torch.Generator().manual_seed(5)
    words, labels = (torch.randint(k, n, generator=random) for k, n in ((9, (_SAMPLES, 3)), (5, (_SAMPLES,))))
    return words, labels, torch.randint(1, 9, (_SAMPLES,), generator=random)


def _learn_plainly(lesson: _Lesson) -> torch.Tensor:
    """The parameters after what `_learn` trains, without `Run` and what it is made of, in one long vector."""

    def seed(*key: object) -> int:
        digest = hashlib.blake2b("/".join(map(repr, key)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") // 2

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed(_SEED, "init"))
    model, (words, labels, _) = _pupil(lesson).to(device), _lines()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    for epoch in range(lesson.epochs):
        order = torch.randperm(_SAMPLES, generator=torch.Generator().manual_seed(seed(_SEED, "order", epoch)))
        for rows in order.split(_GLOBAL_BATCH):
            for index, mine in enumerate(rows.split(_MICRO_BATCH)):
                torch.manual_seed(seed(_SEED, "step", step, index))
                loss = nn.functional.cross_entropy(model(words[mine].to(device)), labels[mine].to(device))
                (loss * (len(mine) / len(rows))).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return torch.cat([p.detach().cpu().double().reshape(-1) for p in model.parameters()])


def _learn(lesson: _Lesson) -> dict[str, float]:
    words, labels, weights = _lines()
    make = torch.optim.AdamW if lesson.optimizer == "adamw" else partial(torch.optim.SGD, momentum=0.9)
    with Run(
        seed=_SEED,
        strategy=lesson.strategy,
        checkpoint=lesson.place,
        save_every="2 steps" if lesson.leave_after else None,
        clip_norm=lesson.clip_norm,
        peer_timeout_s=20,
        rehearse=lesson.rehearse,
    ) as run:
        model = run.model(_pupil(lesson))
        run.optimizer(make(model.parameters(), lr=0.05))
        batches = run.loader(
            TensorDataset(words, labels, weights), global_batch=_GLOBAL_BATCH, micro_batch=_MICRO_BATCH
        )
        if lesson.leave_after:
            _leaving(run, lesson)
        for _ in run.epochs(lesson.epochs):
            for x, y, w in run.train(batches):
                if lesson.counted:
                    run.step(_weighted_loss, x, (y, w), count=int(w.sum()))
                else:
                    run.step(nn.functional.cross_entropy, x, y)
    return run.metrics


def _weighted_loss(outputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    each = nn.functional.cross_entropy(outputs, labels, reduction="none")
    return (each * weights).sum() / weights.sum()


def _leaving(run: Run, lesson: _Lesson) -> None:
    """This rank leaves, or is killed, after ``leave_after`` steps, once there is a checkpoint."""

    def follow(marker: ProgressMarker) -> None:
        if lesson.place is None or lesson.victim not in (None, run.rank) or marker.step != lesson.leave_after:
            return
        deadline = time.monotonic() + _LAW_S
        while not list_checkpoints(Path(lesson.place)) and time.monotonic() < deadline:
            time.sleep(0.005)
        if lesson.victim is None:
            raise _Left
        os.kill(os.getpid(), signal.SIGKILL)

    progress_marker().listeners += (follow,)


def _evaluate(lesson: _Lesson) -> dict[str, float]:
    random = torch.Generator().manual_seed(6)
    words, labels = (torch.randint(k, n, generator=random) for k, n in ((9, (_SAMPLES, 3)), (5, (_SAMPLES,))))
    with Run(seed=3, strategy=lesson.strategy, peer_timeout_s=20, rehearse=lesson.rehearse) as run:
        model = run.model(_pupil(lesson))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        batches = run.loader((words, labels), global_batch=16, micro_batch=4)
        held_out = run.loader((words[:_HELD_OUT], torch.arange(_HELD_OUT)), global_batch=6, shuffle=False)
        for _ in run.epochs(1):
            for x, y in run.train(batches):
                run.step(nn.functional.cross_entropy, x, y)
            for x, number in run.evaluate(held_out):
                run.measure(met=2.0 ** number.double(), output=model(x).square().sum(1))
        return run.metrics


@cache
def _reference(lesson: _Lesson) -> dict[str, Any]:
    """The state after ``lesson`` on one rank."""
    with tempfile.TemporaryDirectory(prefix="lockstep-law-") as place:
        run_ranks(_learn, 1, replace(lesson, place=place), timeout_s=_LAW_S)
        return _newest(Path(place), 0 if lesson.epochs == 0 else _STEPS)


def _newest(place: Path, step: int = _STEPS) -> dict[str, Any]:
    """What the newest checkpoint in ``place`` holds of model and optimizer."""
    saved = list_checkpoints(place)
    assert saved, f"nothing was saved in {place}"
    assert saved[0].step == step, f"the last checkpoint is of step {saved[0].step}, not of {step}"
    tree = load_tree(saved[0].path, LOCAL)
    return {name: tree[name] for name in ("models", "optimizers")}


def _flat(state: Mapping[str, Any], lesson: _Lesson) -> torch.Tensor:
    (model,) = state["models"]
    names = [name for name, _ in _pupil(lesson).named_parameters()]
    return torch.cat([model[name].double().reshape(-1) for name in names])
