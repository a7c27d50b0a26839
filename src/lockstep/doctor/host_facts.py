"""What one host is like: facts, gathered without torch and without a change, but for files in the run directory.

    gather_host(env)     versions, GPUs, interfaces, limits, memory, CPUs, variables ...     HostFacts
    gather_files(dir)    a file is written, flushed, renamed, linked and removed             FileFacts

What cannot be found out has the value with which nothing is wrong.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

import lockstep
from lockstep.checkpoint import LOCAL
from lockstep.gpu_driver import ask_driver
from lockstep.launch import Machine, allocation
from lockstep.launch_contract import BARE, PROJECT
from lockstep.memory_use import ControlGroup, host_memory, text_of
from lockstep.network_interface import is_loopback, plain_address

T = TypeVar("T")

#: Variables that a finding may be about, and that are in the block for an issue.
VARIABLES: Final = re.compile(
    "(NCCL|TORCH|GLOO|TP|CUDA|OMP|GOMP|KMP|MKL|OPENBLAS|ONEDNN|DNNL|PYTORCH|CUBLAS|ATEN|LOCKSTEP|UCX|FI|NVIDIA|PYTHON)_?"
    "[A-Z]|(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LD_PRELOAD|TMPDIR)$"
)
LARGE: Final = 16 << 20  #: bytes: how fast fewer of them are written, or sent, is no measure
#: A secret, and how the doctor itself is shown.
_NOT_TOLD: Final = ("LOCKSTEP_SECRET", "LOCKSTEP_VIEW", BARE, PROJECT)
_LIMITS: Final = {
    "open files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "address space": resource.RLIMIT_AS,
    "file size": resource.RLIMIT_FSIZE,
    "CPU seconds": resource.RLIMIT_CPU,
}
#: Why a GPU runs below its clock, by NVML's bits; power caps and idle clocks are usual.
_SLOWED: Final = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
_CONTAINERS: Final = {"/.dockerenv": "Docker", "/run/.containerenv": "Podman", "/.singularity.d": "Apptainer"}


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU, as the driver sees it."""

    name: str
    memory_bytes: int = 0
    used_bytes: int = 0
    processes: tuple[str, ...] = ()  #: that use it, by number and command
    mig: bool = False  #: it is divided into parts
    prohibited: bool = False  #: nobody may compute on it
    memory_errors: int = 0  #: that were not corrected, since the driver was loaded
    remap_pending: bool = False  #: rows of its memory are replaced at the next reset
    slowed_by: tuple[str, ...] = ()
    lanes: int = 0  #: of PCIe, in use
    most_lanes: int = 0


@dataclass(frozen=True, slots=True)
class InterfaceFacts:
    """One network interface that is up."""

    name: str
    addresses: tuple[str, ...]  #: of IPv4 and IPv6
    mbit: int = 0  #: megabits a second; 0: not known


