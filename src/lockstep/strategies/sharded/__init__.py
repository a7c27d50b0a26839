"""Replicas of which each rank holds rows of every parameter: ``fsdp`` and ``hsdp``, on torch's ``fully_shard``.

`fully_sharded`     the strategy ``fsdp``, and the ranks of rows: a `StateLayout`
`hybrid_sharded`    the strategy ``hsdp``: replicas of such groups
`wrapping`          the modules that are gathered together, as blocks, and their preparation
`sharded_blocks`    when blocks are gathered and freed, and whether all ranks call the same blocks
`finished_blocks`   when the backward pass of a block is over
`prefetch`          the blocks that are gathered ahead
`fsdp_gradients`    sums the gradients of a block, in place of torch's reduce-scatter
`whole_gradients`   sums the gradients of parameters that are not divided

`not_whole` has the operations that a script may use on divided parameters; `strategy_kinds` has the options.
"""
