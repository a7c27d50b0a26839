"""Workers that ask servers: ``parameter-server`` and ``hybrid``, on torch's remote procedure calls.

`parameter_server`          the strategy ``parameter-server``, and its synchronous mode
`async_parameter_server`    its asynchronous mode
`server_context`            what both modes share
`hybrid`                    the strategy ``hybrid``: embeddings on servers, the rest among the workers
`embedding_tables`          their rows on servers, look-ups and gradients
`row_division`              which server holds which rows
`served_tables`             which embeddings of a model are served
`table_construction`        embeddings of which no rank holds all while they are made
`rpc`                       which ranks are workers and which are servers, and the remote calls between them
`parameter_store`           which rank owns which tensor, and how others get its values
`flat_buckets`              tensors that are sent as one, and gradients that are summed so
"""
