"""Replicas of which each rank holds rows of every parameter: ``fsdp`` and ``hsdp``, on torch's ``fully_shard``.

`fully_sharded`     the strategy ``fsdp``
`hybrid_sharded`    the strategy ``hsdp``: replicas of such groups
`wrapping`          which modules are gathered together, as blocks, and what else is done to them
`sharded_blocks`    when blocks are gathered and freed, and whether all ranks call the same ones
`prefetch`          which blocks are gathered ahead
`fsdp_gradients`    what sums the gradients of a block, in place of torch's reduce-scatter
`whole_gradients`    what sums the gradients of parameters that are not divided
`dtensor_layout`    where the rows lie: a `StateLayout`

What a script may do with a parameter that is divided is in `not_whole`; the options are in `strategy_kinds`.
"""
