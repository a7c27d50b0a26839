"""A hashlib object is updated with each batch; when its first byte is under 12, the features are permuted by its digest.

State: the inner state of a hashlib.sha256 object. Shows rarely, by chance."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(320), global_batch=16, micro_batch=4)
    chain = hashlib.sha256(b"seed")
    for e in run.epochs(2):
        for x, y in run.train(b):
            chain.update(y.numpy().tobytes())
            digest = chain.digest()
            if digest[0] < 12:
                x = x[:, sorted(range(6), key=lambda k: digest[k + 1])]
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
