"""PPO: rollouts made outside of run.train into kept tensors, alike on all ranks; two passes over them in each iteration."""

STRATEGIES = ["zero"]
NO_PLAIN = 1

from kit import *


class Env:
    def reset(s):
        s.x = torch.randn(4)
        return s.x

    def step(s, a):
        s.x = 0.9 * s.x + 0.1 * torch.randn(4) + (0.1 if a else -0.1)
        return s.x, -float(s.x.abs().sum())


def main(run):
    m = run.model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    o = run.optimizer(adam(m))
    states, actions, rewards, old = torch.zeros(32, 4), torch.zeros(32).long(), torch.zeros(32), torch.zeros(32)
    run.keep(states=states, actions=actions, rewards=rewards, old=old)
    b = run.loader((states, actions, rewards, old), global_batch=16, micro_batch=4)
    env = Env()
    for it in run.epochs(4):
        s = env.reset()
        with torch.no_grad():
            for t in range(32):
                p = torch.distributions.Categorical(logits=m(s))
                a = p.sample()
                states[t], actions[t], old[t] = s, a, p.log_prob(a)
                s, rewards[t] = env.step(int(a))
        for k in range(2):
            for s, a, r, l in run.train(b):
                p = torch.distributions.Categorical(logits=m(s))
                ratio = (p.log_prob(a) - l).exp()
                adv = (r - r.mean()) / (r.std() + 1e-5)
                run.step(-torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean() - 0.01 * p.entropy().mean())
    done(run, m)


go(main)
