"""The group of all ranks: small values, agreement between ranks, and more process groups, over the CPU."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Final, Literal, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store  # what torch.distributed exports, with types
from torch.distributed.rendezvous import rendezvous

from lockstep.collectives.gathered_objects import gathered
from lockstep.collectives.gloo_threads import destroy_process_groups
from lockstep.errors import DifferentCalls, MismatchError, PeerLost, RendezvousError, WorldError
from lockstep.network_interface import INTERFACES, address_towards, interface_of, is_loopback
from lockstep.peer_failure import is_peer_failure
from lockstep.world import World

T = TypeVar("T")


@contextlib.contextmanager
def translating_peer_errors(what: str) -> Iterator[None]:
    """A context in which errors of the transport become `PeerLost` errors that name the operation ``what``."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PeerLost) or not is_peer_failure(error):
            raise
        said = str(error).splitlines()[0]
        raise PeerLost(f"another rank exited or stopped responding during {what}: {said}") from error


class KeyValueStore:
    """A connection to the ranks' key-value store, for one thread at a time; its keys have a prefix of their own."""

    def __init__(self, store: Store, name: str) -> None:
        self._store: Final = PrefixStore(name, store)

    def set(self, key: str, value: str) -> None:
        """Store ``value``: every rank can read it under ``key`` from now on."""
        with translating_peer_errors(f"post of {key}"):
            self._store.set(key, value)

    def is_set(self, key: str) -> bool:
        """Whether some rank has stored a value under ``key``."""
        with translating_peer_errors(f"look at {key}"):
            return bool(self._store.check([key]))

    def delete(self, key: str) -> None:
        """Remove the value under ``key``."""
        with translating_peer_errors(f"removal of {key}"):
            self._store.delete_key(key)

    def get(self, key: str, timeout_s: float) -> str:
        """Wait for the value under ``key``, and return it.

        Raises:
            PeerLost: if no rank stores a value within ``timeout_s``.
        """
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
            return self._store.get(key).decode()
        except RuntimeError as error:
            raise PeerLost(f"no rank posted {key} within {timeout_s:g} s: {str(error).splitlines()[0]}") from error


