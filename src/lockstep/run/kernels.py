"""Kernels of a GPU that give the same bits each time.

    while a run is open      torch takes deterministic kernels where it has some, and warns where it has none;
                             libraries choose no kernel by timing
    in backward passes       where torch has none, the run ends: gradients would have other bits each time

Only in the second form, which is strict, does torch take the deterministic backward pass of attention. All of a run
cannot be so: some operations of forward passes, of which no gradient depends, would be refused.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Final

import torch

from lockstep.errors import UsageError

_REFUSED: Final = " does not have a deterministic implementation"
_AS_THEY_ARE: Final = nullcontext()


class Kernels:
    """Of one run.

    Args:
        pins: whether bits are promised, and depend on kernels.
        refuses: whether a backward pass ends where torch has no deterministic kernel.
    """

    def __init__(self, *, pins: bool, refuses: bool) -> None:
        self._pins: Final = pins
        self._strict: Final[AbstractContextManager[Any]] = _Strict() if pins and refuses else _AS_THEY_ARE
        self._before: dict[str, bool] | None = None  # what the script had, until the run ends

    def pin(self) -> str:
        """Let torch take kernels that give the same bits each time.

        Returns:
            What the script has set otherwise since the last call, as it is written; "" if nothing.
        """
        if not self._pins:
            return ""
        found = _flags()
        first, self._before = self._before is None, self._before or found
        # cuBLAS reads it when it begins.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if not found["deterministic"]:
            torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
        # Else each new tensor is written once more before its first use: a tenth of a step.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if first:
            return ""
        said = {
            "torch.backends.cudnn.benchmark = True": found["benchmark"],
            "torch.use_deterministic_algorithms(False)": not found["deterministic"],
        }
        return " and ".join(name for name, is_so in said.items() if is_so)

    def backward(self) -> AbstractContextManager[Any]:
        """Around a backward pass; takes about 1 us.

        Raises:
            UsageError: at its end, with the name of an operation that has no deterministic kernel.
        """
        return self._strict

    def release(self) -> None:
        """Put back what the script had before the first `pin`; may be called twice."""
        before, self._before = self._before, None
        if before is not None:
            torch.use_deterministic_algorithms(before["deterministic"], warn_only=before["warn_only"])
            torch.backends.cudnn.benchmark = before["benchmark"]
            torch.utils.deterministic.fill_uninitialized_memory = before["fill"]  # type: ignore[attr-defined]


def _flags() -> dict[str, bool]:
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    }


class _Strict:
    """A context in which torch refuses what has no deterministic kernel."""

    def __enter__(self) -> None:
        self._warned = torch.is_deterministic_algorithms_warn_only_enabled()
        # Not by torch's own function, which sets the compiler, too, and takes ten times as long.
        torch._C._set_deterministic_algorithms(True, warn_only=False)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        torch._C._set_deterministic_algorithms(True, warn_only=self._warned)
        if isinstance(error, RuntimeError) and _REFUSED in str(error):
            raise UsageError(
                f"{str(error).partition(_REFUSED)[0].split()[-1]}, which the backward pass calls, has no deterministic "
                "kernel on this device: gradients would have other bits each time. Use another operation (docs/gpu.md "
                "lists which have one), or give up equal bits by Run(nondeterministic='warn')"
            ) from error
