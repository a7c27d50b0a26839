"""Right: np.random.default_rng of its own picks samples to print; losses in a numpy ring; nothing reads them."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(240), global_batch=16, micro_batch=4)
    rng, looked, ring, n = np.random.default_rng(3), [], np.zeros(32), 0
    for e in run.epochs(2):
        for x, y in run.train(b):
            out = m(x)
            losses = F.cross_entropy(out, y, reduction="none")
            k = int(rng.integers(len(x)))
            looked.append((y[k].item(), out[k].argmax().item()))
            ring[n % 32] = losses.mean().item()
            n += 1
            run.step(losses.mean())
    print(looked[-3:], ring.mean())
    done(run, m)


go(main)
