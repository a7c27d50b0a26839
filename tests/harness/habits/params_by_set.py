"""Parameter groups by differences of sets: list(set(model.parameters()) - set(head.parameters())); Adam, a clipped norm."""

STRATEGIES = ["zero", "fsdp"]

from kit import *


def main(run):
    body = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    m = run.model(nn.Sequential(body, nn.Linear(6, 3)))
    head = set(m[1].parameters())
    rest = set(m.parameters()) - head
    o = run.optimizer(torch.optim.Adam([{"params": list(rest)}, {"params": list(head), "lr": 0.02}], lr=0.01))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main, clip_norm=0.5)
