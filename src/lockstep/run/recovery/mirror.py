"""Copies of each rank's part of the state, in memory of its host and of another host, made after every step.

    step 42 ends      large tensors are copied by a thread, then sent by another thread
    step 43           forward, backward
                      before the last reduction: the copies are complete, on both hosts
                      the reduction

So where any rank has finished step 43, every part of step 42 is there, even if a whole host is lost. `MirrorPlan` says
who keeps what: a pure function of which rank is on which node, and of what it holds.

    one node            part 0  everything that rank 0 holds     part 1  what only rank 1 holds     ...

    several nodes,      node 0                          node 1
    fsdp on 4 ranks     part 0, 1   of ranks 0, 1       part 2, 3   of ranks 2, 3
                        part 4      what all hold       part 4      what all hold
                        copies of 2, 3                  copies of 0, 1

With several nodes each part is on two of them, so that one may be lost with all its memory: what only one rank holds is
sent to a rank of the next node, and what ranks of several nodes hold is kept on each of these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import torch

from lockstep.checkpoint import FlatTree, PartCopies, PartWriter, StateTree
from lockstep.collectives import Group, NeighbourLink, meet_neighbours
from lockstep.formatting import plural, size
from lockstep.run.recovery.measures_journal import Sums
from lockstep.strategies import StatePart
from lockstep.world import World

#: The directories of a mirror: parts of single ranks, state that several ranks hold, and copies from another host.
MIRROR_PARTS: Final = ("mirror", "rest", "copy")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MirrorPlan:
    """What one rank keeps in its host's memory, and whose copies."""

    parts: int  #: that make the state whole; the one with this rank's number has what it measured, and more
    own: frozenset[str] | None  #: the names of the state in the part with this rank's number; None: all
    rest: int | None  #: the number of the part that this rank writes with all other names; None: it writes none
    to: int | None = None  #: the rank on another node that keeps a copy of the part with this rank's number
    sources: tuple[int, ...] = ()  #: the ranks on other nodes of whose parts this one keeps copies

    @classmethod
    def on_its_node(cls, nodes: Sequence[int], divided: Collection[str], rank: int) -> Self:
        """Each part is on the node of its rank alone, which is enough as long as no node is lost.

        Args:
            nodes: on which node each rank is.
            divided: the names of the state of which each rank holds a part.
            rank: whose plan this is.
        """
        is_first = nodes.index(nodes[rank]) == rank
        return cls(len(nodes), None if is_first else frozenset(divided), None)

    @classmethod
    def on_two_nodes(
        cls, nodes: Sequence[int], numbers: Sequence[int], divided: Collection[str], own: Collection[str], rank: int
    ) -> Self:
        """Each part is on two nodes at least. There must be two.

        Args:
            nodes: on which node each rank is.
            numbers: ranks with the same number hold the same of what is ``divided``.
            divided: the names of the state of which each rank holds a part.
            own: those of them that lie on one rank alone, whatever its number.
            rank: whose plan this is.
        """
        holders = {number: {nodes[r] for r, one in enumerate(numbers) if one == number} for number in numbers}
        is_elsewhere = all(len(held) > 1 for held in holders.values())
        kinds = sorted(holders) if is_elsewhere else [0]
        kind = numbers[rank] if is_elsewhere else 0
        alike = [r for r, node in enumerate(nodes) if node == nodes[rank] and (not is_elsewhere or numbers[r] == kind)]
        to, sources = neighbours_of(nodes, rank)
        return cls(
            parts=len(nodes) + len(kinds),
            own=frozenset(own if is_elsewhere else divided),
            rest=len(nodes) + kinds.index(kind) if alike[0] == rank else None,
            to=to,
            sources=sources,
        )


def neighbours_of(nodes: Sequence[int], rank: int) -> tuple[int, tuple[int, ...]]:
    """The rank on another node that keeps copies of what ``rank`` has, and those of which ``rank`` keeps copies.

    ``nodes`` says on which node each rank is; there must be two.
    """
    targets = [_neighbour_of(nodes, r) for r in range(len(nodes))]
    return targets[rank], tuple(r for r, target in enumerate(targets) if target == rank)


def _neighbour_of(nodes: Sequence[int], rank: int) -> int:
    """A rank of the next node; those of one node are spread over all of the next one."""
    every = sorted(set(nodes))
    following = every[(every.index(nodes[rank]) + 1) % len(every)]
    here, there = ([r for r, node in enumerate(nodes) if node == one] for one in (nodes[rank], following))
    return there[here.index(rank) % len(there)]


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
        self._writers: dict[str, PartWriter] = {}  # made when they are first needed
        self.why_not = ""  #: why the state is not mirrored any more, as it was said

    @property
    def is_used(self) -> bool:
        """Whether states are mirrored, and mirroring has not ended."""
        return bool(self._writers)

    def try_again(self) -> None:
        """Where the state is not mirrored any more, the next `begin` opens the files again."""
        self._begins = bool(self.why_not) or self._begins

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
            if self.why_not:
                self._say("the state is mirrored again")
                self.why_not = ""
        except OSError as error:
            self.finish()  # begun copies are being sent, from memory that is closed next
            self._end_writers()
            if self.why_not != str(error):
                self._say(f"the state is not mirrored any more: {error}. It is tried again at each save")
            self.why_not = str(error)

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
