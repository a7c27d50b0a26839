"""The recorder of the parts of each step's time, by the phases of the rank and the times of its gradients.

    marker   data | forward | reduction                      | update          | data ...
    hooks                    g3 g2 g1 g0
    parts    data   forward   backward   exposed               optimizer  other

The recorder listens to the progress marker, which the loop sets anyway, so that a run without a measurement has no
additional work. Marks are resolved when the steps are over: on a GPU they are events of its stream, for which the host
does not wait.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import torch
from torch import nn

from lockstep.collectives import wait_clock
from lockstep.heartbeat import ProgressMarker
from lockstep.step_record import GradientTime, StepTimes

Part = Literal["begin", "data", "forward", "backward", "exposed", "optimizer", "other", "left out"]

#: The part to which the time in a phase belongs, until its step is counted; "evaluate" and "save" are no part of a
#: step.
_PARTS: Final[dict[str, Part]] = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "reduction": "exposed",
    "update": "optimizer",
}
OUTSIDE: Final = ("evaluate", "save")  #: phases
#: Steps with a hook on each parameter, where only the last gradient is looked for: from then on there is one hook.
_SEARCH_STEPS: Final = 2


class Clock(Protocol):
    """A clock, which marks moments."""

    def now(self) -> object:
        """This moment."""

    def seconds(self, start: Any, end: Any) -> float:
        """The seconds from one moment to another."""


class HostClock(Clock):
    """The clock of the process."""

    def now(self) -> float:
        """Seconds from any beginning."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """From one moment to another."""
        return end - start


class GpuClock(Clock):
    """The clock of a GPU's current stream: marks are queued like kernels, without a wait."""

    def now(self) -> torch.cuda.Event:
        """An event in the stream behind all queued work."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """The seconds from one event to another; the GPU must have reached both."""
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment in a step, and the part to which the time since the mark before belongs."""

    part: Part
    at: Any  #: of the clock
    cpu_s: float = 0.0  #: CPU time of the main thread so far
    waited_s: float = 0.0  #: waits for other ranks so far


@dataclass(slots=True)
class RecordedStep:
    """The marks of one step."""

    step: int
    samples: int
    begins_pass: bool
    marks: list[Mark] = field(default_factory=list)


def step_times(
    recorded: RecordedStep, seconds: Callable[[object, object], float], origin: object, *, on_gpu: bool
) -> StepTimes:
    """The times of a step's parts. All waits for other ranks count as exposed communication. A pure function.

    Args:
        recorded: the step, which begins with a mark ``begin``.
        seconds: between two moments.
        origin: the moment at which the first step began.
        on_gpu: whether the moments are a GPU's, without times of the host.
    """
    by_micro_batch: list[dict[str, float]] = []
    total: dict[str, float] = defaultdict(float)
    cpu_s, before_part = 0.0, "begin"
    marks = recorded.marks
    for before, mark in itertools.pairwise(marks):
        took = seconds(before.at, mark.at)
        waited = 0.0 if mark.part in ("exposed", "left out") else min(took, mark.waited_s - before.waited_s)
        total["exposed"] += waited
        took -= waited
        if mark.part in ("data", "forward", "backward"):
            if not by_micro_batch or (mark.part == "data" and before_part != "data"):
                by_micro_batch.append(defaultdict(float))
            by_micro_batch[-1][mark.part] += took
            cpu_s += mark.cpu_s - before.cpu_s if mark.part != "data" else 0.0
        else:
            total[mark.part] += took
        before_part = mark.part
    return StepTimes(
        step=recorded.step,
        samples=recorded.samples,
        began_s=seconds(origin, marks[0].at),
        begins_pass=recorded.begins_pass,
        data_s=tuple(each["data"] for each in by_micro_batch),
        forward_s=tuple(each["forward"] for each in by_micro_batch),
        backward_s=tuple(each["backward"] for each in by_micro_batch),
        exposed_s=total["exposed"],
        optimizer_s=total["optimizer"],
        other_s=total["other"],
        cpu_s=None if on_gpu else cpu_s,
    )


