"""Means over samples that depend neither on the order of additions nor on which rank computed which part.

A float is a whole number of units of 2**-1074, so its sums are kept as Python's integers: exact, whatever their order.
"""

from __future__ import annotations

import contextlib
import math
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import FrameType
from typing import Final, Literal

import torch

from lockstep.batch import MicroBatchPosition
from lockstep.checkpoint import SavedTree, StateTree
from lockstep.collectives import Group
from lockstep.errors import UsageError
from lockstep.run.source.reachable import find, script_roots

# Number of values that wait on the device before they are fetched; each fetch waits for the device once.
_FETCH = 512
_MOST_LOOKED_AT = 500  # objects of the script, for its lists
_UNIT_BITS = 1074

State = dict[str, list[int | float]]
Number = float | torch.Tensor
"""One number, or a tensor of no dimension that holds it where one would have to wait for it."""
Added = tuple[str, Number, Number, Number]
"""A name, a value, its weight and its count."""
ListsThen = Mapping[int, tuple[list[object], int]]
"""The script's lists, by `id`, with their lengths at some time."""


def _lists_of(frame: FrameType, *, skip: Collection[int] = (), limit: int = 3000) -> ListsThen:
    lists = find(script_roots(frame), list, skip=skip, limit=limit).values()
    return {id(each): (each, len(each)) for each in lists if isinstance(each, list)}


def _tensors_in(numbers: Iterable[Number]) -> dict[int, torch.Tensor]:
    """The tensors among ``numbers``, by `id`."""
    return {id(number): number for number in numbers if isinstance(number, torch.Tensor)}


class _Mean:
    """A running mean; with ``finite_only``, of finite values only."""

    def __init__(self, *, finite_only: bool = False) -> None:
        self._finite_only: Final = finite_only
        self.units = 0  # the sum of the finite values, in units of 2**-1074
        self.odd = 0.0  # the sum of the other values: nan or an infinity, if any came
        self.count = 0
        self._waiting: list[tuple[Number, Number, Number]] = []

    def add(self, value: Number, weight: Number, count: Number) -> None:
        if isinstance(value, torch.Tensor) or isinstance(count, torch.Tensor):
            self._waiting.append((value, weight, count))
            if len(self._waiting) == _FETCH:
                self.fetch()
        else:
            self.add_number(value, int(weight), int(count))

    def fetch(self) -> None:
        """Every value is in the sums; waits for the device, once for all values."""
        if not self._waiting:
            return
        values = _tensors_in(value for value, _, _ in self._waiting)
        counts = _tensors_in(each for _, *both in self._waiting for each in both)  # of a value mostly one and the same
        # Stacked apart, since a stack has one type: counts would be rounded as values are.
        stacks = [torch.stack(list(each.values())).double() for each in (values, counts) if each]
        numbers = dict(zip((*values, *counts), torch.cat(stacks).tolist(), strict=True))
        for each in self._waiting:
            value, weight, count = (numbers[id(n)] if isinstance(n, torch.Tensor) else n for n in each)
            self.add_number(value, int(weight), int(count))
        self._waiting = []

    def add_number(self, value: float, weight: int, count: int) -> None:
        if self._finite_only and not math.isfinite(value):
            return
        self.count += count
        if math.isfinite(value):
            numerator, denominator = value.as_integer_ratio()
            self.units += numerator * weight << (_UNIT_BITS - denominator.bit_length() + 1)
        else:
            self.odd += value


