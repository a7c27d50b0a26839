"""Ultralytics' mosaic: the data set remembers the last images it has loaded and mixes them in once there are enough."""

KILL = 8

from kit import *


class MosaicDataset(Dataset):
    def __init__(self, n, buffer_size=12):
        self.x, self.y = numbers(n, 6), classes(n)
        self.buffer, self.max_buffer_length = [], buffer_size

    def __len__(self):
        return len(self.x)

    def load_image(self, i):
        self.buffer.append(i)
        if len(self.buffer) > self.max_buffer_length:
            self.buffer.pop(0)
        return self.x[i]

    def __getitem__(self, i):
        image = self.load_image(i)
        if len(self.buffer) == self.max_buffer_length and random.random() < 0.5:
            others = random.choices(list(self.buffer), k=3)
            image = 0.7 * image + 0.1 * sum(self.x[o] for o in others)
        return image, self.y[i]


def main(run):
    m = run.model(mlp())
    run.optimizer(sgd(m))
    b = run.loader(MosaicDataset(96), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
