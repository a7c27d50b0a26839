"""Parameter groups by a list that leaves out those in a set: [p for p in model.parameters() if p not in head]; a clipped norm."""

STRATEGIES = ["zero", "fsdp", "pipeline", "parameter-server@3", "zero:stage=2", "hsdp:shard=2@4"]

from kit import *


def main(run):
    body = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    m = run.model(nn.Sequential(body, nn.Linear(6, 3)))
    head = set(m[1].parameters())
    rest = [p for p in m.parameters() if p not in head]
    o = run.optimizer(torch.optim.Adam([{"params": rest}, {"params": list(m[1].parameters()), "lr": 0.02}], lr=0.01))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy, x, y)
    done(run, m)


go(main, clip_norm=0.5)
