"""The model returns a dataclass of its own, and blocks pass one on."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "hsdp:shard=2@4", "parameter-server@3", "pipeline"]

from dataclasses import dataclass

from kit import *


@dataclass
class Out:
    x: torch.Tensor
    n: int = 0


class Block(nn.Module):
    def __init__(s):
        super().__init__()
        s.l = nn.Linear(8, 8)

    def forward(s, o):
        return Out(o.x + s.l(o.x).tanh(), o.n + 1)


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.a, s.blocks, s.b = nn.Linear(6, 8), nn.ModuleList([Block(), Block()]), nn.Linear(8, 3)

    def forward(s, x):
        o = Out(s.a(x))
        for k in s.blocks:
            o = k(o)
        return Out(s.b(o.x))


def main(run):
    m = run.model(Net())
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(lambda out, t: F.cross_entropy(out.x, t), x, y)
    done(run, m)


go(main)
