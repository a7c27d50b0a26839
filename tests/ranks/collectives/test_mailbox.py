"""Messages between ranks: whole, in turn, answered beside the main thread; and a rank that is gone is named."""

import os
import signal
import time

import pytest
import torch

from lockstep.collectives import Mailbox, open_group
from lockstep.errors import PeerLost
from lockstep.testing import run_each, run_ranks
from lockstep.world import World

WORKERS, SERVER = (0, 1), 2
MESSAGE = {"flags": {3}, "tensors": [torch.arange(5.0, dtype=torch.bfloat16), torch.zeros(0, 4), torch.tensor(True)]}


def opened(timeout_s=20.0):
    group = open_group(World.from_env(os.environ), torch.device("cpu"), timeout_s)
    return group, Mailbox(group, (), WORKERS) if group.rank == SERVER else Mailbox(group, (SERVER,), ())


def ended(group, mailbox):
    group.barrier("the end")
    mailbox.close()
    group.close()


def echoes(large):
    """What a server has heard, in order, and what it has echoed to a worker."""
    group, mailbox = opened()
    if group.rank == SERVER:
        heard = []
        for _ in range(6):
            rank, message = mailbox.receive(WORKERS, "a word")
            heard.append((rank, message[0]))
            mailbox.send(rank, message, "its echo")
        ended(group, mailbox)
        return heard
    echoed = []
    for number in range(3):
        mailbox.send(SERVER, (number, MESSAGE, torch.full((large,), number + 0.5)), "a word")
        _, (_, message, tensor) = mailbox.receive((SERVER,), "its echo")
        pairs = zip(message["tensors"], MESSAGE["tensors"], strict=True)
        same = [a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs]
        echoed.append(all(same) and message["flags"] == {3} and bool((tensor == number + 0.5).all()))
    ended(group, mailbox)
    return echoed


def test_messages_arrive_whole_in_the_order_of_each_sender():
    first, second, heard = run_ranks(echoes, 3, 3_000_000)  # more than any buffer on the way
    assert first == second == [True] * 3
    for worker in WORKERS:
        assert [number for rank, number in heard if rank == worker] == [0, 1, 2]


def waits_with_many():
    """Who was heard, where one rank has much to say."""
    group, mailbox = opened()
    for number in range({0: 4, 1: 1}.get(group.rank, 0)):
        mailbox.send(SERVER, number, "a word")
    group.barrier("all is said")
    heard = [mailbox.receive(WORKERS, "a word")[0] for _ in range(5)] if group.rank == SERVER else []
    ended(group, mailbox)
    return heard


def test_a_rank_that_says_much_lets_others_have_their_turn():
    assert run_ranks(waits_with_many, 3)[SERVER] == [0, 1, 0, 0, 0]


def half(number):
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


def asks():
    group, mailbox = opened()
    if group.rank == SERVER:
        mailbox.answer(half, "a question")
        ended(group, mailbox)
        return None
    halves = [mailbox.ask({SERVER: number}, "a question") for number in (8, 6)]
    with pytest.raises(ValueError, match="7 is odd"):
        mailbox.ask({SERVER: 7}, "a question")
    halves.append(mailbox.ask({SERVER: 2}, "a question"))
    ended(group, mailbox)
    return halves


def test_questions_are_answered_beside_the_main_thread_and_errors_are_the_asking_ranks():
    assert run_ranks(asks, 3) == [[[4], [3], [1]]] * 2 + [None]


def loses(how, timeout_s):
    """What the server says of rank 1, which dies or is silent, when rank 0 has been heard; and how long that took."""
    group, mailbox = opened(timeout_s)
    if group.rank == 0:
        mailbox.send(SERVER, "here", "a word")
    heard = mailbox.receive(WORKERS, "a word") if group.rank == SERVER else None
    group.barrier("all is said")
    if group.rank == 1 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        mailbox.receive((1,), "a word", for_ever=group.rank != SERVER)  # until the server has closed
    mailbox.close()
    return heard, str(caught.value), time.monotonic() - begun


def test_a_rank_that_is_gone_is_named_at_once_and_a_silent_one_after_the_groups_time():
    gone, silent = (run_each(loses, 3, *how)[SERVER].value for how in (("dies", 20.0), ("sleeps", 1.0)))
    assert gone[0] == silent[0] == (0, "here")
    assert gone[1].startswith("rank 1 exited or stopped responding during a word: ")
    assert gone[2] < 15
    assert silent[1] == "rank 1 exited or stopped responding during a word: nothing came in 1 s"
    assert silent[2] > 0.9
