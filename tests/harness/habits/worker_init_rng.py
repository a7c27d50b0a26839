"""PyTorch's recipe: worker_init_fn gives the data set a generator seeded by torch.initial_seed()."""

from kit import *


class Noisy(Dataset):
    def __init__(s):
        s.x, s.y = data()
        s.rng = np.random.default_rng(0)

    def __len__(s):
        return 40

    def __getitem__(s, i):
        return s.x[i] + torch.from_numpy(s.rng.normal(0, 0.3, 6)).float(), s.y[i]


def init(worker):
    torch.utils.data.get_worker_info().dataset.rng = np.random.default_rng(torch.initial_seed() % 2**32)


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(Noisy(), global_batch=16, micro_batch=4, workers=2, worker_init_fn=init)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
