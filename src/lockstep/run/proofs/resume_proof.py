"""The proof of a resume: its first step must have the bits of the step after the checkpoint, else the run ends.

    a checkpoint is saved      what the script's variables hold is recorded, see `LeftScript`: the run may stop here
    it goes on                 the next step is recorded instead, which is made anyway:
      where it begins            what variables of the script hold, see `script_state`
      each micro-batch           a checksum of its samples, and its losses, on the rank that has it
      the update                 options of optimizers; sums of the bits of each parameter and buffer, which ranks
                                 bring together
      the end of the body        options and sums again, and tensors of what is kept
                               the leader writes the record beside the checkpoint
    a run resumes from it      its first step is also recorded, and compared with what there is
    a rank is lost             the others leave what the script's variables hold with the state of the last step, and
                               the next generation compares its own when that step begins again

So state that the script needs and no checkpoint holds is found, if it matters in this step: a teacher, a schedule, a
counter. Records are by a micro-batch's index and a tensor's name, so that worlds and strategies may differ.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from lockstep import __version__
from lockstep.batch import MicroBatchPosition
from lockstep.checkpoint import StateTree
from lockstep.collectives import TensorShard
from lockstep.data import Data, checksum
from lockstep.errors import CheckpointError, MismatchError
from lockstep.formatting import format_ranks, some_of
from lockstep.provenance import cpu_model
from lockstep.run.checks.divergence import plain_in, schedulers_in, tensors_in
from lockstep.run.proofs.script_state import Lost, lost, plain_values, script_state, without
from lockstep.run.recovery.survivor import leaves_state
from lockstep.run.setup.identity import device_of_bits, optimizers_of
from lockstep.run.setup.run_context import RunContext
from lockstep.strategies import ServerStrategy
from lockstep.strategy_kinds import kind_of, split

#: Relative difference of losses that other kernels may give, where a step need not have the same bits when repeated.
_NEAR: Final = 1e-3
_MOST_LISTED: Final = 10  # variables of the script
_MOST_REASONS: Final = 3


class _Difference(NamedTuple):
    """A difference between a step and its record."""

    text: str
    lost: str  #: state that may be in no checkpoint
    size: float = math.inf  #: of a loss, relative to it; 0 for other computed values


_OF_SCRIPT: Final = (
    "weights that the script holds by itself, such as the best ones, those before an epoch, an average, or a list of "
    "models, in a variable that it makes again"
)
_OF_INPUT: Final = "a variable of the script, on which a later step depends"
_OF_SAMPLES: Final = "what the data set, its sampler or order= depends on, such as labels or a count of epochs"
_OF_LOSS: Final = (
    "what the loss is computed from: a model beside run.model(...), such as a teacher or an average of the weights; a "
    "schedule, a temperature or a counter of the script; or another object in place of that which run.keep(...) was "
    "given (write into that: copy_(...), list[:] = ...)"
)
_OF_UPDATE: Final = (
    "what the update is computed from: a counter or a list in an attribute of the optimizer (what is in its state is "
    "saved), or what the script does with gradients and weights"
)
_OF_BODY: Final = (
    "what the script sets that from, such as a scheduler, what a scheduler is given (a loss that the script adds up "
    "itself), a decay that depends on a counter, or weights of its own that it writes into the model"
)


class LeftScript:
    """A context in which the script is where a run may end, or be saved, that goes on at this place.

    It notes what the script holds where a rank that was lost ends the run there, so that a state is left.

    Args:
        context: of the run.
        conditions: gives the conditions of the step's bits.
    """

    def __init__(self, context: RunContext, conditions: Callable[[], list[str]]) -> None:
        self._context: Final = context
        self._conditions: Final = conditions
        #: The steps done, and what is compared when the next one begins again; None: nothing is to be compared.
        self.held: tuple[int, StateTree] | None = None
        self.is_entered = False

    def __enter__(self) -> None:
        self.is_entered = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.is_entered, context = False, self._context
        # Over NCCL a lost rank leaves a kernel that never ends, and weights on the GPU cannot be looked at.
        leaves = context.emergency.notes or context.settings.mirror
        if error is None or not (leaves and context.settings.replay and leaves_state(error)):
            return
        # A script's objects may be anything, and the error that ends the run is the one to tell.
        with contextlib.suppress(Exception):
            self.held = context.position.progress.step, self.now()

    def now(self) -> StateTree:
        """What is compared where the run goes on from here, in the same pass or turn; asks no other rank."""
        context = self._context
        return {
            "conditions": self._conditions(),
            "script": script_state(
                _outer_loop(sys._getframe(), context), context.state, context.inputs.calls, waits=context.group.over_cpu
            ),
            "pass": context.position.passes.open_pass,
        }


def _outer_loop(frame: FrameType, context: RunContext) -> FrameType:
    """The frame of the function with the outer loop, from ``frame`` outward; ``frame`` itself without such a loop.

    Functions within are others in the middle of a body than at its beginning.
    """
    caller, each = context.position.passes.caller, frame
    while each.f_code is not caller and each.f_back is not None:
        each = each.f_back
    return each if each.f_code is caller else frame


class ResumeProof:
    """Records the step after each save, and compares the first step after a resume.

    Other steps cost nothing; in these two steps, ranks meet once more, and wait for the GPU.

    Args:
        context: of the run.
    """

    def __init__(self, context: RunContext) -> None:
        self._context: Final = context
        self._checkpointer: Final = context.checkpointer
        self._settings: dict[str, str] | None = None  # what the leader's script held when its training began
        self._place: list[int | str] | None = None  # where the script was looked at; None: not since the last step
        self._script: StateTree = {}  # values that the leader's script held there
        self._samples: dict[str, int] = {}  # checksums by the index of the micro-batch
        self._expected: StateTree | None = None  # of the first step after a resume
        self._file = Path()  # of this record
        self._saved: int | None = None  # the step whose checkpoint waits for the next step's record
        self._own: dict[str, dict[str, Any]] | None = None  # record of this step, or of the first after a resume
        self._noted = False  # a difference was reported, so no second one needs to be
        self.left_script: Final = LeftScript(context, self._conditions)
        self._is_left = False  # whether the expected values are those that the script held, without a step after them
        self._is_survivors = False  # and a survivor has left them

    def saved(self, step: int) -> None:
        """Record the next step, since the state after ``step`` is being saved. All ranks must call `saved`.

        Until that step is over, the record is what the script holds now: the run may stop here.
        """
        if self._context.settings.replay:
            self._saved = step
            self._listen()
            if self.left_script.is_entered and self._context.group.leads:
                now = self.left_script.now()
                # A value as it was when the training began is no state but a setting, which a user may change.
                without(now["script"], self._settings or {})
                self._checkpointer.note_next_step(step, now)

    def resumed(self, left: Mapping[str, Any] | None) -> None:
        """Compare the first step after a resume, if the step after the checkpoint was recorded.

        Collective.

        Args:
            left: what a survivor has left with the state that the run resumes from, see `LeftScript`; None for a
                checkpoint.
        """
        if self._context.settings.replay:
            self._file, self._expected = self._checkpointer.next_step()
            if left is not None:
                self._expected, self._is_survivors = {**left}, True
        if self._expected is not None:
            self._is_left = "samples" not in self._expected
            self._listen()

    def samples(self, position: MicroBatchPosition, data: Data) -> None:
        """Record checksums of ``data``, the micro-batch at ``position``, if the step is recorded."""
        if self._context.metrics.losses is None:
            return
        if self._place is None:  # no body of the step has begun, also not of a replay
            self._look_at_script(sys._getframe())
        if not (position.is_padding or position.is_replay):
            self._samples[str(position.index)] = checksum(data)

    def step_is_done(self) -> None:
        """Note the values of the step, after the optimizers' steps, if the step is to be recorded or compared."""
        losses, self._context.metrics.losses = self._context.metrics.losses, None
        if losses is not None:
            self._own = {
                "script": self._script,
                "samples": self._samples,
                "losses": {str(index): [float(value).hex() for value in each] for index, each in losses.items()},
                "options": self._options(),
                "state": self._sums() if self._bits else {},
            }
            self._samples, self._script = {}, {}

    def training_begins(self) -> None:
        """Note what the script has set before the training begins, or goes on."""
        context = self._context
        if self._settings is None and context.directory and context.settings.replay and context.group.leads:
            self._settings = plain_values(_outer_loop(sys._getframe(), context), context.state)

    def comes_to_pass(self) -> None:
        """Look at the script, which begins a turn of the outer loop or goes on in a pass, if it was left there."""
        left = self._expected if self._is_left else None
        if left is not None and left.get("pass") == self._context.position.passes.open_pass:
            self._look_at_script(_outer_loop(sys._getframe(), self._context))

    def _look_at_script(self, frame: FrameType) -> None:
        self._place, self._script = self._context.position.passes.open_pass, self._script_of(frame)

    def _script_of(self, frame: FrameType) -> StateTree:
        """What the leader's script holds, whose functions run from ``frame`` outward; empty on other ranks."""
        context = self._context
        return script_state(frame, context.state, context.inputs.calls) if context.group.leads else {}

    def body_is_over(self, compare_ranks: Callable[[], None]) -> None:
        """Record or compare the step at the end of its body, if it is to be. Collective then.

        Args:
            compare_ranks: called before the step is recorded. If ranks differ, the leader's step may be the wrong one,
                whose bits no resume from the checkpoint could have.

        Raises:
            CheckpointError: on all ranks, if the step is not the one that followed the checkpoint.
        """
        own, self._own = self._own, None
        saved, self._saved = self._saved, None
        expected, self._expected = self._expected, None
        place, self._place = self._place, None
        if own is None:
            return
        own["options after"] = self._options() if self._bits else {}
        own["kept after"] = self._kept() if self._bits and self._context.group.leads else {}
        own["state after"] = self._sums() if self._bits else {}
        own["script after"] = {} if expected is None else self._script_of(_outer_loop(sys._getframe(), self._context))
        parts = self._context.group.gather_objects(own, "the step after a checkpoint")
        found: StateTree = {
            "conditions": self._conditions(),
            "script": parts[0]["script"],
            "samples": _together(part["samples"] for part in parts),
            "losses": _together(part["losses"] for part in parts),
            "options": parts[0]["options"],
            "state": _added(part["state"] for part in parts),
            "after": parts[0]["options after"] | parts[0]["kept after"] | _added(part["state after"] for part in parts),
        }
        if expected is not None and expected.get("pass") in (None, place):
            of_script = lost(expected.get("script", {}), found["script"], parts[0]["script after"])
            self._refuse(_first_difference(expected, found, of_script), some_of(of_script.plain, _MOST_LISTED))
        if saved is not None:
            if self._context.share.in_step:
                _require_alike([part["options"] | part["options after"] for part in parts], saved + 1)
            compare_ranks()
            self._checkpointer.note_next_step(saved, found)

    def _listen(self) -> None:
        self._samples, self._script, self._place = {}, {}, None
        self._context.metrics.losses = {}

    def _refuse(self, difference: _Difference | None, begun_anew: str) -> None:
        """End the run if there is a ``difference``, equal on all ranks. Collective then.

        Without a difference, the user is told of the script's variables that have ``begun_anew``.
        """
        context = self._context
        if difference is None and begun_anew:
            had = "If" if self._is_left else "The step after the resume had the same bits all the same; if"
            context.reporter.say(
                f"variables of the script have begun anew, for they are in no checkpoint: {begun_anew}. {had} "
                "something later depends on one of them, such as when the training ends, or a schedule, give it to "
                "run.keep(...)"
            )
        if difference is None or self._noted:
            return
        self._noted = True
        text = difference.text
        first = "the first step after the resume is not the one that followed the checkpoint"
        on_purpose = f"If it was changed on purpose, remove {self._file} and resume again; if"
        if self._is_left:
            first = "the script does not go on with the values that it held when the checkpoint was saved"
        if self._is_survivors:
            first, on_purpose = "the step in which a rank was lost does not begin again as it began then", "If"
        if context.group.broadcast_object(self._checkpointer.differs, "what has changed since the checkpoint"):
            context.reporter.say(f"{first}: {text}. What has changed since is said above")
        elif difference.size < _NEAR and not self._repeats:
            context.reporter.say(
                f"{first}, bit for bit: {text}. Kernels that add in any order may be the reason, or something that is "
                f"in no checkpoint: {difference.lost}"
            )
        else:
            variables = f" (variables that have begun anew: {begun_anew})" if begun_anew else ""
            raise CheckpointError(
                f"{first}: {text}. Something is in no checkpoint: {difference.lost}{variables}. Keep it with "
                f"run.keep(...), a scheduler with run.scheduler(...), and start over with --fresh. {on_purpose} the "
                "script is so by design, as where it steps an environment, Run(replay=False) leaves this check out"
            )

    @property
    def _bits(self) -> str:
        """The worlds in which a step has the same bits as in this run; "": none, not even this."""
        context = self._context
        settings = context.settings
        kind, options = kind_of(settings.strategy), split(settings.strategy)[1]
        if settings.reduction != "exact" or not context.share.in_step or "compress" in options:
            return ""
        if kind.same_bits and options.keys() <= kind.keeps_bits and not settings.sync_batchnorm:
            return "any"
        return f"{settings.strategy} on {context.group.size}"

    @property
    def _repeats(self) -> bool:
        """Whether a repeated step has the same bits, as far as known of its kernels."""
        settings = self._context.settings
        on_cpu = self._context.device.type == "cpu"
        return not settings.compile if on_cpu else settings.nondeterministic == "refuse"  # see `Kernels`

    def _conditions(self) -> list[str]:
        """Conditions of the bits in addition to the run's identity, which is compared anyway."""
        device = self._context.device
        return [__version__, self._bits, _cpu() if device.type == "cpu" else device_of_bits(device, os.environ)]

    def _sums(self) -> dict[str, int]:
        """This rank's part of the sums of bits, by names of parameters and buffers. Collective if the layout is."""
        context = self._context
        if isinstance(context.strategy, ServerStrategy):
            return {}
        held: dict[str, tuple[torch.Tensor, int]] = {}
        models = context.state.models
        for number, model in enumerate(models):
            for name, value in context.strategy.state_layout.model_state(model).items():
                key = name if len(models) == 1 else f"{name} of model {number}"
                if isinstance(value, TensorShard) and value.tensor is not None:
                    held[key] = value.tensor, value.start[0] if value.start else 0
                elif isinstance(value, torch.Tensor) and context.group.leads:
                    held[key] = value, 0
        return bit_sums(held)

    def _options(self) -> dict[str, str]:
        """Options of optimizers, and plain values of kept schedulers, by descriptive names."""
        state, found = self._context.state, dict[str, str]()
        for kind, groups in optimizers_of(state.optimizers):
            for number, options in enumerate(groups):
                found |= {f"{name} of {kind}'s group {number}": text for name, text in options.items()}
        kept = {name: value.state_dict() for name, value in state.kept.items()}
        return found | {name: repr(value) for name, value in plain_in(schedulers_in(kept))}

    def _kept(self) -> dict[str, int]:
        """Sums of kept tensors."""
        kept = {name: value.state_dict() for name, value in self._context.state.kept.items()}
        tensors = {f"run.kept.{name}": (each, 0) for name, each in tensors_in(kept) if not hasattr(each, "to_local")}
        return bit_sums(tensors)


