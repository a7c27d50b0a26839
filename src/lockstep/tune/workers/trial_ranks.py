"""The loop of each rank of a worker: it evaluates one trial after another until none is left."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from lockstep.collectives import Connections, keeping_connections, open_store
from lockstep.errors import PeerLost, SettingError, TrialStopped
from lockstep.launch_contract import EXIT_STOPPED, STOP_FILE
from lockstep.run import Run
from lockstep.script_end import closing
from lockstep.seeding import seed_generators, seed_of
from lockstep.settings import Settings
from lockstep.trial_contract import CurrentTrial, evaluating
from lockstep.tune.record.search_directory import Search
from lockstep.tune.workers.outcome import Outcome
from lockstep.tune.workers.search_worker import SearchWorker, TrialOrder
from lockstep.tune.workers.trial_channel import StopSignals, StoreTrialChannel, TrialChannel
from lockstep.world import World

#: How often a run that the worker opens for an objective saves, unless a setting says otherwise.
_SAVE_EVERY = "1 min"


@dataclass(frozen=True, slots=True)
class Objective:
    """The function that a search minimises."""

    call: Callable[..., object]
    takes_run: bool  #: it is called as ``objective(run, params)``; otherwise as ``objective(params)``

    @classmethod
    def of(cls, function: Callable[..., object]) -> Objective:
        """The objective ``function``.

        Raises:
            SettingError: if it takes neither ``params`` nor ``run, params``.
        """
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return cls(function, takes_run=False)
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needed = [one for one in parameters if one.kind in kinds and one.default is inspect.Parameter.empty]
        named = [one for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
        if len(needed) not in (1, 2) or any(one.default is inspect.Parameter.empty for one in named):
            name = getattr(function, "__name__", repr(function))
            raise SettingError(
                f"{name}{inspect.signature(function)}: an objective is called as {name}(run, params), or as "
                f"{name}(params) where it opens its Run itself or needs none"
            )
        return cls(function, takes_run=len(needed) == 2)

    def evaluate(self, params: Mapping[str, object], seed: int) -> object:
        """Call it with ``params`` and return its value. Collective."""
        with closing():  # a run that the objective leaves open
            if not self.takes_run:
                return self.call(dict(params))
            with Run(seed=seed, save_every=_SAVE_EVERY) as run:
                return self.call(run, dict(params))


class TrialRank:
    """One rank of a worker.

    Args:
        search: what is searched.
        objective: what is minimised.
        leader: chooses and records trials, on rank 0 of the worker; None on the others.
        channel: to the other ranks.
        connections: of the runs; a trial uses those of the trial before.
        stops: signals that ask to stop.
    """

    def __init__(
        self,
        search: Search,
        objective: Objective,
        leader: SearchWorker | None,
        channel: TrialChannel,
        connections: Connections,
        stops: StopSignals,
    ) -> None:
        self._objective = objective
        self._directory, self._space, self._settings = search.directory, search.space, search.settings
        self._leader, self._channel, self._connections = leader, channel, connections
        self._stops = stops
        self._stopped = ""  # why the current trial is to stop; on the leader

    def run(self) -> None:
        """Evaluate trials until there is none left for this worker. Collective.

        Raises:
            SystemExit: with code 75, if the search was asked to stop; the current trial can be resumed.
            Exception: of the objective, if it was raised on some ranks only, which are out of step and must end.
        """
        while text := self._channel.tell(self._next()):
            self._carry_out(TrialOrder.from_text(text))
        if self._stops.asked:
            raise SystemExit(EXIT_STOPPED)

    def _next(self) -> str:
        """The next trial as a string, on the leader; "" if there is none, and on other ranks."""
        if self._leader is None:
            return ""
        self._stops.asked |= (self._directory.path / STOP_FILE).exists()
        order = None if self._stops.asked else self._leader.next()
        return "" if order is None else order.to_text()

    def _carry_out(self, order: TrialOrder) -> None:
        trial = CurrentTrial(
            number=order.number,
            directory=self._directory.trial(order.number),
            attempt=order.attempt,
            inherits=None if order.inherits is None else self._directory.trial(order.inherits),
            repeat=order.repeat,
            report=lambda loss, step: self._report(order, loss, step),
        )
        self._stopped = ""
        outcome, error = self._outcome(order, trial)
        verdict = self._channel.verdict(outcome)
        if verdict == "end":
            if self._stops.asked:
                raise SystemExit(EXIT_STOPPED)
            # When the worker is started again, the death that the launcher has seen decides about the trial.
            raise error or PeerLost(f"trial {order.number} failed on another rank of this worker")
        if self._leader is not None:
            self._leader.end(order, outcome)
        if verdict == "renew":
            self._connections.close(abort=True)
        if outcome.state == "interrupted" and error is not None:
            raise error if isinstance(error, KeyboardInterrupt) else SystemExit(EXIT_STOPPED)
        if error is not None:
            # Its traceback refers to the objects of the trial, such as the model, and keeps them in memory.
            del error
            gc.collect()

    def _outcome(self, order: TrialOrder, trial: CurrentTrial) -> tuple[Outcome, BaseException | None]:
        try:
            # Workers begin alike; their trials are not to draw alike, and a trial that is evaluated again is.
            key = ("repeat", order.repeat) if order.repeat else ("trial", order.number)
            seed_generators(seed_of(self._settings.seed, *key))
            with evaluating(trial), self._stops.interrupting():
                value = self._objective.evaluate(self._space.params(order.point), self._settings.seed)
        except TrialStopped as stop:
            return Outcome("stopped", reason=self._stopped or str(stop)), None
        except SystemExit as error:
            if error.code == EXIT_STOPPED:
                return Outcome("interrupted"), error
            return Outcome("failed", reason=f"the objective called sys.exit({error.code!r})", place="exit"), error
        except BaseException as error:  # noqa: BLE001 - whatever it is, the search goes on
            if self._stops.means_stop(error):
                return Outcome("interrupted"), error
            sys.stderr.write(f"trial {order.number} failed:\n")
            sys.excepthook(type(error), error, error.__traceback__)
            return Outcome.of_error(error), error
        if self._stopped:
            # It was told to stop, and has caught the error that said so.
            violation = Outcome.of_result(value, self._settings.objectives).violation
            return Outcome("stopped", violation=violation, reason=self._stopped, returned=True), None
        return Outcome.of_result(value, self._settings.objectives), None

    def _report(self, order: TrialOrder, loss: float, step: int) -> str:
        assert self._leader is not None, "only the leader is asked"
        self._stopped = self._leader.report(order, loss, step)
        return self._stopped


@contextlib.contextmanager
def open_channel(world: World, *, by_driver: bool) -> Iterator[tuple[TrialChannel, StopSignals]]:
    """The channel to the other ranks of this worker; within, signals that ask to stop are handled. Collective."""
    stops = StopSignals(by_driver=by_driver)
    with stops.listening():
        if world.size == 1:
            yield TrialChannel(), stops
            return
        os.environ.update(world.rank_variables())
        store = open_store(world, f"search/{world.generation}", Settings().peer_timeout_s)
        yield StoreTrialChannel(store, world.rank, world.size, lambda: stops.asked), stops


def evaluate_trials(
    search: Search,
    objective: Objective,
    channel: TrialChannel,
    stops: StopSignals,
    leader: SearchWorker | None,
) -> bool:
    """Evaluate trials as one rank of a worker until none is left for it. Collective.

    Returns:
        Whether all trials of the search have ended then.

    Raises:
        SystemExit: as `TrialRank.run` does.
    """
    with keeping_connections() as connections:
        TrialRank(search, objective, leader, channel, connections, stops).run()
    return channel.tell("over" if leader is not None and leader.is_over else "") == "over"
