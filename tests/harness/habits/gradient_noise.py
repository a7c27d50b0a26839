"""Gradient noise (Neelakantan, DP-SGD): p.grad.add_(randn_like) between run.backward and run.update."""

NO_PLAIN = 1
STRATEGIES = ["zero", "fsdp", "zero:stage=2", "hsdp:shard=2@4", "parameter-server@3"]

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=2)
    for e in run.epochs(2):
        for x, y in run.train(b):
            if run.backward(F.cross_entropy(m(x), y)):
                for p in m.parameters():
                    p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
            run.update()
    done(run, m)


go(main)
