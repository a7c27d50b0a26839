"""A schedule in a NumPy array (MAE, DINO): group['lr'] = schedule[step]."""

STRATEGIES = ["zero", "fsdp"]

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    schedule = np.linspace(0.1, 0.01, 9).astype(np.float32)
    decay = np.linspace(0.0, 0.1, 9)
    for e in run.epochs(3):
        for x, y in run.train(b):
            for g in o.param_groups:
                g["lr"], g["weight_decay"], g["name"] = schedule[run.progress.step], decay[run.progress.step], "all"
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
