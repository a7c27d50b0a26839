"""LayerDrop: blocks of a ModuleList are left out at random in training, as in wav2vec 2."""

STRATEGIES = ["zero", "fsdp", "zero:stage=2"]

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.a, s.b = nn.Linear(6, 8), nn.Linear(8, 3)
        s.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(s, x):
        x = s.a(x)
        for block in s.blocks:
            if not s.training or np.random.random() > 0.3:
                x = x + block(x).tanh()
        return s.b(x)


def main(run):
    m = run.model(Net(), find_unused_parameters=True)
    o = run.optimizer(adam(m))
    b = run.loader(data(), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            run.step(F.cross_entropy(m(x), y))
    done(run, m)


go(main)
