"""PCGrad: gradients of two tasks by torch.autograd.grad, conflicting parts projected out in a random order of tasks."""

STRATEGIES = ["zero", "fsdp"]

from kit import *


def main(run):
    m = run.model(mlp(k=6))
    o = run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            out = m(x)
            losses = [F.cross_entropy(out[:, :3], y), F.mse_loss(out[:, 3:], x[:, :3])]
            ps = list(m.parameters())
            grads = [torch.autograd.grad(l, ps, retain_graph=True) for l in losses]
            flat = [torch.cat([g.flatten() for g in gs]) for gs in grads]
            order = [0, 1]
            random.shuffle(order)
            new = [f.clone() for f in flat]
            for i in order:
                dot = new[i] @ flat[1 - i]
                if dot < 0:
                    new[i] -= dot / flat[1 - i].norm() ** 2 * flat[1 - i]
            total = (new[0] + new[1]).split([p.numel() for p in ps])
            run.step(sum((p * g.view_as(p)).sum() for p, g in zip(ps, total)))
    done(run, m)


go(main)
