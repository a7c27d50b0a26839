"""What learns may change on the way: as by hand, with the same bits on any world; and what a body must not do.

Plain torch makes one backward pass over the whole step here, where a run makes one for each micro-batch.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.errors import LockstepError, MismatchError, UsageError
from lockstep.run import Run
from lockstep.testing import run_each, state_hash
from worlds import on_world

# 4 micro-batches in a step; the last step of an epoch holds 2 + 1 samples, so that of 3 ranks one has no micro-batch.
SIZES = {"global_batch": 8, "micro_batch": 2}
SAMPLES, EPOCHS = 19, 2
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(5))
Y = X.sum(1).gt(0).long() + X[:, 0].gt(0).long()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.extra = None

    def forward(self, x):
        out = self.head(torch.tanh(self.body(x)))
        return out if self.extra is None else out + self.extra


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def no_change(net, optimizer, when):
    pass


@dataclass(frozen=True)
class Case:
    """What changes: in each body, by the number of steps done; between epochs, by the number of the epoch."""

    prepare: Callable = lambda net: None
    in_body: Callable = no_change
    between: Callable = no_change
    optimizer: Callable = sgd
    by_hand: bool = True


def freeze_body(net):
    net.body.requires_grad_(False)


def unfreeze_at(net, optimizer, step):
    if step >= 2:
        net.body.requires_grad_(True)


def freeze_at(net, optimizer, step):
    net.body.requires_grad_(step < 2)


def to_and_fro(net, optimizer, step):
    net.body.requires_grad_(step % 2 == 0)
    net.head.bias.requires_grad_(step % 3 > 0)


def add(net, optimizer, values):
    net.extra = nn.Parameter(values)
    optimizer.add_param_group({"params": [net.extra], "lr": 0.05})


def add_at(net, optimizer, step):
    if step >= 2 and net.extra is None:
        add(net, optimizer, torch.zeros(3))


def replace_head(net, optimizer, epoch):
    if epoch == 1:
        net.head = nn.Linear(6, 3)
        nn.init.constant_(net.head.weight, 0.1)
        nn.init.zeros_(net.head.bias)
        optimizer.param_groups[0]["params"] = list(net.parameters())


def add_bias(net):
    net.extra = nn.Parameter(torch.full((3,), 0.1))


def tie_bias(net):
    """After run.model(...) and after the optimizer was made: the one that goes is in no model any more."""
    net.extra = net.head.bias


CASES = {
    "unfrozen at a step": Case(freeze_body, in_body=unfreeze_at),
    "frozen at a step": Case(in_body=freeze_at),
    "to and fro": Case(in_body=to_and_fro),
    "unfrozen between epochs": Case(freeze_body, between=lambda net, _, epoch: net.body.requires_grad_(epoch > 0)),
    "frozen between epochs": Case(between=lambda net, _, epoch: net.body.requires_grad_(epoch == 0)),
    "added at a step": Case(in_body=add_at),
    "added between epochs": Case(between=lambda net, o, epoch: epoch != 1 or add(net, o, torch.full((3,), 0.1))),
    "drawn between epochs": Case(
        between=lambda net, o, epoch: epoch != 1 or add(net, o, torch.randn(3)), by_hand=False
    ),
    "replaced between epochs": Case(between=replace_head, optimizer=functools.partial(torch.optim.SGD, lr=0.2)),
    "tied before the training": Case(add_bias, between=lambda net, _, epoch: epoch or tie_bias(net)),
    "tied between epochs": Case(add_bias, between=lambda net, _, epoch: epoch != 1 or tie_bias(net)),
    "head only, then all": Case(
        freeze_body,
        between=lambda net, o, epoch: (
            epoch != 1 or o.add_param_group({"params": net.body.requires_grad_().parameters()})
        ),
        optimizer=sgd,
    ),
}


def start(case):
    torch.manual_seed(7)
    net = Net()
    case.prepare(net)
    return net


def held(case, net):
    """For "head only", an optimizer that knows of the head alone."""
    return net.head.parameters() if case is CASES["head only, then all"] else net.parameters()


def values(net):
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def trained(name, strategy):
    """The parameters after each step."""
    case, trail = CASES[name], []
    with Run(seed=3, strategy=strategy, replay=strategy == "ddp") as run:
        net = start(case)
        model = run.model(net)
        optimizer = run.optimizer(case.optimizer(held(case, net)))
        batches = run.loader((X, Y), shuffle=False, **SIZES)
        for epoch in run.epochs(EPOCHS):
            case.between(net, optimizer, epoch)
            for x, y in run.train(batches):
                case.in_body(net, optimizer, run.progress.step)
                if run.step(F.cross_entropy(model(x), y)):
                    trail.append(values(net))
    return trail


@functools.cache
def by_hand(name):
    case, trail = CASES[name], []
    net = start(case)
    optimizer = case.optimizer(held(case, net))
    for epoch in range(EPOCHS):
        case.between(net, optimizer, epoch)
        for x, y in zip(X.split(8), Y.split(8), strict=True):
            case.in_body(net, optimizer, len(trail))
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            trail.append(values(net))
    return trail


@functools.cache
def alone(name):
    return trained(name, "none")


def near(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_on_one_rank_what_learns_is_what_learns_by_hand(name):
    assert len(alone(name)) == 3 * EPOCHS
    if CASES[name].by_hand:
        for found, wanted in zip(alone(name), by_hand(name), strict=True):
            near(found, wanted)


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        pytest.param(2, "ddp", marks=pytest.mark.campaign),
        (3, "ddp"),
        (2, "zero"),
        pytest.param(3, "zero", marks=pytest.mark.campaign),
    ],
)
def test_on_any_world_what_learns_has_the_bits_of_one_rank(world, strategy):
    for name, ranks in zip(CASES, on_world(world, [(trained, name, strategy) for name in CASES]), strict=True):
        for rank, found in enumerate(ranks):
            assert isinstance(found, list), f"{name}, rank {rank}: {found}"
            for step, (here, there) in enumerate(zip(found, alone(name), strict=True)):
                assert state_hash(here) == state_hash(there), f"{name}, rank {rank}, after step {step + 1}"


# ---- adversaries -----------------------------------------------------------------------------------------------------


def forger_and_critic():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4)), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))


def losses(forger, critic, x):
    """First the critic's, which is to learn it; then the forger's, through a critic that is frozen."""
    forged = forger(x[:, :2])
    critic.requires_grad_(True)
    yield F.softplus(-critic(x)).mean() + F.softplus(critic(forged.detach())).mean()
    critic.requires_grad_(False)
    yield F.softplus(-critic(forged)).mean()


def adversaries(strategy):
    with Run(seed=3, strategy=strategy) as run:
        models = [run.model(model) for model in forger_and_critic()]
        opt_forger, opt_critic = (run.optimizer(sgd(model.parameters())) for model in models)
        batches = run.loader((X,), shuffle=False, **SIZES)
        for _ in run.epochs(2):
            for (x,) in run.train(batches):
                for loss, optimizer in zip(losses(*models, x), (opt_critic, opt_forger), strict=True):
                    run.step(loss, optimizer=optimizer)
        return [values(model) for model in models]


def adversaries_by_hand():
    """Both learn at the end of a step, from what they were at its beginning."""
    models = forger_and_critic()
    opt_forger, opt_critic = (sgd(model.parameters()) for model in models)
    for _ in range(2):
        for x in X.split(8):
            for loss, optimizer in zip(losses(*models, x), (opt_critic, opt_forger), strict=True):
                optimizer.zero_grad()
                loss.backward(inputs=optimizer.param_groups[0]["params"])
            opt_forger.step()
            opt_critic.step()
    return [values(model) for model in models]


def test_adversaries_that_freeze_each_other_in_each_body():
    expected = adversaries("none")
    near(expected, adversaries_by_hand())
    for world, strategy in ((2, "ddp"), (3, "zero")):
        for found in on_world(world, [(adversaries, strategy)])[0]:
            assert isinstance(found, list), found
            assert state_hash(found) == state_hash(expected)


# ---- hands that may --------------------------------------------------------------------------------------------------


def rate_of(step):
    return 0.2 / (1 + step)


def handled(strategy):
    """The learning rate by hand, gradients clipped by hand, a scheduler stepped by hand, and weights clamped."""
    trail = []
    with Run(seed=3, strategy=strategy) as run:
        net = start(CASES["to and fro"])
        model = run.model(net)
        optimizer = run.optimizer(sgd(net.parameters()))
        for group in optimizer.param_groups:
            group["lr"] = rate_of(0)
        for _ in run.epochs(2):
            for x, y in run.train(run.loader((X, Y), shuffle=False, **SIZES)):
                if run.backward(F.cross_entropy(model(x), y)):
                    nn.utils.clip_grad_norm_(net.parameters(), 0.3)
                if run.update():
                    with torch.no_grad():
                        net.head.weight.clamp_(-0.2, 0.2)
                    for group in optimizer.param_groups:
                        group["lr"] = rate_of(run.progress.step)
                    trail.append(values(net))
    return trail


def scheduled(strategy):
    trail = []
    with Run(seed=3, strategy=strategy) as run:
        net = start(CASES["to and fro"])
        model = run.model(net)
        optimizer = run.optimizer(sgd(net.parameters()))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        run.keep(scheduler=scheduler)
        for _ in run.epochs(2):
            for x, y in run.train(run.loader((X, Y), shuffle=False, **SIZES)):
                if run.step(F.cross_entropy(model(x), y)):
                    scheduler.step()
                    trail.append(values(net))
    return trail


def handled_by_hand(kind):
    trail = []
    net = start(CASES["to and fro"])
    optimizer = sgd(net.parameters())
    for _ in range(2):
        for x, y in zip(X.split(8), Y.split(8), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate_of(len(trail)) if kind is handled else 0.2 * 0.5 ** len(trail)
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            if kind is handled:
                nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            optimizer.step()
            if kind is handled:
                with torch.no_grad():
                    net.head.weight.clamp_(-0.2, 0.2)
            trail.append(values(net))
    return trail


def test_what_is_done_once_a_step_is_right_on_all_worlds():
    kinds = (handled, scheduled)
    expected = [kind("none") for kind in kinds]
    for kind, found in zip(kinds, expected, strict=True):
        near(found, handled_by_hand(kind))
    for world, strategy in ((2, "zero"), (3, "ddp")):
        for ranks, wanted in zip(on_world(world, [(kind, strategy) for kind in kinds]), expected, strict=True):
            for found in ranks:
                assert isinstance(found, list), found
                assert state_hash(found) == state_hash(wanted)


# ---- hands that may not ----------------------------------------------------------------------------------------------


def steps_by_hand(run, model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    run.backward(loss)
    optimizer.step()


def steps_in_a_hook(run, model, optimizer, x, y):
    own = torch.optim.SGD([model.head.bias], lr=0.1)
    if not model.head.bias._post_accumulate_grad_hooks:
        model.head.bias.register_post_accumulate_grad_hook(lambda _: own.step())
    run.step(F.cross_entropy(model(x), y))


def scales_by_hand(run, model, optimizer, x, y):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()


def rate_in_each_body(run, model, optimizer, x, y):
    optimizer.param_groups[0]["lr"] *= 0.9
    run.step(F.cross_entropy(model(x), y))


def backward_first(run, model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    run.step(loss)


def unfreezes_within(run, model, optimizer, x, y):
    model.body.requires_grad_(not model.body.bias.requires_grad)
    run.step(F.cross_entropy(model(x), y))


def teaches(run, model, optimizer, x, y):
    """A teacher that follows in each body, as in one's own loop, through .data; it is a frozen part of the model."""
    model.teacher.data.lerp_(model.head.bias.data, 0.5)
    run.step(F.cross_entropy(model(x) + model.teacher, y))


