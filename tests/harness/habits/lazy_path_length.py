"""StyleGAN's lazy path-length penalty: every fourth step, with a running pl_mean in the loss object."""

KILL = 8

from kit import *


class Loss:
    def __init__(s, net):
        s.net, s.pl_mean = net, torch.zeros(())

    def path(s, z):
        z = z.detach().requires_grad_()
        out = s.net(z)
        (g,) = torch.autograd.grad((out * torch.randn_like(out)).sum(), z, create_graph=True)
        length = g.square().sum(1).sqrt()
        mean = s.pl_mean.lerp(length.mean(), 0.1)
        s.pl_mean = mean.detach()
        return (length - mean).square().mean()


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    loss_fn = Loss(m)
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, y in run.train(b):
            loss = F.cross_entropy(m(x), y)
            if (run.progress.step + 1) % 4 == 0:
                loss = loss + loss_fn.path(x)
            run.step(loss)
    done(run, m)


go(main)
