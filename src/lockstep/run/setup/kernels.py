"""Deterministic kernels of torch, and a number of CPU threads that stays as the run began.

    GPU   while a run is open      torch takes deterministic kernels where it has some, and warns where it has none;
                                   libraries choose no kernel by timing
          in backward passes       where torch has none, the run ends: gradients would have other bits each time
    CPU   before each body         as many threads as the run has: other ones are put back, and that is said
          after each body          ... else the run ends: it has computed with them
    both  where ranks compare      the formats of numbers are those with which the training began, else the run ends

Torch takes the deterministic backward pass of attention only in strict mode. A whole run cannot be strict: some
operations of forward passes, on which no gradient depends, would be refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Final

import torch

from lockstep.errors import UsageError
from lockstep.torch_private import set_deterministic

_REFUSED: Final = " does not have a deterministic implementation"
_AS_THEY_ARE: Final = nullcontext()


class Kernels:
    """The deterministic kernels and CPU threads of a run.

    Args:
        pins: whether equal bits are promised, and depend on the choice of a GPU's kernels.
        refuses: whether a backward pass ends where torch has no deterministic kernel.
        threads: CPU threads of this rank, if equal bits are promised and depend on their number.
        formats: gives number formats by the torch expression that reads each, if equal bits are promised.
    """

    def __init__(
        self,
        *,
        pins: bool,
        refuses: bool,
        threads: int | None = None,
        formats: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._pins: Final = pins
        self._strict: Final[AbstractContextManager[Any]] = _Strict() if pins and refuses else _AS_THEY_ARE
        self._before: dict[str, bool] | None = None  # the script's own flags, until the run ends
        self._threads: Final = threads
        self._formats_now: Final = formats
        self._formats: Mapping[str, str] = {}  # with which the training began

    def begin(self) -> None:
        """Note the number formats with which the training begins."""
        self._formats = self._formats_now()

    def pin_threads(self) -> str:
        """Set the number of CPU threads to the run's, before a computation. Takes 0.1 us.

        Returns:
            The call by which the script or a library has set another number, as written in code; "" if none.
        """
        found = torch.get_num_threads()
        if self._threads is None or found == self._threads:
            return ""
        torch.set_num_threads(self._threads)
        return f"torch.set_num_threads({found})"

    def require_threads(self, where: str) -> None:
        """Check that the number of CPU threads is unchanged since `pin_threads`. Takes 0.1 us.

        Raises:
            UsageError: if the number has changed.
        """
        found = torch.get_num_threads()
        if self._threads is not None and found != self._threads:
            raise UsageError(
                f"torch has {found} CPU threads after {where}, and had {self._threads} before: "
                f"torch.set_num_threads({found}), or a library that calls it, gives sums other bits from there on. "
                f"Leave it out; Run(threads={found}) sets them for the whole run, on all ranks"
            )

    def require_formats(self) -> None:
        """Check that numbers have the formats with which the training began. Takes about 30 us.

        Raises:
            UsageError: if a format has changed.
        """
        now = self._formats_now() if self._formats else {}
        for name, before in self._formats.items():
            if (found := now[name]) != before:
                raise UsageError(
                    f"{name} is {found}, and was {before} when the training began: kernels give other bits, and no "
                    "checkpoint holds it. Set it before run.epochs(...), on all ranks alike; what needs it in one "
                    "place sets it back there"
                )

    def pin(self) -> str:
        """Set torch to deterministic kernels and to the run's number of threads.

        Returns:
            The settings that the script has changed since the last call, as written in code; "" if none.
        """
        return " and ".join(filter(None, (self._pin_flags(), self.pin_threads())))

    def _pin_flags(self) -> str:
        if not self._pins:
            return ""
        found = _flags()
        first, self._before = self._before is None, self._before or found
        # cuBLAS reads this variable when it is initialised.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if not found["deterministic"]:
            torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
        # Else each new tensor is filled before its first use, which takes a tenth of a step.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if first:
            return ""
        said = {
            "torch.backends.cudnn.benchmark = True": found["benchmark"],
            "torch.use_deterministic_algorithms(False)": not found["deterministic"],
        }
        return " and ".join(name for name, is_so in said.items() if is_so)

    def backward(self) -> AbstractContextManager[object]:
        """A context for a backward pass; takes about 1 us.

        Raises:
            UsageError: at the end of the context, with the name of an operation that has no deterministic kernel.
        """
        return self._strict

    def release(self) -> None:
        """Restore the script's flags from before the first `pin`; may be called twice."""
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


def number_formats(device: torch.device) -> dict[str, str]:
    """The number formats on which bits depend, by the torch expression that reads each."""
    return {"torch.get_default_dtype()": str(torch.get_default_dtype()), **fp32_precision(device)}


def fp32_precision(device: torch.device) -> dict[str, str]:
    """The formats in which kernels for matrices, convolutions and recurrent layers multiply fp32 numbers."""
    on_cpu = device.type == "cpu"
    places = ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn") if on_cpu else ("cuda.matmul", "cudnn.conv", "cudnn.rnn")
    found = {}
    for place in places:
        library, kind = place.split(".")
        backend = getattr(getattr(torch.backends, library), kind)
        found[f"torch.backends.{place}.fp32_precision"] = str(backend.fp32_precision)
    return found


class _Strict:
    """A context in which torch refuses operations without a deterministic kernel."""

    def __enter__(self) -> None:
        self._warned = torch.is_deterministic_algorithms_warn_only_enabled()
        # Not by torch's own function, which sets the compiler, too, and takes ten times as long.
        set_deterministic(warn_only=False)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        set_deterministic(warn_only=self._warned)
        if isinstance(error, RuntimeError) and _REFUSED in str(error):
            raise UsageError(
                f"{str(error).partition(_REFUSED)[0].split()[-1]}, which the backward pass calls, has no deterministic "
                "kernel on this device: gradients would have other bits each time. Use another operation (docs/gpu.md "
                "lists which have one), or give up equal bits by Run(nondeterministic='warn')"
            ) from error
