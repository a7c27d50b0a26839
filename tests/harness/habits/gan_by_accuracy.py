"""The discriminator rests in steps in which it was too good in the step before: a flag of the script, set by run.step."""

NO_PLAIN = 1
WORLDS = (1, 2, 4)

from kit import *


def main(run):
    G, D = run.model(mlp(d=3, k=6)), run.model(mlp(k=1))
    og, od = run.optimizer(sgd(G, lr=0.02)), run.optimizer(sgd(D, lr=0.02))
    b = run.loader(data()[:1], global_batch=8, micro_batch=2)
    train_d = True
    for e in run.epochs(4):
        for (x,) in run.train(b):
            fake = G(torch.randn(len(x), 3))
            d = F.softplus(-D(x)).mean() + F.softplus(D(fake.detach())).mean()
            ended = run.step(F.softplus(-D(fake)).mean(), optimizer=og)
            if train_d:
                ended = run.step(d, optimizer=od)
            if ended:
                train_d = d.item() > 1.36
    done(run, G, D)


go(main)