class MetricMeans:
    """The means of values measured since the last `reduce`, by name; with ``finite_only``, of finite values only."""

    def __init__(self, *, finite_only: bool = False) -> None:
        self._finite_only: Final = finite_only
        self._means: dict[str, _Mean] = {}

    @property
    def names(self) -> list[str]:
        """Of the values added on this rank, in the order in which they came."""
        return list(self._means)

    def add(self, name: str, value: Number, weight: Number, count: Number) -> None:
        """Add ``value``, a mean over ``weight`` items, which counts as ``count``. Does not wait for the device."""
        self._of(name).add(value, weight, count)

    def add_number(self, name: str, value: float, weight: int, count: int) -> None:
        """Add ``value`` as in `add`, for plain numbers."""
        self._of(name).add_number(value, weight, count)

    def reduce(self, group: Group) -> dict[str, float]:
        """The mean of each measure over all ranks; the means are empty afterwards. Collective.

        A rank may have no values of a measure, as one without a micro-batch in a short step.
        """
        total = self.state(group)
        self._means = {}
        return {name: _mean(*parts) for name, parts in total.items()}

    def state(self, group: Group) -> State:
        """The sums of all ranks so far, equal on every rank. Collective."""
        total: State = {}
        for state in group.gather_objects(self.own(), "measures"):
            total = plus(total, state)
        return total

    def own(self) -> State:
        """The sums of this rank so far. Waits for the device."""
        for mean in self._means.values():
            mean.fetch()
        return {name: [m.units, m.odd, m.count] for name, m in self._means.items()}

    def load(self, state: Mapping[str, list[int | float]], *, here: bool) -> None:
        """Load a ``state`` of any number of ranks, which is completely on the rank with ``here``."""
        self._means = {}
        for name, (units, odd, count) in state.items():
            if here:
                mean = self._of(name)
                mean.units, mean.odd, mean.count = int(units), float(odd), int(count)

    def _of(self, name: str) -> _Mean:
        mean = self._means.get(name)
        if mean is None:
            mean = self._means[name] = _Mean(finite_only=self._finite_only)
        return mean


