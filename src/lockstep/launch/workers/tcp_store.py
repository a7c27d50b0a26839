"""The store where the ranks of one generation meet, torch's TCPStore, in a small process of its own.

It is not in a rank, so that it outlives each of them. It is not in the fork server, since the store is a thread, and a
process with threads must not be forked.
"""

from __future__ import annotations

import os
import signal
import socket
from multiprocessing.connection import wait
from typing import NoReturn

from lockstep.launch.host.child_process import die_with_parent, name_process
from lockstep.launch_contract import STOP_SIGNALS
from lockstep.network_interface import own_address

USED, UNUSED = b"1", b"0"


def serve_store(
    listening: int, port: int, parent: int, questions: socket.socket | None, *, when_used: bool = False
) -> NoReturn:
    """Serve the store on the socket ``listening``, already bound to ``port``, until killed; never returns.

    Each byte that comes by ``questions`` asks whether a rank has written to it: the answer is `USED` or `UNUSED`. None:
    nobody asks. With ``when_used``, torch is imported when the first rank connects, which then waits for that.
    """
    die_with_parent(parent)
    name_process("lockstep store")
    # Ranks that save a last checkpoint still need it.
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if when_used:
        _wait_until_used(listening, questions)
    # Imported late: the launcher's own process imports this module too, and must stay free of torch.
    from torch._C._distributed_c10d import TCPStore  # as torch.distributed hands it on, with types

    store = TCPStore(
        _own_address(listening),
        port,
        world_size=None,
        is_master=True,
        master_listen_fd=listening,
        wait_for_workers=False,
    )
    while questions is not None and questions.recv(1):
        questions.sendall(USED if store.num_keys() else UNUSED)  # a store has no key of its own
    while True:
        signal.pause()


def _wait_until_used(listening: int, questions: socket.socket | None) -> None:
    """Return when somebody connects; until then every question is answered."""
    asked = [] if questions is None else [questions]
    while listening not in (ready := wait([listening, *asked])):
        for each in ready:
            assert isinstance(each, socket.socket)
            if each.recv(1):
                each.sendall(UNUSED)
            else:
                asked.clear()


def _own_address(listening: int) -> str:
    """The address of the socket ``listening``, with which this process becomes a client of its own store."""
    with socket.socket(fileno=os.dup(listening)) as own:
        host = own_address(own)
    # Who listens at all addresses of IPv6 does so at those of IPv4, too; and a host may have no loopback of IPv6.
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def main(argv: list[str]) -> NoReturn:
    """Serve a store: ``LISTENING PORT PARENT [QUESTIONS [WHEN_USED]]``, sockets given by their descriptors."""
    listening, port, parent, *more = map(int, argv)
    os.chdir("/")  # the script's may go away, and without one MKL ends a process that loads torch
    questions = socket.socket(fileno=more[0]) if more else None
    serve_store(listening, port, parent, questions, when_used=any(more[1:]))
