"""A script that uses each public name as users do; type checkers read it, nobody runs it.

For each public class there is a function of its name, which uses all that its objects have.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, assert_type

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.testing import FaultPlan, Outcome, StrategyLaws, run_each, run_ranks, state_hash, verify
from lockstep.tune import (
    Algorithm,
    Bool,
    Choice,
    Float,
    Individual,
    Int,
    Islands,
    Proposal,
    SearchResult,
    StoppingRule,
    Trial,
    draw_pictures,
    enqueue,
    export_optuna,
    import_optuna,
    load,
    show,
    tune,
)

assert_type(lockstep.__version__, str)

ERRORS: tuple[type[lockstep.LockstepError], ...] = (
    lockstep.CheckpointError,
    lockstep.DamagedCheckpoint,
    lockstep.DataError,
    lockstep.DifferentCalls,
    lockstep.LaunchError,
    lockstep.MismatchError,
    lockstep.NonFiniteError,
    lockstep.PeerLost,
    lockstep.PlanError,
    lockstep.RendezvousError,
    lockstep.SettingError,
    lockstep.TrialStopped,
    lockstep.UnreadableCheckpoint,
    lockstep.UsageError,
    lockstep.WorldError,
)


def main(rate: float = 0.1) -> dict[str, torch.Tensor]:
    data = TensorDataset(torch.randn(64, 2), torch.zeros(64, dtype=torch.long))
    with lockstep.Run(seed=1, strategy="zero", precision="bf16", save_every="1 epoch", keep=2, best="min loss") as run:
        model = run.model(nn.Linear(2, 2), weights=Path("start.safetensors"))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=rate))
        scheduler = run.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, step_size=5))
        assert_type(scheduler, torch.optim.lr_scheduler.StepLR)
        batches = run.loader(data, global_batch=16, micro_batch=4, workers=2)
        patience = run.early_stopping("loss", patience=3, mode="min", min_delta=0.1)
        run.keep(best=model, rows=[1])
        for epoch in run.epochs(2):
            for x, y in run.train(batches):
                loss = nn.functional.cross_entropy(model(x), y)
                assert_type(run.step(loss), bool)
            for x, y in run.evaluate(batches):
                run.measure(loss=nn.functional.cross_entropy(model(x), y), count=len(x))
            run.log(epoch=epoch, rate=scheduler.get_last_lr()[0])
            if patience.should_stop():
                break
        return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def use_run(run: lockstep.Run, model: nn.Module, loss: torch.Tensor, batches: DataLoader[Any]) -> None:
    assert_type(run.device, torch.device)
    assert_type((run.rank, run.world_size, run.leads, run.counts), tuple[int, int, bool, bool])
    assert_type(run.progress, lockstep.Progress)
    assert_type(run.world, lockstep.World)
    assert_type(run.metrics, dict[str, float])
    assert_type(run.micro_batch.last, bool)
    assert_type(run.settings.values.seed, int)
    run.carry["hidden"] = run.carry.get("hidden")
    run.kept.rows = [2]
    run.say("trained", model, run.sum(1), run.mean(0.5))
    assert_type(run.optimizer(torch.optim.SGD(model.parameters())), torch.optim.Optimizer)
    assert_type(run.model([nn.Linear(1, 1), lambda: nn.Linear(1, 1)]), nn.Module)
    assert_type(run.scheduler(7), int)
    assert_type(run.loader([1, 2, 3], shuffle=False), DataLoader[Any])
    assert_type(run.early_stopping("loss", 3).stopped, bool)
    assert_type(run.epochs(3), Iterator[int])
    assert_type(run.steps(100, every=10), Iterator[int])
    with torch.no_grad():
        data: Iterator[Any] = run.train(batches, batches)
        data = run.evaluate(batches)
    run.keep(data=list(data))
    assert_type(run.backward(loss, count=4, loss_is="sum"), bool)
    assert_type(run.update(), bool)
    assert_type(run.step(lambda: loss), bool)
    run.measure(loss=loss)
    assert_type(run.log(epoch=1), dict[str, object])
    run.report(0.5)
    run.report(loss)
    run.save(model, Path("model.safetensors"))
    state: Mapping[str, Any] = run.state_dict(model)
    assert_type(run.gather(len(state)), list[int])
    assert_type(run.broadcast("text"), str)
    run.barrier()
    assert_type(run.leader_first(), AbstractContextManager[None])
    run.close()


def use_audit_error(error: lockstep.AuditError) -> None:
    assert_type((error.accused, error.headline), tuple[tuple[int, ...], str])


def use_batch_plan(plan: lockstep.BatchPlan) -> None:
    assert_type(plan, lockstep.BatchPlan)
    plan = lockstep.BatchPlan.of(plan.global_batch, plan.micro_batch, plan.world_size, varies=plan.varies)
    assert_type((plan.in_turn, plan.micro_batches, plan.micro_batches_of(7)), tuple[int, int, int])
    plan.require_work_for_all_ranks()
    assert_type((plan.run(0), plan.block(0, 4)), tuple[range, range])
    assert_type(plan.steps(100, drop_last=True), int)
    for epoch in (plan.epoch(100), plan.epoch_of_batches([4, 4])):
        assert_type(len(epoch), int)
    assert_type(plan.position(0, 16, 0, last=False).index, int)


def use_progress(progress: lockstep.Progress) -> None:
    assert_type((progress.step, progress.epoch), tuple[int, int])
    assert_type((progress.epoch_step, progress.samples), tuple[int, int])
    assert_type(progress.after_step(16).after_epoch(), lockstep.Progress)
    assert_type(lockstep.Progress.from_dict(progress.as_dict()), lockstep.Progress)


def use_world(world: lockstep.World) -> None:
    assert_type((world.rank, world.size, world.local_rank, world.local_size), tuple[int, int, int, int])
    assert_type((world.node_rank, world.nodes, world.generation, world.port), tuple[int, int, int, int])
    assert_type((world.address, world.launcher, world.run_id), tuple[str, str, str])
    assert_type(world.run_dir, str | None)
    assert_type((world.leads, world.leads_node), tuple[bool, bool])
    assert_type(lockstep.World.from_env(os.environ).rank_variables(), dict[str, str])


def use_front_door() -> None:
    assert_type(lockstep.launch(main, ranks=2, args=(0.1,), run_dir="runs/a"), list[dict[str, torch.Tensor]])
    assert_type(lockstep.load("runs/a", step="best"), dict[str, torch.Tensor])
    assert_type(lockstep.tune(train_once, {"rate": Float(1e-4, 1.0)}, trials=4), SearchResult)


def use_testing(tmp_path: Path) -> None:
    assert_type(run_ranks(main, 2, timeout_s=60), list[dict[str, torch.Tensor]])
    assert_type(run_each(main, 2, 0.1, env={"A": "b"}), list[Outcome])
    assert_type(state_hash(nn.Linear(1, 1)), str)
    assert_type(verify(tmp_path / "train.py", "--epochs", "1", only=["ranks"]).is_equal, bool)


def use_outcome(outcome: Outcome) -> None:
    assert_type((outcome.rank, outcome.trace, outcome.collateral), tuple[int, str, bool])
    assert_type(outcome.error, BaseException | None)
    print(outcome.value)


def use_fault_plan(notes: Path) -> None:
    plan = FaultPlan.parse("kill rank 1 at step 7")
    plan.check(ranks=2, nodes=1)
    plan.arm(notes, rank=0)
    assert_type((len(plan.faults), len(plan.past(notes)), len(plan.missed(notes))), tuple[int, int, int])
    plan.assert_happened(notes)
    plan.clean(notes)


def use_strategy_laws(tmp_path: Path) -> None:
    laws = StrategyLaws("ddp", tmp_path, worlds=(2, 3))
    assert_type((laws.strategy, laws.directory, laws.worlds), tuple[str, Path, tuple[int, ...]])
    assert_type((laws.bits, laws.repeats, laws.worlds_agree, laws.rehearse), tuple[bool, bool, bool, bool])
    assert_type((laws.tolerance, laws.dropout, laws.batchnorm), tuple[float, float, bool])
    laws.equals_the_reference()
    laws.equals_plain_torch()
    laws.resumes_exactly()
    laws.moves_between_worlds()
    laws.moves_between_strategies()
    laws.survives_a_killed_rank()
    laws.respects_count()
    laws.clips_alike()
    laws.evaluates_exactly_once()
    laws.replays_leave_no_trace()


def train_once(params: dict[str, Any]) -> float:
    return float(params["rate"])


class Halving:
    """A rule and an algorithm of a user's own."""

    def stops(self, trial: Trial, others: Sequence[Trial]) -> str:
        return "" if trial.loss <= min(other.loss for other in others) else "worse than others"

    def observe(self, individuals: Sequence[Individual]) -> None: ...

    def forget(self, numbers: Sequence[int]) -> None: ...

    def propose(self, random: np.random.Generator) -> Proposal:
        return Proposal((float(random.random()),))


