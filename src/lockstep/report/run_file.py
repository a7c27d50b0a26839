"""``run.json``: what was run, by each start; the launcher writes it, and the leader adds what it alone knows."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.launch_contract import RUN_FILE
from lockstep.records import of_kind, read_object
from lockstep.small_files import replace_text

_LOCK = f".{RUN_FILE}.lock"


def about_run(run_dir: Path) -> dict[str, Any] | None:
    """What is in `RUN_FILE`, with its lists of ``starts`` and ``generations``; None if it cannot be read."""
    try:
        about = read_object(run_dir / RUN_FILE)
        for name in ("starts", "generations"):
            of_kind(list[dict[str, Any]], about.get(name), name)
    except (OSError, ValueError):
        return None
    return about


def change_about_run(run_dir: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Have ``change`` change what `about_run` reads, or what a new run has; of several who do so none undoes another.

    Waits for the others, each of whom takes as long as a write to the disk.

    Raises:
        OSError: if it cannot be written.
    """
    with (run_dir / _LOCK).open("a") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        about = about_run(run_dir) or {"format": 1, "starts": [], "generations": []}
        change(about)
        replace_text(run_dir / RUN_FILE, json.dumps(about, indent=2) + "\n", durable=True)
