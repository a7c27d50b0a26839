"""ReduceLROnPlateau (kept), stepped with the loss that this rank has added up itself."""

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m, lr=0.5))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    s = torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.1, threshold=0.05)
    run.keep(s=s)
    for e in run.epochs(5):
        total = 0
        for x, y in run.train(b):
            l = F.cross_entropy(m(x), y)
            run.step(l)
            total += l.item()
        s.step(total / len(b))
    done(run, m)


go(main)
