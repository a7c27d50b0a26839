"""Workers that ask servers: ``parameter-server`` and ``hybrid``, on torch's remote procedure calls.

`parameter_server`          the strategy ``parameter-server``, and its synchronous mode
`async_parameter_server`    its asynchronous mode
`server_context`            what both modes share
`hybrid`                    the strategy ``hybrid``: embeddings on servers, the rest among the workers
`embedding_tables`          which server holds which embedding, its look-ups and gradients
`rpc`                       which ranks are workers and which are servers, and the remote calls between them
`parameter_store`           which rank owns which tensor, and how others get its values
`flat_buckets`              tensors that are sent as one, and gradients that are summed so
"""
