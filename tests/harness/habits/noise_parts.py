"""All weights scaled once a step to a fixed global norm (spherical weights)."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "parameter-server@3", "pipeline"]

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            if run.step(F.cross_entropy, x, y):
                with torch.no_grad():
                    norm = torch.stack([p.norm() for p in m.parameters()]).norm()
                    for p in m.parameters():
                        p.mul_(2 / norm)
    done(run, m)


go(main)