class PassMetrics:
    """The values measured in the script's current pass over a data set.

    Args:
        counts: whether this rank's micro-batches are counted on this rank, not on another rank of the same replica.
        recent: whether `recent` is wanted, too.
        alike: whether the gradient of a step is equal on all ranks.
        notes: whether values are written down as they come, see `take_added`.
    """

    def __init__(self, *, counts: bool, recent: bool = False, notes: bool = False, alike: bool = True) -> None:
        self._counts: Final = counts
        self._wants_recent: Final = recent
        self._alike: Final = alike
        self._added: Final[list[Added] | None] = [] if notes else None  # in the current step, and not taken yet
        self.has_called = False  #: whether `measure` was called since `take_added`, also for no samples
        self.train = MetricMeans()  #: of the steps of this pass
        self.recent = MetricMeans()  #: of the steps since its last reduction, in any pass
        self._of_step: Final[list[Added]] = []  # of the current step, which may be discarded
        # Norms of the steps' gradients, in separate means: where all ranks have the same norms, no norm is lost with a
        # rank.
        self.norms = MetricMeans(finite_only=True)
        self.recent_norms = MetricMeans(finite_only=True)
        self._are_logged = False  # whether recent norms are logged: then the next step's norms are the first
        self._norms_of_step: Final[list[tuple[str, Number]]] = []
        self.evaluate = MetricMeans()
        self.inside: Literal["train", "evaluate"] | None = None  #: the script's current pass
        self._last: Literal["train", "evaluate"] | None = None  # the pass that began last, without one inside
        self.position: MicroBatchPosition | None = None  #: of the script's current micro-batch
        self.samples = 0  #: in this micro-batch; 0 if it counts for nothing on this rank
        self.asked_counts = False  #: whether the script has asked if a micro-batch counts, to leave out what does not
        self._bodies: Final[list[tuple[MicroBatchPosition, bool]]] = []  # of the step, and whether they count here
        # The script's lists as each of these bodies began, by `id`, with their lengths then, see `note_lists`.
        self._lists_of_bodies: Final[list[ListsThen]] = []
        # The script's lists from before an evaluation in this body; None: no evaluation.
        self._lists: ListsThen | None = None
        self._names_of_losses = {"loss"}
        #: Losses of the current step, by the index of the micro-batch, while they are recorded; None: not recorded.
        self.losses: dict[int, list[Number]] | None = None
        #: called with each value measured in the micro-batch, if its results are compared
        self.compares: Callable[[str, object], None] | None = None

    def refuse_nested(self, method: str) -> None:
        """Check that the script is in no pass; it calls ``method``.

        Raises:
            UsageError: if the script is in a pass.
        """
        if self.inside is not None:
            raise UsageError(
                f"run.{method}(...) inside of run.{self.inside}(...): leave that loop first, by break or at its end"
            )

    def require_ended(self, method: Literal["train", "evaluate"]) -> None:
        """Check that no pass of ``method`` is open.

        Raises:
            UsageError: if a pass is open, such as an iterator that the script still holds.
        """
        if self.inside == method:
            raise UsageError(
                f"run.{method}(...) was not finished when the body of the loop around it ended: iterate over it in a "
                "`for` loop, which finishes it"
            )

    @property
    def in_replay(self) -> bool:
        """Whether the script's micro-batch is a replay, in which logs and messages are suppressed."""
        return self.inside == "train" and self.position is not None and self.position.is_replay

    def enter(self, method: Literal["train", "evaluate"]) -> None:
        """A pass begins."""
        self.inside = self._last = method

    def leave(self) -> None:
        """The pass is over."""
        self.inside = self.position = self._lists = None
        self.samples = 0

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context for an evaluation, also inside of the body of `Run.train`, whose means continue afterwards."""
        before = self.inside, self.position, self.samples
        if self.inside == "train" and self._lists is None:
            self._lists = _lists_of(sys._getframe())
        self.evaluate = MetricMeans()
        self.inside = "evaluate"
        self._last = before[0] or "evaluate"
        try:
            yield
        finally:
            self.inside, self.position, self.samples = before

    def hand_out(self, position: MicroBatchPosition) -> None:
        """Measure for the micro-batch at ``position`` from now on."""
        self.position = position
        self.samples = 0 if position.is_padding or position.is_replay or not self._counts else position.samples
        if self.inside == "train":
            self._lists = None
            if self._bodies and self._bodies[-1][0].last:
                self._bodies.clear()
                self._lists_of_bodies.clear()
            self._bodies.append((position, self.samples > 0))

    def bodies(self, value: object) -> Sequence[tuple[MicroBatchPosition, bool]]:
        """All micro-batches of the step in this rank's bodies, and whether each counts, in the step's last body.

        Empty elsewhere, and for a ``value`` that an evaluation in this body may have given.
        """
        is_last = self.inside == "train" and self.position is not None and self.position.last
        found, then = (None, 0) if self._lists is None else self._lists.get(id(value), (None, 0))
        is_of_step = self._lists is None or (found is not None and len(found) == then)
        return self._bodies if is_last and is_of_step else ()

    def note_lists(self, frame: FrameType, skip: Iterable[object]) -> None:
        """Note the lists of the script, which runs in ``frame``, as a body begins; called for each body or for none.

        Lists in objects of ``skip`` are left out.
        """
        self._lists_of_bodies.append(_lists_of(frame, skip={id(each) for each in skip}, limit=_MOST_LOOKED_AT))

    def depends_on_ranks(self, value: object) -> bool:
        """Whether the order depends on the ranks in which items of bodies lie that ``value`` holds, if any, by rank.

        In a step's last body it does where ranks take micro-batches in turn; after a training pass it always does. An
        evaluation gives neighbouring samples to each rank.
        """
        if self.inside == "train":
            return bool(self._lists_of_bodies) and bool(self.bodies(value))
        return self._last == "train"

    def added_in(self, value: object) -> list[tuple[MicroBatchPosition, bool]] | None:
        """The body of the step that has added each item of the list ``value``, if lists were noted.

        None if the bodies are not known: for items of earlier steps, and for a list that was not there, or was not
        found, when the last body began, unless this is the only one of the step that counts here.
        """
        noted = [each.get(id(value)) for each in self._lists_of_bodies]
        if not isinstance(value, list) or not noted or len(noted) != len(self._bodies):
            return None
        counting = [number for number, (_, counts) in enumerate(self._bodies, start=1) if counts]
        if noted[-1] is None and value and counting != [len(noted)]:
            return None
        lengths = [*(0 if each is None else each[1] for each in noted), len(value)]
        if lengths[0] or lengths != sorted(lengths):
            return None
        added = zip(self._bodies, pairwise(lengths), strict=True)
        return [body for body, (first, end) in added for _ in range(first, end)]

    def add_loss(self, name: str, index: int, value: Number, items: Number) -> None:
        """``value`` is a loss of the step's micro-batch ``index``, the mean over ``items``, both `as_it_is`."""
        self._names_of_losses.add(name)
        if self._counts:
            self._note((name, value, items, items))
            if self.losses is not None:
                self.losses.setdefault(index, []).append(value)

    def add_norm(self, name: str, norm: torch.Tensor) -> None:
        """Add the ``norm`` of the step's gradient, equal on ranks that step together. Does not wait for the device."""
        self._norms_of_step.append((name, as_it_is(norm)))

    def begin_pass(self) -> None:
        """Begin a pass, without the values of an earlier pass that was left by ``break``."""
        self.train, self.norms = MetricMeans(), MetricMeans(finite_only=True)

    def reduce_pass(self, group: Group) -> dict[str, float]:
        """The means of the pass over all ranks; the means are empty afterwards. Collective."""
        norms, self.norms = self.norms, MetricMeans(finite_only=True)
        return self.train.reduce(group) | self._means_of(norms, group)

    def reduce_recent(self, group: Group) -> dict[str, float]:
        """The means of the recent steps over all ranks, to be logged; empty afterwards. Collective."""
        self._are_logged = True
        return self.recent.reduce(group) | self._means_of(self.recent_norms, group)

    def _means_of(self, norms: MetricMeans, group: Group) -> dict[str, float]:
        state = norms.own() if self._alike else norms.state(group)
        return {name: _mean(*parts) for name, parts in state.items()}

    def norms_state(self) -> StateTree:
        """This rank's norms, for a checkpoint."""
        return {"pass": self.norms.own(), "recent": self.recent_norms.own(), "are_logged": self._are_logged}

    def load_norms(self, state: SavedTree) -> None:
        """Load a state of `norms_state`; {}: no norms were measured."""
        self.norms.load(state.get("pass", {}), here=True)
        self.recent_norms.load(state.get("recent", {}), here=True)
        self._are_logged = state.get("are_logged", False)

    def step_is_done(self) -> None:
        """Add the values measured since the last call to the means, as of a step that was made."""
        for added in self._of_step:
            self.train.add(*added)
            if self._wants_recent:
                self.recent.add(*added)
        self._of_step.clear()
        if self._norms_of_step and self._are_logged:
            self.recent_norms, self._are_logged = MetricMeans(finite_only=True), False
        for name, norm in self._norms_of_step:
            self.norms.add(name, norm, 1, 1)
            if self._wants_recent:
                self.recent_norms.add(name, norm, 1, 1)
        self._norms_of_step.clear()

    def forget_step(self) -> None:
        """Drop the values measured since the last `step_is_done`, as of a discarded step."""
        self._of_step.clear()
        self._norms_of_step.clear()
        self.take_added()
        if self.losses is not None:
            self.losses.clear()

    def take_added(self) -> list[Added]:
        """The values measured in the current step since the last call, if values are written down."""
        self.has_called = False
        if not self._added:
            return []
        added = self._added.copy()
        self._added.clear()
        return added

    def measure(self, values: Mapping[str, object], count: int | torch.Tensor | None) -> None:
        """Add ``values`` of the current micro-batch to the metrics: means over samples, or over ``count`` items.

        Raises:
            UsageError: outside of a pass, for ``loss`` while training, and for a count of no value.
        """
        if self.inside is None:
            raise UsageError("run.measure(...) outside of run.train(...) and run.evaluate(...): there are no samples")
        if self.inside == "train" and (taken := self._names_of_losses & values.keys()):
            name = min(taken)
            raise UsageError(
                f"run.measure({name}=...) in run.train(...): run.step(loss) measures its loss under that name; give "
                f"yours another, such as run.measure(my_{name}=...)"
            )
        self.has_called |= self.inside == "train"
        if count is not None and not values:
            raise UsageError("run.measure(count=...) says how many items a value is the mean of; name the value, too")
        compares = self.compares if self.inside == "train" else None
        if not self.samples and compares is None:
            return
        for name, value in values.items():
            added = measured(name, value, self.samples, count)
            if compares is not None:
                compares(f"run.measure({name}=...)", added[1])
            if not self.samples:
                continue
            if self.inside == "train":
                self._note(added)
            else:
                self.evaluate.add(*added)

    def _note(self, added: Added) -> None:
        self._of_step.append(added)
        if self._added is not None:
            self._added.append(added)


