"""Lines of a script at which the host waits for a device: each call that needs a tensor's value.

On a GPU such a call waits until all queued kernels are done; on a CPU the value is ready, so calls found on a CPU are
those that would wait on a GPU.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lockstep.heartbeat import is_users
from lockstep.step_record import HostWait

_CALLS: Final = {
    **{name: f".{name}()" for name in ("item", "tolist", "numpy", "cpu", "nonzero")},
    "__float__": "float()",
    "__int__": "int()",
    "__bool__": "if",
    "__index__": "an index",
    "__array__": "numpy",
    "__repr__": "print",
    "__format__": "print",
}
_OURS: Final = str(__file__).rpartition("/run/")[0]


class HostWaits(TorchFunctionMode):
    """A context that counts calls that wait, in this thread.

    Args:
        on_gpu: whether the script computes on a GPU: then values of tensors on the CPU are no waits.
        trains: says whether the script trains at this moment; other calls do not count.
    """

    def __init__(self, *, on_gpu: bool, trains: Callable[[], bool]) -> None:
        super().__init__()
        self._on_gpu: Final = on_gpu
        self._trains: Final = trains
        self._seen: dict[tuple[str, int], list[tuple[str, float]]] = defaultdict(list)  # calls and seconds, by line

    @override
    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> object:
        call = _CALLS.get(getattr(func, "__name__", ""), "")
        waits = call and isinstance(args[0], torch.Tensor) and (args[0].is_cuda or not self._on_gpu) and self._trains()
        where = _line_of_script(sys._getframe(1)) if waits else None
        began = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        if where is not None:
            self._seen[where].append((call, time.perf_counter() - began))
        return result

    def found(self, steps: int) -> tuple[HostWait, ...]:
        """Each line with its calls in ``steps`` steps, the most expensive first."""
        waits = [
            HostWait(
                file,
                line,
                ", ".join(sorted({call for call, _ in calls})),
                len(calls) / steps,
                sum(took_s for _, took_s in calls) / steps,
            )
            for (file, line), calls in self._seen.items()
        ]
        return tuple(sorted(waits, key=lambda wait: -wait.seconds))


def _line_of_script(frame: FrameType | None) -> tuple[str, int] | None:
    """The user's innermost line; None if the call comes from Lockstep itself."""
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        if is_users(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None
