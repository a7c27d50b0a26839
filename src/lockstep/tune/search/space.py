"""The search space: dimensions by name, as the genes of a point."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import SettingError
from lockstep.formatting import did_you_mean
from lockstep.tune.search.dimensions import (
    Choice,
    Dimension,
    Float,
    Int,
    decoded,
    dimension_of,
    encoded,
    snapped,
    snapped_all,
    values_of_word,
)
from lockstep.tune.search.individual import Point


@dataclass(frozen=True, slots=True)
class Gene:
    """One gene of a point."""

    name: str
    dimension: Dimension
    opened_by: tuple[int, int] | None = None  #: the gene of a choice, and the index of the value that opens this one


class Space:
    """What is searched: named dimensions, some of which exist only for certain values of others.

    A point has a gene for each dimension, also for those that do not exist at its values: these have no part in its
    parameters and are always the same, so that equal points are equal parameters. Free of state; `Space.of` makes one.
    """

    def __init__(self, dimensions: Mapping[str, Dimension]) -> None:
        if not dimensions:
            raise SettingError('space={}: give it a dimension, such as {"lr": Float(1e-4, 1e-1, log=True)}')
        self._dimensions = dict(dimensions)
        _check_names(self._dimensions)
        self.genes = tuple(_walk(self._dimensions, None, 0))

    @classmethod
    def of(cls, given: Mapping[str, object] | Space) -> Space:
        """The space that ``given`` describes: dimensions by name, or Propulate's tuples (see `dimension_of`).

        Raises:
            SettingError: if it has no dimensions, a value that describes none, or a name twice at a time.
        """
        if isinstance(given, Space):
            return given
        if not isinstance(given, Mapping):
            raise SettingError(f"space={given!r}: give a mapping of names to dimensions")
        return cls({str(name): dimension_of(value, str(name)) for name, value in given.items()})

    def __len__(self) -> int:
        """How many genes a point has."""
        return len(self.genes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Space) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(tuple(gene.name for gene in self.genes))

    def __repr__(self) -> str:
        return f"Space({self._dimensions})"

    def has(self, point: Point) -> bool:
        """Whether ``point`` is one of this space, as far as `params` needs it."""
        if len(point) != len(self):
            return False
        choices = ((gene.dimension, place) for gene, place in zip(self.genes, point, strict=True))
        return all(0 <= place < one.cells for one, place in choices if isinstance(one, Choice))

    def params(self, point: Point) -> dict[str, Any]:
        """The parameters at ``point``: what the objective is called with, in the order in which they were given."""
        active = self.active(point)
        return {
            gene.name: gene.dimension.value(place)
            for gene, place, exists in zip(self.genes, point, active, strict=True)
            if exists
        }

    def point(self, params: Mapping[str, object], *, with_others: bool = False) -> Point:
        """The point of ``params``: ``params(point(p))`` is ``p``, floats up to rounding (1e-15 of their range).

        Args:
            params: the parameters by name.
            with_others: there may be some that the space does not have.

        Raises:
            SettingError: if one is missing, unknown or outside of its dimension.
        """
        point: list[float] = []
        active: list[bool] = []
        used = set()
        for gene in self.genes:
            active.append(_exists(gene, point, active))
            if not active[-1]:
                point.append(_absent(gene.dimension))
                continue
            if gene.name not in params:
                raise SettingError(f"params={dict(params)}: {gene.name} is missing; give it, of {gene.dimension}")
            used.add(gene.name)
            point.append(gene.dimension.gene(params[gene.name]))
        if not with_others and (unknown := [name for name in params if name not in used]):
            raise SettingError(
                f"params={dict(params)}: the space has no {', '.join(unknown)} at these values; leave it out"
            )
        return tuple(point)

    def complete(self, params: Mapping[str, object], point: Point, random: np.random.Generator) -> Point:
        """The point of ``params``, with the genes of ``point`` for those that are not given.

        A dimension that ``params`` opens and ``point`` does not have is drawn uniformly.

        Raises:
            SettingError: as `check_some` does.
        """
        self.check_some(params)
        had, drawn = self.active(point), random.random(len(self)) * self.widths
        found: list[float] = []
        active: list[bool] = []
        for index, gene in enumerate(self.genes):
            active.append(_exists(gene, found, active))
            if active[-1] and gene.name in params:
                found.append(gene.dimension.gene(params[gene.name]))
            else:
                found.append(point[index] if had[index] else float(drawn[index]))
        return self.snap(found)

    def check_some(self, params: Mapping[str, object]) -> None:
        """Check parameters that need not be all: each is in its dimension, and exists whatever the others are.

        Raises:
            SettingError: if that is not so.
        """
        certain: list[bool] = []  # of each gene, that it exists
        used = set()
        for gene in self.genes:
            opener = None if gene.opened_by is None else self.genes[gene.opened_by[0]]
            certain.append(
                gene.opened_by is None
                or (
                    opener is not None
                    and certain[gene.opened_by[0]]
                    and opener.name in params
                    and opener.dimension.gene(params[opener.name]) == gene.opened_by[1]
                )
            )
            if certain[-1] and gene.name in params:
                gene.dimension.gene(params[gene.name])
                used.add(gene.name)
        for name in params:
            if name not in used:
                raise SettingError(f"params={dict(params)}: {self._why_not(name)}")

    def _why_not(self, name: str) -> str:
        for gene in self.genes:
            if gene.name == name and gene.opened_by is not None:
                opener = self.genes[gene.opened_by[0]]
                return f"{name} exists only with {opener.name}={opener.dimension.value(gene.opened_by[1])!r}; give that"
        return f"the space has no {name}; {did_you_mean(name, [gene.name for gene in self.genes])}"

    def params_of_words(self, text: str) -> dict[str, Any]:
        """The parameters that ``text`` gives as ``NAME=VALUE,NAME=VALUE``; not all of the space need be there.

        Raises:
            SettingError: if that cannot be read as values of this space.
        """
        params: dict[str, Any] = {}
        for word in re.split(r",(?=[^,=]+=)", text):
            name, sign, value = word.partition("=")
            if not sign or not name or name in params:
                raise SettingError(f"{text!r}: write NAME=VALUE,NAME=VALUE, each name once")
            genes = [gene for gene in self.genes if gene.name == name]
            if not genes:
                raise SettingError(f"{text!r}: {self._why_not(name)}")
            # Several values of a choice may open dimensions of one name.
            params[name] = next((found for gene in genes for found in values_of_word(gene.dimension, value)), value)
            if len(genes) == 1:
                genes[0].dimension.gene(params[name])
        return params

    def active(self, point: Point) -> tuple[bool, ...]:
        """Which dimensions exist at ``point``."""
        if not self._is_conditional:
            return (True,) * len(self.genes)
        active: list[bool] = []
        for gene in self.genes:
            active.append(_exists(gene, point, active))
        return tuple(active)

    def snap(self, genes: Iterable[float]) -> Point:
        """The point of ``genes``, which may lie anywhere.

        Numbers are taken within their limits, of finitely many to the nearest, and genes of dimensions that do not
        exist at these values are set to what they always are. Snapping twice changes nothing.
        """
        point: list[float] = []
        active: list[bool] = []
        for gene, place in zip(self.genes, genes, strict=True):
            active.append(_exists(gene, point, active))
            point.append(snapped(gene.dimension, place) if active[-1] else _absent(gene.dimension))
        return tuple(point)

    def snap_all(self, genes: NDArray[np.float64]) -> NDArray[np.float64]:
        """`snap` of each row of ``genes``, of shape (n, genes), in a fraction of the time."""
        points, active = np.empty_like(genes), np.ones(genes.shape, dtype=bool)
        for index, gene in enumerate(self.genes):
            if gene.opened_by is not None:
                choice, value = gene.opened_by
                active[:, index] = active[:, choice] & (points[:, choice] == value)
            snapped = snapped_all(gene.dimension, genes[:, index])
            points[:, index] = np.where(active[:, index], snapped, _absent(gene.dimension))
        return points

    def sample(self, random: np.random.Generator) -> Point:
        """A point drawn uniformly: each value of a dimension as likely as every other."""
        return self.snap(random.random(len(self.genes)) * self.widths)

    @cached_property
    def cells(self) -> NDArray[np.int64]:
        """How many values each gene tells apart, (genes,); 0: a gene of any number."""
        return np.array([gene.dimension.cells for gene in self.genes], dtype=np.int64)

    @cached_property
    def is_choice(self) -> NDArray[np.bool_]:
        """Which genes are indices of choices, (genes,)."""
        return np.array([isinstance(gene.dimension, Choice) for gene in self.genes])

    @cached_property
    def is_float(self) -> NDArray[np.bool_]:
        """Which genes are of a `Float`, (genes,)."""
        return np.array([isinstance(gene.dimension, Float) for gene in self.genes])

    @cached_property
    def widths(self) -> NDArray[np.float64]:
        """Up to where each gene goes from 0, (genes,): 1 for numbers, the number of values for choices."""
        return np.where(self.is_choice, self.cells, 1).astype(float)

    @cached_property
    def points(self) -> float:
        """How many points there are: infinity with a gene of any number."""
        return _count(self._dimensions)

    @cached_property
    def _is_conditional(self) -> bool:
        return any(gene.opened_by is not None for gene in self.genes)

    def to_json(self) -> dict[str, Any]:
        """The space in terms of JSON; `from_json` gives an equal one back."""
        return _to_json(self._dimensions)

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Self:
        """The space of which ``value`` is the `to_json`."""
        return cls(_from_json(value))


def _walk(dimensions: Mapping[str, Dimension], opened_by: tuple[int, int] | None, first: int) -> Iterator[Gene]:
    """The genes of ``dimensions``, each choice before what it opens; ``first`` is the number of the first."""
    number = first
    for name, dimension in dimensions.items():
        yield Gene(name, dimension, opened_by)
        here, number = number, number + 1
        if isinstance(dimension, Choice):
            for value, inner in dimension.opens:
                for gene in _walk(inner, (here, value), number):
                    yield gene
                    number += 1


def _exists(gene: Gene, point: list[float] | Point, active: list[bool]) -> bool:
    if gene.opened_by is None:
        return True
    choice, value = gene.opened_by
    return active[choice] and int(point[choice]) == value


def _absent(dimension: Dimension) -> float:
    """The gene of a dimension that does not exist."""
    return 0.0 if isinstance(dimension, Choice) else snapped(dimension, 0.5)


def _check_names(dimensions: Mapping[str, Dimension]) -> set[str]:
    """All names that may exist; refuses one that may exist twice at a time."""
    names: set[str] = set()
    for name, dimension in dimensions.items():
        entry = {name}
        if isinstance(dimension, Choice):
            for _, inner in dimension.opens:
                opened = _check_names(inner)
                if name in opened:
                    raise SettingError(f"space: {name} opens a dimension of its own name; give it another")
                entry |= opened
        if twice := names & entry:
            raise SettingError(f"space: {', '.join(sorted(twice))} may exist twice at a time; give one another name")
        names |= entry
    return names


def _count(dimensions: Mapping[str, Dimension]) -> float:
    product = 1.0
    for dimension in dimensions.values():
        if isinstance(dimension, Choice):
            opened = dict(dimension.opens)
            product *= sum(_count(opened.get(value, {})) for value in range(dimension.cells))
        else:
            product *= dimension.cells or math.inf
    return product


def _to_json(dimensions: Mapping[str, Dimension]) -> dict[str, object]:
    written: dict[str, Any] = {}
    for name, dimension in dimensions.items():
        if isinstance(dimension, Choice):
            written[name] = {"kind": "choice", "values": [encoded(value) for value in dimension.values]}
            if dimension.opens:
                written[name]["opens"] = [[value, _to_json(inner)] for value, inner in dimension.opens]
        else:
            kind, number = ("float", float) if isinstance(dimension, Float) else ("int", int)
            # `Float(-5, 5)` is `Float(-5.0, 5.0)`, also to those that compare what was written.
            limits = {"low": number(dimension.low), "high": number(dimension.high)}
            step = None if dimension.step is None else number(dimension.step)
            written[name] = {"kind": kind, **limits, "log": dimension.log, "step": step}
    return written


def _from_json(written: Mapping[str, Any]) -> dict[str, Dimension]:
    dimensions: dict[str, Dimension] = {}
    for name, entry in written.items():
        if entry["kind"] == "choice":
            values = [decoded(value) for value in entry["values"]]
            choice = Choice(*values)
            opens = tuple((value, _from_json(inner)) for value, inner in entry.get("opens", ()))
            object.__setattr__(choice, "opens", opens)
            dimensions[name] = choice
        else:
            kind = Float if entry["kind"] == "float" else Int
            dimensions[name] = kind(entry["low"], entry["high"], entry["log"], entry["step"])
    return dimensions
