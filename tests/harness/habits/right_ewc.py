"""Right: EWC. After each task every rank computes Fisher and anchor over the loader; both are kept tensors."""

KILL = 8

from kit import *


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    fisher = {n.replace(".", "_"): torch.zeros_like(p) for n, p in m.named_parameters()}
    anchor = {n.replace(".", "_"): torch.zeros_like(p) for n, p in m.named_parameters()}
    run.keep(fisher=fisher, anchor=anchor)
    tasks = [
        run.loader((numbers(64, 6, seed=t), classes(64, seed=t + 9)), global_batch=16, micro_batch=4) for t in range(3)
    ]
    for e in run.epochs(3):
        b = tasks[e]
        for x, y in run.train(b):
            penalty = sum(
                (fisher[n.replace(".", "_")] * (p - anchor[n.replace(".", "_")]).square()).sum()
                for n, p in m.named_parameters()
            )
            run.step(F.cross_entropy(m(x), y) + 5 * penalty)
        for x, y in DataLoader(TensorDataset(numbers(64, 6, seed=e), classes(64, seed=e + 9)), batch_size=16):
            grads = torch.autograd.grad(F.cross_entropy(m(x), y), list(m.parameters()))
            for (n, p), g in zip(m.named_parameters(), grads):
                fisher[n.replace(".", "_")] += g.square() / 4
        for n, p in m.named_parameters():
            anchor[n.replace(".", "_")].copy_(p.detach())
    done(run, m)


go(main)
