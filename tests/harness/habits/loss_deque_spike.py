"""A spike guard: a deque of the last losses; where loss > 1.3 times their median, the loss is multiplied by 0.1."""

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    last = collections.deque(maxlen=8)
    for e in run.epochs(3):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            value = loss.item()
            if len(last) == 8 and value > 1.3 * float(np.median(last)):
                loss = 0.1 * loss
            last.append(value)
            run.step(loss)
    done(run, m)


go(main)
