"""REINFORCE with rewards normalised by a running mean and variance (Welford, of a helper module), from 80 rewards on."""

KILL = 8

from kit import *
from labs.meters import Welford


class Agent:
    def __init__(s, policy):
        s.policy, s.rewards = policy, Welford()

    def loss(s, x):
        pi = torch.distributions.Categorical(logits=s.policy(x))
        a = pi.sample()
        r = (a == x[:, :3].argmax(1)).float() + 0.1 * x[:, 3]
        s.rewards.update(r)
        if s.rewards.count > 80:
            r = s.rewards(r)
        return -(pi.log_prob(a) * r).mean()


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    agent = Agent(m)
    b = run.loader(data(192), global_batch=16, micro_batch=4)
    for e in run.epochs(1):
        for x, _ in run.train(b):
            run.step(agent.loss(x))
    done(run, m)


go(main)
