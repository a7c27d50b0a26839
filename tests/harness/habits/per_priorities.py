"""Prioritized experience replay: priorities in a numpy array of the buffer object, set once a step from all ranks' TD errors."""

NO_PLAIN = 1

from kit import *


class PrioritizedBuffer:
    def __init__(self, n, alpha=0.6):
        self.states, self.rewards = numbers(n, 6), numbers(n, 1, seed=8)
        self.priorities, self.alpha = np.ones(n), alpha

    def sample(self, epoch, generator):
        p = torch.from_numpy(self.priorities) ** self.alpha
        return torch.multinomial(p, 16, generator=generator)

    def update_priorities(self, indices, errors):
        self.priorities[indices] = np.abs(errors) + 1e-5


def main(run):
    q = run.model(mlp(k=1))
    run.optimizer(adam(q))
    buffer = PrioritizedBuffer(48)
    b = run.loader(
        (buffer.states, buffer.rewards, torch.arange(48)), order=buffer.sample, global_batch=16, micro_batch=4
    )
    found = []
    for step in run.steps(12, every=1):
        for s, r, i in run.train(b):
            td = q(s) - r
            if run.counts:
                found.append((i.numpy(), td.detach().squeeze(1).numpy()))
            if run.step(td.square().mean()):
                for part in run.gather(found):
                    for indices, errors in part:
                        buffer.update_priorities(indices, errors)
                found.clear()
    done(run, q)


go(main)
