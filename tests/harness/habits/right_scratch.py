"""Right: scratch tensors and arrays made once and written anew in each body before they are read (normal_(), out=)."""

KILL = 8

from kit import *


class Corrupt:
    def __init__(s, n, d):
        s.noise, s.mixed = torch.empty(n, d), torch.empty(n, d)
        s.alphas = np.empty(n, dtype=np.float32)

    def __call__(s, x):
        n = len(x)
        s.noise[:n].normal_()
        s.alphas[:n] = np.random.rand(n)
        a = torch.from_numpy(s.alphas[:n])[:, None]
        torch.mul(x, a, out=s.mixed[:n])
        s.mixed[:n].add_((1 - a) * s.noise[:n])
        return s.mixed[:n].clone(), a


def main(run):
    m = run.model(mlp(k=6))
    o = run.optimizer(sgd(m))
    corrupt = Corrupt(4, 6)
    b = run.loader(data(90)[:1], global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for (x,) in run.train(b):
            noisy, a = corrupt(x)
            run.step(F.mse_loss(m(noisy), x))
    done(run, m)


go(main)