def teaches_afterwards(run, model, optimizer, x, y):
    run.step(F.cross_entropy(model(x) + model.teacher, y))
    with torch.no_grad():
        model.teacher.lerp_(model.head.bias, 0.5)


def draws_within(run, model, optimizer, x, y):
    if model.extra is None and run.progress.step == 1:
        add(model, optimizer, torch.randn(3))
    run.step(F.cross_entropy(model(x), y))


REFUSED = {
    steps_by_hand: r"SGD.step\(\) was called in the loop of run.train\(...\).*run.step\(loss\) takes the place of",
    steps_in_a_hook: r"SGD.step\(\) was called in the loop of run.train\(...\).*run.step\(loss\) takes the place of",
    scales_by_hand: r"SGD.step\(\) was called in the loop of run.train\(...\)",
    rate_in_each_body: r"lr of SGD's group 0 changed from 0.18.* to 0.162.* between two micro-batches of step 1.*`if",
    backward_first: r"4 parameters had a gradient before the step's first run.step\(loss\), such as body.weight",
    unfreezes_within: r"the trainable parameters have changed between two micro-batches of a step",
    teaches: r"teacher changed in the loop's body on micro-batch 0 of 4 of a step.*`if run.step\(loss\): ...`",
    teaches_afterwards: r"teacher changed in the loop's body on micro-batch 0 of 4 of a step.*`if run.step\(loss\)",
}


