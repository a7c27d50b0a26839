"""Data sets in shards, such as tar files: each shard is read from beginning to end.

sharded_dataset                  shards of known length: the order of an epoch
shard_streams                    shards of unknown length, read as streams
dealt_shards                     which shards each place of a step reads
"""
