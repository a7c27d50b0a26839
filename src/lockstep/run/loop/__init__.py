"""The loops over data sets, and the order of events within a step.

    for _ in run.epochs(10):          training_loop     begins turns; `epochs` knows which pass over which data is open
        for x, y in run.train(data):  training_loop     hands out the micro-batches of this rank (step_data)
            run.step(loss)            train_step        backward passes; after the last one the update
                                      end_of_step       ranks are compared; save, stop; the next step begins
        for x, y in run.evaluate(..)  evaluation_loop   every sample once; buffers stay as they are

`parameter_sets` says which optimizers a loss is for, and what each of them updates; `step_losses` which of them have
had a loss, and over how many items it is a mean; `gradient_hooks` calls the script's hooks on gradients; `closures`
computes a step several times for optimizers such as LBFGS. `position` is where the run is; `rank_operations` is
`run.sum` and its like.
"""
