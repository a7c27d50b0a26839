"""What launchers leave outside of the run directory is gone: at their end, or with the next start if all was killed."""

import contextlib
import os
import signal
import tempfile
from pathlib import Path

import pytest

from lockstep.launch.run_dir.owned_directory import (
    SHARED_MEMORY,
    new_owned_directory,
    remove_left,
    remove_owned_directory,
)
from waiting import wait_until

#: Rank 0, and a copy of it as a loader process is one, leave segments as torch does where it is killed in between.
LEAVES = """
    import os, time
    from pathlib import Path

    def leave():
        Path(f"/dev/shm/torch_{os.getpid()}_1_0").touch()
        Path(f"left-{os.getpid()}").touch()

    if os.environ["RANK"] == "0":
        leave()
        if not (copy := os.fork()):
            leave()
            os._exit(0)
        os.waitpid(copy, 0)
    Path("emergency").write_text(os.environ["LOCKSTEP_EMERGENCY_MEMORY"])
    Path("up-" + os.environ["RANK"]).touch()
    while not Path("go").exists():
        time.sleep(0.02)
"""


def left_in_memory(workshop):
    """The segments that the ranks of this workshop have left, and the emergency memories of dead launchers."""
    processes = [file.name.removeprefix("left-") for file in workshop.here.glob("left-*")]
    return [name for name in os.listdir(SHARED_MEMORY) for each in processes if name.startswith(f"torch_{each}_")]


@pytest.fixture
def temporary():
    """A directory with a path that is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as place:
        yield Path(place)


@pytest.mark.parametrize("killed", [True, False])
def test_after_everything_was_killed_the_next_start_removes_what_is_left(workshop, temporary, killed):
    script = workshop.script(LEAVES)
    options = ("--nproc-per-node", 2, "--max-restarts", 1)
    workshop.start(*options, "--run-dir", "first", script, TMPDIR=str(temporary))
    for rank in range(2):
        workshop.wait_for_file(f"up-{rank}")
    assert len(left_in_memory(workshop)) == 2
    homes = {path.name for path in temporary.glob("lockstep-*")}
    assert homes
    emergency = Path((workshop.here / "emergency").read_text())
    assert emergency.exists()
    if killed:
        for process in workshop.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGSTOP)  # so that none sees the end of another
        for process in workshop.processes():
            with contextlib.suppress(ProcessLookupError):  # the kernel kills ranks with their fork server
                os.kill(process, signal.SIGKILL)
        wait_until(lambda: not workshop.processes(), "the end of all of them")
        assert homes <= {path.name for path in temporary.iterdir()}, "nobody was left to remove it"
        other = SHARED_MEMORY / f"torch_{os.getpid()}_of_{workshop.mark}"
        other.touch()
        try:
            (workshop.here / "go").touch()
            ended = workshop.run(*options, "--run-dir", "second", script, TMPDIR=str(temporary))
            assert ended.code == 0, ended.err
            assert other.exists(), "of a process that lives, or that is not ours"
        finally:
            other.unlink(missing_ok=True)
    else:
        (workshop.here / "go").touch()
        assert workshop.end_of(workshop.running[0]).code == 0
    assert left_in_memory(workshop) == []
    assert not list(temporary.glob("*lockstep-*"))
    assert not emergency.exists()


def test_only_what_nobody_holds_is_removed(tmp_path):
    living, owner = new_owned_directory(tmp_path, "lockstep-")
    dead, unlocked = new_owned_directory(tmp_path, "lockstep-emergency-")
    os.close(unlocked)
    elsewhere = tmp_path / "of another program"
    elsewhere.mkdir()
    (elsewhere / "owner").touch()
    (tmp_path / "lockstep-link").symlink_to(elsewhere)
    os.mkfifo(elsewhere / "pipe")
    trap = tmp_path / "lockstep-trap"
    trap.mkdir()
    (trap / "owner").symlink_to(elsewhere / "owner")
    fifo = tmp_path / "lockstep-fifo"
    fifo.mkdir()
    os.mkfifo(fifo / "owner")
    remove_left([tmp_path, Path("/nowhere")])
    assert not dead.exists()
    assert (elsewhere / "owner").exists()
    assert trap.exists(), "its owner is a link"
    assert living.is_dir()
    remove_owned_directory(living, owner)
    assert not living.exists()
