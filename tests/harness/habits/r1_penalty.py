"""R1 penalty: torch.autograd.grad by the input, create_graph=True, in the loss."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2"]

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            x.requires_grad_(True)
            out = m(x)
            (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            run.step(F.cross_entropy(out, y) + g.square().sum(1).mean())
    done(run, m)


go(main)
