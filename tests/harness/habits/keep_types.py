"""run.keep of what people have: nan, inf, integer keys, tuples, tensors of several types."""

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    log = {"best": float("inf"), "none": float("nan"), 3: [1, (2, 3)], "flags": torch.tensor([True, False])}
    log["half"] = torch.ones(2, dtype=torch.bfloat16)
    run.keep(log=log)
    for e in run.epochs(3):
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y)):
                log["best"] = min(log["best"], float(run.progress.step))
                log[3][0] += 1
    done(run, m, log=log)


go(main)
