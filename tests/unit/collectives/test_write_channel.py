"""Small writes on their way to another host: whole, in their order, and nobody is waited for."""

import contextlib
import socket

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.collectives import Neighbours, Write, WriteChannel

WRITES = st.lists(st.tuples(st.integers(0, 1 << 40), st.binary(max_size=200)), max_size=8)


@contextlib.contextmanager
def channels():
    """Those of ranks 0 and 1, each of which sends to the other; and the connection by which 0 sends."""
    (a, b), (c, d) = socket.socketpair(), socket.socketpair()
    made = WriteChannel(Neighbours({1: a}, {1: d})), WriteChannel(Neighbours({0: c}, {0: b}))
    try:
        yield (*made, a)
    finally:
        for one in made:
            one.close()


@settings(deadline=None, max_examples=30)
@given(rounds=st.lists(st.tuples(WRITES, WRITES, st.booleans()), max_size=5))
def test_all_writes_arrive_in_their_order_whenever_one_looks(rounds):
    sent, found = ([], []), ([], [])
    with channels() as (zero, one, _):
        for first, second, looks in [*rounds, ([], [], True)]:
            for rank, (channel, writes) in enumerate(((zero, first), (one, second))):
                for at, content in writes:
                    channel.write(at, content)
                channel.send()
                sent[rank].extend(Write(rank, at, content) for at, content in writes)
            if looks:
                found[1].extend(zero.received())
                found[0].extend(one.received())
        assert found == sent


def test_who_reads_nothing_keeps_nobody_waiting_and_who_is_gone_costs_nothing():
    with channels() as (zero, one, connection):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        for number in range(40):
            zero.write(number, bytes(50_000))
            zero.send()
        got = one.received()
        assert [write.at for write in got] == list(range(len(got))), "a part is nothing"
        assert len(got) < 40, "it was given up, so that no memory is used up"
        zero.write(99, b"x")
        zero.send()
        assert one.received() == []
    with channels() as (zero, one, _):
        zero.write(7, b"last")
        zero.send()
        zero.close()
        one.write(1, b"to nobody")
        one.send()
        assert one.received() == [Write(0, 7, b"last")]
        assert one.received() == []
        one.write(2, b"to nobody")
        one.send()
