"""A campaign of seeded faults: ranks, loader processes, every part of the launcher, files, clocks, hosts, networks.

python benchmarks/campaign.py                                      500 faults, about an hour; needs root
python benchmarks/campaign.py --resume                             go on where it was stopped
python benchmarks/campaign.py --rounds 1 --kinds "store" --out -   one training, to the screen

Each round is one training on hosts of its own (`hosts.py`) that is carried to its end. Some faults strike it, each
after some more steps; all is drawn from a seed. Some rounds run side by side. Between them there are trainings by a
script of DistributedDataParallel with checkpoints, under torchrun, which meet the kinds that it may survive. Each round
is a line in the file of results once it is over. What is measured of each fault:

    cause     the screens say what befell the run, and accuse nobody else
    steps     which were done already and had to be made again
    seconds   the longest time without a step, from the fault on
    left      processes, sockets, files in /dev/shm and in the directory for temporary files that outlive a launcher
    bits      of parameters and optimizer at the end of the training, against one without faults
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import campaign_faults
import campaign_files
import campaign_ranks
from campaign_faults import Fault, Group
from campaign_network import HOSTS
from campaign_page import Struck, page_with, summary, table
from campaign_scripts import SAVE_EVERY, TRAIN
from campaign_training import HOME, Manner, Step, Training, training, wait_for
from hosts import why_not
from lockstep.report import MetricsFile

PAGE = Path(__file__).parents[1] / "docs" / "failures.md"
GROUPS: dict[str, Group] = campaign_faults.GROUPS | campaign_ranks.GROUPS | campaign_files.GROUPS | HOSTS
KINDS: dict[str, Fault] = {kind: fault for group in GROUPS.values() for kind, fault in group.kinds.items()}
LIMIT_OURS_S = 240.0
#: How long torchrun is waited for.
PATIENCE_S = 120.0
#: For the cause, once the training goes on: a part of the launcher is told to go on before it is named.
CAUSE_S = 20.0


@dataclass(frozen=True)
class Round:
    """One training, and the kinds of faults that strike it one after the other."""

    number: int
    manner: Manner
    kinds: Sequence[str]


@dataclass
class Deck:
    """Kinds, from which each is drawn as often as the others."""

    kinds: Sequence[str]
    draw: random.Random
    left: list[str] = field(default_factory=list)
    drawn: int = 0

    def take(self, count: int) -> list[str]:
        """The next ``count``, or all of them if there are fewer."""
        count = min(count, len(self.kinds))
        if len(self.left) < count:
            self.left += self.draw.sample(list(self.kinds), len(self.kinds))
        taken, self.left = self.left[:count], self.left[count:]
        self.drawn += len(taken)
        return taken


def plan(seed: int, faults: int, pattern: str, epochs: int = Manner.epochs) -> list[Round]:
    """The rounds in which at least ``faults`` befall Lockstep, and those of torchrun among them."""
    draw = random.Random(seed)
    groups = {name: group for name, group in GROUPS.items() if not group.lacks}
    ours = _decks(groups, draw, lambda kind: re.search(pattern, kind) is not None)
    theirs = _decks(groups, draw, lambda kind: KINDS[kind].beside and re.search(pattern, kind) is not None)
    rounds: list[Round] = []

    def add(way: Literal["lockstep", "torchrun"], decks: dict[str, Deck]) -> int:
        # Of the group whose kinds were drawn least often.
        name = min(decks, key=lambda name: (decks[name].drawn / len(decks[name].kinds), name))
        group, strategy, mirror = groups[name], *draw.choice(groups[name].strategies)
        manner = Manner(
            way=way,
            nodes=draw.choice(group.nodes) if way == "lockstep" else max(group.nodes[:2]),
            ranks=draw.choice(group.ranks),
            ipv6=group.ipv6,
            lost_after_s=group.lost_after_s,
            takeover=group.takeover,
            strategy=strategy,
            mirror=mirror,
            epochs=epochs,
            hang_after_s=group.hang_after_s,
        )
        kinds = decks[name].take(group.most)
        rounds.append(Round(len(rounds), manner, kinds))
        return len(kinds)

    while faults > 0:
        for _ in range(4):
            faults -= add("lockstep", ours)
        if theirs:
            add("torchrun", theirs)
    return rounds


def _decks(groups: Mapping[str, Group], draw: random.Random, wanted: Callable[[str], bool]) -> dict[str, Deck]:
    decks = {name: Deck([kind for kind in group.kinds if wanted(kind)], draw) for name, group in groups.items()}
    return {name: deck for name, deck in decks.items() if deck.kinds}


def carry_out(one: Round, seed: int, expected: str) -> list[Struck]:
    """One round; what came of each of its faults."""
    manner, draw = one.manner, random.Random(f"{seed} {one.number}")
    struck: list[Struck] = []
    with training(manner, draw) as run:
        try:
            for number in range(1, manner.nodes + 1):
                run.launch(f"n{number}")
            run.wait_for_steps(2, ranks=manner.nodes * manner.ranks)
            for kind in one.kinds:
                run.wait_for_steps(draw.randrange(3, 9))
                if run.over:
                    break  # trained to its end before all of them struck
                struck.append(strike_once(run, kind, one))
                if struck[-1].seconds is None and not (run.here / "digest-0").exists():
                    return struck
                if struck[-1].seconds is None:
                    struck.pop()  # trained to its end while this was under way
                    break
            run.go()
            wait_for(lambda: not run.alive, "the end")
            left = run.left_of(*run.machines.up)
            codes = [run.launchers[host].returncode for host in run.finishers]
            digests = {path.read_text() for path in run.here.glob("digest-*")}
            lacking = _lacking(run) if manner.way == "lockstep" else []
        except (TimeoutError, AssertionError, OSError, subprocess.SubprocessError) as error:
            if manner.way == "torchrun":
                raise  # it tells nothing of a fault
            said = f"{error}\n{_tail(run)}"
            struck.append(Struck("of no fault: the training itself", one.number, manner.way, screen=said))
            return struck
        if manner.way == "lockstep":
            right = digests == {expected} and not any(codes) and not lacking
            for fault in struck:
                fault.bits, fault.left = right, fault.left + left
            if struck and (left or not right):
                struck[
                    0
                ].screen += f"exit codes {codes}, bits {digests == {expected}}, left {left}, {lacking}\n{_tail(run)}"
    return struck


def _lacking(run: Training) -> list[str]:
    """What was to be done in a training that is over, and was not."""
    recorded = [int(row["epoch"]) for row in MetricsFile.read(run.run_dir / "metrics.jsonl")]
    damaged = len(re.findall(r"a record.* in .* is damaged", run.said()))
    lost = set(range(1, run.manner.epochs + 1)).symmetric_difference(recorded)
    if len(lost) <= damaged:
        lost.clear()
    twice = len(recorded) - len(set(recorded))
    undone = [path.name for path in run.here.glob("do-*")]
    return [f"{name}: {found}" for name, found in (("epochs", lost), ("twice", twice), ("undone", undone)) if found]


def strike_once(run: Training, kind: str, one: Round) -> Struck:
    """Have one fault strike, and see how the training goes on; ``seconds`` is None if it does not."""
    fault, ours = KINDS[kind], run.manner.way == "lockstep"
    if ours and fault.held_by != "others":
        run.wait_for_checkpoint()
    if ours or run.manner.nodes > 1:
        fault.prepare(run)
    said, before, at_s = run.screens(), run.steps(), time.monotonic()
    struck = Struck(kind, one.number, run.manner.way, allowed=_allowed(fault, run.manner))
    generations = {step.generation for step in before}
    first = run.launchers["n1"]

    def new_steps() -> list[Step]:
        new = run.steps()[len(before) :]
        if ours and fault.ends:
            return [step for step in new if step.generation not in generations]
        return [step for step in new if step.at_s > over_s]

    def goes_on() -> bool:
        if fault.resumes and run.launchers["n1"] is first:
            if run.ended():
                struck.left += [] if fault.outlived else run.left_of("n1")
                run.launch("n1", "--resume")
        elif run.over and len(new_steps()) < 3:
            raise TimeoutError("all launchers have ended")
        return len(new_steps()) >= 3

    try:
        fault.strike(run)
        over_s = time.monotonic()
        wait_for(goes_on, f"steps after: {kind}", LIMIT_OURS_S if ours else PATIENCE_S)
        assert fault.happened(run), f"it was not seen to happen: {kind}"
    except (TimeoutError, AssertionError, OSError, subprocess.SubprocessError) as error:
        struck.screen = f"{error}\n{_tail(run, said)}"
        return struck
    after = run.steps()[len(before) :]
    times = [at_s, *(step.at_s for step in after)]
    struck.seconds = max(later - earlier for earlier, later in itertools.pairwise(times))
    numbers = [step.number for step in (*before[-1:], *after)]
    struck.again = sum(max(0, a + 1 - b) for a, b in itertools.pairwise(numbers))
    if ours:
        with suppress(TimeoutError):
            wait_for(lambda: re.search(fault.says, run.said(said)), "the cause", CAUSE_S)
        struck.named = is_named(fault.says, run.said(said))
        if not struck.named or struck.again > struck.allowed:
            struck.screen = _tail(run, said)
    return struck


def is_named(says: str, said: str) -> bool:
    """Whether the cause was said, and nobody else was accused."""
    accused = said.split("run failed:")[1:]
    if not re.search(says, said):
        return False
    return all("run failed" in says and re.search(says, f"run failed:{text}") for text in accused)


def _allowed(fault: Fault, manner: Manner) -> int:
    """How many steps may have to be made again (docs/decisions/0010)."""
    if fault.held_by == "others":
        # A rank of `zero` may die before the copy of its part is complete.
        return 1 if manner.strategy == "zero" else 0
    if fault.held_by == "mirror" and manner.mirror:
        return 1
    # A checkpoint is written while the next steps are made.
    return 3 * SAVE_EVERY if fault.held_by == "older" else 2 * SAVE_EVERY


def _tail(run: Training, since: dict[str, str] | None = None) -> str:
    said = run.said(since)
    return said if len(said) < 8000 else f"{said[:5000]}\n...\n{said[-3000:]}"


def undisturbed(strategy: str, epochs: int) -> str:
    """The bits of a training in which nothing fails, on one rank."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as place:
        here = Path(place)
        (here / "train.py").write_text(TRAIN)
        (here / "go").touch()
        env = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
        env |= {"PYTHONPATH": HOME, "OMP_NUM_THREADS": "1", "LOCKSTEP_STRATEGY": strategy}
        command = [sys.executable, "train.py", str(epochs), "0", "0"]
        subprocess.run(command, cwd=here, env=env, check=True, capture_output=True)
        return (here / "digest-0").read_text()


