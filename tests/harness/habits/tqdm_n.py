"""The auxiliary loss is on once the progress bar has counted 24: pbar.n of tqdm."""

KILL = 8

from kit import *
from tqdm import tqdm


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        with tqdm(total=48, disable=False, file=open(os.devnull, "w")) as bar:
            for x, y in run.train(b):
                out = m(x)
                loss = F.cross_entropy(out, y)
                if bar.n >= 24:
                    loss = loss + 0.1 * out.square().mean()
                run.step(loss)
                bar.update(1)
    done(run, m)


go(main)
