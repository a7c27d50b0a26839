"""What the script changes in a data set between two epochs is seen by loader processes, too."""

import os

import pytest
import torch
from loaders import loader_of
from torch.utils.data import Dataset, Subset

from lockstep.batch import BatchPlan
from lockstep.data.dataset_marks import DatasetMarks


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, value):
        return value * self.factor


class Scaled(Dataset):
    """Samples that depend on what the script may change: a transform, a number, a tensor, a list."""

    def __init__(self):
        self.transforms = [Scale(1)]
        self.shift = 0
        self.noise = torch.zeros(6)
        self.known = list(range(6))

    def __len__(self):
        return 6

    def __getitem__(self, index):
        value = self.known[index] + self.shift + self.noise[index].item()
        for transform in self.transforms:
            value = transform(value)
        return value, os.getpid()


def change_nothing(dataset):
    pass


def change_transform(dataset):
    dataset.transforms[0].factor = 2


def change_number(dataset):
    dataset.shift = 1000


def change_tensor(dataset):
    dataset.noise += 1


def change_list(dataset):
    dataset.known = dataset.known[::-1]


CHANGES = [change_nothing, change_transform, change_number, change_tensor, change_list]


def test_loader_processes_see_what_the_script_changes_between_epochs():
    datasets = [Scaled(), Scaled()]
    here, there = (
        loader_of(Subset(d, range(6)), BatchPlan(3, 3, 1), workers=w) for d, w in zip(datasets, (0, 1), strict=True)
    )

    def epoch(loader, number):
        values, processes = zip(*(batch.data for batch in loader.epoch(number, padding="none")), strict=True)
        return torch.cat(values).tolist(), set(torch.cat(processes).tolist())

    before = epoch(there, 0)[1]
    for number, change in enumerate(CHANGES, 1):
        for dataset in datasets:
            change(dataset)
        values, processes = epoch(there, number)
        assert values == epoch(here, number)[0], change
        assert (processes == before) == (change is change_nothing), "they live on where nothing was changed"
        before = processes
    there.close()


@pytest.mark.parametrize("change", CHANGES)
def test_marks_differ_where_something_was_changed(change):
    dataset = Subset(Scaled(), range(6))
    dataset.itself = dataset
    before = DatasetMarks(dataset)
    change(dataset.dataset)
    assert DatasetMarks(dataset).differ_from(before) == (change is not change_nothing)