@dataclass(frozen=True, slots=True)
class HostFacts:
    """One host."""

    host: str
    python: str = "3.11.0"
    torch: str = "2.11.0"  #: "" where there is none
    torch_cuda: str = ""  #: the CUDA that torch was built with; "" for one without
    lockstep: str = ""
    code: str = ""  #: digest of Lockstep's files
    numpy: str = ""
    kernel: str = ""
    driver: str = ""  #: of NVIDIA; "" without one
    driver_cuda: str = ""  #: the newest CUDA that the driver knows
    gpus: tuple[GpuFacts, ...] = ()  #: that the driver has
    pci_gpus: int = 0  #: of NVIDIA, that are plugged in
    visible_gpus: int = 0  #: as CUDA counts them in this environment
    cpus: int = 1  #: that the ranks of this host may use
    host_cpus: int = 1
    load: float = 0.0  #: average of the last minute
    interfaces: tuple[InterfaceFacts, ...] = (InterfaceFacts("lo", ("127.0.0.1",)),)
    infiniband: bool = False
    name_addresses: tuple[str, ...] = ("127.0.0.1",)  #: what the host's own name stands for
    name_s: float = 0.0  #: how long that took to find out
    shm_bytes: int = 1 << 40
    shm_free: int = 1 << 40
    memory_free: int = 1 << 40
    memory_limit: int | None = None  #: of a control group
    limits: Mapping[str, int | None] = field(default_factory=dict)  #: soft ones, in units; None: none
    pids_limit: int | None = None  #: of a control group
    container: str = ""
    scheduler: str = ""  #: the job in words; "" outside of one
    scheduler_nodes: int = 0
    scheduler_gpus: int | None = None  #: of a node
    scheduler_cpus: int = 0  #: of this node
    on_login_node: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    def addresses(self) -> tuple[str, ...]:
        """That other hosts may reach."""
        return tuple(a for each in self.interfaces for a in each.addresses if not is_loopback(a))


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The file system of the run directory, as one host sees it."""

    path: str
    kind: str = ""  #: such as ext4, nfs4
    error: str = ""  #: why files cannot be written as a checkpoint needs it
    free_bytes: int = 1 << 40
    bytes_per_s: float = 1e9  #: written and flushed; 0: not measured
    commit_s: float = 0.0  #: to flush a small file, rename it and flush the directory
    links: bool = True  #: whether there are hard links
    locks: bool = True
    clock_s: float = 0.0  #: by which the file system's clock is ahead of this host's


def gather_host(env: Mapping[str, str]) -> HostFacts:
    """The facts of this host, in the environment ``env``. Takes about 0.1 s."""
    nothing: dict[str, Any] = {}
    machine, given = Machine.detect(env), allocation(env, lambda path: text_of(Path(path)))
    host, group = socket.gethostname(), ControlGroup.read()
    names, name_s = _own_name(host)
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return HostFacts(
        host=host,
        python=platform.python_version(),
        torch=_version("torch"),
        torch_cuda=_torch_cuda(),
        lockstep=lockstep.__version__,
        code=_digest(Path(lockstep.__file__).parent),
        numpy=_version("numpy"),
        kernel=platform.release(),
        **ask_driver(driver_facts, nothing),
        pci_gpus=_pci_gpus(),
        visible_gpus=machine.gpus,
        cpus=machine.cpus,
        host_cpus=os.cpu_count() or 1,
        load=os.getloadavg()[0],
        interfaces=_interfaces(),
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        name_addresses=names,
        name_s=name_s,
        shm_bytes=0 if shm is None else shm.f_blocks * shm.f_frsize,
        shm_free=0 if shm is None else shm.f_bavail * shm.f_frsize,
        memory_free=host_memory().host_free or 0,
        memory_limit=group.limit_bytes,
        limits={name: _soft_limit(kind) for name, kind in _LIMITS.items()},
        pids_limit=_number(text_of(Path("/sys/fs/cgroup/pids.max"))),
        container=next((name for path, name in _CONTAINERS.items() if os.path.exists(path)), ""),
        scheduler=str(given) if given.job else "",
        scheduler_nodes=len(given.nodes),
        scheduler_gpus=given.gpus_per_node,
        scheduler_cpus=next((node.slots for node in given.nodes if host.startswith(node.name.split(".")[0])), 0),
        on_login_node=not given.inside,
        variables={name: value for name, value in env.items() if VARIABLES.match(name) and name not in _NOT_TOLD},
    )


def private_names(hosts: Sequence[HostFacts]) -> dict[str, str]:
    """What stands for names of hosts and users, and for addresses, where a report is to be shown to others."""
    private = {str(Path.home()): "~", socket.gethostname(): "node-0"}
    with contextlib.suppress(KeyError, OSError):
        private[getpass.getuser()] = "USER"
    for number, host in enumerate(hosts):
        private |= dict.fromkeys(host.addresses(), f"ADDRESS-{number}") | {host.host: f"node-{number}"}
    return {name: shown for name, shown in private.items() if name not in ("", "/", "root", "localhost")}


def driver_facts(nvml: Any) -> dict[str, object]:
    """What NVIDIA's management library ``nvml`` says: the fields `driver`, `driver_cuda` and `gpus` of `HostFacts`."""

    def asked(call: Callable[[], T], otherwise: T) -> T:
        with contextlib.suppress(nvml.NVMLError):  # this GPU, or this driver, has no such thing
            return call()
        return otherwise

    def gpu(number: int) -> GpuFacts:
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        running = asked(lambda: list(nvml.nvmlDeviceGetComputeRunningProcesses(handle)), list[Any]())
        reasons = asked(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle), 0)
        return GpuFacts(
            name=_text(nvml.nvmlDeviceGetName(handle)),
            memory_bytes=memory.total,
            used_bytes=memory.used,
            processes=tuple(_process(each.pid) for each in running),
            mig=asked(lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]), False),
            prohibited=asked(lambda: nvml.nvmlDeviceGetComputeMode(handle), 0) == nvml.NVML_COMPUTEMODE_PROHIBITED,
            memory_errors=asked(
                lambda: nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                ),
                0,
            ),
            remap_pending=asked(lambda: bool(nvml.nvmlDeviceGetRemappedRows(handle)[2]), False),
            slowed_by=tuple(why for bit, why in _SLOWED.items() if reasons & bit),
            lanes=asked(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle), 0),
            most_lanes=asked(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle), 0),
        )

    cuda = asked(nvml.nvmlSystemGetCudaDriverVersion_v2, 0)
    return {
        "driver": _text(nvml.nvmlSystemGetDriverVersion()),
        "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
        "gpus": tuple(map(gpu, range(nvml.nvmlDeviceGetCount()))),
    }


