"""Right: torchvision's MetricLogger: SmoothedValue with deques, log_every(...) around run.train, update(loss=...)."""

KILL = 8
NO_PLAIN = 1

import datetime

from kit import *


class SmoothedValue:
    def __init__(self, window_size=20, fmt="{median:.4f} ({global_avg:.4f})"):
        self.deque = collections.deque(maxlen=window_size)
        self.total = 0.0
        self.count = 0
        self.fmt = fmt

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    @property
    def median(self):
        return torch.tensor(list(self.deque)).median().item()

    @property
    def global_avg(self):
        return self.total / self.count

    def __str__(self):
        return self.fmt.format(median=self.median, global_avg=self.global_avg)


class MetricLogger:
    def __init__(self, delimiter="  "):
        self.meters = collections.defaultdict(SmoothedValue)
        self.delimiter = delimiter

    def update(self, **kwargs):
        for k, v in kwargs.items():
            if isinstance(v, torch.Tensor):
                v = v.item()
            self.meters[k].update(v)

    def __str__(self):
        return self.delimiter.join(f"{name}: {meter}" for name, meter in self.meters.items())

    def log_every(self, iterable, print_freq, header):
        i = 0
        start_time = time.time()
        end = time.time()
        iter_time = SmoothedValue(fmt="{median:.4f}")
        data_time = SmoothedValue(fmt="{median:.4f}")
        for obj in iterable:
            data_time.update(time.time() - end)
            yield obj
            iter_time.update(time.time() - end)
            if i % print_freq == 0:
                eta = iter_time.global_avg * (len(iterable) - i)
                print(
                    self.delimiter.join(
                        [
                            header,
                            f"[{i}/{len(iterable)}]",
                            f"eta: {datetime.timedelta(seconds=int(eta))}",
                            str(self),
                            f"time: {iter_time} data: {data_time}",
                        ]
                    )
                )
            i += 1
            end = time.time()
        print(f"{header} Total time: {time.time() - start_time:.1f}")


def train_one_epoch(run, model, batches, epoch):
    metric_logger = MetricLogger()
    for x, y in metric_logger.log_every(run.train(batches), 10, f"Epoch: [{epoch}]"):
        out = model(x)
        loss = F.cross_entropy(out, y)
        acc = (out.argmax(1) == y).float().mean()
        run.step(loss)
        metric_logger.update(loss=loss.item(), acc=acc)
    return {k: meter.global_avg for k, meter in metric_logger.meters.items()}


def main(run):
    m = run.model(mlp())
    o = run.optimizer(sgd(m))
    b = run.loader(data(96), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        train_one_epoch(run, m, b, e)
    done(run, m)


go(main)
