"""A search that takes no time: real algorithms and stopping rules, with a clock and a training of its own."""

import heapq
import math
from contextlib import closing
from dataclasses import replace

import numpy as np

from lockstep.tune.record.journal import JournalWriter, SearchPlan, SearchRecord
from lockstep.tune.record.records import LossReported, TrialBegan, TrialEnded
from lockstep.tune.record.trial import MadeMove, Reported, Trial
from lockstep.tune.search import Choice, Float, Individual, Int, Space, make_algorithm
from lockstep.tune.stopping import make_stopping

SPACE = Space.of(
    {
        "layers": Int(2, 10),
        "activation": Choice("relu", "sigmoid", "tanh"),
        "lr": Float(1e-4, 1e-1, log=True),
        "optimizer": Choice("adam", "sgd", opens={"sgd": {"momentum": Float(0.0, 0.99)}}),
    }
)


def loss_curve(params, random):
    """Ten losses as a training with ``params`` might report."""
    end = 0.02 + 0.6 * (math.log10(params["lr"]) + 2.3) ** 2 / 4 + 0.01 * abs(params["layers"] - 5)
    end += {"relu": 0.0, "tanh": 0.03, "sigmoid": 0.25}[params["activation"]]
    end += 0.05 * (1 - params.get("momentum", 0.6)) + 0.01 * random.random()
    return [end + 2.0 * 0.55**epoch + 0.01 * random.standard_normal() ** 2 for epoch in range(1, 11)]


def simulated_search(trials=120, islands=2, workers=4, ranks=2, stopping="asha:eta=3,min=2", seed=0):
    """The record of a search with failures, early stops, copies between islands and one stop of the whole."""
    random, rule = np.random.default_rng(seed), make_stopping(stopping)
    algorithms = [make_algorithm("evolution", SPACE, worker=w, workers=workers // islands) for w in range(workers)]
    known: dict[int, Trial] = {}
    moves: list[MadeMove] = []
    free = [(1e9 + 0.3 * worker, worker) for worker in range(workers)]
    for number in range(trials):
        now, worker = heapq.heappop(free)
        island = worker % islands
        # What has ended by now is known, on the same island.
        proposal = algorithms[worker].propose(random)
        params = SPACE.params(proposal.point)
        trial = Trial(
            number, params, proposal.point, "running", island=island, worker=worker, ranks=ranks,
            parents=proposal.parents, operator=proposal.operator, began_at_s=now,
        )  # fmt: skip
        others, pace = list(known.values()), 2.0 + params["layers"] / 4
        for step, loss in enumerate(loss_curve(params, random)):
            now += pace * random.uniform(0.9, 1.1)
            trial = replace(trial, reports=(*trial.reports, Reported(step, loss, now)))
            if random.random() < 0.004:
                trial = replace(trial, state="failed", reason="out of memory on rank 1: tried to allocate 2.00 GiB")
                break
            if reason := rule.stops(trial, others):
                trial = replace(trial, state="stopped", reason=reason)
                break
        losses = () if trial.state == "failed" else (trial.reports[-1].loss,)
        state = "done" if trial.state == "running" else trial.state
        trial = replace(trial, state=state, losses=losses, ended_at_s=now, run_s=now - trial.began_at_s)
        known[number] = trial
        if losses:
            budget = len(trial.reports) if state == "stopped" else None
            mine = Individual(number, trial.point, losses, budget=budget, island=island, worker=worker)
            for other in range(island, workers, islands):
                algorithms[other].observe([mine])
            if islands > 1 and random.random() < 0.08:
                target = (island + 1) % islands
                best = min((one for one in known.values() if one.island == island and one.losses), key=lambda t: t.loss)
                moves.append(MadeMove((best.number,), island, target, copies=True, replaced=(), at_s=now))
                copy = Individual(best.number, best.point, best.losses, island=island, worker=best.worker)
                for other in range(target, workers, islands):
                    algorithms[other].observe([copy])
        heapq.heappush(free, (now + random.exponential(1.5) + (25 if 40 <= number < 44 else 0), worker))
    settings = {"trials": trials, "seed": seed, "workers": workers, "islands": islands}
    return SearchRecord(SPACE.to_json(), settings, tuple(known.values()), tuple(moves))


def write(record, directory):
    """``record`` as the journal of one worker."""
    SearchPlan(record.space, record.settings).write(directory)
    with closing(JournalWriter(directory, 0)) as journal:
        for one in record.trials:
            journal.append(
                TrialBegan(
                    *(one.number, one.attempts, one.ranks, one.began_at_s, one.params, one.point, one.island),
                    *(one.parents, one.operator, one.inherits),
                )
            )
            for report in one.reports:
                journal.append(LossReported(one.number, one.attempts, report.step, report.loss, report.at_s))
            if one.state != "running":
                journal.append(
                    TrialEnded(
                        *(one.number, one.attempts, one.state, one.ended_at_s, one.run_s, one.losses),
                        *(one.violation, one.reason),
                    )
                )
    return directory
