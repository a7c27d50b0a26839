"""MoCo as its authors wrote it: the queue and queue_ptr are buffers of the model, the key encoder moves in forward."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2"]

from kit import *


class MoCo(nn.Module):
    def __init__(s):
        super().__init__()
        s.q = mlp(k=4)
        s.k = copy.deepcopy(s.q).requires_grad_(False)
        s.register_buffer("queue", F.normalize(torch.randn(4, 32), dim=0))
        s.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(s, a, b):
        q = F.normalize(s.q(a), dim=1)
        with torch.no_grad():
            for pq, pk in zip(s.q.parameters(), s.k.parameters()):
                pk.mul_(0.99).add_(pq, alpha=0.01)
            k = F.normalize(s.k(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ s.queue.clone().detach()], 1) / 0.07
        ptr = int(s.queue_ptr)
        s.queue[:, ptr : ptr + len(k)] = k.T
        s.queue_ptr[0] = (ptr + len(k)) % 32
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


def main(run):
    m = run.model(MoCo())
    o = run.optimizer(sgd(m))
    b = run.loader(data(), global_batch=16, micro_batch=2)
    for e in run.epochs(2):
        for x, _ in run.train(b):
            run.step(m(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)))
    done(run, m)


go(main)
