"""What happens when something fails: each failure in each phase, and beside other launchers. Writes docs/failures.md.

python benchmarks/failures.py                                  about ten minutes on two cores
python benchmarks/failures.py --accelerate /path/to/python     that Python's accelerate, too
python benchmarks/failures.py --only "kill in forward" --out - one of them, to the screen

A training of two ranks is started under `lockstep run` with one fault on purpose, and one restart. What is measured:

    seconds      from the fault, whose moment the rank notes, to the line on the screen that names the rank
    left         processes of the run that live one second after its launcher has ended
    bits         of parameters and optimizer in the end, against a run in which nothing failed
"""

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

import lockstep

HOME = str(Path(lockstep.__file__).parents[1])
PAGE = Path(__file__).parents[1] / "docs" / "failures.md"
MARK = "LOCKSTEP_FAILURES_MARK"
LIMIT_S = 240.0  #: for a run that takes five seconds on an idle machine
#: How long another launcher is watched that does not notice: its own deadlines are minutes.
PATIENCE_S = 15.0
_END = 15  # lines that stay on a small screen

TRAIN = """
import hashlib, os, sys, threading, time
import torch, lockstep
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

HOW = sys.argv[1] if len(sys.argv) > 1 else ""


def note():
    with open("fault-time", "w") as file:
        file.write(f"{time.time()}")


FIRST = os.environ.get("LOCKSTEP_GENERATION", "0") == "0"


class Noisy(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        if HOW == "worker" and FIRST and index == 50 and os.environ["RANK"] == "1":
            note()
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        return torch.sin(torch.arange(8.0) * (index + 1)) + 0.1 * torch.randn(8), index % 3


with lockstep.Run(seed=3, save_every="5 steps") as run:
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    model = run.model(net)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    batches = run.loader(Noisy(), global_batch=16, micro_batch=4, workers=1 if HOW == "worker" else 0)
    held_out = run.loader(Noisy(), global_batch=16, micro_batch=4, shuffle=False, workers=0)
    for epoch in run.epochs(4):
        for x, y in run.train(batches):
            run.step(F.cross_entropy(model(x), y))
            time.sleep(0.01)
            if FIRST and run.progress.step == 13 and HOW == "alone" and run.rank == 1:
                note()
                run.sum(1.0)
            if FIRST and run.progress.step == 13 and HOW == "long" and run.rank == 0:
                open("ready", "w").close()
                time.sleep(0.5)
        for x, y in run.evaluate(held_out):
            run.measure(right=model(x).argmax(1) == y)
    state = hashlib.sha256()
    for tensor in net.state_dict().values():
        state.update(tensor.numpy().tobytes())
    for values in optimizer.state.values():
        state.update(values["momentum_buffer"].numpy().tobytes())
    run.say(f"state {state.hexdigest()}")
"""

PLAIN = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

how, rank = sys.argv[1], int(os.environ["RANK"])
again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
for step in range(100000):
    model(torch.ones(4, 8)).sum().backward()
    time.sleep(0.01)
    if step == 0:
        with open(f"stepped-{rank}", "a") as file:
            file.write(f"{time.time()}\\n")
    if again and step == 3:
        break
    if step == 20 and rank == 1 and not again:
        with open("fault-time", "w") as file:
            file.write(f"{time.time()}")
        if how == "raise":
            raise ValueError("bad label 255 in sample 17")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "loop":
            while True:
                pass
        if how == "alone":
            dist.barrier()
            dist.all_reduce(torch.ones(3))
    if step == 20 and rank == 0:
        open("ready", "w").close()
