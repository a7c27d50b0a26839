"""A plateau class by hand (best, bad) in a trainer's dict of parts, stepped after each evaluation; lr is the optimizer's."""

KILL = 8

from kit import *


class Plateau:
    def __init__(s, optimizer, patience):
        s.optimizer, s.patience, s.best, s.bad = optimizer, patience, math.inf, 0

    def step(s, value):
        if value < s.best - 0.02:
            s.best, s.bad = value, 0
        else:
            s.bad += 1
        if s.bad >= s.patience:
            s.bad = 0
            for g in s.optimizer.param_groups:
                g["lr"] *= 0.5


class Trainer:
    def __init__(s, run):
        s.run = run
        s.model = run.model(mlp())
        s.optimizer = run.optimizer(sgd(s.model, lr=0.3))
        s.parts = {"plateau": Plateau(s.optimizer, 2)}
        s.train = run.loader(data(48), global_batch=16, micro_batch=4)
        s.valid = run.loader((numbers(20, 6, seed=8), classes(20, seed=9)), global_batch=8, shuffle=False)

    def fit(s, epochs):
        for e in s.run.epochs(epochs):
            for x, y in s.run.train(s.train):
                s.run.step(F.cross_entropy(s.model(x), y))
            for x, y in s.run.evaluate(s.valid):
                s.run.measure(val=F.cross_entropy(s.model(x), y, reduction="none"))
            s.parts["plateau"].step(s.run.metrics["val"])


import math


def main(run):
    t = Trainer(run)
    t.fit(7)
    done(run, t.model, lr=t.optimizer.param_groups[0]["lr"])


go(main)
