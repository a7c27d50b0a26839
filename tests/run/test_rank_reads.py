"""What a script computes from the number of ranks before the training is said; what changes no result is not."""

import pytest
import torch
from torch import nn

from lockstep.run import Run
from lockstep.run.rank_reads import computed_from


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("opt = SGD(model.parameters(), lr=0.1 * run.world_size)", ["lr"]),
        ("opt = SGD(model.parameters(), 0.9, weight_decay=max(1, 2 / run.world_size))", ["weight_decay"]),
        ("base_lr = 0.1 * run.world_size ** 0.5", ["base_lr"]),
        ("args.learning_rate = args.base * run.world_size", ["learning_rate"]),
        ("loader = run.loader(data, global_batch=32 * run.world_size)", ["global_batch"]),
        ("steps = epochs * len(loader) // run.world_size", ["steps"]),
        ("torch.manual_seed(SEED + run.world_size)", ["manual_seed"]),
        ("data = points(seed=run.world_size)", ["seed"]),
        ("print(run.world_size * 2)", []),
        ("print(f'lr {run.world_size + 1}')", []),
        ("if run.world_size == 2: lr = 0.1", []),
        ("lr = 0.1 if run.world_size > 1 else 0.2", []),
        ("mine = data[run.world_size + 1 :]", []),
        ("workers = cpus // run.world_size", []),
        ("loader = run.loader(data, workers=os.cpu_count() // run.world_size, global_batch=8)", []),
        ("batches = make(run.world_size - 1)", []),
        ("world = run.world_size", []),
        ("lr = 0.1 * run.world_size (", []),
    ],
)
def test_hyperparameters_and_seeds_are_told_from_other_uses(line, found):
    assert list(computed_from(f"import x\n{line}\n", 2, "world_size")) == found
    assert list(computed_from(f"import x\n{line}\n", 2, "rank")) == []


def test_a_learning_rate_that_is_scaled_by_the_ranks_is_said_once_and_only_before_the_training(capfd, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with Run() as run:
        model = run.model(nn.Linear(1, 1))
        for _ in range(2):
            optimizer = torch.optim.SGD(
                model.parameters(),
                lr=0.1 * run.world_size,
            )
        run.optimizer(optimizer)
        for _ in run.epochs(2):
            for x in run.train(run.loader(torch.ones(8, 1), global_batch=4 + run.rank, micro_batch=2)):
                run.step(model(x).mean())
            optimizer.param_groups[0]["lr"] = 0.1 * run.world_size
    said = capfd.readouterr().err
    assert said.count("depends on run.") == 1
    assert ": lr depends on run.world_size, and the result with it. Nothing needs to be scaled by ranks" in said
