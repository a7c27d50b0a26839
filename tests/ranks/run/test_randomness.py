"""Random numbers and modes: what the script draws, and how it set its modules, is the same on every rank and world."""

import contextlib
import importlib
import io
import os
import random

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.run import Run
from lockstep.testing import run_ranks
from worlds import on_world

X = torch.sin(torch.arange(76.0)).view(38, 2)
SIZES = {"global_batch": 8, "micro_batch": 2}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")


def draw():
    return float(torch.rand(())), float(np.random.rand()), random.random()


def drawn(strategy):
    """What is drawn outside of train and evaluate, and where a step is done."""
    with Run(seed=3, strategy=strategy, replay=strategy == "ddp") as run:
        model = run.model(nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1)))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches, held_out = run.loader(X, **SIZES), run.loader(X[:18], **SIZES)
        told = {"before": [draw()]}
        for epoch in run.epochs(3):
            told[f"begin {epoch}"] = [draw()]
            for batch in run.train(batches):
                draw()
                if run.step(model(batch).square().mean()):
                    told[f"step {run.progress.step}"] = [draw(), draw()]
                    if epoch == 1 and run.progress.epoch_step == 2:
                        break
                draw()
            told[f"trained {epoch}"] = [draw()]
            for number in range(2):
                for _ in run.evaluate(held_out):
                    draw()
                told[f"evaluated {epoch} {number}"] = [draw()]
        told["after"] = [draw()]
        return told


def drawn_in_evaluations():
    """By pass and micro-batch, in the data set's order: what an evaluation draws."""
    with Run(seed=3) as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(X, **SIZES)
        held_out = run.loader(torch.arange(40.0), shuffle=False, **SIZES)
        passes = []
        for _ in run.epochs(2):
            for batch in run.train(batches):
                run.step(model(batch).square().mean())
            for _ in range(2):
                mine = [(batch.tolist(), draw()) for batch in run.evaluate(held_out)]
                passes.append([one for rank in run.gather(mine) for one in rank])
        return passes


def test_the_script_draws_alike_on_all_ranks_and_worlds():
    first = None
    for world in (1, 2, 3):
        results = on_world(world, [(drawn, "ddp"), (drawn, "zero"), (drawn, "fsdp")])
        first = first or results[0][0]
        for ranks in results:
            for told in ranks:
                assert told == first
    numbers = [one for draws in first.values() for one in draws]
    assert len(set(numbers)) == len(numbers), "no numbers come twice"
    assert len(first) == 2 + 3 * 4 + 12


def test_an_evaluation_draws_for_each_micro_batch_and_pass_again_and_the_same_on_every_world():
    first = None
    for world in (1, 2, 4):
        (ranks,) = on_world(world, [(drawn_in_evaluations,)])
        first = first or ranks[0]
        assert ranks == [first] * world
    assert len(first) == 4
    for passed in first:
        assert [number for batch, _ in passed for number in batch] == list(range(40))
    numbers = [draws for passed in first for _, draws in passed]
    assert len(set(numbers)) == len(numbers) == 80


def resumed(directory, epochs):
    """The draws of the last epoch's two evaluations, which may be those of a resumed run."""
    with Run(checkpoint=directory, save_every="1 epoch") as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        held_out, told = run.loader(X[:8], **SIZES), {}
        for epoch in run.epochs(epochs):
            for place in ("begin", "end"):
                if place == "end":
                    for batch in run.train(run.loader(X, **SIZES)):
                        run.step(model(batch).square().mean())
                for number in range(2):
                    told[epoch, place, number] = [draw() for _ in run.evaluate(held_out)]
        return told


def test_a_resumed_run_draws_in_evaluations_what_the_other_would_have(tmp_path, monkeypatch):
    (whole,) = run_ranks(resumed, 1, tmp_path / "whole", 3)
    run_ranks(resumed, 1, tmp_path / "parts", 2)
    (found,) = run_ranks(resumed, 1, tmp_path / "parts", 3, env={"LOCKSTEP_RESUME": "1"})
    assert found == {key: draws for key, draws in whole.items() if key[0] == 2}


# ---- modes -----------------------------------------------------------------------------------------------------------