dist.destroy_process_group()
"""


@dataclass
class Seen:
    """One run, as somebody at the terminal saw it."""

    code: int
    lines: list[tuple[float, str]]  #: each with the time it came, in seconds since 1970
    left: int
    took_s: float
    fault_at: float | None

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join(line for _, line in self.lines)

    def first(self, pattern: str) -> tuple[int, float, str] | None:
        """Number, time and text of the first line that matches."""
        for number, (at, line) in enumerate(self.lines, 1):
            if re.search(pattern, line):
                return number, at, line
        return None

    def detected_s(self, pattern: str) -> float | None:
        """Seconds from the fault to that line."""
        found = self.first(pattern)
        return None if found is None or self.fault_at is None else max(0.0, found[1] - self.fault_at)


@dataclass
class ServerContext:
    """A directory to run in."""

    here: Path
    mark: str = field(default_factory=lambda: os.urandom(8).hex())

    def run(
        self,
        words: Sequence[str],
        *,
        act: Callable[[subprocess.Popen[str]], None] | None = None,
        limit_s: float = LIMIT_S,
    ) -> Seen:
        """Carry out ``words`` here; ``act`` is called once it runs. What lives of it at the end is killed."""
        for name in ("fault-time", "ready"):
            (self.here / name).unlink(missing_ok=True)
        env = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
        env |= {MARK: self.mark, "PYTHONPATH": HOME, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        began = time.time()
        process = subprocess.Popen(
            words,
            cwd=self.here,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        lines: list[tuple[float, str]] = []
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        reader.start()
        try:
            if act is not None:
                act(process)
            process.wait(limit_s)
            code, took_s = process.returncode, time.time() - began
        except subprocess.TimeoutExpired:
            code, took_s = 124, time.time() - began
        if code != 124:
            time.sleep(1.0)
        left = [pid for pid in self.processes() if pid != process.pid or process.poll() is None]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        reader.join(5)
        noted = self.here / "fault-time"
        return Seen(code, lines, len(left), took_s, float(noted.read_text()) if noted.exists() else None)

    def wait_for(self, name: str) -> None:
        """Returns once the file is there."""
        deadline = time.monotonic() + LIMIT_S
        while not (self.here / name).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(name)
            time.sleep(0.005)

    def processes(self) -> list[int]:
        """Those that descend from what was started here, also when their parents are gone."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z" and f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found


def _read(process: "subprocess.Popen[str]", lines: list[tuple[float, str]]) -> None:
    assert process.stdout is not None
    lines.extend((time.time(), line.rstrip("\n")) for line in process.stdout)


@contextlib.contextmanager
def shop(at: str | None = None) -> Iterator[ServerContext]:
    """A directory of its own, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="lockstep-failures-", dir=at) as place:
        here = Path(place)
        (here / "train.py").write_text(TRAIN)
        (here / "plain.py").write_text(PLAIN)
        yield ServerContext(here)


def ours(*words: str) -> list[str]:
    """``lockstep run`` on two ranks."""
    return [sys.executable, "-m", "lockstep", "run", "--nproc-per-node", "2", *words]


# ---- each failure in each phase -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One row of the first table."""

    failure: str
    phase: str
    fault: str = ""  #: in the words of --fault
    how: str = ""  #: what the script is told
    hangs: bool = False
    restarts: int = 1
    act: str = ""  #: what is done to the launcher
    disk: bool = False  #: it runs on a small disk of its own

    @property
    def name(self) -> str:
        """Such as ``kill in forward``."""
        return f"{self.failure} in {self.phase}"


PHASES = ("start", "forward", "reduction", "data", "save", "evaluate", "exit")
#: So late that there is a checkpoint. In an evaluation the phase comes again with each of its micro-batches.
AT = {
    "forward": " at step 12",
    "reduction": " at step 12",
    "data": " at step 12",
    "save": " at step 8",
    "evaluate": " at step 8",
}
DEEDS = {
    "kill -9 of a rank": ("kill rank 1", False),
    "exception": ("raise in rank 1", False),
    "SIGSTOP": ("stop rank 1", True),
    "endless loop": ("loop in rank 1", True),
}
CASES = [
    *(
        Case(failure, phase, fault=f"{deed} in {phase}{AT.get(phase, '')}", hangs=hangs)
        for failure, (deed, hangs) in DEEDS.items()
        for phase in PHASES
    ),
    Case("collective on one rank only", "forward", how="alone", hangs=True),
    Case("deadlocked loader worker", "data", how="worker", hangs=True),
    Case("rank 5 s late", "forward", fault="delay rank 1 by 5 s in forward at step 12", restarts=0),
    Case("disk full", "save", fault="fill the disk at step 12", disk=True, restarts=0),
    Case("SIGTERM to the launcher", "forward", how="long", act="SIGTERM", restarts=0),
    Case("Ctrl-C twice", "forward", how="long", act="SIGINT SIGINT", restarts=0),
    Case("kill -9 of the launcher", "forward", how="long", act="SIGKILL", restarts=0),
]


