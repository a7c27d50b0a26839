"""Ranks that have come to hold different values are found: the first tensor is named, with its rank and the step."""

import copy
import math
import random
import struct
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from device_costs import DEVICE, Costs
from lockstep.checkpoint import list_checkpoints, load_tree
from lockstep.collectives import TensorShard
from lockstep.errors import MismatchError
from lockstep.run import Run
from lockstep.run.checks import divergence
from lockstep.run.checks.divergence import checksum, tensors_in, weighed
from waiting import wait_until
from worlds import on_world

X = torch.sin(torch.arange(64.0)).view(32, 2)
SIZES = {"global_batch": 8, "micro_batch": 2}  # 4 steps an epoch


# ---- the checksum ----------------------------------------------------------------------------------------------------


def bytes_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


#: What a CPU computes, and what a GPU does; both hold the law.
SUMS = {"crc": checksum, "weighed": lambda tensor: weighed([bytes_of(tensor.detach())])[0]}

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
]
shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 40)),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(2, 3), st.integers(2, 3), st.integers(1, 300)),
)


@st.composite
def tensors(draw, least=0):
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes.filter(lambda s: torch.Size(s).numel() >= least))
    element = torch.empty((), dtype=dtype).element_size()
    numbers = random.Random(draw(st.integers(0, 2**32))).randbytes(torch.Size(shape).numel() * element)
    if dtype is torch.bool:
        numbers = bytes(number & 1 for number in numbers)
    flat = torch.frombuffer(bytearray(numbers), dtype=torch.uint8) if numbers else torch.empty(0, dtype=torch.uint8)
    return flat.clone().view(dtype).view(shape)


@pytest.mark.parametrize("kind", SUMS)
@given(tensor=tensors(), offset=st.integers(1, 9))
def test_equal_bits_have_equal_checksums_wherever_they_lie(kind, tensor, offset):
    expected = int(SUMS[kind](tensor))
    room = torch.empty(offset + tensor.numel(), dtype=tensor.dtype)
    room[offset:].copy_(tensor.reshape(-1))
    unaligned = room[offset:].view(tensor.shape)
    assert int(SUMS[kind](unaligned)) == expected
    assert int(SUMS[kind](tensor.clone())) == expected
    if tensor.dim() == 2:
        assert int(SUMS[kind](tensor.t().contiguous().t())) == expected


