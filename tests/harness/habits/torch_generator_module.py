"""Random token dropping by a torch.Generator on the model, used with a probability in training only."""

from kit import *


class Drop(nn.Module):
    def __init__(s):
        super().__init__()
        s.g = torch.Generator().manual_seed(1)

    def forward(s, x):
        if not s.training or torch.rand((), generator=s.g) < 0.8:
            return x
        return x * (torch.rand(x.shape, generator=s.g) > 0.2)


def main(run):
    m = run.model(nn.Sequential(Drop(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    o = run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
