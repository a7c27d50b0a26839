"""Laws of the journal: what was written is read, whatever is torn, in whatever order files are read."""

import contextlib
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import SettingError
from lockstep.tune.record.journal import JournalReader, JournalWriter, SearchPlan, journal_file, read_search
from lockstep.tune.record.records import (
    AttemptCut,
    Entry,
    LossReported,
    MovePlanned,
    TrialBegan,
    TrialEnded,
    decode,
    encode,
)
from lockstep.tune.record.trial_history import TrialHistory
from lockstep.tune.search import Float, Space

finite = st.floats(allow_nan=False, width=64)
small = st.integers(0, 5)
texts = st.text(max_size=20)
begins = st.builds(
    TrialBegan,
    number=small,
    attempt=st.integers(1, 3),
    ranks=st.integers(1, 8),
    at_s=finite,
    params=st.dictionaries(texts, st.none() | finite | texts, max_size=3),
    point=st.lists(finite, min_size=1, max_size=3).map(tuple),
    parents=st.lists(small, max_size=2).map(tuple),
    inherits=st.none() | small,
)
records = st.one_of(
    begins,
    st.builds(LossReported, number=small, attempt=st.integers(1, 3), step=small, loss=finite, at_s=finite),
    st.builds(AttemptCut, number=small, attempt=st.integers(1, 3), at_s=finite, run_s=finite, reason=texts),
    st.builds(
        TrialEnded,
        number=small,
        attempt=st.integers(1, 3),
        state=st.sampled_from(("done", "stopped", "failed")),
        at_s=finite,
        run_s=finite,
        losses=st.lists(finite, max_size=2).map(tuple),
        reason=texts,
    ),
    st.builds(
        MovePlanned,
        what=st.sampled_from(("moved", "copied", "replaced")),
        number=small,
        source=small,
        target=small,
        responsible=small,
        at_s=finite,
    ),
)


@given(records, st.integers(0, 10**9))
def test_a_line_is_its_record(record, serial):
    line = encode(serial, record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line[:-1]) == (serial, record)


@given(records, st.data())
def test_a_changed_line_is_none(record, data):
    line = bytearray(encode(7, record)[:-1])
    place = data.draw(st.integers(0, len(line) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != line[place]))
    # Upper and lower case of the same checksum are the same number.
    if bytes([line[place]]).lower() != bytes([byte]).lower():
        line[place] = byte
        assert decode(bytes(line)) is None
    assert decode(bytes(line[:place])) is None


@given(written=st.lists(records, max_size=8), torn=st.integers(0, 400), garbage=st.binary(max_size=20), more=records)
def test_any_torn_tail_is_tolerated_and_removed(tmp_path_factory, written, torn, garbage, more):
    directory = tmp_path_factory.mktemp("search")
    with contextlib.closing(JournalWriter(directory, 0)) as writer:
        for record in written:
            writer.append(record)
    path = journal_file(directory, 0)
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - torn)] + garbage)
    kept = list(all_of([Entry(0, i, r) for i, r in enumerate(written)], len(whole) - torn))
    reader = JournalReader(directory)
    with contextlib.closing(reader):
        assert reader.read() == kept
        with contextlib.closing(JournalWriter(directory, 0)) as writer:
            added = writer.append(more)
        assert added.serial == len(kept)
        assert reader.read() == [added]
        assert reader.read() == []


def all_of(entries, length):
    """Those of ``entries`` whose lines end within ``length`` bytes."""
    end = 0
    for entry in entries:
        end += len(encode(entry.serial, entry.record))
        if end <= length:
            yield entry


@given(st.lists(st.lists(records, max_size=6), min_size=1, max_size=3), st.randoms())
def test_the_order_of_files_does_not_matter(files, order):
    queues = [[Entry(worker, i, r) for i, r in enumerate(file)] for worker, file in enumerate(files)]
    # An attempt has one worker.
    queues = [
        [
            e
            for e in queue
            if isinstance(e.record, MovePlanned) or (e.record.number + e.record.attempt) % len(files) == e.worker
        ]
        for queue in queues
    ]
    one, other = TrialHistory(), TrialHistory()
    for queue in queues:
        for entry in queue:
            one.add(entry)
    left = [list(queue) for queue in queues]
    while any(left):
        queue = order.choice([queue for queue in left if queue])
        other.add(queue[0])
        if order.random() < 0.5:
            assert not other.add(queue[0])
        queue.pop(0)
    assert repr(one.trials()) == repr(other.trials())
    assert one.moves() == other.moves()
    for queue in queues:
        for entry in queue:
            assert not one.add(entry)


def test_one_writer_at_a_time(tmp_path):
    with contextlib.closing(JournalWriter(tmp_path, 3)), pytest.raises(SettingError, match="is worker 3"):
        JournalWriter(tmp_path, 3)
    JournalWriter(tmp_path, 3).close()


BEGAN = TrialBegan(4, 1, 2, 10.0, params={"lr": 0.1}, point=(0.5,), island=1, parents=(1, 2), operator="crossover")


def history_of(*records):
    history = TrialHistory()
    for serial, record in enumerate(records):
        history.add(Entry(0, serial, record))
    return history


def test_a_resumed_attempt_repeats_reports():
    history = history_of(
        BEGAN,
        *(LossReported(4, 1, step, 1.0, 11.0 + step) for step in range(4)),
        replace(BEGAN, attempt=2, ranks=1, at_s=20.0, params=None, point=None),
        LossReported(4, 2, 2, 0.5, 21.0),
        TrialEnded(4, 2, "stopped", 22.0, 2.0, losses=(0.5,), reason="median"),
    )
    trial = history.trial(4)
    assert [(r.step, r.loss) for r in trial.reports] == [(0, 1.0), (1, 1.0), (2, 0.5)]
    assert (trial.state, trial.attempts, trial.ranks, trial.began_at_s, trial.ended_at_s) == (
        "stopped",
        2,
        1,
        10.0,
        22.0,
    )
    assert trial.run_s == pytest.approx(4.0 + 2.0)
    assert (trial.parents, trial.island, trial.params) == ((1, 2), 1, {"lr": 0.1})


def test_the_earlier_of_two_ends_counts():
    ends = [TrialEnded(4, attempt, "done", 20.0 + attempt, 1.0, losses=(float(attempt),)) for attempt in (2, 1)]
    again = replace(BEGAN, attempt=2, params=None, point=None)
    assert history_of(BEGAN, again, *ends).trial(4).losses == (1.0,)


def test_read_search(tmp_path):
    with pytest.raises(SettingError, match="holds no search"):
        read_search(tmp_path)
    plan = SearchPlan(Space.of({"lr": Float(0, 1)}).to_json(), {"seed": 3})
    assert plan.write(tmp_path)
    assert not SearchPlan({}, {}).write(tmp_path)
    with contextlib.closing(JournalWriter(tmp_path, 0)) as writer:
        writer.append(BEGAN)
        record = read_search(tmp_path)
    assert (record.space, record.settings) == (plan.space, plan.settings)
    assert [trial.number for trial in record.trials] == [4]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_readers_see_files_that_come_later(tmp_path):
    with contextlib.closing(JournalReader(tmp_path)) as reader:
        assert reader.read() == []
        numbers = list(range(5))
        random.Random(1).shuffle(numbers)
        for worker in numbers:
            with contextlib.closing(JournalWriter(tmp_path, worker)) as writer:
                writer.append(BEGAN)
            assert [entry.worker for entry in reader.read()] == [worker]
