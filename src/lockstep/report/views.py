"""How a run is shown: live on a terminal, as plain lines in a log, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TextIO, TypeVar

from lockstep.errors import SettingError
from lockstep.report.status import Status

if TYPE_CHECKING:
    from rich.console import RenderableType

#: The environment variable that says which view to take: ``live``, ``lines``, ``silent`` or, as without it, ``auto``.
VIEW_VARIABLE = "LOCKSTEP_VIEW"
_ORDER = ("step", "epoch", "speed", "loss", "eta", "job", "saved", "late", "unprotected", "generation")


Shown = TypeVar("Shown", contravariant=True)


class ViewOf(Protocol[Shown]):
    """What something that goes on for long is shown on. All calls come from one thread."""

    def show(self, status: Shown, /) -> None:
        """Take the newest status; may be called several times a second."""

    def line(self, text: str) -> None:
        """Print ``text``, whole, as lines of their own."""

    def close(self) -> None:
        """Leave the last status on the screen and the terminal as it was; later calls are allowed."""


class View(ViewOf[Status], Protocol):
    """What a run's leader, or its launcher, shows on."""


def choose_view(stream: TextIO, env: Mapping[str, str], *, now: Callable[[], float] = time.monotonic) -> View:
    """The view that fits ``stream``: live on a terminal and in a notebook, else lines, as a log wants progress too.

    ``LOCKSTEP_VIEW`` has the last word. ``TERM=dumb`` means lines. ``NO_COLOR`` keeps the live view and takes its
    colours; ``FORCE_COLOR`` gives it colours where the terminal says it has none, and changes nothing in a pipe:
    lines never have colours. A stream that goes away, such as a closed pipe, ends the view and not the run.

    Raises:
        SettingError: if ``LOCKSTEP_VIEW`` names no view.
    """
    return view_on(stream, env, LinesView(stream, now=now), _picture)


def view_on(
    stream: TextIO,
    env: Mapping[str, str],
    lines: ViewOf[Shown],
    picture: Callable[[], Callable[[Shown], RenderableType]],
) -> ViewOf[Shown]:
    """The view that fits ``stream``: the picture where `choose_view` is live, else ``lines``, or none.

    ``picture`` is asked for what draws only where that is needed.

    Raises:
        SettingError: if ``LOCKSTEP_VIEW`` names no view.
    """
    wanted = view_word(stream, env)
    if wanted == "live":
        # Late, since rich takes a tenth of a second and most ranks never draw.
        from lockstep.report.terminal_view import NotebookView, TerminalView

        if is_notebooks(stream):
            return NotebookView(stream, picture())
        return ViewOnStream(TerminalView(stream, env, picture()), stream)
    return ViewOnStream(lines, stream) if wanted == "lines" else SilentView()


def _picture() -> Callable[[Status], RenderableType]:
    from lockstep.report.terminal_view import picture

    return picture


def view_word(stream: TextIO, env: Mapping[str, str]) -> Literal["live", "lines", "silent"]:
    """Which view fits ``stream``, with ``LOCKSTEP_VIEW`` having the last word.

    Raises:
        SettingError: if ``LOCKSTEP_VIEW`` names no view.
    """
    match env.get(VIEW_VARIABLE) or "auto":
        case "auto":
            return "live" if can_draw(stream, env) or is_notebooks(stream) else "lines"
        case "live" | "lines" | "silent" as wanted:
            return wanted
        case other:
            raise SettingError(f"{VIEW_VARIABLE}={other!r}: give one of auto, live, lines, silent")


def is_notebooks(stream: TextIO) -> bool:
    """Whether what is written to ``stream`` appears in a cell of a notebook, as in Jupyter, VS Code and Colab."""
    return type(stream).__module__.partition(".")[0] == "ipykernel"


