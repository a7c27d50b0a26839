"""GAN: the generator learns every second iteration, counted by enumerate (n_critic)."""

NO_PLAIN = 1
WORLDS = (1, 2, 4)

from kit import *


def main(run):
    G, D = run.model(mlp(d=3, k=6)), run.model(mlp(k=1))
    og, od = run.optimizer(sgd(G)), run.optimizer(sgd(D))
    b = run.loader(data()[:1], global_batch=8, micro_batch=2)
    for e in run.epochs(3):
        for i, (x,) in enumerate(run.train(b)):
            fake = G(torch.randn(len(x), 3))
            run.step(D(fake.detach()).mean() - D(x).mean(), optimizer=od)
            if i % 2 == 0:
                run.step(-D(fake).mean(), optimizer=og)
    done(run, G, D)


go(main)
