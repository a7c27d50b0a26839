"""Adaptive parameter noise: an object's stddev is changed once a step by a distance, and perturbs an output every sixth step."""

KILL = 8

from kit import *


class ParamNoise:
    def __init__(s, std=0.1, goal=0.2):
        s.std, s.goal = std, goal

    def adapt(s, distance):
        s.std = s.std * 1.05 if distance < s.goal else s.std / 1.05


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    noise = ParamNoise()
    for e in run.epochs(1):
        for x, y in run.train(b):
            out = m(x)
            if run.progress.step % 6 == 5:
                out = out + noise.std * torch.randn_like(out)
            if run.step(F.cross_entropy(out, y)):
                noise.adapt(float(m[2].bias.detach().norm()))
    done(run, m)


go(main)
