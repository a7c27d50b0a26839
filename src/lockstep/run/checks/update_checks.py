"""Checks of gradients and optimizers under strategies where ranks divide a step's update.

between run.backward and run.update     a rank may lack gradients: what is computed from all of them would differ
a hook of an optimizer's step           sees the parameters that this rank steps, and their gradients only
within ``step()``                       one that computes with several parameters at once would know some of them
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from typing import Any, Final

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.run.checks.divergence import DivergenceCheck, checksums
from lockstep.run.setup.run_context import RunContext
from lockstep.seeding import seed_generators
from lockstep.strategies import UpdateShare, has_gradient, parameters_of
from lockstep.torch_private import STEP_HOOKS, step_hooks

#: Elements of a parameter that is copied to be stepped, and groups of an optimizer that are looked at.
_MOST_ELEMENTS: Final = 1 << 20
_MOST_GROUPS: Final = 8
#: All elements of some gradients in the steps of a copy, one after another: what an optimizer learns of all parameters
#: in one step may show in the next, and only where they grow.
_GRADIENTS: Final = (1.0, 1e2, 1e4)


class UpdateChecks:
    """The update checks of a run, on one rank."""

    def __init__(self, context: RunContext) -> None:
        self._context: Final = context
        self._name: Final = context.settings.strategy
        self._divergence: Final = DivergenceCheck(context.group)
        self._probed: Final[set[torch.optim.Optimizer]] = set()

    @property
    def share(self) -> UpdateShare:
        """This rank's share of each update."""
        return self._context.strategy.update_share

    def compare_ranks(self, step: int) -> None:
        """Compare ranks before the update after ``step`` steps, if the update would hide differences. Collective.

        An update hides differences if all ranks have all gradients, and each steps some parameters and takes the others
        from their owners.

        Raises:
            MismatchError: if ranks hold different parameters or gradients.
        """
        if self.share.is_whole or not (self.share.has_gradients and self._context.share.in_step):
            return
        models = [dict(model.named_parameters()) for model in self._context.state.models]
        gradients = [{name: g for name, p in model.items() if (g := has_gradient(p)) is not None} for model in models]
        self._divergence.compare({"models": models, "gradients": gradients}, step, in_step=True)

    def require_gradients(self) -> None:
        """Check that a script which calls ``run.backward`` finds all gradients before ``run.update``.

        Raises:
            UsageError: if some rank has only some of the gradients.
        """
        if not self.share.has_gradients:
            raise UsageError(
                f"run.backward(...) apart from run.update(...): under strategy {self._name} no rank has all gradients "
                "between the two, and a norm of them, for example, would be that of a part. Write run.step(loss); to "
                "clip gradients, lockstep.Run(clip_norm=...); for what else is done with them, use ddp, zero or fsdp"
            )

    def require_apart(self, optimizer: torch.optim.Optimizer, sparse: Collection[nn.Parameter]) -> None:
        """Check that ``optimizer`` can step some parameters on this rank, and others on other ranks.

        Before its first step a copy of it steps a few of its parameters; about 1 ms.

        Args:
            optimizer: about to step.
            sparse: parameters whose gradients are sparse.

        Raises:
            UsageError: if it has a hook, or what it computes for one parameter depends on others.
        """
        share = self.share
        if share.is_whole:
            return
        kind = type(optimizer).__name__
        if any(step_hooks(optimizer)):
            raise UsageError(
                f"{kind} has a hook of its step (register_step_pre_hook or register_step_post_hook), and under "
                f"strategy {self._name} a rank steps some of the parameters, so the hook would find those and their "
                "gradients only. To clip gradients, write lockstep.Run(clip_norm=...); what is done once a step, where "
                "run.step(loss) has returned True; or use ddp or fsdp"
            )
        if share.steps and optimizer not in self._probed:
            self._probed.add(optimizer)
            if mixes_parameters(optimizer, sparse):
                raise UsageError(
                    f"{kind} computes a step of one parameter from others, too, as from a norm of all gradients or by "
                    f"random numbers that it draws for one after another, and under strategy {self._name} a rank steps "
                    "some of the parameters. To clip gradients, write lockstep.Run(clip_norm=...) and turn off what "
                    "the optimizer clips; or use ddp or fsdp"
                )


