"""A micro-batch that is computed twice: what is no function of it is found, and what is one is left as it was."""

import io
import operator
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lockstep import Run, UsageError
from lockstep.batch import BatchPlan, StepCheck
from lockstep.data.indexed.sampling import AuditedSteps, CheckedSteps, checked, epoch_positions
from lockstep.run.proofs.replay import CheckSchedule, ReplayError
from lockstep.testing import state_hash
from worlds import on_world as on_world_trying_few
from worlds import on_world_trying_all as on_world

X = torch.sin(torch.arange(48.0)).view(24, 2)
SIZES = {"global_batch": 8, "micro_batch": 2}


# ---- where a replay stands -------------------------------------------------------------------------------------------

PLANS = st.tuples(st.integers(1, 40), st.integers(1, 8), st.integers(1, 5), st.sampled_from(["none", "one", "even"]))


@given(st.integers(0, 3), st.integers(0, 4), st.integers(0, 6), st.integers(0, 6))
def test_checked_steps_are_the_same_counted_from_a_later_one(first, every, later, step):
    checks = CheckedSteps(first, every, audits=AuditedSteps(3, 5, 1))
    counted = checks.later(later)
    assert (step in counted) == (step + later in checks)
    if step in counted:
        assert counted.is_second(step) == checks.is_second(step + later)
    assert counted.audits.draw(step) == checks.audits.draw(step + later)


@given(PLANS, st.integers(0, 3), st.integers(0, 4), st.booleans(), st.booleans())
def test_replays_are_added_and_nothing_else_is_another(sizes, first, every, replays, of_others):
    samples, micro_batch, ranks, padding = sizes
    plan = BatchPlan(12, micro_batch, ranks)
    steps, checks = plan.epoch(samples), CheckedSteps(first, every, replays, of_others)
    firsts, by_others = {}, {}
    for rank in range(ranks):
        plain = list(epoch_positions(steps, rank, first_step=0, padding=padding))
        found = list(epoch_positions(steps, rank, first_step=0, padding=padding, checks=checks))
        assert [(p.step, p.index, p.last, p.is_padding) for p in found if not p.is_replay] == [
            (p.step, p.index, p.last, p.is_padding) for p in plain
        ]
        for step in sorted({p.step for p in plain}):
            of_step = [p for p in found if p.step == step]
            own, again = [p for p in of_step if not p.is_replay], [p for p in of_step if p.is_replay]
            original = next((p for p in own if not p.is_padding), own[0])
            if not original.is_padding:
                firsts[step, original.index] = rank
            others = [p for p in again if p.is_other_ranks]
            by_others |= {(step, p.index): rank for p in others}
            if not (replays and step in checks):
                assert not again
                continue
            assert len(again) == (2 if len(own) == 1 and not others else 1)
            is_compared = (len(own) > 1 or bool(others)) and not original.is_padding
            assert original.check is (StepCheck.REPLAYED if is_compared else StepCheck.STEP)
            is_next = ranks == 1 and checks.is_second(step) and len(own) > 1
            assert of_step[1 if is_next else -2] == again[-1]
            for position in again:
                assert not position.last
                if not others:
                    assert (position.index, position.is_padding) == (original.index, original.is_padding)
    # Each that another rank replays is the first one of a rank, and it is not the rank's own.
    assert all(firsts[place] != rank for place, rank in by_others.items())
    if of_others and replays:
        with_two = {step for step, _ in firsts if sum(each == step for each, _ in firsts) > 1}
        checked_so = {step for step in with_two if step in checks and checks.is_second(step)}
        assert {step for step, _ in by_others} == checked_so


