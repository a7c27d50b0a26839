"""What a step costs beside the model: kernels of the device and waits of the host, counted without a GPU.

With P parameters and L BatchNorms, what is launched depends on neither, but for one kernel more for each 64 tensors of
a list (`Costs`); and nothing of it waits.
"""

import math
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from device_costs import DEVICE, Costs
from lockstep.batch import BatchPlan, MicroBatchPosition
from lockstep.checkpoint.tensors import copy_to_host, lock_pages
from lockstep.collectives import Group
from lockstep.collectives.all_reduce import _fold, open_all_reduce
from lockstep.collectives.reduction_plan import ReductionPlans
from lockstep.errors import NonFiniteError
from lockstep.run import Run
from lockstep.run.batches.to_device import to_device
from lockstep.run.checks.nonfinite import NonFiniteChecks
from lockstep.run.loop.step_losses import StepLosses
from lockstep.run.setup.kernels import Precision
from lockstep.strategies.parts.buffers import Buffers
from lockstep.strategies.parts.gradient_accumulation import ParameterSet, align_gradients
from lockstep.strategies.parts.state_layout import OwnerLayout, ReplicatedLayout
from lockstep.strategies.replicated.single_process import SingleProcess
from worlds import on_world

MANY = 200


def lists(tensors):
    """Launches of one operation on so many small tensors."""
    return math.ceil(tensors / 64)


def with_gradients(number, device=DEVICE):
    parameters = [nn.Parameter(torch.ones(4, 3, device=device)) for _ in range(number)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def test_gradients_are_asked_for_at_once():
    parameters = with_gradients(MANY)
    checks = NonFiniteChecks("stop", 0, print, lambda: None, read_later=lambda values: values)
    loss = torch.ones((), device=DEVICE)
    with Costs() as costs:
        checks.loss(loss, 0, 0, 1, 4)
        checks.gradients(parameters, str, 0)
        checks.step_ended()
    # The loss is copied, for the script may write into it; the norms, twice a list; stack; all values in one tensor.
    assert costs.launches == 1 + 2 * lists(MANY) + math.ceil(MANY / 128) + 1
    assert costs.waits == 0


class Arrived:
    """What was asked for, read from the CPU."""

    def __init__(self, values):
        self.read = [math.nan, *[1.0] * (len(values) - 1)].copy if len(values) > 1 else [1.0].copy


def test_a_tensor_of_the_cpu_among_those_of_a_device_is_an_error_as_on_a_gpu():
    """Also an empty one, which tensors that hold nothing would let pass; a number of no dimension is an argument."""
    there = torch.ones(3, device=DEVICE)
    with Costs():
        (there * torch.tensor(2.0)).copy_(torch.ones(3))
        for others in (torch.zeros(0), torch.ones(3)):
            with pytest.raises(RuntimeError, match=r"^cat: a GPU computes with no tensor of the CPU"):
                torch.cat([there, others])


def test_the_values_that_are_read_are_those_of_the_text_that_is_said():
    said = []
    checks = NonFiniteChecks("warn", 0, said.append, lambda: None, read_later=Arrived)
    for step in range(2):
        checks.gradients(with_gradients(3), str, step)
        checks.loss(torch.ones((), device=DEVICE), step, 0, 1, 4)
        checks.step_ended()
    assert len(said) == 1
    assert "the gradient is not finite at step 1" in said[0]
    checks = NonFiniteChecks("stop", 0, print, lambda: None, read_later=Arrived)
    checks.loss(torch.ones((), device=DEVICE), 0, 0, 2, 4)
    checks.loss(torch.ones((), device=DEVICE), 0, 1, 2, 4)
    with pytest.raises(NonFiniteError, match=r"the loss is not finite at step 1 .* micro-batch 0 of 2"):
        checks.settle()


def launches_of_buffers(layers, micro_batches):
    with DEVICE:
        model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(layers)))
    group = SimpleNamespace(rank=0, size=1, device=DEVICE, gather_objects=lambda own, _: [own])
    buffers = Buffers(open_all_reduce(group, lambda *_: range(1)), group)
    with Costs() as begin:
        buffers.setup_model(model)
    assert begin.waits == 1
    for _ in range(2):  # in the first two steps, more is looked at
        with Costs():
            buffers.end_micro_batch(MicroBatchPosition(0, 1, last=True))
    with Costs() as costs:
        for index in range(micro_batches):
            buffers.end_micro_batch(MicroBatchPosition(index, micro_batches, last=index == micro_batches - 1))
    assert costs.waits == 0
    return costs


