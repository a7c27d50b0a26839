"""The set-up of a run before its first step, and its end after the last step.

    Run(...)                 run_context      device, threads, process group, strategy, checkpoints: a `RunContext`
    run.model, run.optimizer registration     what cannot be trained alike on any number of ranks is refused here
    the first loop           resume           the newest checkpoint, or what survivors left, is loaded; signals are
                                              listened to
                             identity         ... and what the bits depend on is compared: between ranks, with the past
    the script ends          shutdown         the last save; an error gets the advice that belongs to it
                                              ... and is left for the launcher

`run_checkpoints` is where checkpoints are saved and loaded, or nothing where a run has none. `kernels` holds kernels
and number formats to what the run was set to, and scales the losses of fp16 (`Precision`). `missing_names` answers
names that `Run` does not have.
"""
