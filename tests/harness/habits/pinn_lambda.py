"""PINN with learning-rate annealing (Wang et al.): every tenth iteration lambda_bc is averaged from gradient statistics."""

KILL = 8

from kit import *


class PINN:
    def __init__(self, run):
        self.run, self.it, self.adaptive_constant_bc, self.beta = run, 0, 1.0, 0.9
        self.net = run.model(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
        self.opt = run.optimizer(adam(self.net))

    def residual(self, x):
        x = x.clone().requires_grad_()
        u = self.net(x)
        (ux,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return ux + u

    def losses(self, x):
        res = self.residual(x).square().mean()
        bc = (self.net(torch.zeros(1, 1)) - 1).square().mean()
        return res, bc

    def train_step(self, x):
        res, bc = self.losses(x)
        loss = res + self.adaptive_constant_bc * bc
        if self.it % 10 == 9:
            w = [p for p in self.net.parameters() if p.dim() == 2]
            gr = torch.autograd.grad(res, w, retain_graph=True)
            gb = torch.autograd.grad(bc, w, retain_graph=True)
            top = max(g.abs().max() for g in gr)
            hat = (top / torch.cat([g.flatten() for g in gb]).abs().mean()).item()
            self.adaptive_constant_bc = hat * (1 - self.beta) + self.beta * self.adaptive_constant_bc
        self.it += 1
        return loss


def main(run):
    p = PINN(run)
    b = run.loader(numbers(128, 1), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x in run.train(b):
            run.step(p.train_step(x))
    done(run, p.net)


go(main)
