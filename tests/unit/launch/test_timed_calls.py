"""Calls that may block forever, made in threads."""

import threading
from pathlib import Path

from lockstep.launch.host import timed_calls
from lockstep.launch.host.timed_calls import FileThread
from waiting import wait_until


def test_the_user_is_told_once_of_a_file_that_does_not_answer_and_of_none_that_is_slow(monkeypatch):
    said, answers, slow, stuck = [], threading.Event(), Path("slow"), Path("stuck")
    monkeypatch.setattr(timed_calls, "_SILENT_S", 1e6)
    files = FileThread(said.append, patience_s=0.01)
    assert files.ask(answers.wait, "nothing", of=slow) == "nothing", "the caller goes on"
    assert said == []
    answers.set()
    wait_until(lambda: files.ask(lambda: "here", "nothing", of=slow) == "here")
    assert said == [], "it was slow"
    monkeypatch.setattr(timed_calls, "_SILENT_S", 0.0)
    answers.clear()
    assert files.ask(answers.wait, "nothing", of=stuck) == "nothing"
    for _ in range(3):
        assert files.ask(lambda: "here", "nothing", of=stuck) == "nothing", "not asked again so soon"
    assert said == [
        "note: stuck does not answer: the machine is busy, or the file system is gone. The run goes on without the file"
    ]
    answers.set()
    wait_until(lambda: files.ask(lambda: "here", "nothing", of=stuck) == "here")
    assert said[1:] == ["stuck answers again"]
    files.close()
