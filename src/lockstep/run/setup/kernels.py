"""What torch computes with: kernels that give the same bits each time, and as many threads as the run began with.

    GPU   while a run is open      torch takes deterministic kernels where it has some, and warns where it has none;
                                   libraries choose no kernel by timing
          in backward passes       where torch has none, the run ends: gradients would have other bits each time
    CPU   before each body         as many threads as the run has: other ones are put back, and that is said
          after each body          ... else the run ends: it has computed with them
    both  where ranks compare      the formats of numbers are those with which the training began, else the run ends

Only in its strict form does torch take the deterministic backward pass of attention. All of a run cannot be so: some
operations of forward passes, of which no gradient depends, would be refused.
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
    """Of one run.

    Args:
        pins: whether bits are promised, and depend on how a GPU's kernels are chosen.
        refuses: whether a backward pass ends where torch has no deterministic kernel.
        threads: CPU threads of this rank, if bits are promised and depend on them.
        formats: gives the formats of numbers by what asks torch for them, if bits are promised.
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
        self._before: dict[str, bool] | None = None  # what the script had, until the run ends
        self._threads: Final = threads
        self._formats_now: Final = formats
        self._formats: Mapping[str, str] = {}  # with which the training began

    def begin(self) -> None:
        """The training begins: the formats of numbers are what they are now."""
        self._formats = self._formats_now()

    def pin_threads(self) -> str:
        """Before something is computed: with as many threads as the run has. Takes 0.1 us.

        Returns:
            What the script or a library has set otherwise, as it is written; "" if nothing.
        """
        found = torch.get_num_threads()
        if self._threads is None or found == self._threads:
            return ""
        torch.set_num_threads(self._threads)
        return f"torch.set_num_threads({found})"

    def require_threads(self, where: str) -> None:
        """Check that what was computed since `pin_threads` was so with as many threads. Takes 0.1 us.

        Raises:
            UsageError: if their number is another one now.
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
            UsageError: if they have not.
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
        """Let torch take kernels that give the same bits each time, with as many threads as the run has.

        Returns:
            What the script has set otherwise since the last call, as it is written; "" if nothing.
        """
        return " and ".join(filter(None, (self._pin_flags(), self.pin_threads())))

    def _pin_flags(self) -> str:
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

    def backward(self) -> AbstractContextManager[object]:
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


def number_formats(device: torch.device) -> dict[str, str]:
    """The formats of numbers on which bits depend, by what asks torch for them."""
    return {"torch.get_default_dtype()": str(torch.get_default_dtype()), **fp32_precision(device)}


def fp32_precision(device: torch.device) -> dict[str, str]:
    """In which formats kernels multiply fp32 numbers: of matrices, convolutions and recurrent layers."""
    on_cpu = device.type == "cpu"
    places = ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn") if on_cpu else ("cuda.matmul", "cudnn.conv", "cudnn.rnn")
    found = {}
    for place in places:
        library, kind = place.split(".")
        backend = getattr(getattr(torch.backends, library), kind)
        found[f"torch.backends.{place}.fp32_precision"] = str(backend.fp32_precision)
    return found


class _Strict:
    """A context in which torch refuses what has no deterministic kernel."""

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