@given(st.integers(1, 600), st.integers(1, 8), st.integers(1, 300))
def test_replays_cost_half_a_percent_beyond_the_first_passes(length, micro_batches, passes):
    plan, schedule = BatchPlan(micro_batches, 1, 1), CheckSchedule(500, replays=True, of_others=False)
    assert plan.micro_batches == micro_batches
    replays, steps = 0, 7
    for _ in range(passes):
        checks = schedule.begin_pass(steps, plan)
        replays += (2 if micro_batches == 1 else 1) * sum(step in checks for step in range(length))
        steps += length
    assert replays <= 2 * (4 + 2) + (steps - 7) * micro_batches / 200 + 2 * (steps - 7) / 500


def test_on_a_gpu_a_kernel_is_named_as_a_cause_where_the_body_changed_nothing(monkeypatch):
    error = ReplayError("the gradient of out.weight differed", "micro-batch 0 of 1 of step 1")
    assert "kernel" not in str(error.naming(()))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "On a GPU a kernel may give other bits each time, too: docs/gpu.md lists" in str(error.naming(()))
    assert "kernel" not in str(error.naming(["seen"]))


def test_a_rank_of_padding_alone_replays_that():
    (padding,) = epoch_positions(BatchPlan(8, 2, 4).epoch(2), 0, first_step=0, padding="one")
    assert [p.check for p in checked([padding], replays=True)] == [StepCheck.REPLAY, StepCheck.REPLAY, StepCheck.STEP]


# ---- what is no function ---------------------------------------------------------------------------------------------


class Anneals(nn.Module):
    """Lowers an attribute in each forward pass."""

    def __init__(self):
        super().__init__()
        self.body, self.tau = nn.Linear(2, 1), 1.0

    def forward(self, x):
        self.tau *= 0.9
        return self.body(x) / self.tau


class Reverses(torch.autograd.Function):
    """The identity; its gradient is multiplied by how often it was called."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        Reverses.calls += 1
        ctx.factor = Reverses.calls
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient * ctx.factor


class Center(nn.Module):
    """A loss that no run knows, with a buffer that it moves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1))

    def forward(self, out):
        loss = (out - self.center).square().mean()
        self.center.mul_(0.9).add_(0.1 * out.detach().mean())
        return loss


