"""clip_grad_norm_ between run.backward and run.update (the form of the docs), where a rank holds a part of the model."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "pipeline", "pipeline@3", "hybrid@3", "parameter-server@3"]

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.e, s.rest = nn.Embedding(20, 6), mlp()

    def forward(s, i):
        return s.rest(s.e(i))


def main(run):
    m = run.model(nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    o = run.optimizer(sgd(m))
    b = run.loader(
        (torch.randint(0, 20, (40,), generator=torch.Generator().manual_seed(0)), data()[1]),
        global_batch=16,
        micro_batch=4,
    )
    for e in run.epochs(3):
        for x, y in run.train(b):
            if run.backward(F.cross_entropy, x, y):
                torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            run.update()
    done(run, m)


go(main)
