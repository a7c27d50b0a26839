"""Free adversarial training: a perturbation for each place in the batch, a tensor of the script, moved by each gradient."""

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    noise = torch.zeros(4, 6)
    for e in run.epochs(2):
        for x, y in run.train(b):
            d = noise[: len(x)].clone().requires_grad_(True)
            loss = F.cross_entropy(m(x + d), y)
            (g,) = torch.autograd.grad(loss, d, retain_graph=True)
            noise[: len(x)] = (noise[: len(x)] + 0.1 * g.sign()).clamp(-0.3, 0.3)
            run.step(loss)
    done(run, m)


go(main)
