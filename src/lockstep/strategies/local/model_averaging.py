"""Averages of models that diverge, one on each rank.

    rank 0   ●───────╮      ╭───────╮
    rank 1   ●───────┼ mean ┼───────┼ mean
    rank 2   ●───────╯      ╰───────╯

The mean is of:

- trained parameters. Each rank weighs the same: all have made equally many steps, and how far an optimizer steps does
  not grow with the samples behind its gradient;
- whatever else of the model has changed since ranks last held the same, such as BatchNorm's running statistics. Of
  integers, such as its counts of batches, the greatest value is taken instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from lockstep.collectives import Group, TensorShard
from lockstep.formatting import plural
from lockstep.strategies.local.averaging import RankAverager
from lockstep.strategies.parts.module_states import sync_module_states
from lockstep.strategies.parts.state_layout import ReplicatedLayout
from lockstep.strategies.strategy import StateDict, StateLayout
from lockstep.torch_private import version_of

_Key = tuple[int | str, str]
"""One entry of an optimizer's state: the number of its parameter, and its name."""


class DivergedReplicas:
    """The models of all ranks, which diverge while each rank steps separately."""

    def __init__(self, averager: RankAverager) -> None:
        self._averager: Final = averager
        self._group: Final = averager.group
        self._models: Final[list[nn.Module]] = []
        self.trained: Final[list[nn.Parameter]] = []
        self._untrained: Final[list[torch.Tensor]] = []  # parameters that are not trained, and buffers
        self._versions: Final[list[int]] = []  # of the untrained tensors, when ranks last held equal values
        self.diverged = False  #: whether ranks may hold different models
        self.optimizers_diverged = False  #: whether the ranks' optimizers may have different states

    def setup_model(self, model: nn.Module) -> None:
        """Copy rank 0's values of ``model`` to all ranks. Collective.

        Raises:
            MismatchError: if ranks made different models.
        """
        sync_module_states(self._group, model)
        known = {id(t) for t in (*self.trained, *self._untrained)}
        for tensor in (t for t in (*model.parameters(), *model.buffers()) if id(t) not in known):
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                self.trained.append(tensor)
            else:
                self._untrained.append(tensor)
                self._versions.append(version_of(tensor))
        self._models.append(model)

    def resync(self) -> None:
        """Take the ranks' present values as equal, if they were before: the script sets values equally on all ranks."""
        if not self.diverged:
            self.mark_averaged()

    def mark_stepped(self) -> None:
        """Note that ranks have stepped by themselves."""
        self.diverged = self.optimizers_diverged = self._group.size > 1

    def mark_averaged(self) -> None:
        """Note that ranks hold equal models."""
        self.diverged = False
        self._versions[:] = [version_of(t) for t in self._untrained]

    def average(self) -> None:
        """Set every rank's model to the mean of all. Collective."""
        if self.diverged:
            _copy(*self._mean(self._averager))
            self.mark_averaged()

    def average_within(self, averager: RankAverager) -> None:
        """Set the models of the ranks of ``averager`` to their mean; each of these ranks must call the method."""
        if self.diverged:
            _copy(*self._mean(averager))

    def average_untrained(self) -> None:
        """Do as `average`, but leave out trained parameters. Collective."""
        if self.diverged:
            _copy(*self._mean(self._averager, trained=False))
            self._versions[:] = [version_of(t) for t in self._untrained]

    @contextlib.contextmanager
    def averaged_models(self, model: nn.Module | None = None) -> Iterator[None]:
        """A context in which ranks hold the mean of all models, or of ``model``; then their own again. Collective."""
        if not self.diverged:
            yield
            return
        tensors, means = self._mean(self._averager, model)
        own = [t.detach().clone() for t in tensors]
        _copy(tensors, means)
        try:
            yield
        finally:
            _copy(tensors, own)

    def average_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Set the states of ``optimizers`` to the ranks' mean. Collective."""
        for optimizer in optimizers:
            optimizer.load_state_dict(self.mean_optimizer_state(optimizer))
        self.optimizers_diverged = False

    def mean_optimizer_state(self, optimizer: torch.optim.Optimizer) -> StateDict:
        """The state of ``optimizer``, with the mean over ranks. Collective."""
        if not self.optimizers_diverged:
            return optimizer.state_dict()
        return AveragedOptimizer(optimizer, self._group).mean(self._averager)

    def state_dict(self, optimizers: Sequence[torch.optim.Optimizer]) -> StateDict:
        """The ranks' own values in addition to the mean, as `TensorShard` with a row per rank. Collective."""
        changed = list(self._changed_untrained(self._group)) if self.diverged else []
        own = [*self.trained, *(self._untrained[index] for index in changed)] if self.diverged else []
        return {
            "ranks": self._group.size,
            "apart": self.diverged,
            "moved": changed,
            "models": [_row_of(t, self._group) for t in own],
            "moments_apart": self.optimizers_diverged,
            "optimizers": [AveragedOptimizer(o, self._group).own_state() for o in optimizers]
            if self.optimizers_diverged
            else [],
        }

    def load_state_dict(
        self, state: StateDict | None, optimizers: Sequence[torch.optim.Optimizer], say: Callable[[str], None]
    ) -> None:
        """Load a ``state`` of `state_dict`, if from as many ranks, into models and optimizers that hold the mean.

        None: another strategy has saved. For a state from another number of ranks, ``say`` is told that all ranks start
        at the mean.
        """
        self.mark_averaged()
        self.optimizers_diverged = False
        if state is None:
            return
        ranks = self._group.size
        if state["ranks"] != ranks:
            saved = plural(state["ranks"], "rank")
            say(f"the checkpoint was saved by {saved} that stepped by themselves: all {ranks} start at their mean")
            return
        if state["apart"]:
            own = [*self.trained, *(self._untrained[index] for index in state["moved"])]
            _copy(own, [rows[self._group.rank] for rows in state["models"]])
        if state["moments_apart"]:
            for optimizer, remembered in zip(optimizers, state["optimizers"], strict=True):
                _load_own_state(optimizer, remembered, self._group.rank)
        self.diverged, self.optimizers_diverged = state["apart"], state["moments_apart"]

    def _changed_untrained(self, group: Group) -> dict[int, torch.Tensor | None]:
        """Which untrained tensors have changed on some rank, by index; of integers the greatest value. Collective."""
        if not self._untrained:
            return {}
        changed = [index for index, t in enumerate(self._untrained) if version_of(t) != self._versions[index]]
        own_changes = {index: None if _has_mean(t := self._untrained[index]) else t.detach().cpu() for index in changed}
        reported = group.gather_objects(own_changes, "which buffers have changed")
        return {
            index: _elementwise_max([changes[index] for changes in reported if index in changes])
            for index in sorted({index for changes in reported for index in changes})
        }

    def _mean(
        self, averager: RankAverager, model: nn.Module | None = None, *, trained: bool = True
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Tensors of ``model``, or of all models, and the mean of each. Collective for the ranks of ``averager``."""
        models = self._models if model is None else [model]
        inside = {id(t) for m in models for t in (*m.parameters(), *m.buffers())}
        changed = {
            p: most for p, most in self._changed_untrained(averager.group).items() if id(self._untrained[p]) in inside
        }
        real: list[torch.Tensor] = [p for p in self.trained if id(p) in inside] if trained else []
        real += [self._untrained[index] for index, most in changed.items() if most is None]
        integers = {index: most for index, most in changed.items() if most is not None}
        means = averager.means(real)
        return [*real, *(self._untrained[index] for index in integers)], [*means, *integers.values()]


class AveragedLayout(StateLayout):
    """The layout of diverged replicas: checkpoints hold the mean over ranks of models and of optimizer states.

    A checkpoint costs the traffic of one average, and of one further average for each moment of the optimizers.
    """

    def __init__(self, replicas: DivergedReplicas) -> None:
        self._replicas: Final = replicas
        self._whole: Final = ReplicatedLayout()
        self.optimizers: Final[list[torch.optim.Optimizer]] = []  #: whose state was asked for, in the run's order

    def norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """The 2-norm of this rank's gradient: each rank clips its own."""
        return self._whole.norm(parameters)

    def any(self, found: torch.Tensor) -> torch.Tensor:
        """``found`` itself: each rank steps by itself."""
        return found

    def model_state(self, model: nn.Module) -> StateDict:
        """The mean of the ranks' models. Collective."""
        diverged = self._replicas.diverged
        with self._replicas.averaged_models(model):
            state = self._whole.model_state(model)
            for name, value in state.items():
                if diverged and isinstance(value, torch.Tensor):
                    state[name] = value.clone()  # since the model will hold this rank's own values again
        return state

    def load_model(self, model: nn.Module, state: StateDict) -> None:
        """Load the whole state."""
        self._whole.load_model(model, state)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> StateDict:
        """The mean of the ranks' optimizer states. Collective."""
        self._remember(optimizer)
        return self._replicas.mean_optimizer_state(optimizer)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: StateDict) -> None:
        """Load the whole state."""
        self._remember(optimizer)
        self._whole.load_optimizer(optimizer, state)

    def _remember(self, optimizer: torch.optim.Optimizer) -> None:
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)


