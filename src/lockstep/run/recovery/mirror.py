"""Copies of each rank's part of the state, in memory of its host and of another host, made after every step.

    step 42 ends      large tensors are copied by a thread, then sent by another thread
    step 43           forward, backward
                      before the last reduction: the copies are complete, on both hosts
                      the reduction

So once any rank has finished step 43, every part of step 42 is available, even if a whole host is lost. `MirrorPlan`
says which rank keeps which part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from lockstep.checkpoint import FlatTree, PartCopies, PartWriter, StateTree
from lockstep.collectives import Group, NeighbourLink, meet_neighbours
from lockstep.formatting import plural, size
from lockstep.run.recovery.measures_journal import Sums
from lockstep.run.recovery.mirror_plan import MirrorPlan
from lockstep.strategies import StatePart
from lockstep.world import World

#: The directories of a mirror: parts of single ranks, state that several ranks hold, and copies from another host.
MIRROR_PARTS: Final = ("mirror", "rest", "copy")
Say = Callable[[str], None]


class Mirror:
    """The mirror of a rank; see `open_mirror`. Without room, the mirror ends with a message; the run goes on.

    Args:
        directory: in this host's memory, for all ranks of this host.
        world: the place of this rank.
        plan: the parts that this rank keeps.
        link: to other hosts; None: nothing is sent to other hosts.
        copies: received from other hosts.
        room: gives the bytes that mirrors may use in addition to their files.
        say: tells the user a line.
    """

    def __init__(
        self,
        directory: Path,
        world: World,
        plan: MirrorPlan,
        link: NeighbourLink | None,
        copies: Mapping[int, PartCopies],
        room: Callable[[], int],
        say: Say,
    ) -> None:
        self._directory: Final = directory
        self._world: Final = world
        self._plan: Final = plan
        self._link: Final = link
        self._copies: Final = copies
        self._room: Final = room
        self._say: Final = say
        self._sends = link is not None
        self._unsent = ""  # the reason, until the user is told
        self._begins = True
        self._writers: dict[str, PartWriter] = {}  # made at first use

    @property
    def is_used(self) -> bool:
        """Whether states are mirrored, and mirroring has not ended."""
        return bool(self._writers)

    def begin(self, own: StateTree, about: StateTree, sums: Sums, buffers: Iterable[torch.Tensor]) -> None:
        """Begin to copy this rank's part of the state after a step; see `Emergency.mirror`.

        Args:
            own: the whole state on this rank.
            about: description of the state, with the ``step``.
            sums: this rank's measured values.
            buffers: tensors that are copied before `begin` returns.
        """
        if not self._begins and not self._writers:
            return
        try:
            self.finish()
            if self._unsent:
                # Only now: if the neighbour is gone, the step before has failed, and the launcher tells the reason.
                self._say(self._unsent)
                self._unsent = ""
            parts = self._parts(own)
            if self._begins:
                self._open(parts)
            hurried = list(buffers)
            for name, (number, flat) in parts.items():
                measured: tuple[Any, Any] = (sums.train, sums.recent) if name == "mirror" else ({}, {})
                said = about | {"part": number, "parts": self._plan.parts, "sums": measured}
                self._writers[name].begin(said["step"], said, flat, at_once=hurried)
        except OSError as error:
            self.finish()  # begun copies are being sent, from memory that is closed next
            self._end_writers()
            self._say(f"the state is not mirrored any more: {error}")

    def finish(self) -> None:
        """Wait until the begun copies are complete, on this host and the other."""
        for writer in self._writers.values():
            writer.finish()
        if self._link is not None and self._sends:
            try:
                self._link.finish()
            except OSError as error:
                self._sends = False
                self._unsent = f"the state is not copied to another host any more: rank {self._plan.to}: {error}"

    def close(self) -> None:
        """End all threads; the files stay."""
        for writer in self._writers.values():
            writer.finish()  # nothing is sent after this
        if self._link is not None:
            self._link.close()
        self._sends = False
        self._end_writers()
        for copies in self._copies.values():
            copies.close()

    def _parts(self, own: StateTree) -> dict[str, tuple[int, FlatTree]]:
        """The parts that this rank writes, by the name of their directory: their numbers and contents."""
        plan = self._plan
        first = own if plan.own is None else {name: value for name, value in own.items() if name in plan.own}
        parts = {"mirror": (self._world.rank, FlatTree.of(first))}
        if plan.rest is not None:
            rest = {name: value for name, value in own.items() if name not in first}
            parts["rest"] = (plan.rest, FlatTree.of(rest))
        return parts

    def _open(self, parts: Mapping[str, tuple[int, FlatTree]]) -> None:
        self._begins = False
        hosts = 1 if self._link is None else 2
        _, own = parts["mirror"]
        beside = sum(flat.size_bytes for name, (_, flat) in parts.items() if name != "mirror")
        ranks = hosts * self._world.local_size
        wanted = 2 * (ranks * own.size_bytes + beside)
        # Other ranks of this node may have their files already: either all ranks must find room, or none.
        taken = sum(slot.stat().st_size for kind in MIRROR_PARTS for slot in self._directory.glob(f"{kind}-*/slot-*"))
        free = taken + self._room()
        if wanted > free:
            raise OSError(
                f"two copies of the state of {plural(ranks, 'rank')} take about {size(wanted)} of "
                f"{self._directory.parent}, where {size(free)} may be used"
            )
        for name in parts:
            place = self._directory / f"{name}-{self._world.rank:04d}"
            self._writers[name] = PartWriter(place, self._send if name == "mirror" else None)

    def _send(self, step: int, content: memoryview) -> None:
        if self._link is None or not self._sends:
            content.release()
        else:
            self._link.begin(step, content)

    def _end_writers(self) -> None:
        writers, self._writers = self._writers, {}
        for writer in writers.values():
            writer.close()


def open_mirror(
    directory: Path,
    group: Group,
    world: World,
    part: StatePart,
    room: Callable[[], int],
    say: Say,
    *,
    on_two_hosts: bool,
) -> Mirror:
    """The mirror of this rank, which takes memory only from its first use on. Collective.

    Args:
        directory: see `Mirror`.
        group: all ranks.
        world: the place of this rank.
        part: this rank's part of the state.
        room: see `Mirror`.
        say: tells the user something.
        on_two_hosts: whether each part is to be on two hosts, if the world has several.
    """
    names = {"carry": True, "optimizers": part.of > 1, "models": part.divides_models}
    divided = {name for name, is_divided in names.items() if is_divided}
    alone = MirrorPlan.on_its_node(group.nodes, divided, group.rank)
    opened = partial(Mirror, directory, world)
    if not on_two_hosts or len(set(group.nodes)) == 1:
        return opened(alone, None, {}, room, say)
    numbers = group.gather_objects(part.number, "who holds which part of the state")
    plan = MirrorPlan.on_two_nodes(group.nodes, numbers, divided, {"carry"}, group.rank)
    copies = {source: PartCopies(directory / f"copy-{source:04d}") for source in plan.sources}
    assert plan.to is not None
    met = meet_neighbours(group, [plan.to], plan.sources)
    if isinstance(met, str):
        say(f"the state is not copied to other hosts: {met}")
        return opened(alone, None, {}, room, say)
    keeps = [(met.sources[source], one.take) for source, one in copies.items()]
    return opened(plan, NeighbourLink(met.to[plan.to], keeps, group.timeout_s), copies, room, say)
