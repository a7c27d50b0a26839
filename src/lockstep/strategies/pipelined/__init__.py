"""Stages of a model on several ranks: ``pipeline``, on `torch.distributed.pipelining`.

`pipeline`           the strategy
`division`           a model as its stages: cut by `partition`, or given as a list
`partition`          where to cut a model, and the stages that come of it
`pipelined_model`    what a model becomes on a rank that holds some of its stages
`random_states`      how the states of random generators go from stage to stage
`stage`              what one rank computes of a micro-batch
"""
