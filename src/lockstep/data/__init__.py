"""The samples of each micro-batch, and how a rank reads them.

    loader               `open_micro_batch_loader` chooses the way to read a data set: a `MicroBatchLoader`
    indexed/             data sets with an index: orders, steps, micro-batches
    iterable/            streams, divided among ranks
    shards/              data sets in shards, each read from one end to the other
    workers              loader processes that end with their rank, not earlier
    shared_slots         how micro-batches come from workers: through shared memory that is used again
    seen_samples         some samples of a data set, whether ranks hold the same
    dataset_marks        whether the script has changed a data set of which loader processes hold copies, and whether
                         it holds anything of a GPU

The samples of a micro-batch depend on no rank number: a rank only decides which micro-batches to compute.
"""

from lockstep.data.dataset_marks import hold_gpu
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
    "hold_gpu",
    "is_in_memory",
    "open_micro_batch_loader",
    "open_order",
]
