"""Wrong: each rank collects samples with a high loss into a set; they are masked in every 6th step."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    x, y = data(96)
    b = run.loader((x, y, torch.arange(96)), global_batch=16, micro_batch=4)
    noisy = set()
    for e in run.epochs(4):
        for a, t, i in run.train(b):
            each = F.cross_entropy(m(a), t, reduction="none")
            noisy.update(i[each > 1.3].tolist())
            if e and run.progress.step % 6 == 3:
                each = each * torch.tensor([0.0 if j in noisy else 1.0 for j in i.tolist()])
            run.step(each.mean())
    done(run, m)


go(main)
