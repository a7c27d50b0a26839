"""One training run: the loop, and what it needs in memory.

loop        Run: what the user calls, in the order of events within a step
agenda      when to save and to stop, decided for all ranks at once
measures    means over samples that do not depend on the ranks
precision   the number format of forward passes, loss scaling
state       what a checkpoint holds
telling     where the run is, for the user and for the launcher
"""

from lockstep.run.loop import Run
from lockstep.run.measures import Measures

__all__ = ["Measures", "Run"]
