"""Which samples each micro-batch holds, and how they get here.

    orders               (seed, epoch) -> order of samples: a permutation, or what a sampler gives
    permutation          one that is computed, not stored, for very many samples
    shard_order          that of shards: each place of a step reads a part of the epoch from beginning to end
    sampling             pure: order of samples -> steps -> micro-batches -> this rank's run of them
    tensor_dataset       tensors in memory: whole micro-batches by index
    map_dataset          data sets with an index: sample by sample, in loader processes
    sharded_dataset      shards of samples by index, read from beginning to end
    iterable_dataset     iterable data sets
    shard_streams        those that can be read shard by shard: of `datasets`, of `webdataset`, of the user's
    dealt_shards         pure: which shards each place of a step reads, and where they are after some steps
    dealt_reader         reads them
    stream_epoch         how a stream is told its epoch
    stream_division      how an epoch of a stream is divided: read whole, by stride, or shard by shard
    stream_agreement     what ranks tell each other of streams, for many steps at a time
    single_process_view  what a data set sees of ranks and loader processes: none but itself
    shared_slots         how micro-batches come from there: through shared memory that is used again
    seen_samples         some samples of a data set, whether ranks hold the same
    dataset_marks        whether the script has changed a data set of which loader processes hold copies
    workers              loader processes that end with their rank, and not before it
    indexed_loader       the micro-batches of tensors, of data sets with an index and of shards
    iterable_loader      those of iterable data sets
    loader               `open_micro_batch_loader` chooses how a data set is read

No rank number decides what a micro-batch holds: a rank only decides which of them to compute.
"""

from lockstep.data.indexed.orders import Order, OrderFunction
from lockstep.data.indexed.sampling import (
    AuditedSteps,
    CheckedSteps,
    Data,
    MicroBatch,
    Padding,
    TorchLoader,
    UserDataset,
)
from lockstep.data.loader import is_in_memory, open_micro_batch_loader, open_order
from lockstep.data.micro_batch_loader import MicroBatchLoader
from lockstep.data.seen_samples import SeenSamples, checksum
from lockstep.data.shards.dealt_shards import ShardsFound
from lockstep.data.workers import CollateFunction, WorkerOptions, choose_workers

__all__ = [
    "AuditedSteps",
    "CheckedSteps",
    "CollateFunction",
    "Data",
    "MicroBatch",
    "MicroBatchLoader",
    "Order",
    "OrderFunction",
    "Padding",
    "SeenSamples",
    "ShardsFound",
    "TorchLoader",
    "UserDataset",
    "WorkerOptions",
    "checksum",
    "choose_workers",
    "is_in_memory",
    "open_micro_batch_loader",
    "open_order",
]
