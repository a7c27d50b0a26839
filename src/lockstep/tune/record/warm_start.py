"""What other searches have found, for the algorithm of a search that begins.

    runs/old ──► trials whose parameters the new space has ──► RUN/warm_start.json ──► each worker's algorithm

The file is written before the search begins and not changed, so a worker that joins, and a search that is resumed, know
the same.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from lockstep.errors import SettingError
from lockstep.records import MOST_GROWN, from_known, read_object
from lockstep.small_files import create_text
from lockstep.tune.record.journal import SearchPlan, read_search
from lockstep.tune.search import Individual, Point, Space

_FILE = "warm_start.json"


@dataclass(frozen=True, slots=True)
class Known:
    """A trial of another search, at its place in the space of this one."""

    point: Point
    losses: tuple[float, ...]
    violation: float
    budget: int | None


@dataclass(frozen=True, slots=True)
class WarmStart:
    """What a search knows from others."""

    known: tuple[Known, ...]
    #: By source as it was given: how many of its trials are known here, and how many are not, by the reason.
    told: Mapping[str, Mapping[str, int]]

    @classmethod
    def begin(cls, directory: Path, space: Space, objectives: int, sources: Sequence[str]) -> Self:
        """Read what the search in ``directory`` knows from others; before it begins, take it from ``sources``.

        Args:
            directory: of the search.
            space: what it searches.
            objectives: number of losses of its trials.
            sources: the directories of others, each perhaps with values for parameters that its trials do not have, as
                ``runs/old:momentum=0.9``. None for a search that has begun: those that it has.

        Raises:
            SettingError: if one holds no search, or the search has begun with other sources.
        """
        if sources and not (directory / _FILE).exists() and SearchPlan.read(directory) is None:
            made = cls._of(space, objectives, sources)
            create_text(directory / _FILE, json.dumps(asdict(made)) + "\n", durable=True)
        kept = cls.read(directory, space)
        if sources and tuple(kept.told) != tuple(sources):
            raise SettingError(
                f"the search in {directory} has begun with the trials of {', '.join(kept.told) or 'no other search'}, "
                f"and is asked to go on with those of {', '.join(sources)}; leave that out, or begin again with --fresh"
            )
        return kept

    @classmethod
    def read(cls, directory: Path, space: Space) -> Self:
        """What the search over ``space`` in ``directory`` knows from others.

        Raises:
            SettingError: if the file is damaged.
        """
        try:
            content = read_object(directory / _FILE, MOST_GROWN)
            known = tuple(from_known(Known, one) for one in content["known"])
            if strange := [one for one in known if not space.has(one.point) or not one.losses]:
                raise ValueError(f"{strange[0]} is no trial of this space")
            return cls(known, from_known(cls, {**content, "known": []}).told)
        except FileNotFoundError:
            return cls((), {})
        except (LookupError, TypeError, ValueError) as error:
            raise SettingError(f"{directory / _FILE} is damaged: {error}; put it back from a copy") from error

    def individuals(self) -> Iterator[Individual]:
        """As algorithms see them; their numbers are negative, for they are no trials of this search."""
        for index, one in enumerate(self.known):
            yield Individual(
                -1 - index, one.point, one.losses, one.violation, one.budget, worker=-1, operator="warm start"
            )

    @classmethod
    def _of(cls, space: Space, objectives: int, sources: Sequence[str]) -> Self:
        known: list[Known] = []
        told: dict[str, Mapping[str, int]] = {}
        for source in sources:
            directory, values = _split(source, space)
            reasons: Counter[str] = Counter(used=0)
            for found in _taken(directory, values, space, objectives):
                reasons[found if isinstance(found, str) else "used"] += 1
                known += [] if isinstance(found, str) else [found]
            told[source] = dict(reasons)
        return cls(tuple(known), told)


def _split(source: str, space: Space) -> tuple[Path, dict[str, object]]:
    """The directory that ``source`` names, and the values that it gives to parameters."""
    parts = source.split(":")
    for end in range(len(parts), 0, -1):
        directory = Path(":".join(parts[:end]))
        if directory.is_dir():
            words = ":".join(parts[end:])
            return directory, space.params_of_words(words) if words else {}
    raise SettingError(f"{source}: there is no such directory; give that of a search, perhaps with :NAME=VALUE,...")


def _taken(directory: Path, values: Mapping[str, object], space: Space, objectives: int) -> Iterator[Known | str]:
    """Of each trial that has ended: what is known from it here, or why nothing is."""
    record = read_search(directory)
    old = Space.from_json(record.space)
    for trial in record.trials:
        if trial.state == "running":
            continue
        if len(trial.losses) != objectives or not all(map(math.isfinite, trial.losses)):
            yield f"failed, or not of {objectives} losses"
            continue
        params = {**values, **old.params(trial.point)}
        point = None
        with contextlib.suppress(SettingError):
            point = space.point(params, with_others=True)
        if point is None or not _is_at(space.params(point), params):
            yield _reason(space, params)
        else:
            budget = len(trial.reports) if trial.is_cut_short else None
            yield Known(point, trial.losses, trial.violation, budget)


def _is_at(there: Mapping[str, Any], params: Mapping[str, Any]) -> bool:
    """Whether no parameter was moved to the nearest value that the space has."""
    return all(
        math.isclose(value, params[name], rel_tol=1e-9, abs_tol=1e-12)
        if isinstance(value, float)
        else value == params[name]
        for name, value in there.items()
    )


def _reason(space: Space, params: Mapping[str, object]) -> str:
    for gene in space.genes:
        if gene.name in params:
            try:
                at = gene.dimension.value(gene.dimension.gene(params[gene.name]))
            except SettingError:
                return f"{gene.name} is not in the new space"
            if not _is_at({gene.name: at}, params):
                return f"{gene.name} is not in the new space"
    missing = next(gene.name for gene in space.genes if gene.name not in params)
    return f"without {missing}"
