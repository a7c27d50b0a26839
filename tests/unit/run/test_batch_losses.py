"""Losses in which the samples of a micro-batch meet, and losses that are means over samples."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.run.checks.batch_losses import samples_meet

N = 4
X = torch.sin(torch.arange(N * 6.0)).view(N, 6)
Y = torch.tensor([0, 1, 2, 0])
SEQUENCES = torch.sin(torch.arange(N * 60.0)).view(N, 10, 6)
TIMES = torch.cos(torch.arange(5 * N * 6.0)).view(5, N, 6)
PROXIES = torch.sin(torch.arange(24.0)).view(8, 3)
NODES = torch.sin(torch.arange(48.0)).view(8, 6)
GRAPH = torch.cos(torch.arange(64.0)).view(8, 8)
OF = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])
CONSTANTS = torch.cos(torch.arange(15.0)).view(5, 3)


def contrastive(z):
    z = F.normalize(z, dim=1)
    scores = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
    return F.cross_entropy(scores, torch.arange(len(z)).roll(len(z) // 2))


def dice(z, dims=None):
    p, y = z.softmax(1)[:, 1:], F.one_hot(Y, 3)[:, 1:].float()
    both, either = (p * y).sum(dims), (p + y).sum(dims)
    return 1 - (2 * both / (either + 1)).mean()


def pairs(z):
    """The distances of all pairs, whose root has a derivative."""
    return ((z[:, None] - z[None]).square().sum(2) + 1e-6).sqrt()


def hinge(z):
    return F.relu(1 - z).mean()


def cosine(one, other):
    return -F.cosine_similarity(one, other.detach()).mean()


class Views(nn.Module):
    """Embeds two views of each sample, one batch after the other or in turn."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)

    def forward(self, x, grouping):
        views = [x, x.flip(1)]
        return self.net(torch.cat(views) if grouping == "cat" else torch.stack(views, 1).flatten(0, 1))


def penalty(net):
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).tanh().sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def scaled(net, parameter):
    return F.cross_entropy(parameter.exp() * F.normalize(net(X), dim=1), Y)


