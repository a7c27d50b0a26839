"""Ranks agree, differ, part ways and are lost."""

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore

from device_costs import DEVICE
from lockstep.batch import BatchPlan
from lockstep.collectives import (
    Connections,
    Group,
    ObjectChannel,
    gloo_threads,
    keeping_connections,
    open_all_reduce,
    open_group,
    single_rank_group,
)
from lockstep.collectives.group import refuse_shared_gpus
from lockstep.collectives.owner_broadcast import BroadcastFromOwner
from lockstep.errors import MismatchError, PeerLost, WorldError
from lockstep.strategies.replicated.ddp_reducer import DdpReducer
from lockstep.testing import run_each, run_ranks
from lockstep.world import World


def meet(timeout_s=60):
    return open_group(World.from_env(os.environ), torch.device("cpu"), timeout_s)


def said(call, *args):
    with pytest.raises(MismatchError) as caught:
        call(*args)
    return str(caught.value)


def sum_where_tensors_are_made_elsewhere(group):
    """In a script that has its tensors made on a GPU, for which "meta" stands."""
    with torch.device("meta"):
        return group.sum_int(1, "ones")


def begun_and_finished(group):
    """Two sums under way at once, with other words between them."""
    first, second = (group.begin_sum([10**17 + group.rank, number], "numbers") for number in (1, 2))
    group.barrier("between")
    return second(), first()


def agree():
    group = meet()
    rank = group.rank
    got = {
        "gathered": group.gather_objects({"rank": rank}, "ranks"),
        "broadcast": group.broadcast_object(f"from {rank}", "a word"),
        "sum": group.sum_int(10**15 + rank, "numbers"),
        "sums": begun_and_finished(group),
        "sum elsewhere": sum_where_tensors_are_made_elsewhere(group),
        "tensor": group.sum_tensor(torch.tensor([rank, 1.5]), "tensors").tolist(),
        "leads": group.leads,
    }
    group.check_equal("colour", "blue")
    got["differs"] = said(group.check_equal, "length", 1796 + (rank == 2))
    got["parted"] = said(group.gather_objects, 1, f"call {'a' if rank else 'b'}")
    group.barrier("end")  # after a mismatch the line still serves
    group.close()
    again = meet()  # and a process may meet the others once more
    got["again"] = again.gather_objects(rank, "once more")
    again.close()
    return got


