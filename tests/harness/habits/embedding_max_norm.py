"""nn.Embedding(max_norm=): the forward pass renormalises rows in place; rows grow beyond it after some steps only."""

STRATEGIES = ["zero", "fsdp", "parameter-server@3"]

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.e = nn.Embedding(20, 4, max_norm=1.0)
        s.l = nn.Linear(4, 3)
        nn.init.normal_(s.e.weight, std=0.02)

    def forward(s, x):
        return s.l(s.e(x).mean(1))


def main(run):
    m = run.model(Net())
    o = run.optimizer(sgd(m, lr=2.0))
    b = run.loader(
        (torch.randint(0, 20, (40, 3), generator=torch.Generator().manual_seed(3)), data()[1]),
        global_batch=16,
        micro_batch=2,
    )
    for e in run.epochs(6):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