class AveragedOptimizer:
    """The compared states of the ranks' optimizers: their mean, and each rank's differences from it.

        exp_avg of parameter 7     rank 0: [...]    rank 1: [...]    rank 2: none, it has had no gradient yet
        mean                       over ranks 0 and 1
        rows, shape (3, ...)       rank 0's, rank 1's, zeros; and "rank 2 has none"

    Tensors of floating-point numbers are averaged. Of counts of steps, and of all other values, the greatest is taken.
    The constructor is collective.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, group: Group) -> None:
        self._state: StateDict = optimizer.state_dict()
        self._group = group
        flat = {(n, name): v for n, about in self._state["state"].items() for name, v in about.items()}
        self._moments: dict[_Key, torch.Tensor] = {key: v for key, v in flat.items() if _is_moment(key, v)}
        shapes = {key: (tuple(v.shape), v.dtype) for key, v in self._moments.items()}
        rest = {
            key: v.cpu() if isinstance(v, torch.Tensor) else v for key, v in flat.items() if key not in self._moments
        }
        gathered = group.gather_objects((shapes, rest), "what the optimizers remember")
        self._shapes = {key: shape for shapes, _ in gathered for key, shape in shapes.items()}
        self._lacking = [[key for key in self._shapes if key not in shapes] for shapes, _ in gathered]
        self._rest: list[dict[_Key, Any]] = [rest for _, rest in gathered]
        keys = dict.fromkeys(key for rest in self._rest for key in rest if key not in self._shapes)
        self._common = {key: _elementwise_max([rest[key] for rest in self._rest if key in rest]) for key in keys}

    def mean(self, averager: RankAverager) -> StateDict:
        """The optimizer's ``state_dict()`` with the mean over the ranks. Collective."""
        sums = dict(zip(self._shapes, averager.sums(list(self._local_position().values())), strict=True))
        for key, total in sums.items():
            total.div_(self._group.size - sum(key in lacking for lacking in self._lacking))
        return self._state | {"state": _by_number({**sums, **self._common})}

    def own_state(self) -> StateDict:
        """The values of each rank's optimizer in addition to the mean: plain, and `TensorShard` with a row per rank."""
        missing = [
            [*lacking, *(key for key in self._common if key not in rest)]
            for lacking, rest in zip(self._lacking, self._rest, strict=True)
        ]
        other = [{k: v for k, v in rest.items() if not _same(v, self._common.get(k))} for rest in self._rest]
        return {
            "moments": [[*key, _row_of(value, self._group)] for key, value in self._local_position().items()],
            "lacking": [[list(key) for key in keys] for keys in missing],
            "rest": [[[*key, value] for key, value in rest.items()] for rest in other],
        }

    def _local_position(self) -> dict[_Key, torch.Tensor]:
        """This rank's moments, and zeros for moments of other ranks only; in equal order on all ranks."""
        return {
            key: self._moments[key]
            if key in self._moments
            else torch.zeros(shape, dtype=dtype, device=self._group.device)
            for key, (shape, dtype) in self._shapes.items()
        }


