"""The head is drawn again every 4 steps, where run.step returned True; dropout is drawn after that."""

STRATEGIES = ["zero", "fsdp"]
NO_PLAIN = 1

from kit import *


def main(run):
    m = run.model(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3)))
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)) and run.progress.step % 4 == 0:
                m[3].reset_parameters()
    done(run, m)


go(main)