def lent(body, strategy="ddp", **settings):
    with Run(seed=3, strategy=strategy, **settings) as run:
        net = start(CASES["to and fro"])
        net.teacher = nn.Parameter(torch.zeros(3), requires_grad=False)
        model = run.model(net)
        optimizer = run.optimizer(sgd(net.parameters()))
        for _ in run.epochs(2):
            for x, y in run.train(run.loader((X, Y), shuffle=False, **SIZES)):
                body(run, model, optimizer, x, y)


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__)
def test_what_would_tell_how_many_ranks_there_are_is_refused(body):
    with pytest.raises(UsageError, match=REFUSED[body]):
        lent(body)


def told(kind, call, *args):
    with pytest.raises(kind) as caught:
        call(*args)
    return str(caught.value)


def test_the_same_on_two_ranks():
    """Each has two micro-batches in a step, and so each finds it by itself; a rank that is told may be gone first."""
    for body, ranks in zip(REFUSED, on_world(2, [(told, LockstepError, lent, body) for body in REFUSED]), strict=True):
        assert any(pytest.raises(UsageError, match=REFUSED[body]).matches(UsageError(said)) for said in ranks), ranks


def gradients_from_before():
    with Run() as run:
        model = run.model(Net())
        run.optimizer(sgd(model.parameters()))
        model(X).sum().backward()
        (x, _) = next(batches := run.train(run.loader((X, Y), **SIZES)))
        message = told(UsageError, run.step, model(x).sum())
        batches.close()
        return message