def strike(where: ServerContext, signals: str) -> Callable[["subprocess.Popen[str]"], None]:
    """What does that to a launcher."""

    def act(process: "subprocess.Popen[str]") -> None:
        where.wait_for("ready")
        (where.here / "fault-time").write_text(str(time.time()))
        for name in signals.split():
            process.send_signal(signal.Signals[name])
            time.sleep(0.3)

    return act


def measure(case: Case, whole: str, hang_s: float) -> dict[str, str]:
    """Run it; its row."""
    with contextlib.ExitStack() as stack:
        at = stack.enter_context(small_disk()) if case.disk else None
        if case.disk and at is None:
            return {"last screen": "not run: no file system can be mounted here"}
        where = stack.enter_context(shop(at))
        words = ["--run-dir", "r", "--max-restarts", str(case.restarts), "--hang-after", str(hang_s)]
        words += ["--on-hang", "wait" if "late" in case.failure else "restart"]
        words += ["--fault", case.fault] if case.fault else []
        act = strike(where, case.act) if case.act else None
        seen = where.run(ours(*words, "train.py", case.how), act=act)
        notes = where.here / "r" / "faults.txt"
        if notes.exists():
            seen.fault_at = float(notes.read_text().split("\t")[1])
        resumed = ""
        if case.restarts == 0 and "state " not in seen.text:
            again = where.run(ours("--run-dir", "r", "--resume", "train.py"))
            resumed, codes = again.text, f"{seen.code}, then {again.code}"
        else:
            codes = str(seen.code)
        text = f"{seen.text}\n{resumed}"
        state = re.findall(r"^state (\w+)$", text, re.MULTILINE)
        said, pattern = headline(seen, case)
        said = said.replace(f"{where.here}/", "")
        detected = seen.detected_s(pattern)
        return {
            "last screen": said,
            "seconds": "-" if detected is None else f"{detected:.1f}",
            "left": str(seen.left),
            "bits": "equal" if set(state) == {whole} else f"DIFFERENT ({len(state)} ends)",
            "exit": codes,
        }


def headline(seen: Seen, case: Case) -> tuple[str, str]:
    """The line that says it, and how to find it again."""
    for pattern in (r"run failed: ", r"ranks? .* for \d+(\.\d+)? s|has not moved|makes no progress", r"not saved: ",
                    r"^stopped by ", r"^stopping now"):  # fmt: skip
        found = seen.first(pattern)
        if found is not None:
            line = re.sub(r"\(host [^)]*\) ", "", found[2].lstrip("✗x ").replace("run failed: ", ""))
            # Who hangs where stands in the line below.
            below = [text.strip() for _, text in seen.lines[found[0] : found[0] + 1]] if line.endswith("hung") else []
            return ": ".join([line, *below]), pattern
    return (seen.lines[-1][1] if seen.lines and case.act != "SIGKILL" else "(nothing: it is gone)"), r"$^"


@contextlib.contextmanager
def small_disk() -> Iterator[str | None]:
    """A file system of 24 MB; None where none can be mounted."""
    with tempfile.TemporaryDirectory(prefix="lockstep-disk-") as place:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=24m", "none", place], capture_output=True, check=False
        )
        try:
            yield place if done.returncode == 0 else None
        finally:
            if done.returncode == 0:
                subprocess.run(["umount", "-l", place], check=True)


# ---- beside other launchers -----------------------------------------------------------------------------------------

OTHERS = {
    "exception": ("raise", r"ValueError: bad label 255|raised ValueError", r"bad label 255"),
    "kill -9 of a rank": ("kill", r"SIGKILL|Signal 9|exitcode.*-9", r"SIGKILL|Signal 9|exitcode.*-9"),
    "SIGSTOP of a rank": ("stop", r"rank 1\b.*(stopped|SIGSTOP|silent)", r"rank 1\b"),
    "endless loop": ("loop", r"rank 1\b.* for \d", r"rank 1\b"),
    "collective on one rank only": ("alone", r"rank 1\b.*(barrier|all_reduce)", r"rank 1\b"),
    "Ctrl-C": ("INT", r"stopp|SIGINT|Interrupt|signal: 2", r""),
    "SIGTERM": ("TERM", r"stopp|SIGTERM|signal: 15", r""),
    "kill -9 of the launcher": ("KILL", r"$^", r""),
}


