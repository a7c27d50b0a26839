"""Where a thread is, as its user knows it: a line of their code, and the function that this line has called.

    innermost   all_reduce         torch/distributed/...   ─┐  the call: all_reduce, in which ranks meet
                wrapper            torch/distributed/...   ─┘
                train_step         train.py:28             ◄── the place
                main               train.py:88
    outermost   _run_file          lockstep/launch/...

It reads the frames of a running thread and changes nothing.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Final

from lockstep.heartbeat_message import SourceLine

NOWHERE: Final = SourceLine("", 0, "")
_OURS = str(Path(__file__).parents[1])
_STDLIB = sysconfig.get_path("stdlib")
_INSTALLED = tuple(
    {
        _OURS,
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)
_RUN = str(Path(_OURS, "run"))
# torch's own dispatch lies around every collective of the functional kind.
_AROUND = ("/torch/_ops.py", "/torch/distributed/c10d_logger.py")


def is_users(file: str) -> bool:
    """Whether ``file`` is the user's: not part of Python, of an installed package, or of Lockstep."""
    # Python itself calls what dataclasses and the like have made of text <string>. Packages may be installed for
    # another Python, too, whose directories a .pth file or a virtual environment adds.
    installed = file.startswith(("<frozen", "<string>", *_INSTALLED))
    return not (installed or "/site-packages/" in file or "/dist-packages/" in file)


def find_user_frame(innermost: FrameType) -> tuple[SourceLine, str, bool]:
    """The user's line in a stack, what it has called, and whether ranks wait for each other in that call.

    If no line is the user's, as in a program that is installed, it is the innermost line of an installed package that
    belongs neither to Python nor to Lockstep.
    """
    above: list[tuple[str, str, str]] = []  # file, function and module of what lies above the user's line
    frame: FrameType | None = innermost
    while frame is not None and not is_users(frame.f_code.co_filename):
        above.append((frame.f_code.co_filename, frame.f_code.co_name, frame.f_globals.get("__name__") or ""))
        frame = frame.f_back
    if frame is not None:
        return SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name), *_call(above)
    frame = innermost
    while frame is not None and frame.f_code.co_filename.startswith(("<frozen", _OURS, _STDLIB)):
        # What is installed may lie below the standard library.
        if "/site-packages/" in frame.f_code.co_filename and not frame.f_code.co_filename.startswith(_OURS):
            break
        frame = frame.f_back
    return (SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame else NOWHERE), "", False


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


def collectives_begun() -> int:
    """How many collectives this process has begun over groups of all ranks; 0 while it has no group.

    It imports nothing: a script that does not use torch does not load it for this.
    """
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    default = getattr(world, "default_pg", None)
    if world is None or default is None:
        return 0
    size = default.size()
    return sum(group._get_sequence_number_for_group() for group in list(world.pg_map) if group.size() == size)
