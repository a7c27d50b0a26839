"""Small files that are there whole or not at all, also for a reader, and after a kill, in between.

path      old ─────────────────────┬──► new       what is beside it takes its place in one act
beside it     written, [flushed] ──┘
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacement(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A path to write to, beside ``path`` and with its ending; after the block, what is there is at ``path``.

    If the block raises, ``path`` is as it was, and nothing is left beside it.

    Args:
        path: of the file that may be there, or not yet; its directory is.
        durable: also after a power cut; costs two flushes of a disk.

    Raises:
        OSError: if it cannot be written, such as on a full disk.
    """
    with _written(path, durable=durable) as beside:
        yield beside
        if durable:
            _flush(beside)
        beside.replace(path)


def replace_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write ``text`` to ``path``, in place of what is there; see `replacement`."""
    with replacement(path, durable=durable) as beside:
        beside.write_text(text, encoding="utf-8")


def create_text(path: Path, text: str, *, durable: bool = False) -> bool:
    """Write ``text`` to ``path``, unless the file exists: of several who do so, on any host, one does.

    Returns:
        Whether this one did.

    Raises:
        OSError: if it cannot be written.
    """
    with _written(path, durable=durable) as beside:
        beside.write_text(text, encoding="utf-8")
        if durable:
            _flush(beside)
        try:
            # A link is made by one only, also on NFS, and shows the whole content at once.
            os.link(beside, path)
        except FileExistsError:
            return False
    return True


def size_of(path: Path) -> int:
    """How many bytes the file holds now; 0 if it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def unused_path(path: Path) -> Path:
    """``path``, or the first of ``path-2``, ``path-3``... that does not exist."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def flush_names(directory: Path) -> None:
    """Flush the names in a directory to the disk."""
    try:
        _flush(directory)
    except OSError as error:
        # Some network file systems have no such call: they keep names durable by themselves, or not at all.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _written(path: Path, *, durable: bool) -> Iterator[Path]:
    beside = path.with_name(f".{secrets.token_hex(6)}.{path.name}")  # processes of other hosts may have this one's id
    try:
        yield beside
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
    if durable:
        flush_names(path.parent)
