"""Options of other launchers, with what one says to `lockstep run` instead.

They are those of torchrun, ``accelerate launch``, ``fabric run``, ``deepspeed``, ``horovodrun`` and ``mpirun`` that a
user may have in the fingers, and that ours does not take in the same spelling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_EACH_LOG = "leave it out: rank 0 is shown, and each rank has a file in RUN_DIR/logs"
_BY_STRATEGY = "say --strategy NAME, such as fsdp or zero:stage=2"
_HOSTS = "leave it out: start lockstep run on each machine, with --nnodes N --rdzv-endpoint HOST:PORT"
_RANKS = "say --nproc-per-node N, the ranks of each machine"
_ENDPOINT = "say --rdzv-endpoint HOST:PORT, the same on each machine"
_NO_CONFIG = "leave it out: lockstep run has no configuration file; its options are in: lockstep run -h"
_VISIBLE = "say which GPUs with CUDA_VISIBLE_DEVICES=0,1 before the command"
_BATCHES = "leave it out: global_batch and micro_batch of run.loader say it, or --set global_batch=N"

#: By option, with hyphens: what to say instead.
INSTEAD: Final[Mapping[str, str]] = {
    # torchrun
    "--log-dir": "leave it out: each rank writes to RUN_DIR/logs; say which directory with --run-dir",
    "--tee": _EACH_LOG,
    "--redirects": _EACH_LOG,
    "-t": _EACH_LOG,
    "-r": _EACH_LOG,
    "--local-ranks-filter": _EACH_LOG,
    "--duplicate-stdout-filters": _EACH_LOG,
    "--duplicate-stderr-filters": _EACH_LOG,
    "--role": "leave it out: all ranks have the same role",
    "--monitor-interval": "leave it out: a rank that ends is noticed at once",
    "--start-method": "say --start fork or --start plain",
    "--local-addr": "leave it out: ranks take the interface that leads to --rdzv-endpoint; or set GLOO_SOCKET_IFNAME",
    "--run-path": "say the script itself; -m runs a module",
    "--numa-binding": "say --bind, which gives each rank CPUs of its own",
    "--virtual-local-rank": "leave it out: each rank finds its GPU by LOCAL_RANK",
    "--signals-to-handle": "leave it out: all signals that ask a job to stop are handled",
    # accelerate launch
    "--num-processes": _RANKS,
    "--num-machines": "say --nnodes N",
    "--machine-rank": "say --node-rank N",
    "--main-process-ip": _ENDPOINT,
    "--main-process-port": _ENDPOINT,
    "--multi-gpu": _RANKS,
    "--gpu-ids": _VISIBLE,
    "--mixed-precision": "say --precision bf16, fp16 or fp32",
    "--config-file": _NO_CONFIG,
    "--use-fsdp": "say --strategy fsdp",
    "--use-deepspeed": _BY_STRATEGY,
    "--cpu": "leave it out: without a GPU ranks use CPUs; or set CUDA_VISIBLE_DEVICES= before the command",
    "--num-cpu-threads-per-process": "say --set threads=N",
    "--dynamo-backend": "say --set compile=true",
    "--gradient-accumulation-steps": _BATCHES,
    # fabric run
    "--accelerator": "leave it out: ranks use GPUs where there are some",
    "--devices": _RANKS,
    "--num-nodes": "say --nnodes N",
    "--main-address": "say --master-addr HOST",
    "--main-port": "say --master-port PORT",
    # deepspeed
    "--num-gpus": _RANKS,
    "--gpus": _RANKS,
    "--include": _VISIBLE,
    "--exclude": _VISIBLE,
    "--deepspeed": _BY_STRATEGY,
    "--deepspeed-config": _BY_STRATEGY,
    "--bind-cores-to-rank": "say --bind, which gives each rank CPUs of its own",
    # horovodrun, mpirun
    "-n": _RANKS,
    "-np": _RANKS,
    "--np": _RANKS,
    "--num-proc": _RANKS,
    "--min-np": "say --nnodes MIN:MAX, machines that come and go",
    "--max-np": "say --nnodes MIN:MAX, machines that come and go",
    "-H": _HOSTS,
    "--host": _HOSTS,
    "--hosts": _HOSTS,
    "--hostfile": _HOSTS,
    "--host-discovery-script": _HOSTS,
    "--oversubscribe": "leave it out: there may be more ranks than CPUs",
    "--bind-to": "say --bind, which gives each rank CPUs of its own",
    "-x": "leave it out: ranks have the environment of the launcher",
}
