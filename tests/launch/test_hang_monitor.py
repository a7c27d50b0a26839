"""The launcher's watch over its ranks, with a clock of the test's: what it says of a hang stays said."""

import os
import socket
from pathlib import Path

from lockstep.heartbeat_message import Heartbeat, SourceLine
from lockstep.launch.deadline_thread import FileThread
from lockstep.launch.diagnosis.hang_analysis import HangTimeouts
from lockstep.launch.diagnosis.hang_monitor import HangMonitor


def test_ranks_that_are_ended_for_a_hang_are_not_blamed_for_falling_silent(tmp_path):
    now, said = 100.0, []
    files = FileThread(said.append)
    hang_monitor = HangMonitor(
        HangTimeouts(hang_after_s=2.0),
        None,
        stacks=lambda rank: tmp_path / f"stacks-{rank}",
        hangs=tmp_path / "hangs",
        files=files,
        say=said.append,
        shown=str,
        now=lambda: now,
    )
    with hang_monitor, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        left = Path(hang_monitor.channel).with_name("rank-of-the-generation-before") / "pymp-1"
        left.mkdir(parents=True)
        hang_monitor.begin(range(2))
        assert not left.parent.exists(), "what a rank leaves goes with its generation"
        hang = None
        while hang is None:  # rank 0 waits for rank 1
            assert now < 105
            for rank, call in enumerate(("all_reduce", "")):
                place = SourceLine("train.py", 7, "train")
                beat = Heartbeat(rank, os.getpid(), -1, 0, "script", place, call, bool(call), 3 + (not rank), 0.0, now)
                line.sendto(beat.to_text().encode(), hang_monitor.channel)
            hang = hang_monitor.poll()
            now += 0.5
        while now < 120:  # both are being ended, and say nothing more
            assert hang_monitor.poll() is None
            now += 0.5
        failures = hang_monitor.hang_failures()
    files.close()
    assert len(said) == 1
    assert hang.diagnosis.culprits == (1,)
    assert list(failures) == [1]