class OwnGenerator(Dataset):
    """Draws from a generator of its own."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return X[index] + float(self.generator.random())


class Changes(Dataset):
    """Changes its stored samples in place."""

    def __init__(self):
        self.x = X.clone()

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.x[index] += 1
        return self.x[index]


def trained(body, *, data=X, model=None, sizes=None, workers=0, **settings):
    """All parameters and buffers after an epoch in which ``body(run, model, batch, kept)`` gives each loss."""
    with Run(seed=3, workers=workers, **settings) as run:
        model = run.model(model() if model else nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        own = SimpleNamespace(step=0, generator=torch.Generator().manual_seed(0), noise=torch.zeros(1), loss=Center())
        batches = run.loader(data, **(sizes or SIZES))
        for _ in run.epochs(1):
            for batch in run.train(batches):
                run.step(body(run, model, batch, own))
        return state_hash(model)


def counts(run, model, batch, own):
    own.step += 1
    return model(batch).square().mean() * min(1, own.step / 30)


def draws(run, model, batch, own):
    return model(batch + torch.rand(batch.shape, generator=own.generator)).square().mean()


def draws_in_vain(run, model, batch, own):
    is_dropped = float(torch.rand((), generator=own.generator)) > 1 - 1e-6  # once in many bodies
    return model(batch * 0 if is_dropped else batch).square().mean()


def remembers(run, model, batch, own):
    loss = model(batch + own.noise).square().mean()
    own.noise += 0.1
    return loss


def centers(run, model, batch, own):
    return own.loss(model(batch))


def reverses(run, model, batch, own):
    return model(Reverses.apply(model(batch).expand(-1, 2))).square().mean()


def anneals(run, model, batch, own):
    return model(batch).square().mean()


def adds_up(run, model, batch, own):
    loss = model(batch).square().mean()
    own.step += loss.item()
    run.measure(so_far=own.step)
    return loss


def carries(run, model, batch, own):
    own.step += 1
    run.carry["step"] = own.step
    return model(batch).square().mean()


#: Each body, the difference that is told first, and what is named.
HIDDEN = {
    counts: ("the loss differed", "own.step"),
    draws: ("the loss differed", "own.generator"),
    draws_in_vain: ("own.generator, which", "own.generator"),
    remembers: ("the loss differed", "own.noise"),
    centers: ("the loss differed", "own.loss.center"),
    anneals: ("the loss differed", "model.tau"),
    adds_up: (r"run.measure(so_far=...) differed", "own.step"),
    carries: ("what run.carry holds, 0 differed", "own.step"),
    reverses: ("the gradient of ", ""),
}


@pytest.mark.parametrize("body", HIDDEN, ids=lambda body: body.__name__)
@pytest.mark.parametrize("sizes", [SIZES, {"global_batch": 8, "micro_batch": 8}], ids=["four a step", "one a step"])
def test_a_body_that_depends_on_what_it_changes_is_refused_on_one_rank(body, sizes):
    difference, name = HIDDEN[body]
    with pytest.raises(UsageError) as caught:
        trained(body, model=Anneals if body is anneals else None, sizes=sizes)
    said = str(caught.value)
    assert "of step 1 was computed twice" in said
    assert difference in said
    assert f"The body changed {name}" in said or not name, said
    assert type(caught.value) is UsageError


def refused(body, **options):
    with pytest.raises(UsageError) as caught:
        trained(body, **options)
    return str(caught.value)


def test_so_it_is_under_every_strategy_that_repeats_bits():
    calls = [(refused_here, strategy) for strategy in ("ddp", "zero", "fsdp", "zero:stage=2", "local-sgd", "diloco")]
    for ranks in on_world(2, calls):
        assert any("was computed twice" in said for said in ranks), ranks


def refused_here(strategy):
    try:
        return trained(counts, strategy=strategy)
    except Exception as error:  # noqa: BLE001 - a peer of the one that is refused gets another error
        return str(error)


@pytest.mark.parametrize(("data", "workers"), [(OwnGenerator, 0), (OwnGenerator, 2), (Changes, 0), (Changes, 1)])
def test_samples_that_are_read_again_must_be_the_same(data, workers):
    said = refused(plain, data=data(), workers=workers)
    assert "its samples differed: the data set" in said


def test_without_replays_nothing_is_computed_twice():
    own = []

    def body(run, model, batch, _):
        own.append(run.micro_batch.is_replay)
        return model(batch).square().mean() * len(own)

    trained(body, replay=False)
    assert own == [False] * 12


# ---- what is one -----------------------------------------------------------------------------------------------------


def plain(run, model, batch, own):
    return model(batch).square().mean()


class Net(nn.Module):
    """BatchNorm, dropout, and a buffer that is set anew."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        out = self.layers(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean()
        return out + self.mean


def everything(run, model, batch, own):
    """What a body may do: draw, carry, measure, count, compute without gradients, append to a list of its own."""
    noise = torch.randn(batch.shape) + random.random() + float(np.random.rand())
    own.generator.manual_seed(100 * run.progress.step + run.micro_batch.index)
    noise += torch.randn(batch.shape, generator=own.generator)
    before = run.carry.get("state", torch.zeros(1))
    with torch.no_grad():
        own.noise = model(batch).mean()
    out = model(batch + 0.1 * noise + before)
    run.carry["state"] = out.detach().mean().view(1)
    run.measure(out=out.detach()[:, 0])
    own.losses = [*getattr(own, "losses", []), out.mean().item()]
    batch.mul_(0)
    return out.square().mean()


def same_with_and_without(**options):
    return {trained(everything, model=Net, replay=replay, check_every=1, **options) for replay in (True, False)}


@pytest.mark.parametrize("micro_batch", [2, 8])
def test_a_body_that_is_a_function_gets_the_same_bits_with_a_replay_in_each_step(micro_batch):
    sizes = {"global_batch": 8, "micro_batch": micro_batch}
    assert len(same_with_and_without(sizes=sizes)) == 1
    assert len(same_with_and_without(sizes=sizes, precision="bf16", clip_norm=0.1)) == 1


