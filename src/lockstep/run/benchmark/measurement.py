"""The measurement of a benchmark's run: some steps of the user's script on each rank, after which the run ends.

    LOCKSTEP_MEASURE     steps 0 .. n-1          [steps n ..]          sums of ten sizes     exit code 0
                         taken apart             operations, waits     over all ranks        one record per rank
                                                 counted

Measured steps have the same results as steps without a measurement, bit for bit.
"""

from __future__ import annotations

import multiprocessing
import resource
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from lockstep.collectives import local_part, time_sums
from lockstep.heartbeat import ProgressMarker, is_users
from lockstep.launch_contract import EXIT_OK
from lockstep.progress import Progress
from lockstep.provenance import cpu_model
from lockstep.run.benchmark.step_recorder import OUTSIDE, StepRecorder
from lockstep.run.checks.oom_advice import free_bytes
from lockstep.run.setup.run_context import RunContext
from lockstep.step_record import HostWait, MeasureRequest, RankRecord

_WAIT_STEPS: Final = 10  # a script that prints every ten steps prints in one of them
_PACE_STEPS: Final = 3  # by which it is known how many fit into a budget
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


class Measurement:
    """The measurement of this rank, and its record."""

    def __init__(self, context: RunContext, request: MeasureRequest) -> None:
        self._context: Final = context
        self._request: Final = request
        self._recorder: Final = StepRecorder(context.marker, context.device, gradients=request.gradients)
        self._kept: Final = KeptForBackward(context.marker)
        self._flops: Any = FlopCounterMode(display=False) if request.flops else None
        self._waits: Final = (
            HostWaits(
                on_gpu=context.device.type == "cuda", trains=lambda: context.marker.phase not in ("data", *OUTSIDE)
            )
            if request.waits
            else None
        )
        self._counting: ExitStack | None = None  # the last steps, in which operations and waits are counted
        self._counted_samples = 0
        self._counted = _WAIT_STEPS if request.waits else 1 if request.flops else 0  # number of these steps
        self._flops_per_sample: float | None = None
        self._begun = self._over = False
        self._steps = request.steps  # that are timed
        self._began_s = 0.0
        self._progress = Progress()

    def at(self, progress: Progress, *, begins_pass: bool) -> None:
        """Begin the next step, at ``progress``. Collective after the last step.

        Raises:
            SystemExit: with code 0, after the last step.
        """
        if self._over:
            return
        if not self._begun:
            self._begin()
        done = progress.step
        samples, self._progress = progress.samples - self._progress.samples, progress
        if samples:
            self._recorder.note_samples(samples)
            self._counted_samples += samples if self._counting is not None else 0
        if done == _PACE_STEPS < self._steps and self._request.budget_s and samples:
            self._fit(done)
        if done < self._steps:
            self._recorder.begin_step(done, begins_pass=begins_pass)
        elif self._counting is None and self._counted:
            self._recorder.begin_step(done, begins_pass=begins_pass)  # which ends the step before
            self._recorder.end()
            self._counting = ExitStack()
            for mode in filter(None, (self._flops, self._waits)):
                self._counting.enter_context(mode)
        elif done >= self._steps + self._counted:
            self._end_counting()
            if self._flops is not None:
                ranks = self._context.group.size
                self._flops_per_sample = self._flops.get_total_flops() * ranks / self._counted_samples
            self._finish()

    def close(self) -> None:
        """Write the measurements so far, as the run ends."""
        if self._begun and not self._over:
            self._write(())

    def _begin(self) -> None:
        self._begun = True
        length = self._context.position.length
        whole = length.steps or (length.epochs or 0) * (length.steps_per_epoch or 0)
        if whole and self._counted:
            # A short training leaves one step, or half of several, for counting.
            self._counted = max(1, min(self._counted, whole // 2))
            self._steps = max(1, min(self._steps, whole - self._counted))
        self._began_s = time.monotonic()
        Path(self._request.directory).mkdir(parents=True, exist_ok=True)
        self._recorder.begin([p for _, p in self._learning()])
        if self._request.memory:
            self._kept.open(self._context.state.models)

    def _fit(self, done: int) -> None:
        """``done`` steps are over: as many more are measured as the budget has time for. Collective."""
        step_s = (time.monotonic() - self._began_s) / done
        left = int(self._request.budget_s / step_s) - done
        steps = max(done, min(self._steps, done + left - self._counted))
        self._steps, self._counted = self._context.group.broadcast_object(
            (steps, max(1, min(self._counted, left))), "number of steps to measure"
        )

    def _finish(self) -> None:
        request, context = self._request, self._context
        self._recorder.begin_step(self._steps, begins_pass=False)  # which ends the one before
        sums = time_sums(
            context.group,
            request.sum_bytes,
            exact=context.settings.reduction == "exact",
            budget_s=request.sum_budget_s,
        )
        self._write(tuple(sums))
        raise SystemExit(EXIT_OK)

    def _end_counting(self) -> None:
        if self._counting is not None:
            self._counting.close()

    def _write(self, sums: tuple[tuple[int, float], ...]) -> None:
        self._over = True
        self._end_counting()
        self._kept.close()
        self._recorder.end()
        context, plan = self._context, self._context.plan.plan
        if plan is None:
            return
        models, device, length = context.state.models, context.device, context.position.length
        parameters = [p for model in models for p in model.parameters()]
        learning, gradients = self._learning(), self._recorder.gradients(self._learning())
        asked, has_gradient = self._request.gradients, {gradient.name for gradient in gradients}
        states = [v for o in context.state.optimizers for s in o.state.values() for v in s.values()]
        RankRecord(
            rank=context.group.rank,
            ranks=context.group.size,
            host=socket.gethostname(),
            device=_device_name(device),
            on_gpu=device.type == "cuda",
            threads=context.threads,
            backend=_backend(context),
            strategy=context.settings.strategy,
            precision=context.settings.precision,
            global_batch=plan.global_batch,
            micro_batch=plan.micro_batch,
            steps_per_epoch=length.steps_per_epoch,
            epochs=length.epochs,
            began_at=self._recorder.began_at,
            steps=self._recorder.steps(),
            parameter_bytes=_bytes(parameters),
            gradient_bytes=_bytes([p for p in parameters if p.requires_grad]),
            buffer_bytes=_bytes([b for model in models for b in model.buffers()]),
            optimizer_bytes=_bytes([local_part(v) for v in states if isinstance(v, torch.Tensor)]),
            peak_bytes=_peak_bytes(device),
            activation_bytes=self._kept.total_bytes if self._request.memory else None,
            largest_layer_bytes=max(
                (_bytes(list(layer.parameters())) for m in models for layer in _layers(m)), default=0
            ),
            flops_per_sample=self._flops_per_sample,
            gradients=gradients,
            sums=sums,
            training_steps=length.steps,
            samples_per_epoch=length.samples_per_epoch,
            workers=len(multiprocessing.active_children()),
            free_bytes=free_bytes(device, context.world.local_size),
            unused=tuple(name for name, _ in learning if asked and name not in has_gradient),
            waits=() if self._waits is None else self._waits.found(self._counted),
        ).write(self._request.record(context.group.rank))

    def _learning(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that learn, with their names; of several models with the model's number before."""
        models = self._context.state.models
        return [
            (f"{number}.{name}" if len(models) > 1 else name, parameter)
            for number, model in enumerate(models)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]


class KeptForBackward:
    """The memory that the first forward pass keeps for its backward pass: activations, without parameters."""

    def __init__(self, marker: ProgressMarker) -> None:
        self._marker: Final = marker
        self._seen: dict[int, int] = {}  # bytes by address of the storage
        self._hooks: Any = None
        self._own: set[int] = set()

    @property
    def total_bytes(self) -> int:
        """The bytes that were kept at the same time."""
        return sum(self._seen.values())

    def open(self, models: list[nn.Module]) -> None:
        """Count memory that is kept until a backward pass begins, except tensors of ``models``."""
        self._own = {_address(t) for model in models for t in (*model.parameters(), *model.buffers())}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        self._marker.listeners = (*self._marker.listeners, self._listen)

    def close(self) -> None:
        """Count no more; may be called twice."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)
            self._marker.listeners = tuple(each for each in self._marker.listeners if each != self._listen)

    def _listen(self, marker: ProgressMarker) -> None:
        if marker.phase in ("backward", "reduction"):
            self.close()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if (address := _address(tensor)) not in self._own:
            self._seen[address] = tensor.untyped_storage().nbytes()
        return tensor


def _address(tensor: torch.Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The parts of a model that a dividing strategy gathers one at a time: its children, and the children of lists."""
    children = list(model.children())
    for child in children:
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from _layers(child)
        else:
            yield child
    if not children:
        yield model


def _backend(context: RunContext) -> str:
    if context.group.size == 1:
        return "none"
    return context.group.backend


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_model() or "CPU"


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class HostWaits(TorchFunctionMode):
    """Counts such calls while it is entered, in this thread.

    Args:
        on_gpu: whether the script computes on a GPU: then values of tensors on the CPU are no waits.
        trains: says whether the script trains at this moment; else it does not count.
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
    """The innermost line that is the user's; None if Lockstep itself has called from there."""
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        if is_users(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None
