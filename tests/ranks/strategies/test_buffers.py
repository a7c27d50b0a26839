"""Buffers that forward passes change, in sight or not: by hand on one rank, and the same bits on any world."""

import functools
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.errors import LockstepError, UsageError
from lockstep.run import Run
from lockstep.strategies.parts import buffers
from lockstep.testing import run_each, run_ranks, state_hash
from worlds import on_world

pytestmark = pytest.mark.together  # what they compute once is computed on one worker

# 6 micro-batches in a step: the second of 3 ranks holds two parts of the tree. The last step holds 2 + 1 samples, so
# that of 4 ranks two have no micro-batch.
SIZES = {"global_batch": 12, "micro_batch": 2}
X = torch.randn(27, 3, generator=torch.Generator().manual_seed(5))
LARGE = 70_000  # float32s, which are more than 256 KiB


class Model(nn.Module):
    """The layer sees the buffers only through what its subclass makes of its input."""

    def __init__(self, **tensors):
        super().__init__()
        self.out = nn.Linear(3, 2)
        nn.init.constant_(self.out.weight, 0.3)
        nn.init.constant_(self.out.bias, 0.1)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def move(self, x):
        raise NotImplementedError

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                moved = self.move(x.detach())
            x = x if moved is None else x + moved
        return self.out(x).square().sum(1)


class ThroughData(Model):
    def __init__(self, size=3):
        super().__init__(mean=torch.zeros(size))

    def move(self, x):
        self.mean.data.mul_(0.9).add_(0.1 * x.mean())
        return self.mean[:3]


