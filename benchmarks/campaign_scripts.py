"""The scripts that the campaign trains: one with `lockstep.Run`, and what one writes for torchrun."""

SAVE_EVERY = 10  #: steps
STEPS_IN_EPOCH = 20

#: Both scripts append a line for each step that is done to the file "steps", and are slow until there is a file "go".
_COMMON = """
import hashlib, os, socket, sys, threading, time
import torch
from torch import nn
from torch.nn import functional as F

EPOCHS, WORKERS, SLOW_S = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
inputs = torch.randn(480, 12)
samples = list(zip(inputs, (inputs[:, 0] * inputs[:, 1] > 0).long()))
steps = os.open("steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
generation = f"{socket.gethostname()}-{os.getpid()}-{time.time():.3f}"
gone = threading.Lock()


def network():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))


def done(step, rank, ranks):
    if rank == 0:
        os.write(steps, f"{time.time():.3f} {generation} {ranks} {step}\\n".encode())
    try:
        # What a process can only do to itself: a file with its name is left for this rank.
        os.rename(f"do-{rank}", f"doing-{rank}")
    except OSError:
        pass
    else:
        fault(open(f"doing-{rank}").read())
    if not os.path.exists("go"):
        time.sleep(SLOW_S)


def fault(what):
    if what == "raise":
        raise ValueError("bad label 255")
    if what == "exit":
        os._exit(5)
    if what == "sys.exit":
        sys.exit(3)
    if what == "abort":
        os.abort()
    if what == "allocate":
        torch.empty(2**50)
    if what == "loop":
        while True:
            pass
    if what == "deadlock":
        gone.acquire()
        gone.acquire()
"""
TRAIN = (
    _COMMON
    + """
import lockstep

with lockstep.Run(seed=3) as run:
    model = run.model(network())
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    batches = run.loader(samples, global_batch=24, micro_batch=4, workers=WORKERS)
    for epoch in run.epochs(EPOCHS):
        for x, y in run.train(batches):
            if run.step(F.cross_entropy(model(x), y)):
                done(run.progress.step, run.rank, run.world_size)
    digest = hashlib.sha256()
    whole = run.settings.values.strategy == "ddp"  # under zero each rank has a part of the optimizer's state
    for value in [*model.state_dict().values(), *(optimizer.state_dict()["state"][0].values() if whole else ())]:
        digest.update(value.numpy().tobytes())
    open(f"digest-{run.rank}", "w").write(digest.hexdigest())
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
model = DistributedDataParallel(network())
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
