"""Saving by survivors: when a rank dies, the others save the state of the last finished step for the next generation.

    a rank dies                the next collective call of the others fails, and they hold the state of the last step
    one survivor at a time     writes this state into memory, as a checkpoint, unless another survivor has
    ... or, with ``mirror``    each rank has copied its part into memory after the step, where it outlives the rank
    the next generation        the first rank of each node lists the states there; the newest complete one is loaded,
                               and sent to nodes that have none; without one, the newest checkpoint is loaded
    two steps later            the files of the dead generation are removed

`emergency_files` gives the place of each of these files.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from lockstep.checkpoint import (
    FlatTree,
    PartWriter,
    StateTree,
    save_whole,
)
from lockstep.collectives import Group
from lockstep.errors import DifferentCalls, MismatchError, NonFiniteError
from lockstep.formatting import format_ranks
from lockstep.launch_contract import EMERGENCY
from lockstep.peer_failure import is_peer_failure
from lockstep.run.metrics.metric_means import MetricMeans, PassMetrics
from lockstep.run.recovery.copied_measures import CopiedMeasures, open_copied_measures
from lockstep.run.recovery.emergency_files import EmergencyFiles
from lockstep.run.recovery.measures_journal import Measured, MeasuresJournal, Sums
from lockstep.run.recovery.mirror import Mirror, open_mirror
from lockstep.run.recovery.newest_state import NOT_USED, Left, LeftBehind, choose, differing
from lockstep.run.recovery.resume_point import ResumePoint, described
from lockstep.settings import Settings
from lockstep.strategies import StatePart, Strategy
from lockstep.world import World

#: Errors that may end all ranks at once, each of which still holds the last finished step.
_SPARE_THE_STATE: Final = (DifferentCalls, NonFiniteError)


def leaves_state(error: BaseException) -> bool:
    """Whether a rank that ``error`` ends still holds the last finished step."""
    return is_peer_failure(error) or isinstance(error, _SPARE_THE_STATE)


Own = Callable[[StatePart], StateTree]
"""Gives this rank's part of the state."""
About = Callable[[], StateTree]
"""Gives the description of the state, see `LeftState.of`."""
ScriptHeld = tuple[int, Mapping[str, object]] | None
"""The steps done, and what the script held in the next step, see `resume_proof.LeftScript`; None: not known."""


class Emergency:
    """Saves the state of the last finished step when another rank dies, and finds it in the next generation.

    This class is for a run that no launcher restarts: it saves and finds nothing, and `EmergencyMemory` overrides all
    methods. Not collective, except where a method says so.
    """

    notes = False  #: whether measured losses and metrics are written down, and a state is left when a rank is lost
    part: StatePart | None = None  #: the part of the state for `mirror`; None: the strategy cannot tell a rank's part

    def protect(self) -> str:
        """Try again to open what was refused at the start; tells the user of changes. Collective; fast if all is well.

        Returns:
            In a few words, why the death of a rank would lose steps; "" if it would not, or no protection was wanted.
        """
        return ""

    def note(self, step: int) -> None:
        """Write down the values measured so far in ``step``, whose gradients are summed next."""

    def note_late(self, step: int) -> None:
        """Write down, at the end of the loop's body, values of ``step`` measured after its gradients were summed."""

    def discard(self) -> None:
        """Discard the notes of the current step, which is discarded."""

    def mirror(self, own: Own, about: About, buffers: Iterable[torch.Tensor]) -> None:
        """Begin to copy this rank's ``own`` part of the state into memory after a step, with its description.

        The copy is complete when the next `note` returns, with the setting ``mirror`` also on another host: once a rank
        has finished a step, all have copies of the step before. The ``buffers`` of models, which the next forward pass
        may change, are copied before `mirror` returns.
        """

    def leave(self, error: BaseException, point: ResumePoint, about: About, script: ScriptHeld = None) -> None:
        """Save the state of ``point`` if the ``error`` that ends the run says that another rank was lost.

        The state is also saved for an error that may end all ranks at once and leaves their states unchanged.

        ``about`` gives the description that is saved with the state, see `LeftState.of`; ``script`` is what the next
        generation compares with its own script.
        """

    def find(self) -> LeftBehind | None:
        """The newest complete state that earlier generations have left; None if no state is complete. Collective."""
        return None

    def forget_before(self) -> None:
        """Remove the files of earlier generations, which are not needed any more."""

    def close(self) -> None:
        """Close all files."""


