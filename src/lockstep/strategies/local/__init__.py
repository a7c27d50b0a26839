"""Replicas that step separately and are averaged now and then: ``local-sgd`` and ``diloco``.

`local_sgd`              the strategy ``local-sgd``: the mean of the parameters, every ``period`` steps
`diloco`                 the strategy ``diloco``: an outer optimizer steps along that mean
`local_steps`            steps between averages, of both: the strategy ``none`` on a rank's own micro-batches
`model_averaging`        models and optimizers that differ between ranks: their mean, each rank's differences
`averaging`              sums and means over ranks
`flat_ranges`            tensors end to end, cut into even ranges
"""
