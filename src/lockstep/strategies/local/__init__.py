"""Replicas that step by themselves and meet now and then: ``local-sgd`` and ``diloco``.

`local_sgd`      the strategy ``local-sgd``: the mean of the parameters, each so many steps
`diloco`         the strategy ``diloco``: an outer optimizer steps along that mean
`local_steps`    what both do between meetings: the strategy ``none`` on a rank's own micro-batches
`replicas`       what both keep of models that differ by rank
`moments`        what becomes of what optimizers remember
`averager`        the mean over ranks
`ranges`         tensors end to end, cut into even ranges
"""