def test_gradients_left_from_before_training():
    assert "4 parameters had a gradient before" in gradients_from_before()
    assert "cleared by optimizer.zero_grad()" in gradients_from_before()


# ---- on several ranks ------------------------------------------------------------------------------------------------


def divided(strategy):
    """Unfrozen at a step, where a strategy divided the model as it was."""
    with Run(seed=3, strategy=strategy, peer_timeout_s=10) as run:
        torch.manual_seed(7)
        net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3))
        net[0].requires_grad_(False)
        run.model(net)
        run.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        for x, y in run.train(run.loader((X, Y), global_batch=8, micro_batch=2)):
            if run.progress.step == 1:
                for p in net[0].parameters():
                    p.requires_grad_(True)
            run.step(F.cross_entropy, x, y)
    return "nothing was said"


@pytest.mark.parametrize("strategy", ["fsdp", "parameter-server", "pipeline", "local-sgd:period=2"])
def test_strategies_that_divide_a_model_refuse_by_name_what_learns_later(strategy):
    outcomes = run_each(divided, 2, strategy, timeout_s=100)
    for outcome in outcomes:
        assert isinstance(outcome.error, LockstepError), outcome
    said = [str(outcome.error) for outcome in outcomes if isinstance(outcome.error, UsageError)]
    assert said, outcomes
    for message in said:
        assert message.startswith("other parameters learn than when run.model(...) was called"), message


def unfreezes_on_one(run, model, optimizer, x, y):
    if run.rank == 1 and run.progress.step == 1:
        model.teacher.requires_grad_(True)
    run.step(F.cross_entropy(model(x) + model.teacher, y))


def lent_on_many(body):
    lent(body, peer_timeout_s=10)


def test_unfreezing_on_one_rank_ends_all():
    for outcome in run_each(lent_on_many, 2, unfreezes_on_one, timeout_s=100):
        assert isinstance(outcome.error, LockstepError), outcome


def unfreezes_on_one_between_passes():
    with Run(seed=3) as run:
        net = start(CASES["unfrozen at a step"])
        model = run.model(net)
        run.optimizer(sgd(net.parameters()))
        batches = run.loader((X, Y), shuffle=False, **SIZES)
        for epoch in run.epochs(2):
            if epoch == 1:
                net.body.requires_grad_(run.rank == 1)
            try:
                for x, y in run.train(batches):
                    run.step(F.cross_entropy(model(x), y))
            except MismatchError as error:
                return str(error)
    return "no error"


