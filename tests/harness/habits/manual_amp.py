"""torch.autocast around the forward pass by hand, GradScaler(enabled=False) left in the script."""

STRATEGIES = ["zero", "fsdp"]
TOL = 0.02

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for e in run.epochs(2):
        for x, y in run.train(b):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(m(x), y)
            run.step(scaler.scale(loss))
    done(run, m)


go(main)