def test_so_it_does_on_three_ranks_and_in_a_short_step():
    calls = [(same_with_and_without,), (trained, everything)]
    same, _ = on_world(3, calls)
    assert all(len(bits) == 1 for bits in same), same
    assert set(map(tuple, same)) == {tuple(same_with_and_without())}


class Stream(IterableDataset):
    """Samples one after another; the script changes the batch that it gets."""

    def __iter__(self):
        return iter(X)


def test_of_a_stream_a_copy_is_replayed():
    assert len(same_with_and_without(data=Stream())) == 1
    assert "the loss differed" in refused(counts, data=Stream())


def test_of_several_loaders_each_is_read_again():
    found = set()
    for replay in (True, False):
        with Run(seed=3, replay=replay, check_every=1, workers=0) as run:
            model = run.model(Net())
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            one = run.loader(DataLoader(TensorDataset(X), batch_size=8), micro_batch=2)
            other = run.loader(X.flip(0), **SIZES)
            for _ in run.steps(9, every=3):
                for (x,), y in run.train(one, other):
                    run.step(F.mse_loss(model(x + torch.rand(())), y.sum(1, keepdim=True)))
                for x in run.train(other):
                    run.step(model(x).square().mean())
                    if run.progress.step % 2:
                        break
        found.add(state_hash(model))
    assert len(found) == 1