def as_it_is(value: torch.Tensor) -> Number:
    """The present value of ``value`` (no dimension), safe from later writes. Does not wait for the device."""
    return value.item() if value.is_cpu and not value.is_complex() else value.detach().clone()


def measured(name: str, value: object, samples: int, count: int | torch.Tensor | None = None) -> Added:
    """``value`` as one number for each sample, or the mean of ``count`` items; None: of all ``samples``.

    The script may change ``value`` and ``count`` afterwards.

    Raises:
        UsageError: if ``value`` is neither.
    """
    if isinstance(value, torch.Tensor) and value.dim():
        if count is not None:
            raise UsageError(
                f"measure({name}=tensor of shape {tuple(value.shape)}, count=...): count is for one number that is "
                "the mean of so many items; leave it out, or give the mean"
            )
        whole = value.dtype in (torch.float16, torch.bfloat16, torch.float32)
        total = value.detach().sum(dtype=torch.float64 if whole else None)
        return name, as_it_is(total.double()), 1, value.numel()
    if isinstance(value, float):
        number: Number = float(value)  # also a NumPy number
    else:
        try:
            tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            tensor = torch.empty(0, device="cpu")
        if tensor.dim():
            raise UsageError(f"measure({name}={value!r}): give a tensor with one number per sample, or one number")
        number = as_it_is(tensor)
    items = samples if count is None else as_it_is(count) if isinstance(count, torch.Tensor) else count
    return name, number, items, items


