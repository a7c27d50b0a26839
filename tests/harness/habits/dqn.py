"""DQN: replay buffer of kept tensors, epsilon by progress, target network by load_state_dict every 3 steps, kept."""

NO_PLAIN = 1
STRATEGIES = ["zero"]

from kit import *


def main(run):
    m = run.model(mlp(k=2))
    t = copy.deepcopy(m)
    s, r, n = torch.zeros(64, 6), torch.zeros(64, 2), torch.zeros((), dtype=torch.long)
    run.keep(t=t, s=s, r=r, n=n)
    o = run.optimizer(adam(m))
    b = run.loader(
        (s, r), order=lambda e, g: torch.randint(max(1, int(n)), (16,), generator=g), global_batch=16, micro_batch=4
    )
    for step in run.steps(14, every=1):
        for _ in range(3):
            x = torch.randn(6)
            a = int(m(x).argmax()) if random.random() > 0.3 else random.randrange(2)
            i = int(n) % 64
            s[i] = x
            r[i, 0] = x[a]
            r[i, 1] = a
            n += 1
        for x, y in run.train(b):
            q = m(x).gather(1, y[:, 1:].long()).squeeze(1)
            with torch.no_grad():
                goal = y[:, 0] + 0.9 * t(x).max(1).values
            if run.step(F.smooth_l1_loss(q, goal)) and run.progress.step % 3 == 0:
                t.load_state_dict(m.state_dict())
    done(run, m, t=t.state_dict(), s=s)


go(main)
