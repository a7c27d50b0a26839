"""Workers that ask servers: ``parameter-server`` and ``hybrid``, on messages between ranks and on collectives.

`parameter_server`          the strategy ``parameter-server``: its synchronous and its asynchronous mode
`served_strategy`           what all of them share: who serves, and what workers and servers say to each other
`served_parameters`         which server owns which parameter, and how others get its values
`hybrid`                    the strategy ``hybrid``: embeddings on servers, the rest among the workers
`embedding_tables`          their look-ups and gradients
`row_division`              which server holds which rows
`table_construction`        which embeddings are served; they are made with no rank that holds all of one
`flat_buckets`              tensors that are sent as one, and gradients that are summed so
"""
