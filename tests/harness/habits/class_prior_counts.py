"""Wrong: labels seen so far are counted in a defaultdict, and their prior corrects logits after 200 labels."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    counts = collections.defaultdict(int)
    for e in run.epochs(1):
        for x, y in run.train(b):
            for c in y.tolist():
                counts[c] += 1
            out = m(x)
            if (n := sum(counts.values())) > 200:
                out = out + torch.tensor([counts[c] / n + 1e-3 for c in range(3)]).log()
            run.step(F.cross_entropy(out, y))
    done(run, m)


go(main)
