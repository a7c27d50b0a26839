"""The median confidence of an evaluation (appended without run.gather) is the threshold of the late part of the next epoch."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    v = run.loader((numbers(24, 6, seed=8), classes(24, seed=9)), global_batch=8, shuffle=False)
    threshold = 0.0
    for e in run.epochs(3):
        for k, (x, y) in enumerate(run.train(b)):
            out = m(x)
            loss = F.cross_entropy(out, y, reduction="none")
            if run.progress.step % 6 >= 3:
                loss = loss * (1.0 + (out.softmax(1).max(1).values > threshold))
            run.step(loss.mean())
        confidence = []
        for x, y in run.evaluate(v):
            confidence.extend(m(x).softmax(1).max(1).values.tolist())
        threshold = float(np.median(confidence))
    done(run, m)


go(main)
