"""What a rank has measured is written down on another host, too: then it is not lost with its own host.

    rank 0, on host 0    measures-0000 ──────► every write of the journal ──────►  copied-measures-0000    on host 1
    rank 2, on host 1    measures-0002 ◄────── and the other way round ◄─────────

For replicas this is all that a lost host has alone: each of the others holds the whole state of the last step.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lockstep.collectives import Group, WriteChannel, meet_neighbours
from lockstep.run.recovery.measures_journal import journal_memory
from lockstep.run.recovery.mirror import neighbours_of

#: What the name of a copy begins with; the rank follows that it is of.
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
        self._copies: Final[dict[int, mmap.mmap | None]] = {}  # None: there is no room

    def write(self, at: int, content: bytes) -> None:
        """The journal of this rank has ``content`` there, and is to have it on the other host."""
        self._channel.write(at, content)

    def exchange(self) -> None:
        """Send what was written, and take in what has come. Some microseconds; it waits for nobody."""
        self._channel.send()
        self.take_in()

    def take_in(self) -> None:
        """Take in what has come from others so far."""
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
        """Take in what has come, and close the connections; the copies stay."""
        self.take_in()
        self._channel.close()
        for copy in self._copies.values():
            if copy is not None:
                copy.close()
        self._copies.clear()


def open_copied_measures(directory: Path, group: Group, say: Callable[[str], None]) -> CopiedMeasures | None:
    """Connect the ranks of each host with those of the next. Collective.

    Args:
        directory: for the copies that this rank keeps.
        group: all ranks.
        say: tells the user something.

    Returns:
        None where all ranks are on one host, or the hosts do not reach each other.
    """
    if len(set(group.nodes)) == 1:
        return None
    to, sources = neighbours_of(group.nodes, group.rank)
    met = meet_neighbours(group, [to], sources)
    if isinstance(met, str):
        say(f"what is measured is not copied to other hosts, so that the loss of a host loses steps: {met}")
        return None
    return CopiedMeasures(directory, WriteChannel(met))
