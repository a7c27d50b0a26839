"""Deterministic kernels of torch, and a number of CPU threads that stays as the run began.

Also the format of numbers in forward passes, and the loss scaling that fp16 needs.

    GPU   while a run is open      torch takes deterministic kernels where it has some, and warns where it has none;
                                   libraries and torch.compile choose no kernel by timing; attention is not cuDNN's
          in backward passes       where torch has none, the run ends: gradients would have other bits each time
    CPU   before each body         as many threads as the run has: other ones are put back, and that is said
          after each body          ... else the run ends: it has computed with them
    both  where ranks compare      the formats of numbers are those with which the training began, else the run ends

Torch takes the deterministic backward pass of attention only in strict mode, and cuDNN's attention has none: where the
forward pass is not strict, torch chooses it by itself for bf16 and fp16 on an H100. A whole run cannot be strict: some
operations of forward passes, on which no gradient depends, would be refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Final, Literal

import torch

from lockstep.errors import UsageError
from lockstep.torch_private import (
    compile_by_timing,
    compiler_settings,
    compiles_by_timing,
    found_inf,
    set_deterministic,
)

_REFUSED: Final = " does not have a deterministic implementation"
_AS_THEY_ARE: Final = nullcontext()
_NO_AUTOCAST: Final = contextlib.nullcontext()
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


#: By the name of a node of autograd's graph: an operation of a forward pass that has no deterministic kernel on a GPU,
#: and whose backward pass torch does not refuse.
_FORWARD: Final = {
    "NllLoss2DBackward0": "nll_loss2d, as of cross_entropy(out, target) for maps (of out.movedim(1, -1).flatten(0, -2) "
    "and target.flatten() another kernel computes the same)",
    "MedianBackward1": "median over a dimension",
    "NanmedianBackward1": "nanmedian over a dimension",
    "KthvalueBackward0": "kthvalue",
    "MaxUnpool2DBackward0": "max_unpool2d",
    "MaxUnpool3DBackward0": "max_unpool3d",
    "PutBackward0": "put_",
    "CumsumBackward0": "cumsum",
}
_EXAMINED: Final = 2  # losses, beside those of checked steps
#: Settings of `torch.compile`: kernels for several shapes have other bits than those for one, and beyond its limit of
#: shapes torch calls functions uncompiled, whichever shapes a rank has met first.
_EACH_SHAPE: Final = {"automatic_dynamic_shapes": False, "fail_on_recompile_limit_hit": True}
_LIMIT: Final = "recompile_limit"
_MOST_SHAPES: Final = 64


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
        self._refuses: Final = refuses
        self._strict: Final[AbstractContextManager[Any]] = _Strict() if pins and refuses else _AS_THEY_ARE
        self._examined = 0
        self._before: dict[str, bool] | None = None  # the script's own flags, until the run ends
        self._compiler_before: dict[str, Any] = {}  # the script's own settings of the compiler, once that is loaded
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
        compile_by_timing(allowed=False)
        self._compile_each_shape()
        if not found["deterministic"]:
            torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
        if self._refuses:
            torch.backends.cuda.enable_cudnn_sdp(False)
        # Else each new tensor is filled before its first use, which takes a tenth of a step.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if first:
            return ""
        said = {
            "torch.backends.cudnn.benchmark = True": found["benchmark"],
            "torch.use_deterministic_algorithms(False)": not found["deterministic"],
            "torch.backends.cuda.enable_cudnn_sdp(True)": self._refuses and found["cudnn_attention"],
        }
        return " and ".join(name for name, is_so in said.items() if is_so)

    def _compile_each_shape(self) -> None:
        """Let the compiler make kernels for each shape, or fail, whatever shapes this rank has met before."""
        if (settings := compiler_settings()) is not None and not self._compiler_before:
            self._compiler_before = {name: getattr(settings, name) for name in (*_EACH_SHAPE, _LIMIT)}
            for name, value in _EACH_SHAPE.items():
                setattr(settings, name, value)
            setattr(settings, _LIMIT, max(_MOST_SHAPES, self._compiler_before[_LIMIT]))

    def backward(self) -> AbstractContextManager[object]:
        """A context for a backward pass; takes about 1 us.

        Raises:
            UsageError: at the end of the context, with the name of an operation that has no deterministic kernel.
        """
        return self._strict

    def examine(self, loss: torch.Tensor, *, is_checked: bool) -> None:
        """Check that deterministic kernels computed ``loss``: the first losses, and those of checked micro-batches.

        Raises:
            UsageError: with the name of an operation that has none.
        """
        if not (self._pins and self._refuses and (is_checked or self._examined < _EXAMINED)):
            return
        self._examined += 1
        for node in nodes_of(loss):
            if (operation := _FORWARD.get(node.name())) is not None:
                raise _without_kernel(f"{operation}, by which the loss is computed,")

    def release(self) -> None:
        """Restore the script's flags from before the first `pin`; may be called twice."""
        for name, value in self._compiler_before.items():
            setattr(compiler_settings(), name, value)
        self._compiler_before = {}
        before, self._before = self._before, None
        if before is not None:
            torch.use_deterministic_algorithms(before["deterministic"], warn_only=before["warn_only"])
            compile_by_timing(allowed=before["compiles_by_timing"])
            torch.backends.cudnn.benchmark = before["benchmark"]
            torch.backends.cuda.enable_cudnn_sdp(before["cudnn_attention"])
            torch.utils.deterministic.fill_uninitialized_memory = before["fill"]  # type: ignore[attr-defined]