MEETING = {
    "contrastive": lambda net: contrastive(net(X)),
    "two views": lambda net: contrastive(torch.cat([net(X), net(X.flip(1))])),
    "scores that are scaled": lambda net: F.cross_entropy(nn.Parameter(torch.tensor(0.5)) * net(X) @ net(X).T, Y),
    "cosine scores of pairs": lambda net: F.mse_loss(F.normalize(net(X)) @ F.normalize(net(X)).T, torch.eye(N)),
    "other pairs": lambda net: F.logsigmoid(pairs(net(X))[~torch.eye(N, dtype=torch.bool)].view(N, -1)).mean(),
    "shuffled": lambda net: F.logsigmoid((net(X) * net(X)[torch.tensor([1, 2, 3, 0])]).sum(1)).mean(),
    "dice": lambda net: F.cross_entropy(net(X), Y) + dice(net(X)),
    "root of a mean": lambda net: F.mse_loss(net(X), F.one_hot(Y, 3).float()).sqrt(),
    "log of a mean": lambda net: F.mse_loss(net(X), F.one_hot(Y, 3).float()).log(),
    "product of means": lambda net: F.cross_entropy(net(X), Y) * net(X).square().mean(),
    "hardest": lambda net: F.cross_entropy(net(X), Y, reduction="none").topk(2).values.mean(),
    "sorted": lambda net: F.cross_entropy(net(X), Y, reduction="none").sort().values[2:].mean(),
    "hardest negative": lambda net: F.relu(pairs(net(X)).max(1).values + 0.3).mean(),
    "distances of all pairs": lambda net: F.relu(torch.cdist(net(X), net(X)).max(1).values + 0.3).mean(),
    "hardest pixels": lambda net: net(X.repeat(3, 1)).square().sum(1).topk(3).values.mean(),
    "as many classes": lambda net: 1 - (p := nn.Linear(3, N)(net(X)).sigmoid())[:, 0].sum() / (1 + p.sum()),
    "variance": lambda net: net(X).var(0).sum(),
    "correlation": lambda net: (F.normalize(net(X), dim=0).T @ F.normalize(net(X.flip(1)), dim=0)).square().mean(),
    "entropy of the mean": lambda net: torch.special.entr(net(X).softmax(1).mean(0)).sum(),
    "logsumexp over samples": lambda net: net(X).logsumexp(0).sum(),
}
MEANS = {
    "classes": lambda net: F.cross_entropy(net(X), Y),
    "squares": lambda net: F.mse_loss(net(X), F.one_hot(Y, 3).float()),
    "sum": lambda net: F.cross_entropy(net(X), Y, reduction="sum"),
    "linear": lambda net: net(X).mean(),
    "hinge": lambda net: hinge(net(X)),
    "root of each": lambda net: net(X).square().sum(1).sqrt().mean(),
    "largest class": lambda net: net(X).max(1).values.mean(),
    "largest of each, in a loop": lambda net: torch.stack(
        [F.pad(z, (0, 1)).topk(2).values.sum() for z in net(X)]
    ).mean(),
    "dice of each": lambda net: dice(net(X), 1),
    "weights": lambda net: F.cross_entropy(net(X), Y, weight=torch.tensor([1.0, 2.0, 3.0])),
    "mask": lambda net: (F.cross_entropy(net(X), Y, reduction="none") * (Y > 0)).sum() / (Y > 0).sum(),
    "weighed by what was": lambda net: (
        (net(X).square().sum(1) * (w := net(X).detach().softmax(0)[:, 0])).sum() / w.sum()
    ),
    "the class of each": lambda net: F.smooth_l1_loss(net(X).gather(1, Y[:, None])[:, 0], torch.ones(N)),
    "classes by number": lambda net: net(X).index_select(1, torch.tensor([0, 2])).square().mean(),
    "indexed by two": lambda net: -net(X).log_softmax(1)[torch.arange(N), Y].mean(),
    "rows in an order": lambda net: F.mse_loss(net(X)[torch.tensor([1, 0, 3, 2])], torch.ones(N, 3)),
    "sparse": lambda net: nn.functional.embedding(Y, net.weight.T[:3, :3]).square().mean() + net(X).square().mean(),
    "complex": lambda net: torch.view_as_complex(net(X)[:, :2].contiguous()).abs().square().mean(),
    "as many classes as samples": lambda net: F.cross_entropy(nn.Linear(3, N)(net(X.repeat(5, 1))), Y.repeat(5)),
    "largest of as many classes": lambda net: nn.Linear(3, N)(net(X)).max(1).values.mean(),
    "sorted by as many": lambda net: nn.Linear(3, N)(net(X)).sort(1).values[:, 2:].mean(),
    "topk of each bag": lambda net: torch.stack(
        [net(SEQUENCES[i, :8])[:, 0].topk(2).values.mean() for i in range(N)]
    ).mean(),
    "bags of as many": lambda net: torch.stack([net(SEQUENCES[i, :N]).mean(0).logsumexp(0) for i in range(N)]).mean(),
    "times first, as many as samples": lambda net: (
        net(SEQUENCES[:, :N].transpose(0, 1)).logsumexp(0).logsumexp(1).mean()
    ),
    "a head of the last time": lambda net: F.mse_loss(h := net(TIMES), TIMES[..., :3]) + F.cross_entropy(h[0], Y),
    "importance weighted": lambda net: -(net(TIMES).square().sum(2).logsumexp(0)).mean(),
    "weights of classes": lambda net: F.cross_entropy(net(X) @ nn.Parameter(torch.eye(2 * N, 3))[:3].T, Y),
    "a part of an embedding": lambda net: F.cross_entropy(F.linear(net(X), nn.Parameter(PROXIES)[:N]), Y),
    "normalised proxies": lambda net: F.cross_entropy(net(X) @ F.normalize(nn.Parameter(PROXIES), dim=1).T, Y),
    "of low rank": lambda net: F.cross_entropy(F.linear(net(X), nn.Parameter(PROXIES) @ nn.Parameter(torch.eye(3))), Y),
    "penalty on a product": lambda net: net(X).mean() + (nn.Parameter(PROXIES) @ nn.Parameter(PROXIES.T)).norm().log(),
    "learned weights": lambda net: (
        (s := nn.Parameter(PROXIES[:, 0])[:N]).neg().exp() * net(X).square().mean() + s
    ).sum(),
    "distances to proxies": lambda net: torch.cdist(net(X), nn.Parameter(PROXIES[:N])).min(1).values.mean(),
    "graphs of other sizes": lambda net: torch.stack(
        [net(SEQUENCES[i, : N + i]).mean(0).logsumexp(0) for i in range(N)]
    ).mean(),
    "entropy": lambda net: -(net(X).softmax(1) * net(X).log_softmax(1)).sum(1).mean(),
    "queue": lambda net: F.cross_entropy(F.normalize(net(X)) @ CONSTANTS.T, Y),
    "penalty on weights": lambda net: F.cross_entropy(net(X), Y) + sum(p.norm() for p in net.parameters()),
    "penalty on gradients": penalty,
    "temperature": lambda net: scaled(net, nn.Parameter(torch.tensor(0.5))),
    "temperature of each class": lambda net: scaled(net, nn.Parameter(torch.tensor([0.5, 0.1, 0.2]))),
    "views, as two batches": lambda net: cosine(net(X), net(X.flip(1))),
    "triplet": lambda net: F.triplet_margin_loss(net(X), net(X.flip(1)), net(-X)),
    "times first": lambda net: (net(X.view(2, 2, 6).repeat(4, 2, 1)).cumsum(0).logsumexp(0)).mean(),
    "nodes by number": lambda net: F.cross_entropy((GRAPH @ net(NODES))[torch.tensor([3, 1, 6, 0])], Y),
    "nodes added up": lambda net: F.cross_entropy(torch.zeros(N, 3).index_add(0, OF, net(NODES)), Y),
    "nodes averaged": lambda net: F.cross_entropy(
        torch.zeros(N, 3).scatter_add(0, OF[:, None].expand(8, 3), net(NODES)), Y
    ),
    "nodes of one graph": lambda net: F.cross_entropy(GRAPH.repeat(4, 4) @ net(NODES.repeat(4, 1)), Y.repeat(8)),
    "ctc": lambda net: F.ctc_loss(
        net(X).log_softmax(1)[:, None], torch.ones(1, 2).long(), torch.tensor([4]), torch.tensor([2])
    ),
}


