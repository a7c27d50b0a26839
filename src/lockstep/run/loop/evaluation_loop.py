"""The evaluation loop: every sample of a data set once, over all ranks, with models that stay unchanged."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterable, Iterator
from types import CodeType
from typing import Final

import torch
from torch import nn

from lockstep.data import Data, MicroBatchLoader, TorchLoader
from lockstep.errors import UsageError
from lockstep.run.batches.loaders import Loaders
from lockstep.run.inputs.training_inputs import carried_between_batches
from lockstep.run.loop.end_of_step import EndOfStep
from lockstep.run.loop.train_step import TrainStep
from lockstep.run.setup.resume import TrainingStart
from lockstep.run.setup.run_context import RunContext
from lockstep.run.source.reachable import script_frames
from lockstep.run.state.snapshot import RunSnapshot
from lockstep.run.state.training_modes import modes_of, restore
from lockstep.seeding import seed_generators, seed_of
from lockstep.strategies import LossStrategy, ServerStrategy, same
from lockstep.torch_private import own_buffers, version_of

#: On a CPU, buffers up to this size in bytes are compared by value after each micro-batch, about 10 us; for larger
#: buffers a change through ``.data`` or by a kernel is found at the end.
_SMALL_BYTES = 1 << 18


class EvaluationLoop:
    """Hands out the micro-batches of an evaluation."""

    def __init__(
        self,
        context: RunContext,
        loaders: Loaders,
        start: TrainingStart,
        train_step: TrainStep,
        end_of_step: EndOfStep,
        snapshot: RunSnapshot,
    ) -> None:
        self._context: Final = context
        self._state: Final = context.state
        self._loaders: Final = loaders
        self._start: Final = start
        self._train_step: Final = train_step
        self._end_of_step: Final = end_of_step
        self._snapshot: Final = snapshot
        self._position: Final = context.position
        self._metrics: Final = context.metrics
        self._save_stop: Final = context.save_stop
        self._said_put_back = False  # of buffers that moved in an evaluation
        self._read: Final[set[tuple[CodeType, ...]]] = set()  # the running functions of each loop whose source was read

    def evaluate(self, data_loader: TorchLoader) -> Generator[Data]:
        """The micro-batches of this rank, each sample once over all ranks; then metrics are reduced. Collective."""
        self._start.begin()
        loader = self._loaders.find(data_loader, "evaluate")
        if self._context.transcript is not None and not self._context.transcript.evaluates:
            return
        in_body = self._metrics.inside == "train"
        if in_body:
            self._require_complete_step()
        else:
            self._metrics.refuse_nested("evaluate")
            self._end_of_step.finish_left()
        self._snapshot.compare_models()
        # Where a step's end is still to come, decisions to save or stop wait for that end: a run stops where a resume
        # can go on.
        waits = self._end_of_step.waits
        called: dict[str, torch.Tensor] = {}
        with self._evaluation_mode(in_body=in_body):
            self._end_of_step.show("evaluating")
            try:
                yield from self._micro_batches(loader, called, may_leave_early=not waits)
            except GeneratorExit:
                if names := self._metrics.evaluate.names:
                    self._context.warnings.add(
                        f"the loop over run.evaluate(...) was left before its end, so {', '.join(names)} is not in "
                        "run.metrics: how far ranks have come is different for each number of ranks. For fewer samples "
                        "make a loader of them: run.loader(torch.utils.data.Subset(data, range(n)), ...)",
                        about="an evaluation that was left",
                    )
                self._context.leaves.leave("left the loop over run.evaluate(...)", self._position.progress.step)
                raise
        if self._context.directory and not waits:
            self._end_of_step.carry_out(self._save_stop.after_evaluation())
        self._snapshot.compare_called(called)
        self._position.set_metrics(self._metrics.evaluate.reduce(self._context.group), keep_after=-1)
        if in_body:
            self._position.evaluations_done = self._position.evaluations
            # As at the beginning of a pass: strategies start from the values that models hold now.
            self._context.strategy.resync()
        if not self._start.resumes_within_turn:
            self._end_of_step.save_if_best()
        self._end_of_step.show("training")

    def _require_complete_step(self) -> None:
        current = self._train_step.current
        if isinstance(self._context.strategy, ServerStrategy):
            raise UsageError(
                "run.evaluate(...) in the body of run.train(...): under this strategy some ranks serve the others, and "
                "have no body; leave the loop by break and evaluate after it, in the loop of run.epochs(n) or "
                "run.steps(n, every=...)"
            )
        if current is None or not current.complete:
            where = "" if current is None else f", on micro-batch {current.position.index} of {current.position.of}"
            raise UsageError(
                f"run.evaluate(...) in the middle of step {self._position.progress.step + 1}{where}, where "
                "ranks run the loop's body different numbers of times: write `if run.step(loss) and run.progress.step "
                "% 500 == 0:` before it, which is true once a step on every rank, or leave the loop by break"
            )
        self._train_step.checks.require_buffers_unchanged()

    @contextlib.contextmanager
    def _evaluation_mode(self, *, in_body: bool) -> Iterator[None]:
        """A context in which modules are in evaluation mode; afterwards modes and random generators are as before."""
        kept = [value for value in self._state.kept.values() if isinstance(value, nn.Module)]  # such as an average
        modes = modes_of((*self._state.models, *kept))
        for root, _ in modes:
            root.eval()
        phase = self._context.marker.set_phase("evaluate")
        self._context.precision.forget_casts()  # the script may have exchanged weights in the body
        try:
            with (
                self._metrics.evaluating(),
                self._context.carried.out_of_reach(),
                self._state.beside.evaluating(self._context.group.size),
            ):
                yield
        finally:
            self._context.marker.set_phase(phase if in_body else "script")
            for root, of_modules in modes:
                restore(root, of_modules)
            self._position.seed_script("body" if in_body else "outside")
            if in_body:
                self._train_step.checks.note_buffers()

    def _micro_batches(
        self, loader: MicroBatchLoader, called: dict[str, torch.Tensor], *, may_leave_early: bool
    ) -> Generator[Data]:
        """Hand out the micro-batches; ``called`` gets checksums of other modules, see `BesideModules.noting`."""
        context, position = self._context, self._position
        seed_key = (context.settings.seed, "evaluate", position.progress.step, position.evaluations)
        position.evaluations += 1
        may_leave_early &= self._loaders.may_leave_early(loader) and not isinstance(context.strategy, LossStrategy)
        with context.strategy.evaluating(), self._buffers() as buffers:
            for number, (at, data) in enumerate(self._loaders.evaluation(loader)):
                if number == 0:
                    self._require_batches_apart()
                self._metrics.hand_out(at)
                seed_generators(seed_of(*seed_key, at.step, at.index))
                context.marker.set_phase("evaluate")
                self._train_step.say_put_back(context.kernels.pin_threads())
                looks = number == 0 and context.settings.replay
                if looks:
                    context.inputs.body_begins(sys._getframe())
                noting = self._state.beside.noting(called) if looks else contextlib.nullcontext()
                with torch.no_grad(), context.precision.forward(), noting:
                    yield data
                if looks:
                    context.inputs.evaluated(sys._getframe(), all_bodies=False)
                context.kernels.require_threads("the body of an evaluation")
                buffers.put_back()
                if may_leave_early and self._save_stop.stop_pending():
                    break
        context.inputs.evaluated(sys._getframe(), all_bodies=True)

    def _require_batches_apart(self) -> None:
        """Check by the source, once for each way to a loop, that no measured value depends on another batch."""
        if not self._context.settings.replay:
            return
        codes = tuple(frame.f_code for frame in script_frames(sys._getframe()))
        if codes in self._read:
            return
        self._read.add(codes)
        if carried := carried_between_batches(sys._getframe(), self._state, self._context.reporter.say):
            raise UsageError(
                f"in the loop over run.evaluate(...), {carried}: by this rank's batches, and other numbers of ranks "
                "have others. Measure each batch by itself; collect what is needed of all in a list, and give that to "
                "run.gather(...) after the loop. Run(replay=False) leaves this check out"
            )

    @contextlib.contextmanager
    def _buffers(self) -> Iterator[EvaluationBuffers]:
        """A context after which the models' buffers have their earlier values; changed buffers are reported once."""
        buffers = EvaluationBuffers(self._state.models)
        try:
            yield buffers
        finally:
            buffers.put_back(by_value=True)
            if buffers.moved and not self._said_put_back:
                self._said_put_back = True
                self._context.reporter.say(
                    f"run.evaluate(...): the model changes {', '.join(sorted(buffers.moved)[:3])} in evaluation, by "
                    "whatever samples a rank has; put back after each micro-batch. Statistics are estimated anew in a "
                    "loop over the loader itself, as torch.optim.swa_utils.update_bn(loader, model) has it"
                )