def mixes_parameters(optimizer: torch.optim.Optimizer, sparse: Collection[nn.Parameter]) -> bool:
    """Whether what ``optimizer`` computes for some parameters changes with the gradients of others.

    Copies of it step copies of some small parameters, once with large gradients of the others, and once without these.
    ``optimizer`` itself and what it steps stay as they are; random generators are seeded anew. False, too, where it
    cannot be copied, or fails.
    """
    others, watched = _chosen(optimizer, sparse)
    if not others or not watched:
        return False
    try:
        return _stepped(optimizer, watched, others, with_others=True) != _stepped(
            optimizer, watched, others, with_others=False
        )
    except Exception:  # noqa: BLE001 - it is the user's, who will hear of the error where the optimizer itself steps
        return False


def _chosen(
    optimizer: torch.optim.Optimizer, sparse: Collection[nn.Parameter]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Small parameters: of each group, and of its vectors apart, one that is stepped before the other one."""
    pairs: list[list[nn.Parameter]] = []
    for group in optimizer.param_groups[:_MOST_GROUPS]:
        for is_vector in (True, False):
            fit = [
                (p.numel(), place)
                for place, p in enumerate(group["params"])
                if (p.dim() < 2) == is_vector
                and p.requires_grad
                and 0 < p.numel() <= _MOST_ELEMENTS
                and not (p.is_meta or p in sparse or hasattr(p, "to_local"))
            ]
            pairs.append([group["params"][place] for place in sorted(place for _, place in sorted(fit)[:2])])
    single = [p for pair in pairs if len(pair) == 1 for p in pair]
    first, second = [pair[0] for pair in pairs if len(pair) == 2], [pair[1] for pair in pairs if len(pair) == 2]
    return (first, second + single) if first else (single[:1], single[1:])


def _stepped(
    optimizer: torch.optim.Optimizer,
    watched: Sequence[nn.Parameter],
    others: Sequence[nn.Parameter],
    *,
    with_others: bool,
) -> tuple[list[int], str]:
    """What becomes of ``watched`` in a few steps of a copy of ``optimizer``, and of their groups' plain options.

    ``others`` have a gradient, or not.
    """
    wanted = {*watched, *others}
    twins = {
        p: nn.Parameter(
            p.detach().clone() if p in wanted else torch.empty(0, dtype=p.dtype, device=p.device),
            requires_grad=p.requires_grad,
        )
        for p in parameters_of(optimizer)
    }
    memo: dict[int, Any] = {id(p): twin for p, twin in twins.items()}
    state = {key: value for key, value in optimizer.state.items() if key not in twins or key in wanted}
    memo[id(optimizer.state)] = defaultdict(dict, copy.deepcopy(state, memo))
    # Not the hooks, which may hold anything, nor what schedulers put in the place of the class's own `step`.
    own = {name: OrderedDict() if name in STEP_HOOKS else v for name, v in vars(optimizer).items() if name != "step"}
    twin = object.__new__(type(optimizer))
    twin.__dict__ = copy.deepcopy(own, memo)
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # without the hooks of all optimizers, which others have registered
    seed_generators(0)
    for gradient in _GRADIENTS:
        for p in watched:
            twins[p].grad = torch.full_like(p, 0.01)
        for p in others if with_others else ():
            twins[p].grad = torch.full_like(p, gradient)
        step(twin)
    groups = [group for group in twin.param_groups if any(twins[p] is q for p in watched for q in group["params"])]
    plain = [[(k, v) for k, v in group.items() if isinstance(v, bool | int | float | str)] for group in groups]
    return checksums([twins[p] for p in watched]), repr(plain)