def gather_files(directory: Path, size: int) -> FileFacts:
    """What the file system of ``directory`` does for a checkpoint of ``size`` bytes. Leaves nothing there."""
    place = directory / f".doctor-{socket.gethostname()}-{os.getpid()}"
    kind, facts = _kind_of(directory), dict[str, Any]()
    try:
        LOCAL.make_directory(place)
        block, began = memoryview(os.urandom(1 << 20)), time.monotonic()
        file = LOCAL.create(place / "large")
        written = 0
        while written < size:
            written += LOCAL.write(file, block[: size - written])
        LOCAL.sync(file)
        LOCAL.close(file)
        # A small file takes as long as its flush.
        facts["bytes_per_s"] = size / max(1e-6, time.monotonic() - began) if size >= LARGE else 0.0
        began, now = time.monotonic(), time.time()
        file = LOCAL.create(place / "small.new")
        LOCAL.write(file, block[:4096])
        LOCAL.sync(file)
        LOCAL.close(file)
        LOCAL.rename(place / "small.new", place / "small")
        LOCAL.sync_directory(place)
        facts["commit_s"] = time.monotonic() - began
        facts["clock_s"] = (place / "small").stat().st_mtime - now
        facts |= {"links": _works(lambda: os.link(place / "small", place / "link"))}
        with (place / "small").open("r+b") as locked:
            facts["locks"] = _works(lambda: fcntl.lockf(locked, fcntl.LOCK_EX | fcntl.LOCK_NB))
        facts["free_bytes"] = LOCAL.free_bytes(directory)
    except OSError as error:
        facts["error"] = str(error)
    with contextlib.suppress(OSError):
        for name in LOCAL.names(place):
            LOCAL.unlink(place / name)
        LOCAL.remove_directory(place)
    return FileFacts(str(directory), kind, **facts)


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except OSError:
        return False
    return True


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def _torch_cuda() -> str:
    """Read, for torch takes seconds to import, and may not be importable at all."""
    spec = importlib.util.find_spec("torch")
    text = text_of(Path(spec.origin).with_name("version.py")) if spec is not None and spec.origin else ""
    found = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else ""


def _digest(package: Path) -> str:
    files = sorted(package.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _pci_gpus() -> int:
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return sum(text_of(v).strip() == "0x10de" and text_of(v.with_name("class")).startswith("0x03") for v in vendors)


def _interfaces() -> tuple[InterfaceFacts, ...]:
    stats, families = psutil.net_if_stats(), (socket.AF_INET, socket.AF_INET6)
    return tuple(
        InterfaceFacts(
            name,
            tuple(plain_address(each.address) for each in found if each.family in families),
            stats[name].speed,
        )
        for name, found in psutil.net_if_addrs().items()
        if name in stats and stats[name].isup
    )


def _own_name(host: str) -> tuple[tuple[str, ...], float]:
    began, found = time.monotonic(), tuple[str, ...]()
    with contextlib.suppress(OSError):
        found = tuple(dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(host, None)))
    return found, time.monotonic() - began


def _soft_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _kind_of(directory: Path) -> str:
    mounts = [line.split()[1:3] for line in text_of(Path("/proc/mounts")).splitlines()]
    within = [(place, kind) for place, kind in mounts if directory.resolve().is_relative_to(place)]
    return max(within, key=lambda mount: len(mount[0]), default=("", ""))[1]


def _process(number: int) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{number} ({psutil.Process(number).name()})"
    return str(number)


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
