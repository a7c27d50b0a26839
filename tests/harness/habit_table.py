"""Habits of training scripts, one script each in tests/harness/habits, and how each of them ends: table.txt there.

    python tests/harness/habit_table.py            run all by hand, on 1, 2 and 3 ranks, killed and resumed, under
                                                   strategies; print what is not as the table says
    python tests/harness/habit_table.py --write    the same, and put what was found into the table
    python tests/harness/habit_table.py NAME...    only these; print all that was found

A column is a number of ranks ("2"), a kill and a resume on another number ("2>3"), or a strategy and its ranks
("zero@2"). A script ends "equal" there if it ends as plain torch by hand (but for rounding) on one rank, and with the
same bits in all other columns; "refused: ..." with an error of Lockstep's, or one that Lockstep says more about;
"wrong: ..." with anything else.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import random
import re
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.checkpoint import NEXT_STEP, list_checkpoints
from lockstep.errors import LockstepError
from lockstep.heartbeat import progress_marker
from lockstep.launch_contract import RESUME
from lockstep.testing import run_each
from waiting import wait_until

SCRIPTS = Path(__file__).parent / "habits"
TABLE = SCRIPTS / "table.txt"
EQUAL = "equal"
#: Of a message, so much is in the table; in what was written there by hand, it may be any part of it.
_SHOWN = 110
_ENV = {"LOCKSTEP_VIEW": "silent", "LOCKSTEP_PEER_TIMEOUT_S": "25"}
_TIMEOUT_S = 110
_NEAR = 4e-6
_SETTING = re.compile(r"^(STRATEGIES|WORLDS|NO_PLAIN|NO_KILL|TOL|KILL|SAVE) = (\[[^\]]*\]|.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Habit:
    """A script, and where it is run."""

    name: str

    @cached_property
    def _settings(self) -> dict[str, Any]:
        source = (SCRIPTS / f"{self.name}.py").read_text()
        return {name: ast.literal_eval(value) for name, value in _SETTING.findall(source)}

    @property
    def columns(self) -> tuple[str, ...]:
        """Where it is run in the table."""
        worlds = [str(size) for size in self._settings.get("WORLDS", (1, 2, 3))]
        resumes = [] if "NO_KILL" in self._settings else ["2>3", "1>2"]
        strategies = [name if "@" in name else f"{name}@2" for name in self._settings.get("STRATEGIES", ())]
        return (*worlds, *resumes, *strategies)

    def found(self, columns: Sequence[str] = ()) -> dict[str, str]:
        """How it ends in these columns, or in all of its own."""
        ends: dict[str, str] = {}
        first: Any = None
        by_hand = None if "NO_PLAIN" in self._settings else self._result(1, {"PLAIN": "1"})
        for column in columns or self.columns:
            result = self._in(column)
            if isinstance(result, str):
                ends[column] = result
                continue
            near = 0.0 if first is not None else self._settings.get("TOL", _NEAR)
            base = first if first is not None else by_hand
            compared = result
            if first is None and isinstance(by_hand, dict):  # which measures less
                metrics = {name: value for name, value in result["metrics"].items() if name in by_hand["metrics"]}
                compared = result | {"metrics": metrics}
            differs = f"by hand: {base}" if isinstance(base, str) else base and difference(compared, base, near)
            ends[column] = f"wrong: {differs}" if differs else EQUAL
            first = result if first is None else first
        return ends

    def _in(self, column: str) -> Any:
        size, _, after = column.partition(">")
        if after:
            return self._resumed(int(size), int(after))
        strategy, _, ranks = column.rpartition("@")
        return self._result(int(ranks), {"LOCKSTEP_STRATEGY": strategy} if strategy else {})

    def _resumed(self, before: int, after: int) -> Any:
        """A rank is killed two steps after a checkpoint, when its proof is written, and other ranks go on."""
        with tempfile.TemporaryDirectory(prefix="lockstep-habit-") as directory:
            every = self._settings.get("SAVE", "3 steps")
            saves = {"LOCKSTEP_CHECKPOINT": directory, "LOCKSTEP_SAVE_EVERY": every}
            step = self._settings.get("KILL", 5)
            saved = step - 2 if every == "3 steps" else 1
            outcomes = run_each(_play, before, self.name, step, saved, env=_ENV | saves, timeout_s=_TIMEOUT_S)
            if not isinstance(outcomes[0].error, ChildProcessError):
                result = ended(outcomes)
                return result if isinstance(result, str) else f"wrong: it ended before step {step}"
            return self._result(after, saves | {RESUME: "1"})

    def _result(self, size: int, env: dict[str, str]) -> Any:
        return ended(run_each(_play, size, self.name, env=_ENV | env, timeout_s=_TIMEOUT_S))


def habits() -> list[Habit]:
    """All of them."""
    return [Habit(path.stem) for path in sorted(SCRIPTS.glob("*.py")) if path.stem != "kit"]


# ---- on a rank -------------------------------------------------------------------------------------------------------


def _play(name: str, kill_at: int = 0, saved: int = 0) -> Any:
    """Run the script: what it has told `kit.done`. If ``kill_at`` is given, die there, once ``saved`` steps are."""
    np.random.seed(None)  # as in a process that has just begun
    random.seed()
    if kill_at:
        progress_marker().listeners += (partial(_die, kill_at, saved),)
    sys.path.insert(0, str(SCRIPTS))
    with tempfile.TemporaryDirectory(prefix="lockstep-habit-") as directory:
        os.chdir(directory)
        script = SCRIPTS / f"{name}.py"
        sys.argv = [str(script)]
        runpy.run_path(str(script), run_name="__main__")
    results = importlib.import_module("kit").results
    if not results:
        return None
    same, digests = results[-1]
    # Under these, ranks have parts of a model, and what else is there is no result.
    is_parted = os.environ.get("LOCKSTEP_STRATEGY", "").startswith(("pipeline", "parameter-server", "hybrid"))
    return same, {} if is_parted else digests


def _die(at_step: int, saved: int, marker: Any) -> None:
    if marker.step >= at_step and os.environ["RANK"] == "0":
        directory = Path(os.environ["LOCKSTEP_CHECKPOINT"])
        found = wait_until(lambda: [one for one in list_checkpoints(directory) if one.step >= saved], "a checkpoint")
        # Written once the checkpoint is there, if at all: without it, a resume has nothing to compare with.
        with contextlib.suppress(AssertionError):
            wait_until(Path(found[0].path, NEXT_STEP).exists, "the step after it", deadline_s=10)
        os.kill(os.getpid(), signal.SIGKILL)


# ---- how it ended ----------------------------------------------------------------------------------------------------


def ended(outcomes: Sequence[Any]) -> Any:
    """What the ranks of a world have come to: the leader's result, or words."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:

        def notes_of(outcome: Any) -> Sequence[str]:
            return getattr(outcome.error, "__notes__", ())

        first = min(failed, key=lambda one: (isinstance(one.error, TimeoutError), one.collateral and not notes_of(one)))
        notes = notes_of(first)
        is_said = isinstance(first.error, LockstepError) or notes
        words = " ".join(" ".join((type(first.error).__name__ + ":", *notes, str(first.error))).split())
        return f"refused: {words}" if is_said and (notes or not first.collateral) else f"wrong: {words}"
    results = [outcome.value for outcome in outcomes]
    if results[0] is None:
        return "wrong: it has told nothing"
    of_ranks = [digests for _, digests in results]
    for name in of_ranks[0]:
        if len({digests[name] for digests in of_ranks if name in digests}) > 1:
            return f"wrong: ranks hold different {name}"
    return results[0][0]


