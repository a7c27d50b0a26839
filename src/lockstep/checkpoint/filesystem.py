"""The operations that a checkpoint needs from a file system.

A file system is passed as an argument, so that a test can use a simulated disk and cut its power before any operation.
Every operation that changes the disk is one system call.
"""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

from lockstep.records import open_regular
from lockstep.small_files import flush_names


class FileSystem:
    """The operating system's files; its operations raise `OSError` as those of the system do."""

    def make_directory(self, path: Path) -> None:
        """Make a directory, whose parent must exist; the directory itself must not."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """Open a new file for writing; the file must not exist."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)

    def write(self, file: int, data: memoryview) -> int:
        """Append some bytes of ``data``; returns the number of appended bytes."""
        return os.write(file, data)

    def sync(self, file: int) -> None:
        """Wait until the content of ``file`` survives a power cut. The file's name may still be lost."""
        os.fsync(file)

    def close(self, file: int) -> None:
        """Close a file that `create` opened."""
        os.close(file)

    def rename(self, old: Path, new: Path) -> None:
        """Give ``old`` another name, in one indivisible act."""
        old.rename(new)

    def unlink(self, path: Path) -> None:
        """Remove one file."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Remove one empty directory."""
        path.rmdir()

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in ``path`` survive a power cut."""
        flush_names(path)

    def names(self, path: Path) -> list[str]:
        """The names in a directory, in any order."""
        return os.listdir(path)

    def is_directory(self, path: Path) -> bool:
        """Whether ``path`` is a directory."""
        return path.is_dir()

    def is_link(self, path: Path) -> bool:
        """Whether ``path`` is a symbolic link, to any target."""
        return path.is_symlink()

    def size(self, path: Path) -> int:
        """The bytes of a file; -1 for a link, pipe or anything but a regular file, which must not be opened."""
        about = path.lstat()
        return about.st_size if stat.S_ISREG(about.st_mode) else -1

    def reader(self, path: Path) -> io.BufferedIOBase:
        """A regular file, not a link, opened for reading; the caller closes it."""
        return open_regular(path, follow=False)

    def reader_of_disk(self, path: Path) -> io.BufferedIOBase:
        """A flushed file opened for reading from the disk, without the system's cache where the system allows."""
        file = self.reader(path)
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file

    def free_bytes(self, path: Path) -> int:
        """The number of bytes that may still be written beneath ``path``."""
        room = os.statvfs(path)
        return room.f_bavail * room.f_frsize


#: The machine's own files.
LOCAL = FileSystem()