def test_ranks_agree_and_are_told_where_they_differ():
    for rank, got in enumerate(run_ranks(agree, 3)):
        assert got["gathered"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert got["broadcast"] == "from 0"
        assert (got["sum"], got["sum elsewhere"]) == (3 * 10**15 + 3, 3)
        assert got["sums"] == ([3 * 10**17 + 3, 6], [3 * 10**17 + 3, 3])
        assert got["tensor"] == [3.0, 4.5]
        assert got["leads"] == (rank == 0)
        assert got["differs"].startswith("length differs between ranks: rank 2: 1797; ranks 0, 1: 1796. ")
        assert got["parted"].startswith("ranks make different calls: rank 0: call b; ranks 1, 2: call a. ")
        assert "if run.leads" in got["parted"]
        assert got["again"] == [0, 1, 2]


def parts():
    """Ranks 0 and 2 make one part, 1 and 3 another, and each of those a part of one rank."""
    group = meet()
    part = group.subgroup([rank for rank in range(4) if rank % 2 == group.rank % 2])
    runs = BatchPlan(4, 1, part.size).run
    exchange = open_all_reduce(part, runs)
    sums = torch.full((3,), float(group.rank))
    exchange.begin(sums, [sums], 2)
    exchange.finish()
    alone = part.subgroup([part.rank])
    got = {
        "number": (part.rank, part.size),
        "gathered": part.gather_objects(group.rank, "ranks of a part"),
        "sum": part.sum_tensor(torch.ones(1) * group.rank, "tensors of a part").tolist(),
        "tree": sums.tolist(),
        "alone": (alone.size, alone.gather_objects(7, "by myself")),
    }
    group.barrier("end")
    exchange.close()
    group.close()
    return got


def test_a_part_of_the_ranks_is_a_group_of_its_own():
    for rank, got in enumerate(run_ranks(parts, 4)):
        members = [rank % 2, rank % 2 + 2]
        assert got["number"] == (rank // 2, 2)
        assert got["gathered"] == members
        assert got["sum"] == [sum(members)]
        assert got["tree"] == [sum(members)] * 3
        assert got["alone"] == (1, [7])


def boards():
    group = meet()
    board = group.store("news")
    if group.rank == 0:
        assert not board.is_set("never")
        with pytest.raises(PeerLost, match=r"no rank posted never within 0\.1 s"):
            board.get("never", 0.1)
        board.set("word", "grüße")
    told = board.get("word", 60)
    assert board.is_set("word")
    assert not group.store("other").is_set("word")
    group.barrier("end")
    group.close()
    second = meet()
    assert not second.store("news").is_set("word"), "a board of the group before"
    second.barrier("end")
    second.close()
    return told


def test_boards_carry_words():
    assert run_ranks(boards, 2) == ["grüße"] * 2


def one_is_killed():
    group = meet()
    group.barrier("all there")
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.barrier("never met")
    except PeerLost as error:
        return str(error)
    return None


def test_a_killed_rank_is_noticed_and_named_as_no_cause():
    outcomes = run_each(one_is_killed, 3)
    assert isinstance(outcomes[1].error, ChildProcessError), "the rank was not killed"
    assert "SIGKILL" in str(outcomes[1].error)
    for survivor in (outcomes[0], outcomes[2]):
        assert survivor.error is None, survivor.trace
        assert survivor.value.startswith("another rank exited or stopped responding during never met: ")


def one_does_not_come():
    group = meet(timeout_s=3)
    board = group.store("news")
    if group.rank == 0:
        with pytest.raises(PeerLost, match="lonely"):
            group.barrier("lonely")
        board.set("it was", "noticed")
        board.get("heard", 60)  # the store is gone with rank 0
        return "noticed"
    heard = board.get("it was", 60)
    board.set("heard", "by rank 1")
    return heard


def test_a_late_rank_is_noticed_at_the_deadline():
    assert run_ranks(one_does_not_come, 2) == ["noticed", "noticed"]


def test_alone_everything_is_ones_own():
    group = single_rank_group()
    assert (group.rank, group.size, group.leads) == (0, 1, True)
    assert group.gather_objects("x", "x") == ["x"]
    assert group.broadcast_object("x", "x") == "x"
    assert group.sum_int(3, "x") == 3
    group.check_equal("x", object())
    group.barrier("x")
    board = group.store("b")
    board.set("k", "v")
    assert board.get("k", 1) == "v"
    group.close()


def second_group():
    first = meet()
    with pytest.raises(WorldError, match="init_process_group already"):
        meet()
    first.barrier("end")
    first.close()


def test_a_second_group_at_once_is_refused():
    run_ranks(second_group, 2)


def nobody_there():
    with pytest.raises(
        WorldError, match=r"rank 1 of 2 could not meet the others at 127\.0\.0\.1:\d+ \(as generic says\)"
    ):
        open_group(World.from_env(dict(os.environ) | {"RANK": "1", "WORLD_SIZE": "2"}), torch.device("cpu"), 1)


def test_ranks_that_do_not_meet_are_told_where():
    run_ranks(nobody_there, 1, env={"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"})


def without_a_split():
    """Whether torch's world had a device while a group of some of its ranks was made, and has one afterwards."""
    group, world, found = meet(), dist.group.WORLD, []
    made, bound = dist.new_group, torch.device("cuda", 0)
    dist.new_group = lambda *args, **options: found.append(world.bound_device_id) or made(*args, **options)
    try:
        world.bound_device_id = bound
        if group.rank > 0:  # the others do not come, as a server among workers
            part = group.subgroup([1, 2])
            found.append(part.sum_int(1, "members"))
        found.append(world.bound_device_id == bound)
    finally:
        dist.new_group, world.bound_device_id = made, None
    group.barrier("end")
    group.close()
    return found


def test_a_group_of_some_ranks_is_made_by_its_members_alone():
    assert run_ranks(without_a_split, 3) == [[True], [None, None, 2, True], [None, None, 2, True]]


def ends_of_connections():
    """How a search that goes well ends its connections, one whose trial fails in a sum, and a failed trial itself."""
    ends = []
    for name, at in (("destroy_process_group", dist), ("_abort_process_group", gloo_threads)):
        made = getattr(at, name)
        setattr(at, name, lambda name=name, made=made: ends.append(name) or made())
    with keeping_connections():
        meet().barrier("well")
    with contextlib.suppress(ArithmeticError), keeping_connections():
        group = meet()
        if group.rank == 0:
            dist.all_reduce(torch.ones(1), async_op=True)  # which the other rank never makes
        raise ArithmeticError
    with keeping_connections() as connections:
        meet()
        connections.close(abort=True)
        meet().barrier("the next trial")
    return ends


def test_what_is_under_way_after_an_error_is_broken_off():
    assert (
        run_ranks(ends_of_connections, 2)
        == [["destroy_process_group", "_abort_process_group", "_abort_process_group", "destroy_process_group"]] * 2
    )


class Asked(Connections):
    """Which process groups are asked for: between how many ranks, and what carries their tensors."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def take(self, members, backend, timeout_s):
        self.asked.append((len(members), backend))


@pytest.mark.parametrize(("over_cpu", "backend"), [(True, "gloo"), (False, "nccl")])
def test_what_carries_tensors_of_gpus_opens_no_connections_of_the_cpu_beside(over_cpu, backend):
    world, asked = World(0, 3, 0, 3, 0, 1, port=1), Asked()
    group = Group(world, DEVICE, HashStore(), None, 1, nodes=(0, 0, 0), over_cpu=over_cpu, connections=asked)
    ObjectChannel(group)
    assert asked.asked == [(3, backend), (3, "gloo")]
    asked.asked.clear()
    BroadcastFromOwner(group)
    assert asked.asked == [(3, backend)] * (2 if over_cpu else 1)
    asked.asked.clear()
    DdpReducer(nn.Linear(1, 1), 0, group, None, 1, find_unused_parameters=True, static_graph=False, spans_gpus=False)
    assert asked.asked == [(3, backend)]
    asked.asked.clear()
    group.subgroup([0, 2])
    # What ranks say and what a CPU holds of a divided model go over the same connections, if others carry tensors.
    assert asked.asked == [(2, None), *[(2, "gloo")] * over_cpu]


def words_and_tensors_of_a_part():
    """Of a group that says that its tensors are on GPUs: a second process group of a part of it carries nothing."""
    group = meet()
    gpus = Group(
        World.from_env(os.environ), group.device, HashStore(), dist.group.WORLD, 60, nodes=(0, 0), over_cpu=False
    )
    before = len(dist.distributed_c10d._world.pg_map)
    part = gpus.subgroup([0, 1])
    made = len(dist.distributed_c10d._world.pg_map) - before
    found = made, part.gather_objects(group.rank, "ranks"), part.sum_tensor(torch.ones(1), "tensors").tolist()
    group.barrier("end")
    group.close()
    return found


def test_a_part_of_ranks_with_gpus_makes_one_process_group():
    assert run_ranks(words_and_tensors_of_a_part, 2) == [(1, [0, 1], [2.0])] * 2


def gpus_that_ranks_say(ids):
    """What each of several ranks is told, in threads."""
    store = HashStore()

    def said(rank):
        try:
            refuse_shared_gpus(World(rank, len(ids), rank, len(ids), 0, 1, port=1), ids[rank], store)
        except WorldError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(ids)) as pool:
        return list(pool.map(said, range(len(ids))))


def test_ranks_on_one_gpu_are_named_unless_that_is_meant(monkeypatch):
    said = gpus_that_ranks_say(["GPU-a", "GPU-b", "GPU-a"])
    assert [("ranks 0, 2 use the same GPU, GPU-a" in each) for each in said] == [True, False, True]
    assert gpus_that_ranks_say(["GPU-a", "GPU-b"]) == ["", ""]
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert gpus_that_ranks_say(["GPU-a", "GPU-a"]) == ["", ""]