def test_running_statistics_of_a_step_of_one_micro_batch_are_two_copies():
    for layers in (10, 53):
        # Of floating-point and of whole numbers: to the base, and back.
        assert launches_of_buffers(layers, 1).launches == 2 * (lists(2 * layers) + lists(layers))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_only_micro_batch_of_a_step_leaves_its_buffers_as_they_are(ranks):
    model = nn.Module()
    model.register_buffer("mean", torch.tensor([1.0, 2.0]))
    model.register_buffer("seen", torch.tensor([7, 8], dtype=torch.int32))
    group = SimpleNamespace(rank=0, size=ranks, device=torch.device("cpu"), gather_objects=lambda own, _: [own])
    # Where there is another rank, it has no part in this step, and adds nothing.
    alone = SimpleNamespace(size=1, device=group.device)
    buffers = Buffers(open_all_reduce(alone, lambda *_: range(1)), group)
    buffers.setup_model(model)
    for _ in range(2):
        left = torch.tensor([-0.0, 1 / 3]) + model.mean * 0
        model.mean.copy_(left.copysign(torch.tensor([-1.0, 1.0])))
        model.seen += 2
        buffers.end_micro_batch(MicroBatchPosition(0, 1, last=True))
        assert model.mean.view(torch.int32).tolist() == torch.tensor([-0.0, 1 / 3]).view(torch.int32).tolist()
    assert model.seen.tolist() == [11, 12]


def test_running_statistics_of_several_micro_batches_are_moved_at_once():
    few, many = launches_of_buffers(10, 4), launches_of_buffers(53, 4)
    assert few.launches <= 45
    assert many.launches <= 45 + 4 * 3 + 4  # the lists of a hundred


def test_the_norm_takes_launches_by_widths_and_not_by_parameters():
    shapes = [(768, 768), (3072, 768), (768, 3072), (768,), (3072,)]
    launches = []
    for layers in (4, 12):
        parameters = [nn.Parameter(torch.empty(s, device=DEVICE)) for _ in range(layers) for s in shapes]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        with Costs() as costs:
            ReplicatedLayout().norm(parameters)
        assert costs.waits == 0
        launches.append(costs.launches)
    rows = sum(math.ceil(math.log2(width)) for width in (768, 3072)) + 3 * 3
    whole = math.ceil(math.log2(12 * (768 + 3072 + 768 + 768 + 3072)))
    assert launches[1] <= 2 * rows + whole + 10
    assert launches[1] - launches[0] <= rows + 5  # of larger gradients, one more table of 32 Mi elements


