"""Layers divided among a few neighbouring ranks by a plan, with another strategy for the data-parallel axis.

`tensor_parallel`   the strategy that divides a model and leaves the rest to another strategy, such as ``fsdp``
`tensor_plan`       the division of each layer, by a plan of the user, torch or transformers
`parallel_layers`   the forward passes of divided layers
`divided_output`    the output of a divided layer, which must not be taken for the whole
`tensor_group`      sums and gatherings of activations between the ranks of a tensor group
`tensor_layout`     the ranks of the parts: a `StateLayout` around that of the other strategy
"""
