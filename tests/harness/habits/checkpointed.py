"""torch.utils.checkpoint with dropout, reentrant and not."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "pipeline", "parameter-server@3"]

from kit import *
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(s, r):
        super().__init__()
        s.l, s.d, s.r = nn.Linear(8, 8), nn.Dropout(0.3), r

    def inner(s, x):
        return x + s.d(s.l(x).tanh())

    def forward(s, x):
        return checkpoint(s.inner, x, use_reentrant=s.r)


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), Block(False), Block(False), Block(False), nn.Linear(8, 3)))
    o = run.optimizer(adam(m))
    b = run.loader(data(44), global_batch=16, micro_batch=2)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy, x, y)
    done(run, m)


go(main)
