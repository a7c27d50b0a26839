"""Ranks that decide by themselves, change a module on one rank, or go by one rank's numbers: refused, or told."""

import contextlib
import copy
import csv
import io
import json
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep import Run
from lockstep.errors import MismatchError
from worlds import on_world

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()


class Phase:
    def __init__(self):
        self.smoothing = 0.0


def decided(own):
    """Each rank begins to smooth by its ``own`` last loss, or in the same step; after it, ranks are alike again."""
    with Run(seed=0) as run:
        model = run.model(nn.Linear(4, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        phase, smoothing = Phase(), 0.0
        for _ in run.epochs(2):
            for x, y in run.train(run.loader((X, Y), global_batch=8, micro_batch=2)):
                loss = F.cross_entropy(model(x), y, label_smoothing=smoothing + phase.smoothing)
                if run.step(loss):
                    reached = run.progress.step > 3 + (run.rank if own else 0)
                    if own == "attribute" and reached:
                        phase.smoothing = 0.1
                    elif reached:
                        smoothing = 0.1
        return phase.smoothing, smoothing


def averaged(on):
    """A copy of the model that steps change ``on`` the leader or on all ranks, with which all ranks evaluate."""
    with Run(seed=0) as run:
        model = run.model(nn.Linear(4, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        average = copy.deepcopy(model)
        batches = run.loader((X, Y), global_batch=8, micro_batch=2)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                if run.step(F.cross_entropy(model(x), y)) and (on == "all" or run.leads):
                    with torch.no_grad():
                        average.weight.lerp_(model.weight, 0.5)
            for x, y in run.evaluate(batches):
                run.measure(right=average(x).argmax(1) == y)
        return run.metrics["right"]


class Curriculum:
    def __init__(self):
        self.weight, self.wrong, self.seen = 1.0, 0, 0

    def see(self, wrong):
        self.wrong += wrong

    def end_epoch(self):
        if self.wrong > 1e9:
            self.weight *= 0.7
        self.wrong = 0


def evaluated(how):
    """What is said of a loss whose weight depends on what evaluations have added up: on each rank, or on all."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), Run(seed=0) as run:
        model = run.model(nn.Linear(4, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader((X, Y), global_batch=8, micro_batch=2)
        curriculum = Curriculum()
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                run.step(curriculum.weight * F.cross_entropy(model(x), y))
            for x, y in run.evaluate(batches):
                wrong = int((model(x).argmax(1) != y).sum())
                if how == "counted":
                    curriculum.seen += len(x)  # decides nothing
                else:
                    curriculum.see(wrong)
            if how == "summed":
                curriculum.wrong = run.sum(curriculum.wrong)
            curriculum.end_epoch()
    return said.getvalue()


def handed_on(value):
    """What is told of a value that rank 0 hands on; the second time nothing."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), Run(seed=0) as run:
        given = {
            "own number": 0.5 + run.rank,
            "own tensor": {"centre": torch.full((2,), float(run.rank))},
            "alike": [0.5, torch.ones(2)],
            "leader's": 0.5 if run.leads else None,
            "rank": run.rank,
        }[value]
        got = [run.broadcast(given) for _ in range(2)][-1]
    if value == "own number":
        assert got == 0.5
    return said.getvalue()


def rated(how):
    """What is said of one number of each rank, from which the learning rate is computed, or a line of a log."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), Run(seed=0) as run:
        model = run.model(nn.Linear(4, 2))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs(3):
            for x, y in run.train(run.loader((X, Y), global_batch=8, micro_batch=2)):
                run.step(F.cross_entropy(model(x), y))
            own, seconds = 0.5 + 0.01 * run.progress.step, 0.25
            if how == "gathered":
                optimizer.param_groups[0]["lr"] = 0.1 * max(run.gather(own))
            elif how == "mean":
                optimizer.param_groups[0]["lr"] = 0.1 * run.mean(own)
            else:
                run.say(f"slowest: {max(run.gather(seconds))}")
    return said.getvalue()


def refusal(function, *args):
    try:
        function(*args)
    except MismatchError as error:
        return str(error)
    return ""


DECIDED = {"variable": "smoothing", "attribute": "phase.smoothing", None: ""}


@pytest.fixture(scope="module")
def decisions():
    return dict(zip(DECIDED, on_world(2, [(refusal, decided, own) for own in DECIDED]), strict=True))


@pytest.mark.parametrize("own", DECIDED)
def test_decisions_that_differed_in_some_steps_are_refused_at_the_next_comparison(decisions, own):
    for told in decisions[own]:
        if own is None:
            assert told == ""
        else:
            assert f": {DECIDED[own]}, which run.step(...) is computed from, in earlier steps on rank 1" in told


def decided_between_passes(own):
    """A smoothing that each pass computes anew after its last body; ranks differ for the third pass only."""
    smoothing = 0.0
    with Run(seed=0) as run:
        model = run.model(nn.Linear(4, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader((X, Y), global_batch=8, micro_batch=2)
        for epoch in run.epochs(6):
            for x, y in run.train(batches):
                run.step(F.cross_entropy(model(x), y, label_smoothing=smoothing))
            smoothing = 0.2 if epoch == 2 and (run.rank or not own) else 0.1


def test_what_differs_for_a_pass_that_is_not_looked_at_is_refused_too():
    on_own, on_all = on_world(2, [(refusal, decided_between_passes, own) for own in (True, False)])
    for told in on_own:
        assert ": smoothing, which run.step(...) is computed from, " in told
    assert on_all == ["", ""]


def test_a_module_that_only_one_rank_has_changed_is_refused_in_an_evaluation():
    on_leader, on_all = on_world(2, [(refusal, averaged, "the leader"), (refusal, averaged, "all")])
    for told in on_leader:
        assert "average.weight, by which run.evaluate(...) is computed, on rank 1. Something" in told
    assert on_all == ["", ""]


def test_what_evaluations_change_on_each_rank_and_the_training_computes_with_is_told():
    own, *others = on_world(2, [(evaluated, how) for how in ("own", "summed", "counted")])
    told = "curriculum.wrong, which run.step(...) is computed from, is changed by the loop's body"
    assert told in own[0]
    for other, _ in others:
        assert "is changed by the body" not in other


def test_numbers_of_one_rank_that_it_hands_on_are_told_once():
    kinds = ("own number", "own tensor", "alike", "leader's", "rank")
    for kind, (first, other) in zip(kinds, on_world(2, [(handed_on, kind) for kind in kinds]), strict=True):
        assert ("rank 1 another one. A value that rank 0 has from its own micro-batches" in first) == ("own" in kind)
        assert first.count("another one") <= 1
        assert "another one" not in other


def fit(run, model, loader):
    for _ in run.epochs(2):
        for x, y in run.train(loader):
            run.step(F.cross_entropy(model(x), y))


def counted():
    """What is said of a variable that is told, where another function's variable with its name is changed."""
    said = io.StringIO()
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), Run(seed=0) as run:
        model = run.model(nn.Linear(4, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        fit(run, model, run.loader((x, y), global_batch=32, micro_batch=4))
    json.dumps({"samples": len(y)})
    return said.getvalue()


def test_of_two_variables_with_one_name_the_one_that_is_told_counts():
    (ranks,) = on_world(2, [(counted,)])
    for told in ranks:
        assert "is changed by the loop" not in told


def scored_twice():
    """A list that one evaluation fills, and that is brought together under its name for a second one."""
    with Run(seed=0) as run:
        model = run.model(nn.Linear(4, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader((X, Y), global_batch=8, micro_batch=2, shuffle=False)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                run.step(F.cross_entropy(model(x), y))
            bank = []
            for x, _ in run.evaluate(batches):
                if run.counts:
                    bank.append(model(x))
            bank = torch.cat([part for parts in run.gather(bank) for part in parts])
            for x, _ in run.evaluate(batches):
                run.measure(near=torch.cdist(model(x), bank).topk(2, largest=False).values[:, 1])
        return run.metrics["near"]


def test_what_one_evaluation_fills_another_may_measure_with():
    (on_one,) = on_world(1, [(scored_twice,)])
    (on_two,) = on_world(2, [(scored_twice,)])
    assert on_two == on_one * 2


def test_one_number_of_each_rank_is_told_where_the_training_is_computed_from_it():
    told = "brings together one number of each rank, and optimizer.param_groups[0]['lr'] is computed from"
    ways = ("gathered", "mean", "logged")
    for how, (first, other) in zip(ways, on_world(2, [(rated, how) for how in ways]), strict=True):
        assert first.count(told) == (how != "logged"), how
        assert "last digits" not in first
        assert told not in other


def scaled_by_gathered(how, strategy):
    """A factor of the loss is computed from what bodies of all ranks have collected; what is said, and the factors."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), Run(seed=0, strategy=strategy) as run:
        model = run.model(nn.Linear(4, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader((X, Y), global_batch=8, micro_batch=2, shuffle=False)
        factor, factors = 1.0, []
        for _ in run.epochs(2):
            of_pass, of_step = [], []
            for x, y in run.train(batches):
                loss = F.cross_entropy(model(x), y)
                if run.counts:
                    of_pass.append(loss.detach())
                    of_step.append(loss.detach())
                if not run.step(loss * factor):
                    continue
                if how == "a list of the step":
                    factor = torch.stack([each for part in run.gather(of_step) for each in part]).mean().item()
                elif how == "a tensor of the step":
                    factor = torch.cat(run.gather(torch.stack(of_step))).mean().item()
                of_step.clear()
            if how == "a list of the pass":
                factor = torch.stack([each for part in run.gather(of_pass) for each in part]).mean().item()
            elif how == "an evaluation":
                found = []
                for x, y in run.evaluate(batches):
                    if run.counts:
                        found.append(F.cross_entropy(model(x), y))
                factor = torch.stack([each for part in run.gather(found) for each in part]).mean().item()
            factors.append(factor)
    return said.getvalue().count("their order depends on the number of ranks"), factors


def test_numbers_whose_order_depends_on_the_ranks_are_told_where_the_training_is_computed_from_them():
    of_step, of_pass, evaluated = "a list of the step", "a list of the pass", "an evaluation"
    told = {("ddp", of_pass), ("fsdp", of_pass), ("fsdp", "a tensor of the step")}
    ways = list(product((of_step, "a tensor of the step", of_pass, evaluated), ("ddp", "fsdp")))
    alone = on_world(1, [(scaled_by_gathered, how, "none") for how, _ in ways])
    two = on_world(2, [(scaled_by_gathered, *way) for way in ways])
    for (how, strategy), ((_, whole),), ((said, factors), _) in zip(ways, alone, two, strict=True):
        assert said == ((strategy, how) in told), (how, strategy, said)
        if not said:
            assert factors == whole, (how, strategy)


def recorded(how):
    """What is said where a body, of the training or of an evaluation, writes what it has of its own micro-batch."""
    said = io.StringIO()
    file, rows = io.StringIO(), []
    table = csv.writer(file)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), Run(seed=0) as run:
        model = run.model(nn.Linear(4, 2))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader((X, Y), global_batch=8, micro_batch=2, shuffle=False)
        for _ in run.epochs(2):
            for x, y in run.train(batches):
                loss = F.cross_entropy(model(x), y)
                if run.step(loss):
                    if how == "loss" and run.leads:
                        table.writerow(["loss", loss.item(), run.progress.step])
                    if how == "rate":
                        table.writerow(["rate", optimizer.param_groups[0]["lr"], run.progress.step])
                    if how == "sum":
                        table.writerow(["loss", run.sum(loss.item())])
                    if how == "logarithm":
                        torch.log(x.square() + 1)
            for x, _ in run.evaluate(batches):
                if how == "predictions":
                    for row in model(x).argmax(1).tolist():
                        file.write(f"{row}\n")
                if how == "kept" and run.counts:
                    rows.append(model(x))
            if how == "kept":
                file.write(str(run.gather(rows)))
                rows.clear()
    return said.getvalue()


def test_what_a_body_records_of_its_own_micro_batch_is_told_once():
    told = {"loss": "table.writerow(...)", "predictions": "file.write(...)"}
    kinds = (*told, "rate", "sum", "logarithm", "kept")
    for world in (1, 2):
        for kind, (first, *_) in zip(kinds, on_world(world, [(recorded, kind) for kind in kinds]), strict=True):
            says = f"{told.get(kind)} is computed from a micro-batch of this rank in line"
            assert first.count("of this rank in line") == first.count(says) == (kind in told), first


def last_loss(run, model, loader):
    for x, y in run.train(loader):
        loss = F.cross_entropy(model(x), y)
        run.step(loss)
    return loss.item()


def history_of(what):
    """What is said of a file with what a function that has the loop gives back: of its last micro-batch, or of all."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), Run(seed=0) as run:
        model = run.model(nn.Linear(4, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader((X, Y), global_batch=8, micro_batch=2)
        history = {"loss": []}
        for _ in run.epochs(2):
            last = last_loss(run, model, batches)
            history["loss"].append(last if what == "last" else run.metrics["loss"])
        json.dump(history, io.StringIO())
    return said.getvalue()


def test_a_file_of_what_a_function_gives_of_its_last_micro_batch_is_told():
    for world in (1, 2):
        last, mean = on_world(world, [(history_of, what) for what in ("last", "mean")])
        assert last[0].count("json.dump(...) is computed from loss, of the last micro-batch of the loop in line") == 1
        assert "json.dump" not in mean[0]
