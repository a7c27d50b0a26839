"""Scripts with faults that were planted, and the same without; a line that a finding must name has a mark."""

RAW = """
import os
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Slow(Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.full((8,), index / 200), int(torch.tensor(index % 3).item())


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train, test = Slow(), TensorDataset(torch.rand(101, 8), torch.randint(3, (101,)))
    loader = DataLoader(train, 8, sampler=DistributedSampler(train))
    held_out = DataLoader(test, 16, sampler=DistributedSampler(test, shuffle=False))
    for epoch in range(5):
        model.train()
        running = 0.0
        for x, y in loader:  # order
            loss = nn.functional.cross_entropy(model(x), y)
            loss = loss / world_size  # mean
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item()  # waits
            print("loss", loss)  # prints
        model.eval()
        right = 0
        with torch.no_grad():
            for x, y in held_out:  # evaluation
                right += (model(x).argmax(1) == y).sum().item()
        torch.save(model.state_dict(), "model.pt")  # saves
        model.load_state_dict(torch.load("model.pt"))


if __name__ == "__main__":
    main()
"""

CLEAN = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = TensorDataset(torch.rand(400, 8), torch.randint(3, (400,)))
    test = TensorDataset(torch.rand(101, 8), torch.randint(3, (101,)))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 8, sampler=sampler)
    held_out = DataLoader(Subset(test, range(rank, len(test), world_size)), 16)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for step, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if step % 20 == 0 and rank == 0:
                print(loss.item())
        right = torch.zeros(())
        with torch.no_grad():
            for x, y in held_out:
                right += (model(x).argmax(1) == y).sum()
        for value in (right, total):
            dist.all_reduce(value)
        total /= world_size
        if rank == 0:
            torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

#: Fails in its second step.
UNUSED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.head = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        return self.used(x)


dist.init_process_group("gloo")
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(30):
    model(torch.rand(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

RUN = """
import time
import torch
from torch import nn
from torch.nn import functional as F
import lockstep


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 480

    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.full((8,), index / 480), int(torch.tensor(index % 3).item())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.extra = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        return self.used(x)


with lockstep.Run(seed=0, checkpoint="saved") as run:
    model = run.model(Net(), find_unused_parameters=True)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = run.loader(Slow(), global_batch=20, micro_batch=8, workers=0)
    for epoch in run.epochs(10):
        for x, y in run.train(batches):
            loss = F.cross_entropy(model(x), y)
            run.step(loss)
            print(f"{loss:.3f}")  # waits
            if run.progress.step % 20 == 0:
                print(loss.item())
        print(run.metrics["loss"], loss.item())
"""


def line_of(script, mark):
    """The number of the line with this mark."""
    return next(number for number, line in enumerate(script.splitlines(), 1) if line.endswith(f"# {mark}"))