class BesideTable(ThroughData):
    """Not small: buffers are compared by value in the first steps only."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.full((LARGE,), 2.0))


class ByKernel(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x):
        return self.out(F.batch_norm(x, self.mean, self.var, training=self.training and len(x) > 1)).square().sum(1)


class Assigned(Model):
    def __init__(self):
        super().__init__(mean=torch.zeros(3), count=torch.tensor(0))

    def move(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.count = self.count + 1
        return self.mean


class Complex(Model):
    def __init__(self):
        super().__init__(phase=torch.zeros(3, dtype=torch.complex64), count=torch.tensor(5))

    def move(self, x):
        self.phase.mul_(0.9).add_(torch.complex(x.mean(0), x.amax(0)))
        self.count += 1
        return self.phase.real - self.phase.imag


class Flagged(Model):
    """Set in the first pass, as by what is initialised by the first batch; a whole number beside it counts down."""

    def __init__(self):
        super().__init__(begun=torch.tensor(False), left=torch.tensor([3, 9], dtype=torch.int16))

    def move(self, x):
        self.begun.fill_(True)
        self.left.sub_(1)


class Far(Model):
    """Whole numbers that a float32 does not hold, and moves that it does not."""

    def __init__(self):
        super().__init__(near=torch.tensor(2**40 + 1), hops=torch.tensor([2**24 + 1, -(2**62)]), mean=torch.zeros(3))

    def move(self, x):
        self.near += 1
        self.hops += torch.tensor([2**33 + 1, -(2**25) - 1])
        self.mean.lerp_(x.mean(0), 0.1)


class Narrow(Model):
    def __init__(self):
        super().__init__(
            rough=torch.zeros(3, dtype=torch.bfloat16), wide=torch.zeros(3, dtype=torch.float64), mean=torch.zeros(3)
        )

    def move(self, x):
        for buffer in (self.rough, self.wide, self.mean):
            buffer.mul_(0.5).add_(0.5 * x.mean(0).to(buffer.dtype))
        return self.rough.float()


class Least(Model):
    """Begins at infinity, which no difference can be taken from."""

    def __init__(self):
        super().__init__(least=torch.full((3,), torch.inf), most=torch.full((3,), -torch.inf), mean=torch.zeros(3))

    def move(self, x):
        self.least.copy_(torch.minimum(self.least, x.amin(0)))
        self.most.copy_(torch.maximum(self.most, x.amax(0)))
        self.mean.lerp_(x.mean(0), 0.1)
        return self.least


class Holes(Model):
    """Not a number in some places, one of which is filled; a table of such stays as it is."""

    def __init__(self):
        some = torch.tensor([torch.nan, 1.0, torch.nan])
        super().__init__(mean=some.clone(), table=some.clone(), mask=torch.tensor([0.0, -torch.inf]))

    def move(self, x):
        self.mean[:2] = 0.5 * self.mean[:2].nan_to_num() + 0.5 * x.mean(0)[:2]


class Seldom(Model):
    """The first micro-batches of a step move one buffer only; some later ones move others, too, and wider ones."""

    def __init__(self):
        super().__init__(
            mean=torch.zeros(100, 3),  # so many that the rounding of some tells of which type sums were
            far=torch.zeros(3, dtype=torch.float64),
            phase=torch.zeros(2, dtype=torch.complex64),
            least=torch.full((2,), torch.inf),
        )

    def move(self, x):
        self.mean.lerp_(torch.linspace(0.1, 1, 100)[:, None] * x.mean(0), 0.1)
        if is_seldom(x):
            self.far.add_(x.mean(0).double() / 3)
            self.phase.add_(torch.complex(x[0, :2], x[0, 1:]))
            self.least.copy_(torch.minimum(self.least, x.amin(0)[:2]))
        return self.mean[0]


def is_seldom(x):
    return x[0, 0] < -0.3


class InBranch(nn.Module):
    """Which micro-batches the norm sees is decided by the data."""

    def __init__(self, momentum):
        super().__init__()
        self.first, self.other, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=momentum)

    def forward(self, x):
        chosen = self.norm(self.first(x)) if x.sum() > 0 and len(x) > 1 else self.other(x)
        return chosen.square().sum(1)


class Transient(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.register_buffer("table", torch.ones(3), persistent=False)

    def move(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.mean * self.table


CASES = {
    "through data": ThroughData,
    "through data, large": functools.partial(ThroughData, LARGE),
    "through data, beside a large one": BesideTable,
    "by a kernel": ByKernel,
    "assigned": Assigned,
    "complex": Complex,
    "flagged": Flagged,
    "far": Far,
    "narrow": Narrow,
    "least": Least,
    "holes": Holes,
    "seldom": Seldom,
    "in a branch": functools.partial(InBranch, 0.1),
    "in a branch, all alike": functools.partial(InBranch, None),
    "transient": Transient,
}
SHARDED = ("through data", "by a kernel", "assigned", "flagged", "far", "in a branch")


def everything(model):
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def whole(model):
    """As `everything`, of a model that may be divided."""
    tensors = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in model.named_parameters()}
    return {n: t.detach().clone() for n, t in (*tensors.items(), *model.named_buffers())}


def trained(name, strategy, directory=None, until=None, root=None, epochs=1):
    """Parameters and buffers in the end."""
    os.environ["LOCKSTEP_RESUME"] = str(int(directory is not None))
    with Run(seed=3, strategy=strategy, checkpoint=directory) as run:
        torch.manual_seed(7)
        net = CASES[name]()
        model = run.model(net, find_unused_parameters=name.startswith("in a branch"))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        batches = run.loader((X,), shuffle=False, **SIZES)
        for _ in run.epochs(epochs):
            for (x,) in run.train(batches):
                run.step(model(x).mean())
                if run.progress.step == until:
                    break
            if run.progress.step == until:
                break
        return whole(net)


def moved(before, after, base):
    """What a buffer becomes, from what micro-batches made of ``base``."""
    if not base.is_floating_point() and not base.is_complex():
        return base + max((a.long() - base.long() for a in after), key=int if base.dim() == 0 else torch.sum).to(base)
    start = base.where(base.isfinite(), torch.zeros_like(base))
    return (start + torch.stack([a - start for a in after]).mean(0)).to(base.dtype)


@functools.cache
def by_hand(name):
    """Each micro-batch begins with the same buffers; the next step begins with the mean of what they became."""
    torch.manual_seed(7)
    model = CASES[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in X.split(12):
        base = {n: b.clone() for n, b in model.named_buffers()}
        after = {n: [] for n in base}
        for x in batch.split(2):
            for n, b in base.items():
                model.get_submodule(n.rpartition(".")[0])._buffers[n.rpartition(".")[2]] = b.clone()
            (model(x).mean() * (len(x) / len(batch))).backward()
            for n, b in model.named_buffers():
                after[n].append(b.clone())
        optimizer.step()
        optimizer.zero_grad()
        for n, b in base.items():
            same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a in after[n])
            new = b if same else moved(b, after[n], b)
            model.get_submodule(n.rpartition(".")[0])._buffers[n.rpartition(".")[2]] = new
    return everything(model)


@functools.cache
def alone(name):
    return trained(name, "none")


@pytest.mark.parametrize("name", CASES)
def test_on_one_rank_buffers_are_what_they_are_by_hand(name):
    near = {"rtol": 1e-2, "atol": 1e-2} if name == "narrow" else {"rtol": 1e-5, "atol": 1e-6}
    begun = everything(CASES[name]())
    assert any(not torch.equal(begun[n], t) for n, t in alone(name).items() if not n.startswith(("out", "first")))
    torch.testing.assert_close(alone(name), by_hand(name), **near, equal_nan=True)


def given_up(gives_up):
    """A step that the script leaves after its first micro-batch, and then the same steps from the first on."""
    with Run(seed=3) as run:
        torch.manual_seed(7)
        net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
        model = run.model(net)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        batches = run.loader((X[:24],), shuffle=False, **SIZES)
        if gives_up:
            for (x,) in run.train(batches):
                run.step(model(x).mean())
                break
        for (x,) in run.train(batches):
            run.step(model(x).square().mean())
        return state_hash(net)


def test_a_step_that_is_given_up_leaves_nothing_in_buffers():
    assert len(set(run_ranks(given_up, 1, False) + run_ranks(given_up, 1, True) + run_ranks(given_up, 2, True))) == 1


def unlike(name, tensors):
    return [n for n, there in alone(name).items() if state_hash(tensors[n]) != state_hash(there)]


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.campaign), 3])
def test_on_any_world_buffers_have_the_bits_of_one_rank(world):
    cases = [(name, "ddp") for name in CASES]
    if world == 3:
        cases += [(name, strategy) for name in SHARDED for strategy in ("zero", "fsdp")]
    for case, ranks in zip(cases, on_world(world, [(trained, *case) for case in cases]), strict=True):
        for rank, found in enumerate(ranks):
            assert isinstance(found, dict), f"{case}, rank {rank} of {world}: {found}"
            assert unlike(case[0], found) == [], f"{case}, rank {rank} of {world}"


def test_numbers_that_a_float_does_not_hold_are_counted_exactly():
    end = alone("far")
    assert end["near"] == 2**40 + 1 + 3
    assert end["hops"].tolist() == [2**24 + 1 + 3 * (2**33 + 1), -(2**62) - 3 * (2**25 + 1)]


def test_what_is_in_no_state_dict_goes_through_a_checkpoint_to_another_world(tmp_path):
    legs = [
        on_world(world, [(trained, "transient", strategy, str(tmp_path), until, None, 2)])[0]
        for world, strategy, until in ((3, "ddp", 2), (1, "none", 4), (2, "zero", None))
    ]
    expected = trained("transient", "none", epochs=2)
    for found in legs[-1]:
        assert state_hash(found) == state_hash(expected), found
    assert not torch.equal(expected["mean"], torch.zeros(3))


# ---- evaluation ------------------------------------------------------------------------------------------------------


class Always(Model):
    """Moves in evaluation, too: in place, through .data, by assignment."""

    def __init__(self):
        super().__init__(mean=torch.zeros(3), hidden=torch.zeros(3), count=torch.tensor(0))

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
            self.hidden.data.add_(x.mean(0))
            self.count = self.count + 1
        return self.out(x - self.mean).square().sum(1)


def evaluated(strategy, evaluations):
    with Run(seed=3, strategy=strategy) as run:
        model = run.model(Always())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        batches, held_out = (run.loader((X,), shuffle=False, **SIZES) for _ in range(2))
        for _ in run.epochs(2):
            for (x,) in run.train(batches):
                run.step(model(x).mean())
            for _ in range(evaluations):
                for (x,) in run.evaluate(held_out):
                    run.measure(out=model(x))
        return state_hash(model), dict(run.metrics)


def test_an_evaluation_leaves_buffers_as_they_were(capfd):
    trained_only, _ = evaluated("none", 0)
    capfd.readouterr()
    hashed, _ = evaluated("none", 2)
    said = [line for line in capfd.readouterr().err.splitlines() if "put back after each micro-batch" in line]
    assert hashed == trained_only
    assert len(said) == 1
    assert "the model changes count of Always, hidden of Always, mean of Always in evaluation" in said[0]
    for ranks in on_world(3, [(evaluated, strategy, 2) for strategy in ("ddp", "zero")]):
        assert [found[0] for found in ranks] == [hashed] * 3, ranks


# ---- modules that change ---------------------------------------------------------------------------------------------


class Grows(Model):
    """Gets a buffer later."""

    def __init__(self):
        super().__init__(mean=torch.zeros(3))

    def move(self, x):
        self.mean.lerp_(x.mean(0), 0.1)
        if "late" in self._buffers:
            self.late.data.mul_(0.9).add_(0.1 * x.mean(0))
            return self.late + self.mean
        return self.mean


def grown(strategy):
    """Between epochs."""
    with Run(seed=3, strategy=strategy) as run:
        model = run.model(Grows())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        batches = run.loader((X,), shuffle=False, **SIZES)
        for epoch in run.epochs(2):
            if epoch:
                model.register_buffer("late", torch.randn(3))
            for (x,) in run.train(batches):
                run.step(model(x).mean())
        return state_hash(everything(model)), model.late.tolist()


def test_a_buffer_that_is_added_between_epochs_is_taken_up():
    expected = grown("none")
    for world, strategy in ((3, "ddp"), (2, "zero")):
        assert on_world(world, [(grown, strategy)])[0] == [expected] * world


class GrowsWithin(Model):
    """The usual way to take the first batch as the beginning."""

    def __init__(self, tensors):
        super().__init__(**tensors)

    def move(self, x):
        if "late" not in self._buffers:
            self.register_buffer("late", x.mean(0))
        return self.late


class FromNone(Model):
    def __init__(self):
        super().__init__(mean=None)

    def move(self, x):
        self.mean = x.mean(0) if self.mean is None else 0.9 * self.mean + 0.1 * x.mean(0)
        return self.mean


class CountsData(Model):
    def __init__(self):
        super().__init__(positive=torch.tensor([0, 0]))

    def move(self, x):
        self.positive += (x > 0).sum()


class LateAndSilent(Model):
    def __init__(self, size):
        super().__init__(mean=torch.zeros(size), count=torch.tensor(0))

    def move(self, x):
        self.count += 1
        if self.count > 6:
            self.mean.data.add_(x.mean())


class LateVisible(LateAndSilent):
    def move(self, x):
        self.count += 1
        if self.count > 6:
            self.mean.add_(x.mean())


MODELS = {
    "within": lambda: GrowsWithin({}),
    "within, beside another": lambda: GrowsWithin({"mean": torch.zeros(3)}),
    "from None": FromNone,
    "counts data": CountsData,
    "late and silent": lambda: LateAndSilent(LARGE),
}


def learn(model, run, epochs=3):
    model = run.model(model)
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    batches = run.loader((X,), shuffle=False, **SIZES)
    for _ in run.epochs(epochs):
        for (x,) in run.train(batches):
            run.step(model(x).mean())
    return model


def refused(kind):
    buffers._EVERY_STEPS = 6
    with pytest.raises(UsageError) as caught, Run(seed=3) as run:
        learn(MODELS[kind](), run)
    return str(caught.value)


SAYS = {
    "within": "buffers were added to the model or taken away within a step (late); change modules that have buffers",
    "within, beside another": "buffers were added to the model or taken away within a step (late); change modules",
    "from None": "the buffer mean of FromNone was None when run.model(...) was called and is a tensor of shape (3,)",
    "counts data": "the buffer positive of CountsData holds integers that depend on the data: the micro-batches of one",
    "late and silent": "the buffer mean of LateAndSilent began to change through .data or by a kernel after the first",
}


@pytest.mark.parametrize("world", [1, 3])
def test_what_has_no_one_value_after_a_step_is_refused_by_name(world):
    for kind, ranks in zip(SAYS, on_world(world, [(refused, kind) for kind in SAYS]), strict=True):
        # A rank that is told so at once may be gone before another one has left the exchange.
        said = [message for message in ranks if "lockstep.errors.PeerLost" not in message]
        assert said, kind
        for message in said:
            assert message.startswith(SAYS[kind]), f"{kind}: {message}"


def late(kind):
    with Run(seed=3) as run:
        return everything(learn({"small": LateAndSilent, "in sight": LateVisible}[kind](3), run))


def test_what_begins_to_move_after_the_first_steps_is_kept_in_step():
    for kind, ranks in zip(("small", "in sight"), on_world(3, [(late, "small"), (late, "in sight")]), strict=True):
        expected = late(kind)
        assert expected["mean"].abs().sum() > 0
        assert [state_hash(found) for found in ranks] == [state_hash(expected)] * 3, kind


class Experts(Model):
    """The data decides which expert's statistics move; one of them is first seen in the third step, by one rank."""

    def __init__(self):
        super().__init__(seen=torch.zeros(3))
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def move(self, x):
        self.seen.lerp_(x.mean(0), 0.1)
        return self.experts[2 if torch.equal(x[0], X[24]) else int(is_seldom(x))](x)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(3))
        self.norm = nn.BatchNorm1d(3, affine=False)

    def forward(self, x):
        return (self.norm(x) if len(x) > 1 else x) + self.center.lerp_(x.mean(0), 0.1)


