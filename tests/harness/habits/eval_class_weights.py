"""After each evaluation the class weights follow the validation errors that this process has counted; second epoch."""

KILL = 17

from kit import *


class Experiment:
    def __init__(self, run):
        self.run = run
        self.model = run.model(mlp())
        self.opt = run.optimizer(sgd(self.model))
        self.train_loader = run.loader(data(192), global_batch=16, micro_batch=4)
        self.val_loader = run.loader(
            (numbers(48, 6, seed=8), classes(48, seed=9)), global_batch=16, micro_batch=4, shuffle=False
        )
        self.class_weights = torch.ones(3)

    def train_epoch(self):
        for x, y in self.run.train(self.train_loader):
            ce = F.cross_entropy(self.model(x), y, reduction="none")
            self.run.step((self.class_weights[y] * ce).mean())

    def validate(self):
        errors = torch.zeros(3)
        for x, y in self.run.evaluate(self.val_loader):
            wrong = self.model(x).argmax(1) != y
            errors += torch.bincount(y[wrong], minlength=3)
        self.class_weights = 0.5 + errors / errors.sum().clamp(min=1)


def main(run):
    t = Experiment(run)
    for e in run.epochs(2):
        t.train_epoch()
        t.validate()
    done(run, t.model)


go(main)