def _load_own_state(optimizer: torch.optim.Optimizer, own: StateDict, rank: int) -> None:
    """Load the values of ``rank`` from `AveragedOptimizer.own_state` into ``optimizer``, which holds the mean."""
    state = optimizer.state_dict()
    flat: dict[_Key, Any] = {(n, name): v for n, about in state["state"].items() for name, v in about.items()}
    flat |= {(number, name): rows[rank] for number, name, rows in own["moments"]}
    flat |= {(number, name): value for number, name, value in own["rest"][rank]}
    for number, name in own["lacking"][rank]:
        flat.pop((number, name), None)
    optimizer.load_state_dict(state | {"state": _by_number(flat)})


def _row_of(tensor: torch.Tensor, group: Group) -> TensorShard:
    """``tensor`` as this rank's row of a tensor with one row per rank."""
    start = (group.rank,) + (0,) * tensor.dim()
    return TensorShard(tensor.detach()[None], start, (group.size, *tensor.shape), tensor.dtype)


def _elementwise_max(values: Sequence[Any]) -> Any:
    """The greatest of numbers, and of tensors element by element; of anything else the first."""
    if all(isinstance(v, torch.Tensor) for v in values):
        return torch.stack(list(values)).amax(0)
    return max(values) if all(isinstance(v, int | float) for v in values) else values[0]


def _is_moment(key: _Key, value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()) and key[1] != "step"


def _same(value: object, other: object) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    return type(value) is type(other) and value == other


def _by_number(flat: Mapping[_Key, object]) -> dict[int | str, dict[str, object]]:
    found: dict[int | str, dict[str, Any]] = {}
    for (number, name), value in flat.items():
        found.setdefault(number, {})[name] = value
    return found


def _has_mean(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _copy(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
