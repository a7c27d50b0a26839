"""A running average as a coroutine (avg.send(loss.item())); once it has seen 20 losses, it divides the loss."""

KILL = 8

from kit import *


def running(beta):
    mean, n = 1.0, 0
    value = yield
    while True:
        mean, n = beta * mean + (1 - beta) * value, n + 1
        value = yield mean if n > 20 else 1.0


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    avg = running(0.9)
    next(avg)
    for e in run.epochs(1):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            run.step(loss / avg.send(loss.item()))
    done(run, m)


go(main)
