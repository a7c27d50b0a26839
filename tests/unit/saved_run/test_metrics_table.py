"""The table of what a run has logged holds what pandas itself reads from the record."""

import math
import sys

import pytest

import lockstep
from lockstep.errors import SettingError
from lockstep.saved_run import metrics
from written_runs import write_run


def test_it_holds_each_record_as_pandas_reads_it(tmp_path):
    import pandas  # takes half a second

    run_dir = write_run(tmp_path / "run", steps=12)
    table = metrics(run_dir)
    pandas.testing.assert_frame_equal(table, pandas.read_json(run_dir / "metrics.jsonl", lines=True), check_dtype=False)
    assert math.isnan(table["accuracy"][2])
    assert list(table["step"]) == list(range(1, 13))
    assert lockstep.metrics is metrics


def test_a_record_in_writing_is_read_up_to_its_last_whole_line(tmp_path):
    run_dir = write_run(tmp_path / "run", steps=3)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "epoch": 1, "wall_s": 1.0, "lo')
    assert len(metrics(run_dir)) == 3


@pytest.mark.parametrize("place", ["gone", "."])
def test_where_nothing_was_logged_the_error_says_what_to_give(tmp_path, place):
    with pytest.raises(SettingError, match=r"holds no metrics\.jsonl that can be read.* such as runs/NAME"):
        metrics(tmp_path / place)


def test_without_pandas_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SettingError, match=r"pip install 'torch-lockstep\[notebook\]'"):
        metrics(tmp_path)
