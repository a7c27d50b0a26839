"""What several ranks do over NCCL: on as many GPUs, or on one that they share, which NCCL 2.30 can.

For one GPU, before `make test-gpu`:

    export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=1 NCCL_NVLS_ENABLE=0
    export LD_PRELOAD=.../libnccl.so.2     where torch brings an older NCCL: of nvidia-nccl-cu13, for CUDA 13

These ranks take turns on the GPU, so that more of them at a time are no quicker: `pytest tests/gpu/test_nccl.py -n 3`.
"""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from lockstep.batch import BatchPlan
from lockstep.collectives import Group, TreeAccumulator
from lockstep.collectives.all_reduce import NcclAllReduce
from lockstep.doctor.probe import nccl_version
from lockstep.errors import PeerLost
from lockstep.run import Run
from lockstep.testing import StrategyLaws, run_each, run_ranks
from lockstep.world import World


def ranks() -> int:
    """How many can meet over NCCL here."""
    if not torch.cuda.is_available():
        return 0
    shares = nccl_version() >= (2, 30) and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return 4 if shares and torch.cuda.device_count() == 1 else torch.cuda.device_count()


def needs(number: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(ranks() < number, reason=f"NCCL joins no {number} ranks here")


pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]

#: By strategy, between how many ranks, and how far from one rank where it computes something else.
LAWS: dict[str, tuple[tuple[int, ...], float]] = {
    "ddp": ((2, 3), 0),
    "zero": ((2, 3), 0),
    "fsdp": ((2, 3), 0),
    "hsdp:shard=2": ((2, 4), 0),
    "fsdp:tensor=2": ((2, 4), 0.1),
    "local-sgd:period=2": ((2, 3), 0.8),
    "parameter-server:servers=1": ((2, 3), 0),
    "hybrid:servers=1": ((2, 3), 0),
}


@needs(2)
@pytest.mark.parametrize("law", StrategyLaws.ALL)
@pytest.mark.parametrize("word", LAWS)
def test_laws_of_strategies_over_nccl(word: str, law: str, tmp_path: Path):
    wanted, tolerance = LAWS[word]
    worlds = tuple(world for world in wanted if world <= ranks())
    how = {"bits": False, "tolerance": tolerance} if tolerance else {}
    getattr(StrategyLaws(word, tmp_path, worlds=worlds, **how), law)()


def meet() -> tuple[Group, torch.device]:
    """All ranks over NCCL, as `Run` joins them."""
    world = World.from_env(os.environ)
    device = torch.device("cuda", world.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    timeout = timedelta(seconds=60)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=timeout)
    store = dist.distributed_c10d._get_default_store()
    control = dist.new_group(backend="gloo", timeout=timeout)
    return Group(world, device, store, control, 60, nodes=[0] * world.size, over_cpu=False), device


def of_micro_batch(index: int, numbers: int) -> torch.Tensor:
    """Of very different sizes, so that another order of additions gives other bits."""
    random = torch.Generator().manual_seed(index)
    return torch.randn(numbers, generator=random) * 10.0 ** (index % 5)


def unequal_sums(micro_batches: int) -> list[int]:
    """Of which lengths a sum over NCCL has other bits than that of one rank."""
    group, device = meet()
    plan = BatchPlan(micro_batches, 1, group.size)
    all_reduce, odd = NcclAllReduce(group, plan.run), []
    for numbers in (1, 7, 143, 1 << 20, (1 << 21) + 5):
        whole, own = (TreeAccumulator(micro_batches, lambda a, b: a + b) for _ in range(2))
        for index in range(micro_batches):
            whole.push((index, index + 1), of_micro_batch(index, numbers))
            if index in plan.run(group.rank):
                own.push((index, index + 1), of_micro_batch(index, numbers).to(device))
        outs = [torch.empty(numbers, device=device) for _ in range(3)]
        for out in outs:
            all_reduce.begin(out, [each.clone() for each in own.sums], micro_batches)
        all_reduce.finish()
        if not all(torch.equal(out.cpu(), whole.sums[0]) for out in outs):
            odd.append(numbers)
    all_reduce.close()
    group.close()
    return odd


@pytest.mark.parametrize(
    ("world", "micro_batches"),
    [pytest.param(*case, marks=needs(case[0])) for case in ((2, 2), (2, 3), (2, 8), (3, 8), (4, 8), (4, 13))],
)
def test_sums_over_nccl_are_those_of_the_tree(world: int, micro_batches: int):
    assert run_ranks(unequal_sums, world, micro_batches, timeout_s=120) == [[]] * world


def sum_of_some() -> float:
    """Of ranks 1 and 2, in a group that rank 0 has no part in making."""
    group, device = meet()
    total = torch.full((1,), float(group.rank), device=device)
    if group.rank:
        dist.all_reduce(total, group=group.new_process_group([1, 2]))
    found = total.item()
    group.barrier("the end")
    group.close()
    return found


@needs(3)
def test_some_ranks_make_a_group_without_the_others():
    assert run_ranks(sum_of_some, 3, timeout_s=120) == [0.0, 3.0, 3.0]


def one_dies(strategy: str) -> None:
    with Run(seed=1, strategy=strategy, peer_timeout_s=5, track="none") as run:
        model = run.model(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        data = torch.randn(480, 64), torch.randint(10, (480,))
        for number, (x, y) in enumerate(run.train(run.loader(data, global_batch=24, micro_batch=4))):
            if run.rank == 1 and number == 5:
                os._exit(9)
            run.step(F.cross_entropy(model(x), y))


@needs(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero", "fsdp"])
def test_ranks_learn_that_another_one_is_gone(strategy: str):
    outcomes = run_each(one_dies, 2, strategy, timeout_s=120)
    assert isinstance(outcomes[1].error, ChildProcessError)
    assert isinstance(outcomes[0].error, PeerLost) or outcomes[0].collateral
