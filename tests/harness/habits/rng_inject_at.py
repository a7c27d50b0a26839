"""random.Random(9) of the script draws once an epoch, at which later step of it a batch is noised."""

KILL = 11

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    rng = random.Random(9)
    for e in run.epochs(4):
        at = run.progress.step + rng.randrange(2, 6)
        for x, y in run.train(b):
            if run.progress.step == at:
                x = x + torch.randn_like(x)
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
