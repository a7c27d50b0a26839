"""Layers divided among a few neighbouring ranks by a plan, and around them a strategy for the data-parallel axis.

`tensor_parallel`   the strategy that divides a model and leaves the rest to another strategy, such as ``fsdp``
`tensor_plan`       which layer is divided how, as the user, torch or transformers say it
`parallel_layers`   the forward passes of divided layers
`divided_output`    the output of a divided layer, which must not be taken for the whole
`tensor_group`      sums and gatherings of activations between the ranks of a tensor group
`tensor_layout`     where the parts lie: a `StateLayout` around that of the other strategy
"""
