"""The data sets of a run, and each micro-batch on its way to the device.

    run.loader(...) ──► loader_arguments ──► loaders ──► lockstep.data: a loader, which reads this rank's samples
    a pass      loop.step_data ──► loaders ──► to_device ──► loop.training_loop ──► micro_batches ──► the loop's body

`micro_batches` notices a micro-batch with fewer rows than samples, too. `pinned_copy` brings single values of a GPU
back to the host without a wait.
"""
