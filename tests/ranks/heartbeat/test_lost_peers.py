"""A rank ends its connections to hosts that are lost, whoever has opened them, and no others."""

import contextlib
import fcntl
import os
import socket
import subprocess
import sys

import pytest

from lockstep.heartbeat import LostPeers
from lockstep.heartbeat.lost_peers import end_connections
from lockstep.launch_contract import LOST_ADDRESSES


@pytest.fixture
def connected():
    """Connections of this process, by the address at the other end."""
    with contextlib.ExitStack() as stack:
        made = {}
        for address, family in (("127.0.0.2", socket.AF_INET), ("127.0.0.3", socket.AF_INET), ("::1", socket.AF_INET6)):
            with contextlib.suppress(OSError):  # there may be no IPv6
                listening = stack.enter_context(socket.create_server((address, 0), family=family))
                one = stack.enter_context(socket.create_connection(listening.getsockname()[:2]))
                other = stack.enter_context(listening.accept()[0])
                for end in (one, other):
                    end.settimeout(10.0)
                made[address] = one, other
        yield made


def ends(connection):
    with contextlib.suppress(BlockingIOError):
        connection.setblocking(False)
        return connection.recv(1) == b""
    return False


def test_what_waits_for_a_lost_host_reads_what_has_come_and_then_the_end(connected):
    one, other = connected["127.0.0.2"]
    other.sendall(b"x")
    before = os.listdir("/proc/self/fd")
    assert end_connections({"127.0.0.2"}) == 1
    assert one.recv(1) == b"x"
    assert ends(one)
    assert not any(ends(one) for address, (one, _) in connected.items() if address != "127.0.0.2")
    assert os.listdir("/proc/self/fd") == before
    for address in connected.keys() - {"127.0.0.2"}:
        assert end_connections({address}) == (2 if address == "::1" else 1), "of IPv6, both ends have this address"
        assert ends(connected[address][0])


def test_a_process_keeps_its_locks_on_files(connected, tmp_path):
    taken = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with (tmp_path / "locked").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert end_connections({"127.0.0.2"}) == 1
        tried = subprocess.run([sys.executable, "-Sc", taken, file.name], capture_output=True, text=True, check=False)
    assert "BlockingIOError" in tried.stderr, "to close a duplicate of it would have given them up"


def test_the_launcher_names_them_in_a_file_beside_its_socket(connected, tmp_path):
    peers = LostPeers(str(tmp_path / "beats"))
    peers.look()
    assert not peers.told()
    for known in (["127.0.0.2"], ["127.0.0.2", "127.0.0.3"]):
        (tmp_path / LOST_ADDRESSES).write_text("".join(f"{address}\n" for address in known))
        peers.look()
        assert peers.told()
        assert [a for a, (one, _) in connected.items() if ends(one)] == known
    for nowhere in ("", "localhost:1234"):
        LostPeers(nowhere).look()
        assert not LostPeers(nowhere).told()
