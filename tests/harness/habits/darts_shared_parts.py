"""Right: DARTS, first order: weights by train batches, architecture parameters by validation batches, two optimizers."""

from kit import *


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.ops = nn.ModuleList([nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Identity()])
        self.head = nn.Linear(6, 3)
        self.alphas = nn.Parameter(1e-3 * torch.randn(3))

    def forward(self, x):
        w = self.alphas.softmax(0)
        return self.head(sum(a * op(x) for a, op in zip(w, self.ops)))

    def genotype(self):
        return int(self.alphas.argmax())


def main(run):
    m = run.model(Cell())
    weights = [p for n, p in m.named_parameters() if n != "alphas"]
    w_opt = run.optimizer(torch.optim.SGD(weights, 0.1, momentum=0.9))
    a_opt = run.optimizer(torch.optim.Adam([m.alphas], 0.01))
    train = run.loader(data(64), global_batch=16, micro_batch=4)
    valid = run.loader((numbers(64, 6, seed=8), classes(64, seed=9)), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for (x, y), (xv, yv) in run.train(train, valid):
            run.step(F.cross_entropy(m(xv), yv), optimizer=a_opt)
            run.step(F.cross_entropy(m(x), y), optimizer=w_opt)
        run.say(f"genotype {m.genotype()}, alphas {m.alphas.softmax(0).tolist()}")
    done(run, m)


go(main)
