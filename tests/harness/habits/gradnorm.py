"""GradNorm: weights of two losses learn from norms of torch.autograd.grad by the shared layer."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2"]

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.shared, s.a, s.b = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 6)
        s.w = nn.Parameter(torch.ones(2))

    def forward(s, x):
        h = s.shared(x).tanh()
        return s.a(h), s.b(h), s.w * 1


def main(run):
    m = run.model(Net())
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            one, two, w = m(x)
            losses = [F.cross_entropy(one, y), F.mse_loss(two, x)]
            norms = [torch.autograd.grad(l, m.shared.weight, retain_graph=True)[0].norm() for l in losses]
            goal = sum(norms) / 2
            balance = sum((n * k - goal).abs() for n, k in zip(norms, w))
            run.step(sum(l * k.detach() for l, k in zip(losses, w)) + 0.1 * balance)
    done(run, m)


go(main)
