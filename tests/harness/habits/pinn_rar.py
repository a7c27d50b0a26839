"""PINN with residual-based refinement: after each epoch the 8 worst points of a fixed pool join the collocation points."""

from kit import *


def residual(net, x):
    x = x.clone().requires_grad_()
    u = net(x)
    (ux,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return ux + u - x.cos()


def main(run):
    net = run.model(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
    run.optimizer(adam(net))
    points, pool = numbers(32, 1), numbers(64, 1, seed=9)
    for e in run.epochs(3):
        b = run.loader((points,), global_batch=16, micro_batch=4)
        for (x,) in run.train(b):
            run.step(residual(net, x).square().mean() + (net(torch.zeros(1, 1)) - 1).square().mean())
        worst = residual(net, pool).abs().squeeze(1).topk(8).indices
        points = torch.cat([points, pool[worst]])
    done(run, net)


go(main)
