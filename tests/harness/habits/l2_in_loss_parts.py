"""The penalty on all parameters inside of the loss function that is handed over: run.step(loss, x, y)."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "pipeline", "hybrid@3", "parameter-server@3"]

from kit import *


def main(run):
    m = run.model(nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    o = run.optimizer(sgd(m))
    b = run.loader(
        (torch.randint(0, 20, (40,), generator=torch.Generator().manual_seed(0)), data()[1]),
        global_batch=16,
        micro_batch=4,
    )

    def loss(out, y):
        return F.cross_entropy(out, y) + 0.02 * sum(p.pow(2).sum() for p in m.parameters())

    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(loss, x, y)
    done(run, m)


go(main)
