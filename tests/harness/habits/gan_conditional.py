"""The discriminator learns only where its loss is high: `if d_loss.item() > ...: run.step(...)`."""

NO_PLAIN = 1
WORLDS = (1, 2, 4)

from kit import *


def main(run):
    G, D = run.model(mlp(d=3, k=6)), run.model(mlp(k=1))
    og, od = run.optimizer(sgd(G, lr=0.02)), run.optimizer(sgd(D, lr=0.02))
    b = run.loader(data()[:1], global_batch=8, micro_batch=2)
    for e in run.epochs(4):
        for (x,) in run.train(b):
            fake = G(torch.randn(len(x), 3))
            d_loss = F.softplus(-D(x)).mean() + F.softplus(D(fake.detach())).mean()
            run.step(F.softplus(-D(fake)).mean(), optimizer=og)
            if d_loss.item() > 1.35:
                run.step(d_loss, optimizer=od)
    done(run, G, D)


go(main)
