"""Weights are tied after run.model: model.head.weight = model.emb.weight."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "parameter-server@3"]

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.emb, s.l, s.head = nn.Embedding(9, 5), nn.Linear(5, 5), nn.Linear(5, 9, bias=False)

    def forward(s, x):
        return s.head(s.l(s.emb(x)).tanh())


def main(run):
    m = run.model(Net())
    m.head.weight = m.emb.weight
    o = run.optimizer(adam(m))
    b = run.loader(
        (
            torch.randint(0, 9, (40,), generator=torch.Generator().manual_seed(0)),
            torch.randint(0, 9, (40,), generator=torch.Generator().manual_seed(1)),
        ),
        global_batch=16,
        micro_batch=4,
    )
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