def with_a_loss_function(replay):
    with Run(seed=3, replay=replay, check_every=1) as run:
        model = run.model(Net())
        run.optimizer(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
        for x in run.train(run.loader(X, **SIZES)):
            run.step(F.mse_loss, x, x.sum(1, keepdim=True))
    return state_hash(model)


def test_an_optimizer_with_a_closure_does_not_see_the_replay():
    assert with_a_loss_function(True) == with_a_loss_function(False)


def test_what_a_replay_logs_and_says_has_been_said(tmp_path, capsys):
    with Run(checkpoint=tmp_path, check_every=1) as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x in run.train(run.loader(X, global_batch=8, micro_batch=8)):
            run.say("body of", run.progress.step)
            run.step(model(x).square().mean())
            run.log()
    assert [line for line in capsys.readouterr().err.splitlines() if "body" in line] == [
        f"body of {n}" for n in range(3)
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_metrics_counts_and_items_are_those_without_replays():
    metrics = []
    for replay in (True, False):
        with Run(seed=3, replay=replay, check_every=1) as run:
            model = run.model(nn.Linear(2, 1))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            counted = 0
            for x in run.train(run.loader(X, **SIZES)):
                counted += run.counts
                run.measure(x=x[:, 0])
                run.step(model(x).square().mean(), count=len(x) + run.micro_batch.index)
        metrics.append((counted, dict(run.metrics)))
    assert metrics[0] == metrics[1]


class Meter:
    """Adds up by itself, as meters of scripts do, in values of several kinds."""

    def __init__(self):
        self.sum, self.history, self.by_class, self.table = 0.0, [], {}, np.zeros(2)

    def update(self, value):
        self.sum += value
        self.history.append(value)
        self.by_class[len(self.history) % 3] = self.by_class.get(len(self.history) % 3, 0) + 1
        self.table[len(self.history) % 2] += value


def summed(replay, micro_batch):
    """What a script adds up by itself, in numbers, tensors and objects; the bits of the model; what was said."""
    with Run(seed=3, replay=replay, check_every=1) as run:
        said = io.StringIO()  # replays do not put back a file
        run._context.inputs._say = said.write
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        total, seen, on_device, meter, meters = 0.0, 0, torch.zeros(()), Meter(), {"of": [Meter()]}
        for _ in run.epochs(2):
            for x in run.train(run.loader(X, global_batch=8, micro_batch=micro_batch)):
                loss = model(x).square().mean()
                meter.update(loss.item())
                meters["of"][0].update(len(x))
                total += loss.item()
                seen += len(x)
                on_device += loss.detach()
                run.step(loss)
            print(total, on_device)
        kept = [{**vars(one), "table": one.table.tolist()} for one in (meter, meters["of"][0])]
        return total, seen, on_device.item(), state_hash(model), said.getvalue(), kept


@pytest.mark.parametrize("micro_batch", [2, 8])
def test_on_one_rank_what_a_script_adds_up_is_that_of_a_plain_loop(micro_batch):
    *with_replays, said, meters = summed(True, micro_batch)
    assert [*with_replays, "", meters] == list(summed(False, micro_batch))
    assert with_replays[1] == 48
    assert said.startswith("total, which print(...) is computed from, is changed by the loop's body in line ")


def test_on_several_ranks_what_each_adds_up_is_said():
    (ranks,) = on_world(2, [(summed, True, 2)])
    for _, seen, _, _, said, _ in ranks:
        assert seen == 24
        assert said.startswith("total, which print(...) is computed from, is changed by the loop's body in line ")


def guarded(replay, micro_batch):
    """What is appended once a step, by a variable that says which step was seen."""
    with Run(seed=3, replay=replay, check_every=1) as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        seen, history, last = -1, [], None
        for x in run.train(run.loader(X, global_batch=8, micro_batch=micro_batch)):
            if run.progress.step > seen:
                seen = run.progress.step
                history.append(seen)
            last = "some"
            run.step(model(x).square().mean())
        return history, last


@pytest.mark.parametrize("micro_batch", [2, 8])
def test_variables_of_the_script_are_bound_to_what_they_were(micro_batch):
    assert guarded(True, micro_batch) == guarded(False, micro_batch) == ([0, 1, 2], "some")


# ---- of another rank's micro-batch -----------------------------------------------------------------------------------


def scaled(run, own, loss):
    """By a mean of this rank's last losses, which it moves once a step."""
    scale = own.get("mean", 1.0)
    if run.step(loss * scale):
        own["mean"] = 0.5 * scale + 0.5 * loss.item()


def centred(run, own, loss):
    """By what it computed first, each time."""
    run.step(loss - loss.detach() + own.setdefault("first", loss.detach()))


def by_rank(run, own, loss):
    run.step(loss * (1 + run.rank))


def scaled_by_all(run, own, loss):
    """As `scaled`, by the losses of all micro-batches of the step."""
    scale, losses = own.get("mean", 1.0), own.setdefault("losses", [])
    if run.counts:
        losses.append(loss.detach())
    if run.step(loss * scale):
        of_step = torch.stack([each for part in run.gather(losses) for each in part]).mean()
        own["mean"] = 0.5 * scale + 0.5 * float(of_step)
        losses.clear()


def by_place(run, own, loss):
    """A function of the micro-batch, and of what all ranks share."""
    own["seen"] = own.get("seen", 0) + 1
    own["mean"] = loss.item()
    run.step(loss * (1 + run.micro_batch.index) * (1 + run.progress.step))


def apart(body, strategy, micro_batch=2, samples=24):
    """What is said, or what came of it."""
    with Run(seed=2, strategy=strategy) as run:
        net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
        model = run.model(net, find_unused_parameters=strategy == "ddp")
        run.optimizer(torch.optim.SGD(net.parameters(), 0.1))
        batches, own = run.loader((X[:samples],), global_batch=8, micro_batch=micro_batch), {}
        try:
            for _ in run.epochs(2):
                for (x,) in run.train(batches):
                    body(run, own, model(x).square().mean())
        except UsageError as error:
            return str(error)
        whole = run.state_dict(model)  # on rank 0
        return run.metrics, whole and state_hash(whole)


@pytest.mark.parametrize(
    ("world", "micro_batch", "strategies"),
    [
        (2, 2, ("zero", "fsdp")),
        (3, 2, ("ddp",)),
        pytest.param(2, 2, ("ddp",), marks=pytest.mark.campaign),
        pytest.param(3, 2, ("zero", "fsdp"), marks=pytest.mark.campaign),
        pytest.param(2, 4, ("ddp", "zero", "fsdp"), marks=pytest.mark.campaign),
    ],
)
def test_what_each_rank_has_for_itself_is_found_by_the_ranks_that_compute_for_each_other(
    world, micro_batch, strategies
):
    bodies = (scaled, centred, by_rank, by_place, scaled_by_all)
    calls = [(apart, body, strategy, micro_batch) for body in bodies for strategy in strategies]
    alone = {body: apart(body, "none", micro_batch) for body in (by_place, scaled_by_all)}
    for (_, body, strategy, _), by_ranks in zip(calls, on_world_trying_few(world, calls), strict=True):
        if body in alone:
            assert [result[0] for result in by_ranks] == [by_ranks[0][0]] * world
            assert by_ranks[0] == alone[body]
            continue
        assert len(set(by_ranks)) == 1, (body, strategy, by_ranks)
        assert "of step 2 was computed by rank" in by_ranks[0], (body, strategy)
        if body is scaled:
            assert "What these ranks have apart: own['mean']." in by_ranks[0]


def test_in_a_short_step_ranks_without_a_micro_batch_compare_with_the_others():
    # Of the last step, the second one of each pass, the ranks have 0, 1 and 1 micro-batches; then one rank has one.
    for samples in (12, 10):
        for strategy in ("ddp", "fsdp"):
            found = on_world_trying_few(3, [(apart, by_place, strategy, 2, samples)])[0]
            assert found[0] == apart(by_place, "none", 2, samples)


def carried(strategy):
    """What is carried is another rank's, too: there is no such replay then."""
    with Run(seed=2, strategy=strategy) as run:
        net = nn.Linear(2, 1)
        model = run.model(net)
        run.optimizer(torch.optim.SGD(net.parameters(), 0.1))
        batches = run.loader((X,), shuffle=False, **SIZES)
        for _ in run.epochs(3):
            for (x,) in run.train(batches):
                loss = model(x).square().mean() * run.carry.get("scale", 1.0)
                run.carry["scale"] = 1 + float(loss.detach())
                run.step(loss)
        return state_hash(net)


def test_with_something_carried_ranks_do_not_compute_for_each_other():
    assert on_world(2, [(carried, "ddp")])[0] == [carried("none")] * 2


def by_world(run, own, loss):
    run.step(loss * operator.attrgetter("world_size")(run))  # such as a package would read


def by_world_in_words(run, own, loss):
    own["said"] = f"{run.world_size} ranks"
    run.step(loss)


def test_what_depends_on_the_number_of_ranks_is_found_on_one_rank_too():
    said = "with another run.world_size, and the loss differed"
    assert said in apart(by_world, "none")
    assert all(said in each for each in on_world(2, [(apart, by_world, "ddp")])[0])
    told = apart(by_world_in_words, "none")
    assert on_world(2, [(apart, by_world_in_words, "ddp")])[0] == [told, (told[0], {})]


class Turns:
    """Counts to three, and over again: as many calls as there are bodies from a micro-batch to its replay."""

    calls = 0

    def __call__(self):
        self.calls += 1
        return 1.0 + self.calls % 3


def test_an_effect_that_returns_after_as_many_bodies_is_found():
    with Run() as run:
        net, turns = nn.Linear(2, 1), Turns()
        model = run.model(net)
        run.optimizer(torch.optim.SGD(net.parameters(), 0.1))
        batches = run.loader((X,), **SIZES)

        def train():
            for (x,) in run.train(batches):
                run.step(model(x).square().mean() * turns())

        for _ in run.epochs(1):
            with pytest.raises(UsageError, match=r"of step 1 was computed twice.*turns\.calls"):
                train()
