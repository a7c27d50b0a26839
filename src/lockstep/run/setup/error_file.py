"""What a run that ends by an error leaves for the launcher that started it."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from lockstep.peer_failure import is_peer_failure

# torchrun looks for a failing rank's error here, and reports it as the root cause.
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def write_torchelastic_error(error: BaseException, env: Mapping[str, str], now_s: float | None = None) -> None:
    """Write ``error`` where torchrun looks for it, unless something is there; nothing under other launchers.

    torchrun takes the error of the earliest second for the cause, and of those the lowest rank's. An error which only
    says that another rank is gone is therefore dated to the second after.
    """
    path = env.get(_ERROR_FILE)
    if not path or Path(path).exists():
        return
    second = int(time.time() if now_s is None else now_s) + is_peer_failure(error)
    record = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(second),
        },
    }
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": record}), encoding="utf-8")


def silence_interrupt() -> None:
    """An interrupt that the script does not catch prints no traceback; the exit code says it."""
    before = sys.excepthook

    def print_others(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            before(kind, error, trace)

    sys.excepthook = print_others
