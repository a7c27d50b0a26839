"""VAE-like: `global_step += 1` in the body, weight of the KL term = min(1, global_step / 30)."""

from kit import *


def main(run):
    m = run.model(mlp(k=6))
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=2)
    global_step = 0
    for e in run.epochs(2):
        for x, y in run.train(b):
            mu, lv = m(x).chunk(2, 1)
            beta = min(1.0, global_step / 30)
            global_step += 1
            z = mu + torch.randn_like(mu) * (lv / 2).exp()
            run.step(F.cross_entropy(z, y) - beta * 0.5 * (1 + lv - mu**2 - lv.exp()).mean())
    done(run, m)


go(main)
