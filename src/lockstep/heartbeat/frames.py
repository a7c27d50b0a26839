"""The place of a thread in the user's code: a line of the user's, and the function that this line has called.

    innermost   all_reduce         torch/distributed/...   ─┐  the call: all_reduce, in which ranks meet
                wrapper            torch/distributed/...   ─┘
                train_step         train.py:28             ◄── the place
                main               train.py:88
    outermost   _run_file          lockstep/launch/...

The frames of a running thread are read, not changed. The stacks of a process that is stuck in compiled code and holds
Python's lock are written by a signal's handler, from C, without the lock. Processes that a rank forks, such as a
loader's, inherit the handler and write to the same file: so only one process is asked at a time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from lockstep.heartbeat_message import SourceLine
from lockstep.launch_contract import STACKS_SIGNAL

NOWHERE: Final = SourceLine("", 0, "")
_OURS = str(Path(__file__).parents[1])
_STDLIB = sysconfig.get_path("stdlib")
_INSTALLED = tuple({_OURS, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))})
#: Python's own debugger and interactive console.
_PROMPTS = tuple(f"{_STDLIB}/{name}.py" for name in ("pdb", "code"))
#: Python itself calls what dataclasses and the like have made of text <string>.
_OF_OTHERS = ("<frozen", "<string>", *_INSTALLED)
_PACKAGES = ("site-packages", "dist-packages")
_RUN = str(Path(_OURS, "run"))
# torch's own dispatch lies around every collective of the functional kind.
_AROUND = ("/torch/_ops.py", "/torch/distributed/c10d_logger.py")
_HEADER = "# main thread "
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def is_users(file: str) -> bool:
    """Whether ``file`` is the user's: not part of Python, of an installed package, or of Lockstep.

    Packages are installed in every ``site-packages`` and ``dist-packages``, of any Python, and in each entry of
    `sys.path` with a ``*.dist-info``, as left by ``pip install --target``, but not in the program's own directory.
    """
    if file.startswith(_OF_OTHERS) or _in_packages(file):
        return False
    return not any(file.startswith(f"{entry}/") and _holds_packages(entry) for entry in sys.path if entry)


def own_lines(files: Sequence[str]) -> list[int]:
    """The indices of the user's files among the ``files`` of a stack's lines, outermost first.

    If no file is the user's, since the program itself is installed, the files in the program's own directory: the
    directory of the first line that is neither Python's nor Lockstep's.
    """
    own = [index for index, file in enumerate(files) if is_users(file)]
    if own:
        return own
    program = next((file for file in files if _in_packages(file) or not file.startswith(("<", *_INSTALLED))), "")
    directory = Path(program).parent
    if directory.name in _PACKAGES or _holds_packages(str(directory)):
        return [index for index, file in enumerate(files) if program and file == program]
    return [index for index, file in enumerate(files) if program and file.startswith(f"{directory}/")]


def user_frame(error: BaseException) -> tuple[str, int]:
    """File and line of the user's code that led to ``error``: the innermost frame outside installed packages.

    Where the user's program is itself installed, the innermost frame of its own.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 0
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = own_lines([file for file, _ in frames])
    return (own and frames[own[-1]]) or (frames or [("", 0)])[-1]


def _holds_packages(directory: str) -> bool:
    if not _has_dist_info(directory):
        return False
    # Files beside the program are the user's, even if packages are installed there, too.
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    # The working directory, to which paths may be relative, may have been removed.
    with contextlib.suppress(FileNotFoundError):
        return main is None or Path(main).absolute().parent != Path(directory).absolute()
    return True


@functools.cache
def _has_dist_info(directory: str) -> bool:
    return any(Path(directory).glob("*.dist-info"))


def _in_packages(file: str) -> bool:
    return any(f"/{name}/" in file for name in _PACKAGES) and not file.startswith(_OURS)


