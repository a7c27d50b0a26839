"""Stop training when the loss of a batch is below a threshold: `if loss.item() < .9: break`."""

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=2)
    for e in run.epochs(6):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            if run.step(loss) and loss.item() < 0.95:
                break
    done(run, m)


go(main)
