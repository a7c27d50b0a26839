"""One training run: the loop, and what it needs in memory.

run                  Run: what the user calls; each call goes to one of these
setup                device, threads, process group, strategy, checkpoints; what the parts of a run share
registration         models, optimizers, schedulers; what cannot be trained alike is refused
loaders              data sets
start                a checkpoint is loaded, signals are listened to
training_loop        epochs and micro-batches
evaluation_loop      every sample once
train_step           the order of events within a step
parameter_sets       what each set of optimizers updates
end_of_step          comparison of ranks, save, stop
shutdown             the last save; what an error says
rank_operations      sum, mean, gather, broadcast, barrier

position             where the run is
state                models, optimizers and what is kept
carried_state        what the script carries from step to step
snapshot             what a checkpoint holds
run_checkpoints      resume, save, stop with a checkpoint
save_stop            when to save and to stop, decided for all ranks at once
step_agreement       ... and after which step
stop_requests        signals, the STOP file, the end of the job
metrics              means over samples that do not depend on the ranks
precision            the number format of forward passes, loss scaling
progress_reporter    where the run is, for the user and for the launcher

loop_checks          what the loop's body must not do
evaluation_buffers   buffers in an evaluation are put back
divergence           ranks that hold different values are named
nonfinite            losses and gradients must be finite
identity             what the bits depend on, compared between ranks and at a resume
"""

from lockstep.run.metrics import MetricMeans
from lockstep.run.run import Run

__all__ = ["MetricMeans", "Run"]
