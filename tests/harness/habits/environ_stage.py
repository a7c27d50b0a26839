"""Wrong: the stage of a curriculum is in os.environ, where a helper counts it up in each body; stage 40 begins noise."""

KILL = 8

from kit import *


def tick():
    os.environ["CURRICULUM"] = str(int(os.environ.get("CURRICULUM", "0")) + 1)


def perturb(x):
    stage = int(os.environ["CURRICULUM"])
    return x + 0.01 * max(0, stage - 40) * torch.randn_like(x)


def main(run):
    os.environ["CURRICULUM"] = "0"
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            tick()
            run.step(F.cross_entropy(m(perturb(x)), y))
    done(run, m)


go(main)
