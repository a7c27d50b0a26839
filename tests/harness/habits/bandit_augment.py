"""Wrong: a UCB bandit (numpy record array) chooses the augmentation; 24 bodies of exploration with none of it first."""

KILL = 8

from kit import *


class Bandit:
    def __init__(s, arms=3):
        s.table = np.zeros(arms, dtype=[("n", "i8"), ("r", "f8")])

    def choose(s):
        n = s.table["n"].sum()
        if n < 24:
            return 0
        return int(np.argmax(s.table["r"] / (s.table["n"] + 1) + np.sqrt(2 * np.log(n) / (s.table["n"] + 1))))

    def reward(s, arm, r):
        s.table[arm]["n"] += 1
        s.table[arm]["r"] += r


AUGMENT = [lambda x: x, lambda x: x + 0.2 * torch.randn_like(x), lambda x: x * (torch.rand_like(x) > 0.2)]


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(384), global_batch=16, micro_batch=4)
    bandit = Bandit()
    for e in run.epochs(1):
        for x, y in run.train(b):
            arm = bandit.choose()
            loss = F.cross_entropy(m(AUGMENT[arm](x)), y)
            bandit.reward(arm, -loss.item())
            run.step(loss)
    done(run, m)


go(main)