def _require_alike(options: Sequence[Mapping[str, str]], step: int) -> None:
    """Check that the ``options`` of all ranks are equal after ``step`` steps.

    Raises:
        MismatchError: naming the first option that differs, and the ranks.
    """
    for name in options[0]:
        values = [each.get(name) for each in options]
        common = max(values, key=values.count)
        if odd := [rank for rank, value in enumerate(values) if value != common]:
            raise MismatchError(
                f"ranks hold different values after step {step}: {name} is {values[odd[0]]} on {format_ranks(odd)}, "
                f"and {common} on the others. Something sets it on some ranks only, such as a decision by what a rank "
                "sees by itself; the next resume begins before that"
            )


def bit_sums(held: Mapping[str, tuple[torch.Tensor, int]]) -> dict[str, int]:
    """For each tensor a sum over its bits as numbers, weighed by their rows; waits for the GPU.

    Different bits, or rows in another order, give different sums; sums of a tensor's parts add up to that of the whole.

    Args:
        held: tensors, or parts of tensors, each with the number of its first row. Tensors that are not dense are left
            out.
    """
    sums = {
        name: _bit_sum(tensor.detach(), first)
        for name, (tensor, first) in held.items()
        if tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
    }
    waiting = {name: value for name, value in sums.items() if isinstance(value, torch.Tensor)}
    if waiting:
        numbers = torch.stack([value.cpu() for value in waiting.values()]).tolist()
        sums |= dict(zip(waiting, numbers, strict=True))
    return {name: int(value) & _MASK for name, value in sums.items()}


