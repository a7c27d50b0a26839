# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep"]
# ///
"""Data that does not divide: uneven shards, a last step with fewer samples than ranks. Nothing hangs, nothing is lost.

python uneven.py
lockstep run --nproc-per-node 4 uneven.py

The model keeps a tally of what it learnt from: at the end that is each sample once.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import lockstep

GLOBAL_BATCH = 16
MICRO_BATCH = 2
SHARDS = (7, 0, 30, 1, 3, 24)  # samples in each file: the last step of an epoch holds 1 of 65
ROWS = 50  # the last step holds 2


class Shards(IterableDataset[int]):
    """Samples that can only be read in their order, from shards of any length. Not a word about ranks."""

    def __init__(self, lengths: Sequence[int]) -> None:
        ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
        self.shards = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]

    def __iter__(self) -> Iterator[int]:
        yield from chain(*self.shards)


class Skipping(Shards):
    """The same from files in which one may skip: then no rank reads what belongs to another one."""

    def stride(self, start: int, step: int) -> Iterator[int]:
        """Every ``step``-th sample, beginning with number ``start``."""
        for shard in self.shards:
            here = shard[start::step]
            yield from here
            start += len(here) * step - len(shard)


class Rows(Dataset[int]):
    """Samples by index."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return index


class Tally(nn.Module):
    """One weight for each sample; plain SGD raises it by what the sample had of the step's gradient."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.learnt = nn.Parameter(torch.zeros(samples))

    def forward(self, samples: Tensor) -> Tensor:
        """The weights of ``samples``, of their shape."""
        return self.learnt[samples]


def fair(samples: int) -> Tensor:
    """What a tally of one epoch holds in ascending order: 1/16 for each sample, and more in the last, short step."""
    full, rest = divmod(samples, GLOBAL_BATCH)
    return torch.tensor([1 / GLOBAL_BATCH] * (full * GLOBAL_BATCH) + [1 / rest] * rest if rest else [])


def main() -> dict[str, Tensor]:
    """The tally of one epoch of each data set."""
    tallies = {}
    with lockstep.Run(seed=0) as run:
        datasets = {"shards": Shards(SHARDS), "shards with skipping": Skipping(SHARDS), "rows": Rows()}
        lengths = [sum(SHARDS), sum(SHARDS), ROWS]
        tally = Tally(max(lengths))
        model = run.model(tally)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        loaders = [
            run.loader(dataset, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH) for dataset in datasets.values()
        ]
        for epoch in run.epochs(len(loaders)):
            name, before, handed_out = list(datasets)[epoch], tally.learnt.detach().clone(), 0
            for samples in run.train(loaders[epoch]):
                # In a step with fewer micro-batches than ranks, one without any is handed one that counts for nothing,
                # so that it meets the others. `run.step` and `run.measure` know; a sum of one's own asks `run.counts`.
                run.step(-model(samples).mean())
                run.measure(sample=samples)
                handed_out += run.counts
            tallies[name] = (tally.learnt.detach() - before)[: lengths[epoch]].cpu()
            mean = run.metrics["sample"]
            assert mean * lengths[epoch] == sum(range(lengths[epoch])), f"{name}: samples missing, or twice: {mean}"
            run.say(f"{name}: {lengths[epoch]} samples, each once; micro-batches by rank: {run.gather(handed_out)}")
        assert run.progress.samples == sum(lengths)
        finished = run.sum(1)
        run.say(f"{finished} of {run.world_size} ranks came to the end")
    return tallies


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for name, tally in main().items():
        assert torch.allclose(tally.sort().values, fair(len(tally))), f"{name}: not each sample once: {tally.tolist()}"