def plus(one: Mapping[str, list[int | float]], other: Mapping[str, list[int | float]]) -> State:
    """The sums of both."""
    total = {name: list(held) for name, held in one.items()}
    for name, held in other.items():
        total[name] = [a + b for a, b in zip(total.get(name, [0, 0.0, 0]), held, strict=True)]
    return total


def _mean(units: int | float, odd: int | float, count: int | float) -> float:
    """The mean, correctly rounded; NaN if the count is 0."""
    if odd or not count:
        return float(odd) or math.nan
    return int(units) / (int(count) << _UNIT_BITS)


def explain_missing(error: BaseException, metrics: Mapping[str, float]) -> str:
    """The advice for an error of ``run.metrics[NAME]`` for a missing name; "" for any other error.

    ``run.metrics`` is a plain dict, which scripts save and hand on, so it cannot give the advice itself.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not (isinstance(error, KeyError) and error.args and frames and ".metrics[" in (frames[-1].line or "")):
        return ""
    name = str(error.args[0])
    there = f"run.metrics has {', '.join(metrics)}" if metrics else "nothing is in run.metrics yet"
    return (
        f"{there}; {name} is there from the end of the loop of run.train(...) or run.evaluate(...) in which "
        f"run.measure({name}=...) measures it; a loop that is left by break has no means"
    )
