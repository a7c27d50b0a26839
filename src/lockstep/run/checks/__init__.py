"""The checks of a run in training, whose errors and warnings say how to change the script.

divergence        ranks that hold different values
nonfinite         losses and gradients that are not finite
loop_checks       what a body must not do, since ranks run the body different numbers of times
update_checks     ... and must not do with gradients where ranks divide an update
loss_items        a loss that is no mean over samples, or is divided by the micro-batches besides
batch_losses      a loss in which the samples of a micro-batch meet
buffer_moves      buffers that several micro-batches move otherwise than one large one
written_files     files that several ranks open for writing
script_options    learning rates of a resumed script that differ from those the run began with
oom_advice        two settings that would fit, where a GPU's memory is full
"""
