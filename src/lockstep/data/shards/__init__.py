"""Data sets that lie in shards, such as tar files: each is read from one end to the other.

sharded_dataset                  shards of known length: the order of an epoch
shard_streams                    shards of unknown length, read as streams
dealt_shards                     which shards each place of a step reads
"""
