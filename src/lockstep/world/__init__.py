"""Which rank this process is, and the table of launchers that say so."""

from lockstep.world.launchers import LAUNCHERS, Environment, number_in
from lockstep.world.world import World, leading_host

__all__ = ["LAUNCHERS", "Environment", "World", "leading_host", "number_in"]
