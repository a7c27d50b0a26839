"""What to do about errors whose own text does not say it, because they come from Python or torch.

`Run` adds it as a note under whatever has started the script, ``lockstep run`` to the errors of all its scripts.
"""

from __future__ import annotations

import contextlib
import errno
import linecache
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from lockstep.cpython_private import children_of_multiprocessing
from lockstep.heartbeat import is_users
from lockstep.peer_failure import is_peer_failure

_DATA: Final = str(Path(__file__).parent / "data")
_COLLECTIVES: Final = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/c10d_logger.py")
_GRAD_SCALER: Final = "/torch/amp/grad_scaler.py"
_LOCKS: Final = "/multiprocessing/synchronize.py"
_HANDING_OVER: Final = "/multiprocessing/resource_sharer.py"
_NO_GPU: Final = re.compile(
    "not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available|no attribute '_cuda_|"
    "accelerator device when none is available|NCCL built in|only supported with GPUs, no GPUs found"
)
#: Attributes of DistributedDataParallel, which scripts that used it ask the model for.
_OF_DDP: Final = {
    "module": "run.model(...) returns your own module: leave .module out",
    "no_sync": "run.train(...) accumulates by itself where micro_batch is smaller than global_batch: leave it out",
    "register_comm_hook": "run.model(...) returns your own module: --strategy ddp:compress=fp16, bf16 or powersgd "
    "compresses what it sends; a hook of your own needs DistributedDataParallel in a script without lockstep.Run",
}
#: By words of torch's errors that are enough to know them.
_OF_TORCH: Final = {
    # Torch says to use "spawn", which loader processes need not.
    "Cannot re-initialize CUDA in forked subprocess": "loader processes use no GPU: leave .to(...) and .cuda() out of "
    "the data set, its transforms and the collate function, since run.train moves batches to run.device by itself; or "
    "read without loader processes: run.loader(..., workers=0)",
    "not supported for tensor subclasses": "where the strategy divides the model, a rank holds a part of each "
    "parameter: run.state_dict(model), called on all ranks, gives the leader whole tensors",
}


def add_advice(error: BaseException, *, attached: bool = True) -> None:
    """``error`` has what `advice_for` says as a note from here on; once, however often it is called."""
    with contextlib.suppress(Exception):  # a program's own class of errors may have no text, and no notes
        advice = advice_for(error, attached=attached)
        if advice and advice not in getattr(error, "__notes__", ()):
            error.add_note(advice)


def advice_for(error: BaseException, *, attached: bool) -> str:
    """What to do about ``error``, in a line that is the same on all ranks; "" if its own text is enough.

    Args:
        error: with its traceback.
        attached: whether the rank that raised it has a terminal; False only under ``lockstep run``, which lends one.
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    advices = [advice(error, frames) for advice in _ADVICES]
    if not attached and _needs_terminal(error, frames):
        script = Path(sys.argv[0]).name or "train.py"
        advices.append(
            f"ranks have no terminal, and only one of them can be lent yours; shutil.get_terminal_size() answers "
            f"without one, and python {script} is the same script on one rank"
            if _asks_size(error, frames)
            else f"ranks have no terminal: lockstep run --attach RANK lends one of them yours, and python {script} is "
            "the same script on one rank"
        )
    return next(filter(None, advices), "")


Frames = Sequence[tuple[str, int]]


def _needs_terminal(error: BaseException, frames: Frames) -> bool:
    if isinstance(error, EOFError):
        return str(error) == "EOF when reading a line"  # what input() says
    return _asks_size(error, frames) or type(error).__name__ == "BdbQuit"


def _asks_size(error: BaseException, frames: Frames) -> bool:
    """Whether the program wanted to know how large its terminal is, or how it is set."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOTTY
    own = [(file, line) for file, line in frames if is_users(file)]
    return isinstance(error, ValueError) and bool(own) and "stty" in linecache.getline(*own[-1])


def _data(error: BaseException, frames: Frames) -> str:
    files = [file for file, _ in frames]
    inside = next((index for index, file in enumerate(files) if file.startswith(_DATA)), None)
    if inside is None or not isinstance(error, LookupError | TypeError | AttributeError | ValueError):
        return ""
    by_user = any(is_users(file) for file in files[inside:])
    return "raised while a micro-batch was read: in the data set or its collate function" if by_user else ""


def _gpu(error: BaseException, frames: Frames) -> str:
    if not _NO_GPU.search(str(error)):
        return ""
    return (
        "torch sees no GPU here: a rehearsal on CPUs needs the device cpu and the backend gloo; with lockstep.Run "
        "leave .to(...) and .cuda() out, since the model and the batches are on run.device already"
    )


