"""order= that draws with np.random and random instead of the generator that it is given."""

NO_PLAIN = 1

from kit import *


def order(epoch, generator):
    o = np.random.permutation(40)[: 24 + epoch]
    random.shuffle(o)
    return torch.from_numpy(o)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), order=order, global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