class EvaluationBuffers:
    """The buffers of ``models``, put back to their values from before after each micro-batch of an evaluation.

    Else the results of a micro-batch would depend on the rank's earlier micro-batches, and ranks would diverge.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        modules = dict.fromkeys(module for model in models for module in model.modules())
        self._homes = [
            (module, name, buffer)
            for module in modules
            for name, buffer in own_buffers(module).items()
            if buffer is None or not buffer.is_meta  # not those of another rank's stage
        ]
        self._before = [None if b is None else b.detach().clone() for _, _, b in self._homes]
        self._versions = [None if b is None else version_of(b) for _, _, b in self._homes]
        held = [b for b in self._before if b is not None]
        self._small = (
            all(b.device.type == "cpu" for b in held)
            and sum(b.numel() * b.element_size() for b in held) <= _SMALL_BYTES
        )
        self.moved: set[str] = set()  #: names of those that were put back

    def put_back(self, *, by_value: bool = False) -> None:
        """Put back all changed buffers; with ``by_value``, also buffers whose version counter shows no change."""
        for place, ((module, name, buffer), before) in enumerate(zip(self._homes, self._before, strict=True)):
            here = own_buffers(module).get(name)
            if here is buffer and (buffer is None or before is None or self._is_unmoved(place, buffer, by_value)):
                continue
            self.moved.add(f"{name} of {type(module).__name__}")
            own_buffers(module)[name] = buffer
            if buffer is not None and before is not None:
                with torch.no_grad():
                    buffer.copy_(before)
                self._versions[place] = version_of(buffer)

    def _is_unmoved(self, place: int, buffer: torch.Tensor, by_value: bool) -> bool:
        if not (by_value or self._small):
            return version_of(buffer) == self._versions[place]
        before = self._before[place]
        return before is None or same(buffer, before)
