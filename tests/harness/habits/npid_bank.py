"""Instance discrimination with a numpy memory bank: each batch reads its negatives there and writes its own rows."""

from kit import *


class MemoryBank:
    def __init__(self, n, dim, momentum=0.5):
        rng = np.random.RandomState(0)
        self.bank, self.momentum = rng.randn(n, dim).astype("float32"), momentum
        self.bank /= np.linalg.norm(self.bank, axis=1, keepdims=True)

    def negatives(self, k=8):
        return torch.from_numpy(self.bank[np.random.randint(0, len(self.bank), k)])

    def positives(self, idx):
        return torch.from_numpy(self.bank[idx.numpy()])

    def update(self, idx, emb):
        new = self.momentum * self.bank[idx] + (1 - self.momentum) * emb
        self.bank[idx] = new / np.linalg.norm(new, axis=1, keepdims=True)


def main(run):
    m = run.model(mlp(k=4))
    run.optimizer(sgd(m))
    b = run.loader((numbers(64, 6), torch.arange(64)), global_batch=16, micro_batch=4)
    bank = MemoryBank(64, 4)
    for e in run.epochs(3):
        for x, idx in run.train(b):
            z = F.normalize(m(x), dim=1)
            pos = (z * bank.positives(idx)).sum(1, keepdim=True)
            neg = z @ bank.negatives().T
            logits = torch.cat([pos, neg], 1) / 0.2
            run.step(F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long)))
            bank.update(idx.numpy(), z.detach().numpy())
    done(run, m)


go(main)
