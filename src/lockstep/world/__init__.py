"""The rank of this process in its world, and the table of launchers that tell it."""

from lockstep.world.launchers import LAUNCHERS, Environment, number_in
from lockstep.world.world import World, leading_host

__all__ = ["LAUNCHERS", "Environment", "World", "leading_host", "number_in"]
