"""history.append(np.float32(...)) in a kept list: what cannot be saved comes only with the first append."""

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=2)
    history = []
    run.keep(history=history)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        history.append(np.mean(np.array([1, 2], dtype=np.float32)))
    done(run, m, history=[float(h) for h in history])


go(main)