class StepRecorder:
    """Records the steps of this rank.

    Args:
        marker: of the loop's phases.
        device: of the computation.
        gradients: whether every gradient's time is kept, or only that of the last gradient.
    """

    def __init__(self, marker: ProgressMarker, device: torch.device, *, gradients: bool) -> None:
        self._marker: Final = marker
        self._on_gpu: Final = device.type == "cuda"
        self._clock: Final[Clock] = GpuClock() if self._on_gpu else HostClock()
        self._every_gradient: Final = gradients
        self._steps: list[RecordedStep] = []
        self._open: RecordedStep | None = None
        self._phase = marker.phase
        self._step = marker.step
        self._counted = False  # whether the open step's update is done
        self._backward_began: Any = None
        self._ready: list[tuple[int, Any]] = []  # gradients of this backward pass: places of parameters, and when
        self._ready_times: dict[int, list[tuple[Any, Any]]] = defaultdict(list)  # by place: began, ready
        self._hooks: dict[int, Any] = {}  # by place
        self._restore: Callable[[], None] = lambda: None
        self.began_at = 0.0  #: when the first step began, in seconds since 1970

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Listen from now on; ``parameters`` are the trainable ones."""
        self._restore = wait_clock().count_torchs_own()
        for place, parameter in enumerate(parameters):
            hook = parameter.register_post_accumulate_grad_hook(lambda _, place=place: self._note_ready(place))
            self._hooks[place] = hook
        self._phase, self._step = self._marker.phase, self._marker.step
        self._marker.listeners = (*self._marker.listeners, self._listen)

    def end(self) -> None:
        """Listen no more."""
        self._marker.listeners = tuple(each for each in self._marker.listeners if each != self._listen)
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._restore()
        self._restore = lambda: None

    def begin_step(self, step: int, *, begins_pass: bool) -> None:
        """Begin the step after ``step`` steps."""
        self._close()
        self._open = RecordedStep(step, 0, begins_pass)
        if not self._steps and not self.began_at:
            self.began_at = time.time()
        self._mark("begin")
        self._phase = "script"  # the loop is still on its way to the data

    def note_samples(self, samples: int) -> None:
        """Note the ``samples`` of the open step, over all ranks."""
        if self._open is not None:
            self._open.samples = samples

    def steps(self) -> tuple[StepTimes, ...]:
        """The times of the recorded steps, without an unfinished step."""
        self._synchronize()
        if not self._steps:
            return ()
        origin = self._steps[0].marks[0].at
        return tuple(step_times(each, self._clock.seconds, origin, on_gpu=self._on_gpu) for each in self._steps)

    def gradients(self, named: Sequence[tuple[str, nn.Parameter]]) -> tuple[GradientTime, ...]:
        """When each gradient is ready in a backward pass, median over the steps; in that order."""
        self._synchronize()
        times = [
            GradientTime(
                named[place][0],
                named[place][1].numel() * named[place][1].element_size(),
                statistics.median(self._clock.seconds(*each) for each in seen[_SEARCH_STEPS:] or seen),
            )
            for place, seen in self._ready_times.items()
        ]
        return tuple(sorted(times, key=lambda gradient: gradient.ready_s))

    # ---- what it hears -----------------------------------------------------------------------------------------

    def _listen(self, marker: ProgressMarker) -> None:
        """Record a change of the rank's phase, or a counted step."""
        if marker.step != self._step:
            self._step = marker.step
            if self._open is not None:
                self._mark("optimizer" if self._phase == "update" else self._part())
                self._counted = True
            return
        if self._open is not None:
            self._end_phase()
        self._phase = marker.phase
        if marker.phase in ("backward", "reduction"):
            self._ready.clear()
            self._backward_began = self._clock.now()

    def _end_phase(self) -> None:
        if self._phase in ("backward", "reduction") and not self._counted:
            if self._phase == "reduction" and self._ready:
                # The time after the last gradient is communication that no computation hides.
                self._mark("backward", self._ready[-1][1])
            if self._ready:
                self._keep_ready()
            self._mark("exposed" if self._phase == "reduction" and self._ready else "backward")
        else:
            self._mark(self._part())

    def _part(self) -> Part:
        if self._phase in OUTSIDE:
            return "left out"
        return "other" if self._counted else _PARTS.get(self._phase, "other")

    def _mark(self, part: Part, at: object = None) -> None:
        assert self._open is not None
        waited_s, cpu_s = (0.0, 0.0) if self._on_gpu else (wait_clock().seconds, time.thread_time())
        if at is not None:  # a past moment, whose other clocks are not known
            waited_s = self._open.marks[-1].waited_s
        self._open.marks.append(Mark(part, self._clock.now() if at is None else at, cpu_s, waited_s))

    def _close(self) -> None:
        """Close the open step if it was counted, else drop it."""
        if self._open is not None and self._counted:
            self._mark("other" if self._phase not in OUTSIDE else "left out")
            self._steps.append(self._open)
            if not self._every_gradient and len(self._steps) == _SEARCH_STEPS:
                self._keep_last_hook()
        self._open, self._counted = None, False

    def _note_ready(self, place: int) -> None:
        self._ready.append((place, self._clock.now()))

    def _keep_ready(self) -> None:
        if self._every_gradient:
            for place, at in self._ready:
                self._ready_times[place].append((self._backward_began, at))

    def _keep_last_hook(self) -> None:
        """Remove all hooks, which cost a microsecond each, except that of the gradient that came last."""
        last = self._ready[-1][0] if self._ready else None
        for place in [place for place in self._hooks if place != last]:
            self._hooks.pop(place).remove()

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
