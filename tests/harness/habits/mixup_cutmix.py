"""Mixup and cutmix in the body with np.random, random and torch; two targets."""

STRATEGIES = ["zero", "fsdp"]

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            k, i = np.random.beta(0.4, 0.4), torch.randperm(len(x))
            if random.random() < 0.5:
                mixed = k * x + (1 - k) * x[i]
            else:
                mixed = torch.cat([x[:, :3], x[i][:, 3:]], 1)
                k = 0.5
            out = m(mixed)
            run.step(k * F.cross_entropy(out, y) + (1 - k) * F.cross_entropy(out, y[i]))
    done(run, m)


go(main)
