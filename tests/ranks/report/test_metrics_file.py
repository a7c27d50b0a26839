import errno
import json
import math
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import SettingError, UsageError
from lockstep.report import MetricsFile


def silent(text):
    raise AssertionError(f"nothing was to be said: {text}")


def logged(path, rows, *, step=0, say=silent):
    """Open the record for a run that goes on at ``step`` and log (step, values)."""
    record = MetricsFile(path, step=step, say=say, wall=lambda: 1.23456)
    try:
        for at, values in rows:
            record.write(at, 0, values)
    finally:
        record.close()
    return path


def test_a_record_is_lines_of_json(tmp_path):
    path = logged(tmp_path / "run" / "metrics.jsonl", [(1, {"loss": 0.5, "right": True}), (2, {"n": 3})])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "epoch": 0, "wall_s": 1.235, "loss": 0.5, "right": True},
        {"step": 2, "epoch": 0, "wall_s": 1.235, "n": 3},
    ]
    assert MetricsFile.read(path)[1] == {"step": 2, "epoch": 0, "wall_s": 1.235, "n": 3}


def test_each_record_is_readable_at_once(tmp_path):
    record = MetricsFile(tmp_path / "m", step=0, say=silent)
    record.write(1, 0, {"loss": 1.0})
    assert len(MetricsFile.read(tmp_path / "m")) == 1
    record.close()


@given(st.dictionaries(st.text(max_size=5).filter(lambda n: n not in ("step", "wall_s")), st.floats(), max_size=3))
def test_every_number_comes_back(tmp_path_factory, values):
    (row,) = MetricsFile.read(logged(tmp_path_factory.mktemp("r") / "m", [(1, values)]))
    for name, value in values.items():
        assert row[name] == value or (math.isnan(value) and math.isnan(row[name]))


def test_it_is_a_table_of_numbers_for_pandas(tmp_path):
    path = logged(tmp_path / "m", [(1, {"a": math.nan, "b": -math.inf}), (2, {"a": 0.1}), (3, {"right": True})])
    json.loads(path.read_text().splitlines()[0], parse_constant=pytest.fail)
    import pandas  # takes half a second

    table = pandas.read_json(path, lines=True)
    assert list(table.columns) == ["step", "epoch", "wall_s", "a", "b", "right"]
    assert table.step.tolist() == [1, 2, 3]
    assert table.wall_s.dtype == table.a.dtype == table.b.dtype == np.float64
    assert table.a.isna().tolist() == [True, False, True]
    assert table.b[0] == -math.inf


def test_an_array_of_one_counts_as_its_element(tmp_path):
    values = {"a": np.float32(0.5), "b": np.array([2]), "c": np.bool_(True)}
    (row,) = MetricsFile.read(logged(tmp_path / "m", [(1, values)]))
    assert (row["a"], row["b"], row["c"]) == (0.5, 2, True)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"loss": np.zeros(3)}, "shape (3,)"),
        ({"note": "good"}, "holds numbers"),
        ({"step": 3}, "another name"),
    ],
)
def test_what_is_no_number_is_refused(tmp_path, values, says):
    with pytest.raises(UsageError) as refused:
        logged(tmp_path / "m", [(1, values)])
    assert says in str(refused.value)


# A run that is interrupted at any time and goes on at any checkpoint reads as one that was not.

RUN = [(step, values) for step in range(1, 9) for values in ({"loss": 1 / step}, {"accuracy": step / 10})]


@given(
    stops=st.lists(st.tuples(st.integers(0, len(RUN)), st.integers(0, 8), st.binary(max_size=12)), max_size=4),
)
def test_an_interrupted_run_reads_as_one(tmp_path_factory, stops):
    path = tmp_path_factory.mktemp("r") / "m"
    step = 0
    for written, saved, torn in stops:
        rest = [row for row in RUN if row[0] >= step]  # the step it resumes at may be evaluated again
        logged(path, rest[:written], step=step)
        with path.open("ab") as file:
            file.write(torn.replace(b"\n", b""))  # a crash in the middle of a record
        step = min(saved, max((at for at, _ in rest[:written]), default=step))  # any checkpoint up to the last step
    logged(path, [row for row in RUN if row[0] >= step], step=step)
    rows = MetricsFile.read(path)
    assert [(row.pop("step"), row) for row in rows] == [
        (at, {"epoch": 0, "wall_s": 1.235, **values}) for at, values in RUN
    ]


@pytest.mark.parametrize(("resumed_at", "lost"), [(8, True), (4, False), (2, False)])
def test_an_unfinished_record_that_no_run_writes_again_is_told(tmp_path, resumed_at, lost):
    said = []
    path = logged(tmp_path / "m", [(2, {"a": 1}), (4, {"a": 2})])
    os.truncate(path, path.stat().st_size - 5)
    logged(path, [], step=resumed_at, say=said.append)
    assert said == [f"a record of step 4 in {path} is damaged, and its values are lost"] * lost


@pytest.mark.parametrize("damaged", [0, 1, 3])
def test_one_line_with_another_bit_costs_no_other_record(tmp_path, damaged):
    said = []
    path = logged(tmp_path / "m", [(step, {"a": step}) for step in (2, 4, 6, 8)])
    content = path.read_text().splitlines(keepends=True)
    content[damaged] = content[damaged].replace('"epoch":', '"epoch"~')
    path.write_text("".join(content))
    logged(path, [(10, {"a": 10})], step=9, say=said.append)
    assert said == [f"a record of step {2 + 2 * damaged} in {path} is damaged, and its values are lost"]
    assert [row["a"] for row in MetricsFile.read(path)] == [a for a in (2, 4, 6, 8, 10) if a != 2 + 2 * damaged]


