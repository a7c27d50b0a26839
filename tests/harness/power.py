"""A disk that keeps what was flushed and may lose the rest, and whose power can be cut before any call.

    content of a file     survives up to what was there at the last `sync`; of the rest, what `Survival` says
    names in a directory  survive as they were at the last `sync_directory`; of the changes since, those `Survival` says

This is what POSIX promises and no more: names may survive without the content, and a later change without an earlier
one. A rename inside a directory is one change.
"""

from __future__ import annotations

import errno
import io
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


class PowerCut(OSError):
    def __init__(self) -> None:
        super().__init__(errno.EIO, "the power is off")


@dataclass(eq=False)
class File:
    content: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""


@dataclass(eq=False)
class Directory:
    names: dict[str, Node] = field(default_factory=dict)
    flushed: dict[str, Node] = field(default_factory=dict)
    changes: list[dict[str, Node | None]] = field(default_factory=list)

    def change(self, change: dict[str, Node | None]) -> None:
        self.changes.append(change)
        apply(change, self.names)


Node = File | Directory


def apply(change: dict[str, Node | None], names: dict[str, Node]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


@dataclass(frozen=True)
class Survival:
    """What of the unflushed survives: each change of names, and which part of each file's content."""

    title: str
    names: Callable[[], bool]
    content: Callable[[], float]

    @classmethod
    def any_of(cls, seed: int) -> Survival:
        dice = random.Random(seed)
        return cls(f"dice {seed}", lambda: dice.random() < 0.5, lambda: dice.choice((0.0, dice.random(), 1.0)))


NOTHING = Survival("nothing unflushed", lambda: False, lambda: 0.0)
EVERYTHING = Survival("everything", lambda: True, lambda: 1.0)
NAMES = Survival("names without content", lambda: True, lambda: 0.0)
CONTENT = Survival("content without names", lambda: False, lambda: 1.0)


class PowerDisk:
    """A `FileSystem` in memory.

    Args:
        cut_before: The power is cut before this call, counted from 0, and stays off.
        fail_at: This call fails once with ``error``; the disk goes on.
        ignores: Verbs that do nothing although they say so, as a defect to be noticed.
    """

    def __init__(self, *, cut_before=None, fail_at=None, error=errno.EIO, ignores=(), room=1 << 40) -> None:
        self.root = Directory()
        self.calls: list[str] = []
        self.cut = False
        self.failed = False
        self._cut_before, self._fail_at, self._error = cut_before, fail_at, error
        self._ignores, self._room = frozenset(ignores), room
        self._open: dict[int, File] = {}

    def after(self, survival: Survival, **options) -> PowerDisk:
        """The disk as the next start finds it."""
        disk = PowerDisk(**options)
        known: dict[int, Node] = {}

        def surviving(node: Node) -> Node:
            if id(node) in known:
                return known[id(node)]
            if isinstance(node, File):
                kept = len(node.flushed) + round(survival.content() * (len(node.content) - len(node.flushed)))
                # The length may survive while the bytes do not: they read as zeros.
                content = bytes(node.content[:kept])
                content += bytes(len(node.content) - kept) if survival.names() else b""
                copy: Node = File(bytearray(content), content)
                known[id(node)] = copy
                return copy
            names = dict(node.flushed)
            for change in node.changes:
                if survival.names():
                    apply(change, names)
            copy = known[id(node)] = Directory()
            copy.names = {name: surviving(child) for name, child in names.items()}
            copy.flushed = dict(copy.names)
            return copy

        root = surviving(self.root)
        assert isinstance(root, Directory)
        disk.root = root
        return disk

    # What the tests look at.

    def node(self, path: Path) -> Node:
        node: Node = self.root
        for name in path.parts[1:]:
            if not isinstance(node, Directory):
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
            if name not in node.names:
                raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
            node = node.names[name]
        return node

    def _directory(self, path: Path) -> Directory:
        node = self.node(path)
        if not isinstance(node, Directory):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
        return node

    def _act(self, verb: str) -> bool:
        """Count a call; False if the defect under test swallows it."""
        if self.cut or len(self.calls) == self._cut_before:
            self.cut = True
            raise PowerCut
        self.calls.append(verb)
        if len(self.calls) - 1 == self._fail_at:
            self.failed = True
            raise OSError(self._error, "planted failure")
        return verb not in self._ignores

    # Changes: each may be the one before which the power is cut.

    def make_directory(self, path):
        self._act("make_directory")
        parent = self._directory(path.parent)
        if path.name in parent.names:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        parent.change({path.name: Directory()})

    def create(self, path):
        self._act("create")
        parent = self._directory(path.parent)
        if path.name in parent.names:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        file = File()
        parent.change({path.name: file})
        number = 3 + len(self._open)
        while number in self._open:
            number += 1
        self._open[number] = file
        return number

    def write(self, file, data):
        self._act("write")
        taken = min(len(data), 100)  # short writes are allowed, and let the power be cut in the middle of a file
        self._open[file].content += data[:taken]
        return taken

    def sync(self, file):
        if self._act("sync"):
            self._open[file].flushed = bytes(self._open[file].content)

    def close(self, file):
        self._act("close")
        del self._open[file]

    def rename(self, old, new):
        self._act("rename")
        parent = self._directory(old.parent)
        assert old.parent == new.parent, "only renames inside one directory are modelled"
        if new.name in parent.names:
            raise OSError(errno.ENOTEMPTY, "not empty", str(new))
        parent.change({old.name: None, new.name: self.node(old)})

    def unlink(self, path):
        self._act("unlink")
        assert isinstance(self.node(path), File)
        self._directory(path.parent).change({path.name: None})

    def remove_directory(self, path):
        self._act("remove_directory")
        if self._directory(path).names:
            raise OSError(errno.ENOTEMPTY, "not empty", str(path))
        self._directory(path.parent).change({path.name: None})

    def sync_directory(self, path):
        if self._act("sync_directory"):
            directory = self._directory(path)
            directory.flushed = dict(directory.names)
            directory.changes.clear()

    # Looks: they change nothing, so the power need not be cut before them.

    def names(self, path):
        return list(self._directory(path).names)

    def is_link(self, path):
        return False

    def is_directory(self, path):
        try:
            return isinstance(self.node(path), Directory)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def size(self, path):
        return len(self._file(path).content)

    def reader(self, path):
        return io.BytesIO(bytes(self._file(path).content))

    def free_bytes(self, path):
        return self._room

    def _file(self, path: Path) -> File:
        node = self.node(path)
        if not isinstance(node, File):
            raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
        return node
