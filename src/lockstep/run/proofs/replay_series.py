"""Series of replays in a run's first step: the body computes its micro-batches many times, with equal results.

a replay             0 1 2 0' 3                           finds changes by a few bodies
a series of them     0 1 2 0' 0' 1' 2' 0' 1' 2' ... 3     finds what begins after many: a threshold, a full list, each
                                                          seventh call, whatever holds it

The script does not notice these replays: its iterators do not go on (`loop_body`), its objects are restored
(`script_snapshot`), and its prints and logs are not shown. A series ends after a second of the CPU.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import pdb
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from types import CodeType
from typing import Final

import torch

from lockstep.batch import MicroBatchPosition, StepCheck
from lockstep.data import Data
from lockstep.errors import LockstepError
from lockstep.heartbeat import collectives_begun
from lockstep.run.loop.train_step import CurrentMicroBatch, TrainStep
from lockstep.run.proofs.loop_body import LeftLoop, loop_body
from lockstep.run.proofs.replay import ReplayError, place_of
from lockstep.run.proofs.script_snapshot import ScriptSnapshot
from lockstep.run.setup.run_context import RunContext
from lockstep.run.source.reachable import script_frames
from lockstep.strategies import LossStrategy, ServerStrategy
from lockstep.torch_private import pytree

MOST: Final = 64  #: bodies
_MOST_DIFFERENT: Final = 4
_MOST_CPU_S: Final = 1.0  # of this process: on a machine that others load, as many bodies are tried
_MOST_S: Final = 5.0
_MOST_LOOPS: Final = 3

HandingOut = Callable[[MicroBatchPosition, Data], AbstractContextManager[CurrentMicroBatch]]
"""A context in which a body computes a micro-batch."""


class ReplaySeries:
    """Makes a series of replays once for each loop of the script.

    Args:
        context: of the run.
        train_step: compares the results of bodies.
        handing_out: see `HandingOut`.
    """

    def __init__(self, context: RunContext, train_step: TrainStep, handing_out: HandingOut) -> None:
        self._context: Final = context
        self._train_step: Final = train_step
        self._handing_out: Final = handing_out
        self._tried: Final[set[CodeType | None]] = set()
        self._began: int | None = None  # steps done before the first step of this process
        #: The micro-batches that the rank has had in this step, before a body could change them.
        self._had: Final[dict[int, tuple[MicroBatchPosition, Data]]] = {}
        self._is_new = False  # whether the script's micro-batch is computed for the first time
        self._collectives: int | None = 0  # begun before it

    def step_begins(self) -> None:
        """The first micro-batch of a step is about to be handed out."""
        self._had.clear()

    def body_begins(self, position: MicroBatchPosition, data: Data) -> None:
        """Prepare for a series, which may follow the micro-batch that is about to be handed out."""
        strategy, done = self._context.strategy, self._context.position.progress.step
        self._began = done if self._began is None else self._began
        if (
            self._began  # a resume must go on at once
            or not position.is_checked
            or position.is_other_ranks
            or position.is_padding
            or strategy.forward_is_collective
            or self._context.settings.reduction != "exact"  # torch's reducer counts backward passes
            or isinstance(strategy, LossStrategy | ServerStrategy)
            or len(self._tried) == _MOST_LOOPS
            or self._loop in self._tried
        ):
            return
        self._is_new = position.index not in self._had
        if self._is_new and len(self._had) < _MOST_DIFFERENT:
            with contextlib.suppress(Exception):  # an object may not be copyable
                self._had[position.index] = replace(position, last=False, check=StepCheck.REPLAY), _copied(data)
        self._collectives = _collectives()

    def body_is_over(self, position: MicroBatchPosition, step: int) -> None:
        """Compute the step's micro-batches so far again and again, after a replay.

        Args:
            position: of the micro-batch computed last.
            step: steps done before this step.

        Raises:
            ReplayError: if a micro-batch gives other values than before, or a body leaves its loop.
        """
        if position.check is StepCheck.REPLAY and position.index in self._had and not self._is_new:
            self._tried.add(self._loop)
            # A collective would have to be begun by all ranks.
            is_alone = self._collectives is not None and _collectives() == self._collectives
            if is_alone and (body := loop_body(sys._getframe(1))) is not None:
                self._repeat(body, list(self._had.values()), step)

    def _repeat(self, body: Callable[[Data], None], had: Sequence[tuple[MicroBatchPosition, Data]], step: int) -> None:
        state = self._context.state
        snapshot = ScriptSnapshot(sys._getframe(), {id(one) for one in (*state.models, *state.optimizers)})
        began, cpu_began = time.perf_counter(), time.process_time()
        self._train_step.replays.of_effects = True
        with _quietly():
            for number, (position, pristine) in enumerate(itertools.islice(itertools.cycle(had), MOST), 2):
                if time.process_time() - cpu_began > _MOST_CPU_S or time.perf_counter() - began > _MOST_S:
                    break
                data = _copied(pristine)
                try:
                    with self._handing_out(position, data) as current:
                        body(data)
                    self._train_step.end(current)
                except ReplayError as error:
                    raise error.after(number) from None
                except (LockstepError, GeneratorExit):
                    raise
                except Exception as error:
                    ended = "its loop was left" if isinstance(error, LeftLoop) else f"the body raised {error!r}"
                    place = place_of(position.index, position.of, step)
                    raise ReplayError(ended, place, after=number).naming(()) from error
        self._train_step.replays.of_effects = False
        snapshot.restore()

    @property
    def _loop(self) -> CodeType | None:
        return next((frame.f_code for frame in script_frames(sys._getframe())), None)


def _collectives() -> int | None:
    try:
        return collectives_begun()
    except RuntimeError:  # the backend does not count collectives
        return None


def _copied(data: Data) -> Data:
    copied: Data = pytree.tree_map(lambda one: one.clone() if isinstance(one, torch.Tensor) else deepcopy(one), data)
    return copied


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """A context without prints and logs, and without a debugger's prompt."""
    nowhere = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        # Not `logging.disable`, which a script can ask for.
        stack.enter_context(_without(logging.Logger, "callHandlers"))
        stack.enter_context(_without(sys, "breakpointhook"))
        stack.enter_context(_without(pdb, "set_trace"))
        yield


@contextlib.contextmanager
def _without(owner: object, name: str) -> Iterator[None]:
    """A context in which the function ``name`` of ``owner`` does nothing."""
    function = getattr(owner, name)
    setattr(owner, name, lambda *_args, **_named: None)
    try:
        yield
    finally:
        setattr(owner, name, function)
