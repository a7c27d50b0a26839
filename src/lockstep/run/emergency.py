"""No step is lost when a rank dies: those that live leave the state of the last finished step to the next generation.

    a rank dies                the others lose it in their next collective call, with the state of the last step whole
    each of them, in turn      is it there already? else write it, with the commit of any checkpoint, into memory
    the next generation        all ranks tell what lies on their nodes; the newest state that is whole is loaded, and
                               goes through the network to nodes that have none; else the newest checkpoint
    two steps later            what the dead generation has left is removed

    MEMORY/run-0-generation-3-1f2e/measures-0002        what rank 2 has measured, see `measures_journal`
    MEMORY/run-0-generation-3-1f2e/state-0/step-00001234  a checkpoint as in docs/format.md, by one rank of node 0
    MEMORY/run-0-generation-3-1f2e/suspect              its ranks had come to differ: nothing of them is used

Where the memory has no room, the state goes to the run directory, under ``emergency``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from lockstep.checkpoint import (
    LOCAL,
    FlatTree,
    SavedTree,
    StateTree,
    checksums_in,
    list_checkpoints,
    load_tree,
    read_manifest,
    save_whole,
)
from lockstep.collectives import Group
from lockstep.errors import LockstepError, MismatchError
from lockstep.launch_contract import EMERGENCY
from lockstep.peer_failure import is_peer_failure
from lockstep.run.emergency_choice import Choice, Left, LeftState, choose
from lockstep.run.measures_journal import Measured, MeasuresJournal, Sums, read_journal
from lockstep.run.metrics import MetricMeans, PassMetrics
from lockstep.run.resume_point import ResumePoint
from lockstep.settings import Settings
from lockstep.strategies import Strategy, holds_whole_state
from lockstep.world import World

#: How long a rank waits for others of its node, each of which may write a state.
_TURN_S = 60.0
_POLL_S = 0.01
_STATE = "state-"
#: Of the memory that is free, what a state may take.
_SHARE = 0.8


class Emergency(Protocol):
    """What is left to the next generation when a rank dies. Each rank by itself, where nothing else is said."""

    notes: bool  #: whether what is measured is to be written down

    def note(self, step: int) -> None:
        """What was measured so far belongs to ``step``, in work, whose gradients are summed next."""
        ...

    def note_late(self, step: int) -> None:
        """The body of ``step`` is over: what it has measured since its gradients were summed is in the sums, too."""
        ...

    def discard(self) -> None:
        """The step in work is discarded, with whatever was noted of it."""
        ...

    def leave(self, error: BaseException, point: ResumePoint, about: Callable[[], StateTree]) -> None:
        """The run ends by ``error``. If it says that another rank is gone, the state of ``point`` is left.

        ``about`` gives what is said of it, see `LeftState.of`.
        """
        ...

    def find(self) -> LeftBehind | None:
        """What the generation before has left. Collective."""
        ...

    def forget_before(self) -> None:
        """Nothing will be asked of earlier generations any more."""
        ...

    def close(self) -> None:
        """Nothing is held open."""
        ...


class NoEmergency(Emergency):
    """For a run that nobody starts again."""

    notes = False

    def note(self, step: int) -> None:
        """Nothing."""

    def note_late(self, step: int) -> None:
        """Nothing."""

    def discard(self) -> None:
        """Nothing."""

    def leave(self, error: BaseException, point: ResumePoint, about: Callable[[], StateTree]) -> None:
        """Nothing."""

    def find(self) -> LeftBehind | None:
        """None."""
        return None

    def forget_before(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class LeftBehind:
    """The newest state that the ranks of earlier generations have left, whole and agreed on by all ranks.

    Args:
        group: all ranks.
        choice: what was chosen, the same on all.
    """

    def __init__(self, group: Group, choice: Choice) -> None:
        self._group: Final = group
        self._choice: Final = choice
        self.step: Final = choice.state.step
        self.rank: Final = choice.state.rank  #: that has left it
        self.about: Final[SavedTree] = choice.state.about  #: what `Checkpoints.save` would have been given
        self.turn: Final = choice.state.turn  #: whether a turn of the outer loop begins there
        self.rows: Final[Sequence[Any]] = choice.state.rows  #: what was logged before that, since the step ended

    def load(self) -> StateTree | None:
        """Its tree, on every rank; None on all of them if it cannot be read. Collective."""
        group, why_not = self._group, "it is on another node"
        tree: StateTree | None = None
        for path in (Path(copy.path) for copy in self._choice.copies):
            if path.is_dir():
                try:
                    tree = load_tree(path, LOCAL)
                    break
                except (LockstepError, OSError, RuntimeError) as error:
                    why_not = str(error)
        answers = group.gather_objects("" if tree is not None else why_not, "what survivors have left")
        holders = [rank for rank, answer in enumerate(answers) if not answer]
        if not holders:
            return None
        if tree is None or len(holders) < group.size:
            tree = _sent_from(group, holders[0], tree)
        sums = self._choice.sums
        return {**tree, "measures": sums.train, "recent": sums.recent}


def _sent_from(group: Group, source: int, tree: StateTree | None) -> StateTree:
    """The tree of rank ``source``, on all ranks. Collective."""
    flat = FlatTree.of(tree) if group.rank == source else None
    outline = None if flat is None else (flat.encoded, [(e.dtype, e.shape) for e in flat.entries])
    encoded, shapes = group.gather_objects(outline, "the outline of a state")[source] or (None, ())
    tensors = tuple(torch.empty(shape, dtype=dtype) for dtype, shape in shapes) if flat is None else flat.tensors
    for tensor in tensors:
        if tensor.numel():
            group.broadcast_bytes(tensor.reshape(-1).view(torch.uint8), source, "the state of a survivor")
    received: StateTree = FlatTree(encoded, (), tensors).tree(tensors)
    return received


class EmergencyMemory(Emergency):
    """In a directory of this host's memory, that ranks of one launcher share.

    Args:
        memory: the directory.
        run_dir: where a state goes for which the memory has no room.
        group: all ranks.
        world: this rank's place.
        metrics: what is measured.
        writes: whether this rank holds the whole state after each step, and there are others to lose.
        log_every: after how many steps recent means are logged; None: never.
        checkpoint: directory of the run's checkpoints, by which runs of one script are told apart; "": the usual one.
    """

    def __init__(
        self,
        memory: Path,
        run_dir: Path,
        group: Group,
        world: World,
        metrics: PassMetrics,
        *,
        writes: bool,
        log_every: int | None,
        checkpoint: str = "",
    ) -> None:
        self._memory: Final = memory
        self._run_dir: Final = run_dir / "emergency"
        self._group: Final = group
        self._world: Final = world
        self._metrics: Final = metrics
        self._log_every: Final = log_every
        # Launchers that have found another coordinator count generations anew.
        mark = group.broadcast_object(secrets.token_hex(4), "name of what survivors leave")
        self._run: Final = f"run-{zlib.crc32(checkpoint.encode()):08x}"  # a script may open several
        self._name: Final = f"{self._run}-generation-{world.generation}-{mark}"
        self.notes = writes
        self._journal: MeasuresJournal | None = None
        self._train: MetricMeans | None = None  # of the pass whose sums the journal began with
        self._step = 0  # that was noted last
        self._of_step: list[Measured] = []
        if writes:
            with contextlib.suppress(OSError):
                self._own(memory).mkdir(parents=True, exist_ok=True)
                self._journal = MeasuresJournal(self._own(memory) / f"measures-{group.rank:04d}")

    # ---- while it trains -----------------------------------------------------------------------------------------

    def note(self, step: int) -> None:
        """See `Emergency.note`. On a CPU some microseconds; waits for a GPU."""
        journal, metrics = self._journal, self._metrics
        if journal is None:
            return
        measured = self._measured()
        if self._step != step:
            self._step, self._of_step = step, []
        self._of_step += measured
        if metrics.train is not self._train or not journal.takes(measured):
            self._train, measured = metrics.train, self._of_step
            self._begin(journal, step - 1, measured)
        journal.note(step, measured)

    def note_late(self, step: int) -> None:
        """See `Emergency.note_late`."""
        journal = self._journal
        if journal is None or not self._metrics.has_called:
            return
        measured = self._measured()
        if journal.takes(measured):
            journal.note(step, measured, late=True)
        else:
            self._begin(journal, step, measured, late=True)

    def discard(self) -> None:
        """See `Emergency.discard`."""
        self._step, self._of_step, self._train = 0, [], None  # the next note begins anew, and takes back what there was

    def _measured(self) -> list[Measured]:
        return [
            Measured(name, value.item(), int(weight), int(count))
            for name, value, weight, count in self._metrics.take_added()
        ]

    def _begin(self, journal: MeasuresJournal, step: int, measured: Sequence[Measured], *, late: bool = False) -> None:
        sums = Sums(self._metrics.train.own(), self._metrics.recent.own())
        names = dict.fromkeys([*sums.train, *sums.recent, *(one.name for one in measured)])
        journal.begin(step, sums, names, late=late)

    def forget_before(self) -> None:
        """See `Emergency.forget_before`."""
        if self._world.local_rank == 0:
            for directory in self._before():
                shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """See `Emergency.close`."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    # ---- when a rank is lost -------------------------------------------------------------------------------------

    def leave(self, error: BaseException, point: ResumePoint, about: Callable[[], StateTree]) -> None:
        """See `Emergency.leave`. It never raises: the error that ended the run is the one to be told."""
        if not self.notes:
            return
        try:
            if isinstance(error, MismatchError):
                self._suspect(str(error))
            elif is_peer_failure(error) and (flat := point.take()) is not None:
                with self._turn():
                    self._leave(flat, about())
        except Exception:  # noqa: BLE001 - the script's own objects tell their state here, and may raise anything
            pass  # the checkpoint is what is left

    def _leave(self, flat: FlatTree, about: StateTree) -> None:
        newest = (about["step"], about["turn"])
        for there in self._states(self._name):
            if (there.step, there.turn) > newest:
                return
            if (there.step, there.turn) == newest:
                if there.checksums != flat.checksums():
                    self._suspect(f"ranks {there.rank} and {self._group.rank} differ after step {there.step}")
                return
        place = self._place(flat.size_bytes)
        if place is not None:
            # The run directory may be that of other nodes, too, whose ranks do not wait for their turn here.
            save_whole(self._own(place) / f"{_STATE}{self._world.node_rank}", flat, about["step"], about)

    def _suspect(self, why: str) -> None:
        (self._own(self._memory) / "suspect").write_text(why)

    def _place(self, size_bytes: int) -> Path | None:
        """Where there is room for so many bytes; None: nowhere."""
        if size_bytes <= _SHARE * min(LOCAL.free_bytes(self._memory), _free_memory()):
            return self._memory
        self._run_dir.mkdir(exist_ok=True)
        return self._run_dir if size_bytes <= LOCAL.free_bytes(self._run_dir) else None

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One rank of this node at a time; the lock of one that is killed is free."""
        lock = os.open(self._memory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            end_s = time.monotonic() + _TURN_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end_s:
                        raise
                    time.sleep(_POLL_S)
            yield
        finally:
            os.close(lock)

    # ---- when the next generation starts -------------------------------------------------------------------------

    def find(self) -> LeftBehind | None:
        """See `Emergency.find`."""
        own = self._left() if self._world.local_rank == 0 else Left()
        choice = choose(self._group.gather_objects(own, "what survivors have left"), self._log_every)
        return None if choice is None else LeftBehind(self._group, choice)

    def _left(self) -> Left:
        states: list[LeftState] = []
        journals, suspect = {}, []
        for directory in self._before():
            states += self._states(directory.name)
            if (directory / "suspect").exists():
                suspect.append(directory.name)
            for path in directory.glob("measures-*"):
                journals[directory.name, int(path.name.rpartition("-")[2])] = read_journal(path)
        unique = {state.path: state for state in states}  # one generation may have left something in both places
        return Left(tuple(unique.values()), journals, tuple(suspect))

    def _states(self, generation: str) -> list[LeftState]:
        found = []
        for place in (self._memory, self._run_dir):
            roots = sorted((place / generation).glob(f"{_STATE}*"))
            for one in (one for root in roots for one in list_checkpoints(root)):
                with contextlib.suppress(LockstepError, OSError):
                    manifest = read_manifest(one.path)
                    found.append(LeftState.of(generation, str(one.path), manifest.about, checksums_in(manifest)))
        return found

    def _before(self) -> list[Path]:
        """What earlier generations have left in both places."""
        every = [path for place in (self._memory, self._run_dir) for path in place.glob(f"{self._run}-generation-*")]
        return [path for path in every if path.name != self._name]

    def _own(self, place: Path) -> Path:
        return place / self._name


def _free_memory(proc: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of this host's memory that may still be used; a file in memory counts in the writer's control groups, too.

    A job whose group is full is killed with its launcher.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10
    for line in proc.read_text().splitlines() if proc.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        root = mounted / "memory" if controllers else mounted
        own = root / path.lstrip("/")
        # Inside of a container the path is that outside of it, and its own group is mounted as the root.
        for group in (group for group in (own, *own.parents) if group == root or root in group.parents):
            with contextlib.suppress(OSError, ValueError):  # there is none, or it has no limit
                limit, used = (int((group / name).read_text()) for name in names)
                free = min(free, limit - used)
    return free


def open_emergency(
    settings: Settings, env: Mapping[str, str], group: Group, world: World, strategy: Strategy, metrics: PassMetrics
) -> Emergency:
    """What the launcher has made room for, if it has and the settings want it."""
    if EMERGENCY not in env or world.run_dir is None or not settings.emergency:
        return NoEmergency()
    return EmergencyMemory(
        Path(env[EMERGENCY]),
        Path(world.run_dir),
        group,
        world,
        metrics,
        writes=writes_emergency(env, settings, group, strategy),
        log_every=None if settings.log_every is None else int(settings.log_every.every),
        checkpoint=settings.checkpoint or "",
    )


def writes_emergency(env: Mapping[str, str], settings: Settings, group: Group, strategy: Strategy) -> bool:
    """Whether this rank is to leave what it holds when another one dies.

    Where tensors travel by NCCL a rank does not learn in time that another one is gone, and its device may be some
    steps behind what it knows.
    """
    wanted = EMERGENCY in env and settings.emergency
    return wanted and group.size > 1 and group.over_cpu and holds_whole_state(strategy)
