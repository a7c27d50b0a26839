"""Shards of unknown length: each sample once, the same on any world, read by one rank, and on from where a run was."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders import Meeting, evaluated, loader_of, on_world, passes, samples_of, steps_of
from lockstep.batch import BatchPlan
from lockstep.data.iterable.iterable_loader import IterableLoader
from lockstep.data.shards.dealt_shards import Piece, first_deal, next_deal, position_in
from lockstep.data.shards.shard_streams import SeededShards, shard_stream_of
from lockstep.errors import DataError


class Files:
    """Numbers in shards that do not say how many they hold; counts what is opened and read."""

    def __init__(self, lengths):
        self.lengths = lengths
        self.num_shards = len(lengths)
        self.opened = Counter()
        self.read = 0

    def read_shard(self, shard, start):
        self.opened[shard] += 1
        before = sum(self.lengths[:shard])
        for number in range(before + start, before + self.lengths[shard]):
            self.read += 1
            yield number


class Drawing(Files):
    """Draws for each sample."""

    def read_shard(self, shard, start):
        for number in super().read_shard(shard, start):
            yield number + random.random() / 2


class Buffered(Drawing):
    """Shuffles in a buffer that is drawn from the global generator, so that a resume has to draw it again."""

    def read_shard(self, shard, start):
        return itertools.islice(self.shuffled(shard), start, None)

    def shuffled(self, shard):
        buffer = []
        for number in super().read_shard(shard, 0):
            buffer.append(number)
            if len(buffer) == 3:
                yield buffer.pop(random.randrange(3))
        yield from buffer


class Ordered(Drawing):
    """Draws the order of a shard before its first sample, and something for each sample."""

    def read_shard(self, shard, start):
        order = list(super().read_shard(shard, 0))
        random.shuffle(order)
        yield from (number // 1 + random.random() / 2 for number in order[start:])


LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=14).filter(any)
SIZES = st.sampled_from([(1, 1), (2, 1), (6, 2), (8, 2), (12, 4)])


def worlds_of(sizes):
    return range(1, sizes[0] // sizes[1] + 1)


@settings(max_examples=40)
@given(LENGTHS, SIZES, st.integers(0, 2), st.booleans(), st.data())
def test_each_sample_once_and_the_same_micro_batches_on_any_world(lengths, sizes, epoch, drop_last, data):
    alone = on_world(Files(lengths), sizes, 1, epoch=epoch, drop_last=drop_last)
    total = sum(lengths)
    assert len(set(samples_of(alone))) == len(samples_of(alone)) == total - (total % sizes[0] if drop_last else 0)
    table = steps_of(alone)
    assert [sum(len(samples) for samples, _ in step.values()) for step in table.values()][:-1] == [sizes[0]] * (
        len(table) - 1
    )
    world = data.draw(st.sampled_from(worlds_of(sizes)))
    assert steps_of(on_world(Files(lengths), sizes, world, epoch=epoch, drop_last=drop_last)) == table

    # A resume that is given what was found up to then, and one that is given nothing.
    first_step = data.draw(st.integers(0, len(table)))
    after = {step: found for step, found in table.items() if step >= first_step}
    for found in ({}, found_after(Files(lengths), sizes, world, first_step, epoch)):
        rest = passes(
            Files(lengths),
            sizes,
            data.draw(st.sampled_from(worlds_of(sizes))),
            lambda loader, found=found: loader.epoch(epoch, first_step, padding="none", found=copied(found)),
            drop_last=drop_last,
        )
        assert steps_of(rest) == after


def copied(found):
    return {name: type(value)(value) for name, value in found.items()}


def found_after(dataset, sizes, world, steps, epoch=0):
    """What every rank has found when the script has got so many steps."""
    each = []

    def over(loader):
        each.append(found := {})
        if steps:
            for batch in loader.epoch(epoch, padding="one", found=found):
                yield batch
                if batch.position.last and batch.position.step == steps - 1:
                    break

    passes(dataset, sizes, world, over)
    assert all(found == each[0] for found in each)
    return each[0]


def test_a_shard_is_read_once_by_one_rank_and_a_resume_does_not_read_what_is_behind():
    lengths, sizes = [40] * 16, (32, 4)  # two shards for each of eight places
    ranks = [Files(lengths) for _ in range(4)]
    got = []
    meeting = Meeting(4)
    for dataset, batches in zip(ranks, on_worlds(ranks, sizes, meeting), strict=True):
        got.append(batches)
        assert dataset.read == 160
        assert set(dataset.opened.values()) == {1}
    assert all(not a.opened.keys() & b.opened.keys() for a, b in itertools.combinations(ranks, 2))

    found = found_after(Files(lengths), sizes, 2, 18)
    dataset = Files(lengths)
    rest = passes(dataset, sizes, 4, lambda loader: loader.epoch(0, 18, padding="none", found=copied(found)))
    assert len(samples_of(rest)) == 640 - 18 * 32
    assert dataset.read == 640 - 18 * 32 + 8  # one before, in each shard that was begun
    assert sum(dataset.opened.values()) == 8


def on_worlds(datasets, sizes, meeting):
    """As `on_world`, with a data set of its own for each rank."""
    turns = iter(datasets)
    return passes_of(lambda: next(turns), sizes, len(datasets), meeting)


def passes_of(make, sizes, world, meeting):
    import threading

    got = [[] for _ in range(world)]
    made = [make() for _ in range(world)]

    def run(rank):
        with meeting.turn:
            loader = loader_of(made[rank], BatchPlan(*sizes, world), rank, agree=meeting.agree_as(rank))
            got[rank] += loader.epoch(0, padding="none")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


@pytest.mark.parametrize("kind", [Drawing, Buffered, Ordered])
def test_what_a_shard_draws_is_the_same_on_any_world_in_any_process_and_after_a_resume(kind, monkeypatch):
    monkeypatch.setattr("lockstep.data.shards.shard_streams.OwnShards.seeks", kind is not Buffered)
    lengths, sizes = [7, 10, 0, 13, 5, 11, 2, 19, 16, 4], (6, 3)  # most begin in the midst of a micro-batch

    def found(world, workers=0, first_step=0, known=None):
        got = passes(
            kind(lengths),
            sizes,
            world,
            lambda loader: loader.epoch(1, first_step, padding="none", found={} if known is None else copied(known)),
            workers=workers,
            collate_fn=list,
        )
        return {(b.position.step, b.position.index): b.data for rank in got for b in rank}

    alone = found(1)
    assert len({number % 1 for data in alone.values() for number in data}) > 80
    assert sorted(int(number) for data in alone.values() for number in data) == list(range(sum(lengths)))
    assert found(2) == found(2, workers=1) == found(1, workers=2) == alone
    for first_step in range(0, 14, 4):
        known = found_after(kind(lengths), sizes, 2, first_step, epoch=1)
        assert found(2, 0, first_step, known) == {at: data for at, data in alone.items() if at[0] >= first_step}


def test_an_evaluation_and_padding_see_the_samples_of_the_training():
    lengths, sizes = [9, 4, 7, 12, 3], (4, 1)
    alone = sorted(samples_of(on_world(Files(lengths), sizes, 1)))
    for world in (1, 3):
        assert sorted(samples_of(evaluated(Files(lengths), sizes, world))) == alone
        even = on_world(Files(lengths), sizes, world, padding="even")
        assert sorted(samples_of(even)) == alone
        assert len({len(rank) for rank in even}) == 1


@pytest.mark.parametrize("padding", ["none", "even"])
def test_an_evaluation_on_more_ranks_than_micro_batches(padding):
    lengths, sizes = [9, 4, 7, 12, 3], (4, 2)
    got = evaluated(Files(lengths), sizes, 4, padding=padding)
    assert sorted(samples_of(got)) == list(range(35))
    assert len({len(rank) for rank in got}) == 1 or padding == "none"


def test_shards_that_the_script_adds_between_epochs_are_read():
    dataset = Files([5, 4, 6])
    loader = loader_of(dataset, BatchPlan(4, 2, 1), agree=lambda numbers: [numbers])
    before = loader.draw(0), len(samples_of([list(loader.epoch(0, padding="none"))]))
    dataset.lengths, dataset.num_shards = [5, 4, 6, 3], 4
    assert before[0] != loader.draw(0)
    assert (before[1], len(samples_of([list(loader.epoch(1, padding="none"))]))) == (15, 18)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 4))
def test_deals_end_and_hold_every_sample_once(lengths, places, micro_batch):
    found = {"lengths": {str(shard): length for shard, length in enumerate(lengths)}, "ends": []}
    deal, seen = first_deal(range(len(lengths)), places), Counter()
    for _ in range(len(lengths) + 1):
        if deal.is_rest:
            break
        full = [sum(lengths[piece.shard] - piece.start for piece in hand) // micro_batch for hand in deal.hands]
        end = deal.first_step + min(full)
        for hand in deal.hands:
            taken = [place for piece in hand for place in samples_from(piece, lengths)][: min(full) * micro_batch]
            seen.update(taken)
        deal = next_deal(deal, end, micro_batch, found)
    assert deal.is_rest
    seen.update(place for piece in deal.hands[0] for place in samples_from(piece, lengths))
    assert seen == Counter((shard, at) for shard, length in enumerate(lengths) for at in range(length))


def samples_from(piece, lengths):
    return [(piece.shard, at) for at in range(piece.start, lengths[piece.shard])]


def test_a_position_goes_on_in_the_shard_of_which_no_end_was_seen():
    hand = [Piece(4, 2), Piece(0), Piece(7)]
    assert position_in(hand, 5, {}) == (hand, 5)
    assert position_in(hand, 5, {"4": 7}) == (hand[1:], 0)
    assert position_in(hand, 9, {"4": 7, "0": 3}) == (hand[2:], 1)


# ---- which streams -------------------------------------------------------------------------------------------------


def test_an_order_of_its_own_and_few_shards_are_read_whole_and_said():
    for options, says in (({"shuffle": False}, "shuffle=False"), ({}, "it has 2 shards for the 4 micro-batches")):
        loader = loader_of(Files([5, 4]), BatchPlan(8, 2, 2), agree=lambda numbers: [numbers] * 2, **options)
        (note,) = loader.notes
        assert says in note
    got = on_world(Files([5, 4]), (4, 1), 2, shuffle=False)
    assert [x for step in steps_of(got).values() for samples, _ in step.values() for x in samples] == list(range(9))


def test_shards_may_be_asked_to_be_shuffled_and_know_no_index():
    assert isinstance(loader_of(Files([9, 9]), BatchPlan(4, 2, 1), shuffle=True), IterableLoader)
    with pytest.raises(DataError, match="is an iterable data set"):
        loader_of(Files([9, 9]), BatchPlan(4, 2, 1), sampler=[1, 2])
    with pytest.raises(DataError, match=r"it has 1 shard for the 2 micro-batches.*shuffle itself"):
        loader_of(Files([9]), BatchPlan(4, 2, 1), shuffle=True)


def stream():
    import datasets  # takes a second

    return datasets.Dataset.from_dict({"x": list(range(50))}).to_iterable_dataset(4)


def test_streams_of_datasets_are_divided_where_their_samples_stay_the_same():
    import datasets.distributed

    plain = stream()
    other = datasets.concatenate_datasets([plain, stream()])
    divided = {
        "plain": plain,
        "shuffled": plain.shuffle(seed=1, buffer_size=7),
        "interleaved": plain.shuffle(seed=1, buffer_size=8, max_buffer_input_shards=2),
        "mapped": plain.map(lambda row: {"x": row["x"]}).filter(lambda row: row["x"] % 7).with_format("torch"),
        "selected": plain.select_columns(["x"]),
        "batched": plain.map(lambda rows: {"x": rows["x"]}, batched=True, batch_size=4),
        "random": plain.filter(lambda row: random.random() < 0.8),
    }
    for name, made in divided.items():
        found = shard_stream_of(made)
        assert found is not None, name
        shards = SeededShards(found, seed=0, at_once=3)
        every = [int(row["x"]) for shard in range(found.num_shards) for row in shards.open(1, shard, 0)]
        if name != "random":
            assert sorted(every) == sorted(int(row["x"]) for row in made), name
        first = [int(row["x"]) for row in shards.open(1, 2, 0)]
        assert [int(row["x"]) for row in shards.open(1, 2, 5)] == first[5:], name
    counting = {
        "take": plain.take(20),
        "skip": plain.skip(3),
        "concatenated": other,
        "divided": datasets.distributed.split_dataset_by_node(plain, 0, 2),
        "numbered": plain.map(lambda row, number: {"number": number}, with_indices=True),
        "every second": plain.filter(lambda row, number: number % 2, with_indices=True),
        "column": plain.add_column("y", list(range(50))),
        "batches": plain.batch(4),
        "batches of tables": plain.with_format("torch").batch(4),
        "last batch": plain.map(lambda rows: rows, batched=True, batch_size=4, drop_last_batch=True),
    }
    assert [name for name, made in counting.items() if shard_stream_of(made) is not None] == []


def test_pipelines_of_webdataset_are_divided_where_their_stages_are_known():
    import webdataset as wds

    def of_the_users_own(samples):
        yield from samples

    def first(sample):
        return sample

    plain = wds.WebDataset(["0.tar", "1.tar"], shardshuffle=2, seed=1, nodesplitter=wds.split_by_node)
    by_hand = wds.DataPipeline(
        wds.SimpleShardList(["0.tar", "1.tar"]),
        wds.split_by_worker,
        wds.tarfile_to_samples(),
        wds.detshuffle(5, seed=1),
        wds.decode("torchrgb"),
        wds.to_tuple("jpg", "cls"),
        wds.map(first),
    )
    known = plain.shuffle(5, seed=1).decode("rgb").rename(x="jpg").select(first).map(first).to_tuple("x", "cls")
    for made in (plain, by_hand, known, known.with_length(7, silent=True), plain.rsample(0.5)):
        assert shard_stream_of(made) is not None
    for made in (
        plain.compose(of_the_users_own),
        wds.WebDataset(["0.tar", "1.tar"], shardshuffle=False, nodesplitter=of_the_users_own),
        plain.mcached(),
        plain.slice(10),
        plain.batched(4),
        known.with_epoch(10),
    ):
        assert shard_stream_of(made) is None
