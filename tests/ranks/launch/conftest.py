"""Real launchers, started as a user would start them, and none of them left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import lockstep
from waiting import wait_until

DEADLINE_S = 90
LEFT_OVER_S = 20  #: for processes to end whose launcher has
SOURCE = str(Path(lockstep.__file__).parents[1])
MARK = "LOCKSTEP_TEST_MARK"


@dataclass
class Ended:
    code: int
    out: str
    err: str


@dataclass
class Workshop:
    """A directory with scripts, and the launchers that run in it."""

    here: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    running: list = field(default_factory=list)

    def script(self, text, name="train.py"):
        (self.here / name).write_text(textwrap.dedent(text))
        return name

    def environment(self, **env):
        """Of what is started here, and known by it."""
        kept = ("LOCKSTEP_TEST_SESSION",)
        clean = {
            name: value
            for name, value in os.environ.items()
            if name in kept or not name.startswith(("LOCKSTEP_", "OMP_", "OPENBLAS_"))
        }
        return {**clean, "PYTHONPATH": SOURCE, "RES_OPTIONS": "timeout:1 attempts:1", MARK: self.mark, **env}

    def start(self, *args, command=("-m", "lockstep", "run"), streams=None, **env):
        process = subprocess.Popen(
            [sys.executable, *command, *map(str, args)],
            cwd=self.here,
            env=self.environment(**env),
            **(streams or {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}),
            text=True,
        )
        self.running.append(process)
        return process

    def end_of(self, process):
        out, err = process.communicate(timeout=DEADLINE_S)
        return Ended(process.returncode, out, err)

    def run(self, *args, **env):
        return self.end_of(self.start(*args, **env))

    def processes(self):
        """Every process that descends from one of these launchers and still runs: its name by its process id."""
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                state = (directory / "stat").read_text().rpartition(")")[2].split()[0]
                if f"{MARK}={self.mark}".encode() in (directory / "environ").read_bytes() and state != "Z":
                    found[int(directory.name)] = (directory / "comm").read_text().strip()
            except OSError:
                continue
        return found

    def said_of_processes(self):
        return f"the end of what outlived its launcher: {self.processes()}"

    def fork_server(self):
        """The process id of the fork server: the parent of rank 0."""
        rank = next(pid for pid, name in self.processes().items() if name == "rank 0")
        return int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])

    def wait_for_file(self, name):
        wait_until((self.here / name).exists, f"the file {name}")
        return (self.here / name).read_text()


@pytest.fixture
def workshop(tmp_path):
    made = Workshop(tmp_path)
    yield made
    for process in made.running:
        process.kill()
        process.wait()
    try:
        wait_until(lambda: not made.processes(), made.said_of_processes, deadline_s=LEFT_OVER_S)
    finally:
        for process in made.processes():
            os.kill(process, signal.SIGKILL)
        for process in made.running:
            process.communicate()


@pytest.fixture
def hit():
    """Send a process a signal."""
    return lambda process, name: os.kill(getattr(process, "pid", process), signal.Signals[name])
