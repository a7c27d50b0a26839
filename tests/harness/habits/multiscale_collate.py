"""YOLO multi-scale training: the data set's collate_fn counts batches and picks a new image size every ten of them."""

KILL = 8

from kit import *


class ListDataset(Dataset):
    def __init__(self, n, img_size=8):
        self.x, self.y = numbers(n, 1, 8, 8), classes(n)
        self.img_size, self.min_size, self.max_size = img_size, img_size - 2, img_size + 2
        self.batch_count = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]

    def collate_fn(self, batch):
        self.batch_count += 1
        imgs, targets = zip(*batch)
        if self.batch_count % 10 == 0:
            self.img_size = random.choice(range(self.min_size, self.max_size + 1))
        imgs = torch.stack([F.interpolate(im[None], size=self.img_size)[0] for im in imgs])
        return imgs, torch.stack(targets)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(F.relu(self.conv(x)).mean((2, 3)))


def main(run):
    m = run.model(Net())
    run.optimizer(sgd(m))
    ds = ListDataset(96)
    b = run.loader(ds, global_batch=16, micro_batch=4, collate_fn=ds.collate_fn)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
