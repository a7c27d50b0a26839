"""Right: NCF draws negatives for each positive pair anew at the top of each epoch (ng_sample), with numpy's global generator."""

NO_PLAIN = 1

from kit import *


class NCFData(Dataset):
    def __init__(self, pairs, num_item, num_ng=3):
        self.pairs, self.num_item, self.num_ng = pairs, num_item, num_ng
        self.known = set(map(tuple, pairs))
        self.ng_sample()

    def ng_sample(self):
        negatives = []
        for u, _ in self.pairs:
            for _ in range(self.num_ng):
                j = np.random.randint(self.num_item)
                while (u, j) in self.known:
                    j = np.random.randint(self.num_item)
                negatives.append((u, j))
        self.features = self.pairs + negatives
        self.labels = [1.0] * len(self.pairs) + [0.0] * len(negatives)

    def __len__(self):
        return (self.num_ng + 1) * len(self.pairs)

    def __getitem__(self, i):
        u, j = self.features[i]
        return u, j, self.labels[i]


class NCF(nn.Module):
    def __init__(self):
        super().__init__()
        self.u, self.i, self.out = nn.Embedding(8, 4), nn.Embedding(20, 4), nn.Linear(4, 1)

    def forward(self, u, i):
        return self.out(self.u(u) * self.i(i)).squeeze(1)


def main(run):
    m = run.model(NCF())
    run.optimizer(adam(m))
    ds = NCFData([(u, (3 * u + k) % 20) for u in range(8) for k in range(2)], 20)
    b = run.loader(ds, global_batch=16, micro_batch=4)
    for e in run.epochs(3):
        ds.ng_sample()
        for u, i, label in run.train(b):
            run.step(F.binary_cross_entropy_with_logits(m(u, i), label.float()))
    done(run, m)


go(main)
