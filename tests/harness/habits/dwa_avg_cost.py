"""Multi-task: Dynamic Weight Average as in MTAN's code: avg_cost[epoch] += cost / batches, weights from the third epoch."""

KILL = 14

from kit import *


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.body, s.heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 1)])

    def forward(s, x):
        h = s.body(x).tanh()
        return [head(h) for head in s.heads]


def main(run):
    m = run.model(Net())
    o = run.optimizer(sgd(m, lr=0.05))
    T, epochs = 2.0, 4
    avg_cost, lambda_weight = np.zeros([epochs, 2], dtype=np.float32), np.ones([2, epochs])
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for index in run.epochs(epochs):
        if index > 1:
            w = avg_cost[index - 1] / avg_cost[index - 2]
            lambda_weight[:, index] = 2 * np.exp(w / T) / np.exp(w / T).sum()
        cost = np.zeros(2, dtype=np.float32)
        for x, y in run.train(b):
            a, c = m(x)
            train_loss = [F.cross_entropy(a, y), F.mse_loss(c.squeeze(1), x.sum(1))]
            run.step(sum(float(lambda_weight[i, index]) * train_loss[i] for i in range(2)))
            cost[0], cost[1] = train_loss[0].item(), train_loss[1].item()
            avg_cost[index] += cost / len(b)
    done(run, m)


go(main)