def use_stopping_rule(rule: StoppingRule, trial: Trial) -> None:
    assert_type(rule.stops(trial, [trial]), str)


def use_algorithm(algorithm: Algorithm, individual: Individual) -> None:
    algorithm.observe([individual])
    algorithm.forget([individual.number])
    assert_type(algorithm.propose(np.random.default_rng(0)), Proposal)


use_stopping_rule(Halving(), Trial(0, {}, (), "done"))
use_algorithm(Halving(), Individual(0, (0.5,), (1.0,)))


def use_tune(storage: Path) -> None:
    space = {"rate": Float(1e-4, 1, log=True), "width": Int(8, 64), "norm": Bool(), "kind": Choice("a", "b")}
    result = tune(train_once, space, islands=Islands(2), stopping=Halving(), workers=2, ranks_per_worker=[1, 2])
    assert_type(result, SearchResult)
    assert_type(load("runs/search"), SearchResult)
    assert_type(enqueue("runs/search", [{"rate": 0.1}], again=False), tuple[int, ...])
    assert_type(show(result.record, width=80), str)
    assert_type(draw_pictures(result.record, storage), tuple[Path, ...])
    assert_type(export_optuna("runs/search", storage), str)
    assert_type(import_optuna(storage, "runs/search"), int)


def use_search_result(result: SearchResult) -> None:
    assert_type(result.trials, tuple[Trial, ...])
    assert_type(result.best, Trial)
    assert_type((result.top(3, island=0), result.pareto_front), tuple[tuple[Trial, ...], tuple[Trial, ...]])
    assert_type(result.top_by_island(2), Mapping[int, tuple[Trial, ...]])
    assert_type(result.counts["done"], int)
    assert_type([failure.reason for failure in result.failures], list[str])
    assert_type(result.rank_hours, float)
    assert_type([(one.name, one.share) for one in result.importances], list[tuple[str, float]])
    assert_type(result.rows(), list[dict[str, Any]])
    assert_type(result.to_json(), dict[str, Any])
    print(result.table(), result.record)


