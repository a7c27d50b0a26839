"""How the fork server ends, beside `test_parts`: by itself, or with its launcher."""

import os
import subprocess
import sys

import pytest

from lockstep.launch_contract import CHANNEL, EMERGENCY
from waiting import wait_until

#: A launcher that closes its fork server while that stands still, and then sees its end or is killed.
LAUNCHER = """
import os, signal, socket, sys
from lockstep.launch.job.request import Executable
from lockstep.launch.workers.fork_messages import message
from lockstep.launch.workers.fork_server import ForkServer

ours, theirs = socket.socketpair()
if not (server := os.fork()):
    ours.close()
    ForkServer(theirs, "plain", Executable("true")).serve()
theirs.close()
ours.sendall(message(number=1, order="lease", for_s=100.0))
ours.recv(1)  # it serves
os.kill(server, signal.SIGSTOP)
os.waitpid(server, os.WUNTRACED)
ours.sendall(message(number=2, order="close"))
ours.shutdown(socket.SHUT_RDWR)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
os.kill(server, signal.SIGCONT)
os.waitpid(server, 0)
"""


@pytest.mark.parametrize("launcher", ["lives", "killed"])
def test_a_launcher_that_closes_its_fork_server_keeps_its_files_unless_it_is_killed_meanwhile(tmp_path, launcher):
    home, memory = tmp_path / "lockstep-home", tmp_path / "memory"
    for directory in (home, memory):
        directory.mkdir()
    env = {**os.environ, CHANNEL: str(home / "beats"), EMERGENCY: str(memory)}
    subprocess.run([sys.executable, "-c", LAUNCHER, launcher], env=env, check=False, timeout=60)
    if launcher == "lives":
        assert home.exists()
        assert memory.exists()
    else:
        wait_until(lambda: not home.exists() and not memory.exists(), lambda: "nobody removed them")
