"""optimizer.zero_grad() and model.zero_grad() stay in the body, before and after run.step."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "hsdp:shard=2@4", "parameter-server@3", "hybrid@3"]

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=2)
    for e in run.epochs(2):
        for x, y in run.train(b):
            o.zero_grad()
            l = F.cross_entropy(m(x), y)
            m.zero_grad(set_to_none=False)
            run.step(l)
            o.zero_grad()
    done(run, m)


go(main)
