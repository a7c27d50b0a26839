"""WGAN: three critic steps for each generator step by run.progress.step, weights clamped."""

STRATEGIES = ["zero"]
NO_PLAIN = 1

from kit import *


def main(run):
    G, D = run.model(mlp(d=3, k=6)), run.model(mlp(k=1))
    og, od = run.optimizer(sgd(G, lr=0.02)), run.optimizer(sgd(D, lr=0.02))
    b = run.loader(data()[:1], global_batch=8, micro_batch=2)
    for e in run.epochs(3):
        for (x,) in run.train(b):
            fake = G(torch.randn(len(x), 3))
            if run.progress.step % 4 == 3:
                run.step(-D(fake).mean(), optimizer=og)
            elif run.step(D(fake.detach()).mean() - D(x).mean(), optimizer=od):
                with torch.no_grad():
                    for p in D.parameters():
                        p.clamp_(-0.3, 0.3)
    done(run, G, D)


go(main)
