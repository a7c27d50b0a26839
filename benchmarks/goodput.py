"""How many steps a second are of use where ranks are killed, beside torchrun with checkpoints written by hand.

python benchmarks/goodput.py                       about twelve minutes
python benchmarks/goodput.py --seconds 45 --kill-every 15 --every none 10

The same model and the same samples a step. Every so many seconds one rank, drawn by a seeded generator, gets SIGKILL,
and the launcher starts all of them again. A step is of use if the training did not have to make it again: what counts
is the step that it has come to when the time is over, by the seconds since its first step. Beside each way that is
killed runs the same way undisturbed; the ways take turns, in an order that changes from round to round.

    ratio    steps a second of the killed run by those of the undisturbed one: two runs, minutes apart, on a machine
             whose speed may change in between
    within   the same from the killed run alone: the steps from its first kill on, by those that it would have made at
             the rate of the seconds before each kill (half of the time between two kills)
    pause    the time from a kill to the first step of the ranks that were started then

    lockstep    `lockstep run --max-restarts`, which goes on from the last finished step
    torchrun    `torchrun --max-restarts`; the script saves with torch.distributed.checkpoint, into a directory that
                gets its name when it is whole, and goes on from the newest one
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import lockstep

MODEL = """
import os, sys, time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

place, every = sys.argv[1], sys.argv[2]
WIDTH, BATCH = 512, 256
torch.set_num_threads(1)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def made(step, reached):
    os.pwrite(reached, b"%12d" % step, 0)


reached = os.open(f"{place}/reached", os.O_RDWR | os.O_CREAT)
"""
LOCKSTEP = (
    MODEL
    + """
import lockstep

