"""Copies of a rank's measured values on another host, so that these values are not lost with the rank's own host.

    rank 0, on host 0    measures-0000 ──────► every write of the journal ──────►  copied-measures-0000    on host 1
    rank 2, on host 1    measures-0002 ◄────── and the other way round ◄─────────

With replicas, a lost host holds nothing else alone: each other rank holds the whole state of the last step.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lockstep.collectives import Group, WriteChannel, meet_neighbours
from lockstep.run.recovery.measures_journal import journal_memory
from lockstep.run.recovery.mirror import neighbours_of

#: The beginning of a copy's name; the number of the copied rank follows.
COPIED: Final = "copied-measures-"


class CopiedMeasures:
    """Sends one rank's journal to another host, and keeps the copies of others; see `open_copied_measures`.

    Args:
        directory: for the copies.
        channel: to other hosts; closed with this.
    """

    def __init__(self, directory: Path, channel: WriteChannel) -> None:
        self._directory: Final = directory
        self._channel: Final = channel
        self._copies: Final[dict[int, mmap.mmap | None]] = {}  # None: no room for a copy

    def write(self, at: int, content: bytes) -> None:
        """Repeat a write to this rank's journal, of ``content`` at the offset ``at``, on the other host."""
        self._channel.write(at, content)

    def exchange(self) -> None:
        """Send new writes, and take in received ones. Takes some microseconds, and waits for no other rank."""
        self._channel.send()
        self.take_in()

    def take_in(self) -> None:
        """Take in the writes received from other ranks so far."""
        for source, at, content in self._channel.received():
            if source not in self._copies:
                self._copies[source] = self._begin(source)
            if (copy := self._copies[source]) is not None:
                copy[at : at + len(content)] = content

    def _begin(self, source: int) -> mmap.mmap | None:
        try:
            return journal_memory(self._directory / f"{COPIED}{source:04d}")
        except OSError:
            return None

    def close(self) -> None:
        """Take in received writes, and close the connections; the copies stay."""
        self.take_in()
        self._channel.close()
        for copy in self._copies.values():
            if copy is not None:
                copy.close()
        self._copies.clear()


def open_copied_measures(directory: Path, group: Group, say: Callable[[str], None]) -> CopiedMeasures | None:
    """Connect the ranks of each host with the ranks of the next host. Collective.

    Args:
        directory: for the copies that this rank keeps.
        group: all ranks.
        say: tells the user a line.

    Returns:
        None if all ranks are on one host, or the hosts do not reach each other.
    """
    if len(set(group.nodes)) == 1:
        return None
    to, sources = neighbours_of(group.nodes, group.rank)
    met = meet_neighbours(group, [to], sources)
    if isinstance(met, str):
        say(f"what is measured is not copied to other hosts, so that the loss of a host loses steps: {met}")
        return None
    return CopiedMeasures(directory, WriteChannel(met))
