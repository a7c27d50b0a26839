"""The memory of keys as docs/script.md writes it: gather, where run.step returned True; kept encoder and queue."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2", "parameter-server@3"]

from kit import *


def main(run):
    n = mlp(k=4)
    k = copy.deepcopy(n).requires_grad_(False)
    m = run.model(n)
    queue = F.normalize(torch.randn(16, 4), dim=1)
    run.keep(queue=queue, k=k)
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    found = []
    for e in run.epochs(3):
        for x, y in run.train(b):
            with torch.no_grad():
                keys = F.normalize(k(x + 0.1 * torch.randn_like(x)), dim=1)
            if run.counts:
                found.append(keys)
            q = F.normalize(m(x), dim=1)
            if run.step(
                F.cross_entropy(
                    torch.cat([(q * keys).sum(1, keepdim=True), q @ queue.T.clone()], 1) / 0.2,
                    torch.zeros(len(x), dtype=torch.long),
                )
            ):
                new = torch.cat([t for part in run.gather(found) for t in part])
                queue.copy_(torch.cat([queue, new])[-len(queue) :])
                found.clear()
                with torch.no_grad():
                    for p, t in zip(m.parameters(), k.parameters()):
                        t.lerp_(p.full_tensor() if hasattr(p, "full_tensor") else p, 0.1)
    done(run, m, queue=queue)


go(main)
