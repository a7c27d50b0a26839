"""What a collate function draws depends on the seed, the epoch and the micro-batch, and on nothing else."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from loaders import loader_of, on_world, place_of
from lockstep.batch import BatchPlan

SIZES = (8, 2)  # 4 micro-batches a step
LENGTHS = (21, 18, 22)  # the last step holds: fewer samples than a rank's share, fewer than micro-batches, one short


class Numbers(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index + random.random()


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return (number + random.random() for number in range(self.length))


class StridedReader(Stream):
    def stride(self, start, step):
        return (number + random.random() for number in range(start, self.length, step))


def with_noise(samples):
    return samples, torch.rand(2).tolist(), random.random(), np.random.rand()


def table_of(got):
    return {place_of(b): b.data for rank in got for b in rank if not b.position.is_padding}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", [Numbers, Stream, StridedReader])
def test_draws_are_the_same_on_any_world_and_with_any_number_of_workers(kind, length):
    def draws(world, **options):
        return table_of(on_world(kind(length), SIZES, world, epoch=1, collate_fn=with_noise, **options))

    alone = draws(1)
    for world in (2, 3, 4):
        torch.rand(3)
        assert draws(world) == draws(world, padding="even") == alone
    assert draws(1, first_step=1) == {place: data for place, data in alone.items() if place[0] >= 1}
    noise = [(torch_, python, numpy) for _, (torch_, *_), python, numpy in alone.values()]
    for column in zip(*noise, strict=True):
        assert len(set(column)) == len(alone), "two micro-batches drew the same"


@pytest.mark.parametrize("kind", [Numbers, Stream, StridedReader])
def test_loader_processes_draw_as_this_process_does(kind):
    for rank in range(2):
        tables = []
        for workers in (0, 2):
            loader = loader_of(
                kind(16), BatchPlan(*SIZES, 2), rank, agree=lambda c: [c, c], workers=workers, collate_fn=with_noise
            )
            # Whole steps only: of the end, the other rank would have to be told.
            steps = [b for b in loader.epoch(1, padding="none") if b.position.step < 1]
            tables.append(table_of([steps]))
            loader.close()
        assert tables[0] == tables[1]


class DrawsItself(IterableDataset):
    def __iter__(self):
        return (torch.rand(()) for _ in range(8))


def test_what_a_stream_draws_differs_from_epoch_to_epoch():
    loader = loader_of(DrawsItself(), BatchPlan(8, 2, 1), agree=lambda counts: [counts])
    epochs = [torch.cat([micro.data for micro in loader.epoch(epoch, padding="none")]) for epoch in (0, 1, 0)]
    assert torch.equal(epochs[0], epochs[2])
    assert not torch.isin(epochs[0], epochs[1]).any()
