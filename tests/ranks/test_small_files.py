"""Files that are whole or not there: of several writers, of one that fails, and of one that is killed."""

import errno
import os
import signal
import stat
import threading
import tracemalloc

import pytest

from lockstep.records import MOST_GROWN, read_bytes
from lockstep.small_files import create_text, replace_text, replacement
from lockstep.testing import run_each


@pytest.mark.parametrize("durable", [False, True])
def test_a_text_takes_the_place_of_another(tmp_path, durable):
    path = tmp_path / "a.json"
    for text in ("old", "new ä"):
        replace_text(path, text, durable=durable)
        assert path.read_text(encoding="utf-8") == text
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "a.json"
    replace_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "half \ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_file_system_that_cannot_flush_names_is_no_failure(tmp_path, monkeypatch):
    flush = os.fsync

    def refuse_directories(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_directories)
    replace_text(tmp_path / "a.json", "text", durable=True)
    assert (tmp_path / "a.json").read_text() == "text"


def test_no_file_comes_of_a_directory_that_is_gone(tmp_path):
    with pytest.raises(FileNotFoundError):
        replace_text(tmp_path / "gone" / "a.json", "text")
    assert os.listdir(tmp_path) == []


def test_of_many_who_create_a_file_one_does(tmp_path):
    path, made = tmp_path / "a.json", []
    writers = [threading.Thread(target=lambda n=n: made.append((create_text(path, str(n)), n))) for n in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    (winner,) = [number for is_made, number in made if is_made]
    assert path.read_text() == str(winner)
    assert os.listdir(tmp_path) == ["a.json"]


def _killed_while_it_writes(path):
    with replacement(path) as beside:
        beside.write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_who_is_killed_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    replace_text(path, "old")
    (outcome,) = run_each(_killed_while_it_writes, 1, path)
    assert isinstance(outcome.error, ChildProcessError)
    assert path.read_text() == "old"
    assert list(tmp_path.glob("*.json.*")) == [], "what is left beside it has another name"


def test_a_small_file_takes_little_memory_however_large_such_files_may_be(tmp_path):
    path = tmp_path / "small"
    path.write_bytes(b"0123456789")
    tracemalloc.start()
    try:
        assert read_bytes(path, MOST_GROWN) == b"0123456789"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    with pytest.raises(ValueError, match=r"has 10 bytes; such a file has at most 9"):
        read_bytes(path, 9)
