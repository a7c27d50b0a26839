"""Tokens seen so far, counted in the body, set the learning rate, as LLM schedules by tokens do."""

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    tokens = 0
    for e in run.epochs(3):
        for x, y in run.train(b):
            tokens += x.numel()
            for g in o.param_groups:
                g["lr"] = 0.1 / (1 + tokens // 96)
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