def modes(strategy):
    with Run(strategy=strategy) as run:
        module = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model = run.model(module)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        module[1].eval()  # frozen, as in fine-tuning
        batches, told = run.loader(X, **SIZES), []
        for _ in run.epochs(2):
            for batch in run.train(batches):
                told.append([part.training for part in (module, *module)])
                run.step(model(batch).square().mean())
            module[2].eval()
            for _ in run.evaluate(batches):
                assert not any(part.training for part in module.modules())
                break
            told.append([part.training for part in (module, *module)])
            module[2].train()
        frozen = module[1].running_mean.tolist() == [0] * 4 and int(module[1].num_batches_tracked) == 0
        return told, frozen, int(module[3].num_batches_tracked)


def test_modes_stay_as_the_script_has_set_them():
    training, evaluated = [True, True, False, True, True, True], [True, True, False, False, True, True]
    for world in (1, 2):
        for ranks in on_world(world, [(modes, "ddp"), (modes, "zero"), (modes, "fsdp")]):
            for told, frozen, steps in ranks:
                assert {tuple(one) for one in told} == {tuple(training), tuple(evaluated)}
                assert told.count(evaluated) == 2
                assert frozen
                assert steps == 10


def test_a_model_that_is_in_evaluation_mode_as_a_whole_learns_in_training_mode():
    with Run() as run:
        model = run.model(nn.Sequential(nn.Linear(2, 1), nn.Dropout()))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model.eval()
        for batch in run.train(run.loader(X, **SIZES)):
            assert model.training
            assert model[1].training
            run.step(model(batch).mean())
        model.eval()
        for _ in run.evaluate(run.loader(X, **SIZES)):
            pass
        assert not model.training, "as it was before"


def drawn_after_a_break(strategy):
    """What is drawn where the loop was left before a step, in the body of its first micro-batch on each rank."""
    with Run(seed=3, strategy=strategy) as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(X, **SIZES)
        numbers = []
        for _ in run.epochs(2):
            for batch in run.train(batches):
                if run.progress.epoch_step == 2:
                    break
                run.step(model(batch).square().mean())
            numbers.append(draw())
        return numbers


def test_the_script_draws_alike_after_a_loop_that_it_left():
    found = [ranks for world in (1, 2, 3) for ranks in on_world(world, [(drawn_after_a_break, "ddp")])]
    assert len({str(numbers) for ranks in found for numbers in ranks}) == 1
    first, second = found[0][0]
    assert first != second


def said_of_draws_before(seeds, draws):
    """What rank 0 says as a run is opened, after the ranks have drawn from generators with these seeds."""
    for seed, generator in zip(seeds, (torch.manual_seed, random.seed, np.random.seed), strict=True):
        generator(seed * int(os.environ["RANK"]))
    for _ in range(draws):
        draw()
    with contextlib.redirect_stderr(io.StringIO()) as said, Run(seed=3):
        first = draw()
    return said.getvalue(), first


def said_after_an_import(draws):
    """What rank 0 says where ``rich`` was imported, and so many numbers were drawn in all."""
    importlib.import_module("rich.style")
    random.seed(int(os.environ["RANK"]))
    for _ in range(draws):
        random.getrandbits(24)
    with contextlib.redirect_stderr(io.StringIO()) as said, Run(seed=3):
        return said.getvalue()


def test_a_number_that_an_import_draws_is_none_of_the_scripts():
    """A random identifier of ``rich``, which scikit-learn loads: under torchrun each rank draws another one."""
    for draws, told in ((1, False), (2, True)):
        first, *_ = run_ranks(said_after_an_import, 2, draws)
        assert ("rank 1 drew other random numbers" in first) == told


def test_ranks_that_drew_other_numbers_before_the_run_are_told():
    calls = [((1, 1, 1), 0), ((0, 0, 0), 3), ((1, 0, 0), 1), ((0, 5, 7), 3)]
    ended = on_world(3, [(said_of_draws_before, *call) for call in calls])
    assert len({draws for ranks in ended for _, draws in ranks}) == 1, "a run seeds them whatever was drawn"
    undrawn, alike, torchs, others = [[said for said, _ in ranks] for ranks in ended]
    assert "drew" not in str([undrawn, alike, torchs[1:], others[1:]])
    assert "before Run(...), rank 1 drew other random numbers than rank 0 (torch): " in torchs[0]
    assert "before Run(...), rank 1 drew other random numbers than rank 0 (random, numpy.random): " in others[0]
