"""`.data.clamp_` of a weight in forward (positive weights): nothing to clamp in the first steps; the same on all ranks."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "hsdp:shard=2@4", "pipeline", "parameter-server@3"]

from kit import *


class Pos(nn.Linear):
    def forward(s, x):
        s.weight.data.clamp_(min=0)
        return super().forward(x)


def main(run):
    n = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Pos(8, 3))
    nn.init.constant_(n[2].weight, 0.05)
    nn.init.ones_(n[0].bias)
    m = run.model(n)
    o = run.optimizer(sgd(m, lr=0.03))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(8):
        for x, y in run.train(b):
            run.step(F.cross_entropy, x, y)
    done(run, m)


go(main)