def find_user_frame(innermost: FrameType) -> tuple[SourceLine, str, bool]:
    """The user's line in a stack, the function that it has called, and whether ranks meet in that call.

    If no line is the user's, as in an installed program, the innermost line of the program itself.
    """
    above: list[tuple[str, str, str]] = []  # file, function and module of the frames above the user's line
    frames: list[FrameType] = []  # innermost first
    frame: FrameType | None = innermost
    while frame is not None and not is_users(frame.f_code.co_filename):
        frames.append(frame)
        above.append((frame.f_code.co_filename, frame.f_code.co_name, frame.f_globals.get("__name__") or ""))
        frame = frame.f_back
    if frame is not None:
        return SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name), *_call(above)
    outermost_first = frames[::-1]
    own = own_lines([each.f_code.co_filename for each in outermost_first])
    if not own:
        return NOWHERE, "", False
    place = outermost_first[own[-1]]
    return SourceLine(place.f_code.co_filename, place.f_lineno, place.f_code.co_name), "", False


def _call(above: list[tuple[str, str, str]]) -> tuple[str, bool]:
    if not above:
        return "", False
    inside = [(file, name) for file, name, _ in above if not file.endswith(_AROUND)]
    file, name, module = above[-1]
    if inside and "/torch/distributed/" in inside[0][0]:
        meeting = next(name for file, name in reversed(inside) if "/torch/distributed/" in file)
        return (f"run.{name}" if file.startswith(_RUN) and not name.startswith("_") else meeting), True
    if any("/torch/utils/data/" in file for file, _ in inside):
        return "next(loader)", False
    if file.startswith("<frozen importlib"):
        return "import", False
    if file.startswith(_RUN):
        return f"run.{name}", False
    if any("/torch/autograd/" in file for file, _ in inside):
        return "backward", False
    return f"{module}.{name}", False


def in_debugger(innermost: FrameType | None) -> bool:
    """Whether a stack is that of a debugger which has stopped the program, or of another prompt."""
    frames = traceback.walk_stack(innermost) if innermost is not None else ()
    files = (frame.f_code.co_filename for frame, _ in frames)
    return any(file.endswith(_PROMPTS) or "/prompt_toolkit/" in file for file in files)


def collectives_begun() -> int:
    """The number of collectives that this process has begun over groups of all ranks; 0 without a group.

    Torch is not imported, so a script without torch does not load it.

    Raises:
        RuntimeError: if a backend keeps no such number, as may be so for a backend that a package has registered.
    """
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    default = getattr(world, "default_pg", None)
    if world is None or default is None:
        return 0
    size = default.size()
    from lockstep.torch_private import collectives_begun_by

    return sum(collectives_begun_by(group) for group in list(world.pg_map) if group.size() == size)


@dataclass(frozen=True, slots=True)
class Stack:
    """The frames of a thread, innermost first."""

    frames: tuple[SourceLine, ...]

    def own(self) -> tuple[SourceLine, ...]:
        """The frames in the user's code; all frames if none is."""
        outermost_first = self.frames[::-1]
        own = own_lines([frame.file for frame in outermost_first])
        return tuple(outermost_first[index] for index in reversed(own)) or self.frames


@dataclass(frozen=True, slots=True)
class Stacks:
    """The stacks of a process."""

    main: Stack
    text: str  #: of all threads, as written


NOTHING: Final = Stacks(Stack(()), "")


def register_stacks(path: Path) -> None:
    """Have `STACKS_SIGNAL` append the stacks of all threads of this process to ``path``, from now on.

    To be called in the main thread. The file stays open as long as the process exists.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(descriptor, f"{_HEADER}{threading.main_thread().ident or 0:#x} of process {os.getpid()}\n".encode())
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)


def is_registered(status: str) -> bool:
    """Whether a process would answer `STACKS_SIGNAL` instead of dying, by its ``/proc/PID/status``."""
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (STACKS_SIGNAL - 1) & 1)


def read_stacks(before: str, written: str) -> Stacks:
    """The stacks that a process has written.

    Args:
        before: the earlier content of the file, whose headers say which thread is the main thread.
        written: the text appended since.
    """
    parts = _THREAD.split(written)
    threads = dict(zip((int(thread, 16) for thread in parts[1::2]), parts[2::2], strict=True))
    headers = [line for line in before.splitlines() if line.startswith(_HEADER)]
    main = int(headers[-1].removeprefix(_HEADER).split()[0], 16) if headers else 0
    # Without a header the last thread in the list, which is the oldest.
    text = threads.get(main) or (list(threads.values())[-1] if threads else "")
    return Stacks(Stack(tuple(_frames(text))), written)


def _frames(text: str) -> Sequence[SourceLine]:
    return [SourceLine(file, int(line), function) for file, line, function in _FRAME.findall(text)]
