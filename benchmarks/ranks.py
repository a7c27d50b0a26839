"""Starting the ranks of a benchmark, bringing home what they saw, and reading their memory."""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lockstep


def start(script: str, ranks: int, told: dict[str, Any], python: str = sys.executable) -> Any:
    """Run ``script`` on so many ranks under ``lockstep run``, where `told` gives ``told``; what its leader wrote.

    If a rank fails, this process ends with the launcher's words.
    """
    with tempfile.TemporaryDirectory() as place:
        launcher = ["-m", "lockstep", "run", "--nproc-per-node", str(ranks), "--run-dir", str(Path(place, "run"))]
        return _seen([python, *launcher, script], told, Path(place, "seen.json"))


def start_alone(script: str, told: dict[str, Any]) -> Any:
    """The same of one process, started as ``python script`` is."""
    with tempfile.TemporaryDirectory() as place:
        return _seen([sys.executable, script], told, Path(place, "seen.json"))


def _seen(command: list[str], told: dict[str, Any], out: Path) -> Any:
    done = subprocess.run(
        [*command, "--rank", json.dumps(told | {"out": str(out)})],
        env=os.environ | {"PYTHONPATH": str(Path(lockstep.__file__).parents[1]), "LOCKSTEP_VIEW": "silent"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(out.read_text())


def told() -> dict[str, Any] | None:
    """In a rank: what `start` was given, and ``out``, where the leader writes what it saw as JSON. Elsewhere: None."""
    return json.loads(sys.argv[2]) if sys.argv[1:2] == ["--rank"] else None


def memory_bytes(name: str) -> int:
    """Memory of this process as the kernel counts it: ``VmRSS`` now, ``VmHWM`` at most so far."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def return_freed_memory() -> None:
    """From now on the C library keeps little of what this process frees, so that its memory is what it uses.

    By default it raises the size from which blocks are returned as soon as one is freed; then blocks of the size of
    layers, as `fsdp` takes and drops them, leave gaps behind, up to some times the model.
    """
    least, bytes_of_a_block = -3, 64 * 1024  # M_MMAP_THRESHOLD
    ctypes.CDLL(None).mallopt(least, bytes_of_a_block)
