"""A small DQN with run.epochs: agent.eps *= 0.9 each time it acts, in an object that is not kept; the buffer is."""

NO_PLAIN = 1
KILL = 8

from kit import *


class Agent:
    def __init__(s, net):
        s.net, s.eps = net, 1.0

    def act(s, state):
        s.eps = max(0.05, s.eps * 0.97)
        if random.random() < s.eps:
            return random.randrange(2)
        with torch.no_grad():
            return int(s.net(state).argmax())


def main(run):
    m = run.model(mlp(k=2))
    o = run.optimizer(adam(m))
    s, r, n = torch.zeros(64, 6), torch.zeros(64, 2), torch.zeros((), dtype=torch.long)
    run.keep(s=s, r=r, n=n)
    agent = Agent(m)
    b = run.loader(
        (s, r), order=lambda e, g: torch.randint(max(1, int(n)), (16,), generator=g), global_batch=16, micro_batch=4
    )
    for e in run.epochs(12):
        for _ in range(4):
            x = torch.randn(6)
            a, i = agent.act(x), int(n) % 64
            s[i], r[i, 0], r[i, 1] = x, x[a], a
            n += 1
        for x, y in run.train(b):
            q = m(x).gather(1, y[:, 1:].long()).squeeze(1)
            run.step(F.smooth_l1_loss(q, y[:, 0]))
    done(run, m, s=s, r=r)


go(main, seed=3)