with lockstep.Run(seed=0, save_every=None if every == "none" else f"{every} s") as run:
    pids = run.gather(os.getpid())
    if run.leads:
        with open(f"{place}/pids", "w") as file:
            file.write(" ".join(map(str, pids)))
    model = run.model(build())
    run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    data = TensorDataset(torch.randn(BATCH * 200, 64), torch.randint(0, 10, (BATCH * 200,)))
    batches = run.loader(data, global_batch=BATCH, micro_batch=BATCH // run.world_size, workers=0)
    for epoch in run.epochs(10**6):
        for x, y in run.train(batches):
            if run.step(F.cross_entropy(model(x), y)) and run.leads:
                made(run.progress.step, reached)
"""
)
TORCHRUN = (
    MODEL
    + """
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
pids = [None] * world
dist.all_gather_object(pids, os.getpid())
if rank == 0:
    with open(f"{place}/pids", "w") as file:
        file.write(" ".join(map(str, pids)))
model = build()
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
data = torch.randn(BATCH * 200, 64), torch.randint(0, 10, (BATCH * 200,))


def state():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": torch.tensor(step)}


step = 0
saved = sorted(name for name in os.listdir(place) if name.startswith("step-"))
if saved:
    optimizer.step()  # makes the tensors that are loaded into
    loaded = state()
    dcp.load(loaded, checkpoint_id=f"{place}/{saved[-1]}")
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    step = int(loaded["step"])
since = time.monotonic()
part = BATCH // world
while True:
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(step // 200))
    for number in range(step % 200, 200):
        mine = order[number * BATCH + rank * part : number * BATCH + (rank + 1) * part]
        optimizer.zero_grad()
        F.cross_entropy(ddp(data[0][mine]), data[1][mine]).backward()
        optimizer.step()
        step += 1
        if rank == 0:
            made(step, reached)
        if every != "none" and step % 10 == 0:
            due = torch.tensor([time.monotonic() - since >= float(every)], dtype=torch.uint8)
            dist.broadcast(due, 0)
            if due:
                dcp.save(state(), checkpoint_id=f"{place}/saving-{step:09d}")
                if rank == 0:
                    os.rename(f"{place}/saving-{step:09d}", f"{place}/step-{step:09d}")
                since = time.monotonic()
"""
)
WAYS = {"lockstep": LOCKSTEP, "torchrun": TORCHRUN}
FIRST_STEP_S = 240.0  #: for what takes three seconds on an idle machine


def steps_a_second(
    way: str, ranks: int, every: str, seconds: float, kill_every: float | None, dice: random.Random
) -> tuple[float, list[float], list[float]]:
    """Steps of use for each second since the first one was made; shares within the run; pauses in seconds."""
    with tempfile.TemporaryDirectory() as here:
        place, script = Path(here), Path(here, "train.py")
        script.write_text(WAYS[way])
        module = {
            "lockstep": ["lockstep", "run", "--run-dir", str(place / "run")],
            "torchrun": ["torch.distributed.run", "--standalone"],
        }[way]
        options = ["--nproc-per-node", str(ranks), "--max-restarts", "1000"]
        launcher = subprocess.Popen(
            [sys.executable, "-m", *module, *options, str(script), here, every],
            env=os.environ | {"PYTHONPATH": str(Path(lockstep.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            limit_s = time.monotonic() + FIRST_STEP_S
            while not reached(place):
                if time.monotonic() > limit_s or launcher.poll() is not None:
                    sys.exit(f"{way} has made no step in {FIRST_STEP_S:g} s")
                time.sleep(0.01)
            began, first = time.monotonic(), reached(place)
            kill_s = began + kill_every if kill_every else float("inf")
            pauses: list[float] = []
            kills_s: list[float] = []
            seen = [(began, first)]
            while (now := time.monotonic()) < began + seconds:
                if now >= kill_s:
                    kill_s += kill_every or 0.0
                    if strike(place, dice):
                        kills_s.append(now)
                        if (pause := _pause(place, now, began + seconds)) is not None:
                            pauses.append(pause)
                seen.append((time.monotonic(), reached(place)))
                time.sleep(0.02)
            last_s, last = seen[-1]
            return (last - first) / (last_s - began), shares_within(seen, kills_s), pauses
        finally:
            launcher.send_signal(signal.SIGINT)
            time.sleep(0.2)
            launcher.send_signal(signal.SIGINT)
            try:
                launcher.wait(60)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()


def shares_within(seen: list[tuple[float, int]], kills_s: list[float]) -> list[float]:
    """For each time from a kill to the next: steps made, by those that the rates before both kills would have made.

    Args:
        seen: pairs of a time in seconds and the step that the training had come to, in the order of time.
        kills_s: times in seconds.
    """

    def at(time_s: float) -> int:
        return next((step for when_s, step in seen if when_s >= time_s), seen[-1][1])

    shares = []
    for kill_s, next_s in itertools.pairwise(kills_s):
        half_s = (next_s - kill_s) / 2
        calm = [(at(end_s) - at(end_s - half_s)) / half_s for end_s in (kill_s, next_s)]
        if min(calm) > 0:  # else the ranks were not back for so long
            shares.append((at(next_s) - at(kill_s)) / (mean(calm) * (next_s - kill_s)))
    return shares


def reached(place: Path) -> int:
    """The step that the training has come to; 0 before its first."""
    try:
        return int((place / "reached").read_text() or 0)
    except FileNotFoundError:
        return 0


def strike(place: Path, dice: random.Random) -> bool:
    """Kill one of the ranks that trained last; False between two generations: the next stroke finds one."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(dice.choice((place / "pids").read_text().split())), signal.SIGKILL)
        return True
    return False


def _pause(place: Path, struck_s: float, until_s: float) -> float | None:
    """Seconds from ``struck_s`` to the first step of the next ranks; None if it does not come until ``until_s``."""
    before, at = (place / "pids").read_text(), -1
    while (now := time.monotonic()) < until_s:
        if at < 0 and (place / "pids").read_text() not in ("", before):
            at = reached(place)
        elif 0 <= at != reached(place):
            return now - struck_s
        time.sleep(0.002)
    return None


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="(default: 2)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run (default: 60)")
    parser.add_argument("--kill-every", type=float, default=20.0, metavar="SECONDS", help="(default: 20)")
    parser.add_argument("--every", nargs="+", default=["none", "60", "10"], help="between saves (default: none 60 10)")
    parser.add_argument("--rounds", type=int, default=1, help="(default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    told = parser.parse_args()
    dice = random.Random(0)
    runs = [(way, every) for every in told.every for way in WAYS]
    kinds = ("killed", "undisturbed", "within", "pauses")
    seen: dict[tuple[str, str], dict[str, list[float]]] = {run: {kind: [] for kind in kinds} for run in runs}
    for number in range(told.rounds):
        for way, every in runs if number % 2 == 0 else reversed(runs):
            for kind in ("killed", "undisturbed") if number % 2 == 0 else ("undisturbed", "killed"):
                kill_every = told.kill_every if kind == "killed" else None
                found, shares, pauses = steps_a_second(way, told.ranks, every, told.seconds, kill_every, dice)
                seen[way, every][kind].append(found)
                seen[way, every]["within"] += shares
                seen[way, every]["pauses"] += pauses
    print("| | saved every | steps/s calm | of use, killed | ratio | within: mean, least | pause: median, most |")
    print("|---|---|---|---|---|---|---|")
    for (way, every), rates in seen.items():
        ratio = median(k / u for k, u in zip(rates["killed"], rates["undisturbed"], strict=True))
        calm, killed = (median(rates[kind]) for kind in ("undisturbed", "killed"))
        words = "never" if every == "none" else f"{every} s"
        pauses = rates["pauses"]
        pause = f"{median(pauses):.2f} s, {max(pauses):.2f} s (n {len(pauses)})" if pauses else "-"
        shares = rates["within"]
        within = f"{mean(shares):.3f}, {min(shares):.2f} (n {len(shares)})" if shares else "-"
        print(f"| {way} | {words} | {calm:.0f} | {killed:.0f} | {ratio:.2f} | {within} | {pause} |", flush=True)
    if told.json:
        Path(told.json).write_text(json.dumps([{"way": w, "every": e, **rates} for (w, e), rates in seen.items()]))


if __name__ == "__main__":
    main()
