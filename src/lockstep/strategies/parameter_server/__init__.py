"""Workers that ask servers: ``parameter-server`` and ``hybrid``, on torch's remote procedure calls.

`parameter_server`    the strategy ``parameter-server``, synchronous and asynchronous
`hybrid`              the strategy ``hybrid``: embeddings on servers, the rest among the workers
`servers`             who works and who serves, and the calls between them
`store`               which rank owns which tensor, and how others get its values
`buckets`                tensors that travel as one, and gradients that are summed so
"""
