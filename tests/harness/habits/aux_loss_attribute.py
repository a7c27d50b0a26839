"""Mixture of experts: the auxiliary loss is left in an attribute (self.aux) and added by the script."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "hsdp:shard=2@4", "parameter-server@3"]

from kit import *


class Block(nn.Module):
    def __init__(s):
        super().__init__()
        s.gate, s.l = nn.Linear(8, 2), nn.Linear(8, 16)

    def forward(s, x):
        g = s.gate(x).softmax(1)
        s.aux = g.mean(0).square().sum() * 2
        return x + (g.detach()[:, :, None] * s.l(x).view(-1, 2, 8)).sum(1).tanh()


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.a, s.blocks, s.b = nn.Linear(6, 8), nn.ModuleList([Block(), Block()]), nn.Linear(8, 3)

    def forward(s, x):
        x = s.a(x)
        for k in s.blocks:
            x = k(x)
        return s.b(x)


def main(run):
    m = run.model(Net())
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y) + sum(k.aux for k in m.blocks))
    done(run, m)


go(main)