class Results:
    """What came of the rounds: a file with a line for each, of which a stop loses none."""

    def __init__(self, file: Path | None, *, resume: bool) -> None:
        self._file, self._lock = file, threading.Lock()
        self.struck: list[Struck] = []
        self.loads: dict[int, float] = {}  #: the load average at the end of each round
        self._undisturbed: dict[str, str] = {}
        if file is not None and not resume:
            file.unlink(missing_ok=True)
        if file is not None and file.exists():
            for line in file.read_text().splitlines():
                self._take(json.loads(line))

    def undisturbed(self, strategy: str, epochs: int) -> str:
        """The bits of a training in which nothing fails, which are trained once for each file of results."""
        name = f"{strategy}, {epochs} epochs"
        if name not in self._undisturbed:
            self._keep({"undisturbed": {name: undisturbed(strategy, epochs)}})
        return self._undisturbed[name]

    def add(self, one: Round, struck: Sequence[Struck]) -> None:
        """Keep and show what came of a round."""
        row = {"round": one.number, "load": os.getloadavg()[0], "struck": [asdict(fault) for fault in struck]}
        with self._lock:
            self._keep(row)
            for fault in struck:
                print(fault.line(), flush=True)
                if fault.wrong and fault.way == "lockstep":
                    print("    " + fault.screen.replace("\n", "\n    "), flush=True)

    def _keep(self, row: dict[str, Any]) -> None:
        self._take(row)
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def _take(self, row: dict[str, Any]) -> None:
        self._undisturbed |= row.get("undisturbed", {})
        if "round" in row:
            self.loads[row["round"]] = row["load"]
            self.struck += [Struck(**fault) for fault in row["struck"]]


