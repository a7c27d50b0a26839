"""Batch sizes and loader processes given from outside hold over what the script says; its own settings stand below."""

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

from lockstep.errors import SettingError, UsageError
from lockstep.run import Run

X = torch.linspace(0, 1, 24).view(24, 1)


def sizes(monkeypatch, outside, loader, **settings):
    """Global batch, micro-batches of a step, and samples of the first, of a run with such a loader."""
    for name, value in outside.items():
        monkeypatch.setenv(f"LOCKSTEP_{name.upper()}", str(value))
    with Run(**settings) as run:
        model = run.model(nn.Linear(1, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x in run.train(loader(run)):
            here = run.micro_batch
            run.step(model(x[0] if isinstance(x, list) else x).mean())
            if here.last:
                return here.step_samples, here.of, here.samples
    return None


@pytest.mark.parametrize(
    ("outside", "script", "settings", "found"),
    [
        ({}, {"global_batch": 12, "micro_batch": 4}, {}, (12, 3, 4)),
        ({"global_batch": 6}, {"global_batch": 12, "micro_batch": 3}, {}, (6, 2, 3)),
        ({"micro_batch": 6}, {"global_batch": 12, "micro_batch": 3}, {}, (12, 2, 6)),
        ({"micro_batch": 6}, {"global_batch": 4, "micro_batch": 2}, {}, (4, 1, 4)),
        ({"global_batch": 8, "micro_batch": 8}, {"global_batch": 12}, {"micro_batch": 2}, (8, 1, 8)),
        ({}, {"global_batch": 12}, {"micro_batch": 6, "global_batch": 24}, (12, 2, 6)),
        ({}, {}, {"global_batch": 12, "micro_batch": 6}, (12, 2, 6)),
    ],
)
def test_outside_then_loader_then_script(monkeypatch, outside, script, settings, found):
    assert sizes(monkeypatch, outside, lambda run: run.loader(X, **script), **settings) == found


def test_the_batch_of_a_data_loader_is_that_of_outside_too(monkeypatch):
    data = DataLoader(TensorDataset(X), batch_size=12)
    assert sizes(monkeypatch, {"global_batch": 4, "workers": 0}, lambda run: run.loader(data, micro_batch=2)) == (
        4,
        2,
        2,
    )


def test_batches_that_a_sampler_makes_cannot_be_given_from_outside(monkeypatch):
    batches = BatchSampler(RandomSampler(X), 6, drop_last=False)

    def loader(run):
        return run.loader(X, batch_sampler=batches)

    assert sizes(monkeypatch, {"micro_batch": 3}, loader, global_batch=12) == (6, 2, 3)
    with pytest.raises(SettingError, match=r"global_batch=12 .*batch_sampler"):
        sizes(monkeypatch, {"global_batch": 12}, loader)


def test_without_any_it_is_asked_for(monkeypatch):
    with pytest.raises(UsageError, match="say how many samples"):
        sizes(monkeypatch, {}, lambda run: run.loader(X))


class Rows(Dataset):
    """Rows of a tensor, which loader processes would read."""

    def __init__(self, device):
        self.rows = torch.zeros(24, 1, device=device)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.rows[index]


@pytest.mark.parametrize(("device", "workers"), [("cpu", 1), ("meta", 0)])
def test_what_lies_on_a_gpu_is_read_without_loader_processes(monkeypatch, device, workers):
    """In a forked process CUDA cannot be used; "meta" stands for a GPU. What reads the run itself may use no GPU."""
    monkeypatch.setattr("lockstep.run.batches.loaders.cpus_of_this_rank", lambda: 2)
    with Run() as run:
        run.model(nn.Linear(1, 1)).there = torch.empty(1, device="meta")
        seeded = lambda samples: (run.seed, torch.stack(samples))  # noqa: E731
        assert run.loader(Rows(device), global_batch=4, collate_fn=seeded).num_workers == workers


@pytest.mark.parametrize(
    ("norm", "sizes", "is_said"),
    [
        (nn.BatchNorm1d(1), {"global_batch": 16}, True),
        (nn.BatchNorm1d(1), {"global_batch": 16, "micro_batch": 2}, False),
        (nn.BatchNorm1d(1).eval(), {"global_batch": 16}, False),
        (nn.LayerNorm(1), {"global_batch": 16}, False),
    ],
)
def test_over_what_a_batch_norm_normalises_is_said_where_nobody_has_chosen_it(capfd, norm, sizes, is_said):
    with Run() as run:
        model = run.model(nn.Sequential(nn.Linear(1, 1), norm))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = run.loader(X, **sizes)
        for _ in run.epochs(2):
            for x in run.train(loader):
                run.step(model(x).mean())
    words = "BatchNorm normalises over the 2 samples of a micro-batch; to choose how many, give micro_batch=... beside"
    assert capfd.readouterr().err.count(words) == is_said