def test_unfreezing_on_one_rank_between_passes_is_refused_on_all_before_one_waits():
    for said in on_world(2, [(unfreezes_on_one_between_passes,)])[0]:
        assert "and not in the same way on all ranks: body" in said
        assert "of rank 1 differ from those of rank 0" in said or "of rank 0 differ from those of rank 1" in said


def test_a_parameter_that_is_drawn_in_the_body_is_refused_where_ranks_draw_differently():
    outcomes = run_each(lent_on_many, 2, draws_within, timeout_s=100)
    assert {type(outcome.error).__name__ for outcome in outcomes} <= {"MismatchError", "PeerLost"}, outcomes
    said = [str(outcome.error) for outcome in outcomes if type(outcome.error).__name__ == "MismatchError"]
    assert said
    assert "the trainable parameters have changed before step 2, and not in the same way on all ranks: extra" in said[0]


# ---- resumed ---------------------------------------------------------------------------------------------------------


def unfrozen_by_the_script(root, strategy, until):
    """In epoch 1 it unfreezes; a script that is resumed in epoch 2 does not come by that line."""
    os.environ["LOCKSTEP_RESUME"] = "1"
    said = []
    with Run(seed=3, checkpoint=root, strategy=strategy) as run:
        run._context.reporter.say = said.append
        net = start(CASES["unfrozen at a step"])
        model = run.model(net)
        run.optimizer(sgd(net.parameters()))
        batches = run.loader((X, Y), shuffle=False, **SIZES)
        for epoch in run.epochs(3):
            if epoch == 1:
                net.body.requires_grad_(True)
            for x, y in run.train(batches):
                run.step(F.cross_entropy(model(x), y))
                if run.progress.step == until:
                    break
            if run.progress.step == until:
                break
        return values(net), [line for line in said if "the checkpoint holds" in line]


@pytest.mark.parametrize(("first", "then"), [((2, "ddp"), (3, "zero")), ((3, "zero"), (1, "none"))])
def test_what_the_script_unfroze_goes_on_unfrozen_after_a_resume(tmp_path, first, then):
    expected, said = unfrozen_by_the_script(str(tmp_path / "whole"), "none", None)
    assert said == []
    root = str(tmp_path / "legs")
    on_world(first[0], [(unfrozen_by_the_script, root, first[1], 7)])
    for found in on_world(then[0], [(unfrozen_by_the_script, root, then[1], None)])[0]:
        assert isinstance(found, tuple), found
        assert state_hash(found[0]) == state_hash(expected)
        (line,) = found[1]
        assert line.startswith(
            "body.weight, body.bias learned or was in training mode, or not, when the checkpoint was saved"
        )


def two_models(run):
    models = [run.model(nn.Linear(2, 1)) for _ in range(2)]
    return models, [run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]


def test_two_optimizers_in_steps_of_one_micro_batch():
    """Also in a last step of one, after a scheduler has changed what the step before began with."""
    with Run(seed=3) as run:
        models, optimizers = two_models(run)
        for optimizer in optimizers:
            run.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        for x in run.train(run.loader(torch.arange(18.0).view(9, 2) / 18, global_batch=4, micro_batch=2)):
            for model, optimizer in zip(models, optimizers, strict=True):
                run.step(model(x).square().mean(), optimizer=optimizer)
        assert run.progress.step == 3
    with Run(seed=3) as run:
        models, optimizers = two_models(run)
        for x in run.train(run.loader(torch.ones(8, 2), global_batch=4, micro_batch=4)):
            for model, optimizer in zip(models, optimizers, strict=True):
                run.step(model(x).square().mean(), optimizer=optimizer)
        assert run.progress.step == 2


def rate_between_losses():
    with Run(seed=3) as run:
        models, optimizers = two_models(run)
        for x in run.train(run.loader(torch.ones(8, 2), global_batch=4, micro_batch=4)):
            for model, optimizer in zip(models, optimizers, strict=True):
                run.step(model(x).square().mean(), optimizer=optimizer)
                optimizer.param_groups[0]["lr"] *= 0.5


def test_a_rate_that_changes_between_two_losses_of_a_steps_only_micro_batch():
    with pytest.raises(UsageError, match=r"lr of SGD's group 0 changed from 0.1 to 0.05 between two micro-batches"):
        rate_between_losses()