_MASK: Final = (1 << 64) - 1
_WHOLE: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bit_sum(tensor: torch.Tensor, first: int) -> int | torch.Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.view(_WHOLE[tensor.element_size()])
    bits = bits if bits.dim() else bits.view(1)
    if bits.device.type == "cpu":  # NumPy adds eight times as fast
        array = bits.numpy()
        rows = np.add.reduce(array, axis=tuple(range(1, array.ndim)), dtype=np.int64)
        return int((rows * (2 * np.arange(first, first + len(rows), dtype=np.int64) + 1)).sum())
    sums = bits.flatten(1).sum(1, dtype=torch.int64) if bits.dim() > 1 else bits.long()
    return (sums * (2 * torch.arange(first, first + len(sums), device=sums.device) + 1)).sum()


def _together(parts: Iterator[Mapping[str, object]]) -> dict[str, object]:
    found = {index: value for part in parts for index, value in part.items()}
    return {index: found[index] for index in sorted(found, key=int)}


def _added(parts: Iterator[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = (total.get(name, 0) + value) & _MASK
    return total


def _other(before: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """The first name in both mappings whose values differ."""
    return next((name for name, value in before.items() if now.get(name, value) != value), None)


def _first_difference(before: StateTree, now: StateTree, of_script: Lost) -> _Difference | None:
    """The first difference, in the order of a step's events, with values that the script's variables have lost."""
    weights = of_script.weights if _has_same_bits(before, now) else []
    lost = [*(f"{name} held other weights when it began" for name in weights), *of_script.inputs]
    difference = _difference_of_step(before, now)
    if difference is not None:
        reasons = f" ({'; '.join(lost[:_MOST_REASONS])})" if lost else ""
        return difference._replace(text=f"{difference.text}{reasons}")
    if not _has_same_bits(before, now):
        return None
    if of_script.weights:
        return _Difference(f"{', '.join(of_script.weights)} held other weights when it began", _OF_SCRIPT)
    if of_script.inputs:
        return _Difference(", and ".join(of_script.inputs), _OF_INPUT)
    return None


def _has_same_bits(before: StateTree, now: StateTree) -> bool:
    """Whether the step must have the same bits as the recorded step."""
    return bool(before["conditions"] == now["conditions"] and now["conditions"][1])


def _difference_of_step(before: StateTree, now: StateTree) -> _Difference | None:
    if "samples" not in before:
        return None  # left by a survivor, whose step was not done, see `LeftScript`
    if len(before["samples"]) != len(now["samples"]):
        counts = f"had {len(before['samples'])} micro-batches, and has {len(now['samples'])} now"
        return _Difference(f"it {counts}", _OF_SAMPLES)
    if (index := _other(before["samples"], now["samples"])) is not None:
        return _Difference(f"micro-batch {index} holds other samples", _OF_SAMPLES)
    if not _has_same_bits(before, now):
        return None
    if (index := _other(before["losses"], now["losses"])) is not None:
        old, new = ([float.fromhex(loss) for loss in each["losses"][index]] for each in (before, now))
        if len(old) != len(new):
            return _Difference(f"micro-batch {index} had {len(old)} losses, and has {len(new)} now", _OF_LOSS)
        was, is_now = next((one, other) for one, other in zip(old, new, strict=True) if one != other)
        text = f"the loss of micro-batch {index} was {was:.9g}, and is {is_now:.9g} now, of the same samples"
        return _Difference(text, _OF_LOSS, _relative(was, is_now))
    if (name := _other(before["options"], now["options"])) is not None:
        values = f"was {before['options'][name]}, and is {now['options'][name]} now"
        size = _relative_of_texts(before["options"][name], now["options"][name])
        return _Difference(f"{name} {values}, in the update", _OF_BODY, size)
    if (name := _other(before["state"], now["state"])) is not None:
        return _Difference(f"{name} has other values after the update, with the same samples and losses", _OF_UPDATE, 0)
    if (name := _other(before["after"], now["after"])) is not None:
        was, is_now = before["after"][name], now["after"][name]
        is_text = isinstance(was, str)
        values = f"was {was} at the end of the body, and is {is_now} now" if is_text else "has other values at its end"
        return _Difference(f"{name} {values}", _OF_BODY, _relative_of_texts(was, is_now) if is_text else 0)
    return None


def _relative(was: float, is_now: float) -> float:
    """The relative difference of two numbers; infinite where one is not finite."""
    size = abs(is_now - was) / max(abs(was), abs(is_now), math.ulp(0))
    return size if math.isfinite(size) else math.inf


def _relative_of_texts(was: str, is_now: str) -> float:
    """The same of two numbers in texts; infinite for other texts, which no kernel computes."""
    try:
        return _relative(float(was), float(is_now))
    except ValueError:
        return math.inf


@cache
def _cpu() -> str:
    """The kind of the CPU, on whose instructions the bits depend."""
    return f"{cpu_model()} {torch.backends.cpu.get_cpu_capability()}"