def difference(result: Any, base: Any, near: float) -> str:
    """What of two results differs most; "" if nothing does."""
    these, those = dict(_leaves(result)), dict(_leaves(base))
    if these.keys() != those.keys():
        return f"only one has {sorted(these.keys() ^ those.keys())[:3]}"
    worst = (0.0, "")
    for name, this in these.items():
        that = those[name]
        if isinstance(this, torch.Tensor):
            if this.shape != that.shape or this.dtype != that.dtype:
                return f"{name} has another shape or type"
            wide = torch.complex128
            one, other = (each.nan_to_num(7.0) if each.is_floating_point() else each for each in (this, that))
            off, size = float((one.to(wide) - other.to(wide)).abs().max()) if one.numel() else 0.0, 1.0
            size = max(0.05, float(other.to(wide).abs().max())) if other.numel() else 1.0
        elif isinstance(this, float) and isinstance(that, float):
            off, size = (
                (0.0 if this == that or (this != this and that != that) else abs(this - that)),
                abs(that) or 0.05,
            )
        else:
            off, size = float(this != that), 1.0
        if off > near * size:
            worst = max(worst, (off / size, f"{name} is off by {off:.1g} of {size:.1g}"))
    return worst[1]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


# ---- the table -------------------------------------------------------------------------------------------------------


def read_table() -> dict[str, dict[str, str]]:
    """By habit and column, how it must end."""
    table: dict[str, dict[str, str]] = {}
    name = ""
    for line in TABLE.read_text().splitlines() if TABLE.exists() else ():
        if line and not line.startswith((" ", "#")):
            name = line.strip()
        elif line.startswith(" "):
            columns, _, end = line.strip().partition(" | ")
            table.setdefault(name, {}).update(dict.fromkeys(columns.split(), end))
    return table


def write_table(table: dict[str, dict[str, str]]) -> None:
    """Put the table into its file."""
    lines = ["# Written by tests/harness/habit_table.py --write, which says what the columns and the words mean."]
    for name, ends in sorted(table.items()):
        lines += ["", name]
        for end in dict.fromkeys(
            sorted(ends.values(), key=lambda end: ("equal", "refused", "wrong").index(_kind(end)))
        ):
            lines.append(f"    {' '.join(column for column in ends if ends[column] == end)} | {end}")
    TABLE.write_text("\n".join(lines) + "\n")


def agrees(found: str, says: str) -> bool:
    """Whether a script has ended as the table says: refused with these words somewhere, or wrong in some way."""
    kind, words = _kind(says), says.partition(": ")[2]
    return _kind(found) == kind and (kind != "refused" or words in found)


def _kind(end: str) -> str:
    return end.partition(":")[0]


def _shortened(found: dict[str, str], says: dict[str, str]) -> dict[str, str]:
    """The ends to write: as the table says where that is still true."""
    return {
        column: says[column] if column in says and agrees(end, says[column]) else end[:_SHOWN].rstrip()
        for column, end in found.items()
    }


def main(arguments: list[str]) -> None:
    """See the module."""
    names = [name for name in arguments if not name.startswith("-")]
    table = read_table()
    chosen = [Habit(name) for name in names] or habits()
    run: Callable[[Habit], dict[str, str]] = Habit.found
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for habit, found in zip(chosen, pool.map(run, chosen), strict=True):
            says = table.get(habit.name, {})
            for column, end in found.items():
                if names or column not in says or not agrees(end, says[column]):
                    print(f"{habit.name}  {column}: {end}", flush=True)
            table[habit.name] = _shortened(found, says)
            if "--write" in arguments:
                write_table(table)


if __name__ == "__main__":
    main(sys.argv[1:])
