"""Faults that are planted in an ordinary script, each with the way of `lockstep verify` that finds it, and its line."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

#: Each name in braces is a place for more lines, most of them empty.
SCRIPT = """\
import datetime
import glob
import os
import random
import socket
import threading
import time
import uuid

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import lockstep

{top}


class Samples(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(48, 6, generator=generator)
        self.y = torch.randint(0, 3, (48,), generator=generator)
        {samples}

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index] + 0.1 * torch.randn(6)
        {getitem}
        return x, self.y[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        {net}

    def forward(self, x):
        x = F.dropout(torch.tanh(self.norm(self.first(x))), 0.1, self.training)
        {forward}
        return self.last(x)


def main():
    {main}
    with lockstep.Run(seed=0) as run:
        {run}
        model = run.model(Net())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        samples = Samples()
        batches = run.loader(samples, global_batch=16, micro_batch=4)
        held_out = run.loader(Samples(), global_batch=16, micro_batch=4, shuffle=False)
        {before}
        for epoch in run.epochs(20):
            {epoch}
            for x, y in run.train(batches):
                {body}
                loss = F.cross_entropy(model(x), y)
                {loss}
                if run.step(loss):
                    {stepped}
                    pass
                {after}
            {trained}
            for x, y in run.evaluate(held_out):
                {evaluate}
                run.measure(accuracy=model(x).argmax(1) == y)
            run.log(epoch=epoch)
            {logged}


if __name__ == "__main__":
    main()
"""
MARK = "# here"  #: on the line that is to be named


@dataclass(frozen=True)
class Planted:
    """A fault: lines for some places of the script, and what in it is exchanged."""

    varies: str  #: what the way varies that finds it, in words of its name
    what: str  #: what differs first
    lines: dict[str, str] = field(default_factory=dict)
    exchanged: tuple[tuple[str, str], ...] = ()

    def script(self) -> str:
        """The whole script."""
        text = SCRIPT
        for old, new in self.exchanged:
            assert text.count(old) == 1, (old, text.count(old))
            text = text.replace(old, new)
        lines = []
        for line in text.splitlines():
            place = line.strip()
            if place.startswith("{") and place.endswith("}"):
                more = textwrap.dedent(self.lines.get(place[1:-1], ""))
                lines += textwrap.indent(more, line[: len(line) - len(place)]).splitlines()
            else:
                lines.append(line)
        return "\n".join(lines) + "\n"


RANKS, RESUME, AGAIN, LOADER = "rank", "kill -9", "again", "loader process"
#: By words in the name of a way, what it varies; else surroundings.
VARIES = {RANKS: "ranks", RESUME: "resume", AGAIN: "again", LOADER: "workers"}

FAULTS: dict[str, Planted] = {
    # ---- the same again: chance without a seed ----
    "generator_without_seed": Planted(
        AGAIN,
        "sample",
        {"samples": "self.rng = np.random.default_rng()  # here", "getitem": "x = x + float(self.rng.normal())"},
    ),
    "random_without_seed": Planted(
        AGAIN, "loss", {"before": "noise = random.Random()  # here", "loss": "loss = loss * (1 + 0.1 * noise.random())"}
    ),
    "seed_from_the_system": Planted(
        AGAIN,
        "",
        {
            "before": "seed = int.from_bytes(os.urandom(4), 'little')  # here\n"
            "generator = torch.Generator().manual_seed(seed)",
            "loss": "loss = loss + 0 * loss + 0.1 * torch.randn((), generator=generator) * loss",
        },
    ),
    "seed_from_uuid": Planted(AGAIN, "", {"run": "torch.manual_seed(uuid.uuid4().int % 2**31)  # here"}),
    "seed_from_the_process": Planted(AGAIN, "", {"run": "torch.manual_seed(os.getpid())  # here"}),
    "order_of_addresses": Planted(
        AGAIN,
        "loss",
        {
            "before": "parts = sorted(model.parameters(), key=lambda part: id(part) % 4096)  # here",
            "loss": "loss = loss + 0.01 * parts[0].flatten()[0] + 0.003 * parts[1].flatten()[0]",
        },
    ),
    # ---- surroundings ----
    "weight_by_the_clock": Planted(
        "clock",
        "loss",
        {"before": "year = time.time() // (86400 * 50)  # here", "loss": "loss = loss * (1 + year % 7)"},
    ),
    "date_in_the_schedule": Planted(
        "clock",
        "",
        {"before": "month = datetime.datetime.now().month  # here", "loss": "loss = loss * (1 + month)"},
    ),
    "budget_of_time": Planted(
        "clock",
        "how many steps",
        {"before": "began = time.monotonic()", "after": "if time.monotonic() - began > 100:  # here\n    break"},
    ),
    "host_in_the_seed": Planted("host", "", {"run": "torch.manual_seed(sum(socket.gethostname().encode()))  # here"}),
    "order_of_a_directory": Planted(
        "order of directories",
        "",
        {
            "main": "names = [n for n in os.listdir('/usr/lib') if n.isalnum()]  # here",
            "loss": "loss = loss * (1 + sum(names[0].encode()) / 1000 + sum(names[-1].encode()) / 100)",
        },
    ),
    "order_of_glob": Planted(
        "order of directories",
        "",
        {
            "main": "files = glob.glob('/etc/*')  # here",
            "loss": "loss = loss * (1 + sum(files[0].encode()) / 1000 + sum(files[-1].encode()) / 100)",
        },
    ),
    "path_in_the_seed": Planted(
        "working directory", "", {"run": "torch.manual_seed(sum(os.getcwd().encode()) % 1000)  # here"}
    ),
    "hash_of_a_text": Planted("hash seed", "sample", {"getitem": "x = x + (hash(f'sample {index}') % 7)  # here"}),
    "order_of_a_set": Planted(
        "hash seed",
        "loss",
        {
            "top": "NAMES = {'one', 'two', 'three', 'four', 'five'}",
            "before": "weights = [0.1 * number for name, number in zip(NAMES, range(5)) if name == 'one']  # here",
            "loss": "loss = loss * (1 + weights[0])",
        },
    ),
    "classes_of_a_set": Planted(
        "hash seed",
        "",
        {
            "samples": "classes = list({f'class {number}' for number in range(30)})  # here\n"
            "self.x = self.x + classes.index('class 3')"
        },
    ),
    "local_time": Planted(
        "time zone", "", {"before": "hour = time.localtime(0).tm_hour  # here", "loss": "loss = loss * (1 + hour)"}
    ),
    # ---- ranks ----
    "counter_in_the_body": Planted(
        RANKS, "loss", {"before": "seen = 0", "body": "seen += 1  # here", "loss": "loss = loss * min(1, seen / 100)"}
    ),
    "counter_in_the_model": Planted(
        RANKS, "last", {"net": "self.calls = 0", "forward": "self.calls += 1  # here\nx = x * min(1, self.calls / 60)"}
    ),
    "generator_in_the_body": Planted(
        RANKS,
        "loss",
        {
            "before": "generator = torch.Generator().manual_seed(1)  # here",
            "loss": "loss = loss + 0.1 * torch.rand((), generator=generator) * loss",
        },
    ),
    "generator_in_the_model": Planted(
        RANKS,
        "last",
        {
            "net": "self.generator = torch.Generator().manual_seed(1)  # here",
            "forward": "x = x + 0.1 * torch.randn(x.shape, generator=self.generator)",
        },
    ),
    "generator_in_the_samples": Planted(
        RANKS,
        "sample",
        {"samples": "self.rng = np.random.default_rng(3)  # here", "getitem": "x = x + float(self.rng.normal())"},
    ),
    "rank_in_the_seed": Planted(
        RANKS, "", {"before": "shift = 0.01 * run.rank  # here", "loss": "loss = loss * (1 + shift)"}
    ),
    # Where a script asks for the number of ranks by its name, a run refuses that at its start.
    "rate_by_ranks": Planted(
        RANKS,
        "lr",
        {"top": "COUNT = int(os.environ.get('WORLD' + '_SIZE', '1'))  # here"},
        exchanged=(("lr=0.05,", "lr=0.05 * COUNT,"),),
    ),
    "loss_by_ranks": Planted(
        RANKS,
        "",
        {"top": "COUNT = int(os.environ.get('WORLD' + '_SIZE', '1'))  # here", "loss": "loss = loss / COUNT"},
    ),
    "rank_in_the_environment": Planted(
        RANKS, "loss", {"loss": "loss = loss * (1 + int(os.environ.get('RANK', '0')))  # here"}
    ),
    "history_of_losses": Planted(
        RANKS,
        "loss",
        {
            "before": "history = []",
            "loss": "loss = loss * (0.5 if history and loss.item() > sum(history) / len(history) else 1)",
            "after": "history.append(loss.item())  # here",
        },
    ),
    "last_loss": Planted(
        RANKS,
        "loss",
        {
            "before": "last = 1.0",
            "body": "scale = 1 / (1 + last)",
            "loss": "loss = loss * scale",
            "after": "last = loss.item()  # here",
        },
    ),
    "running_mean_in_the_model": Planted(
        RANKS,
        "",
        {
            "net": "self.center = torch.zeros(8)",
            "forward": "y = x - self.center\nself.center = 0.9 * self.center + 0.1 * x.detach().mean(0)  # here\nx = y",
        },
    ),
    "cache_of_augmented_samples": Planted(
        RANKS,
        "sample",
        {"samples": "self.cache = {}", "getitem": "x = self.cache.setdefault(index, x)  # here"},
    ),
    "samples_changed_in_place": Planted(RANKS, "sample", {"getitem": "self.x[index] *= 1.01  # here"}),
    "labels_changed_by_the_body": Planted(
        RANKS,
        "",
        {"after": "samples.y[: int(loss.item() * 40)] += 1  # here\nsamples.y %= 3"},
    ),
    "loss_summed_by_hand": Planted(
        RANKS,
        "MismatchError",
        {
            "epoch": "total, bodies = 0.0, 0",
            "after": "total += loss.item() * len(x)\nbodies += len(x)",
            "trained": "run.log(mean_loss=total / max(1, bodies))  # here",
        },
    ),
    "break_by_own_loss": Planted(
        RANKS, "", {"after": "if epoch >= 1 and run.progress.step % 3 == 2 and loss.item() < 1.1:\n    break  # here"}
    ),
    "evaluation_draws_for_training": Planted(
        RANKS,
        "loss",
        {
            "before": "tries = np.random.RandomState(5)  # here",
            "evaluate": "tries.random()",
            "loss": "loss = loss * (1 + 0.1 * np.random.RandomState(tries.get_state()[2] + 1).random())",
        },
    ),
    # ---- loader processes ----
    "worker_number_in_the_samples": Planted(
        LOADER,
        "sample",
        {"getitem": "info = torch.utils.data.get_worker_info()  # here\nx = x + (0 if info is None else info.id + 1)"},
    ),
    "sample_count_in_the_data_set": Planted(
        LOADER,
        "sample",
        {"samples": "self.read = 0", "getitem": "self.read += 1  # here\nx = x * (1 + 0.001 * self.read)"},
    ),
    # ---- a kill and a resume ----
    "temperature_not_kept": Planted(
        RESUME,
        "loss",
        {"before": "temperature = 1.0", "loss": "loss = loss * temperature", "trained": "temperature *= 0.8  # here"},
    ),
    "teacher_not_kept": Planted(
        RESUME,
        "loss",
        {
            "before": "teacher = Net().requires_grad_(False).eval()\nteacher.load_state_dict(model.state_dict())",
            "loss": "loss = loss + F.mse_loss(model(x).softmax(1), teacher(x).softmax(1))",
            "stepped": "for t, p in zip(teacher.parameters(), model.parameters()):  # here\n"
            "    t.data.lerp_(p.data, 0.1)",
        },
    ),
    "count_of_steps_not_kept": Planted(
        RESUME,
        "loss",
        {"before": "steps = 0", "stepped": "steps += 1  # here", "loss": "loss = loss * min(1, (steps + 1) / 10)"},
    ),
    "list_not_kept": Planted(
        RESUME,
        "loss",
        {
            "before": "norms = []",
            "stepped": "norms.append(float(sum(p.detach().norm() for p in model.parameters())))  # here",
            "loss": "loss = loss / (1 + 0.01 * sum(norms))",
        },
    ),
    "best_weights_not_kept": Planted(
        RESUME,
        "loss",
        {
            "before": "anchor = [p.detach().clone() for p in model.parameters()]",
            "loss": "loss = loss + 0.1 * sum((p - a).pow(2).sum() for p, a in zip(model.parameters(), anchor))",
            "trained": "anchor = [p.detach().clone() for p in model.parameters()]  # here",
        },
    ),
    "global_not_kept": Planted(
        RESUME,
        "loss",
        {
            "top": "STATE = {'scale': 1.0}",
            "stepped": "STATE['scale'] *= 0.95  # here",
            "loss": "loss = loss * STATE['scale']",
        },
    ),
}
