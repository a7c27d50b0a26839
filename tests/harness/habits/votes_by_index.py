"""Labels are replaced by the majority of the last three predictions of a sample, in a defaultdict by index."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    x, y = data(48)
    b = run.loader((x, y, torch.arange(48)), global_batch=16, micro_batch=4)
    votes = collections.defaultdict(lambda: collections.deque(maxlen=3))
    for e in run.epochs(5):
        for x, y, idx in run.train(b):
            out = m(x)
            target = y.clone()
            for k, i in enumerate(idx.tolist()):
                if len(votes[i]) == 3 and len(set(votes[i])) == 1:
                    target[k] = votes[i][0]
                votes[i].append(int(out[k].argmax()))
            run.step(F.cross_entropy(out, target))
    done(run, m)


go(main)
