"""Morvan's DQN: agent.learn() counts itself and copies eval_net into target_net every 20 calls; both are models."""

KILL = 8

from kit import *


class DQN:
    def __init__(self, run):
        self.run = run
        self.eval_net = run.model(mlp(k=2))
        self.target_net = run.model(copy.deepcopy(self.eval_net).requires_grad_(False))
        self.optimizer = run.optimizer(adam(self.eval_net))
        self.learn_step_counter = 0

    def learn(self, s, a, r, s_):
        if self.learn_step_counter % 20 == 0:
            self.target_net.load_state_dict(self.eval_net.state_dict())
        self.learn_step_counter += 1
        q_eval = self.eval_net(s).gather(1, a)
        q_target = r + 0.9 * self.target_net(s_).detach().max(1, keepdim=True)[0]
        self.run.step(F.mse_loss(q_eval, q_target))


def main(run):
    agent = DQN(run)
    n = 128
    b = run.loader(
        (numbers(n, 6), classes(n, 2)[:, None], numbers(n, 1, seed=8), numbers(n, 6, seed=9)),
        global_batch=16,
        micro_batch=4,
    )
    for e in run.epochs(2):
        for s, a, r, s_ in run.train(b):
            agent.learn(s, a, r, s_)
    done(run, agent.eval_net, agent.target_net)


go(main)