def test_the_norm_of_gradients_on_several_ranks_waits_for_none_of_them():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2)).to(DEVICE)
    told = []

    def begin_sum(values, what):
        told.extend(values)
        return lambda: [1, 1, 1, 1, 0, 0]  # the other rank has gradients of the second layer

    group = SimpleNamespace(rank=0, size=2, device=DEVICE, sum_tensor=lambda own, _: own, begin_sum=begin_sum)
    layout = OwnerLayout(group)
    layout.setup_model(model, lambda name: (int(name.startswith("1.")),))
    for parameter in model[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    with Costs() as costs:
        layout.norm(tuple(model.parameters()))
    assert costs.waits == 0
    assert told == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("ranks", [3, 4, 5, 8, 13, 64])
@pytest.mark.parametrize("each", [1, 3])
def test_sums_of_ranks_are_added_level_by_level(ranks, each):
    micro_batches = ranks * each - (each > 1)
    plan = ReductionPlans(0, ranks, BatchPlan(micro_batches, 1, ranks).run)(micro_batches)
    received = torch.empty(len(plan.all_nodes) * 1000, device=DEVICE)
    with Costs() as costs:
        _fold(plan, received, 1000)
    assert costs.launches <= math.ceil(math.log2(micro_batches))
    assert sum(len(left) for left, _ in plan.additions) == len(plan.all_nodes) - 1


def test_gradients_begin_where_they_do_without_buckets():
    sizes = [16, 10, 32, 1, 63]
    bucket = torch.arange(float(sum(sizes)), device=DEVICE)
    parameters = [nn.Parameter(torch.ones(size, device=DEVICE)) for size in sizes]
    for parameter, gradient in zip(parameters, bucket.split(sizes), strict=True):
        parameter.grad = gradient
    with Costs() as costs:
        align_gradients(parameters)
    assert costs.launches == 1
    assert [p.grad.storage_offset() for p in parameters] == [0, 16, 0, 0, 0]

    on_cpu = [nn.Parameter(torch.ones(size)) for size in sizes]
    for parameter, gradient in zip(on_cpu, torch.arange(float(sum(sizes))).split(sizes), strict=True):
        parameter.grad = gradient
    align_gradients(on_cpu)
    assert torch.equal(torch.cat([p.grad for p in on_cpu]), torch.arange(float(sum(sizes))))


def test_a_mapping_of_a_tokenizer_is_copied_without_a_wait():
    class Encoding(UserDict):
        def to(self, device):
            self.data = {name: value.to(device) for name, value in self.data.items()}
            return self

    batch = Encoding(ids=torch.ones(2, 3), mask=torch.ones(2, 3))
    batch.encodings = ["kept"]
    with Costs() as costs:
        moved = to_device(batch, DEVICE)
    assert (type(moved), moved.encodings) == (Encoding, ["kept"])
    assert {value.device for value in moved.values()} == {DEVICE}
    assert batch["ids"].is_cpu
    assert (costs.launches, costs.waits) == (2, 0)


def test_a_state_is_copied_to_the_host_with_no_wait_for_each_tensor():
    places = [torch.zeros(4, 3) for _ in range(MANY)]
    with Costs() as costs:
        copy_to_host(places, [torch.empty_like(place, device=DEVICE) for place in places])
    assert costs.waits == 0


class Cuda:
    """What CUDA is asked for memory of the host."""

    def __init__(self, answer):
        self.locked, self.answer = {}, answer

    def cudaHostRegister(self, address, length, flags):
        self.locked[address] = length
        return self.answer

    def cudaHostUnregister(self, address):
        del self.locked[address]


def test_memory_is_locked_as_it_is_and_as_long_as_it_is_there(monkeypatch):
    cuda = Cuda(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    block = torch.empty(5000, dtype=torch.uint8)
    assert lock_pages(block)
    assert cuda.locked == {block.data_ptr(): 5000}
    del block
    assert not cuda.locked
    refuses = Cuda(2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refuses)
    block = torch.empty(5000, dtype=torch.uint8)
    assert not lock_pages(block)
    del block
    assert len(refuses.locked) == 1


def test_in_fp16_the_host_waits_once_for_each_optimizer():
    precision = Precision("fp16", torch.device("cpu"))
    parameters = with_gradients(3, "cpu")
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for infinite in (False, True):
        before = parameters[0].detach().clone()
        precision.scale(torch.ones(()))
        parameters[1].grad[0] = math.inf if infinite else 1
        with Costs() as costs:
            precision.unscale(optimizer, lambda found: found)
            if not precision.skips(optimizer):
                optimizer.step()
            assert precision.update_scale() is not infinite
        assert costs.waits == 1
        assert torch.equal(before, parameters[0]) is infinite


def when_counts_are_added_up():
    """What happens in two steps of two micro-batches with counts, in order."""
    events, begin = [], Group.begin_sum

    def begin_sum(group, values, what):
        finish = begin(group, values, what)
        events.append(what)
        return lambda: events.append("its end") or finish()

    Group.begin_sum = begin_sum
    try:
        with Run(on_nan="ignore", replay=False) as run:
            model = run.model(nn.Linear(3, 1))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in run.train(run.loader(torch.ones(16, 3), global_batch=8, micro_batch=2)):
                out = model(batch)
                out.register_hook(lambda gradient: events.append("gradient"))
                run.step(out.mean(), count=run.rank + 1)
    finally:
        Group.begin_sum = begin
    return events


def test_counts_are_added_up_while_the_backward_pass_runs():
    of_step = ["gradient", "the sum of counts", "gradient", "its end"]
    ((one, other),) = on_world(2, [(when_counts_are_added_up,)])
    assert one == other == of_step * 2


def test_a_count_on_the_device_is_asked_for_before_the_backward_pass():
    asked, divided = [], []

    def read_later(values):
        asked.append(values)
        return Arrived([5.0])

    class Counting(SingleProcess):
        def normalize_by_count(self, target, samples, counted):
            divided.append((samples, counted))

    group = SimpleNamespace(size=1, device=DEVICE)
    losses = StepLosses(group, Counting(group, lambda *_: range(1), exact=True), None, None, None, read_later)
    target = ParameterSet((), everything=True)
    losses.has_counts[target] = True
    with Costs() as costs:
        for _ in range(2):
            losses.add_count(target, torch.ones((), dtype=torch.int64, device=DEVICE))
        losses.begin_total(target)
        assert len(asked) == 1
    losses.divide_by_counts(target, 8)
    assert (costs.waits, divided) == (0, [(8, 1)])


def launches_of_step(hidden, micro_batches, strategy, ranks=1):
    """How many operations of a step under Lockstep there are more than in the same loop of torch."""

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), *(nn.Linear(4, 4) for _ in range(hidden)), nn.Linear(4, 1))

    x = torch.ones(8 * ranks * 4, 4)
    costs = Costs()  # of the third step of four: by then each strategy has arranged its buckets
    with Run(on_nan="ignore", replay=False, strategy=strategy) as run:
        net = run.model(model())
        run.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        loader = run.loader(x, global_batch=8 * ranks, micro_batch=8 // micro_batches, shuffle=False)
        for number, batch in enumerate(run.train(loader)):
            if number == 2 * micro_batches:
                costs.__enter__()
            if run.step(net(batch).square().mean()) and run.progress.step == 3:
                costs.__exit__(None, None, None)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Costs() as plain:
        for part in x[:8].chunk(micro_batches):
            (net(part).square().mean() / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert costs.waits <= micro_batches, "on the CPU the loss is looked at"
    return costs.launches - plain.launches


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_whole_step_takes_no_more_operations_than_the_plain_loop(monkeypatch, micro_batches):
    monkeypatch.setenv("TERM", "dumb")
    for hidden in (3, 13):
        assert launches_of_step(hidden, micro_batches, "none") <= 0


#: By strategy, for so many blocks of two parameters and micro-batches on a rank: the operations beside the exchange.
MOST = {
    "ddp": lambda blocks, m: 2 * blocks,  # torch copies each gradient into its bucket
    "zero": lambda blocks, m: 2 * blocks,
    # Of each block torch copies what it gathers twice, and what it scatters once; we add that up, and keep it.
    "zero:stage=2": lambda blocks, m: blocks * (3 * m + 4),
    "fsdp:wrap=Linear": lambda blocks, m: blocks * (6 * m + 4),  # gathered for each pass, forward and backward
    "local-sgd": lambda blocks, m: 0,
}


def launches_of_steps(strategy, ranks):
    sizes = (3, 1), (13, 4)
    return {size: launches_of_step(*size, strategy, ranks) for size in sizes}


def test_the_operations_of_a_step_on_several_ranks_grow_as_each_strategy_must():
    for strategy, told in zip(MOST, on_world(3, [(launches_of_steps, each, 3) for each in MOST]), strict=True):
        for (hidden, micro_batches), launches in told[0].items():
            assert launches <= MOST[strategy](hidden + 2, micro_batches) + 8, (strategy, hidden, micro_batches)
