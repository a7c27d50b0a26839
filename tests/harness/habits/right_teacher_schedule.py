"""Right: a mean teacher in run.keep, moved once a step with a momentum from run.progress.step; a rampup of the epoch."""

KILL = 17

from kit import *


class MeanTeacher:
    def __init__(self, run, student):
        self.run, self.student, self.decay, self.weight = run, student, None, None
        self.teacher = copy.deepcopy(student).requires_grad_(False)
        self.updates = 0

    def begin_epoch(self):
        self.weight = min(1.0, 0.2 + 0.4 * self.run.progress.epoch)

    def consistency(self, x):
        with torch.no_grad():
            t = self.teacher(x + 0.2 * torch.randn_like(x)).softmax(1)
        return self.weight * F.mse_loss(self.student(x + 0.2 * torch.randn_like(x)).softmax(1), t)

    @torch.no_grad()
    def update(self):
        self.decay = min(0.99, 1 - 1 / (self.run.progress.step + 1))
        for t, s in zip(self.teacher.parameters(), self.student.parameters()):
            t.mul_(self.decay).add_(s, alpha=1 - self.decay)
        self.updates += 1


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    mt = MeanTeacher(run, m)
    run.keep(teacher=mt.teacher)
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        mt.begin_epoch()
        for x, y in run.train(b):
            if run.step(F.cross_entropy(m(x), y) + mt.consistency(x)):
                mt.update()
        print("updates", mt.updates, "decay", mt.decay)
    done(run, m, teacher=dict(mt.teacher.state_dict()))


go(main)
