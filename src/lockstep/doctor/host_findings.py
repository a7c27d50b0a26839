"""What facts of one host mean for a training: pure functions from facts to findings; tables of limits and variables.

A finding says what is wrong, why that matters, and one command. Where nothing is wrong, a line says what was looked at.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Final

from lockstep.doctor.finding import Finding, Level, ok, problem
from lockstep.doctor.host_facts import FileFacts, GpuFacts, HostFacts
from lockstep.formatting import count, duration, plural, size
from lockstep.network_interface import is_loopback
from lockstep.settings import Settings

_MIB, _GIB = 1 << 20, 1 << 30
_LEAST_TORCH: Final = (2, 11)
_SLOW_DISK: Final = 20e6  # bytes a second: a checkpoint of a GiB takes a minute

#: Whether something is wrong, how bad it is, what it is, why it matters, and a command.
Row = tuple[bool, Level, str, str, str]


def host_findings(host: HostFacts, files: FileFacts) -> Iterator[Finding]:
    """All findings about ``host`` alone, and about the run directory as it sees it."""
    yield from _software(host)
    yield from _gpus(host)
    for section, rows, looked_at in (
        ("interfaces", _interface_rows(host), _interface_words(host)),
        ("host name", _name_rows(host), f"{host.host} is {', '.join(host.name_addresses[:2])}"),
        ("memory", _memory_rows(host), _memory_words(host)),
        ("limits", _limit_rows(host), f"{count(host.limits.get('open files') or 1 << 20)} open files"),
        ("run directory", _file_rows(files), _file_words(files)),
        ("CPUs", _cpu_rows(host), f"{host.cpus} of {host.host_cpus} for the ranks of this host"),
        ("scheduler", _scheduler_rows(host), host.scheduler or "no job of Slurm, Grid Engine or PBS"),
        (
            "variables",
            _variable_rows(host),
            f"{len(host.variables)} of torch, CUDA, NCCL and the like, none of which bites",
        ),
        ("container", (), host.container or "none seen"),
    ):
        found = list(_findings(section, rows))
        yield from found or [ok(section, what=looked_at)]


def _findings(section: str, rows: tuple[Row, ...]) -> Iterator[Finding]:
    for wrong, level, what, why, command in rows:
        if wrong:
            yield Finding(section, level, what, why, command)


def _software(host: HostFacts) -> Iterator[Finding]:
    if not host.torch:
        yield problem("software", what="torch is not installed here", command="pip install torch")
    elif _numbers(host.torch) < _LEAST_TORCH:
        yield problem("software", what=f"torch {host.torch} is older than 2.11", command="pip install 'torch>=2.11'")
    elif host.gpus and not host.torch_cuda and "+cpu" in host.torch:
        yield problem(
            "software",
            what=f"torch {host.torch} is built without CUDA, and there are {plural(len(host.gpus), 'GPU')}",
            why="ranks would compute on the CPU",
            command="pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128",
        )
    elif host.torch_cuda and host.driver_cuda and _numbers(host.driver_cuda)[0] < _numbers(host.torch_cuda)[0]:
        yield problem(
            "software",
            what=f"the driver {host.driver} knows CUDA {host.driver_cuda}, and torch needs {host.torch_cuda}",
            why="torch sees no GPU with a driver of an older generation of CUDA",
            command=f"pip install torch for CUDA {host.driver_cuda}, or a newer driver",
        )
    else:
        cuda = f", CUDA {host.torch_cuda}" if host.torch_cuda else ""
        versions = f"Python {host.python}, torch {host.torch}{cuda}, NumPy {host.numpy}, Lockstep {host.lockstep}"
        yield ok("software", what=f"{versions}, Linux {host.kernel}")


def _gpus(host: HostFacts) -> Iterator[Finding]:
    kinds, divided = Counter(gpu.name for gpu in host.gpus), any(gpu.mig for gpu in host.gpus)
    if host.gpus:
        driver = f"driver {host.driver}, CUDA {host.driver_cuda}"
        yield ok("GPUs", what=f"{', '.join(f'{n} x {kind}' for kind, n in kinds.items())}; {driver}")
    elif not host.pci_gpus:
        yield ok("GPUs", what="none of NVIDIA here: ranks compute on CPUs")
    yield from _findings(
        "GPUs",
        (
            (
                host.pci_gpus > 0 and not host.gpus,
                "problem",
                f"{plural(host.pci_gpus, 'GPU')} of NVIDIA plugged in, and no driver answers",
                "ranks compute on the CPU",
                "nvidia-smi",
            ),
            (
                len(kinds) > 1,
                "note",
                f"different kinds: {', '.join(kinds)}",
                "a run on several kinds is refused unless equal bits are given up",
                "CUDA_VISIBLE_DEVICES=0 with those of one kind, or --reduction fast",
            ),
            (
                host.visible_gpus < len(host.gpus),
                "note",
                f"CUDA shows a process {host.visible_gpus} of {len(host.gpus)}",
                "a process sees one part of a GPU divided by MIG" if divided else "CUDA_VISIBLE_DEVICES hides others",
                "sudo nvidia-smi -mig 0" if divided else "unset CUDA_VISIBLE_DEVICES",
            ),
        ),
    )
    for number, gpu in enumerate(host.gpus):
        for wrong, level, what, why, command in _gpu_rows(gpu):
            row = (wrong, level, f"GPU {number}: {what}", why, f"{command} -i {number}")
            yield from _findings("GPUs", (row,))


def _gpu_rows(gpu: GpuFacts) -> tuple[Row, ...]:
    errors, slow = plural(gpu.memory_errors, "memory error"), ", ".join(gpu.slowed_by)
    taken = f"{size(gpu.used_bytes)} of {size(gpu.memory_bytes)} in use by {', '.join(gpu.processes[:4])}"
    wrong, ecc = "what it computes may be wrong", "nvidia-smi -q -d ECC"
    reset, all_wait = "the next reset replaces them", "all ranks wait for the slowest one"
    return (
        (gpu.memory_errors > 0, "problem", f"{errors} not corrected", wrong, ecc),
        (gpu.prohibited, "problem", "its mode lets nobody compute", "", "sudo nvidia-smi -c 0"),
        (gpu.remap_pending, "note", "rows of its memory wait to be replaced", reset, "sudo nvidia-smi -r"),
        (bool(gpu.processes), "note", taken, "two jobs share its time and memory", "nvidia-smi"),
        (bool(slow), "note", f"its clock is lowered by {slow}", all_wait, "nvidia-smi -q -d PERFORMANCE"),
        (
            0 < gpu.lanes < gpu.most_lanes,
            "note",
            f"{gpu.lanes} of {gpu.most_lanes} lanes of PCIe",
            "loose in its slot, or in a narrow one; an idle GPU may also save power so",
            "nvidia-smi -q",
        ),
    )


def _interface_rows(host: HostFacts) -> tuple[Row, ...]:
    loopback = any(is_loopback(address) for each in host.interfaces for address in each.addresses)
    what, why = "the loopback is down or has no address", "the ranks of one machine talk over it"
    return ((not loopback, "problem", what, why, "sudo ip link set lo up"),)


def _interface_words(host: HostFacts) -> str:
    others = [each for each in host.interfaces if not all(map(is_loopback, each.addresses))]
    words = [
        f"{each.name} {', '.join(each.addresses[:2])}{f' ({each.mbit} Mbit/s)' * (each.mbit > 0)}" for each in others
    ]
    return "; ".join(words[:4]) or "the loopback only"


def _name_rows(host: HostFacts) -> tuple[Row, ...]:
    command = f"echo '127.0.1.1 {host.host}' | sudo tee -a /etc/hosts"
    unknown, slow = f"this host's own name, {host.host}, does not resolve", f"its own name took {brief(host.name_s)}"
    return (
        (not host.name_addresses, "note", unknown, "some libraries fail, or wait for a timeout", command),
        (host.name_s > 1, "note", slow, "each start waits for the name server", command),
    )


def _memory_rows(host: HostFacts) -> tuple[Row, ...]:
    command = "docker run --shm-size=8g ..." if host.container else "sudo mount -o remount,size=8G /dev/shm"
    shm = f"/dev/shm has {size(host.shm_free)} free of {size(host.shm_bytes)}"
    bus_error = "loader processes with large batches die there with a bus error, and no state is left for a restart"
    torch = "each rank takes some hundred MiB for torch alone"
    return (
        (host.shm_free < 16 * _MIB, "problem", shm, "loader processes hand their batches over there", command),
        (16 * _MIB <= host.shm_free < _GIB, "note", shm, bus_error, command),
        (host.memory_free < _GIB, "note", _memory_words(host), torch, "free -h"),
    )


def _memory_words(host: HostFacts) -> str:
    limit = "" if host.memory_limit is None else f", of {size(host.memory_limit)} that a control group allows"
    return f"{size(host.memory_free)} free{limit}; {size(host.shm_free)} free in /dev/shm"


def _limit_rows(host: HostFacts) -> tuple[Row, ...]:
    rows: list[Row] = []
    for name, enough, why, command in _LIMITS:
        soft = host.limits.get(name)
        low = soft is not None and (enough is None or soft < enough)
        matters = name != "locked memory" or host.infiniband
        rows.append((low and matters, "note", f"{name}: {count(soft or 0)}", why, command))
    group = f"a control group allows {plural(host.pids_limit or 0, 'process')}, with threads"
    few = host.pids_limit is not None and host.pids_limit < _LIMITS[1][1]
    return (*rows, (few, "note", group, _LIMITS[1][2], "docker run --pids-limit=-1 ..."))


#: Of `HostFacts.limits`: what is enough (None: only no limit is), why, and the command.
_LIMITS: Final = (
    ("open files", 4096, "each rank and each loader process has some hundred sockets and files", "ulimit -n 65536"),
    ("processes", 1024, "ranks, their threads and loader processes count", "ulimit -u unlimited"),
    ("locked memory", None, "InfiniBand registers memory; NCCL fails, or takes slow sockets", "ulimit -l unlimited"),
    ("address space", None, "CUDA and torch reserve far more addresses than memory", "ulimit -v unlimited"),
    ("file size", None, "a larger checkpoint is cut off, and the save fails", "ulimit -f unlimited"),
    ("CPU seconds", None, "the kernel ends ranks that have computed for so long", "ulimit -t unlimited"),
)


def _file_rows(files: FileFacts) -> tuple[Row, ...]:
    path, seldom, bad = files.path, '--save-every "30 min"', bool(files.error)
    fails = f"{path} does not take a checkpoint: {files.error}"
    free, rates = f"{path}: {size(files.free_bytes)} free", f"{path}: {rate(files.bytes_per_s)}, written and flushed"
    commit = f"{path}: to flush and rename a small file takes {brief(files.commit_s)}"
    twice = "two runs in one directory are not noticed, and remove each other's checkpoints"
    volatile = "checkpoints are gone with the machine, and take memory from the ranks"
    mount = "docker run -v $PWD/runs:/data/runs ..."
    return (
        (bad, "problem", fails, "", "--run-dir on another file system"),
        (files.free_bytes < 64 * _MIB, "problem", free, "no checkpoint fits", "df -h"),
        (64 * _MIB <= files.free_bytes < _GIB, "note", free, "some checkpoints fill it", "df -h"),
        (0 < files.bytes_per_s < _SLOW_DISK, "note", rates, "a save takes long, beside the training", seldom),
        (files.commit_s > 2, "note", commit, "each save does that some times", seldom),
        (not files.locks, "note", f"{path} has no locks", twice, "--run-dir of its own for each run"),
        (not files.links, "note", f"{path} has no hard links", "--rdzv-takeover needs them", "--run-dir elsewhere"),
        (files.kind in ("tmpfs", "ramfs"), "note", f"{path} is in memory", volatile, "--run-dir on a disk"),
        (files.kind == "overlay", "note", f"{path} is the container's own", "it is gone with the container", mount),
    )


def _file_words(files: FileFacts) -> str:
    speed = f", {rate(files.bytes_per_s)}" if files.bytes_per_s else ""
    commit = f"{brief(files.commit_s)} to flush and rename"
    return f"{files.path} ({files.kind}): {size(files.free_bytes)} free{speed}, {commit}"


def _cpu_rows(host: HostFacts) -> tuple[Row, ...]:
    busy = f"{host.load:.1f} processes want to run on {plural(host.cpus, 'CPU')}"
    return ((host.load > 1.5 * host.cpus, "note", busy, "all ranks wait for the slowest one", "top"),)


def _scheduler_rows(host: HostFacts) -> tuple[Row, ...]:
    job, gpus, here = host.scheduler, host.scheduler_gpus or 0, not host.on_login_node
    unseen = f"{job} has {plural(gpus, 'GPU')} a node, and CUDA sees {host.visible_gpus}"
    idle, cpus = "they lie idle", f"{job} has {host.scheduler_cpus} CPUs here, and ranks may use {host.cpus}"
    login = "this is the login node of a job, whose ranks start on other nodes"
    return (
        (not here, "note", login, "what is seen of this host says nothing of those", "srun lockstep doctor"),
        (here and gpus > host.visible_gpus, "problem", unseen, idle, "srun nvidia-smi -L"),
        (here and host.scheduler_cpus > host.cpus, "note", cpus, idle, "taskset -cp $$"),
    )


def _variable_rows(host: HostFacts) -> tuple[Row, ...]:
    rows: list[Row] = []
    for name, value in sorted(host.variables.items()):
        for pattern, bites, level, why, command in _VARIABLES:
            if re.fullmatch(pattern, name):
                rows.append((bites(value), level, f"{name}={value}", why, command or f"unset {name}"))
    return tuple(rows)


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().lower() in values


def _any(value: str) -> bool:
    return bool(value.strip())


_OFF: Final = "a fast way is off, and gradients travel over a slower one"
_OTHER_BITS: Final = "it chooses other kernels, which give other bits; it must be the same on all nodes"
_KERNELS: Final = (
    "ATEN_CPU_CAPABILITY|MKL_CBWR|MKL_ENABLE_INSTRUCTIONS|(ONEDNN|DNNL)_MAX_CPU_ISA|ONEDNN_DEFAULT_FPMATH_MODE"
)
_SETTINGS: Final = f"LOCKSTEP_({'|'.join(setting.name.upper() for setting in fields(Settings))})"
_TF32: Final = "NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
_ONE_OF_SEVERAL: Final = "this shell says that it is one of several ranks, and lockstep run refuses to start in one"
_UNSET_RANK: Final = "unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT"
#: Pattern of the name, which values bite, how much, why, and a command in place of ``unset NAME``.
_VARIABLES: Final[tuple[tuple[str, Callable[[str], bool], Level, str, str], ...]] = (
    ("CUDA_LAUNCH_BLOCKING", _is("1"), "note", "the host waits for each kernel: for debugging, many times slower", ""),
    ("NCCL_(P2P|IB|SHM)_DISABLE", _is("1"), "note", _OFF, ""),
    ("NCCL_(ALGO|PROTO|MAX_NCHANNELS|NTHREADS)", _any, "note", "it takes a choice from NCCL, which tries them out", ""),
    ("NCCL_DEBUG", _is("info", "trace"), "note", "NCCL prints a lot", ""),
    ("(TORCH_)?NCCL_BLOCKING_WAIT", _is("1"), "note", "the host waits for each collective", ""),
    ("(NCCL|GLOO|TP)_SOCKET_IFNAME", _is("lo"), "note", "ranks of several machines do not meet over the loopback", ""),
    ("TORCH_DISTRIBUTED_DEBUG", _is("detail"), "note", "each collective is compared between ranks, which is slow", ""),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", _is("1"), "note", "each tensor asks the driver for memory: very slow", ""),
    (_TF32, _any, "note", _OTHER_BITS, ""),
    (_KERNELS, _any, "note", _OTHER_BITS, ""),
    (
        "CUBLAS_WORKSPACE_CONFIG",
        lambda value: value not in (":4096:8", ":16:8"),
        "problem",
        "with it cuBLAS does not repeat its bits",
        "export CUBLAS_WORKSPACE_CONFIG=:4096:8",
    ),
    (
        "OMP_NUM_THREADS",
        lambda value: _any(value) and not value.split(",")[0].strip().isdecimal(),
        "problem",
        "no number: OpenMP ignores it, and takes all CPUs for each rank",
        "export OMP_NUM_THREADS=1",
    ),
    (
        "OMP_PROC_BIND|GOMP_CPU_AFFINITY|KMP_AFFINITY",
        lambda value: value.lower() not in ("false", "none", "disabled", ""),
        "note",
        "threads of several ranks may be bound to the same CPUs",
        "",
    ),
    ("PYTHONHASHSEED", _is("random"), "note", "the order of a set of strings differs between ranks", ""),
    ("PYTHONOPTIMIZE", _is("1", "2"), "note", "assert statements of the script do not run", ""),
    ("RANK|LOCAL_RANK|WORLD_SIZE", _any, "problem", _ONE_OF_SEVERAL, _UNSET_RANK),
    ("LD_PRELOAD", _any, "note", "a library is put before all others in each rank", ""),
    (_SETTINGS, _any, "note", "a setting of the environment goes before the script's own", ""),
)


def rate(bytes_per_s: float) -> str:
    """Such as ``476 MiB/s``."""
    return f"{size(bytes_per_s)}/s"


def brief(seconds: float) -> str:
    """Such as ``103 us``, ``8.7 ms``, ``2.5 s``."""
    if seconds >= 1:
        return duration(seconds)
    return f"{count(1e3 * seconds)} ms" if seconds >= 1e-3 else f"{count(1e6 * seconds)} us"


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
