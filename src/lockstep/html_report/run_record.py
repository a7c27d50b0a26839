"""What a run directory holds, read once for a page; what cannot be read is left out."""

from __future__ import annotations

import bisect
import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import SettingError
from lockstep.formatting import plural
from lockstep.launch_contract import FAULT_NOTES
from lockstep.records import open_regular, read_object
from lockstep.report import MetricsFile, RanksFile, RankStatus, Status, StatusFile, about_run, ended, require_run
from lockstep.saved_run import Row, rows

_TAIL_BYTES = 16 << 10  # of each log and report
_PATCH_BYTES = 256 << 10
_MOST_FILES = 64  # of each kind


class Event(NamedTuple):
    """Something that happened at a moment of a run."""

    kind: str
    wall_s: float  #: seconds since 1970
    what: str
    step: float  #: steps done by then, as far as it is known


class Generation(NamedTuple):
    """The life of one world of ranks."""

    number: int
    ranks: int
    hosts: str
    began_s: float  #: seconds since 1970, as the others
    first_s: float  #: its first record of metrics
    last_s: float  #: its last one
    ended_s: float  #: where the next one began, or the last sign of the run


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run, as its directory shows it now."""

    path: Path
    about: Mapping[str, Any]  #: what is in run.json
    status: Status | None
    ranks: list[RankStatus]
    metrics: list[dict[str, float]]
    checkpoints: list[Row]
    saved_at_s: list[float]  #: of each of these, in seconds since 1970
    faults: list[Event]  #: on purpose
    failures: list[dict[str, Any]]
    patches: dict[str, str]  #: changes that no commit holds, by the names of their files
    texts: dict[str, str]  #: reports of hangs, and the ends of logs, by the names of their files
    is_over: bool  #: no launcher works there

    @property
    def name(self) -> str:
        """That of its directory."""
        return self.path.absolute().name

    @property
    def state(self) -> str:
        """In a word or two; a run that was killed says nothing of it itself."""
        said = "no step done" if self.status is None else self.status.state
        return "interrupted" if self.is_over and said in ("training", "evaluating", "saving") else said

    @property
    def began_s(self) -> float:
        """When it was started first, in seconds since 1970."""
        return min((_seconds(start) for start in self.about["starts"]), default=0.0)

    def step_at(self, wall_s: float) -> float:
        """The last step that a record or a fault before ``wall_s`` tells of."""
        at = bisect.bisect_right(self.metrics, wall_s, key=_wall)
        logged = self.metrics[at - 1]["step"] if at else 0
        return max([logged, *(fault.step for fault in self.faults if fault.wall_s <= wall_s)])

    def generations(self) -> list[Generation]:
        """Its generations in their order, with what of their time is known."""
        told = [one for one in self.about["generations"] if _seconds(one)]
        begins = [_seconds(one) for one in told]
        walls = sorted(map(_wall, self.metrics))
        signs = [*walls, *self.saved_at_s, *(fault.wall_s for fault in self.faults), *begins]
        found: list[Generation] = []
        for one, began_s, ended_s in zip(told, begins, [*begins[1:], max(signs, default=0.0)], strict=False):
            own = [wall for wall in walls if began_s <= wall <= ended_s] or [ended_s]
            hosts = one.get("hosts")
            found.append(
                Generation(
                    len(found),
                    one["ranks"] if isinstance(one.get("ranks"), int) else 0,
                    ", ".join(map(str, hosts)) if isinstance(hosts, list) else "",
                    began_s,
                    own[0],
                    own[-1],
                    ended_s,
                )
            )
        return found

    def events(self) -> list[Event]:
        """Starts of generations, checkpoints, and faults on purpose, in their order."""
        generations = [
            Event(
                "generation",
                one.began_s,
                f"generation {one.number}: {plural(one.ranks, 'rank')} on {one.hosts}",
                self.step_at(one.began_s),
            )
            for one in self.generations()
        ]
        saved = [
            Event("checkpoint", wall_s, f"checkpoint of step {row.step}", row.step)
            for row, wall_s in zip(self.checkpoints, self.saved_at_s, strict=True)
        ]
        return sorted([*generations, *saved, *self.faults], key=lambda event: event.wall_s)


def read_run(run_dir: Path) -> RunRecord:
    """What ``run_dir`` holds. Reads its metrics whole, and of checkpoints their manifests only.

    Raises:
        SettingError: if there is no run.
    """
    require_run(run_dir)
    metrics: list[dict[str, float]] = []
    checkpoints: list[Row] = []
    with contextlib.suppress(OSError, SettingError):
        metrics = [row for row in MetricsFile.read(run_dir / "metrics.jsonl") if "wall_s" in row]
    now_s = datetime.now().timestamp()
    with contextlib.suppress(OSError, SettingError):
        checkpoints = rows(run_dir, clock=lambda: now_s)
    return RunRecord(
        run_dir,
        about_run(run_dir) or {"starts": [], "generations": []},
        StatusFile.read(run_dir / "status.json"),
        RanksFile.read_all(run_dir),
        metrics,
        checkpoints,
        [now_s - row.age_s for row in checkpoints],
        list(_faults(run_dir / FAULT_NOTES)),
        list(_failures(run_dir)),
        {path.name: _patch(path) for path in sorted(run_dir.glob("source*.patch"))[:_MOST_FILES]},
        dict(_texts(run_dir)),
        ended(run_dir),
    )


def _wall(row: Mapping[str, float]) -> float:
    return row["wall_s"]


def _seconds(told: Mapping[str, object]) -> float:
    """The ``time`` of an entry of run.json in seconds since 1970; 0 if it has none."""
    try:
        return datetime.fromisoformat(str(told.get("time"))).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _faults(path: Path) -> Iterator[Event]:
    for line in _tail(path).splitlines():
        fault, _, rest = line.partition("\t")
        wall, _, where = rest.partition("\t")
        with contextlib.suppress(ValueError):
            step = re.search(r"step (\d+)", where) or re.search(r"step (\d+)", fault)
            yield Event("fault", float(wall), f"{fault} ({where})", float(step[1]) if step else 0.0)


def _failures(run_dir: Path) -> Iterator[dict[str, object]]:
    for path in sorted(run_dir.glob("failures/generation-*/rank-*.json"))[:_MOST_FILES]:
        with contextlib.suppress(OSError, ValueError):
            told = read_object(path)
            names = ("rank", "host", "kind", "message", "file", "line", "source", "gpu", "traceback")
            yield {"generation": path.parent.name.partition("-")[2], **{name: told.get(name) for name in names}}


def _texts(run_dir: Path) -> Iterator[tuple[str, str]]:
    for pattern in ("hangs/*.txt", "logs/*.log"):
        for path in sorted(run_dir.glob(pattern))[:_MOST_FILES]:
            yield str(path.relative_to(run_dir)), _tail(path, from_end=pattern.startswith("logs"))


def _patch(path: Path) -> str:
    told = _tail(path, _PATCH_BYTES + 1, from_end=False)
    return f"{told[:_PATCH_BYTES]}\n... the rest is in {path.name}" if len(told) > _PATCH_BYTES else told


def _tail(path: Path, most: int = _TAIL_BYTES, *, from_end: bool = True) -> str:
    """The last ``most`` bytes of the file at ``path``, or the first ones; "" if it cannot be read."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        if from_end:
            file.seek(max(0, file.seek(0, 2) - most))
        return file.read(most).decode(errors="replace")
    return ""
