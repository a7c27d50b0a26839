"""The scripts that the campaign trains: one with `lockstep.Run`, and what one writes for torchrun."""

SAVE_EVERY = 10  #: steps
STEPS_IN_EPOCH = 20

#: Both scripts append a line for each step that is done to the file "steps", and are slow until there is a file "go".
_COMMON = """
import ctypes, hashlib, os, signal, socket, sys, threading, time
import torch
from torch import nn
from torch.nn import functional as F

EPOCHS, WORKERS, SLOW_S = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
inputs = torch.randn(480, 12)
samples = list(zip(inputs, (inputs[:, 0] * inputs[:, 1] > 0).long()))
steps = os.open("steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
generation = f"{socket.gethostname()}-{os.getpid()}-{time.monotonic():.3f}"
gone = threading.Lock()
leaves = ""
spoils = 1.0
here = os.getcwd()


def at(place, rank):
    # What a process can only do to itself: a file with the place and its rank holds the code.
    try:
        os.rename(f"{here}/do-{place}-{rank}", f"{here}/doing-{rank}")
    except OSError:
        return
    with open(f"{here}/doing-{rank}") as file:
        exec(file.read(), globals())


def done(step, rank, ranks):
    if rank == 0:
        os.write(steps, f"{time.monotonic():.3f} {generation} {ranks} {step}\\n".encode())
    at("step", rank)
    if not os.path.exists(f"{here}/go"):
        time.sleep(SLOW_S)
"""
#: `at` names each place in which a fault may strike.
TRAIN = (
    _COMMON
    + """
import lockstep

RANK = os.environ.get("RANK", "0")


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        at("data set", RANK)
        return samples[index]


def collate(parts):
    at("collate", RANK)
    return torch.utils.data.default_collate(parts)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        at("backward", RANK)
        return gradient * spoils


class Network(nn.Sequential):
    def forward(self, x):
        at("forward" if self.training else "evaluation", RANK)
        return Backward.apply(super().forward(x))


class Adam(torch.optim.Adam):
    def step(self, closure=None):
        at("update", RANK)
        return super().step(closure)


class Halving(torch.optim.lr_scheduler.StepLR):
    def step(self, epoch=None):
        at("scheduler", RANK)
        super().step(epoch)


def train():
    for epoch in run.epochs(EPOCHS):
        for x, y in run.train(batches):
            if run.step(F.cross_entropy(model(x), y)):
                done(run.progress.step, run.rank, run.world_size)
            if leaves == "break":
                break
            if leaves == "return":
                return
        for x, y in run.evaluate(held_out):
            run.measure(right=model(x).argmax(1) == y)
        run.log(epoch=epoch)


with lockstep.Run(seed=3) as run:
    network = Network(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    model = run.model(network)
    optimizer = run.optimizer(Adam(model.parameters(), lr=0.01))
    scheduler = run.scheduler(Halving(optimizer, 100, 0.9))
    batches = run.loader(Samples(), global_batch=24, micro_batch=4, workers=WORKERS, collate_fn=collate)
    held_out = run.loader(samples[:48], global_batch=24, shuffle=False, workers=0)
    train()
    digest = hashlib.sha256()
    whole = run.settings.values.strategy == "ddp"  # under zero each rank has a part of the optimizer's state
    for value in [*model.state_dict().values(), *(optimizer.state_dict()["state"][0].values() if whole else ())]:
        digest.update(value.numpy().tobytes())
    open(f"{here}/digest-{run.rank}", "w").write(digest.hexdigest())
    at("end", RANK)
"""
)
#: What one writes for torchrun: DistributedDataParallel, a sampler, and a checkpoint that is renamed when it is whole.
PLAIN = (
    _COMMON
    + f"""
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
sampler = DistributedSampler(samples)
loader = DataLoader(samples, batch_size=24 // ranks, sampler=sampler, num_workers=WORKERS, drop_last=True)
step = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < EPOCHS * {STEPS_IN_EPOCH}:
    sampler.set_epoch(step // {STEPS_IN_EPOCH})
    for number, (x, y) in enumerate(loader):
        if number < step % {STEPS_IN_EPOCH} or step >= EPOCHS * {STEPS_IN_EPOCH}:
            continue
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % {SAVE_EVERY} == 0:
            state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step)
            torch.save(state, "checkpoint.new")
            os.replace("checkpoint.new", "checkpoint.pt")
        done(step, rank, ranks)
dist.destroy_process_group()
"""
)
