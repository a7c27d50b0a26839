"""Data sets in shards: each sample once, the same on any world, and nothing read that another rank or run has read."""

import random
import re
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaders import Numbers, Shards, StridedStream, loader_of, on_world, place_of, samples_of, steps_of
from lockstep.batch import BatchPlan
from lockstep.data.shards.sharded_dataset import ShardOrder, ShardSequence
from lockstep.errors import DataError, UsageError


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any))
    micro_batch = draw(st.integers(1, 4))
    micro_batches = draw(st.integers(1, 5))
    spare = 0 if micro_batches == 1 else draw(st.integers(0, micro_batch - 1))
    sizes = micro_batch * micro_batches - spare, micro_batch
    return lengths, sizes, draw(st.integers(1, micro_batches)), draw(st.booleans())


@given(cases(), st.booleans(), st.integers(0, 2), st.data())
def test_a_pass_reads_each_sample_once_on_any_world_from_any_step(case, shuffle, epoch, data):
    lengths, sizes, world, drop_last = case
    options = {"epoch": epoch, "drop_last": drop_last, "shuffle": shuffle}
    plan = BatchPlan(*sizes, 1)
    steps = plan.steps(sum(lengths), drop_last=drop_last)
    alone = steps_of(on_world(Shards(0, lengths), sizes, 1, **options))
    seen = [x for step in alone.values() for samples, _ in step.values() for x in samples]
    assert len(seen) == len(set(seen)) == min(sum(lengths), steps * sizes[0])
    assert [sum(map(len, (samples for samples, _ in step.values()))) for step in alone.values()][:-1] == [sizes[0]] * (
        steps - 1
    )
    if not shuffle:
        assert alone == steps_of(on_world(Numbers(sum(lengths)), sizes, 1, **options))

    first_step = data.draw(st.integers(0, steps))
    dataset = Shards(0, lengths)
    rest = on_world(dataset, sizes, world, first_step=first_step, **options)
    assert steps_of(rest) == {step: found for step, found in alone.items() if step >= first_step}
    assert dataset.read == len(samples_of(rest)), "what is behind, and what others compute, is not read"
    if shuffle:
        assert dataset.opened <= len(lengths) + 2 * plan.micro_batches, "shards stay open from step to step"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any), st.data())
def test_a_sequence_is_the_shards_end_to_end(lengths, data):
    order = data.draw(st.permutations(range(len(lengths))))
    begins = [sum(lengths[:shard]) for shard in range(len(lengths))]
    expected = [begins[shard] + place for shard in order for place in range(lengths[shard])]
    sequence = ShardSequence(lengths, order)
    places = data.draw(st.slices(len(expected)).filter(lambda found: found.step in (None, 1)))
    assert len(sequence) == len(expected)
    assert sequence[places].tolist() == expected[places]


def test_micro_batches_read_on_where_the_step_before_ended():
    (got,) = on_world(Shards(0, [8] * 10), (8, 2), 1, epoch=3)
    for index in range(4):
        of_index = [x for batch in got if batch.position.index == index for x in batch.data.tolist()]
        jumps = [(a, b) for a, b in pairwise(of_index) if b != a + 1]
        assert len(of_index) == 20
        assert all(a % 8 == 7 and b % 8 == 0 for a, b in jumps)


class Augmented(Shards):
    """Draws for each sample."""

    def read_shard(self, shard, start):
        for number in super().read_shard(shard, start):
            yield number + random.random() / 2


def draws(world, workers=0, first_step=0):
    got = on_world(
        Augmented(0, [7, 5, 0, 9, 8, 6, 3]),
        (8, 2),
        world,
        epoch=1,
        workers=workers,
        first_step=first_step,
        collate_fn=list,
    )
    return {place_of(batch): batch.data for rank in got for batch in rank}


def test_loader_processes_read_and_draw_as_this_process_does_on_any_world():
    alone = draws(1)
    assert len({number for data in alone.values() for number in data}) == 38
    assert len({number % 1 for data in alone.values() for number in data}) > 30
    assert draws(2) == draws(3) == draws(1, workers=2) == draws(2, workers=2) == alone
    assert draws(3, workers=2, first_step=3) == {place: data for place, data in alone.items() if place[0] >= 3}


