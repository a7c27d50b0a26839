"""Streams that look around themselves give the same samples in the same order on any rank and in any process."""

import contextlib
import copy
import gc
import io
import os
import re
import subprocess
import tarfile
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from campaign_marks import combinations
from loaders import loader_of, on_world, steps_of
from lockstep.batch import BatchPlan
from lockstep.data.iterable.iterable_dataset import single_process_view
from lockstep.data.seen_samples import checksum
from lockstep.errors import DataError
from lockstep.run import Run
from lockstep.testing import state_hash
from worlds import on_world as on_ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning",  # webdataset leaves shards open
    "ignore::pytest.PytestUnraisableExceptionWarning",
)

SIZES = (6, 2)
PLACE = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "WORKER": "2",
    "NUM_WORKERS": "3",
}


def around():
    """What a stream finds where it looks for its place."""
    worker = get_worker_info()
    return [*map(os.environ.get, PLACE), None if worker is None else worker.id]


ALONE = ["0", "1", "0", "1", "0", "1", None]
NOT_TOLD = [None] * 7


class LooksAround(IterableDataset):
    """Looks as it is asked for an iterator, as it begins, and for each sample."""

    def __iter__(self):
        first = around()
        return (self.sample(first) for _ in range(14))

    def sample(self, first):
        return [*first, *around()]


class LooksAroundByStride(LooksAround):
    def stride(self, start, step):
        first = around()
        return (self.sample(first) for _ in range(start, 14, step))


@pytest.mark.parametrize("kind", [LooksAround, LooksAroundByStride])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("told", [True, False])
def test_a_stream_sees_one_rank_and_no_loader_process(monkeypatch, kind, workers, told):
    for name, value in PLACE.items():
        if told:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    loader = loader_of(
        kind(), BatchPlan(*SIZES, 1), agree=lambda counts: [counts], workers=workers, collate_fn=lambda found: found
    )
    before = dict(os.environ)
    seen = []
    for batch in loader.epoch(0, 1, padding="none"):
        assert dict(os.environ) == before
        seen += batch.data
    loader.close()
    assert seen == [2 * (ALONE if told else NOT_TOLD)] * 8
    assert [place for batch in loader.data_loader for place in batch] == [2 * (ALONE if told else NOT_TOLD)] * 14


def told_to_programs():
    return subprocess.run("echo $RANK/$WORLD_SIZE", shell=True, capture_output=True, text=True, check=True).stdout