def can_draw(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Whether ``stream`` is a terminal on which lines can be drawn over."""
    return stream.isatty() and env.get("TERM", "").lower() not in ("dumb", "unknown")


class SilentView:
    """Shows nothing."""

    def show(self, status: object) -> None:
        """Nothing."""

    def line(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class LinesView:
    r"""Plain lines for a log: no colour, no ``\r``, ASCII where the stream has no more.

        step 1 240/2 000 | epoch 3/10 | 2 140 samples/s | loss 0.4321 | 12 m 05 s left | saved at step 1 200

    A line comes every second for ten seconds, every ten seconds for two minutes, then every minute; besides at each
    new epoch, checkpoint and generation, though not more than ten times as often; and at the end. Each is written
    whole, in one piece, so that lines of several processes do not tear each other.

    Args:
        stream: where to.
        now: the clock, in seconds.
    """

    def __init__(self, stream: TextIO, *, now: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._now = stream, now
        self._began_s = now()
        self._written_s = float("-inf")
        self._written: Status | None = None
        self._newest: Status | None = None

    def show(self, status: Status) -> None:
        """Write a line if one is due."""
        self._newest = status
        now_s = self._now()
        interval_s, since_s = line_interval_s(now_s - self._began_s), now_s - self._written_s
        new = _mark(status) != _mark(self._written)
        if self._written is not None and status.step == self._written.step == status.steps_total:
            new &= status.ended  # all is done, and the last line is about to come
        # The end is written at once, and once.
        due = new if status.ended else since_s >= (interval_s / 10 if new else interval_s)
        if due:
            self._write(status)

    def line(self, text: str) -> None:
        r"""Write ``text`` now; of a line that was drawn over with ``\r`` only what was last seen."""
        lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip("\r\n").split("\n"))
        encoding = self._stream.encoding or "utf-8"
        whole = "\n".join(lines).encode(encoding, "backslashreplace").decode(encoding)
        self._stream.write(f"{whole}\n")
        self._stream.flush()

    def close(self) -> None:
        """Write the last status, unless its line was."""
        if self._newest is not None and (self._written is None or _line(self._newest) != _line(self._written)):
            self._write(self._newest)

    def _write(self, status: Status) -> None:
        self.line(_line(status))
        self._written, self._written_s = status, self._now()


def line_interval_s(elapsed_s: float) -> float:
    """How long after a line the next one comes, in seconds, where nothing is new."""
    return 1.0 if elapsed_s < 10 else 10.0 if elapsed_s < 120 else 60.0


def _line(status: Status) -> str:
    words = status.words()
    shown = [words[name] for name in _ORDER if name in words]
    if status.state != "training":
        shown.insert(0, words["state"])
    return " | ".join(shown)


def _mark(status: Status | None) -> object:
    """What deserves a line of its own when it changes."""
    return status and (status.epoch, status.last_saved_step, status.generation, status.ended)


class ViewOnStream(Generic[Shown]):
    """Shows on ``view`` for as long as its stream is there, then on nothing."""

    def __init__(self, view: ViewOf[Shown], stream: TextIO) -> None:
        self._view: ViewOf[Shown] = view
        self._stream = stream

    def show(self, status: Shown) -> None:
        """Have the view show it."""
        self._try(lambda view: view.show(status))

    def line(self, text: str) -> None:
        """Have the view print it."""
        self._try(lambda view: view.line(text))

    def close(self) -> None:
        """Close the view."""
        self._try(lambda view: view.close())

    def _try(self, deed: Callable[[ViewOf[Shown]], None]) -> None:
        if self._stream.closed:
            return
        with ignoring_write_errors(self._stream, self._silence):
            deed(self._view)

    def _silence(self) -> None:
        self._view = SilentView()


@contextlib.contextmanager
def ignoring_write_errors(stream: TextIO, gone: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Ignore errors of ``stream`` when it is written to inside: what cannot be written is left out.

    If the stream is gone, such as a closed pipe, ``gone`` is called, and what is written to it later is dropped.
    """
    try:
        yield
    except OSError as error:
        # On a full disk there may be room again.
        if error.errno in (errno.EPIPE, errno.EIO):
            gone()
            # Else what is left in the stream's buffer would fail again when Python ends, and spoil its exit code.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
