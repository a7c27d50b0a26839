"""One training run: the loop, and what it needs in memory.

loop                Run: what the user calls, in the order of events within a step
stepping            from the losses of a step's micro-batches to one update
agenda              when to save and to stop, decided for all ranks at once
keeping             what a run does with checkpoints
state               what a checkpoint holds
carry               what the script carries from step to step
measures            means over samples that do not depend on the ranks
precision           the number format of forward passes, loss scaling
telling             where the run is, for the user and for the launcher

registration        what cannot be trained alike is refused
body_checks         what the loop's body must not do
evaluation_buffers  buffers in an evaluation are put back
divergence          ranks that hold different values are named
finite              losses and gradients must be finite
identity            what the bits depend on, compared between ranks and at a resume
"""

from lockstep.run.metrics import MetricMeans
from lockstep.run.run import Run

__all__ = ["MetricMeans", "Run"]
