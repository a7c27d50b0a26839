"""The loops over data sets, and the order of events within a step.

    for _ in run.epochs(10):          epochs            which pass over which data set is open
        for x, y in run.train(data):  training_loop     hands out the micro-batches of this rank (step_data)
            run.step(loss)            train_step        backward passes; after the last one the update
                                      end_of_step       ranks are compared; save, stop; the next step begins
        for x, y in run.evaluate(..)  evaluation_loop   every sample once; buffers stay as they are

`step_losses` says which optimizers a loss is for, `parameter_sets` what each of them updates, and `closures` computes a
step several times for optimizers such as LBFGS. `position` is where the run is; `rank_operations` is `run.sum` and its
like.
"""
