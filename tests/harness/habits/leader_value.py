"""Only the leader looks at its last loss (`if run.leads:`), and lowers its label smoothing late in the pass."""

NO_KILL = 1

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    smooth = 0.1
    for e in run.epochs(1):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y, label_smoothing=smooth)
            if run.step(loss) and run.leads and run.progress.step in (5, 8):
                print(f"step {run.progress.step}: {loss.item():.3f}")
                if loss.item() < 5:
                    smooth = 0.0
    done(run, m)


go(main)
