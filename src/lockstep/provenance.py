"""What a run is made of, for its record: source by git, hardware, versions, settings with where each comes from."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import select
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from lockstep import __version__
from lockstep.formatting import size, without_secrets
from lockstep.gpu_driver import ask_driver
from lockstep.memory_use import text_of
from lockstep.records import read_bytes
from lockstep.settings import ResolvedSettings
from lockstep.small_files import replacement

#: The changes that no commit holds, in the run directory; of later starts with others ``source-2.patch`` and so on.
PATCH: Final = "source.patch"
#: How long git may take in all.
_GIT_S: Final = 5.0
_LAST_S: Final = 0.2  # from the end of its output, or from its killing, to its end
_MOST_BYTES: Final = 1 << 20  # of a patch, and of git's list of files
_MOST_UNTRACKED: Final = 50
_READ_BYTES: Final = 1 << 16


def surroundings(source: Path, run_dir: Path) -> dict[str, object]:
    """Where a start happens and with what: host, working directory, versions, git's state, this node's hardware.

    Takes some tens of milliseconds, and `_GIT_S` where git does not answer.

    Args:
        source: a directory in the repository that the script belongs to.
        run_dir: gets the patch.
    """
    host = socket.gethostname()
    return {
        "host": host,
        "cwd": str(Path.cwd()),
        "versions": versions(),
        "source": source_state(source, run_dir),
        "nodes": {host: hardware()},
    }


def source_state(source: Path, run_dir: Path) -> dict[str, object] | None:
    """Commit, branch and changes of the repository around the directory ``source``, as git tells them.

    The changes to files that git tracks become a patch in ``run_dir``, which only its user can read. Of other files,
    ``untracked``, the names are kept.

    Returns:
        Plain values; None without git or a repository, or where git does not answer in `_GIT_S`.
    """
    until_s = time.monotonic() + _GIT_S
    status = _git(source, until_s, "status", "--porcelain=v2", "--branch")
    if status is None:
        return None
    lines = status.decode(errors="replace").splitlines()
    told = dict(line.split(" ", 2)[1:] for line in lines if line.startswith("# "))
    commit, branch = told.get("branch.oid", ""), told.get("branch.head", "")
    dirty = any(line[:1] in "12u" for line in lines if line)
    return {
        "commit": None if commit.startswith("(") else commit,
        "branch": None if branch.startswith("(") else branch,
        "dirty": dirty,
        "untracked": [line[2:] for line in lines if line.startswith("? ")][:_MOST_UNTRACKED],
        "patch": _patch(source, until_s, run_dir) if dirty and not commit.startswith("(") else None,
    }


def hardware() -> dict[str, object]:
    """The CPUs, memory and GPUs of this machine, and the GPUs' driver. Milliseconds; with GPUs about 0.1 s."""

    def gpu(nvml: Any, number: int) -> dict[str, object]:
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        memory = None
        with contextlib.suppress(nvml.NVMLError):  # a GPU that has none of its own
            memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
        return {"name": nvml.nvmlDeviceGetName(handle), "memory_bytes": memory}

    def gpus(nvml: Any) -> dict[str, object]:
        found = [gpu(nvml, number) for number in range(nvml.nvmlDeviceGetCount())]
        return {"gpus": found, "driver": nvml.nvmlSystemGetDriverVersion()}

    nothing: dict[str, Any] = {"gpus": [], "driver": None}
    return {
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        **ask_driver(gpus, nothing),
    }


def cpu_model() -> str:
    """The name of this machine's kind of CPU; "" where the system does not say."""
    lines = text_of(Path("/proc/cpuinfo")).splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor()


def versions() -> dict[str, str | None]:
    """The versions of what the bits of a run depend on."""
    return {
        "lockstep": __version__,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        # Not platform.platform(), which starts a process.
        "platform": "-".join([platform.system(), platform.release(), platform.machine(), *platform.libc_ver()]),
    }


def settings_record(resolved: ResolvedSettings) -> dict[str, dict[str, object]]:
    """Each setting's value and source; `without_secrets`."""
    return {
        name: {"value": _plain(name, value), "source": resolved.sources[name]}
        for name, value in resolved.as_dict().items()
    }


def _plain(name: str, value: object) -> object:
    return without_secrets([f"{name}={value}"])[0].partition("=")[2] if isinstance(value, str) else value


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _patch(source: Path, until_s: float, run_dir: Path) -> str:
    """The name of the file that has the changes since the commit; or in words why none has."""
    words = ("diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", "--no-color")
    patch = _git(source, until_s, *words)
    if patch is None:
        return "not kept: git did not tell it"
    if len(patch) > _MOST_BYTES:
        return f"not kept: larger than {size(_MOST_BYTES)}"
    try:
        path, number = run_dir / PATCH, 1
        while path.exists() and not _holds(path, patch):
            number += 1
            path = run_dir / f"source-{number}.patch"
        with replacement(path) as beside:
            beside.touch(0o600)
            beside.write_bytes(patch)
    except OSError as error:
        return f"not kept: {error.strerror}"
    return path.name


def _holds(path: Path, content: bytes) -> bool:
    try:
        return read_bytes(path, _MOST_BYTES) == content
    except ValueError:  # it is longer
        return False


def _git(directory: Path, until_s: float, *words: str) -> bytes | None:
    """What git prints, up to a little more than `_MOST_BYTES`; None where it fails, or is not done at ``until_s``."""
    command = ["git", "-C", str(directory), *words]
    # It may not ask for a password, nor lock the index that its user works with.
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    nowhere = subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            command, env=env, stdin=nowhere, stdout=subprocess.PIPE, stderr=nowhere, start_new_session=True
        )
    except OSError:
        return None
    assert process.stdout is not None
    told, ready, ended = b"", select.poll(), False
    with process.stdout as pipe:
        ready.register(pipe)
        while not ended and len(told) <= _MOST_BYTES and ready.poll(1000 * max(0.0, until_s - time.monotonic())):
            part = os.read(pipe.fileno(), _READ_BYTES)
            told, ended = told + part, not part
    if not ended:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with what it has started, such as a filter
    try:
        code = process.wait(max(_LAST_S, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:  # it waits for a file system that does not answer
        return None
    return told if (ended and code == 0) or len(told) > _MOST_BYTES else None