def main() -> None:
    """Carry the campaign out and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=500, help="that befall Lockstep (default: 500)")
    parser.add_argument("--rounds", type=int, help="trainings, in place of --faults")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    parser.add_argument("--epochs", type=int, default=Manner.epochs, help="of 20 steps, of each training (default: 30)")
    parser.add_argument("--kinds", default="", help="only those whose name this regular expression finds")
    parser.add_argument("--lanes", type=int, default=2, help="trainings side by side (default: 2)")
    parser.add_argument("--results", type=Path, default=Path("campaign.jsonl"), help="(default: campaign.jsonl)")
    parser.add_argument("--resume", action="store_true", help="only the rounds that are not in the file of results yet")
    parser.add_argument("--table", action="store_true", help="no round any more: the table of what is in that file")
    parser.add_argument("--out", help="- for the screen; else into docs/failures.md")
    parser.add_argument("--json", type=Path, help="write what came of each fault there, and no page")
    args = parser.parse_args()
    if why := why_not():
        sys.exit(f"the campaign strikes hosts made of namespaces: {why}")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup would hand on to launchers that it is ignored
    rounds = plan(args.seed, args.faults, args.kinds, args.epochs)[: args.rounds]
    results = Results(None if args.rounds else args.results, resume=args.resume or args.table)
    todo = [] if args.table else [one for one in rounds if one.number not in results.loads]
    expected = {name: results.undisturbed(name, args.epochs) for name in {one.manner.strategy for one in todo}}

    def carry(one: Round) -> None:
        try:
            results.add(one, carry_out(one, args.seed, expected[one.manner.strategy]))
        except Exception:  # noqa: BLE001 - the other rounds go on, and --resume tries this one again
            traceback.print_exc()

    with ThreadPoolExecutor(args.lanes) as lanes:
        list(lanes.map(carry, todo))
    words = summary(results.struck, args.seed, results.loads.values())
    text = f"{words}\n\n{table(results.struck, KINDS)}"
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in results.struck]))
    if args.out == "-" or args.json:
        print(text)
        return
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    print(words)


if __name__ == "__main__":
    main()
