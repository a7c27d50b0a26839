"""Linear probe: the optimizer holds the head only; the body is not frozen; clip_norm."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "hsdp:shard=2@4", "parameter-server@3"]

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(torch.optim.Adam(m[2].parameters(), lr=0.05))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main, clip_norm=0.3)
