"""The small file in which a failing rank records why it failed."""

from __future__ import annotations

import contextlib
import json
import linecache
import re
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from lockstep.errors import AuditError, LockstepError
from lockstep.heartbeat import is_users, own_lines, user_frame
from lockstep.launch_contract import EXIT_NOT_SAVED, EXIT_OK, EXIT_STOPPED
from lockstep.peer_failure import is_peer_failure
from lockstep.records import from_known, object_from, read_object
from lockstep.small_files import replace_text

#: The kind of a failure that the launcher found and not the rank itself: it makes no progress.
HANG = "hang"
#: The kind of a failure of a rank that left by `os._exit`, which raises nothing.
OS_EXIT = "os._exit"
_MOST_SIGNS = 4000

_WORKER_LOST = re.compile(
    r"DataLoader worker .*(is killed by signal: Killed|exited unexpectedly)|loader process was killed", re.DOTALL
)
#: An error that torch has brought from a loader process, with the traceback that the error had there as its text.
_IN_LOADER = re.compile(
    r"Caught \S+ in DataLoader worker process (\d+)\.\nOriginal Traceback \(most recent call last\):\n(.*)", re.DOTALL
)
_PLACE = re.compile(r'^  File "(.+)", line (\d+), in .*\n(?:    .*\n)*', re.MULTILINE)
_ABORTED_BY_WATCHDOG = re.compile(
    r"watchdog thread terminated with exception|watchdog caught collective operation timeout|"
    r"terminate called .*(DistBackendError|gloo::)",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one rank failed, as it recorded itself."""

    rank: int
    host: str
    kind: str  #: the exception's name, such as ``ValueError`` or ``torch.OutOfMemoryError``
    message: str
    file: str  #: of the last line of the user's own code, "" if there was none
    line: int
    source: str  #: that line
    traceback: str
    collateral: bool  #: it only says that another rank was lost
    raised_s: float  #: on the host's monotonic clock, which all its processes share
    log_bytes: int  #: length of the rank's log before it printed the traceback
    gpu: str = ""  #: how far its GPU's memory went; "" without one
    headline: str = ""  #: what failed, where that is not this rank by itself
    accused: tuple[int, ...] = ()  #: ranks that have computed wrong bits, or hold some

    @classmethod
    def of(
        cls,
        error: BaseException,
        *,
        rank: int,
        host: str,
        now_s: float,
        log_bytes: int,
        gpu: str = "",
        cut_off: bool = False,
    ) -> Self:
        """The record for ``error``.

        Where this process was ``cut_off`` from hosts that are lost, a connection of the script's own may have ended
        with that, whatever error this became. Lockstep's own errors say what they mean.
        """
        file, line = user_frame(error)
        message, caught = _message(error), caught_before(error)
        if caught is not None:
            # That the script left is what it did about this error; where the program raised it is what is looked for.
            own = error.code if isinstance(error, SystemExit) and isinstance(error.code, str) else ""
            message = "\n".join(filter(None, [own, f"after {_kind(caught)}: {_message(caught)}"]))
            if own_lines([frame.f_code.co_filename for frame, _ in traceback.walk_tb(caught.__traceback__)]):
                file, line = user_frame(caught)
        if in_loader := _IN_LOADER.match(message):
            process, there = in_loader.groups()
            places = list(_PLACE.finditer(there))
            file, line = next(((p[1], int(p[2])) for p in reversed(places) if is_users(p[1])), (file, line))
            said = there[places[-1].end() :].strip() if places else there
            message = f"{said.removeprefix(f'{_kind(error)}: ')} (in loader process {process})"
        return cls(
            rank=rank,
            host=host,
            kind=_kind(error),
            message=message,
            file=file,
            line=line,
            source=linecache.getline(file, line).strip() if file else "",
            traceback="".join(traceback.format_exception(error)),
            collateral=is_peer_failure(caught or error)
            or (cut_off and not isinstance(error, LockstepError | SystemExit)),
            raised_s=now_s,
            log_bytes=log_bytes,
            gpu=gpu,
            headline=error.headline if isinstance(error, AuditError) else "",
            accused=error.accused if isinstance(error, AuditError) else (),
        )

    @property
    def lost_worker(self) -> bool:
        """Whether a process of its data loader was killed or ended unexpectedly."""
        return _WORKER_LOST.search(self.message) is not None

    @property
    def ends_well(self) -> bool:
        """Whether its rank leaves by itself with an exit code, and perhaps takes its time."""
        return self.kind in ("SystemExit", OS_EXIT)

    def to_message(self) -> bytes:
        """The record as one message for the launcher, of at most 60 KiB: long texts lose their middle."""
        short = {name: _short(value) if isinstance(value, str) else value for name, value in asdict(self).items()}
        return json.dumps({"failure": short}).encode()

    @classmethod
    def from_message(cls, text: bytes) -> Self | None:
        """What `to_message` made ``text`` of; None if it is another message."""
        try:
            return from_known(cls, object_from(text).get("failure"))
        except ValueError:
            return None

    def write(self, path: Path) -> None:
        """Write the record to ``path``, completely or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The record at ``path``; None if there is none that can be read."""
        try:
            return from_known(cls, read_object(path))
        except (OSError, ValueError):
            return None


class ExitCall(SystemExit):
    """Stands for a call of `os._exit`, with the traceback of where it came from. It is raised by nobody."""

    @classmethod
    def at(cls, frame: FrameType | None, code: int) -> Self:
        """The exit with ``code`` that ``frame`` calls for."""
        trace: TracebackType | None = None
        while frame is not None:
            trace, frame = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno), frame.f_back
        return cls(code).with_traceback(trace)


def first_failure(run_dir: Path) -> Failure | None:
    """What failed first in the last generation of a run and does not only say that another rank is gone.

    None if no rank has left a record, as where it was killed.
    """
    generations = sorted((run_dir / "failures").glob("generation-*"), key=lambda path: int(path.name.split("-")[1]))
    records = [Failure.read(path) for path in generations[-1].glob("*.json")] if generations else []
    found = [record for record in records if record is not None]
    return min(found, key=lambda record: (record.collateral, record.raised_s), default=None)


def _short(text: str) -> str:
    # Each of its signs may take six bytes in a message.
    return text if len(text) <= _MOST_SIGNS else f"{text[: _MOST_SIGNS // 2]}\n...\n{text[-_MOST_SIGNS // 2 :]}"


def caught_before(error: BaseException) -> Exception | None:
    """The error that the program was handling when it called ``sys.exit``, as launchers of functions do; else None."""
    if not isinstance(error, SystemExit) or error.code in (None, EXIT_OK, EXIT_STOPPED, EXIT_NOT_SAVED):
        return None
    caught = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return caught if isinstance(caught, Exception) else None


def strip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """``trace`` from the first line of the program on, without how we got there."""
    start = trace
    while start is not None:
        file = start.tb_frame.f_code.co_filename
        if not file.startswith((_HERE, "<frozen runpy")) and not file.endswith("/runpy.py"):
            return start
        start = start.tb_next
    return trace


def aborted_by_watchdog(log_tail: str) -> bool:
    """Whether a rank that died of SIGABRT was ended by NCCL's or gloo's own threads, since a peer was gone."""
    return _ABORTED_BY_WATCHDOG.search(log_tail) is not None


def _message(error: BaseException) -> str:
    """What ``error`` says, and its notes, as far as a program's own class of errors can be asked for them."""
    parts: list[object] = []
    try:
        parts.append(str(error))
    except Exception as failed:  # noqa: BLE001 - it says nothing about the program's failure
        parts.append(f"(its text is not known: its __str__ raised {type(failed).__name__})")
    with contextlib.suppress(TypeError):
        parts += getattr(error, "__notes__", ())
    return "\n".join(part for part in parts if isinstance(part, str) and part)


def _kind(error: BaseException) -> str:
    of = type(error)
    if of is ExitCall:
        return OS_EXIT
    return of.__qualname__ if of.__module__ in ("builtins", "__main__") else f"{of.__module__}.{of.__qualname__}"


_HERE = str(Path(__file__).parents[1])
