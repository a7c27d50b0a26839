"""P4: the gradient of a step is that of the mean over the global batch, no matter which rank holds how much of it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from campaign_marks import combinations
from lockstep.errors import UsageError
from lockstep.run import Run
from worlds import on_world

LR = 0.05  # small enough that the training converges: a diverging one would magnify rounding


def make_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def make_data(samples):
    """Samples of up to five items each, the last ones empty: inputs, targets and how many items count."""
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, 5, 3, dtype=torch.float64, generator=generator)
    targets = torch.randn(samples, 5, dtype=torch.float64, generator=generator)
    items = torch.randint(1, 6, (samples,), generator=generator)
    return inputs, targets, items


def mean_loss(net, batch, by_items):
    """The mean over samples of their sums, or the mean over items; and how many items that is."""
    inputs, targets, items = batch
    held = torch.arange(5) < items[:, None]
    squares = ((net(inputs).squeeze(-1) - targets) ** 2 * held).sum()
    return squares / (items.sum() if by_items else len(inputs)), items.sum()


def by_hand(samples, global_batch, by_items, clip_norm):
    """On one process, each step as one batch."""
    net, data = make_net(), make_data(samples)
    for begin in range(0, samples, global_batch):
        loss, _ = mean_loss(net, [part[begin : begin + global_batch] for part in data], by_items)
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        scale = 1.0 if clip_norm is None else min(1.0, clip_norm / (float(norm) + 1e-6))
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.sub_(LR * scale * gradient)
    return [p.detach() for p in net.parameters()]


def by_run(samples, global_batch, micro_batch, by_items, clip_norm, reduction="exact", loss_is="mean"):
    net = make_net()
    with Run(clip_norm=clip_norm, reduction=reduction) as run:
        model = run.model(net)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=LR))
        batches = run.loader(make_data(samples), global_batch=global_batch, micro_batch=micro_batch, shuffle=False)
        for batch in run.train(batches):
            loss, items = mean_loss(model, batch, by_items)
            if loss_is == "sum":
                loss = loss * (items if by_items else len(batch[0]))
            run.step(loss, count=items if by_items else None, loss_is=loss_is)
    return [p.detach() for p in net.parameters()]


def assert_same(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


@settings(max_examples=30)
@given(
    samples=st.integers(1, 23),
    global_batch=st.integers(1, 9),
    data=st.data(),
    by_items=st.booleans(),
    clip_norm=st.sampled_from([None, 0.05, 1e9]),
    loss_is=st.sampled_from(["mean", "sum"]),
)
def test_on_one_rank(samples, global_batch, data, by_items, clip_norm, loss_is):
    micro_batch = data.draw(st.integers(1, global_batch))
    found = by_run(samples, global_batch, micro_batch, by_items, clip_norm, loss_is=loss_is)
    assert_same(found, by_hand(samples, global_batch, by_items, clip_norm))


# Unequal runs, unequal micro-batches, a last step with fewer micro-batches than ranks, one with a single sample.
SIZES = [(23, 9, 2), (19, 6, 1), (10, 9, 3), (7, 7, 2)]
CASES = [
    (*sizes, by_items, clip_norm, reduction, "sum" if by_items else "mean")
    for sizes, by_items, clip_norm, reduction in itertools.product(
        SIZES, (False, True), (None, 0.05), ("exact", "fast")
    )
]


@pytest.mark.parametrize("world_size", combinations([2, 3], campaign=lambda ranks: ranks == 2))
def test_on_many_ranks(world_size):
    for case, found in zip(CASES, on_world(world_size, [(by_run, *case) for case in CASES]), strict=True):
        samples, global_batch, _, by_items, clip_norm, _, _ = case
        wanted = by_hand(samples, global_batch, by_items, clip_norm)
        for parameters in found:
            assert not isinstance(parameters, str), f"{case}: {parameters}"
            assert_same(parameters, wanted)


def test_a_sum_is_reported_as_the_mean():
    """In both forms of the call; a micro-batch may hold no item."""
    losses = []
    for form in ("mean", "sum", "function"):
        with Run(threads=1, replay=False) as run:
            model = run.model(make_net())
            run.optimizer(torch.optim.SGD(model.parameters(), lr=LR))
            batches = iter(run.train(run.loader(make_data(4)[0], global_batch=4, micro_batch=4)))
            x = next(batches)
            with pytest.raises(UsageError, match=r"loss_is='total'\): give 'mean', or 'sum'"):
                run.step(model(x).sum(), loss_is="total")
            run.step(model(x).sum(), loss_is="sum")
        with Run(threads=1) as run:
            model = run.model(make_net())
            run.optimizer(torch.optim.SGD(model.parameters(), lr=LR))
            inputs = torch.cat([make_data(9)[0], torch.zeros(2, 5, 3)])
            for x in run.train(run.loader(inputs, global_batch=11, micro_batch=2, shuffle=False)):
                items = int((x[:, 0, 0] != 0).sum())
                mask = (x != 0)[..., :1]
                if form == "function":
                    run.step(lambda out, mask: (out * mask).square().sum(), x, mask, count=items, loss_is="sum")
                else:
                    total = (model(x) * mask).square().sum()
                    run.step(total if form == "sum" else total / max(1, items), count=items, loss_is=form)
            losses.append((run.metrics["loss"], [p.detach() for p in model.parameters()]))
    for loss, parameters in losses[1:]:
        assert loss == pytest.approx(losses[0][0], rel=1e-12)
        assert_same(parameters, losses[0][1])


def test_the_test_can_see():
    """The mean of the micro-batches' means, which is the usual mistake, is far away."""
    found = by_run(23, 9, 2, False, None)
    with pytest.raises(AssertionError):
        assert_same(found, by_hand(23, 9, True, None))
    with pytest.raises(AssertionError):
        assert_same(found, by_hand(22, 9, False, None))
