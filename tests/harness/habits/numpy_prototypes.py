"""Class centres in a NumPy array that a helper moves; a term pulls features to them in every fifth step."""

KILL = 8

from kit import *


def move(centres, f, y):
    for c in np.unique(y):
        centres[c] = 0.9 * centres[c] + 0.1 * f[y == c].mean(0)


def main(run):
    m = run.model(nn.ModuleDict({"f": nn.Linear(6, 8), "c": nn.Linear(8, 3)}))
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    centres = np.zeros((3, 8), dtype=np.float32)
    for e in run.epochs(1):
        for x, y in run.train(b):
            f = m["f"](x).tanh()
            loss = F.cross_entropy(m["c"](f), y)
            if (run.progress.step + 1) % 5 == 0:
                loss = loss + 0.1 * (f - torch.from_numpy(centres[y.numpy()])).square().mean()
            run.step(loss)
            move(centres, f.detach().numpy(), y.numpy())
    done(run, m)


go(main)
