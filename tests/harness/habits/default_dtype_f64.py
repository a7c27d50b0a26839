"""torch.set_default_dtype(torch.float64): all in double, with BatchNorm, clip, counts."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "hsdp:shard=1", "parameter-server@3"]

from kit import *


def main(run):
    torch.set_default_dtype(torch.float64)
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
    o = run.optimizer(adam(m))
    x, y = data()
    b = run.loader((x.double(), y), global_batch=16, micro_batch=2)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y), count=torch.tensor(2.0))
    done(run, m)


go(main, clip_norm=0.5)