def _ddp(error: BaseException, frames: Frames) -> str:
    # DistributedDataParallel itself has all of these.
    if not (isinstance(error, AttributeError) and hasattr(error.obj, "state_dict") and "lockstep.run" in sys.modules):
        return ""
    return _OF_DDP.get(error.name or "", "")


def _no_gradient(error: BaseException, frames: Frames) -> str:
    """A script that looks at ``parameter.grad`` after the step, where there is none."""
    own = [(file, line) for file, line in frames if is_users(file)]
    is_of_none = isinstance(error, AttributeError) and error.obj is None and bool(own)
    if not (is_of_none and re.search(r"\.grad\b", linecache.getline(*own[-1])) and "lockstep.run" in sys.modules):
        return ""
    return (
        "run.step(loss) has used the gradients and left none: look at them where run.backward(loss) has returned True, "
        'and then call run.update(); with Run(clip_norm=...) their norm is run.metrics["grad_norm"]'
    )


def _made_by_another(error: BaseException, frames: Frames) -> str:
    own = [file for file, _ in frames if is_users(file)]
    if not (isinstance(error, FileExistsError) and own and int(os.environ.get("WORLD_SIZE", "1")) > 1):
        return ""
    return (
        "all ranks run this line, and another rank may have made it a moment before: give exist_ok=True, or write "
        "`if run.leads:`, for what one rank does for all"
    )


def _of_torch(error: BaseException, frames: Frames) -> str:
    if "lockstep.run" not in sys.modules:
        return ""
    return next((advice for words, advice in _OF_TORCH.items() if words in str(error)), "")


def _grad_scaler(error: BaseException, frames: Frames) -> str:
    by_scaler = any(file.endswith(_GRAD_SCALER) for file, _ in frames)
    if not (isinstance(error, AssertionError) and by_scaler and "lockstep.run" in sys.modules):
        return ""
    return (
        'leave the GradScaler out: with lockstep.Run(precision="fp16") run.step(loss) scales the loss, unscales the '
        "gradient, and skips a step that overflows"
    )


def _loader_process(error: BaseException, frames: Frames) -> str:
    # Torch knows a loader process that dies while its next sample is waited for, not one that is handing it over.
    handing = any(file.endswith(_HANDING_OVER) for file, _ in frames)
    if not (isinstance(error, ConnectionError | EOFError | FileNotFoundError) and handing):
        return ""
    codes = {child.exitcode or 0 for child in children_of_multiprocessing()}
    killed = [signal.Signals(-code).name for code in sorted(codes) if code < 0]
    return f"a loader process was {'killed' if not killed else f'killed by {killed[0]}'} while it handed a sample over"


def _semaphore(error: BaseException, frames: Frames) -> str:
    """Python's locks between processes lie in /dev/shm, and its error names no file."""
    by_lock = any(file.endswith(_LOCKS) for file, _ in frames)
    if not (isinstance(error, OSError) and by_lock):
        return ""
    return (
        "locks that a rank shares with its loader processes lie in /dev/shm, which takes nothing: give it room "
        "(docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm), or read without loader processes (workers=0)"
    )


def _relative_import(error: BaseException, frames: Frames) -> str:
    own = [Path(file) for file, _ in frames if is_users(file)]
    if not (isinstance(error, ImportError) and "relative import with no known parent package" in str(error) and own):
        return ""
    with contextlib.suppress(ValueError, FileNotFoundError):  # it lies elsewhere
        module = ".".join(own[-1].absolute().relative_to(Path.cwd()).with_suffix("").parts)
        if "." in module:
            return f"a script has no package around it; start it as a module: lockstep run -m {module}"
    return (
        "a script has no package around it; start it as a module from the directory above: lockstep run -m PACKAGE.NAME"
    )


def _collective(error: BaseException, frames: Frames) -> str:
    """Ranks that wait for each other in a collective which the script calls by itself."""
    own = [index for index, (file, _) in enumerate(frames) if is_users(file)]
    called = [file for file, _ in frames[own[-1] + 1 :]] if own else []
    if not (called and called[0].endswith(_COLLECTIVES) and is_peer_failure(error) and "lockstep.run" in sys.modules):
        return ""
    return (
        "a collective of the script's own, to which another rank did not come: ranks do not run the loop's body "
        "equally often. Give values of micro-batches to run.measure(...), and call collectives after the loop"
    )


_ADVICES: Final[tuple[Callable[[BaseException, Frames], str], ...]] = (
    *(_data, _gpu, _ddp, _no_gradient, _made_by_another, _grad_scaler, _of_torch),
    *(_loader_process, _semaphore, _relative_import, _collective),
)
