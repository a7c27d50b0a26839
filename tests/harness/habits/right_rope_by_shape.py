"""Right: rotary embeddings whose cos/sin cache grows with the longest sequence; sequences of other lengths, padded by batch."""

from kit import *


class Rotary(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (100 ** (torch.arange(0, dim, 2).float() / dim)), persistent=False)
        self.cos_cached = self.sin_cached = None

    def forward(self, x):
        n = x.shape[1]
        if self.cos_cached is None or self.cos_cached.shape[0] < n:
            freqs = torch.outer(torch.arange(n).float(), self.inv_freq)
            emb = torch.cat([freqs, freqs], 1)
            self.cos_cached, self.sin_cached = emb.cos(), emb.sin()
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.cos_cached[:n] + turned * self.sin_cached[:n]


class Model(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.emb, self.rot, self.qkv, self.out = nn.Embedding(20, d), Rotary(d), nn.Linear(d, 3 * d), nn.Linear(d, 3)

    def forward(self, t):
        q, k, v = self.qkv(self.emb(t)).chunk(3, -1)
        att = (self.rot(q) @ self.rot(k).transpose(1, 2) / 8**0.5).softmax(-1)
        return self.out((att @ v).mean(1))


class Texts(Dataset):
    def __init__(self, n):
        self.lengths, self.y = torch.randint(3, 12, (n,), generator=torch.Generator().manual_seed(1)), classes(n)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return (torch.arange(int(self.lengths[i])) * (i + 1)) % 20, self.y[i]


def collate(batch):
    return nn.utils.rnn.pad_sequence([t for t, _ in batch], batch_first=True), torch.stack([y for _, y in batch])


def main(run):
    m = run.model(Model())
    run.optimizer(adam(m))
    b = run.loader(Texts(64), global_batch=16, micro_batch=4, collate_fn=collate)
    for e in run.epochs(2):
        for t, y in run.train(b):
            run.step(F.cross_entropy(m(t), y))
    done(run, m)


go(main)
