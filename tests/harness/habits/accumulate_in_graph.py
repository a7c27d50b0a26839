"""Losses of a list summed up after the inner loop: one run.step for a list of crops (multi-crop), shapes differ."""

STRATEGIES = ["zero", "fsdp"]

from kit import *


def main(run):
    m = run.model(nn.Sequential(nn.Conv1d(1, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3)))
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            x = x[:, None]
            crops = [x, x[:, :, :4], x[:, :, np.random.randint(0, 2) :][:, :, :5]]
            run.step(sum(F.cross_entropy(m(c), y) for c in crops) / len(crops))
    done(run, m)


go(main)
