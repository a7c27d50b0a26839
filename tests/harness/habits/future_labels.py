"""Pseudo-labels for the next epoch by a ThreadPoolExecutor: submitted with a copy of the model, taken by result()."""

KILL = 8

from concurrent.futures import ThreadPoolExecutor

from kit import *


@torch.no_grad()
def label(model, x):
    return model.eval()(x).softmax(1)


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m))
    x, y = data(64)
    unlabelled = numbers(64, 6, seed=8)
    b = run.loader((x, y, torch.arange(64)), global_batch=16, micro_batch=4)
    pool, future = ThreadPoolExecutor(1), None
    for e in run.epochs(3):
        soft = future.result() if future is not None else None
        for x, y, i in run.train(b):
            loss = F.cross_entropy(m(x), y)
            if soft is not None:
                loss = loss + F.cross_entropy(m(unlabelled[i]), soft[i])
            run.step(loss)
        future = pool.submit(label, copy.deepcopy(m), unlabelled)
    pool.shutdown()
    done(run, m)


go(main)
