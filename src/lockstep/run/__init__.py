"""One training run: the loop, and what it needs in memory.

run                  Run: what the user calls; each call goes to one of these
setup                device, threads, process group, strategy, checkpoints; what the parts of a run share
registration         models, optimizers, schedulers; what cannot be trained alike is refused
loaders              data sets; loader_arguments: what they were given with
start                a checkpoint is loaded, signals are listened to
training_loop        epochs and micro-batches
passes               which pass over which data set is open; what a resume repeats
step_data            the micro-batches of a step, from one loader or from several
micro_batches        what train and evaluate hand out; to_device: on their way to the device
evaluation_loop      every sample once
train_step           the order of events within a step
parameter_sets       what each set of optimizers updates
closures             optimizers that compute the loss several times in a step
end_of_step          comparison of ranks, save, stop
shutdown             the last save; what an error says; error_file: what is left of it
rank_operations      sum, mean, gather, broadcast, barrier

position             where the run is
state                models, optimizers and what is kept
kept                 what the script has named in keep
carried_state        what the script carries from step to step
snapshot             what a checkpoint holds
run_checkpoints      resume, save, stop with a checkpoint
resume_proof         the first step after a resume is the one that followed the checkpoint; script_state: so is what
                     variables of the script hold
replay_series        in the first step, many replays; loop_body: the body as a function; script_snapshot: nothing of
                     them stays; line_calls: what functions lines run
training_inputs      what training is computed from, by the source (source_reads); shared_inputs: the same on all
                     ranks; evaluation_reads: the same of measured values; body_changes: what a body makes from itself;
                     rank_reads: what depends on the number of ranks
resume_point         whether this rank still holds the state of the last finished step
emergency            what ranks leave when another one dies; emergency_files: where; emergency_choice: which is used
measures_journal     what one rank alone has measured, for that case
mirror               each rank's part of the state in memory of two hosts; mirror_plan: who keeps what
save_stop            when to save and to stop, decided for all ranks at once
step_agreement       ... and after which step
stop_requests        signals, the STOP file, the end of the job
metrics              means over samples that do not depend on the ranks
precision            the number format of forward passes, loss scaling; kernels: those that repeat their bits, threads
best, early_stopping by which metric a run is judged, and when it no longer improves
run_log              the record of metrics, and the trackers
whole_models         models out of a run, wherever their parts lie
progress_reporter    where the run is, for the user and for the launcher; rank_warnings: what single ranks have to say

measurement          what a benchmark's run measures before it ends; step_recorder: where a step's time goes;
                     host_waits: where the script waits for values
transcript_writer    what a run writes down to be compared with others

loop_checks          what the loop's body must not do; left_out_samples: micro-batches that have lost some
outside_forward      methods of a model that do not train, named
oom_advice           what to change where a GPU's memory is full
evaluation_buffers   buffers in an evaluation are put back
divergence           ranks that hold different values are named; audit: those that compute or store wrong bits
nonfinite            losses and gradients must be finite
identity             what the bits depend on, compared between ranks and at a resume
"""

from lockstep.run.host_waits import HostWaits
from lockstep.run.metrics import MetricMeans
from lockstep.run.oom_advice import free_bytes
from lockstep.run.replay import Play
from lockstep.run.run import Run

__all__ = ["HostWaits", "MetricMeans", "Play", "Run", "free_bytes"]
