"""What the leader wrote last is shown, also where its log is read late."""

import threading
from types import SimpleNamespace

from lockstep.launch.host.timed_calls import FileThread
from lockstep.launch.terminal.console import Tail
from lockstep.launch.workers.rank_output import RankOutput


def test_a_file_that_is_too_slow_each_time_is_waited_for_at_the_end(tmp_path, monkeypatch):
    """On a machine under load, the last lines of a run stood in its log only."""
    (tmp_path / "0.log").write_text("first\nlast\nhalf a line")
    job = SimpleNamespace(
        log=lambda rank: tmp_path / f"{rank}.log",
        failure=lambda generation, rank: tmp_path / "failure.json",
        status=tmp_path / "status.json",
    )
    shown = []
    screen = SimpleNamespace(leader=shown.append, unfinished=lambda text: None, is_behind=False, say=shown.append)
    monitor = SimpleNamespace(current=SimpleNamespace(failures={}))
    files = FileThread(shown.append)
    output = RankOutput(job, files, screen, monitor, None)
    output.begin(0, {0: 0})
    files._patience_s, answers, read = 0.0, threading.Event(), Tail.new
    monkeypatch.setattr(Tail, "new", lambda log, end: answers.wait() and read(log, end))
    for _ in range(3):
        output.show()
    assert "".join(shown) == ""
    answers.set()
    output.close()
    files.close()
    assert "".join(shown) == "first\nlast\nhalf a line"
