"""The connections of neighbours: who is let in, and where they listen. What goes over them: `run/test_mirror.py`."""

import socket

from lockstep.collectives import neighbour_link
from lockstep.collectives.neighbour_link import _GREETING, _accept, _listen
from lockstep.network_interface import INTERFACES

SECRET = bytes(range(16))


def test_strangers_are_sent_away_and_a_mute_one_keeps_nobody_waiting_for_long(monkeypatch):
    monkeypatch.setattr(neighbour_link, "_GREETING_S", 0.1)
    monkeypatch.setenv(INTERFACES[0], "lo")
    listening, here, why_not = _listen(("localhost", 1))
    assert (here[0], why_not) == ("127.0.0.1", "")
    guests = [socket.create_connection(here) for _ in range(5)]
    mute, liar, unexpected, fifth, third = guests
    liar.sendall(_GREETING.pack(bytes(16), 3))
    unexpected.sendall(_GREETING.pack(SECRET, 4))
    for guest, rank in ((fifth, 5), (third, 3)):
        guest.sendall(_GREETING.pack(SECRET, rank))
    accepted = {}
    assert _accept(listening, SECRET, (3, 5), accepted) == ""
    peers = {rank: connection.getpeername() for rank, connection in accepted.items()}
    assert peers == {5: fifth.getsockname(), 3: third.getsockname()}
    for guest in (mute, liar, unexpected):
        guest.settimeout(10.0)
        assert guest.recv(1) == b"", "its connection is closed"

    monkeypatch.setattr(neighbour_link, "_CONNECT_S", 0.2)
    strangers = [socket.create_connection(here) for _ in range(5)]  # who come one after the other, without an end
    assert _accept(listening, SECRET, (3,), {}) == "rank 3 has not come within 0.2 s"
    for one in (*guests, *strangers, *accepted.values(), listening):
        one.close()
