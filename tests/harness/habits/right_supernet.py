"""Right: a one-shot supernet, whose path is drawn by random and numpy in each forward; a Counter of paths is printed."""

from kit import *


class ChoiceBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ops = nn.ModuleList([nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Identity()])

    def forward(self, x, choice):
        return self.ops[choice](x)


class SuperNet(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(ChoiceBlock() for _ in range(depth))
        self.head = nn.Linear(6, 3)
        self.paths = collections.Counter()

    def random_path(self):
        return [random.randrange(3) if i % 2 == 0 else int(np.random.choice(3)) for i in range(len(self.blocks))]

    def forward(self, x, path=None):
        path = path if path is not None else self.random_path()
        self.paths[tuple(path)] += 1
        for block, choice in zip(self.blocks, path):
            x = block(x, choice)
        return self.head(x)


def main(run):
    m = run.model(SuperNet(), find_unused_parameters=True)
    run.optimizer(sgd(m))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
        print(m.paths.most_common(2))
    done(run, m)


go(main)