@pytest.mark.parametrize("kind", SUMS)
@given(tensor=tensors(least=1), data=st.data())
def test_one_flipped_bit_anywhere_changes_the_checksum(kind, tensor, data):
    before = int(SUMS[kind](tensor))
    flat = bytes_of(tensor)
    flat[data.draw(st.integers(0, flat.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert int(SUMS[kind](tensor)) != before


@pytest.mark.parametrize("kind", SUMS)
@given(tensor=tensors(least=2).filter(lambda t: t.dim() > 0 and len(t) > 1), data=st.data())
def test_what_has_changed_places_changes_the_checksum(kind, tensor, data):
    one, other = data.draw(st.lists(st.integers(0, len(tensor) - 1), min_size=2, max_size=2, unique=True))
    exchanged = tensor.clone()
    exchanged[one], exchanged[other] = tensor[other].clone(), tensor[one].clone()
    same = torch.equal(bytes_of(exchanged), bytes_of(tensor))
    assert (int(SUMS[kind](exchanged)) == int(SUMS[kind](tensor))) == same


@pytest.mark.parametrize("kind", SUMS)
@pytest.mark.parametrize("places", [(0, 2), (1, 3), (1, 5), (3, 2049), (1, 2**20 + 1)])
def test_signs_that_have_changed_places_change_the_checksum(kind, places):
    ones = torch.ones(2**20 + 16)
    sums = set()
    for place in places:
        ones[place] = -1
        sums.add(int(SUMS[kind](ones)))
        ones[place] = 1
    assert len(sums) == 2


@pytest.mark.parametrize(("row", "at_once"), [(8, 24), (64, 128), (divergence._ROW, divergence._AT_ONCE)])
@settings(max_examples=30)
@given(several=st.lists(tensors(), min_size=1, max_size=5))
def test_a_checksum_does_not_depend_on_what_is_computed_beside_it(row, at_once, several):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(divergence, "_ROW", row)
        patched.setattr(divergence, "_AT_ONCE", at_once)
        alone = [int(SUMS["weighed"](tensor)) for tensor in several]
        assert weighed([bytes_of(tensor) for tensor in several]).tolist() == alone
        for tensor in several:
            words = bytes_of(tensor).tolist()
            assert int(SUMS["weighed"](tensor)) == by_hand(words, row)


def by_hand(data, row):
    """The sum over words, each times the weights of its place in its row and of the row."""
    data = data + [0x95] * (-len(data) % 4)
    words = list(struct.unpack(f"<{len(data) // 4}i", bytes(data)))
    words += [0x5BD1E995] * (-len(words) % row if words else row)
    weights = divergence._weights(torch.device("cpu"), 1 << 13).tolist()
    total = sum(word * weights[place % row] * weights[place // row] for place, word in enumerate(words))
    return (total + 2**63) % 2**64 - 2**63


def test_checksums_of_many_tensors_take_launches_by_lists_of_them():
    row, at_once = divergence._ROW, divergence._AT_ONCE
    for most in (row, 9 * at_once):  # makes the weights
        weighed([torch.empty(4 * most, dtype=torch.uint8, device=DEVICE)])
    for many in (1, 40, 200):
        with Costs() as costs:
            weighed([torch.empty(4 * row - 4, dtype=torch.uint8, device=DEVICE) for _ in range(many)])
        # Rows, with their padding; their sums; weights of rows; ends; and what is between two ends.
        lists = math.ceil(2 * many / 128) + 2 * math.ceil(many / 128)
        assert costs.launches <= lists + 2 + 6
        assert costs.waits == 0
    with Costs() as costs:
        weighed([torch.empty(4 * 9 * at_once, dtype=torch.uint8, device=DEVICE)])
    assert costs.launches <= 9 * 2 + 4


def test_lengths_and_lazy_views_count():
    assert len({int(SUMS[kind](torch.zeros(n))) for kind in ("weighed",) for n in range(5)}) == 5
    number = torch.tensor([1 + 2j, 3 - 1j])
    assert int(checksum(number.conj())) == int(checksum(number.conj().resolve_conj())) != int(checksum(number))
    assert int(checksum(nn.Parameter(torch.ones(2)))) == int(checksum(torch.ones(2)))


def test_a_state_is_walked_by_name_without_what_a_rank_holds_in_part():
    there, part = torch.ones(2), TensorShard.absent((4,), torch.float32)
    state = {"models": [{"weight": there, "divided": part}], "optimizers": [(3, {0: there})], "plain": 1.5}
    assert [name for name, _ in tensors_in(state)] == ["models.0.weight", "optimizers.0.1.0"]


# ---- ranks that differ -----------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Adds noise of a generator of its own to its weight, as somebody might between passes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("scale", torch.ones(2))
        self.own = torch.Generator()
        self.own.seed()

    def forward(self, x):
        return self.layer(x)

    def shake(self):
        with torch.no_grad():
            self.layer.weight += 1e-3 * torch.rand(self.layer.weight.shape, generator=self.own)


class Box:
    """A tensor of the user's that is kept."""

    def __init__(self):
        self.values = torch.zeros(3)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


def told(train, *args, **settings):
    """What a training on this rank ends with, and after how many steps."""
    runs = []
    try:
        train(runs, *args, **settings)
    except MismatchError as error:
        return str(error), runs[0].progress.step
    return "", runs[0].progress.step


def apart(runs, how, strategy="ddp", at=1, odd=1, **settings):
    """Trains 4 epochs; before epoch ``at``, rank ``odd`` parts ways."""
    with Run(strategy=strategy, **settings) as run:
        runs.append(run)
        module = Noisy()
        model = run.model(module)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        box, is_odd = Box(), run.rank == odd
        run.keep(box=box)
        batches = run.loader(X, **SIZES)
        if how == "loaded" and is_odd:
            with torch.no_grad():
                module.layer.bias += 1e-6
        for epoch in run.epochs(4):
            if epoch == at and how == "draws":
                module.shake()
            if epoch == at and is_odd:
                if how == "lr":
                    optimizer.param_groups[0]["lr"] = 0.05
                elif how == "kept":
                    box.values[1] = 1e-9
                elif how == "buffer":
                    module.scale.mul_(2)
                elif how == "state":
                    for state in optimizer.state.values():
                        state["momentum_buffer"].mul_(1.001)
            for batch in run.train(batches):
                run.step(model(batch).square().mean())


def differing(*args, **settings):
    return told(apart, *args, **settings)


FOUND = {
    # weights loaded on one rank after run.model: at the first step
    ("loaded",): (2, "after step 1: models.0.layer.bias on rank 1", "they were equal after step 0", 1),
    # ... on the second of three ranks, each pass is looked at
    ("lr",): (3, "after step 5: models.0.layer.weight on rank 1", "they were equal after step 1", 5),
    ("lr", "ddp", 2, 0): (3, "after step 9: models.0.layer.weight on rank 0", "equal after step 5", 9),
    ("buffer",): (3, "after step 5: models.0.scale on rank 1", "they were equal after step 1", 5),
    ("draws",): (2, "after step 5: models.0.layer.weight on rank 1", "they were equal after step 1", 5),
    ("kept",): (2, "after step 5: kept.box.values on rank 1", "they were equal after step 1", 5),
    ("state",): (
        2,
        "after step 5: models.0.layer.weight on rank 1, and 3 more tensors differ",
        "equal after step 1",
        5,
    ),
    # zero: parameters are whole, states of optimizers are not
    ("buffer", "zero"): (2, "after step 5: models.0.scale on rank 1", "they were equal after step 1", 5),
    ("kept", "zero"): (2, "after step 5: kept.box.values on rank 1", "equal after step 1", 5),
    # fsdp: what is whole are buffers and what the user keeps
    ("buffer", "fsdp"): (2, "after step 5: models.0.scale on rank 1", "they were equal after step 1", 5),
    ("kept", "fsdp"): (2, "after step 5: kept.box.values on rank 1", "equal after step 1", 5),
}


def test_ranks_that_differ_are_named_at_the_first_step_of_the_next_pass():
    for world in (2, 3):
        cases = {call: told for call, told in FOUND.items() if told[0] == world}
        results = on_world(world, [(differing, *call) for call in cases])
        for (call, (_, what, since, step)), ranks in zip(cases.items(), results, strict=True):
            for message, at in ranks:
                assert message.startswith("ranks hold different values "), (call, message)
                assert what in message, (call, message)
                assert since in message, (call, message)
                assert at == step, call
                assert "such as random numbers, the clock, run.rank, loading a file on one rank" in message


def within(runs, after, **settings):
    """Rank 1 changes a weight by a bit within the first of two passes, after so many steps."""
    with Run(**settings) as run:
        runs.append(run)
        module = nn.Sequential()
        module.add_module("layer", nn.Linear(2, 1))
        model = run.model(module)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs(2):
            for batch in run.train(run.loader(torch.cat([X, X, X]), **SIZES)):
                if run.step(model(batch).square().mean()) and run.progress.step == after:
                    if "checkpoint" in settings:
                        wait_until(lambda: list_checkpoints(Path(settings["checkpoint"])), "a checkpoint")
                    if run.rank == 1:
                        with torch.no_grad():
                            module.layer.weight[0, 1] += 1e-6


def compared_every(steps):
    return told(within, 7, check_every=steps)


def compared_at_saves(directory):
    return told(within, 6, checkpoint=directory, save_every="4 steps", keep=9)


def compared_at_the_end():
    return told(within, 23)


def test_ranks_are_compared_every_so_many_steps_before_each_save_and_at_the_end(tmp_path):
    calls = [(compared_every, 3), (compared_at_saves, str(tmp_path)), (compared_at_the_end,)]
    by_steps, by_saves, at_end = on_world(2, calls)
    # The step after a save is compared, too, before it is written down as the one that a resume must have.
    for ranks, step, since in ((by_steps, 9, 6), (by_saves, 8, 5), (at_end, 24, 13)):
        for message, at in ranks:
            assert message.startswith(f"ranks hold different values after step {step}: models.0.layer.weight on rank 1")
            assert f"; they were equal after step {since}. " in message
            assert "nothing of it was saved" in message
            assert at == step
    assert [one.step for one in list_checkpoints(tmp_path)] == [4], "what differs is not committed"


class AwayFromStart(torch.optim.SGD):
    """Writes parameters outside of `step`, by a state of its own, as those without a schedule do for an evaluation."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter].setdefault("start", parameter.clone())
        return super().step(closure)

    @torch.no_grad()
    def halve(self):
        for parameter, state in self.state.items():
            parameter.lerp_(state["start"], 0.5)


def evaluated(runs, how, strategy="ddp", *, in_body=False):
    """What is evaluated differs between ranks; at the first step of the next pass, it would be equal again."""
    with Run(strategy=strategy) as run:
        runs.append(run)
        model = run.model(nn.Sequential(nn.Linear(2, 1)))
        optimizer = run.optimizer(AwayFromStart(model.parameters(), lr=0.1))
        average = copy.deepcopy(model)
        run.keep(average=average)
        batches = run.loader(X, **SIZES)

        def evaluate():
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            if how == "optimizer":
                optimizer.halve()
            elif run.rank == 1:
                torch.nn.init.zeros_({"model": model, "average": average}[how][0].weight)
            for batch in run.evaluate(batches):
                run.measure(output=model(batch).mean(1))
            model.load_state_dict(before)

        for _ in run.epochs(2):
            for batch in run.train(batches):
                if run.step(model(batch).square().mean()) and in_body:
                    evaluate()
            if not in_body:
                evaluate()


def evaluating(*args, **settings):
    return told(evaluated, *args, **settings)


def evaluating_in_the_body(*args):
    return told(evaluated, *args, in_body=True)


def test_no_rank_evaluates_other_weights_than_the_others():
    calls = [(by, how) for by in (evaluating, evaluating_in_the_body) for how in ("model", "average")]
    calls += [(by, "optimizer", "zero") for by in (evaluating, evaluating_in_the_body)]
    for (by, how, *_), ranks in zip(calls, on_world(2, calls), strict=True):
        name = "kept.average.0.weight" if how == "average" else "models.0.0."
        for message, _ in ranks:
            assert message.startswith("ranks hold different values after step "), (by, how, message)
            assert f": {name}" in message, (by, how, message)


def left_alone(directory, strategy, how):
    """Ranks that differ by design, or in no tensor that is compared."""
    given = {"save_every": "3 steps", "keep": 20, "check_every": 2, "replay": strategy == "ddp"}
    return differing(how, strategy, checkpoint=directory, **given)


def test_ranks_that_differ_by_design_are_left_alone(tmp_path):
    cases = [("local-sgd:period=5", "nothing"), ("local-sgd:period=5", "lr"), ("local-sgd:period=5", "kept")]
    cases += [("diloco:period=5", "nothing"), ("ddp", "nothing"), ("zero", "nothing"), ("fsdp", "nothing")]
    directories = [str(tmp_path / str(number)) for number in range(len(cases))]
    calls = [(left_alone, directory, *case) for directory, case in zip(directories, cases, strict=True)]
    for case, directory, ranks in zip(cases, directories, on_world(2, calls), strict=True):
        saved = load_tree(list_checkpoints(Path(directory))[0].path)
        assert saved["kept"]["box"]["values"].tolist() == [0] * 3, "the leader's, where ranks have their own"
        assert ranks == [("", 16)] * 2, case
        assert [one.step for one in list_checkpoints(Path(directory))] == [16, 15, 12, 9, 6, 3], case