class EmergencyMemory(Emergency):
    """Saves states in a directory of this host's memory, which a launcher's ranks share. The constructor is collective.

    Args:
        memory: the directory.
        group: all ranks.
        world: the place of this rank, with the run directory, where a state is written if the memory has too little
            room.
        settings: of the run. The directory of its checkpoints distinguishes the runs of one script.
        strategy: knows this rank's part of the state after each step.
        metrics: the losses and metrics of the pass.
        say: tells the user a line.
    """

    def __init__(
        self,
        memory: Path,
        group: Group,
        world: World,
        settings: Settings,
        strategy: Strategy,
        metrics: PassMetrics,
        say: Callable[[str], None],
    ) -> None:
        run_dir, part = str(world.run_dir), strategy.state_part
        self._group: Final = group
        self._world: Final = world
        self._metrics: Final = metrics
        self._log_every: Final = None if settings.log_every is None else int(settings.log_every.every)
        # With a new coordinator, launchers count generations from 0 again, so the number alone is not unique.
        mark = group.broadcast_object(secrets.token_hex(4), "name of what survivors leave")
        run = f"run-{zlib.crc32(os.fsencode(settings.checkpoint or run_dir)):08x}"  # a script may open several runs
        self._files: Final = EmergencyFiles(memory, Path(run_dir), run, f"{world.generation}-{mark}")
        self.notes, self.part = _outlives_a_rank(group, part), part
        self._say: Final = say
        self._journal: MeasuresJournal | None = None
        self._copied: CopiedMeasures | None = None
        self._train: MetricMeans | None = None  # of the pass whose sums the journal began with
        self._is_left = False  # whether the launcher knows of a mirrored state
        self._step = 0  # the step noted last
        self._of_step: list[Measured] = []
        if self.notes and not settings.mirror:  # a mirror on two hosts holds measured values, too
            self._copied = open_copied_measures(self._files.own, group, say)
        self._refused: tuple[str, ...] = ("not tried yet",) if self.notes else ()  # why, of each rank; the same on all
        self._mirror: Final[Mirror | None] = (
            None
            if part is None
            else open_mirror(self._files.own, group, world, part, self._files.room, say, on_two_hosts=settings.mirror)
        )
        self.protect()

    def protect(self) -> str:
        """Try again to open what protects this rank's steps, where that failed; why it failed, or "". Collective.

        What is mirrored is tried again with the next step.
        """
        mirror = self._mirror
        if mirror is not None:
            mirror.try_again()
        if any(self._refused):
            before = self._refused
            self._refused = tuple(self._group.gather_objects(self._open_journal(), "emergency memory"))
            if why_not := next(filter(None, self._refused), ""):
                if self._refused != before:
                    self._say(
                        f"{self._who()} cannot keep in memory what is measured ({why_not}): if a rank dies, the steps "
                        "since the last checkpoint are lost. It is tried again at each save"
                    )
            elif "not tried yet" not in before:
                self._say("emergency memory can be written again: if a rank dies, no step is lost")
        if any(self._refused):
            return f"{self._who()} without emergency memory"
        return "the state is not mirrored" if mirror is not None and mirror.why_not else ""

    # ---- while it trains -----------------------------------------------------------------------------------------

    def note(self, step: int) -> None:
        """See `Emergency.note`. Takes some microseconds on a CPU; on a GPU, waits for the device."""
        if self._mirror is not None:
            self._mirror.finish()
        journal, metrics = self._journal, self._metrics
        if not self.notes:
            return
        measured = self._measured()
        if self._step != step:
            self._step, self._of_step = step, []
        self._of_step += measured
        if journal is None:
            return
        if metrics.train is not self._train or not journal.takes(measured):
            self._train, measured = metrics.train, self._of_step
            self._begin(journal, step - 1, measured)
        journal.note(step, measured)
        if self._copied is not None:
            self._copied.exchange()

    def note_late(self, step: int) -> None:
        """See `Emergency.note_late`. Takes some microseconds."""
        journal = self._journal
        if not self.notes or not self._metrics.has_called:
            return
        measured = self._measured()
        if journal is None:
            return
        if journal.takes(measured):
            journal.note(step, measured, late=True)
        else:
            self._begin(journal, step, measured, late=True)
        if self._copied is not None:
            self._copied.exchange()

    def discard(self) -> None:
        """Forget the notes of the current step: the next note takes their place."""
        self._step, self._of_step, self._train = 0, [], None  # the next note begins anew, and takes earlier notes back

    def mirror(self, own: Own, about: About, buffers: Iterable[torch.Tensor]) -> None:
        """See `Emergency.mirror`. Large tensors are copied by a thread while the ranks compute the next step."""
        if self.part is not None and self._mirror is not None:
            sums = Sums(self._metrics.train.own(), self._metrics.recent.own())
            self._mirror.begin(own(self.part), about(), sums, buffers)
            # Now: a rank that is in its update when another one dies has no other state to leave.
            if self._mirror.is_used and not self._is_left:
                self._is_left = True
                self._files.note_left()

    def _who(self) -> str:
        return format_ranks([rank for rank, why_not in enumerate(self._refused) if why_not])

    def _open_journal(self) -> str:
        """Open the journal of this rank's measured values, unless it is open; returns why this fails, or ""."""
        if self._journal is None:
            try:
                self._files.own.mkdir(parents=True, exist_ok=True)
                repeat = None if self._copied is None else self._copied.write
                self._journal = MeasuresJournal(self._files.measures(self._group.rank), repeat)
                self._train = None  # the next note begins with all measured values
            except OSError as error:
                return f"{error.filename or self._files.own}: {error.strerror}"
        return ""

    def _measured(self) -> list[Measured]:
        return [
            Measured(name, float(value), int(weight), int(count))
            for name, value, weight, count in self._metrics.take_added()
        ]

    def _begin(self, journal: MeasuresJournal, step: int, measured: Sequence[Measured], *, late: bool = False) -> None:
        sums = Sums(self._metrics.train.own(), self._metrics.recent.own())
        names = dict.fromkeys([*sums.train, *sums.recent, *(one.name for one in measured)])
        journal.begin(step, sums, names, late=late)

    def forget_before(self) -> None:
        """Remove the files of earlier generations, once for the ranks of this node."""
        if self._world.local_rank == 0:
            self._files.remove_before()

    def close(self) -> None:
        """Close the journal and the mirror; their files stay for the next generation."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._copied is not None:
            self._copied.close()
            self._copied = None
        if self._mirror is not None:
            self._mirror.close()

    # ---- when a rank is lost -------------------------------------------------------------------------------------

    def leave(self, error: BaseException, point: ResumePoint, about: About, script: ScriptHeld = None) -> None:
        """See `Emergency.leave`. Never raises, since the error that ended the run has to reach the user.

        If no state is left, the reason is noted, and the next generation tells it.
        """
        if not self.notes and (self._mirror is None or not self._mirror.is_used):
            return
        why_not = ""
        try:
            if self._copied is not None:
                self._copied.take_in()
            if isinstance(error, MismatchError) and not isinstance(error, DifferentCalls):
                self._files.suspect(str(error))
            elif self.part is not None and leaves_state(error):
                if script is not None:
                    self._files.note_script(script[0], self._group.rank, script[1])
                if (flat := point.take()) is None:
                    why_not = point.why_not
                else:
                    with self._files.turn():
                        self._leave(flat, about() | {"part": self.part.number, "parts": self.part.of})
                    self._files.note_left()
        except Exception as raised:  # noqa: BLE001 - the script's own objects tell their state here: it may be anything
            why_not = described(raised)
        if why_not:
            self._files.note_why_not(self._group.rank, why_not)

    def _leave(self, flat: FlatTree, about: StateTree) -> None:
        if about["parts"] > 1:
            writer = PartWriter(self._files.part(self._group.rank))
            writer.begin(about["step"], about, flat)
            writer.close()
            return
        newest = (about["step"], about["turn"])
        for there in (state for state in self._files.own_states() if state.sums is None):
            if (there.step, there.turn) > newest:
                return
            if (there.step, there.turn) == newest:
                if there.checksums != flat.checksums():
                    self._files.suspect(f"ranks {there.rank} and {self._group.rank} differ after step {there.step}")
                return
        directory = self._files.state(self._world.node_rank, flat.size_bytes)
        if directory is not None:
            save_whole(directory, flat, about["step"], about)

    # ---- when the next generation starts -------------------------------------------------------------------------

    def find(self) -> LeftBehind | None:
        """The newest complete state that ranks of any node have left; None if no state is complete. Collective."""
        own = self._files.left() if self._world.local_rank == 0 else Left()
        nodes = self._group.gather_objects(own, "what survivors have left")
        choice = choose(nodes, self._log_every)
        said = [one for node in nodes for one in node.why_not]
        said += [(generation, f"{NOT_USED}those of two hosts differ") for generation in differing(nodes)]
        if choice is None and not said and (states := [state for node in nodes for state in node.states]):
            newest = max(states, key=lambda state: state.step)
            missing = (
                f"step {newest.step}, which survivors have left, lacks a part, or what a rank that died had measured"
            )
            said.append((newest.generation, missing))
        for generation, why_not in dict.fromkeys(said):
            if choice is None or choice.state.generation != generation:
                self._say(why_not)
        if choice is None:
            return None
        left_by = choice.state.generation, choice.state.step
        script = next((node.scripts[left_by] for node in nodes if left_by in node.scripts), None)
        return LeftBehind(self._group, choice, script)


def open_emergency(
    settings: Settings,
    env: Mapping[str, str],
    group: Group,
    world: World,
    strategy: Strategy,
    metrics: PassMetrics,
    say: Callable[[str], None],
) -> Emergency:
    """An `EmergencyMemory` if the launcher has made its directory and the settings want it, else an `Emergency`."""
    if EMERGENCY not in env or world.run_dir is None or not settings.emergency:
        return Emergency()
    return EmergencyMemory(Path(env[EMERGENCY]), group, world, settings, strategy, metrics, say)


def writes_emergency(env: Mapping[str, str], settings: Settings, group: Group, strategy: Strategy) -> bool:
    """Whether this rank saves its part of the state when another rank dies: if others hold the dead rank's part.

    With NCCL a rank cannot: it does not learn in time that another rank has died, and its device may be some steps
    behind its host.
    """
    return EMERGENCY in env and settings.emergency and _outlives_a_rank(group, strategy.state_part)


def _outlives_a_rank(group: Group, part: StatePart | None) -> bool:
    return group.over_cpu and part is not None and part.of < group.size