def launchers(accelerate: str | None, hang_s: float) -> dict[str, list[str]]:
    """How each starts two ranks on CPUs."""
    ways = {
        "lockstep run": ours("--hang-after", str(hang_s), "--run-dir", "r", "--fresh"),
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    }
    if accelerate:
        # Its word for several processes on one machine; the script chooses the device, here the CPU.
        more = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
        ways["accelerate launch"] = [accelerate, "-m", "accelerate.commands.launch", *more.split()]
    return ways


def beside(failure: str, words: list[str]) -> dict[str, str]:
    """One failure under one launcher."""
    how, cause, last = OTHERS[failure]
    with shop() as where:
        act = strike(where, f"SIG{how}") if how.isupper() else None
        seen = where.run([*words, "plain.py", how], act=act, limit_s=PATIENCE_S)
        found = seen.first(cause)
        detected = seen.detected_s(cause)
        noticed = seen.code != 124 or found is not None
        end = "\n".join(line for _, line in seen.lines[-_END:])
        named = re.search(r"rank\s*:? 1\b|\[rank1\]|rank 1 ", end) and (not last or re.search(last, end))
        return {
            "lines": str(len(seen.lines)),
            "cause in line": str(found[0]) if found else "-",
            "right rank at the end": "-" if how.isupper() else ("yes" if named else "no"),
            "seconds": f"{detected:.1f}" if detected is not None else ("-" if noticed else f"> {PATIENCE_S:.0f}"),
            "left": str(seen.left) if seen.code != 124 else "still hangs",
            "exit": str(seen.code) if seen.code != 124 else "-",
        }


def restart(words: list[str]) -> float | None:
    """Seconds from the kill of a rank to the first step after it; None if the launcher gave up."""
    with shop() as where:
        seen = where.run([*words, "--max-restarts", "3", "plain.py", "kill"])
        steps = [float(line) for line in (where.here / "stepped-0").read_text().split()]
        if seen.fault_at is None:
            sys.exit(f"nothing was killed:\n{seen.text}")
        return steps[-1] - seen.fault_at if len(steps) > 1 else None


def restarts(ways: dict[str, list[str]], rounds: int) -> str:
    """The third part of the page."""
    seconds: dict[str, list[float | None]] = {"lockstep run": [], "torchrun": []}
    for _ in range(rounds):
        for name, measured in seconds.items():
            measured.append(restart(ways[name]))
            print("restart", name, measured[-1], sep=" | ", flush=True)
    done = {name: [s for s in measured if s is not None] for name, measured in seconds.items()}
    told = [
        f"{name} {median(done[name]):.2f} s"
        + (f" (gave up in {rounds - len(done[name])} of {rounds})" * (len(done[name]) < rounds))
        if done[name]
        else f"{name} gave up each time"
        for name in seconds
    ]
    ratio = f": a ratio of {median(done['lockstep run']) / median(done['torchrun']):.2f}" if all(done.values()) else ""
    return (
        f"The same plain script, `--max-restarts 3`, {rounds} alternating rounds, medians of the restarts that "
        f"succeeded: {', '.join(told)}{ratio}."
    )


class Rows:
    """What was measured, printed as it comes, and kept in a file if there is one."""

    def __init__(self, file: str | None) -> None:
        self._file = Path(file or os.devnull)
        text = self._file.read_text() if self._file.exists() else ""
        self._kept: dict[str, dict[str, str]] = json.loads(text or "{}")

    def of(self, row: dict[str, str], measured: Callable[[], dict[str, str]]) -> dict[str, str]:
        """What belongs to ``row``: as it was kept, or else as it is ``measured`` now."""
        key = " | ".join(row.values())
        if key not in self._kept:
            self._kept[key] = measured()
            self._file.write_text(json.dumps(self._kept))
        print(key, *self._kept[key].values(), sep=" | ", flush=True)
        return self._kept[key]


