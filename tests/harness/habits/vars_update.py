"""argparse options that a schedule changes by vars(args).update(...), by the number of losses so far."""

KILL = 8

import argparse

from kit import *

SCHEDULE = {20: {"alpha": 0.3}, 36: {"alpha": 0.6, "beta": 0.1}}


def main(run):
    p = argparse.ArgumentParser()
    p.add_argument("--alpha", type=float, default=0.0)
    p.add_argument("--beta", type=float, default=0.0)
    args = p.parse_args([])
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    losses = []
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            vars(args).update(SCHEDULE.get(len(losses), {}))
            out = m(x)
            loss = F.cross_entropy(out, y) + args.alpha * out.square().mean() + args.beta * out.abs().mean()
            run.step(loss)
            losses.append(loss.item())
    done(run, m)


go(main)
