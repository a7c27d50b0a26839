"""Callbacks in a dict by event, registered by a decorator; one sets trainer['coef'] after 20 batches."""

KILL = 8

from kit import *


class Events:
    def __init__(s):
        s.handlers = collections.defaultdict(list)

    def on(s, name):
        return lambda f: s.handlers[name].append(f) or f

    def fire(s, name, *args):
        for f in s.handlers[name]:
            f(*args)


def main(run):
    events, trainer = Events(), {"coef": 0.0, "seen": 0}

    @events.on("batch_end")
    def count(loss):
        trainer["seen"] += 1

    @events.on("batch_end")
    def warm(loss):
        if trainer["seen"] >= 20:
            trainer["coef"] = 0.05

    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            out = m(x)
            loss = F.cross_entropy(out, y) + trainer["coef"] * out.square().mean()
            run.step(loss)
            events.fire("batch_end", loss)
    done(run, m)


go(main)