class Group:
    """The connected ranks of a world.

    A method that says *Collective* must be called by every rank of the group, in the same order. The text that names a
    call is compared, so that ranks which make different calls get an error instead of each other's values.
    """

    def __init__(
        self,
        world: World,
        device: torch.device,
        store: Store,
        control: dist.ProcessGroup | None,
        timeout_s: float,
        process_group: dist.ProcessGroup | None = None,
        nodes: Sequence[int] = (0,),
        *,
        over_cpu: bool = True,
        connections: Connections | None = None,
    ) -> None:
        self.rank: Final = world.rank
        self.size: Final = world.size
        self.on_one_machine: Final = world.local_size == world.size
        self.timeout_s: Final = timeout_s  #: how long a collective waits for the other ranks
        self.device: Final = device  #: where this rank computes
        self.over_cpu: Final = over_cpu  #: whether tensors travel through the CPU's memory, over gloo
        #: torch's process group for tensors on the device; None: the default one
        self.process_group: Final = process_group
        self.nodes: Final = tuple(nodes)  #: the node of each rank
        self._world: Final = world
        self._store: Final = store
        self._control: Final = control
        self._connections: Final = connections or Connections()

    @property
    def backend(self) -> Literal["gloo", "nccl"]:
        """Torch's name of the transport for tensors on the device."""
        return "gloo" if self.over_cpu else "nccl"

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port at which the ranks of the world have met."""
        return self._world.address, self._world.port

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes for all."""
        return self.rank == 0

    def gather_objects(self, value: T, what: str) -> list[T]:
        """Each rank's ``value``, in the order of ranks. Collective.

        Values are pickled and go over the CPU, in about 1 ms: for small values and rare calls. Tensors of a GPU arrive
        on this rank's device.

        Raises:
            DifferentCalls: if ranks gather for different purposes, as when one rank calls inside ``if run.leads``.
            PeerLost: if a rank is gone or does not call in time.
        """
        if self._control is None:
            return [value]
        with translating_peer_errors(what):
            answers: list[tuple[str, T]] = gathered((what, value), self.size, self._control, self.device)
        calls = {rank: call for rank, (call, _) in enumerate(answers)}
        if len(set(calls.values())) > 1:
            raise DifferentCalls(
                f"ranks make different calls: {_by_value(calls)}. Every rank must make the same calls in the same "
                "order: look for a call inside `if run.leads`, or for loops of different length"
            )
        return [answer for _, answer in answers]

    def broadcast_object(self, value: T, what: str) -> T:
        """Rank 0's ``value``. Collective."""
        return self.gather_objects(value, what)[0]

    def check_equal(self, what: str, value: object) -> None:
        """Check that ``value`` is the same on every rank. Collective.

        Raises:
            MismatchError: naming the ranks that differ and what they hold.
        """
        values = dict(enumerate(self.gather_objects(repr(value), f"comparison of {what}")))
        if len(set(values.values())) > 1:
            raise MismatchError(
                f"{what} differs between ranks: {_by_value(values)}. All ranks must run the same script on the same "
                "data with the same settings"
            )

    def sum_int(self, value: int, what: str) -> int:
        """The sum of every rank's integer, in about 0.3 ms. Collective."""
        return self.begin_sum([value], what)()[0]

    def begin_sum(self, values: Sequence[int], what: str) -> Callable[[], list[int]]:
        """Begin the sums of every rank's integers, equally many on each; the returned function waits. Collective.

        The integers go over the CPU in about 0.3 ms, in which this rank may do other work; no GPU is waited for.
        """
        if self._control is None:
            return lambda: list(values)
        totals = torch.tensor(values, dtype=torch.int64, device="cpu")
        with translating_peer_errors(what):
            work = dist.all_reduce(totals, group=self._control, async_op=True)

        def finish() -> list[int]:
            with translating_peer_errors(what):
                work.wait()
            sums: list[int] = totals.tolist()
            return sums

        return finish

    def sum_tensor(self, value: torch.Tensor, what: str) -> torch.Tensor:
        """The sum of each rank's tensor, with the same bits on every rank. Collective."""
        total = value.detach().to(self.device, copy=True)
        if self._control is not None:
            with translating_peer_errors(what):
                dist.all_reduce(total, group=self.process_group)
        return total

    def send(self, tensor: torch.Tensor, to: int, what: str) -> None:
        """Send ``tensor``, of any type, contiguous and on the CPU, to the rank ``to``, which must call `receive`."""
        self.begin_send(tensor, to, what)()

    def begin_send(self, tensor: torch.Tensor, to: int, what: str, tag: int = 0) -> Callable[[], None]:
        """Begin to `send`; the returned function waits until the tensor has arrived. Other tags may overtake it."""
        assert self._control is not None
        with translating_peer_errors(what):
            work = dist.isend(tensor.view(-1).view(torch.uint8), group=self._control, group_dst=to, tag=tag)

        def finish() -> None:
            with translating_peer_errors(what):
                if work is not None:  # None for a rank outside of the group
                    work.wait()

        return finish

    def receive(self, tensor: torch.Tensor, source: int, what: str, tag: int = 0) -> None:
        """Fill ``tensor``, of any type, contiguous and on the CPU, with the tensor sent by ``source`` with ``tag``."""
        assert self._control is not None
        with translating_peer_errors(what):
            dist.recv(tensor.view(-1).view(torch.uint8), group=self._control, group_src=source, tag=tag)

    def broadcast_bytes(self, data: torch.Tensor, source: int, what: str) -> None:
        """Fill ``data``, contiguous bytes on the CPU, with the ``data`` of the rank ``source``. Collective."""
        if self._control is not None:
            with translating_peer_errors(what):
                dist.broadcast(data, group=self._control, group_src=source)

    def barrier(self, what: str) -> None:
        """Wait until every rank has called `barrier`. Collective."""
        self.gather_objects(None, what)

    def store(self, name: str, *, anew: bool = True) -> KeyValueStore:
        """A new connection to the key-value store, for one thread; ranks with the same ``name`` see the same keys.

        Unless ``anew``, it is the connection that the group has, for the thread that has made the group: where the
        store may be gone with its rank, torch tries for minutes to make another one.
        """
        own: Store = self._store.clone() if anew else self._store  # type: ignore[attr-defined]
        return KeyValueStore(own, name)

    def anew(self, world: World) -> Group:
        """A group with the same connections for another run of the same ``world``, with its own keys. Collective."""
        self._connections.give_back()
        return Group(
            world,
            self.device,
            PrefixStore(f"run/{next(_group_numbers)}", self._store),
            self._control,
            self.timeout_s,
            self.process_group,
            self.nodes,
            over_cpu=self.over_cpu,
            connections=self._connections,
        )

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """A new group of ``ranks`` of this group, including this rank; each of ``ranks`` must call `subgroup`.

        Its ranks are numbered from 0, in the order of this group. If subgroups overlap, ranks must make them in the
        same order.
        """
        members = sorted(ranks)
        same_node = [rank for rank in members if self.nodes[rank] == self.nodes[self.rank]]
        world = replace(
            self._world,
            rank=members.index(self.rank),
            size=len(members),
            local_rank=same_node.index(self.rank),
            local_size=len(same_node),
            node_rank=sorted({self.nodes[rank] for rank in members}).index(self.nodes[self.rank]),
            nodes=len({self.nodes[rank] for rank in members}),
        )
        if len(members) == 1:
            return Group(world, self.device, HashStore(), None, self.timeout_s, over_cpu=self.over_cpu)
        process_group = self.new_process_group(members)
        # Over NCCL the process group has CPU connections, too. Over gloo, other threads would mix their sums with these
        # objects.
        control = self.new_process_group(members, "gloo") if self.over_cpu else process_group
        store = PrefixStore(f"part/{'-'.join(map(str, members))}/{next(_subgroup_numbers)}", self._store)
        nodes = [self.nodes[rank] for rank in members]
        return Group(
            world,
            self.device,
            store,
            control,
            self.timeout_s,
            process_group,
            nodes,
            over_cpu=self.over_cpu,
            connections=self._connections,
        )

    def new_process_group(self, ranks: Sequence[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
        """A new process group of torch for ``ranks`` of this group (None: all); each of ``ranks`` must call the method.

        With ``backend`` "gloo" or "nccl" the process group carries only tensors on the CPU or on GPUs, and opens
        connections only for these; with None, both tensors on the device and on the CPU.

        Raises:
            PeerLost: if a rank is gone.
        """
        # Torch knows ranks by their numbers in the whole world.
        numbers = range(self.size) if self.process_group is None else dist.get_process_group_ranks(self.process_group)
        members = tuple(numbers[rank] for rank in (range(self.size) if ranks is None else ranks))
        with translating_peer_errors("the opening of a process group"):
            return self._connections.take(members, backend, self.timeout_s)

    def close(self) -> None:
        """Close all connections of the whole world's group. Ranks that still wait for this rank get an error.

        Within `keeping_connections` the connections stay, for the next group.
        """
        if self._control is not None and self._connections not in _kept:
            destroy_process_groups()


class Connections:
    """Torch's process groups of a world.

    If several runs follow each other, each asks for the same groups in the same order, and gets those of the run
    before: opening a process group costs tens of milliseconds.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, ...], str | None], list[dist.ProcessGroup]] = {}
        self._taken: Counter[tuple[tuple[int, ...], str | None]] = Counter()
        self.world: Group | None = None  #: the group that uses the connections now
        self.of: tuple[object, ...] = ()  #: arguments with which the connections were opened

    def take(self, members: tuple[int, ...], backend: str | None, timeout_s: float) -> dist.ProcessGroup:
        """A process group that this run has not taken yet; each of the ``members`` must call `take`."""
        key = (members, backend)
        made = self._made.setdefault(key, [])
        self._taken[key] += 1
        if len(made) < self._taken[key]:
            with _unbound():
                made.append(
                    dist.new_group(
                        list(members),
                        timeout=timedelta(seconds=timeout_s),
                        backend=backend,
                        use_local_synchronization=True,
                    )
                )
        return made[self._taken[key] - 1]

    def give_back(self) -> None:
        """Let the next run take all process groups again."""
        self._taken.clear()

    def close(self, *, abort: bool = False) -> None:
        """Close all connections; with ``abort``, as after an error, without waiting for collectives on GPUs."""
        self._made.clear()
        self.give_back()
        if self.world is not None:
            self.world, self.of = None, ()
            destroy_process_groups(abort=abort)


@contextlib.contextmanager
def _unbound() -> Iterator[None]:
    """A context in which the world's process group has no device of its own.

    From a process group with a device, torch makes a group over NCCL by a split, which all ranks of the world must
    enter, also those that are no members. Only members call this code.
    """
    world = dist.group.WORLD
    bound = None if world is None else world.bound_device_id
    if world is None or bound is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


_kept: list[Connections] = []


@contextlib.contextmanager
def keeping_connections() -> Iterator[Connections]:
    """A context in which the connections of a closed group stay open for the next `open_group` of the same world.

    Each group must be closed before the next is opened. All ranks must have left the last group without an error;
    otherwise all ranks must call `Connections.close`.
    """
    connections = Connections()
    _kept.append(connections)
    failed = True
    try:
        yield connections
        failed = False
    finally:
        _kept.remove(connections)
        connections.close(abort=failed)


def open_group(world: World, device: torch.device, timeout_s: float, *, shares_gpu: bool = False) -> Group:
    """Connect the ranks of ``world``, and return their group. Collective.

    A world of one rank opens no connection. If ranks share a GPU (``shares_gpu``, equal on all ranks), tensors go over
    gloo, since NCCL refuses shared GPUs.

    Raises:
        WorldError: if this process already has a process group.
        RendezvousError: if the ranks do not meet within ``timeout_s``.
    """
    wanted = (world.rank, world.size, world.address, world.port, str(device), timeout_s, shares_gpu)
    kept = _kept[-1] if _kept else None
    if kept is not None and kept.world is not None:
        if kept.of == wanted:
            return kept.world.anew(world)
        kept.close()
    if dist.is_initialized():
        raise WorldError(
            "this process has called init_process_group already; Run opens the group itself: remove that call"
        )
    if world.size == 1:
        return single_rank_group(device)
    try:
        socket.getaddrinfo(world.address, world.port)
    except OSError as error:
        # torch would try again and again until the deadline.
        raise RendezvousError(
            f"cannot resolve {world.address!r} from {socket.gethostname()} ({error.strerror}); MASTER_ADDR must be a "
            "name or address of rank 0's machine that every machine knows"
        ) from None
    timeout = timedelta(seconds=timeout_s)
    over_cpu = device.type == "cpu" or shares_gpu
    backend = "gloo" if over_cpu else "cpu:gloo,cuda:nccl"
    try:
        root_store = _store_at(world.address, world.port, world.rank, world.size, timeout)
        store = PrefixStore(f"lockstep/{next(_group_numbers)}", root_store)
        if world.nodes > 1:
            _lead_gloo_to_other_nodes(world, store)
        if not over_cpu:
            refuse_shared_gpus(world, str(torch.cuda.get_device_properties(device).uuid), store)
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            device_id=None if over_cpu else device,
        )
        control = dist.new_group(backend="gloo", timeout=timeout)
        nodes = gathered(world.node_rank, world.size, control, device)
    except WorldError:
        raise
    except (RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"rank {world.rank} of {world.size} could not meet the others at {world.address}:{world.port} "
            f"(as {world.launcher} says): {_cause(str(error))}"
        ) from error
    group = Group(world, device, store, control, timeout_s, nodes=nodes, over_cpu=over_cpu, connections=kept)
    if kept is not None:
        kept.world, kept.of = group, wanted
    return group


def refuse_shared_gpus(world: World, own: str, store: Store) -> None:
    """Check that no two ranks use the same GPU or MIG part; ``own`` is the id of this rank's GPU. Collective.

    NCCL would report only a wrong use; from 2.30 on a variable tells NCCL that sharing is intended.

    Raises:
        WorldError: if two ranks do.
    """
    store.set(f"gpu/{world.rank}", own)
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return
    ids = [each.decode() for each in store.multi_get([f"gpu/{rank}" for rank in range(world.size)])]
    ranks = [rank for rank, each in enumerate(ids) if each == own]
    if len(ranks) > 1:
        raise WorldError(
            f"ranks {', '.join(map(str, ranks))} use the same GPU, {own}: start one rank for each GPU that a process "
            "sees (of a GPU divided by MIG it sees one part), or share it, slowly, with --rehearse"
        )


def _cause(said: str) -> str:
    """The first line of an error of torch's, and the last line, in which NCCL names the cause."""
    first, *others = said.strip().splitlines()
    return f"{first} ({others[-1].strip()})" if others and "NCCL" in said else first


def _lead_gloo_to_other_nodes(world: World, store: Store) -> None:
    """Let gloo use the network interface towards the other nodes, unless a variable names one. Collective.

    By default gloo uses the interface of the host's own name, which means the loopback on Debian, and any network
    elsewhere.
    """
    own = address_towards(world.address, world.port)
    store.set(f"address/{world.rank}", own)
    if any(name in os.environ for name in INTERFACES):
        return
    if is_loopback(own):
        # Rank 0's machine, which learns its interface from the other ranks' addresses; or all ranks are on it.
        told = store.multi_get([f"address/{rank}" for rank in range(world.size)])
        far = [address for each in told if not is_loopback(address := each.decode())]
        own = address_towards(far[0], world.port) if far else own
    if not is_loopback(own) and (interface := interface_of(own)):
        os.environ.update(dict.fromkeys(INTERFACES, interface))


# A process may open several groups in turn, as when a search makes several runs. Each group sees only its own keys, and
# one store serves all groups: a new store at the same port could be confused with the old one, which may still run.
_group_numbers: Final = itertools.count()
_subgroup_numbers: Final = itertools.count()


@functools.cache
def _store_at(address: str, port: int, rank: int, size: int, timeout: timedelta) -> Store:
    """The store of the world that the environment describes; the other arguments distinguish worlds in the cache."""
    store: Store = next(iter(rendezvous("env://", rank, size, timeout=timeout)))[0]
    return store


def open_store(world: World, name: str, timeout_s: float) -> KeyValueStore:
    """A connection to the store of ``world``, which has several ranks, without a group. See `Group.store`."""
    timeout = timedelta(seconds=timeout_s)
    own: Store = _store_at(world.address, world.port, world.rank, world.size, timeout).clone()  # type: ignore[attr-defined]
    return KeyValueStore(own, name)


def single_rank_group(device: torch.device | None = None) -> Group:
    """A group of this rank alone, without any connection."""
    return Group(World(0, 1, 0, 1, 0, 1), device or torch.device("cpu"), HashStore(), None, 0.0)


def _by_value(of: dict[int, str]) -> str:
    """The ranks of each value, as ``rank 2: 1797; ranks 0, 1, 3: 1796``; the fewest first, as likely culprits."""
    parts = []
    for value, _ in reversed(Counter(of.values()).most_common()):
        ranks = [rank for rank, held in of.items() if held == value]
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {value}")
    return "; ".join(parts)
