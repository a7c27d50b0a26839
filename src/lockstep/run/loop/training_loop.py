"""The training loop: turns of the outer loop, micro-batches of each pass over a data set, losses and updates.

    the script                        the loop (generators, one within the other)
    for x, y in run.train(data):      _pass             opens the pass, or goes on in the one of a checkpoint
                                        _micro_batches  for each step: what `step_data` reads for this rank
         ▲    x, y                        _body         seeds the random numbers and hands out the micro-batch: `yield`
         └──────────────────────────────────┘
        run.step(loss)                step              within that `yield`: `train_step` computes gradients
                                          _body         goes on when the script asks for the next micro-batch
                                        _micro_batches  after the last one of the step: `end_of_step`

`micro_batches` is the iterator that the script holds; it hands on what `_pass` yields, and knows the length.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import Final

from lockstep.batch import MicroBatchPosition, StepCheck
from lockstep.data import Data, MicroBatchLoader, TorchLoader
from lockstep.errors import CheckpointError, LockstepError, UsageError
from lockstep.launch_contract import EXIT_OK
from lockstep.run.batches.loaders import Loaders, refuse_uneven
from lockstep.run.batches.micro_batches import LeftOutSamples, MicroBatches, refuse_count
from lockstep.run.loop.end_of_step import EndOfStep
from lockstep.run.loop.epochs import OuterLoop
from lockstep.run.loop.parameter_sets import Optimizers
from lockstep.run.loop.step_data import StepData
from lockstep.run.loop.train_step import Count, CurrentMicroBatch, Loss, LossKind, TrainStep
from lockstep.run.proofs.replay import SAMPLES, ReplayError
from lockstep.run.proofs.replay_series import ReplaySeries
from lockstep.run.proofs.script_snapshot import ReplayEffects
from lockstep.run.setup.resume import TrainingStart
from lockstep.run.setup.run_context import RunContext
from lockstep.run.source.reachable import changed, look, script_roots
from lockstep.run.source.script_modules import says
from lockstep.seeding import seed_generators, seed_of
from lockstep.strategies import ServerStrategy


class TrainingLoop:
    """Hands out the micro-batches of each pass, and turns the losses of the script into steps."""

    def __init__(
        self,
        context: RunContext,
        loaders: Loaders,
        start: TrainingStart,
        train_step: TrainStep,
        end_of_step: EndOfStep,
    ) -> None:
        self._context: Final = context
        self._state: Final = context.state
        self._loaders: Final = loaders
        self._start: Final = start
        self._train_step: Final = train_step
        self._end_of_step: Final = end_of_step
        self._position: Final = context.position
        self._passes: Final = context.position.passes
        self._metrics: Final = context.metrics
        self._carried: Final = context.carried
        self._save_stop: Final = context.save_stop
        self._replay_effects: Final = ReplayEffects()
        self._data: Final = StepData(context, loaders, end_of_step)
        self._left_out: Final = LeftOutSamples()
        self._series: Final = ReplaySeries(context, train_step, self._handing_out)
        self._notes_lists = False  # as the bodies of this pass begin
        self._handed_out = -1  # the place of the micro-batch before in its step
        self._generator: weakref.ref[Generator[Data]] | None = None  # of the pass that the script is in

    # ---- the outer loop ------------------------------------------------------------------------------------------

    def epochs(self, epochs: int, caller: CodeType) -> Iterator[int]:
        """See `Run.epochs`; ``caller`` is the calling function."""
        self._start.begin()
        # Else a rank that has less to do would leave the loop, and the others would wait for it.
        self._context.group.check_equal("the length given to run.epochs(...)", epochs)
        position, passes = self._position, self._passes
        position.length.epochs, position.length.steps = epochs, None
        if position.progress.epoch < epochs and not position.ended:
            self._enter("epochs", caller)
            while position.progress.epoch < epochs:
                self._begin_turn()
                seed_generators(seed_of(self._context.settings.seed, "epoch", position.progress.epoch))
                yield position.progress.epoch
                self._end_turn()
                # A step whose loop was left by `break` ends in the next epoch: a resume does not go on in the old
                # epoch.
                position.progress = position.progress.after_epoch()
                position.begin_turn()
                with self._end_of_step.proof.left_script:
                    self._end_of_step.finish_turn()
                    self._end_of_step.carry_out(self._save_stop.after_epoch(position.progress.epoch))
            passes.enter("none", position.progress.epoch)
        self._end_loop()

    def steps(self, steps: int, every: int | None, caller: CodeType) -> Iterator[int]:
        """See `Run.steps`; ``caller`` is the calling function."""
        if steps < 1 or (every is not None and every < 1):
            raise UsageError(f"run.steps({steps}, every={every}): both count steps; give numbers from 1")
        self._start.begin()
        self._context.group.check_equal("the length given to run.steps(...)", (steps, every))
        position, passes = self._position, self._passes
        position.length.epochs, position.length.steps = None, steps
        # Also if the last step is done, and the script was in the code after it.
        if passes.began < steps and (position.progress.step < steps or position.within_turn) and not position.ended:
            self._enter("steps", caller)
            while position.progress.step < steps or position.within_turn:
                self._begin_turn()
                began = passes.began
                passes.until = steps if every is None else min(steps, (began // every + 1) * every)
                seed_generators(seed_of(self._context.settings.seed, "stretch", began))
                yield began
                self._end_turn()
                if position.progress.step == began:
                    raise UsageError(
                        f"run.steps(...) gave {began}, and no step followed: train with `for batch in "
                        "run.train(loader)` in its loop, or leave that loop by break"
                    )
                position.begin_turn()
                with self._end_of_step.proof.left_script:
                    self._end_of_step.finish_turn()
            passes.enter("none", position.progress.epoch)
        self._end_loop()

    def _end_loop(self) -> None:
        """End the outer loop. Collective.

        Raises:
            SystemExit: with code 0, in a run whose steps are recorded to be compared: its training is cut short, so the
                script must not go on to use the trained model.
        """
        self._loaders.begin_turn()
        self._context.strategy.finish_training()
        if self._train_step.transcript is not None:
            raise SystemExit(EXIT_OK)

    def _enter(self, loop: OuterLoop, caller: CodeType) -> None:
        passes = self._passes
        if self._start.resumes_within_turn and passes.loop != loop and "steps" in (passes.loop, loop):
            raise CheckpointError(
                f"the checkpoint was taken in {_OUTER[passes.loop]}, and this script says run.{loop}(...) there: "
                "use the previous loop, or start over with --fresh"
            )
        passes.caller = caller
        if self._start.resumes_within_turn:
            passes.loop = loop
        else:
            passes.enter(loop, self._position.progress.epoch)
        self._end_of_step.proof.training_begins()

    def _begin_turn(self) -> None:
        self._loaders.begin_turn()
        if not self._start.resumes_within_turn:
            self._position.begin_turn()
            self._end_of_step.proof.comes_to_pass()

    def _end_turn(self) -> None:
        """End a turn, as the script comes back to the outer loop."""
        self.end_open_pass()
        self._start.require_resumed()

    def end_open_pass(self) -> None:
        """End a pass that the script reads by ``next(...)``, in the way of a loop that is left by ``break``.

        Raises:
            UsageError: in the middle of a step.
        """
        generator = None if self._generator is None else self._generator()
        current = self._train_step.current
        if generator is None or current is None:
            return
        if not current.complete:
            raise UsageError(
                f"the iterator over run.train(...) was left in the middle of step {self._position.progress.step + 1}, "
                "as where calls of next(...) are counted: they count micro-batches, of which each rank has others. "
                "Count steps: go on until run.step(loss) has returned True, or write `for batch in run.train(loader)`"
            )
        generator.close()

    # ---- a pass --------------------------------------------------------------------------------------------------

    def train(self, data_loaders: Sequence[TorchLoader], site: str) -> MicroBatches:
        """See `Run.train`; ``site`` is the place of the call in the script."""
        this: list[weakref.ref[Generator[Data]]] = []
        generator = self._pass(data_loaders, site, this)
        this.append(weakref.ref(generator))
        passes, progress = self._passes, self._position.progress
        # The length is that of the pass as it began, however late it is asked for.
        begins = {name: passes.next(name, progress.epoch) for name in self._loaders.names(data_loaders)}
        steps = max(0, passes.until - progress.step) if passes.loop == "steps" else None
        return MicroBatches(
            generator,
            lambda: self._length(data_loaders, begins, steps),
            lambda: refuse_count(self._most_of_a_step(data_loaders)),
        )

    def _most_of_a_step(self, data_loaders: Sequence[TorchLoader]) -> int:
        """The largest number of micro-batches in a step, over all ranks."""
        return max(self._loaders.find(each, "train").plan.micro_batches for each in data_loaders)

    def _pass(
        self, data_loaders: Sequence[TorchLoader], site: str, this: Sequence[weakref.ref[Generator[Data]]]
    ) -> Generator[Data]:
        self._start.begin()
        self._metrics.refuse_nested("train")
        if self._position.ended:
            return
        if not data_loaders:
            raise UsageError("run.train(): give what run.loader(dataset, global_batch=...) returned")
        loaders = [self._loaders.find(each, "train") for each in data_loaders]
        self._end_of_step.proof.training_begins()
        goes_on = self._start.resumes_within_turn
        if not self._open(loaders, site):
            return
        self._begin_pass(goes_on=goes_on)
        self._start.resumed_at_end = False
        steps, self._generator = self._position.progress.step, this[0]
        try:
            if self._context.share.replica is None:
                self._serve(loaders)
            else:
                yield from self._micro_batches(loaders)
                self._train_step.replays.end_pass(self._position.progress.step)
            whole = self._train_step.end_loop(whole=True)
        except GeneratorExit:
            if self._train_step.current is not None:  # else the run is closed
                try:
                    self._train_step.end_loop(whole=False)
                except LockstepError as error:  # which Python would only print here
                    self._end_of_step.error = error
            self._leave_before_end()
            raise
        finally:
            self._leave()
        if whole:
            self._passes.complete()
            self._start.resumed_at_end = goes_on and self._position.progress.step == steps
            # `means` is empty where a checkpoint was taken between the last step and the end of the pass.
            self._position.evaluations_done = self._position.evaluations
            if means := self._metrics.reduce_pass(self._context.group):
                self._position.set_metrics(means, keep_after=self._passes.began_at(self._position.progress.step))
                self._end_of_step.save_if_best()
            self._context.warnings.say_all()
        else:
            self._leave_before_end()

    def _leave_before_end(self) -> None:
        self._position.note("left")
        self._context.leaves.leave("left the loop over run.train(...)", self._position.progress.step)

    def step(
        self, loss: Loss, data: tuple[object, ...], count: Count, loss_is: LossKind, optimizer: Optimizers
    ) -> bool:
        """`backward` and `update`; returns whether the step is complete. Collective at the last micro-batch."""
        if count is None:
            self._left_out.refuse()
        with self._end_of_step.proof.left_script:
            self._train_step.backward(loss, data, count, loss_is, optimizer)
        return self.update(optimizer)

    def backward(
        self, loss: Loss, data: tuple[object, ...], count: Count, loss_is: LossKind, optimizer: Optimizers
    ) -> bool:
        """Compute the gradients of a micro-batch; returns whether it was the last of the step on this rank.

        Collective at the last micro-batch, where gradients are summed.
        """
        self._train_step.updates.require_gradients()
        if count is None:
            self._left_out.refuse()
        with self._end_of_step.proof.left_script:
            self._train_step.backward(loss, data, count, loss_is, optimizer)
        current = self._train_step.current
        if current is None or not current.position.last:
            return False
        if len(current.with_loss) == len(self._state.optimizers):
            # The script may change gradients now, with random numbers that must be equal on all ranks.
            self._position.seed_script("gradients")
        return True

    def update(self, optimizer: Optimizers) -> bool:
        """Step the optimizers and count the samples of the step, if it is complete; returns whether it is."""
        with self._end_of_step.proof.left_script:
            done = self._train_step.update(optimizer)
        if done and self._train_step.current is not None:
            self._end_of_step.count(self._train_step.current.position.step_samples)
        return done

    def _open(self, loaders: Sequence[MicroBatchLoader], site: str) -> bool:
        """Open the pass; returns whether it has steps to make: a pass that a resumed script repeats has none."""
        names = [self._loaders.name(loader) for loader in loaders]
        if self._start.resumes_within_turn:
            if not self._passes.is_open(names, site):
                return False
            self._set_plan(loaders, names)
            was_left = self._start.finish_resume()
            self._end_of_step.proof.comes_to_pass()
            return not was_left
        may_take_up = not isinstance(self._context.strategy, ServerStrategy)
        self._passes.begin(names, site, may_take_up=may_take_up)
        self._loaders.take_up(loaders)
        self._set_plan(loaders, names)
        # A step whose loop was left by `break` ends here: a resume goes on in this pass.
        self._position.note("taken_up")
        self._position.evaluations_done = self._position.evaluations
        with self._end_of_step.proof.left_script:
            self._end_of_step.finish()
        return True

    def _set_plan(self, loaders: Sequence[MicroBatchLoader], names: Sequence[str]) -> None:
        training_plan, length, first = self._context.plan, self._position.length, loaders[0]
        for other in loaders[1:]:
            if other.plan.micro_batches != first.plan.micro_batches:
                raise UsageError(
                    f"run.train(...) of loaders whose steps differ: {first.plan}, and {other.plan}; a step takes one "
                    "micro-batch of each at a time: give sizes that make equally many"
                )
        if self._context.settings.sync_batchnorm and self._context.group.size > 1:
            for loader in loaders:
                refuse_uneven(loader, self._context.group.size)
        if training_plan.plan != first.plan:
            self._context.reporter.say(str(first.plan))
            self._loaders.say_chosen(first.plan)
        training_plan.plan = first.plan
        length.steps_per_epoch, length.samples_per_epoch = first.steps_per_epoch, first.length
        new = [name for name in names if name not in training_plan.sizes]
        training_plan.sizes |= {
            name: [loader.plan.global_batch, loader.plan.micro_batch]
            for name, loader in zip(names, loaders, strict=True)
        }
        training_plan.samples |= {name: loader.length for name, loader in zip(names, loaders, strict=True)}
        if new:
            self._end_of_step.compare_data(within_pass=[name for name in names if self._passes.step(name)])

    def _begin_pass(self, *, goes_on: bool) -> None:
        if self._passes.began_at(self._position.progress.step) == self._position.progress.step:
            self._metrics.begin_pass()
        # A checkpoint or the script may have filled buffers since, such as with what was trained elsewhere.
        self._context.strategy.resync()
        self._train_step.say_put_back(self._context.kernels.pin())
        self._train_step.new_pass()
        self._train_step.parameter_sets.compare(self._position.progress.step)
        self._state.look_for_schedulers(sys._getframe())  # schedulers made by the script since
        self._state.require_kept(sys._getframe())
        if self._context.directory or isinstance(self._context.strategy, ServerStrategy):
            self._state.require_same_names()
        for modes in () if goes_on else self._state.modes:  # within a resumed pass, modes are as saved
            modes.begin_pass()
        self._left_out.new_pass()
        # What ranks gather that take micro-batches in turn is not in the order of micro-batches.
        self._notes_lists = self._context.share.in_turn > 1 and says("gather")
        self._metrics.enter("train")
        self._context.inputs.begin_pass(self._position.progress.step)
        self._end_of_step.begin_next(begins_pass=True)
        self._context.marker.set_phase("data")

    def _micro_batches(self, loaders: Sequence[MicroBatchLoader]) -> Generator[Data]:
        context, train_step, end_of_step = self._context, self._train_step, self._end_of_step
        while (batches := self._data.next_step(loaders)) is not None:
            carries = self._carried.is_used  # no other rank has carried state
            train_step.audit.require_stored(between=True)
            self._series.step_begins()
            step = self._position.progress.step
            for position, data in batches:
                if carries and position.is_other_ranks:
                    continue
                self._series.body_begins(position, data)
                current = yield from self._body(position, data)
                try:
                    step_is_done = train_step.end(current)
                    self._series.body_is_over(position, step)
                except ReplayError as error:
                    if error.of_samples or context.strategy.forward_is_collective:
                        raise error.naming(()) from None
                    # The body runs again, only to see what it changes: a correct body is not examined.
                    before = look(script_roots(sys._getframe()))
                    yield from self._body(replace(position, last=False, check=StepCheck.REPLAY), data)
                    raise error.naming(changed(before, look(script_roots(sys._getframe()))), before) from None
                if train_step.audit.disputed:
                    yield from self._decide_dispute(loaders)
                if step_is_done:
                    end_of_step.count(position.step_samples)
                    self._carried.step_is_done()
                    with end_of_step.proof.left_script:
                        end_of_step.finish()
                        if position.audited and not train_step.audit.note_stored():
                            end_of_step.compare_ranks()
                        # Only now that the step is safe, since a rank may be gone.
                        train_step.replays.compare_ranks()
                    if context.emergency.notes and end_of_step.compares_next:
                        train_step.checks.note_point()
                context.marker.set_phase("data")

    def _decide_dispute(self, loaders: Sequence[MicroBatchLoader]) -> Generator[Data]:
        """Compute disputed micro-batches again on all ranks, which shows the rank that was wrong.

        Raises:
            AuditError: in any case. Collective.
        """
        train_step, share = self._train_step, self._context.share
        train_step.discard_step()
        for index in train_step.audit.disputed:
            if (again := self._data.again(loaders, index)) is not None:
                position, data = again
                own = loaders[0].plan.run(share.replica or 0, position.of)
                check = StepCheck.REPLAY if index in own else StepCheck.OTHER_RANKS
                current = yield from self._body(replace(position, check=check, audited=True), data)
                train_step.end(current)
        raise train_step.audit.error(reads_world_size=train_step.replays.reads_world_size)

    def _body(self, position: MicroBatchPosition, data: Data) -> Generator[Data, None, CurrentMicroBatch]:
        """Hand out the micro-batch at ``position``; its losses are computed when the script asks for the next one."""
        with self._handing_out(position, data) as current:
            yield data
        return current

    @contextlib.contextmanager
    def _handing_out(self, position: MicroBatchPosition, data: Data) -> Iterator[CurrentMicroBatch]:
        """A context in which a micro-batch's losses are computed."""
        context = self._context
        self._metrics.hand_out(position)
        self._end_of_step.proof.samples(position, data)
        self._left_out.note(position, data)
        step = self._position.progress.step
        current = self._train_step.begin(position, step)
        replays = self._train_step.replays
        # An audit compares before the values measured after the step's loss are known.
        self._metrics.compares = None if replays.play is None or position.audited else replays.play.note
        if replays.play is not None:
            if self._train_step.transcript is not None:
                self._train_step.transcript.note_samples(replays.play, position, data)
            replays.play.note_all(SAMPLES, data)
        self._carried.micro_batch_begins(position)
        if position.is_replay:
            # The micro-batch of the body before would show nothing that bodies set anew.
            if position.index != self._handed_out or position.of == 1:
                context.inputs.body_begins(sys._getframe())
            # Samples of later micro-batches are read before the replay's effects are removed.
            self._replay_effects.begin_replay([*self._state.used_by_run(), *self._state.sample_sources])
            self._state.beside.begin_replay()
        else:
            context.inputs.body_ended(sys._getframe())
            self._state.beside.end_replays()
            self._replay_effects.end_replays()
        self._handed_out = position.index
        if self._notes_lists:
            self._metrics.note_lists(sys._getframe(), self._state.used_by_run())
        seed_generators(seed_of(context.settings.seed, "step", step, position.index))
        context.marker.set_phase("forward")
        with context.precision.forward():
            yield current
        self._metrics.require_ended("evaluate")

    def _serve(self, loaders: Sequence[MicroBatchLoader]) -> None:
        """Serve the rest of the pass's steps, or those that other ranks make; for a rank without micro-batches."""
        while (samples := self._data.samples_of_next_step(loaders)) is not None:
            step = self._passes.step(self._loaders.name(loaders[0]))
            position: MicroBatchPosition = loaders[0].plan.position(step, samples, 0, last=True, is_padding=True)
            current = self._train_step.begin(position, self._position.progress.step)
            if not self._train_step.serve(current):
                break
            self._train_step.end(current)
            self._end_of_step.count(position.step_samples)
            self._end_of_step.finish()

    def _leave(self) -> None:
        """Leave the loop of `train`: at its end, by ``break``, or by an error that `Run.__exit__` has seen.

        By ``break`` the loop may be left within the body in which a step was done. The step's end comes later, where an
        error or a stop can be raised: here, Python would only print the error. A step of which a loss is missing is
        discarded: the cause may be an error on this rank alone, and no other rank would join the collectives.
        """
        current = self._train_step.current
        self._generator = None
        self._metrics.leave()
        self._context.marker.set_phase("script")
        try:
            if current is not None and current.complete:
                self._metrics.step_is_done()
                self._context.emergency.note_late(self._position.progress.step)  # measured in the rest of the body
                if not current.ended:
                    self._train_step.end(current)
                    self._carried.step_is_done()
        except LockstepError as error:
            self._end_of_step.error = error.naming(()) if isinstance(error, ReplayError) else error
        finally:
            self._train_step.leave()
            self._metrics.forget_step()
            if current is not None and not current.complete:
                self._context.emergency.discard()
            self._carried.forget_step()
            self._replay_effects.forget()
            self._state.beside.forget()
            self._end_of_step.point.note()
            self._end_of_step.note_modules()
            self._position.seed_script()

    # ---- its length ----------------------------------------------------------------------------------------------

    def _length(
        self, data_loaders: Sequence[TorchLoader], begins: Mapping[str, tuple[int, int]], steps: int | None
    ) -> int | None:
        """The number of this rank's micro-batches in a pass that begins where ``begins`` says; None if not known.

        In `Run.steps` the pass ends after ``steps`` steps.
        """
        loaders = [self._loaders.find(each, "train") for each in data_loaders]
        lengths = []
        for loader in loaders:
            order, first_step = begins[self._loaders.name(loader)]
            if steps is None:
                lengths.append(self._loaders.training_length(loader, order, first_step))
            else:
                lengths.append(_length_of_steps(self._loaders, loader, order, first_step, steps))
        return None if None in lengths else min(length for length in lengths if length is not None)


def _length_of_steps(loaders: Loaders, loader: MicroBatchLoader, order: int, first_step: int, steps: int) -> int | None:
    """The number of this rank's micro-batches in ``steps`` steps, from ``first_step`` of the pass ``order`` on."""
    per_epoch, length = loader.steps_per_epoch, 0
    if not per_epoch:
        return None
    while steps > 0:
        last = min(per_epoch, first_step + steps)
        from_first, from_last = (loaders.training_length(loader, order, step) or 0 for step in (first_step, last))
        length, steps = length + from_first - from_last, steps - (last - first_step)
        order, first_step = order + 1, 0
    return length


_OUTER: Final = {
    "none": "no outer loop",
    "epochs": "the loop of run.epochs(...)",
    "steps": "the loop of run.steps(...)",
}
