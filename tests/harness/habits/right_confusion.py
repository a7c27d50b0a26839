"""Right: a confusion matrix and a Counter of classes in the body (if run.counts), brought together by run.sum and run.gather."""

NO_KILL = 1

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    f1 = []
    run.keep(f1=f1)
    for e in run.epochs(3):
        confusion, labels = torch.zeros(3, 3, dtype=torch.long), collections.Counter()
        for x, y in run.train(b):
            out = m(x)
            if run.counts:
                for t, p in zip(y.tolist(), out.argmax(1).tolist()):
                    confusion[t, p] += 1
                labels.update(y.tolist())
            run.step(F.cross_entropy(out, y))
        confusion = run.sum(confusion)
        total = sum(run.gather(labels), collections.Counter())
        f1.append((2 * confusion.diag() / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)).mean().item())
        run.log(f1=f1[-1], **{f"class_{k}": v for k, v in sorted(total.items())})
    done(run, m)


go(main)
