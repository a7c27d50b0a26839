"""An average of the weights as many write it: class EMA with a dict shadow, updated once a step, used after training; not kept."""

STRATEGIES = ["zero"]

from kit import *


class Ema:
    def __init__(s, model, decay=0.9):
        s.model, s.decay = model, decay
        s.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(s):
        for n, p in s.model.named_parameters():
            s.shadow[n] = s.decay * s.shadow[n] + (1 - s.decay) * p.detach()


def main(run):
    m = run.model(mlp())
    ema = Ema(m)
    o = run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)):
                ema.update()
    done(run, m, ema=dict(ema.shadow))


go(main)
