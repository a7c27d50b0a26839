"""`running_loss += loss.item()` in the body, and run.log(train_loss=running_loss / n) after the epoch."""

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=2)
    logged = []
    for e in run.epochs(2):
        running, n = 0.0, 0
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            running += loss.item() * len(x)
            n += len(x)
            run.step(loss)
        logged.append(run.log(train_loss=running / n)["train_loss"])
    done(run, m, logged=logged)


go(main)
