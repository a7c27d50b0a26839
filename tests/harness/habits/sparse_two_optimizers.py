"""Recommender: EmbeddingBag(sparse=True) by SparseAdam, the rest by Adam; one loss for both optimizers."""

NO_PLAIN = 1
STRATEGIES = ["zero", "parameter-server@3", "hybrid@3"]

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.e, s.l = nn.EmbeddingBag(30, 6, mode="sum", sparse=True), mlp()

    def forward(s, i):
        return s.l(s.e(i))


def main(run):
    m = run.model(Net())
    a = run.optimizer(torch.optim.SparseAdam(m.e.parameters(), lr=0.01))
    o = run.optimizer(adam(m.l))
    b = run.loader(
        (torch.randint(0, 30, (40, 3), generator=torch.Generator().manual_seed(1)), data()[1]),
        global_batch=16,
        micro_batch=4,
    )
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y), optimizer=[a, o])
    done(run, m)


go(main)