def _flags() -> dict[str, bool]:
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "compiles_by_timing": compiles_by_timing(),
        "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
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
            operation = str(error).partition(_REFUSED)[0].split()[-1]
            raise _without_kernel(f"{operation}, which the backward pass calls,") from error


def _without_kernel(what: str) -> UsageError:
    return UsageError(
        f"{what} has no deterministic kernel on this device: gradients would have other bits each time. Use another "
        "operation (docs/gpu.md lists which have one), or give up equal bits by Run(nondeterministic='warn')"
    )


def nodes_of(loss: torch.Tensor) -> Iterator[Any]:
    """The nodes of autograd's graph of ``loss``, in a fixed order."""
    waiting: list[Any] = [loss.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(following for following, _ in node.next_functions)


class Precision:
    """Parameters and optimizer stay fp32; with bf16 and fp16 autocast chooses the format of each operation.

    In fp16 the loss is scaled before the tree and the gradients are unscaled after it. Whether a step is skipped is
    decided from the summed gradient, which is the same on all ranks: all skip, or none.
    """

    def __init__(self, name: Literal["fp32", "bf16", "fp16"], device: torch.device) -> None:
        self._device: Final = device.type
        self.dtype: Final = _DTYPES.get(name)  #: of forward passes; None: as the tensors are
        self._scaler: Final = torch.amp.GradScaler(device.type, enabled=name == "fp16")
        #: whether losses are scaled, and steps with gradients that are not finite skipped
        self.scales: Final = self._scaler.is_enabled()
        self._found: Final[dict[int, torch.Tensor]] = {}  # of optimizers, by id: whether they skip this step
        self._skipped = False  # whether one has
        self.scale(torch.ones((), device=device))  # torch makes the scale for the first loss, which not all ranks see

    def forward(self) -> AbstractContextManager[object]:
        """Around the forward pass and the loss of one micro-batch; casts of parameters are not kept beyond it."""
        if self.dtype is None:
            return _NO_AUTOCAST
        return torch.autocast(self._device, dtype=self.dtype)

    def forget_casts(self) -> None:
        """Parameters have changed, so forward passes cast them again.

        Autocast keeps casts until its outermost context ends, which for the loop's body is the body's end.
        """
        if self.dtype is not None:
            torch.clear_autocast_cache()

    def backward(self) -> AbstractContextManager[object]:
        """Around the backward pass, which repeats the formats of the forward pass by itself."""
        if self.dtype is None:
            return _NO_AUTOCAST
        return torch.autocast(self._device, enabled=False)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the loss scale, at least in fp32."""
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()
        return self._scaler.scale(loss) if self.scales else loss

    def unscale(self, optimizer: torch.optim.Optimizer, on_any_rank: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """In fp16, divide the gradients by the loss scale; all ranks note whether they are finite on all. Collective.

        Args:
            optimizer: whose gradients.
            on_any_rank: whether a value of one element is not zero on some rank, as 0.0 or 1.0. Collective.
        """
        self._scaler.unscale_(optimizer)
        # Torch notes it by device; a rank that holds no gradient has noted nothing, and steps or skips, too.
        noted = found_inf(self._scaler, optimizer)
        found = sum((value.to(self._device) for value in noted.values()), torch.zeros((), device=self._device))
        agreed = on_any_rank(found)
        for device in noted or (agreed.device,):
            noted[device] = agreed.to(device)
        self._found[id(optimizer)] = agreed

    def skips(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` takes no step after `unscale`, since its gradients are not finite in fp16.

        In fp16 the host waits once for a GPU. By torch's scaler it would do so, and twice more for `update_scale`.
        """
        skips = self.scales and bool(self._found.pop(id(optimizer)))
        self._skipped |= skips
        return skips

    @property
    def loss_scale(self) -> float:
        """By what losses are multiplied before their backward passes; waits for the GPU."""
        return self._scaler.get_scale()

    def update_scale(self) -> bool:
        """Adapt the loss scale, once after all optimizers' steps. Whether these were really made, and not skipped."""
        if not self.scales:
            return True
        self._scaler.update()
        skipped, self._skipped = self._skipped, False
        return not skipped

    def state_dict(self) -> dict[str, object]:
        """The loss scale; empty without one."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on with the scale of `state_dict`."""
        if state and self.scales:
            self._scaler.load_state_dict(state)
