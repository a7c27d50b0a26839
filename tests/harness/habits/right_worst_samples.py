"""Right: the worst samples so far and counts of classes are collected for a report; a set is emptied each epoch."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    x, y = data(96)
    b = run.loader((x, y, torch.arange(96)), global_batch=16, micro_batch=4)
    worst, counts = {}, collections.Counter()
    for e in run.epochs(3):
        seen = set()
        total, number = 0.0, 0
        for a, t, i in run.train(b):
            each = F.cross_entropy(m(a), t, reduction="none")
            for j, l in zip(i.tolist(), each.tolist()):
                worst[j] = max(worst.get(j, 0.0), l)
            counts.update(t.tolist())
            seen |= set(i.tolist())
            total += each.sum().item()
            number += len(a)
            run.step(each.mean())
        top = sorted(worst, key=worst.get)[-3:]
        print(f"epoch {e}: {total / number:.3f}, {len(seen)} seen, worst {top}, {dict(counts)}")
    done(run, m)


go(main)
