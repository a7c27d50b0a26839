"""What each rank does for `lockstep doctor`; ``lockstep run -m lockstep.doctor.probe BYTES`` starts it.

each node      gathers its facts, opens connections to the others       node-0000.json
all ranks      compute, lock, look for a file, send to each other       ranks.json, by rank 0
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import psutil
import torch

from lockstep.collectives import Group, KeyValueStore, open_group, open_store, time_pairs, time_sums
from lockstep.cpu_affinity import usable_cpus
from lockstep.doctor.host_facts import HostFacts, gather_files, gather_host
from lockstep.doctor.machine_facts import NodeFacts, PairFacts, RankFacts, RanksFacts, ReachFacts
from lockstep.launch_contract import RUN_DIR, RUN_ID
from lockstep.network_interface import address_towards, interface_of
from lockstep.world import World

_TIMEOUT_S: Final = 60.0
_CONNECT_S: Final = 3.0  # on a network that drops what it does not let through
_VISIBLE_S: Final = 10.0
_AT_ONCE: Final = 64  # connections
_WHAT: Final = "doctor"


def main(size: int) -> None:
    """Of this rank; ``size`` bytes go to the disk and over the links."""
    env = dict(os.environ)
    world, place = World.from_env(env), Path(env[RUN_DIR])
    store = open_store(world, _WHAT, _TIMEOUT_S) if world.size > 1 else None
    if world.leads_node:
        # The directory itself is the parent's, and is removed.
        host, files = gather_host(_launchers_environment(env)), gather_files(place.parent.parent, size)
        reached = _reach(world, store, host) if world.nodes > 1 and store is not None else ()
        NodeFacts(host, files, reached).write(place, world.node_rank)
    on_gpu = torch.cuda.is_available()
    number = world.local_rank if on_gpu and torch.cuda.device_count() > 1 else 0
    device = torch.device("cuda", number) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    group = open_group(world, device, _TIMEOUT_S)
    with (place / "locked").open("a+b") as locked:
        found = _together(group, world, place, locked.fileno())
    pairs = tuple(PairFacts(*pair) for pair in time_pairs(group, size))
    sums = time_sums(group, [size], exact=False, budget_s=10.0)
    if group.leads:
        RanksFacts(tuple(found), pairs, *(sums[0] if sums else (0, 0.0))).write(place)
    group.barrier(_WHAT)
    group.close()


def _launchers_environment(env: Mapping[str, str]) -> Mapping[str, str]:
    """The environment in which this node's launcher was started, of which it has made the ``env`` of this rank."""
    for parent in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):
            if RUN_ID not in (theirs := parent.environ()):
                return theirs
    return env


def _reach(world: World, store: KeyValueStore, host: HostFacts) -> tuple[ReachFacts, ...]:
    """Whether this node reaches each other one, at every address of it. All nodes call it at the same time."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    # Connections wait in the kernel's queue, and need nobody who accepts them.
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=4096) as server:
        port, own = str(server.getsockname()[1]), [a for a in host.addresses() if not a.startswith("fe80")]
        store.set(f"node/{world.node_rank}", " ".join([host.host, port, *own]))
        others = [store.get(f"node/{n}", _TIMEOUT_S).split() for n in range(world.nodes) if n != world.node_rank]
        ways = [(to, address, int(port)) for to, port, *addresses in others for address in addresses]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            seconds = pool.map(_connect, (address for _, address, _ in ways), (port for _, _, port in ways))
            found = tuple(ReachFacts(host.host, to, a, s) for (to, a, _), s in zip(ways, seconds, strict=True))
        store.set(f"reached/{world.node_rank}", "")
        for node in range(world.nodes):
            store.get(f"reached/{node}", _TIMEOUT_S)
    return found


def _connect(address: str, port: int) -> float | None:
    began = time.monotonic()
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_CONNECT_S):
        return time.monotonic() - began
    return None


def _together(group: Group, world: World, place: Path, locked: int) -> list[RankFacts]:
    """What each rank sees of the others. Collective."""
    mark = place / "visible"
    if group.leads:
        _lock(locked)
        mark.write_text("", encoding="utf-8")
    group.barrier(_WHAT)
    began, seen_s = time.monotonic(), None
    while seen_s is None and time.monotonic() - began < _VISIBLE_S:
        seen_s = time.monotonic() - began if mark.name in os.listdir(place) else None
        time.sleep(0.0 if seen_s is not None else 0.02)
    lock = "refused" if group.leads else _lock(locked)
    group.barrier(_WHAT)
    clocks = group.gather_objects(time.time(), _WHAT)
    on_gpu, device = group.device.type == "cuda", group.device
    own = RankFacts(
        rank=group.rank,
        node=world.node_rank,
        host=socket.gethostname(),
        device=torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.backends.cpu.get_cpu_capability()}",
        on_gpu=on_gpu,
        backend="gloo" if group.over_cpu else "nccl",
        nccl=".".join(map(str, nccl_version())) if on_gpu else "",
        threads=torch.get_num_threads(),
        cpus=tuple(sorted(usable_cpus())),
        interface=os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(address_towards(world.address, world.port)),
        bits=_bits(device),
        clock_s=clocks[group.rank] - clocks[0],
        seen_s=seen_s,
        lock=lock,
    )
    return group.gather_objects(own, _WHAT)


def nccl_version() -> tuple[int, ...]:
    """Of the NCCL that torch calls, such as ``(2, 30, 7)``; torch itself says with which NCCL torch was built."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except OSError:  # torch contains NCCL
        return tuple(torch.cuda.nccl.version())
    major, rest = divmod(number.value, 10_000)
    return (major, *divmod(rest, 100))


def _lock(file: int) -> str:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return "refused"
    except OSError as error:
        return str(error)
    return "granted"


def _bits(device: torch.device) -> str:
    """The digest of a small step's gradients, which equal devices with equal libraries compute alike."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 3, 16, 16, generator=generator, device="cpu").to(device)
    kernel = torch.randn(8, 3, 3, 3, generator=generator, device="cpu").to(device).requires_grad_()
    weights = torch.randn(8 * 14 * 14, 8, generator=generator, device="cpu").to(device).requires_grad_()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False):
        loss = (torch.conv2d(images, kernel).relu().flatten(1) @ weights).square().mean()
        gradients = torch.autograd.grad(loss, (kernel, weights))
    torch.set_num_threads(threads)
    values = torch.cat([gradient.flatten() for gradient in gradients]).cpu()
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:12]


if __name__ == "__main__":
    main(int(sys.argv[1]))
