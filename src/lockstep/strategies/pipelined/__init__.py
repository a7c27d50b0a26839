"""Stages of a model on several ranks: ``pipeline``, on `torch.distributed.pipelining`.

`pipeline`     the strategy
`partition`    where to cut a model, and the stages that come of it
`stage`        what one rank computes of a micro-batch
"""
