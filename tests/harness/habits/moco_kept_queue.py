"""MoCo with a kept queue and a pointer, written in the body by each micro-batch."""

from kit import *


def main(run):
    m = run.model(mlp(k=4))
    k = copy.deepcopy(m).requires_grad_(False)
    o = run.optimizer(sgd(m))
    queue, ptr = F.normalize(torch.randn(32, 4), dim=1), torch.zeros((), dtype=torch.long)
    run.keep(queue=queue, ptr=ptr, k=k)
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            with torch.no_grad():
                keys = F.normalize(k(x + 0.1 * torch.randn_like(x)), dim=1)
            q = F.normalize(m(x), dim=1)
            logits = torch.cat([(q * keys).sum(1, keepdim=True), q @ queue.clone().T], 1) / 0.2
            queue[int(ptr) : int(ptr) + len(keys)] = keys
            ptr.copy_((ptr + len(keys)) % 32)
            run.step(F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long)))
    done(run, m)


go(main)