def test_afterwards_all_is_as_it_was_also_after_an_error(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    worker = torch.utils.data._utils.worker
    monkeypatch.setattr(worker, "_worker_info", info := object())
    before = dict(os.environ)
    with single_process_view():
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"], get_worker_info()) == ("0", "1", None)
        assert told_to_programs() == "0/1\n", "programs that it starts see it, too"
    assert dict(os.environ) == before
    with contextlib.suppress(OSError), single_process_view():
        raise OSError("broken")
    assert dict(os.environ) == before
    assert told_to_programs() == "3/4\n"
    assert get_worker_info() is info


# ---- the packages that do so ---------------------------------------------------------------------------------------


def hugging_face(**seed):
    import datasets  # takes a second, which the ranks of other tests are not to wait for

    return datasets.Dataset.from_dict({"x": list(range(50))}).to_iterable_dataset(4).shuffle(buffer_size=20, **seed)


def write_shards(directory):
    """Three shards of numbers from 0 on, as `webdataset` reads them."""
    for shard in range(3):
        with tarfile.open(directory / f"part-{shard}.tar", "w") as tar:
            for number in range(shard * 16, shard * 16 + 16):
                text = str(number).encode()
                member = tarfile.TarInfo(f"{number:06}.cls")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
    return str(directory / "part-{0..2}.tar")


def web_dataset(shards, **seed):
    """Shuffled as it is read, and without a word about nodes."""
    import webdataset

    return webdataset.WebDataset(shards, shardshuffle=False).shuffle(12, **seed).decode().to_tuple("cls")


def det_shuffled(shards, **seed):
    """Counts by itself how often it was begun, and shuffles otherwise each time."""
    import webdataset

    return (
        webdataset.WebDataset(shards, shardshuffle=False)
        .compose(webdataset.detshuffle(12, **seed))
        .decode()
        .to_tuple("cls")
    )


SHARDED = {"webdataset": web_dataset, "detshuffle": det_shuffled}
MAKERS = ("datasets", *SHARDED)


@pytest.fixture(params=MAKERS)
def make(request, tmp_path):
    yield hugging_face if request.param == "datasets" else partial(SHARDED[request.param], write_shards(tmp_path))
    gc.collect()  # files that webdataset left open: no later test is to be blamed for them


def numbers(samples):
    return [sample["x"] if isinstance(sample, dict) else sample[0] for sample in samples]


def by_hand(stream, epoch):
    """{(step, micro-batch): its numbers}, of a plain loop over a new ``stream``."""
    if hasattr(stream, "set_epoch"):
        stream.set_epoch(epoch)
    else:
        for _ in range(epoch):
            numbers(stream)
    table = {}
    for place, number in enumerate(numbers(stream)):
        step, within = divmod(place, SIZES[0])
        table.setdefault((step, within % 3), []).append(number)
    return table


def read(stream, world, **options):
    got = on_world(stream, SIZES, world, collate_fn=numbers, **options)
    return {(b.position.step, b.position.index): b.data for rank in got for b in rank}


@pytest.mark.parametrize(
    ("epoch", "workers"), combinations([0, 1], [0, 2], campaign=lambda epoch, workers: (epoch > 0) != (workers > 0))
)
def test_a_package_shuffles_alike_on_any_world_and_in_any_process(monkeypatch, make, epoch, workers):
    stream = make(seed=1)
    expected = by_hand(make(seed=1), epoch)
    assert len(expected) > 20
    # Told to one process alone, `webdataset` refuses it, unless it is told how to divide by node.
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    # With loader processes each world takes seconds: one rank and the most of them, then two, whose shards are uneven.
    for world in (1, 3) if workers else (1, 2, 3):
        assert read(stream, world, epoch=epoch, workers=workers, shuffle=False) == expected
    # Divided by shard: in another order, but the same samples.
    divided = read(stream, 1, epoch=epoch)
    assert divided != expected
    assert sorted(chain(*divided.values())) == sorted(chain(*expected.values()))
    for world in (2,) if workers else (2, 3):
        assert read(stream, world, epoch=epoch, workers=workers) == divided
    for order, options in ((expected, {"shuffle": False}), (divided, {})):
        rest = {place: data for place, data in order.items() if place[0] >= 4}
        assert read(stream, 2, epoch=epoch, first_step=4, workers=workers, **options) == rest


class Trace(torch.nn.Module):
    """Its weight tells what it was trained on, and in which order."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, numbers):
        return (self.weight * torch.tensor(numbers, dtype=torch.float32)).square().mean()


def train(make, seed, workers, directory=None, until=None, resume=None):
    """Two epochs of a stream, or up to step ``until``: what came in which step over all ranks, and the model."""
    with pytest.MonkeyPatch.context() as patch:
        if resume:
            patch.setenv("LOCKSTEP_RESUME", "1")
        with Run(checkpoint=directory, replay=False) as run:
            model = run.model(Trace())
            run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-5))
            batches = run.loader(make(**seed), global_batch=6, micro_batch=2, workers=workers, collate_fn=numbers)
            seen = []
            for _ in run.epochs(2):
                for batch in run.train(batches):
                    if run.counts:
                        seen.append((run.progress.step, batch))
                    run.step(model(batch))
                    if run.progress.step == until:
                        break
                if run.progress.step == until:
                    break
            return sorted(one for rank in run.gather(seen) for one in rank), state_hash(model)


@pytest.mark.parametrize("make", combinations(MAKERS, campaign=lambda name: name == "webdataset"), indirect=True)
def test_training_on_a_package_is_the_same_on_any_number_of_ranks_and_after_a_resume(make, tmp_path):
    def on(ranks, *args):
        (results,) = on_ranks(ranks, [(train, make, {"seed": 1}, *args)])
        assert all(result == results[0] for result in results), results
        return results[0]

    seen, model = train(make, {"seed": 1}, 0)
    until = 11  # in the second epoch
    assert len({step for step, _ in seen}) > until
    begun, _ = on(2, 1, tmp_path, until)
    rest, end = on(3, 0, tmp_path, None, True)
    assert begun == [one for one in seen if one[0] < until]
    assert rest == [one for one in seen if one[0] >= until]
    assert end == model


@pytest.mark.parametrize("make", ["datasets", "webdataset"], indirect=True)
def test_what_shuffles_without_a_seed_is_refused_on_several_ranks(make):
    (results,) = on_ranks(2, [(train, make, {}, 0)])
    for told in results:
        assert re.search(r"MismatchError: rank 1 would visit the samples of epoch 0 in another order", told), told
        assert "needs a seed of its own, such as shuffle(..., seed=0)" in told


# ---- streams that differ all the same ------------------------------------------------------------------------------


class Later(IterableDataset):
    """Its ranks part in step 2, whose first sample is the first that differs, and have equally many samples."""

    def __init__(self):
        self.readers = iter(range(9))

    def __iter__(self):
        odd = next(self.readers)
        return iter([*range(12), *range(12 + odd, 30 + odd)])


def test_ranks_that_part_later_are_found_in_that_step():
    assert len(steps_of(on_world(Later(), SIZES, 2, steps=2))) == 2
    with pytest.raises(DataError, match=r"different streams: in step 2 of epoch 0 Later .*seed"):
        on_world(Later(), SIZES, 2)


class Picture:
    """As an image of Pillow's shows its content."""

    def __init__(self, value):
        self.content = np.full((3, 3), value)

    @property
    def __array_interface__(self):
        return self.content.__array_interface__


LARGE = np.zeros(300_000, np.uint8)
LARGE[100_000:200_000] = 1  # in its midst: the margins of pictures are all alike


@pytest.mark.parametrize(
    ("sample", "other"),
    [
        (1, 2),
        ("a", "b"),
        ("/host1/a.png", "/host1/b.png"),
        ("a" * 5000 + "b" * 5000, "a" * 10000),
        (b"a", b"b"),
        (torch.zeros(2, 3).T, torch.ones(2, 3).T),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.tensor([1j]).conj(), torch.tensor([1j])),
        ([0] * 5000 + [1] * 5000, [0] * 10000),
        (torch.from_numpy(LARGE), torch.zeros(300_000, dtype=torch.uint8)),
        (LARGE, np.zeros_like(LARGE)),
        (np.array(["a", None, 1], dtype=object), np.array(["a", None, 2], dtype=object)),
        (np.float32(1), np.float32(2)),
        ({"x": [1, (2, None)]}, {"x": [1, (3, None)]}),
        ({"x": 1}, {"y": 1}),
        (Picture(1), Picture(2)),
    ],
)
def test_a_checksum_tells_samples_apart_and_is_the_same_for_copies(sample, other):
    assert checksum([sample]) == checksum([copy.deepcopy(sample)]) != checksum([other])


def test_a_checksum_of_nothing_and_of_what_it_does_not_know():
    assert checksum([]) == checksum([])
    assert checksum([object(), torch.zeros(0), np.zeros(0), ""]) == checksum(
        [object(), torch.zeros(0), np.zeros(0), ""]
    )
    sparse, ragged = (
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    )
    assert checksum([sparse, ragged, 1]) == checksum([sparse, ragged, 1]) != checksum([sparse, ragged, 2])


def test_a_checksum_does_not_depend_on_where_a_file_lies():
    assert checksum((1, "/scratch/job-17/a.png")) == checksum((1, "/scratch/job-18/a.png"))
