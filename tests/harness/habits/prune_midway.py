"""torch.nn.utils.prune.l1_unstructured at epoch 1: weight becomes weight_orig and a mask."""

STRATEGIES = ["zero", "fsdp", "parameter-server@3"]

from kit import *
from torch.nn.utils import prune


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        if e == 1:
            prune.l1_unstructured(m[0], "weight", 0.3)
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
