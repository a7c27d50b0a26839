"""Workers that ask servers: ``parameter-server`` and ``hybrid``, on torch's remote procedure calls.

`parameter_server`    the strategy ``parameter-server``, synchronous and asynchronous
`hybrid`              the strategy ``hybrid``: embeddings on servers, the rest among the workers
`rpc`                 which ranks are workers and which are servers, and the remote calls between them
`parameter_store`     which rank owns which tensor, and how others get its values
`flat_buckets`        tensors that are sent as one, and gradients that are summed so
"""