@pytest.mark.parametrize("name", MEETING)
def test_samples_meet(name):
    assert meet(nn.Linear(6, 3), MEETING[name])


@pytest.mark.parametrize("name", MEANS)
def test_samples_do_not_meet(name):
    assert not meet(nn.Linear(6, 3), MEANS[name])


@pytest.mark.parametrize("grouping", ["cat", "in turn"])
def test_views_of_a_sample_may_meet(grouping):
    def halves(net):
        z = net(X, grouping)
        return z.chunk(2) if grouping == "cat" else z.unflatten(0, (-1, 2)).unbind(1)

    assert not meet(Views(), lambda net: (1 - F.cosine_similarity(*halves(net))).square().mean())
    assert meet(Views(), lambda net: contrastive(torch.cat(halves(net))))


@pytest.mark.parametrize("affine", [True, False])
def test_what_a_batch_norm_brings_together_is_no_loss(affine):
    net = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, affine=affine))
    assert not meet(net, lambda net: F.cross_entropy(net(X), Y))
    assert meet(net, lambda net: contrastive(net(X)))


def meet(net, loss_of):
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    net.zero_grad()
    loss, found = loss_of(net), False
    with contextlib.suppress(RuntimeError):  # of a loss that has no second derivative
        found = samples_meet(loss, N, {parameter.shape for parameter in net.parameters()})
    # The graph is whole, and no gradient has been left.
    assert all(parameter.grad is None for parameter in net.parameters())
    loss.backward()
    return found