def test_a_stride_is_read_by_several_processes_as_by_one():
    for length in (21, 24):
        alone = steps_of(on_world(StridedStream(length), (8, 2), 1))
        assert steps_of(on_world(StridedStream(length), (8, 2), 1, workers=2)) == alone
        assert steps_of(on_world(StridedStream(length), (8, 2), 2, workers=2, first_step=1)) == {
            step: found for step, found in alone.items() if step >= 1
        }


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(
    ("run", "asked", "processes"), [(8, 8, 8), (8, 7, 4), (8, 0, 0), (6, 4, 3), (5, 3, 1), (1, 8, 1)]
)
def test_each_micro_batch_of_a_step_has_its_loader_process(run, asked, processes):
    loader = loader_of(Shards(99), BatchPlan(run, 1, 1), workers=asked)
    assert loader.data_loader.num_workers == processes
    assert len(loader.data_loader) == loader.steps_per_epoch == -(-99 // run)
    loader.close()


def test_the_data_set_can_be_asked_for_single_samples():
    samples = loader_of(Shards(9), BatchPlan(2, 1, 1)).data_loader.dataset
    assert [samples[index] for index in (8, 0, 1, 2)] == [8, 0, 1, 2]
    assert len(samples) == 9
    with pytest.raises(IndexError):
        samples[9]


class Wrong(Shards):
    """Shards that hold one sample more or fewer than they say."""

    def __init__(self, more):
        super().__init__(0, [4, 4])
        self.more = more

    def read_shard(self, shard, start):
        return iter(range(start, 4 + self.more))


@pytest.mark.parametrize(("more", "says"), [(1, "holds more than 4 samples"), (-1, "holds only 3 samples")])
def test_a_shard_of_another_length_is_found(more, says):
    with pytest.raises(DataError, match=f"shard [01] of Wrong {says}, and shard_lengths says 4"):
        on_world(Wrong(more), (4, 2), 2)


@pytest.mark.parametrize("lengths", [[], [0, 0], [3, -1]])
def test_lengths_that_are_none_are_refused(lengths):
    with pytest.raises(DataError, match="number of samples of each shard"):
        loader_of(Shards(0, lengths), BatchPlan(2, 1, 1))


def test_shards_have_an_order_of_their_own():
    with pytest.raises(DataError, match=r"sampler=.*lies in shards"):
        loader_of(Shards(9), BatchPlan(2, 1, 1), sampler=[1, 2])
    with pytest.raises(UsageError, match="each determines the order"):
        loader_of(Shards(9), BatchPlan(2, 1, 1), sampler=[1, 2], shuffle=True)


def test_ranks_and_resumed_runs_tell_shards_apart():
    def digest(*lengths, shuffle=True):
        return ShardOrder(lengths, 7, shuffle=shuffle).draw(0)

    assert digest(3, 4) == digest(3, 4) != digest(4, 3)
    assert digest(3, 4) != digest(3, 4, shuffle=False)


# ---- the classes of docs/shards.md -----------------------------------------------------------------------------------


def of_docs(name, **names):
    """A class that the page shows."""
    page = (Path(__file__).parents[3] / "docs" / "shards.md").read_text()
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if f"class {name}:" in block)
    exec(block, names)
    return names[name]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Parquet files of numbers from 0 on, with groups of four rows."""
    place, files = tmp_path_factory.mktemp("rows"), []
    for shard, count in enumerate((9, 4, 1, 14)):
        files.append(str(place / f"{shard}.parquet"))
        begin = sum(pyarrow.parquet.read_metadata(file).num_rows for file in files[:-1])
        table = pyarrow.table({"x": list(range(begin, begin + count))})
        pyarrow.parquet.write_table(table, files[-1], row_group_size=4)
    return files


def texts(files):
    import datasets  # takes a second

    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    return of_docs("Texts")(stream, [9, 4, 1, 14])


@pytest.mark.parametrize("make", [of_docs("Parquet", pyarrow=pyarrow), texts])
def test_what_the_page_shows_reads_from_anywhere(make, rows):
    dataset, begins = make(rows), [0, 9, 13, 14]
    assert list(dataset.shard_lengths) == [9, 4, 1, 14]
    for shard, length in enumerate(dataset.shard_lengths):
        for start in range(length):
            found = [sample["x"] for sample in dataset.read_shard(shard, start)]
            assert found == list(range(begins[shard] + start, begins[shard] + length))
    got = on_world(dataset, (6, 2), 2, first_step=2, collate_fn=lambda found: [sample["x"] for sample in found])
    numbers = on_world(Shards(0, [9, 4, 1, 14]), (6, 2), 1, first_step=2)
    assert sorted(x for rank in got for batch in rank for x in batch.data) == sorted(samples_of(numbers))
