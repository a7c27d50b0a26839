"""What single ranks have to say to the user, who sees the leader's lines alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lockstep.collectives import Group
from lockstep.formatting import format_ranks


class RankWarnings:
    """What the leader finds it says at once; what others find, where all ranks meet next.

    Args:
        group: all ranks.
        say: prints one line, on the leader.
        protect: keeps the newest checkpoint beside those that are kept anyway.
    """

    def __init__(self, group: Group, say: Callable[[str], None], protect: Callable[[], None]) -> None:
        self._group: Final = group
        self._say: Final = say
        self._protect_newest: Final = protect
        self._waiting: list[tuple[str, bool]] = []  # of this rank, for the leader to say
        self._found: set[str] = set()  # here, each said once
        self._protects = False

    def add(self, text: str) -> None:
        """This rank has found ``text``, which other ranks may find, too; said once of each."""
        self._add(text, spoils=False)

    def add_spoilt(self, text: str) -> None:
        """This rank has found ``text``, which is said once: checkpoints from now on are no better than those before."""
        self._protect()
        self._add(text, spoils=True)

    def say_all(self) -> None:
        """The leader says what the other ranks have found, each text once. Collective."""
        waiting, self._waiting = self._waiting, []
        by_text: dict[tuple[str, bool], list[int]] = {}
        for rank, found in enumerate(self._group.gather_objects(waiting, "warnings")):
            for each in found:
                by_text.setdefault(each, []).append(rank)
        for (text, spoils), ranks in by_text.items():
            if not spoils:
                self._say(f"{format_ranks(ranks)}: {text}")
                continue
            self._protect()  # on the leader, too, which removes older ones; no save came in between
            if text not in self._found:
                self._found.add(text)
                self._say(text)

    def _add(self, text: str, *, spoils: bool) -> None:
        if text in self._found:
            return
        self._found.add(text)
        if self._group.leads:
            self._say(text)
        else:
            self._waiting.append((text, spoils))

    def _protect(self) -> None:
        if not self._protects:
            self._protects = True
            self._protect_newest()