def routed():
    with Run(seed=3, peer_timeout_s=20) as run:
        return everything(learn(Experts(), run))


def test_what_one_rank_alone_sees_move_late_is_kept_in_step():
    expected = routed()
    assert all(expected[f"experts.{n}.center"].abs().sum() > 0 for n in range(3))
    for found in on_world(3, [(routed,)])[0]:
        assert isinstance(found, dict), found
        assert state_hash(found) == state_hash(expected)


class Warm(Model):
    """As `Experts`, of other names: nothing tells that the third moves, too."""

    def __init__(self):
        super().__init__(seen=torch.zeros(3), late=torch.zeros(3))

    def move(self, x):
        self.seen.lerp_(x.mean(0), 0.1)
        if torch.equal(x[0], X[24]):
            self.late.lerp_(x.mean(0), 0.1)


def alone_and_late():
    with Run(seed=3, peer_timeout_s=5) as run:
        learn(Warm(), run)


def test_what_one_rank_alone_sees_move_late_without_a_hint_is_named():
    outcomes = run_each(alone_and_late, 3, timeout_s=100)
    for outcome in outcomes:
        assert isinstance(outcome.error, LockstepError), outcome
    (said,) = [str(outcome.error) for outcome in outcomes if isinstance(outcome.error, UsageError)]
    assert said.startswith("the buffer late of Warm changed for the first time after step 2, and not on all ranks")
    assert "self.mean.add_(0)" in said
