"""`run.json` is changed by the launcher and by the leader, and neither undoes what the other has written."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.report import about_run, change_about_run


def test_of_many_who_change_it_none_is_undone(tmp_path):
    def add(number):
        change_about_run(tmp_path, lambda about: about["starts"].append({"number": number}))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(64)))
    assert sorted(start["number"] for start in about_run(tmp_path)["starts"]) == list(range(64))


@pytest.mark.parametrize(
    "start", [{}, {"command": "x", "settings": {"keep": "5"}}, {"command": "x", "unknown": [1], "host": "n1"}]
)
def test_what_an_older_version_has_written_is_read_and_kept(tmp_path, start):
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "starts": [start], "generations": [], "more": 1}))
    change_about_run(tmp_path, lambda about: about["generations"].append({"number": 0}))
    assert about_run(tmp_path) == {"format": 1, "starts": [start], "generations": [{"number": 0}], "more": 1}
