"""What a rank has of the gradients and parameters that a script may look at before and while optimizers step.

ddp, fsdp          every rank has all gradients, or its rows of each, and steps what it has
zero               every rank has all gradients, and steps some of the parameters
parameter-server   servers have the gradients, and step; workers have copies of the parameters
pipeline, hybrid   a rank has the gradients of some parameters, and steps those
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lockstep.strategies.delegation import first_with
from lockstep.strategies.protocol import Strategy


@dataclass(frozen=True, slots=True)
class UpdateShare:
    """What a rank has of a step's update."""

    steps: bool = True  #: whether this rank steps parameters
    has_gradients: bool = False  #: whether ``.grad`` of every parameter is here until optimizers step
    is_whole: bool = False  #: whether a rank that steps parameters steps all of them


@runtime_checkable
class DividesUpdate(Protocol):
    """A strategy under which optimizers step parameters on some ranks that they do not step on others."""

    def update_share(self) -> UpdateShare:
        """This rank's share; all but ``steps`` is the same on all ranks."""
        ...


class StepsSome(DividesUpdate):
    """A strategy under which each rank has the gradients of some parameters, or of some rows, and steps those."""

    def update_share(self) -> UpdateShare:
        """Some of the parameters, and their gradients."""
        return UpdateShare()


def update_share(strategy: Strategy) -> UpdateShare:
    """What this rank has of a step's update; under most strategies all of it."""
    divides: DividesUpdate | None = first_with(DividesUpdate, strategy)
    return UpdateShare(has_gradients=True, is_whole=True) if divides is None else divides.update_share()