# ---- the page -------------------------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, str]]) -> str:
    """In Markdown; a value that a row does not have is empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(
        [*lines, *("| " + " | ".join(_cell(row.get(name, "")) for name in columns) + " |" for row in rows)]
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def page(cases: list[dict[str, str]], others: list[dict[str, str]], ratio: str, hang_s: float) -> str:
    """docs/failures.md."""
    more = any("accelerate" in row["launcher"] for row in others)
    command = "python benchmarks/failures.py" + " --accelerate PYTHON" * more
    machine = f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, torch {torch.__version__}"
    return f"""\
# When something fails

Made by `{command}` on {time.strftime("%Y-%m-%d")}.
The machine was shared with other work: {machine}.

The script writes the whole page: run it and compare. With `--rows` it keeps rows from one run of the script to the
next, so they may have been measured some minutes apart.

## Each failure in each phase

Two ranks train with `lockstep run --max-restarts 1 --hang-after {hang_s:g} --on-hang restart`. One fault is injected,
mostly by `--fault "kill rank 1 in forward at step 12"`. A checkpoint is saved every 5 steps.

- Last screen: the line that says what happened. The lines after it have the cause, file and line, and the log.
- Seconds: from the fault to that line. A hang is reported when the deadline has passed, which is {hang_s:g} s here.
- Left: processes that still run one second after the launcher has ended.
- Bits: whether parameters and optimizer state are, at the end, those of a run without a failure.

The [campaign](#a-campaign-of-random-faults) measures how many steps are computed again.

{table(cases)}

## Beside other launchers

The same script on two ranks, with plain `torch.distributed`, DDP and gloo, and without Lockstep. Each launcher runs
with its defaults, except `lockstep run` with `--hang-after {hang_s:g}`. Each run was watched for {PATIENCE_S:g} s.

- Lines: number of lines on the screen.
- Cause in line: the first line that names the true cause.
- Right rank at the end: whether the last {_END} lines name rank 1 and its cause.
- Left: processes that still run one second after the launcher has ended.

{table(others)}

## From the death of a rank to the next step

{ratio}
"""


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--accelerate", metavar="PYTHON", help="a Python that has accelerate, to be shown too")
    parser.add_argument(
        "--hang-after", type=float, default=3.0, metavar="SECONDS", help="the deadline of every hang (default: 3)"
    )
    parser.add_argument("--only", help="cases whose name holds this text, and nothing else")
    parser.add_argument("--rows", metavar="FILE", help="keep what was measured there, and measure only what is missing")
    parser.add_argument("--rounds", type=int, default=5, help="of the restart (default: 5)")
    parser.add_argument("--out", default=str(PAGE), help="file for the page; -: the screen (default: docs/failures.md)")
    told = parser.parse_args()
    with shop() as where:
        seen = where.run(ours("--run-dir", "r", "train.py"))
        found = re.findall(r"^state (\w+)$", seen.text, re.MULTILINE)
        if len(found) != 1:
            sys.exit(f"the training does not work even where nothing fails:\n{seen.text}")
    rows = Rows(told.rows)
    cases = []
    for case in CASES:
        if told.only is None or told.only in case.name:
            row = {"failure": case.failure, "phase": case.phase}
            cases.append(row | rows.of(row, lambda case=case: measure(case, found[0], told.hang_after)))
    if told.only is not None:
        return
    ways = launchers(told.accelerate if told.accelerate and shutil.which(told.accelerate) else None, told.hang_after)
    others = []
    for failure in OTHERS:
        for name, words in ways.items():
            row = {"failure": failure, "launcher": name}
            others.append(row | rows.of(row, lambda failure=failure, words=words: beside(failure, words)))
    ratio = restarts(ways, told.rounds)
    print(ratio)
    text = page(cases, others, ratio, told.hang_after)
    if told.out == "-":
        print(text)
    else:
        # `campaign.py` has a chapter of its own on that page.
        page_before = Path(told.out).read_text() if Path(told.out).exists() else ""
        _, mark, campaign = page_before.partition("<!-- campaign -->")
        Path(told.out).write_text(f"{text.rstrip()}\n\n{mark}{campaign}" if mark else text)


if __name__ == "__main__":
    main()