def use_trial(trial: Trial) -> None:
    assert_type((trial.number, trial.island, trial.worker, trial.ranks, trial.attempts), tuple[int, int, int, int, int])
    assert_type(trial.params, Mapping[str, object])
    assert_type((trial.mean, trial.spread, trial.repeat_losses), tuple[float, float, tuple[float, ...]])
    assert_type(trial.repeats, tuple[Trial, ...])
    assert_type((trial.point, trial.losses), tuple[tuple[float, ...], tuple[float, ...]])
    assert_type(trial.state, Literal["running", "done", "stopped", "failed"])
    assert_type((trial.violation, trial.loss, trial.began_at_s, trial.run_s), tuple[float, float, float, float])
    assert_type((trial.reason, trial.operator), tuple[str, str])
    assert_type((trial.converged, trial.is_cut_short), tuple[bool, bool])
    assert_type((trial.parents, trial.inherits), tuple[tuple[int, ...], int | None])
    assert_type((len(trial.reports), trial.ended_at_s), tuple[int, float | None])


def use_individual(one: Individual) -> None:
    assert_type((one.number, one.island, one.worker, one.budget), tuple[int, int, int, int | None])
    assert_type((one.point, one.losses, one.violation), tuple[tuple[float, ...], tuple[float, ...], float])
    assert_type((one.parents, one.operator), tuple[tuple[int, ...], str])


def use_proposal(proposal: Proposal) -> None:
    assert_type((proposal.point, proposal.parents), tuple[tuple[float, ...], tuple[int, ...]])
    assert_type(proposal.operator, str)


def use_islands(islands: Islands) -> None:
    assert_type((islands.count, islands.sizes), tuple[int, tuple[int, ...] | None])
    assert_type((islands.migration, islands.pollination), tuple[float, bool])
    assert_type(islands.topology, tuple[tuple[int, ...], ...] | None)
    assert_type((islands.emigrants, islands.immigrants, islands.algorithm_of(0)), tuple[str, str, str])
    assert_type((islands.algorithms, islands.workers_of(0, 4)), tuple[tuple[str, ...], tuple[int, ...]])
    assert_type((islands.island_of(3), islands.sends(0, 1)), tuple[int, int])


def use_float(dimension: Float) -> None:
    assert_type((dimension.low, dimension.high, dimension.log), tuple[float, float, bool])
    assert_type((dimension.step, dimension.cells), tuple[float | None, int])
    assert_type((dimension.value(0.5), dimension.gene(0.1)), tuple[float, float])


def use_int(dimension: Int) -> None:
    assert_type((dimension.low, dimension.high, dimension.log), tuple[int, int, bool])
    assert_type((dimension.step, dimension.cells), tuple[int | None, int])
    assert_type((dimension.value(0.5), dimension.gene(8)), tuple[int, float])


def use_choice(dimension: Choice) -> None:
    assert_type((dimension.values, dimension.cells), tuple[tuple[Any, ...], int])
    assert_type((dimension.value(0.5), dimension.gene("a")), tuple[object, float])
    print(dimension.opens)
