"""Losses and gradients that are not finite: reported at once, and by default the end of the run.

On a CPU a loss is checked before its backward pass, and a step's gradient before the update, so the parameters are
still good. The host does not wait for a GPU: values are copied, and read one step later, or before a save.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final, Literal

import torch
from torch import nn

from lockstep.errors import NonFiniteError
from lockstep.formatting import some_of
from lockstep.run.batches.pinned_copy import PinnedCopy
from lockstep.strategies import as_real, has_gradient
from lockstep.torch_private import foreach_norm

OnNan = Literal["stop", "locate", "warn", "ignore"]
_Asked = tuple[PinnedCopy, list[tuple[int, str, str]]]  # values on their way, how many each text is of
_LEAST_SCALE = 1.0  # of fp16's losses: sixteen skipped steps below the first one

#: A repeated training has the same bits, and so the same gradients.
_LOCATE: Final = (
    " To learn which rank and micro-batch brought it, resume with Run(on_nan='locate') or LOCKSTEP_ON_NAN=locate: "
    "where the same step passes then, a device has computed wrong bits"
)
_OF_NOTHING: Final = "give the sum, for a mean over nothing is none: run.step(loss_sum, count=n, loss_is='sum')"


class NonFiniteChecks:
    """The checks for finite losses and gradients on one rank.

    Args:
        on_nan: stop: raise; locate: raise, and look at each micro-batch's gradient before the sum; warn: report it,
            once for each kind; ignore: check nothing.
        rank: of this process.
        warn: prints a line for this rank, and protects earlier checkpoints.
        last_good: gives the step of the checkpoint that was committed last.
        read_later: copies a GPU's values to the host, to be read later.
    """

    def __init__(
        self,
        on_nan: OnNan,
        rank: int,
        warn: Callable[[str], None],
        last_good: Callable[[], int | None],
        read_later: Callable[[torch.Tensor], PinnedCopy] = PinnedCopy,
    ) -> None:
        self._on_nan: Final = on_nan
        self.locates: Final = on_nan == "locate"  #: whether gradients are looked at as they are computed
        self._rank: Final = rank
        self._warn: Final = warn
        self._last_good: Final = last_good
        self._read_later: Final = read_later
        self._said: set[str] = set()
        self._values: list[tuple[torch.Tensor, str, str]] = []  # of this step, on the GPU: values that must be finite
        self._asked: _Asked | None = None  # of the step before

    def loss(self, loss: torch.Tensor, step: int, index: int, of: int, items: int | torch.Tensor) -> None:
        """Check the loss of micro-batch ``index`` of ``of``, over ``items``, in the step after ``step`` steps.

        Raises:
            NonFiniteError: if it is not finite and the run must stop.
        """
        if self._on_nan == "ignore":
            return
        value = loss.item() if loss.is_cpu else math.nan
        if math.isfinite(value):
            return
        where = f"at step {step + 1} on rank {self._rank}, micro-batch {index} of {of}"
        if isinstance(items, torch.Tensor) and not items.is_cpu:
            where += f". If its count is 0: {_OF_NOTHING}"
        elif not items:
            where += f", whose count is 0: {_OF_NOTHING}"
        if loss.is_cpu:
            self._found("loss", f"the loss is {value:g} {where}")
        else:
            value_then = as_real(loss.detach()).reshape(-1).clone()
            self._values.append((value_then, "loss", f"the loss is not finite {where}"))

    @contextmanager
    def locating(
        self,
        parameters: Sequence[nn.Parameter],
        name_of: Callable[[nn.Parameter], str],
        step: int,
        micro_batches: str,
    ) -> Iterator[None]:
        """A context in which this rank's gradients are checked as backward passes compute them; where `locates`.

        They are checked before any sum. Waits for a GPU at each of ``parameters``. Of divided parameters no rank has a
        gradient of its own.

        Raises:
            NonFiniteError: if a gradient is not finite and ``on_nan`` is ``locate``. The error names the first such
                parameter in the order of the backward pass, which is the nearest to the loss.
        """
        where = f"at step {step + 1} on rank {self._rank}, {micro_batches}"

        def look(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
            if not (gradient.coalesce().values() if gradient.is_sparse else gradient).isfinite().all():
                self._found("gradient", f"the gradient of {name_of(parameter)} is not finite {where}")

        with ExitStack() as hooks:
            for parameter in parameters:
                hooks.callback(parameter.register_hook(partial(look, parameter)).remove)
            yield

    def gradients(self, parameters: Sequence[nn.Parameter], name_of: Callable[[nn.Parameter], str], step: int) -> None:
        """Check this rank's part of the summed gradient of the step after ``step`` steps.

        Raises:
            NonFiniteError: if it is not finite and the run is to stop.
        """
        if self._on_nan == "ignore":
            return
        # A sum with a number that is not finite is not finite, and takes one pass. If the sum is too large for its
        # type, the numbers themselves are checked.
        held = [values for p in parameters if (values := has_gradient(p)) is not None]
        # This rank is not named: any rank's micro-batch may have brought the value into the sum.
        where = f"at step {step + 1}, in the sum over the micro-batches of all ranks, any of which may have brought it"
        if held and not held[0].is_cpu:
            for largest in _largest(held):
                self._values.append((largest, "gradient", f"the gradient is not finite {where}"))
            return
        sums = [v.sum(dtype=torch.float32) if v.dtype is torch.float16 else v.sum() for v in held]
        if cmath.isfinite(sum([each.item() for each in sums])):
            return
        odd = [name_of(p) for p in parameters if (v := has_gradient(p)) is not None and not v.isfinite().all()]
        if odd:
            self._found("gradient", f"the gradient of {some_of(odd, 3)} is not finite {where}")

    def loss_scale(self, scale: float, step: int) -> None:
        """Check the loss scale in fp16, after a step that was skipped.

        Raises:
            NonFiniteError: if the scale is so small that fp16 cannot be the reason, and the run must stop.
        """
        if self._on_nan != "ignore" and scale < _LEAST_SCALE:
            self._found(
                "scale",
                f"the loss scale fell to {scale:g} at step {step + 1}, for so many steps had gradients that are not "
                "finite and were skipped",
            )

    def step_ended(self) -> None:
        """Read the values of the step before, and begin to copy those of this step from the GPU.

        Raises:
            NonFiniteError: if a value was not finite and the run must stop.
        """
        asked, self._asked = self._asked, None
        if self._values:
            self._ask()
        if asked is not None:
            self._read(asked)

    def settle(self) -> None:
        """Read all values of the steps so far, before a save; waits for the GPU.

        Raises:
            NonFiniteError: if something was not finite and the run is to stop.
        """
        self.step_ended()
        self.step_ended()

    def _ask(self) -> None:
        device = self._values[0][0].device  # a model may lie on several devices
        values = torch.cat([each.to(device) for each, _, _ in self._values])
        self._asked = self._read_later(values), [(len(each), kind, text) for each, kind, text in self._values]
        self._values = []

    def _read(self, asked: _Asked) -> None:
        copy, meanings = asked
        values, first = copy.read(), 0
        for number, kind, text in meanings:
            own, first = values[first : first + number], first + number
            if not all(map(math.isfinite, own)):
                self._found(kind, text)

    def _found(self, kind: str, text: str) -> None:
        if self._on_nan == "warn":
            if kind not in self._said:
                self._said.add(kind)
                self._warn(f"{text}; training goes on, as on_nan='warn' says")
            return
        good = self._last_good()
        saved = "no checkpoint was saved before" if good is None else f"the last checkpoint is that of step {good}"
        raise NonFiniteError(
            f"{text}; {saved}. Look at the data and the learning rate, or continue anyway with "
            f"Run(on_nan='warn') or 'ignore'.{_LOCATE if kind == 'gradient' and self._on_nan == 'stop' else ''}"
        )


def _largest(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The greatest absolute value of each gradient, not finite if an element is not; in few launches."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for each in gradients:
        if each.numel():
            alike.setdefault((each.device, each.dtype), []).append(as_real(each))
    return [torch.stack(foreach_norm(some, math.inf)) for some in alike.values()]
