"""What the script changes in a data set between two epochs is seen by loader processes, too."""

import os
import weakref
from array import array
from collections import deque
from functools import partial

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from loaders import loader_of
from lockstep.batch import BatchPlan
from lockstep.data.dataset_marks import DatasetMarks, hold_gpu
from lockstep.errors import DataError


class Scale:
    strength = 1  # of all

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, value):
        return value * self.factor * Scale.strength


OFFSET = 0


def with_offset(value):
    return value + OFFSET


def added(terms):
    return lambda value: with_offset(value) + sum(terms)


class Scaled(Dataset):
    """Samples that depend on what the script may change: a transform, a number, a tensor, a list, a global variable."""

    def __init__(self):
        self.transforms = [Scale(1), added([0])]
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


def change_class(dataset):
    Scale.strength += 1


def change_global(dataset):
    globals()["OFFSET"] += 1


def change_enclosed(dataset):
    dataset.transforms[1].__closure__[0].cell_contents[0] += 1


CHANGES = [
    *(change_nothing, change_transform, change_number, change_tensor, change_list),
    *(change_class, change_global, change_enclosed),
]


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
    scaled = Scaled()
    dataset = ConcatDataset([Subset(Subset(scaled, range(6)), range(6))])
    dataset.itself = dataset
    before = DatasetMarks(dataset)
    change(scaled)
    assert DatasetMarks(dataset).differ_from(before) == (change is not change_nothing)


class FarAway:
    """Answers for something that cannot be asked now."""

    __slots__ = ()

    def __getattr__(self, name):
        raise ConnectionError(name)


def test_a_data_set_may_hold_anything():
    dataset = Scaled()
    with torch.inference_mode():
        dataset.embedded = torch.ones(3)
    dataset.parts = [
        weakref.proxy(Scaled()),  # which is gone
        FarAway(),
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        lambda: None,
        float("nan"),
    ]
    dataset.text = "a" * 10**6
    before = DatasetMarks(dataset)
    assert not DatasetMarks(dataset).differ_from(before)
    dataset.text = "b" * 10**6
    assert DatasetMarks(dataset).differ_from(before)


@pytest.mark.parametrize("length", [3, 64])
@pytest.mark.parametrize("kind", [list, deque, bytearray, partial(array, "i")])
def test_a_container_whose_length_stays_is_seen_to_change(kind, length):
    dataset = Scaled()
    dataset.known = kind(range(length))
    before = DatasetMarks(dataset)
    assert not DatasetMarks(dataset).differ_from(before)
    dataset.known[1] = 99
    assert DatasetMarks(dataset).differ_from(before)


def of_an_epoch(loader, number):
    loader.draw(number)
    return torch.cat([batch.data for batch in loader.epoch(number, padding="none")])


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_the_script_adds_are_not_left_out_in_silence(workers):
    samples = [float(number) for number in range(6)]
    loader = loader_of(samples, BatchPlan(3, 3, 1), workers=workers)
    by_order = loader_of(
        samples, BatchPlan(3, 3, 1), workers=workers, order=lambda epoch, generator: range(len(samples))
    )
    assert len(of_an_epoch(loader, 0)) == len(of_an_epoch(by_order, 0)) == 6
    samples.append(6.0)
    with pytest.raises(DataError, match=r"holds 7 samples now, and held 6.*call run.loader again"):
        loader.draw(1)
    assert of_an_epoch(by_order, 1).tolist() == samples
    loader.close()
    by_order.close()


def test_tensors_that_the_script_puts_into_a_data_set_are_read():
    dataset = TensorDataset(torch.zeros(6))
    loader = loader_of(Subset(dataset, range(6)), BatchPlan(3, 3, 1), collate_fn=None)

    def read(number):
        return torch.cat([batch.data[0] for batch in loader.epoch(number, padding="none")]).tolist()

    assert read(0) == [0] * 6
    dataset.tensors = (torch.ones(6),)
    assert read(1) == [1] * 6
    dataset.tensors = (torch.ones(6), "a text")
    with pytest.raises(DataError, match="also holds a str"):
        read(2)


#: They stand for a GPU: neither is of the CPU.
THERE, ELSEWHERE = torch.empty(2, device="meta"), torch.device("meta")


def to_there(samples):
    return [sample.to(THERE.device) for sample in samples]


def to(place):
    return lambda samples: [sample.to(place) for sample in samples]


def with_attribute(value):
    dataset = Scaled()
    dataset.transforms.append(Scale(value))
    return Subset(dataset, range(6))


@pytest.mark.parametrize(
    ("holder", "holds"),
    [
        (with_attribute(THERE), True),
        (with_attribute(ELSEWHERE), True),
        (with_attribute([(THERE, 0)] * 64), True),
        (with_attribute([(torch.empty(2), 0)] * 64), False),
        (with_attribute(torch.empty(2)), False),
        (with_attribute(torch.device("cpu")), False),
        (TensorDataset(THERE), True),
        (to_there, True),
        (to(ELSEWHERE), True),
        (to("cpu"), False),
        (partial(torch.Tensor.to, device=ELSEWHERE), True),
        (None, False),
    ],
)
def test_what_uses_a_gpu_is_known_by_what_it_holds(holder, holds):
    assert hold_gpu(Scaled(), holder) == holds
