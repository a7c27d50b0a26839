"""AutoClip: norms of gradients are appended to a list, and each step is clipped to a percentile of them; not kept."""

STRATEGIES = ["zero", "fsdp"]

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    history = []
    for e in run.epochs(2):
        for x, y in run.train(b):
            if run.backward(F.cross_entropy(m(x), y)):
                norm = torch.nn.utils.clip_grad_norm_(m.parameters(), float("inf"))
                history.append(float(norm))
                torch.nn.utils.clip_grad_norm_(m.parameters(), float(np.percentile(history, 10)))
            run.update()
    done(run, m)


go(main)
