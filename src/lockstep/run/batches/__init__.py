"""The data sets of a run, and each micro-batch on its way to the device.

    run.loader(...) ──► loader_arguments ──► loaders ──► to_device ──► micro_batches ──► the body of the loop

`micro_batches` notices a micro-batch with fewer rows than samples, too. `pinned_copy` brings single values of a GPU
back to the host without a wait.
"""