def test_a_run_from_the_start_starts_the_record_over(tmp_path):
    logged(tmp_path / "m", [(0, {"a": 1}), (5, {"a": 1})])
    assert MetricsFile.read(logged(tmp_path / "m", [])) == []


def test_a_value_logged_twice_at_a_step_stays_twice(tmp_path):
    path = logged(tmp_path / "m", [(4, {"a": 1}), (4, {"a": 2})])
    logged(path, [(4, {"a": 1}), (4, {"a": 2}), (4, {"a": 3}), (5, {"a": 1})], step=4)
    assert [(row["step"], row["a"]) for row in MetricsFile.read(path)] == [(4, 1), (4, 2), (4, 3), (5, 1)]


@pytest.mark.parametrize("step", [0, 3])
def test_a_file_of_someone_else_is_refused_and_left_alone(tmp_path, step):
    (tmp_path / "m").write_text("my notes\n")
    with pytest.raises(SettingError, match="no record"):
        MetricsFile(tmp_path / "m", step=step, say=silent)
    assert (tmp_path / "m").read_text() == "my notes\n"


@pytest.mark.parametrize("length", range(0, 50, 4))
def test_a_first_record_cut_short_is_written_again(tmp_path, length):
    (tmp_path / "m").write_bytes(b'{"step": 2, "epoch": 1, "wall_s": 1.235, "a": 1}\n'[:length])
    assert len(MetricsFile.read(logged(tmp_path / "m", [(3, {"a": 1})], step=2))) == 1


# A disk with room for so many bytes: the kernel itself refuses the rest, in the middle of a record.


@contextmanager
def room_for(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("room", [0, 10, 33, 60, 120, 200])
def test_records_wait_while_a_disk_is_full_and_that_is_said_once(tmp_path, room):
    said = []
    path = tmp_path / "m"
    record = MetricsFile(path, step=0, say=said.append)
    for step in range(1, 6):
        record.write(step, 0, {"loss": 1.0})
    before = len(MetricsFile.read(path))
    assert before == 5
    record.close()

    path.unlink()
    with room_for(room):
        record = MetricsFile(path, step=0, say=said.append)
        for step in range(1, 6):
            record.write(step, 0, {"loss": 1.0})
        assert path.stat().st_size <= room
        kept = len(MetricsFile.read(path))
        assert kept < 5, "the disk was never full"
    record.write(6, 0, {"loss": 1.0})  # somebody made room
    with room_for(path.stat().st_size):
        record.write(7, 0, {"loss": 1.0})
    record.close()
    assert [row["step"] for row in MetricsFile.read(path)] == [1, 2, 3, 4, 5, 6, 7]
    assert len(said) == 2, "that a second record has to wait is no news"
    assert said[0].startswith(f"metrics are not recorded in {path}: {os.strerror(errno.EFBIG)}; training goes on")
    assert said[1] == f"metrics are recorded in {path} again: {6 - kept} records had waited"


def test_of_too_many_records_the_last_ones_wait_and_what_is_lost_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.report.metrics_file._MOST_WAITING", 3)
    said = []
    path = tmp_path / "m"
    with room_for(0):
        record = MetricsFile(path, step=0, say=said.append)
        for step in range(1, 6):
            record.write(step, 0, {"loss": 1.0})
    record.write(6, 0, {"loss": 1.0})
    record.close()
    assert [row["step"] for row in MetricsFile.read(path)] == [4, 5, 6]
    assert said[1].endswith("3 records had waited; 3 records before these are lost")

    path.unlink()
    with room_for(0):
        record = MetricsFile(path, step=0, say=said.append)
        for step in range(1, 6):
            record.write(step, 0, {"loss": 1.0})
        record.close()
    assert said[-1] == f"5 records of metrics not written to {path}"


def test_a_record_whose_directory_comes_later_is_taken_up_then(tmp_path):
    said = []
    place = tmp_path / "run"
    logged(place / "m", [(1, {"a": 1}), (2, {"a": 1}), (3, {"a": 1})])
    place.rename(tmp_path / "away")
    place.write_text("")  # so that the directory cannot be made
    record = MetricsFile(place / "m", step=2, say=said.append)
    record.write(2, 0, {"a": 1})  # as where it evaluates again
    record.write(3, 0, {"a": 2})
    place.unlink()
    (tmp_path / "away").rename(place)
    record.write(4, 0, {"a": 3})
    record.close()
    assert [(row["step"], row["a"]) for row in MetricsFile.read(place / "m")] == [(1, 1), (2, 1), (3, 2), (4, 3)]
    assert len(said) == 2


def test_a_directory_that_cannot_be_made_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    logged(tmp_path / "file" / "m", [(1, {"a": 1}), (2, {"a": 1})], say=said.append)
    assert said[1:] == [f"2 records of metrics not written to {tmp_path / 'file' / 'm'}"]
    assert os.strerror(errno.ENOTDIR) in said[0] or os.strerror(errno.EEXIST) in said[0]


def test_the_room_needs_neither_torch_nor_rich():
    code = "import sys, lockstep.report; print(sorted({'torch', 'rich', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
