"""Replicas that step by themselves and are averaged now and then: ``local-sgd`` and ``diloco``.

`local_sgd`              the strategy ``local-sgd``: the mean of the parameters, every so many steps
`diloco`                 the strategy ``diloco``: an outer optimizer steps along that mean
`local_steps`            what both do between averages: the strategy ``none`` on a rank's own micro-batches
`model_averaging`        models that differ between ranks, and their mean
`optimizer_averaging`    the mean of optimizer states, and what each rank holds beside it
`averaging`              sums and means over ranks
`flat_ranges`            tensors end to end, cut into even ranges
"""
